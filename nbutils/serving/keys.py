"""Who can reach a server, and the key they need: other users of a machine can too. Handed over by the environment only.

Not here: the port (ports), checking the key (vLLM, and inside/course_guard). A key is never printed, logged or written.
"""

from __future__ import annotations

import os
import secrets

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.serving import ports

VARIABLE = "VLLM_API_KEY"
LOOPBACK = platforms.network.THIS_MACHINE
NO_KEY = "none-is-checked"  # what a client sends where no key is needed: it must send something


def reachable(host: str, port: int) -> str:
    """Why others could reach a server there, in words; empty if only this machine can."""
    if host not in LOOPBACK:
        return f"it listens on {host}, not on this machine only"
    name = platforms.detect().name
    return f"{name} makes port {port} public" if port in ports.PUBLIC.get(name, ()) else ""


def key_for(given: str | None, host: str, port: int, engine: str, unsafe: bool) -> str | None:
    """The key of a server: the one given, the learner's own in VLLM_API_KEY, or a new one."""
    why = reachable(host, port)
    if engine == "transformers":
        if (why or given) and not unsafe:
            raise _cannot_guard(why or "an API key was given")
        return None
    return given or os.environ.get(VARIABLE) or (None if unsafe else secrets.token_urlsafe(32))


def _cannot_guard(why: str) -> CourseError:
    return CourseError(
        f"{why}, and `transformers serve` cannot ask for a key: anybody could use the model.",
        "host 127.0.0.1 with a port that is not public (PORT 0 takes one), or an engine that checks keys (vLLM)",
        "set PORT to 0, or pass unsafe=True if everybody may use it",
    )
