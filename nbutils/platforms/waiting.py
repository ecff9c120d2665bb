"""Waiting for a call that may never come back, and no longer than allowed.

Not here: what is called. The calls that need it talk to a notebook's page and must stay on the kernel's main thread,
so the bound there is an alarm; on any other thread the call is left behind in a thread of its own.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
RING_AGAIN = 0.5  # seconds; a callee that swallowed the first alarm gets another


class TookTooLong(Exception):
    """The call did not come back in the time allowed."""


class _Alarm(BaseException):
    """Not an Exception, so that no `except Exception` on the way keeps it."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises; `TookTooLong` if it does neither within `seconds`."""
    main = threading.current_thread() is threading.main_thread()
    return _with_alarm(seconds, call) if main else _in_thread(seconds, call)


def _with_alarm(seconds: float, call: Callable[[], Result]) -> Result:
    armed, began = True, time.monotonic()

    def ring(number: int, frame: Any) -> None:
        if armed:
            raise _Alarm

    handler = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN)
    try:
        try:
            return call()
        finally:
            armed = False
    except _Alarm:
        armed = False
        raise TookTooLong(f"no answer within {seconds:.0f} s") from None
    finally:  # whoever had set an alarm before gets it back, less the time spent here
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.01) if left else 0, every)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)


def _in_thread(seconds: float, call: Callable[[], Result]) -> Result:
    results: list[Result] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as problem:  # carried to the thread that waits
            problems.append(problem)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if problems:
        raise problems[0]
    if not results:
        raise TookTooLong(f"no answer within {seconds:.0f} s")
    return results[0]
