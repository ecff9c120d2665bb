"""The one error the course raises for bad input; its texts stand in `nbutils/messages/en/<room>.yaml`, by code."""

import copyreg
from pathlib import Path
from typing import Any

import yaml

from nbutils.masking import mask_secrets

MESSAGES = Path(__file__).parent / "messages"


class CourseError(Exception):
    """A mistake the learner can fix: what was seen, what is allowed, what to do next."""

    def __init__(self, code: str, **values: Any) -> None:
        room, _, name = code.partition(".")
        entry = yaml.safe_load((MESSAGES / "en" / f"{room}.yaml").read_text(encoding="utf-8"))[name]
        texts = (entry[part].format(**values) for part in ("seen", "allowed", "todo"))
        self.code, self.values = code, values
        self.seen, self.allowed, self.todo = map(mask_secrets, texts)
        super().__init__(f"{self.seen}\n  Allowed: {self.allowed}\n  To do: {self.todo}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Its texts travel to another process; its values may be anything and do not."""
        return copyreg.__newobj__, (CourseError, *self.args), self.__dict__ | {"values": {}}  # type: ignore[attr-defined]

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: the message is all a learner needs."""
        return [f"[FAIL] {self}"]
