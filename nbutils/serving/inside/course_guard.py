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


class Guard:
    """Answers 401 to a request without the key, which comes through the environment."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass an allowed request on, refuse any other."""
        if scope["type"] not in ("http", "websocket") or self.allows(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            body = b'{"error": {"message": "the API key is missing or wrong"}}'
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def allows(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request carries the key, or asks for nothing that needs one."""
        if scope.get("method") in ("GET", "HEAD") and scope["path"] in OPEN:
            return True
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected)
