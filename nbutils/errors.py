"""The one error the course raises for bad input: what was seen, what is allowed, what to do next."""

from __future__ import annotations

from nbutils.masking import mask_secrets


class CourseError(Exception):
    """A mistake the learner can mend; the message is written for them, not for a debugger."""

    def __init__(self, seen: str, allowed: str, todo: str) -> None:
        self.seen, self.allowed, self.todo = map(mask_secrets, (seen, allowed, todo))
        super().__init__(f"{self.seen}\n  Allowed: {self.allowed}\n  To do: {self.todo}")

    def __reduce__(self) -> tuple[type[CourseError], tuple[str, str, str]]:
        return CourseError, (self.seen, self.allowed, self.todo)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: the message is all a learner needs."""
        return [f"[FAIL] {self}"]
