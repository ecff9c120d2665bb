"""ASGI middleware inside vLLM (`--middleware course_guard.Guard`): all paths but a few need the API key.

vLLM's own check covers `/v1` only: `/invocations` would run the model for anybody. The server's interpreter imports
this file, and nbutils is not installed there: it imports the standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Any

OPEN = ("/health", "/version", "/docs", "/redoc", "/openapi.json")  # GET only: they reveal neither model nor use
REFUSAL = b'{"error": {"message": "the API key is missing or wrong"}}'
REFUSAL_HEADERS = [
    (b"content-type", b"application/json"),
    (b"www-authenticate", b"Bearer"),
]


class Guard:
    """Answers 401 to a request without the key, which comes through the environment."""

    def __init__(self, app: Any) -> None:
        key = os.environ["VLLM_API_KEY"]
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass an allowed request on, refuse any other."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or self.allows(scope):
            await self.app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": REFUSAL_HEADERS})
            await send({"type": "http.response.body", "body": REFUSAL})

    def allows(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request carries the key, or asks for nothing that needs one."""
        only_reads = scope.get("method") in ("GET", "HEAD")
        if only_reads and scope["path"] in OPEN:
            return True
        headers = dict(scope["headers"])
        return hmac.compare_digest(headers.get(b"authorization", b""), self.expected)
