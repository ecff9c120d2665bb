"""A model hub and ModelScope on this machine: the API calls and file downloads that a model takes, with ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "c0ffee" + "0" * 34
PIECE = 1 << 16


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository; `delay` is the pause after each 64 KiB, `asked` what was asked (and from)."""

    daemon_threads = True

    def __init__(self, repo: str, files: dict[str, bytes], delay: float = 0.0, status: int = 200) -> None:
        self.repo, self.files, self.delay, self.status = repo, files, delay, status
        self.asked, self.sent = list[str](), 0
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Whoever asked was killed: nothing to tell."""


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0").partition("-")[0]) or 0)
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        repo, files = self.server.repo, self.server.files
        self.server.asked.append(f"{self.command} {self.path} {start}")
        if self.server.status != 200:
            return self.reply(self.server.status, b"")
        if path == f"/api/v1/models/{repo}/repo/files":  # ModelScope
            listed = [{"Path": n, "Size": len(b), "Sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()]
            return self.reply(200, json.dumps({"Code": 200, "Data": {"Files": listed}}).encode())
        if path == f"/api/v1/models/{repo}/repo":
            return self.file(query["FilePath"][0], start)
        if found := re.fullmatch(rf"/{repo}/resolve/[^/]+/(.+)", path):
            return self.file(found[1], start)
        if path.startswith(f"/api/models/{repo}/tree/"):
            return self.reply(
                200, json.dumps([self.about(name) | {"type": "file", "path": name} for name in files]).encode()
            )
        if path == f"/api/models/{repo}" or path.startswith(f"/api/models/{repo}/revision/"):
            siblings = [self.about(name) | {"rfilename": name} for name in files]
            return self.reply(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        return self.reply(404, b"")

    do_HEAD = do_GET

    def about(self, name: str) -> dict[str, Any]:
        body = self.server.files[name]
        found: dict[str, Any] = {"size": len(body), "oid": self.etag(name), "blobId": self.etag(name)}
        if name.endswith(".safetensors"):
            lfs = {"oid": self.etag(name), "sha256": self.etag(name), "size": len(body), "pointerSize": 130}
            found |= {"lfs": lfs}
        return found

    def etag(self, name: str) -> str:
        return hashlib.sha256(self.server.files[name]).hexdigest()

    def file(self, name: str, start: int) -> None:
        if name not in self.server.files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        tags = {"ETag": f'"{self.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        body = self.server.files[name]
        return self.reply(206 if start else 200, body[start:], tags)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(body) if self.command == "GET" else 0, PIECE):
            self.wfile.write(body[at : at + PIECE])
            self.server.sent += len(body[at : at + PIECE])
            time.sleep(self.server.delay)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""
