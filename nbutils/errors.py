"""The one error the course raises for bad input: what was seen, what is allowed, what to do next.

Its texts stand in `nbutils/messages/en/<room>.yaml`, one entry for each code, so that they can be read, mended and
translated in one place: `raise CourseError("disk.full", folder=folder, free=1.2)`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from nbutils.masking import mask_secrets

MESSAGES = Path(__file__).parent / "messages"


class CourseError(Exception):
    """A mistake the learner can mend; the message is written for them, not for a debugger."""

    def __init__(self, code: str, **values: Any) -> None:
        room, _, name = code.partition(".")
        entry = _catalogue(room)[name]
        self._set(code, values, *(entry[part].format(**values) for part in ("seen", "allowed", "todo")))

    def _set(self, code: str, values: dict[str, Any], *texts: str) -> None:
        self.code, self.values = code, values
        self.seen, self.allowed, self.todo = map(mask_secrets, texts)
        super().__init__(f"{self.seen}\n  Allowed: {self.allowed}\n  To do: {self.todo}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.code, self.seen, self.allowed, self.todo)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: the message is all a learner needs."""
        return [f"[FAIL] {self}"]


def _restored(code: str, *texts: str) -> CourseError:
    """The error as another process raised it: its texts travel; its values may be anything and do not."""
    error = CourseError.__new__(CourseError)
    error._set(code, {}, *texts)
    return error


@cache
def _catalogue(room: str) -> dict[str, dict[str, str]]:
    import yaml

    return dict(yaml.safe_load((MESSAGES / "en" / f"{room}.yaml").read_text(encoding="utf-8")))
