"""Makes `papermill notebooks/03_qlora.ipynb` work without an output path, and its kernel save at SIGTERM and Ctrl-C.

papermill alone refuses that on a terminal, prints the whole notebook into a pipe, or overwrites the lesson; it loads
this module through an entry point. `papermill lesson.ipynb > out.ipynb` stays papermill's. A kernel that gets SIGTERM
saves its training and ends; papermill alone would kill it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from nbutils import platforms
from nbutils.files import make_folder
from nbutils.language import tr
from nbutils.processes import first_signals

HANDLER = None  # the entry point has to name one; no path has its scheme
LESSON = re.compile(r"\d\d_\w+\.ipynb")


@contextmanager
def signals_to_kernel(besides: subprocess.Popen[str] | None = None) -> Iterator[list[int]]:
    """Within this block signals reach the kernels of this process (its children `besides` one) once: Ctrl-C as it is,
    so that a lesson knows that someone is there, others as SIGTERM; the list holds all."""
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        kernels = [child for child in psutil.Process().children() if not besides or child.pid != besides.pid]
        for kernel in kernels:
            kernel.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        if not kernels:
            os.kill(os.getpid(), number)

    with first_signals(forward):
        yield received


def output_for(arguments: Sequence[str]) -> Path | None:
    """The output to add for a lesson given alone; None where papermill knows what to do."""
    notebooks = [word for word in arguments if word.endswith(".ipynb") or word == "-"]
    redirected = os.path.realpath("/proc/self/fd/1").endswith(".ipynb")
    if len(notebooks) != 1 or redirected:
        return None
    lesson = Path(notebooks[0])
    following = arguments[arguments.index(notebooks[0]) + 1 :]
    names_output = following and not following[0].startswith("-")
    if names_output or not LESSON.fullmatch(lesson.name):
        return None
    folder = make_folder(platforms.folders().keep / "notebooks")
    output = folder / lesson.name
    if output.exists():
        return output.with_stem(f"{lesson.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    return output


if Path(sys.argv[0]).stem == "papermill" or sys.orig_argv[1:3] == ["-m", "papermill"]:  # not a program that uses it
    if output := output_for(sys.argv[1:]):
        sys.argv.append(str(output))
        print(tr("The executed notebook goes to {file}", file=output), file=sys.stderr)
    if any(LESSON.fullmatch(Path(word).name) for word in sys.argv[1:]):
        _forwarding = signals_to_kernel()  # held until the process ends
        _forwarding.__enter__()
