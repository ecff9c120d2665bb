"""The one error the course raises for bad input; its texts stand in `messages/<language>/<room>.yaml`, by code."""

import copyreg
from typing import Any

from nbutils.language import language, messages, printable
from nbutils.masking import mask_secrets

LAYOUT = {"en": "{}\n  Allowed: {}\n  To do: {}", "zh": "{}\n  允许：{}\n  怎么办：{}"}


class CourseError(Exception):
    """A mistake the learner can fix: what was seen, what is allowed, what to do next."""

    def __init__(self, code: str, **values: Any) -> None:
        room, _, name = code.partition(".")
        spoken = language()
        entry = messages(spoken, room).get(name) or messages("en", room)[name]
        texts = (printable(entry[part].format(**values)) for part in ("seen", "allowed", "todo"))
        self.code, self.values = code, values
        self.seen, self.allowed, self.todo = map(mask_secrets, texts)
        super().__init__(LAYOUT[spoken].format(self.seen, self.allowed, self.todo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its texts travel to another process; its values may be anything and do not."""
        return copyreg.__newobj__, (CourseError, *self.args), self.__dict__ | {"values": {}}  # type: ignore[attr-defined]

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: the message is all a learner needs."""
        return [f"[FAIL] {self}"]
