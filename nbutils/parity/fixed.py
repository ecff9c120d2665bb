"""The fixed set: a few held-back rows and a few general ones as tokens, the same for every model of a run.

Few positions, so that the whole prediction at each of them can be held: 256 of a vocabulary of 152,000 are 160 MB.
Not here: what a model makes of it (reading, served).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nbutils.chat import find_stop_ids
from nbutils.chat.types import common_length
from nbutils.evaluation.keeping import digest

if TYPE_CHECKING:
    from nbutils.evaluation import Exam

HELD_BACK, GENERAL = 12, 4  # rows
MEASURED = 16  # positions of a row: the first ones of its wanted answer
ANSWER_TOKENS = 16  # of a greedy answer
LONGEST = 512  # tokens of a text with its answer, so that all texts are one batch for any card


@dataclass(frozen=True)
class Fixed:
    """Texts whose last `measured` tokens are to be predicted, prompts to be answered, and where an answer ends."""

    texts: list[list[int]]
    measured: list[int]
    prompts: list[list[int]]
    stops: list[int]
    pad: int
    answer_tokens: int = ANSWER_TOKENS

    @property
    def positions(self) -> int:
        """How many predictions are compared."""
        return sum(self.measured)

    @property
    def mark(self) -> str:
        """Two sets with this mark are the same set."""
        return digest(asdict(self))

    def __str__(self) -> str:
        return f"{len(self.texts)} texts, {self.positions} predictions compared, answers of {self.answer_tokens} tokens"


def fixed_set(exam: Exam, general: Exam | None = None, *, model: Any = None, limit: int = 0) -> Fixed:
    """The fixed set of a run, rows spread evenly over its exams; `limit` is what the shortest-sighted of all reads.

    `model` (a model, its folder or its hub name) says where answers end; without it the tokenizer does.
    """
    reach = min(filter(None, (limit, LONGEST)))
    chosen = [(exam, row) for row in _spread(exam, HELD_BACK, reach)]
    chosen += [(general, row) for row in _spread(general, GENERAL, reach)] if general else []
    texts = [_text(one, row, reach) for one, row in chosen]
    prompts = [one.prompts[row][-(reach - ANSWER_TOKENS) :] for one, row in chosen]
    stops = sorted(find_stop_ids(exam.tokenizer, getattr(model, "generation_config", model)))
    pad = exam.tokenizer.pad_token_id
    ids, measured = [ids for ids, _ in texts], [count for _, count in texts]
    return Fixed(ids, measured, prompts, stops, stops[0] if pad is None else pad)


def _spread(exam: Exam, count: int, reach: int) -> list[int]:
    """Rows at even distances, those first that fit without being cut."""
    rows = range(len(exam.rows))
    fitting = [row for row in rows if len(exam.prompts[row]) + max(MEASURED, ANSWER_TOKENS) <= reach]
    pool = fitting or list(rows)
    return pool[:: max(1, len(pool) // count)][:count]


def _text(exam: Exam, row: int, reach: int) -> tuple[list[int], int]:
    """A row as training sees it, up to the last measured token of its answer; what is too long loses its beginning."""
    one, prompt = exam.rows[row], exam.prompts[row]
    ids, _ = exam.view.encode(one["messages"], one.get("tools"))
    begin = max(1, common_length(prompt, ids))
    text = ids[: begin + MEASURED][-(reach - 1) :]  # a server adds at least one token
    return text, min(len(ids) - begin, MEASURED, len(text) - 1)
