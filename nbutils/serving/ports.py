"""The port a server listens on, who can reach it there, and the API key they need.

A key is handed over through the environment only: it is never printed, logged, stored or put on a command line.
"""

from __future__ import annotations

import os
import secrets
import socket
import urllib.error
import urllib.request

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.platforms import Platform
from nbutils.platforms.network import NoRedirects

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)  # to this machine and no further
PUBLIC = {"autodl": (6006, 6008)}  # the only ports that platform forwards from outside
KEY_VARIABLE = "VLLM_API_KEY"
NO_KEY = "none-is-checked"  # an OpenAI client must send something


def preferred_port(platform: Platform, engine: str = "vllm") -> int:
    """The first free port that the platform makes public, if the engine checks keys; otherwise 0, any free port."""
    for port in PUBLIC.get(platform.name, ()) if engine != "transformers" else ():
        try:
            return checked_port(port)
        except CourseError:
            continue
    return 0


def public_address(platform: Platform, port: int) -> str:
    """Where others reach a server on this port, in a sentence."""
    public = PUBLIC.get(platform.name, ())
    if port not in public:
        only = f"; {platform.name} makes only {' and '.join(map(str, public))} public" if public else ""
        return f"Port {port} is for programs on this machine{only}."
    address = os.environ.get(f"AutoDLService{port}URL", "").strip().rstrip("/")
    where = f"{address}/v1" if address else f"the address that {platform.name}'s page shows for port {port}"
    return f"Public at {where}: everyone who has the API key (server.api_key) can use the model."


def checked_port(port: int) -> int:
    """The port if it is free on this machine; for 0 any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise CourseError("serving.port_taken", port=port, error=error) from error
        return int(probe.getsockname()[1])


def api_key_for(given: str | None, port: int, engine: str) -> str | None:
    """The API key of a server: the one given, the learner's own in VLLM_API_KEY, or a new one."""
    if engine != "transformers":
        return given or os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    if given or port in PUBLIC.get(platforms.detect().name, ()):
        raise CourseError("serving.no_key_check", port=port)
    return None


def reach_directly(host: str) -> None:
    """Keep clients of this process away from a proxy when they talk to this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", host]))


def health(root: str) -> int:
    """The HTTP status of a server's /health; 0 if nobody answers."""
    try:
        with DIRECT.open(f"{root}/health", timeout=2.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as answer:
        return int(answer.code)
    except OSError:
        return 0
