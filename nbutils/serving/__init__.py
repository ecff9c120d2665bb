"""Serving a model: an engine in an environment of its own, a server that ends with its kernel, a small client.

Not here: importing vllm into the kernel that trains, or choosing vLLM's flags (they are in the lesson).
"""

from __future__ import annotations

from nbutils.serving.client import AnswerParity, ask, compare
from nbutils.serving.engine import ServingEnvironment, ensure_environment, flags_for, free_gpu_memory
from nbutils.serving.ports import preferred_port, public_address
from nbutils.serving.server import Server
from nbutils.serving.state import Running, running, stop_leftover_servers, write_server_note

__all__ = [
    "AnswerParity", "Running", "Server", "ServingEnvironment", "ask", "compare", "ensure_environment", "flags_for",
    "free_gpu_memory", "preferred_port", "public_address", "running", "stop_leftover_servers", "write_server_note",
]  # fmt: skip
