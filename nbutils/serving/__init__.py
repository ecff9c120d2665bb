"""Serving a model: an engine in an environment of its own, a server that ends with its kernel, a small client.

Not here: importing vllm into the kernel that trains, or choosing vLLM's flags (they are in the lesson).
"""

from __future__ import annotations

from nbutils.serving.client import ask, compare, require_parity
from nbutils.serving.engine import ServingEnvironment, ensure_environment, flags_for, free_card
from nbutils.serving.ports import preferred_port, public_address
from nbutils.serving.server import Server
from nbutils.serving.state import Running, leave_note, make_way, running

__all__ = [
    "Running", "Server", "ServingEnvironment", "ask", "compare", "ensure_environment", "flags_for", "free_card",
    "leave_note", "make_way", "preferred_port", "public_address", "require_parity", "running",
]  # fmt: skip
