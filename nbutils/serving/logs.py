"""A server's log for people: the lines worth showing while it starts, and why it ended in plain words."""

from __future__ import annotations

import re
import textwrap
from itertools import takewhile
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.masking import mask_secrets

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\]|INFO: )?\s*")
NOISE = re.compile(
    r"Route:|Triton|[█▄▀]|Warning|warn\(|GET /|nanobind|Available routes|^\W*$|^\s{2,}|IR op|^\[W\d|\bINFO\b"
)
PHASES = (  # what vLLM is doing, in plain words; the first match wins, of its other lines only errors are shown
    (r"non-default args|Using max model len|Resolved architecture", "reading the model's settings"),
    (r"Initializing a V1 LLM engine|world_size=|Model Runner", "the engine starts"),
    (
        r"\[transformers\] Loading|Starting to load model|Loading safetensors|LinearKernel|Loading weights took",
        "loading the weights",
    ),
    (
        r"Dynamo|torch\.compile takes|Compiling|Cache the graph",
        "compiling, for faster answers; kept for later",
    ),
    (r"torch_compile_cache|[Cc]ompiled graph", "looking for what an earlier start has compiled"),
    (r"Capturing|profiling|warm-?up|JIT|FlashInfer|KV cache|Free memory", "planning the memory, rehearsing answers"),
    (r"init engine|Starting vLLM|Started server|Waiting for application", "the server opens its doors"),
)
ERROR = re.compile(r"^(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception): .+|^[\w.]+: error: .+|^error: .+|CUDA out of memory")
VAGUE = re.compile(r"Engine core initialization failed|[Ss]ee (root cause|stack trace)|CalledProcessError")
ADVICE = (  # first match wins
    (r"[Aa]ddress already in use", "set PORT to 0 to take any free port, or to another number"),
    (r"out of memory|OutOfMemory|No available memory|Free memory on device|KV cache is needed|than the available KV",
     "free the card (serving.free_card() names who holds it), lower max-model-len, or change gpu-memory-utilization"),
    (r"[Bb]float16 is only supported|[Bb]float16.*not supported", "set dtype to half: this card has no bfloat16"),
    (r"[Mm]odel architectures? .*(not supported|failed)|does not recognize this architecture|Unknown architecture",
     "this engine does not know the model's architecture: set ENGINE to transformers, or build a newer engine"),
    (r"chat template", "serve the folder lesson 04 wrote, which has one, or pass chat-template: a file with one"),
    (r"unrecognized arguments|No such option|invalid choice", "mend the flag it names in the cell with the flags"),
    (r"max_model_len|max_position_embeddings", "lower max-model-len in the cell with the flags"),
    (r"No module named|cannot import name", "delete the serving environment and run the cell that builds it again"),
    (r"[Ii]ncomplete metadata|HeaderTooLarge|SafetensorError|safetensors.*(not found|corrupt)",
     "the model folder is damaged: make it again (lesson 04)"),
    (r"CUDA driver version is insufficient|forward compatibility",
     "the driver is older than this vLLM wants: take a newer image (configs/serving.yaml says which driver it needs)"),
)  # fmt: skip
BROKEN = re.compile(  # an environment that cannot even import its engine; a model that wants more packages says how
    r"^(?:ModuleNotFoundError: |ImportError: |OSError: .*cannot open shared object file|.*undefined symbol: )"
    r"(?!.*pip install)"
)
UNREADABLE = re.compile(r"^(?:SyntaxError|IndentationError|TabError|(?:Value|EOF)Error: .*(?:null bytes|marshal))")
CRASHES = {132: "an illegal instruction", 134: "an abort", 135: "a bus error", 139: "a segmentation fault"}
REASON_LINES = 8
INVALID = re.compile(r"ValidationError: \d+ validation errors? for (\w+)")


class Follower:
    """Prints the newest telling line of a growing log, at most one every `every` seconds."""

    def __init__(self, log: Path, every: float = 2.0, patience: float = 20.0) -> None:
        self.log, self.every, self.patience = log, every, patience
        self.offset, self.shown, self.waiting, self.last = 0, -every, "", ""

    def __call__(self, seconds: float) -> None:
        """Look at the log; `seconds` is the time since the start."""
        fresh = [line for line in map(plain, self._new_lines()) if line]
        self.waiting = fresh[-1] if fresh else self.waiting
        if self.waiting not in ("", self.last) and seconds - self.shown >= self.every:
            self.last = self.waiting
            self._show(seconds, self.last)
        elif seconds - self.shown >= self.patience:
            self._show(seconds, "still at it" if self.last else "still starting")

    def _show(self, seconds: float, line: str) -> None:
        print(f"{max(seconds, 0):4.0f} s  {mask_secrets(line)}", flush=True)
        self.shown, self.waiting = seconds, ""

    def _new_lines(self) -> list[str]:
        with open(self.log, "rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self.offset += len(whole) + len(newline)
        return COLOUR.sub("", whole.decode("utf-8", "replace")).splitlines()


def plain(line: str) -> str:
    """What a log line tells a learner: a phase, or the line without process, level, date and place; else nothing."""
    if "WARNING" in line:
        return ""
    said = PREFIX.sub("", line).strip()
    phase = next((words for pattern, words in PHASES if re.search(pattern, said)), "")
    return phase or ("" if NOISE.search(line) else textwrap.shorten(said, 100, placeholder=" …"))


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(_all_lines(log)[-lines:])


def _all_lines(log: Path) -> list[str]:
    return COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace")).strip().splitlines()


def errors(log: Path, limit: int = 3) -> list[str]:
    """The last different error lines of a log, those that only point at others left out."""
    lines = [PREFIX.sub("", line).strip() for line in _all_lines(log)]
    told = [_with_reason(lines, at) for at, line in enumerate(lines) if ERROR.search(line) and not VAGUE.search(line)]
    return list(dict.fromkeys(told))[-limit:]


def _with_reason(lines: list[str], at: int) -> str:
    """An error line; a setting that was refused stands in the lines after it, and goes along."""
    if not (about := INVALID.search(lines[at])):
        return lines[at]
    after = takewhile(lambda line: not line.startswith("For further"), lines[at + 1 : at + 1 + REASON_LINES])
    return f"{about[1]} refuses it: " + " ".join(line.partition(" [type=")[0] for line in after)


def cause(log: Path) -> str:
    """The last telling error lines; empty if there are none."""
    return "\n".join(errors(log))


def broken(log: Path, status: int = 1) -> str:
    """Why the engine's environment is taken for broken; empty if the server ended for another reason."""
    found = next((line for line in reversed(errors(log, 20)) if BROKEN.match(line)), "") or _unreadable(log)
    if found or status not in CRASHES or _advice(cause(log) or tail(log)):
        return found
    return f"the server crashed while it was starting ({CRASHES[status]}, exit status {status})"


def _unreadable(log: Path) -> str:
    """The last file of an installed package that Python could not read."""
    place, found = "", ""
    for line in (PREFIX.sub("", line).strip() for line in _all_lines(log)):
        place = line if line.startswith('File "') else place
        if UNREADABLE.match(line) and "site-packages" in place:
            found = f"{line} ({place.split(',')[0]})"
    return found


def _advice(told: str) -> str:
    return next((todo for pattern, todo in ADVICE if re.search(pattern, told)), "")


def explain(log: Path, status: int) -> CourseError:
    """Why the server ended, and what to do about it."""
    told = cause(log) or tail(log) or "It said nothing."
    advice = _advice(told)
    if status in (137, -9):
        told += "\nThe system killed it, most likely because memory ran out."
    if status in CRASHES:
        told += f"\nIt crashed: {CRASHES[status]}. A damaged library does that, or one that does not fit this machine."
    return CourseError(
        f"the server ended while it was starting (exit status {status}):\n{told}", "a server that stays up",
        f"{advice}; the whole log is {log}" if advice else f"read the whole log: {log}",
    )  # fmt: skip
