"""The network as it is here: AutoDL's proxies, which model hub answers fastest, and files that are downloaded from it.

Every wait is bounded, name lookups included; `HF_HUB_OFFLINE=1` means no call at all. huggingface_hub reads the
variables set here when it is imported, which must be later.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nbutils.errors import require_choice
from nbutils.files import fs_root, sha256
from nbutils.language import tr
from nbutils.masking import mask_secrets

if TYPE_CHECKING:
    from nbutils.platforms import Platform

HUB = "https://huggingface.co"
SOURCES = {"hub": HUB, "hf-mirror": "https://hf-mirror.com", "modelscope": "https://www.modelscope.cn"}
CONFIG_FILE = {  # the same small file, at the address from which each of them is downloaded
    "hub": "/Qwen/Qwen2.5-0.5B-Instruct/resolve/main/config.json",
    "hf-mirror": "/Qwen/Qwen2.5-0.5B-Instruct/resolve/main/config.json",
    "modelscope": "/api/v1/models/Qwen/Qwen2.5-0.5B-Instruct/repo?Revision=master&FilePath=config.json",
}
SECONDS = 4.0  # all probes of one start together
TURBO_SECONDS = 5.0
REFUSED = (403, 407, 429, 451)
FOUND = "NBUTILS_MIRROR_FOUND"  # the source that was chosen, so that child processes need not measure again
NOTHING = "nothing"
PARTIAL = ".partial"  # the end of the name of a file that is being downloaded
PATIENCE = 30.0  # seconds a download waits for the next bytes
PIECE = 2**18  # bytes written at a time: what a kill may lose
ATTEMPTS = 5  # in a row that bring nothing
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
THIS_MACHINE = ("127.0.0.1", "localhost")
NEARBY = (  # faster without AutoDL's proxy: ModelScope with its large files, the usual mirrors of pip, chat robots
    "hf-mirror.com", "modelscope.cn", "aliyuncs.com", "autodl.com", "aliyun.com", "edu.cn", "huaweicloud.com",
    "tencent.com", "tencentyun.com", "feishu.cn", "dingtalk.com", "weixin.qq.com",
)  # fmt: skip


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """For requests that carry a secret: urllib would send it on to wherever an answer points."""

    def redirect_request(self, *about: Any) -> None:
        """No other address is asked: the answer counts as an error."""


def prepare_network(platform: Platform, probe: bool = True) -> list[str]:
    """Set proxies and mirror before huggingface_hub is imported; what to print. Nothing is measured without `probe`."""
    lines = _use_turbo()
    mirror = os.environ.get("NBUTILS_MIRROR", "")
    if mirror:
        require_choice("NBUTILS_MIRROR", mirror, SOURCES)
    if offline():
        lines.append(tr("offline, as HF_HUB_OFFLINE says: models come from folders and the cache"))
    elif not chosen() and (own := os.environ.get("HF_ENDPOINT")):
        lines.append(tr("models come from {source}, as HF_ENDPOINT says", source=own))
    elif mirror:
        _use(mirror)
        lines.append(tr("models come from {source}, as NBUTILS_MIRROR says", source=mirror))
    elif probe and chosen() in ("", NOTHING):
        lines += _choose(platform)
    return [mask_secrets(tr("network   {line}", line=line)) for line in lines]


def sources() -> dict[str, str]:
    """The addresses to download models from, by name, in the order to try; one alone if the learner named it."""
    if offline() or chosen() == NOTHING:
        return {}
    if not chosen() and (own := os.environ.get("HF_ENDPOINT")):
        return {"HF_ENDPOINT": own}
    if named := os.environ.get("NBUTILS_MIRROR"):
        return {named: SOURCES[named]}
    first = chosen() or "hub"
    return {first: SOURCES[first]} | SOURCES


def download(
    url: str, file: Path, size: int, checksum: str, advance: Callable[[int], object], token: str | None = None
) -> None:
    """Download a file, going on where a former attempt ended; it gets its name once size and sha256 are right.

    Without a `checksum` the size decides. `advance` is told the bytes as they come, a negative number if what was here
    comes again.
    """
    partial = file.with_name(f"{file.name}{PARTIAL}")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    failed = 0
    while (have := partial.stat().st_size) < size:
        advance(0)  # it ends a download that was given up, also where no bytes come
        request = urllib.request.Request(url, headers={"User-Agent": "nbutils", "Range": f"bytes={have}-"})
        if token:  # urllib keeps it from the address of a redirect
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        problem: Exception = HTTPException("the connection ended early")  # urllib itself is silent about it
        try:
            _append(request, partial, size, advance)
        except (OSError, HTTPException) as raised:
            problem = raised
        failed = 0 if partial.stat().st_size > have else failed + 1
        if failed == ATTEMPTS:
            raise problem
        time.sleep(failed)
    if partial.stat().st_size != size or (checksum and sha256(partial) != checksum):
        partial.unlink()
        raise OSError(f"{file.name} did not arrive as it was sent")
    with open(partial, "rb") as whole:
        os.fsync(whole.fileno())
    os.replace(partial, file)


def _append(request: urllib.request.Request, partial: Path, size: int, advance: Callable[[int], object]) -> None:
    """Write what one request brings behind what is here, no more than was announced."""
    opener = urllib.request.build_opener()
    with opener.open(request, timeout=PATIENCE) as answer, open(partial, "ab") as out:
        if answer.status != 206:  # the whole file comes, or a page of a proxy
            if answer.length not in (None, size):
                raise OSError(f"{answer.length} bytes came instead of {size}")
            advance(-partial.stat().st_size)
            out.truncate(0)
        while piece := answer.read(PIECE):
            out.write(piece)
            advance(len(piece))
            if partial.stat().st_size > size:
                break


def offline() -> bool:
    """Whether the learner forbade the network."""
    values = [os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return any(value in ("1", "TRUE", "YES", "ON") for value in values)


def chosen() -> str:
    """Where models come from ("hub", "hf-mirror", "modelscope", "nothing" if none answered); "" if not known yet."""
    if FOUND not in os.environ and os.environ.get("HF_ENDPOINT"):  # set by the learner, not by this module
        return ""
    return os.environ.get("NBUTILS_MIRROR") or os.environ.get(FOUND, "")


def hub_online() -> bool:
    """Whether the model hub (or the mirror in HF_ENDPOINT) answers, asked briefly; not at all if none did just now."""
    if offline() or chosen() == NOTHING:
        return False
    return answers(os.environ.get("HF_ENDPOINT", HUB), SECONDS)


def answers(url: str, seconds: float) -> bool:
    """Whether a web address answers at all within the given time."""
    return bool(measure({"it": url}, seconds))


def measure(urls: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Seconds until each address answered, all asked at once; those that did not in time are left out."""
    times: dict[str, float] = {}
    began = time.monotonic()

    def ask(name: str, url: str) -> None:
        opener = urllib.request.build_opener()  # urlopen would keep the proxies of its first call
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "nbutils"})
            with opener.open(request, timeout=seconds) as answer:
                status = int(answer.status)
        except urllib.error.HTTPError as problem:
            status = problem.code
        except (OSError, ValueError, HTTPException):
            return
        if status < 500 and status not in REFUSED:
            times[name] = time.monotonic() - began

    # daemons and not a pool: a name lookup knows no timeout, and nobody must wait for it when the lesson ends
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in urls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(began + seconds - time.monotonic(), 0))
    return dict(times)


def _choose(platform: Platform) -> list[str]:
    """Measure, and take the hub if it needs at most twice the best time, else the fastest."""
    urls = {name: base + CONFIG_FILE[name] for name, base in SOURCES.items()}
    if platform.entry.china:
        times = measure(urls, SECONDS)
    else:  # elsewhere the mirrors are far: asked only if the hub is silent
        times = measure({"hub": urls.pop("hub")}, SECONDS / 2) or measure(urls, SECONDS / 2)
    if not times:
        _use(NOTHING)
        return [tr("neither the hub nor a mirror answers: models come from folders and the cache")]
    name = min(times, key=times.__getitem__)
    if "hub" in times and times["hub"] <= 2 * times[name]:
        name = "hub"
    only_mirrors = "hf-mirror" in times and "hub" not in times
    _use("hf-mirror" if only_mirrors else name)  # for what ModelScope does not have
    os.environ[FOUND] = name
    if name == "hub" and not platform.entry.china:
        return []
    return [tr("models come from {source}, which answers best (NBUTILS_MIRROR overrides)", source=name)]


def _use(name: str) -> None:
    """Point huggingface_hub to a source; a mirror gets no token, and Xet would go past it."""
    mirrored = {"HF_ENDPOINT": SOURCES["hf-mirror"], "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    if name == "hf-mirror":
        os.environ |= mirrored
    elif FOUND in os.environ:  # set here before
        for variable in mirrored:
            os.environ.pop(variable, None)
    os.environ[FOUND] = name


def _use_turbo() -> list[str]:
    """AutoDL's proxies for GitHub and the hub, as its script sets them; a learner's own proxies stay."""
    script = fs_root() / "etc/network_turbo"
    direct = list(THIS_MACHINE)
    lines = []
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        if os.environ.get("NBUTILS_TURBO") == "off" or offline() or not script.is_file():
            return []
        try:
            variables = _variables_of(script)
        except (OSError, ValueError, subprocess.SubprocessError):
            return [tr("{script} failed: GitHub and the hub are reached directly", script=script)]
        direct += variables.pop("no_proxy", "").split(",")
        os.environ |= variables
        lines.append(tr("proxies of {script} for GitHub and the hub (NBUTILS_TURBO=off leaves them)", script=script))
    if script.is_file():  # the proxies in the environment are these, set by the learner or here
        direct += NEARBY
    for name in ("no_proxy", "NO_PROXY"):  # to this machine for the server of lesson 05, to what is near for its speed
        hosts = [*os.environ.get(name, "").split(","), *direct]
        stripped = [host.strip() for host in hosts if host.strip()]
        os.environ[name] = ",".join(dict.fromkeys(stripped))
    return lines


def _variables_of(script: Path) -> dict[str, str]:
    """The proxies that a script sets, each of which answers, and its no_proxy."""
    command = ["bash", "-c", 'source "$0" >/dev/null 2>&1 </dev/null; env -0', str(script)]
    output = subprocess.check_output(command, timeout=TURBO_SECONDS, stdin=subprocess.DEVNULL)
    variables = {}
    for entry in output.decode("utf-8", "replace").split("\0"):
        name, _, value = entry.partition("=")
        if name == "no_proxy" or name.lower() in PROXIES:
            variables[name] = value
    proxies = {value for name, value in variables.items() if name != "no_proxy"}
    for url in map(urlsplit, proxies):
        socket.create_connection((url.hostname, url.port or 80), TURBO_SECONDS).close()
    return variables
