"""What a run knows about the memory of its card: which settings did not fit, how full it is, and who fills it.

Not here: what is done about it (rungs, ladder).
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import hardware, paths
from nbutils.errors import CourseError
from nbutils.paths import GIB
from nbutils.training.rungs import Setting

if TYPE_CHECKING:
    from nbutils.lessons import Lesson


def oom_rungs(lesson: Lesson) -> list[dict[str, Any]]:
    """Every rung this run took, in all its sessions, for facts.json; what is damaged does not count."""
    rungs = _read(lesson).get("rungs", [])
    whole = [one for one in rungs if isinstance(one, dict)] if isinstance(rungs, list) else []
    return [one for one in whole if setting(one.get("from")) and setting(one.get("to"))]


def setting(written: Any) -> Setting | None:
    """A setting as it was written down; None if it cannot be one."""
    try:
        found = Setting(**written)
    except TypeError:
        return None
    counts = (found.micro_batch, found.accumulation, found.length)
    known = found.checkpointing in ("off", "on", "offload")
    return found if known and all(type(one) is int and one > 0 for one in counts) else None


def forget(lesson: Lesson) -> None:
    """A run that begins anew on purpose begins as planned."""
    with suppress(OSError):
        _place(lesson).unlink()


class Memory:
    """memory.json in the run folder: the rungs a run took, so that its next session on this card begins at the last."""

    def __init__(self, lesson: Lesson, planned: Setting) -> None:
        self.lesson, self.planned = lesson, planned
        self.key = {"card": str(lesson.card or "none"), "planned": asdict(planned)}
        self.rungs: list[dict[str, Any]] = []

    def begin(self, resume_from: Path | None) -> Setting:
        """The setting to begin with: as planned, or the one that a run which is continued here came down to."""
        written = _read(self.lesson)
        reached = setting(written.get("reached"))
        same = {name: written.get(name) for name in self.key} == self.key  # else another card, or planned anew
        if resume_from is None and not same:
            forget(self.lesson)
        self.rungs = oom_rungs(self.lesson)
        if not same or reached is None or reached.batch != self.planned.batch:
            return self.planned
        print(f"This run ran out of memory on this card before. It goes on with micro-batch {reached.micro_batch}, "
              f"accumulation {reached.accumulation}, gradient checkpointing {reached.checkpointing}, length "
              f"{reached.length}; delete {_place(self.lesson)} to begin with the plan again.")  # fmt: skip
        return reached

    def add(self, step: int, used: tuple[float, float] | None, old: Setting, new: Setting) -> None:
        """One more rung; a disk that does not take the file does not end the training."""
        seen = {"step": step, "card": self.key["card"], "used_gib": used and round(used[0], 2)}
        self.rungs = [*self.rungs, seen | {"from": asdict(old), "to": asdict(new)}]
        try:
            paths.write_json(_place(self.lesson), self.key | {"reached": asdict(new), "rungs": self.rungs})
        except OSError as problem:
            print(f"[WARN] {_place(self.lesson)} could not be written ({problem.strerror}); the training goes on.")


def _place(lesson: Lesson) -> Path:
    return lesson.run.path / "memory.json"


def _read(lesson: Lesson) -> dict[str, Any]:
    """What is written there; nothing if it is missing or damaged."""
    try:
        written = json.loads(_place(lesson).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) else {}


def in_use() -> tuple[float, float] | None:
    """GiB in use and GiB there are, on the card or in the share of it this process may use; None without a card."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()
    own = torch.cuda.memory_reserved()
    return (own / GIB, share * total / GIB) if share < 1 else ((total - free) / GIB, total / GIB)


def shown(used: tuple[float, float] | None) -> str:
    """How full the card is, in brackets."""
    return f" ({used[0]:.1f} of {used[1]:.1f} GiB used)" if used else ""


def nothing_left(now: Setting, step: int, used: tuple[float, float] | None, taken: list[dict[str, Any]]) -> CourseError:
    """The error at the foot of the ladder: what was tried, and what a learner can do."""
    tried = [Setting(**one["from"]).change_to(Setting(**one["to"])) for one in taken]
    return CourseError(
        f"out of memory at step {step}{shown(used)} with micro-batch {now.micro_batch}, gradient checkpointing "
        f"{now.checkpointing}, length {now.length}. Tried: {'; '.join(tried) or 'nothing, there is no rung below'}."
        f"{others()}",
        "a step that fits into the card's memory",
        "close other programs on the card (other notebooks too), or take a smaller model, a smaller train.max_length, "
        "method qlora or a card with more memory; train.shorten: true lets long rows be computed in pieces",
    )


def others() -> str:
    """Who else uses the card, as far as the driver tells; empty if nobody does or it does not say."""
    told = hardware.ask_driver("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    lines = [line.strip() for line in told.splitlines() if re.match(r"\d+,", line)]
    strangers = [line for line in lines if int(line.split(",")[0]) != os.getpid()]
    return f" The card is also used by: {'; '.join(strangers)}." if strangers else ""
