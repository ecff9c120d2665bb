"""How surprised a model is by the wanted answers: the loss on the assistant's tokens, row by row.

Not here: which tokens those are (chat decides it, for training and here), or means and intervals (statistics).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.evaluation.answers import Row, in_batches

if TYPE_CHECKING:
    from nbutils.chat import View

LOGITS_AT_ONCE = 2**28  # numbers: half a GiB of them in 16 bits, whatever the vocabulary


@dataclass(frozen=True)
class RowLoss:
    """The summed loss of one row's assistant tokens, in nats, and how many they are."""

    total: float
    tokens: int


@dataclass(frozen=True)
class Encoded:
    """A text of a row as token ids, and the places whose prediction counts (the one before each trained token)."""

    row: int
    ids: list[int]
    places: list[int]


def encode_rows(view: View, rows: Sequence[Row]) -> list[Encoded]:
    """Rows as training sees them."""
    found = []
    for example in view.encode_all(rows):
        places = [place - 1 for place, counts in enumerate(example.trained) if counts and place]
        if not places:
            raise CourseError(
                f"evaluation row {example.row} has no token of an answer.",
                "rows with an answer", "take that row out of the evaluation file",
            )  # fmt: skip
        found.append(Encoded(example.row - 1, list(example.ids), places))
    return found


def row_losses(model: Any, texts: Sequence[Encoded], batch_size: int) -> list[RowLoss]:
    """The loss of every row, in order; batches of like length, the longest first."""
    from tqdm.auto import tqdm

    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))
    found = [RowLoss(0.0, 0)] * (1 + max(text.row for text in texts))
    vocabulary = int(model.config.get_text_config().vocab_size)
    batch_size = max(1, min(batch_size, LOGITS_AT_ONCE // (vocabulary * max(map(_span, texts)))))

    def work(batch: list[int]) -> list[RowLoss]:
        return _batch_losses(model, [texts[number] for number in batch])

    with tqdm(total=len(order), desc="losses", unit="row") as bar:
        for batch, results in in_batches(order, batch_size, work):
            for number, one in zip(batch, results, strict=True):
                so_far = found[texts[number].row]
                found[texts[number].row] = RowLoss(so_far.total + one.total, so_far.tokens + one.tokens)
            bar.update(len(batch))
    return found


def _span(row: Encoded) -> int:
    return row.places[-1] + 1 - row.places[0]


def _batch_losses(model: Any, rows: Sequence[Encoded]) -> list[RowLoss]:
    """One right-padded batch. Logits are made only between the first and the last place any row asks for."""
    import torch

    width = max(len(row.ids) for row in rows)
    first, last = min(row.places[0] for row in rows), max(row.places[-1] for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows], device=model.device)
    kept = torch.arange(first, last + 1, device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits
        return [_row_loss(logits[number], ids[number], row.places, first) for number, row in enumerate(rows)]


def _row_loss(logits: Any, ids: Any, places: list[int], first: int) -> RowLoss:
    """One row's share, in float32: a whole batch of it would take twice the memory of the model's own logits."""
    import torch

    at = torch.tensor(places, device=ids.device)
    total = torch.nn.functional.cross_entropy(logits[at - first].float(), ids[at + 1], reduction="sum")
    return RowLoss(float(total), len(places))
