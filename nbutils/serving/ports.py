"""Which port a server takes, and under which address others find it.

Not here: the server (server). It listens on this machine only unless a lesson says otherwise.
"""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request

from nbutils.errors import CourseError
from nbutils.platforms import Platform
from nbutils.platforms.network import NoRedirects

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)  # to this machine and no further
PUBLIC = {"autodl": (6006, 6008)}  # the only ports that platform leads to from outside


def preferred_port(platform: Platform, host: str = "127.0.0.1", engine: str = "vllm") -> int:
    """The first free port of those the platform makes public; 0, which is any free one, where there is none.

    An engine that cannot ask for a key gets none of them.
    """
    for port in PUBLIC.get(platform.name, ()) if engine != "transformers" else ():
        try:
            return checked_port(host, port)
        except CourseError:
            continue
    return 0


def public_address(platform: Platform, port: int) -> str:
    """Where others find a server on this port, in a sentence; the platform tells its addresses by variables."""
    public = PUBLIC.get(platform.name, ())
    if not public:
        return f"port {port} is for programs on this machine"
    if port not in public:
        others = " and ".join(map(str, public))
        return f"port {port} is for programs on this machine; {platform.name} makes only {others} public"
    address = os.environ.get(f"AutoDLService{port}URL", "").strip().rstrip("/")
    where = f"{address}/v1" if address else f"the address that {platform.name}'s page shows for port {port}"
    return f"public at {where}: whoever has the API key that was made for it can ask the model (server.api_key)"


def checked_port(host: str, port: int) -> int:
    """The port if it is free; 0 asks for any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as problem:
            raise CourseError(
                f"port {port} on {host} cannot be used ({problem}).", "a free port between 1024 and 65535, or 0",
                "set PORT to 0 to take any free port, or to another number",
            ) from problem  # fmt: skip
        return int(probe.getsockname()[1])


def reach_directly(host: str) -> None:
    """Keep clients of this process away from a proxy when they talk to this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", host]))


def health(root: str) -> int:
    """What a server's /health answers now; 0 for nothing."""
    try:
        with DIRECT.open(f"{root}/health", timeout=2.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as answer:
        return int(answer.code)
    except OSError:
        return 0
