"""A server's log for people: what it is doing while it starts, and why it failed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.serving.engine import table

COLOR = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?((DEBUG|INFO|ERROR) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\]|INFO: )?\s*")
ERROR = re.compile(r"^(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception): .+|^[\w.]+: error: .+|^error: .+|CUDA out of memory")
VAGUE = re.compile(r"Engine core initialization failed|[Ss]ee (root cause|stack trace)|CalledProcessError")
INVALID = re.compile(r"ValidationError: \d+ validation errors? for (\w+)")
BROKEN = re.compile(  # the environment cannot import its engine; a model that needs more packages says `pip install`
    r"^(?:ModuleNotFoundError: |ImportError: |OSError: .*cannot open shared object file|.*undefined symbol: )"
    r"(?!.*pip install)"
)
CRASHES = {132: "illegal instruction", 134: "abort", 135: "bus error", 137: "killed", 139: "segmentation fault"}
UNKNOWN_FLAG = re.compile(r"(?:unrecognized arguments|No such option):? (--[\w-]+)")
FAILURES: tuple[tuple[str, Callable[..., CourseError]], ...] = (  # the first pattern that matches explains the failure
    (r"[Aa]ddress already in use", lambda **v: CourseError("serving.address_in_use", **v)),
    (r"out of memory|OutOfMemory|No available memory|Free memory on device|KV cache is needed|than the available KV",
     lambda **v: CourseError("serving.out_of_memory", **v)),
    (r"[Bb]float16 is only supported|[Bb]float16.*not supported", lambda **v: CourseError("serving.no_bfloat16", **v)),
    (r"[Mm]odel architectures? .*(not supported|failed)|does not recognize this architecture|Unknown architecture",
     lambda **v: CourseError("serving.unknown_architecture", **v)),
    (r"chat template", lambda **v: CourseError("serving.no_chat_template", **v)),
    (r"invalid choice|error: argument --", lambda **v: CourseError("serving.flag_value", **v)),
    (r"max_model_len|max_position_embeddings", lambda **v: CourseError("serving.max_model_len", **v)),
    (r"No module named|cannot import name|undefined symbol",
     lambda **v: CourseError("serving.broken_environment", **v)),
    (r"[Ii]ncomplete metadata|HeaderTooLarge|SafetensorError|safetensors.*(not found|corrupt)",
     lambda **v: CourseError("serving.damaged_model", **v)),
    (r"CUDA driver version is insufficient|forward compatibility",
     lambda **v: CourseError("serving.old_driver", **v)),
)  # fmt: skip


def phase(log: Path) -> str:
    """What a server is doing while it starts, by the last line of its log that says so."""
    for line in reversed(lines_of(log)):
        for pattern, name in table().phases.items():
            if re.search(pattern, line) and "WARNING" not in line:
                return name
    return "starting"


def lines_of(log: Path) -> list[str]:
    """The lines of a log without colors, process and date."""
    text = COLOR.sub("", log.read_text(encoding="utf-8", errors="replace"))
    return [PREFIX.sub("", line).rstrip() for line in text.strip().splitlines()]


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(lines_of(log)[-lines:])


def errors(log: Path, limit: int = 3) -> list[str]:
    """The last different error lines of a log, without those that only point to others."""
    lines = lines_of(log)
    found = [_with_reason(lines, at) for at, line in enumerate(lines) if ERROR.search(line) and not VAGUE.search(line)]
    return list(dict.fromkeys(found))[-limit:]


def _with_reason(lines: list[str], at: int) -> str:
    """An error line; pydantic gives its reason in the lines that follow."""
    if not (about := INVALID.search(lines[at])):
        return lines[at]
    after = takewhile(lambda line: not line.startswith("For further"), lines[at + 1 : at + 9])
    return f"{about[1]} refuses it: " + " ".join(line.partition(" [type=")[0] for line in after)


def broken(log: Path) -> str:
    """The error line that shows a broken environment; empty if the server ended for another reason."""
    return next((line for line in reversed(errors(log, 20)) if BROKEN.match(line)), "")


def explain(log: Path, status: int) -> CourseError:
    """Why a server ended while it was starting."""
    found = "\n".join(errors(log)) or tail(log) or "no output"
    if flag := UNKNOWN_FLAG.search(found):
        return _unknown_flag(flag[1], log)
    for pattern, error in FAILURES:
        if re.search(pattern, found):
            return error(error=found, log=log)
    crash = f" ({CRASHES[status]})" if status in CRASHES else ""
    return CourseError("serving.start_failed", status=status, crash=crash, error=found, log=log)


def _unknown_flag(flag: str, log: Path) -> CourseError:
    """What to write instead of a flag this version does not have; its usage message in the log lists those it has."""
    name = flag.lstrip("-").replace("_", "-")
    if instead := table().replaced_flags.get(name):
        return CourseError("serving.replaced_flag", flag=flag, instead=instead)
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(lines_of(log)))) - {flag}
    near = difflib.get_close_matches(f"--{name}", sorted(known), n=3, cutoff=0.6)
    return CourseError("serving.unknown_flag", flag=flag, nearest=", ".join(near) or "none is similar")
