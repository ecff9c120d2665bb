"""The errors the course raises for what a learner can fix; a notebook shows their message without a traceback."""

from collections.abc import Iterable, Mapping
from typing import Any

from nbutils.language import split_words, tr
from nbutils.masking import mask_secrets


def _safe(text: str, values: Mapping[str, Any]) -> str:
    return mask_secrets(tr(text, **values))


class CourseError(Exception):
    """What was seen and what to do next; `allowed` where the two leave open what would be accepted.

    It translates these texts, with the values they name: `CourseError("{rows} rows", todo="Add some.", rows=3)`. A text
    that is made elsewhere, and may have braces, is given without values.
    """

    def __init__(
        self,
        seen: str,
        /,
        todo: str = "",
        allowed: str = "",
        **values: Any,
    ) -> None:
        self.seen = _safe(seen, values)
        self.todo = _safe(todo, values)
        self.allowed = _safe(allowed, values)
        super().__init__(self.seen, self.todo, self.allowed)

    def __str__(self) -> str:
        lines = [self.seen]
        if self.allowed:
            lines.append(tr("  Allowed: {allowed}", allowed=self.allowed))
        if self.todo:
            lines.append(tr("  To do: {todo}", todo=self.todo))
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: the message is all a learner needs."""
        return [f"[FAIL] {self}"]


def require_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Refuse a value that is none of those allowed."""
    if value not in allowed:
        raise CourseError(
            tr("{name} is {value!r}.", name=name, value=value),
            todo=tr("Choose one of: {allowed}.", allowed=", ".join(allowed)),
        )


def parse_choices(name: str, text: str, allowed: Iterable[str]) -> list[str]:
    """The choices of a parameter such as "fp8, gguf-q8_0", each once; one that is none of those allowed is refused."""
    words = list(dict.fromkeys(split_words(text.lower())))
    for word in words:
        require_choice(name, word, allowed)
    return words


class DownloadFailed(CourseError):
    """This source of a model failed; another one may have it."""


class StoppedByHand(CourseError):
    """The learner ended it: nothing went wrong, and nobody needs to be told."""


class Unfinished(CourseError):
    """Something else ended it, or its time is over: the same command continues it."""
