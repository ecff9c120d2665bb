"""Serving a merged model: an environment of its own, a server process that never outlives its kernel, a small client.

Not here: importing vllm into the kernel that trains, or choosing vLLM's flags (they stand in the lesson).
"""

from __future__ import annotations

from nbutils.serving.client import Parity, ask, compare, require_parity
from nbutils.serving.environment import ServingEnvironment, ensure_environment
from nbutils.serving.ports import preferred_port, public_address
from nbutils.serving.running import Running, leave_note, running
from nbutils.serving.server import Server

__all__ = [
    "Parity", "Running", "Server", "ServingEnvironment", "ask", "compare", "ensure_environment", "leave_note",
    "preferred_port", "public_address", "require_parity", "running",
]  # fmt: skip
