"""A reading: what one model predicts at every position of the fixed set, and what it answers.

Not here: readings of a server (served), comparing two (gaps), keeping them (keeping).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.evaluation.answers import generate_ids, in_batches

if TYPE_CHECKING:
    import torch

    from nbutils.parity.fixed import Fixed

KEPT = 256  # of the likeliest tokens of a position, when a reading is kept: half a megabyte for each model


@dataclass(frozen=True)
class Reading:
    """Log-probabilities at each position: of the whole vocabulary, or (`tokens` says which) of the likeliest ones."""

    logs: torch.Tensor
    tokens: torch.Tensor | None = None
    answers: list[list[int]] | None = None

    @property
    def choices(self) -> list[int]:
        """The likeliest token at each position."""
        best = self.logs.argmax(dim=-1)
        return (best if self.tokens is None else self.tokens.gather(1, best[:, None])[:, 0]).tolist()

    def shortened(self, count: int = KEPT) -> Reading:
        """The same with the likeliest tokens only."""
        if self.tokens is not None:
            return self
        logs, tokens = self.logs.topk(min(count, self.logs.shape[-1]), dim=-1)
        return Reading(logs, tokens, self.answers)


def measure(model: Any, fixed: Fixed, *, answers: bool = True, batch_size: int = 0) -> Reading:
    """Read a model in memory; without `answers` it is run once only, as one that lies partly on disk should be."""
    import torch

    model.eval()
    everything = list(range(len(fixed.texts)))  # at once if memory allows, so that a model on disk is read once
    batches = in_batches(everything, batch_size or len(everything), lambda batch: _logs(model, fixed, batch))
    logs = torch.cat([row for _, rows in batches for row in rows])
    if not torch.isfinite(logs).any(dim=-1).all() or torch.isnan(logs).any():
        raise CourseError(
            "the model's predictions are not numbers: something in it grew beyond what its precision can hold.",
            "finite logits", "take another precision (float32, or bfloat16 where the card has it) or another model",
        )  # fmt: skip
    return Reading(logs, answers=_answers(model, fixed) if answers else None)


def _logs(model: Any, fixed: Fixed, batch: list[int]) -> list[torch.Tensor]:
    """One batch, padded at the left: the measured positions are then the last ones of every row."""
    import torch

    texts = [fixed.texts[row][:-1] for row in batch]  # the last token is only predicted
    width, counts = max(map(len, texts)), [fixed.measured[row] for row in batch]
    device = "cpu" if model.device.type == "meta" else model.device  # meta: its first weight lies on disk
    ids = torch.tensor([[fixed.pad] * (width - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=device)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():  # not inference_mode: weights read from disk meanwhile would stay bound to it
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=max(counts)
        ).logits
        return [logits[row, -count:].float().log_softmax(-1).cpu() for row, count in enumerate(counts)]


def _answers(model: Any, fixed: Fixed) -> list[list[int]]:
    def work(batch: list[int]) -> list[list[int]]:
        prompts = [fixed.prompts[row] for row in batch]
        return generate_ids(model, prompts, fixed.answer_tokens, fixed.stops, fixed.pad)

    everything = list(range(len(fixed.prompts)))
    return [answer for _, answers in in_batches(everything, len(everything), work) for answer in answers]
