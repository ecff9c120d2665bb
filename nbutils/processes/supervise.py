"""A script: run a command so that it cannot outlive the process that asked for it (`processes.supervised` starts it).

A kernel may be killed without a chance to clean up, and vLLM's engine or pip's second process live on when only the
first is killed. So this small process leads their process group, watches its own parent, and ends the whole group when
that parent is gone. It imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
EVERY_SECONDS = 0.2


def main(parent: int, grace: float, command: list[str]) -> int:
    """Run `command` until it ends; its exit status, 128 + N if signal N ended it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the group gets it; this process leaves last
    child = subprocess.Popen(command, preexec_fn=_die_with_me())
    while child.poll() is None:
        if os.getppid() != parent:
            _end_group(child, grace)
        time.sleep(EVERY_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _die_with_me() -> Callable[[], object] | None:
    """On Linux, a hook that lets the system end the command should this process be killed too."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(child: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the group to end, then make sure; this process goes with it."""
    group = os.getpgrp()
    os.killpg(group, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
