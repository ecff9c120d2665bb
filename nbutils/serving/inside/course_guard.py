"""Runs inside vLLM (`--middleware course_guard.Guard`): without the key, nothing but the signs of life is answered.

vLLM's own key guards some paths only: `/invocations` would run the model for anybody. The server's interpreter imports
this file, and nbutils is not installed there: it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

OPEN = ("/health", "/version", "/docs", "/redoc", "/openapi.json")  # GET only: nothing in them tells of model or use


class Guard:
    """ASGI middleware; the key comes by the environment, never by the command line."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, _digest(f"Bearer {os.environ['VLLM_API_KEY']}".encode())

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass on what is allowed, answer 401 to the rest."""
        if scope["type"] not in ("http", "websocket") or self.allows(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        kind = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": kind})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "the API key is missing or wrong"}}'})

    def allows(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request carries the key, or asks for nothing that needs one."""
        if scope.get("method") in ("GET", "HEAD") and scope["path"] in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(_digest(given), self.expected)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
