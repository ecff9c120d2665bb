"""Makes `papermill notebooks/03_qlora.ipynb` work without an output path, and passes SIGTERM on to its kernel.

papermill alone refuses that on a terminal, prints the whole notebook into a pipe or a log, and with a pipe as its input
overwrites the lesson. This is a papermill plug-in, an output scheme `run://`, loaded through an entry point; loaded for
a lesson that is given alone, it adds `run://<lesson>.ipynb` as the output. `papermill lesson.ipynb > out.ipynb` stays
papermill's. A kernel that gets SIGTERM saves its training and ends normally; papermill alone would kill it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from nbutils import platforms
from nbutils.paths import write_text

SCHEME = "run://"
LESSON = re.compile(r"\d\d_\w+\.ipynb")


class RunHandler:
    """papermill's four operations, for files below the folder in which runs are kept."""

    def read(self, path: str) -> str:
        """The text of a file."""
        return self.place(path).read_text(encoding="utf-8")

    def write(self, buf: str, path: str) -> None:
        """Write a whole file; if the disk fails for a while, into scratch, so that the lesson goes on."""
        place = self.place(path)
        try:
            _write(place, buf)
        except OSError as problem:
            fallback = platforms.folders(platforms.detect()).scratch / "notebooks" / place.name
            _write(fallback, buf)
            print(f"[WARN] {place}: {problem.strerror}; the executed notebook is {fallback}", file=sys.stderr)

    def listdir(self, path: str) -> list[str]:
        """The files of a folder."""
        return [str(file) for file in self.place(path).iterdir()]

    def pretty_path(self, path: str) -> str:
        """The path a person can open."""
        return str(self.place(path))

    @staticmethod
    def place(path: str) -> Path:
        """The file behind `run://name`."""
        return platforms.folders(platforms.detect()).keep / "notebooks" / path.removeprefix(SCHEME)


HANDLER = RunHandler()


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(place, text)


@contextmanager
def forward_sigterm() -> Iterator[list[int]]:
    """Within this block SIGTERM goes to the kernels of this process, once; the list says that one came."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernels = psutil.Process().children()
        for kernel in kernels:
            kernel.terminate()
        if not kernels:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def output_for(arguments: Sequence[str], stdout: int) -> str | None:
    """The output to add for a lesson given alone; None where papermill knows what to do, also with `> out.ipynb`."""
    words = [word for word in arguments if word.endswith(".ipynb") or word == "-"]
    lesson = Path(words[0]) if len(words) == 1 else Path()
    following = arguments[arguments.index(words[0]) + 1 :][:1] if words else []
    redirected = os.path.realpath(f"/proc/self/fd/{stdout}").endswith(".ipynb")
    has_output = any(not word.startswith("-") for word in following) or redirected
    if has_output or "--help-notebook" in arguments or not LESSON.fullmatch(lesson.name) or not lesson.is_file():
        return None
    name = lesson.name
    if RunHandler.place(name).exists():
        name = f"{lesson.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb"
    return SCHEME + name


if Path(sys.argv[0]).stem == "papermill" or sys.orig_argv[1:3] == ["-m", "papermill"]:  # not a program that uses it
    if output := output_for(sys.argv[1:], stdout=1):
        sys.argv.append(output)
        print(f"The executed notebook goes to {RunHandler.place(output)}", file=sys.stderr)
    if any(LESSON.fullmatch(Path(word).name) for word in sys.argv[1:]):
        _forwarding = forward_sigterm()  # held until the process ends
        _forwarding.__enter__()
