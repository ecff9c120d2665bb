"""Makes `papermill notebooks/03_qlora.ipynb` work without an output path.

papermill by itself refuses that on a terminal, prints the whole notebook into a pipe or a log, and with a pipe as its
input reads a notebook from there and overwrites the lesson. This module is papermill's own kind of plug-in, an output
scheme called `run://`, loaded through an entry point; when it is loaded for a lesson given alone, it adds
`run://<lesson>.ipynb` as the output. Only `papermill lesson.ipynb > out.ipynb` stays as it was. It also hands SIGTERM
on to the kernel, where a training saves and ends normally; papermill alone would die and take the kernel along.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from nbutils import platforms
from nbutils.paths import write_text

SCHEME = "run://"
FLAGS_WITHOUT_VALUE = {
    "--inject-input-path", "--inject-output-path", "--inject-paths", "--prepare-only", "--prepare-execute",
    "--request-save-on-cell-execute", "--progress-bar", "--no-progress-bar", "--log-output", "--no-log-output",
    "--report-mode", "--no-report-mode", "--version",
}  # fmt: skip
FLAGS_WITH_TWO_VALUES = {"-p", "--parameters", "-r", "--parameters_raw"}


class RunHandler:
    """papermill's four verbs for files below the folder in which runs are kept; missing folders are made."""

    def read(self, path: str) -> str:
        """The text of a file."""
        return self.place(path).read_text(encoding="utf-8")

    def write(self, buf: str, path: str) -> None:
        """A whole file, or the one that was there; a keep that fails for a while must not end the lesson."""
        place = self.place(path)
        try:
            _write(place, buf)
        except OSError as problem:
            aside = platforms.folders(platforms.detect()).scratch / "notebooks" / place.name
            _write(aside, buf)
            print(f"[WARN] {place}: {problem.strerror}; the executed notebook is {aside}", file=sys.stderr)

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
def passing_on_sigterm() -> Iterator[list[int]]:
    """Within this block SIGTERM goes to the kernels of this process; the list says that one came.

    A kernel that trains saves and ends the lesson normally, any other dies of it. A second SIGTERM is not passed on.
    """
    came: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernels = psutil.Process().children()
        for kernel in kernels:
            kernel.terminate()
        if not kernels:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def positional(arguments: Sequence[str]) -> list[str]:
    """The arguments of a papermill command line that are not options or their values."""
    words, skip = [], 0
    for word in arguments:
        if skip:
            skip -= 1
        elif word.startswith("-") and word != "-":
            single = word in FLAGS_WITHOUT_VALUE or "=" in word
            skip = 0 if single else 2 if word in FLAGS_WITH_TWO_VALUES else 1
        else:
            words.append(word)
    return words


def output_for(arguments: Sequence[str], redirected: bool) -> str | None:
    """The output to add for a lesson that was given alone; None where papermill knows what to do itself."""
    words = positional(arguments)
    if len(words) != 1 or redirected:
        return None
    lesson = Path(words[0])
    if lesson.suffix != ".ipynb" or not lesson.is_file() or not _is_lesson(lesson.stem):
        return None
    name = lesson.name
    if RunHandler.place(name).exists():
        name = f"{lesson.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb"
    return SCHEME + name


def _is_lesson(stem: str) -> bool:
    return stem[:2].isdigit() and stem[2:3] == "_"


def wants_the_notebook(stdout: int) -> bool:
    """Whether the standard output was redirected into an .ipynb file, which then gets the executed notebook."""
    named = Path(f"/proc/self/fd/{stdout}")
    return stat.S_ISREG(os.fstat(stdout).st_mode) and named.exists() and named.resolve().suffix == ".ipynb"


def is_papermill() -> bool:
    """Whether this process is the papermill command (and not a program that uses it)."""
    return Path(sys.argv[0]).stem == "papermill" or sys.orig_argv[1:3] == ["-m", "papermill"]


def complete_command_line() -> None:
    """Add the output to this process's command line if it has none."""
    if output := output_for(sys.argv[1:], wants_the_notebook(1)):
        sys.argv.append(output)
        print(f"The executed notebook goes to {RunHandler.place(output)}", file=sys.stderr)


if is_papermill():
    complete_command_line()
    if any(_is_lesson(Path(word).stem) for word in positional(sys.argv[1:])):
        _UNTIL_THE_END = passing_on_sigterm()  # held: a context that is let go ends
        _UNTIL_THE_END.__enter__()
