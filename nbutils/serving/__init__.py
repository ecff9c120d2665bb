"""Serving a merged model: an environment of its own, a server process that never outlives its kernel, a small client.

Not here: importing vllm into the kernel that trains, or choosing vLLM's flags (they stand in the lesson).
"""

from __future__ import annotations

from nbutils.serving.card import free_card
from nbutils.serving.client import Parity, ask, compare, require_parity
from nbutils.serving.environment import ServingEnvironment, ensure_environment
from nbutils.serving.ports import preferred_port, public_address
from nbutils.serving.running import Running, leave_note, running
from nbutils.serving.server import Server
from nbutils.serving.stale import Stale, make_way, stale
from nbutils.serving.table import flags_for, row_for, tensor_parallel

__all__ = [
    "Parity", "Running", "Server", "ServingEnvironment", "Stale", "ask", "compare", "ensure_environment",
    "flags_for", "free_card", "leave_note", "make_way", "preferred_port", "public_address", "require_parity", "row_for",
    "running", "stale", "tensor_parallel",
]  # fmt: skip
