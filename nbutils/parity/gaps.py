"""How far two readings are apart: Kullback-Leibler divergence in nats per token, the same choices, the same answers.

Not here: how far is too far (judging).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

    from nbutils.parity.reading import Reading

NOTHING = -1  # in place of a token: servers name more of them at some positions than at others
AT_ONCE = 32  # positions: 40 MB of a large vocabulary
RESOLVED = 1e-6  # a sum of float32 probabilities is not known better than this


@dataclass(frozen=True)
class Gap:
    """`mean` and `worst` are nats for a token; `coarse` says that only the likeliest tokens were known, all others as
    one: that is a lower bound, and a close one where they hold most of the probability."""

    mean: float
    worst: float
    same_choices: int
    positions: int
    same_answers: int | None = None
    answers: int = 0
    coarse: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """For the tables that show it."""
        least = "at least " if self.coarse else ""
        return {
            "KL mean": f"{least}{self.mean:.2g}", "KL worst": f"{least}{self.worst:.2g}",
            "same next token": f"{self.same_choices} of {self.positions}",
            "same answers": "not asked" if self.same_answers is None else f"{self.same_answers} of {self.answers}",
        }  # fmt: skip


def gap(reference: Reading, other: Reading) -> Gap:
    """How much is lost if `other` predicts in place of `reference`."""
    import torch

    if len(reference.logs) != len(other.logs):
        raise CourseError(
            f"one reading has {len(reference.logs)} positions, the other {len(other.logs)}.",
            "readings of one fixed set", "measure both again with the same set",
        )  # fmt: skip
    coarse = reference.tokens is not None or other.tokens is not None
    places = range(len(reference.logs))
    found = [_coarse(reference, other, place) for place in places] if coarse else _exact(reference, other)
    values = torch.tensor(found).clamp(min=0.0)
    same = sum(one == two for one, two in zip(reference.choices, other.choices, strict=True))
    said = None
    if reference.answers is not None and other.answers is not None:
        said = sum(one == two for one, two in zip(reference.answers, other.answers, strict=True))
    asked = len(reference.answers or []) if said is not None else 0
    return Gap(float(values.mean()), float(values.max()), same, len(values), said, asked, coarse)


def _exact(reference: Reading, other: Reading) -> list[float]:
    import torch

    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for one, two in zip(reference.logs.split(AT_ONCE), other.logs.split(AT_ONCE), strict=True):
        log_p, log_q = one.to(device).double(), two.to(device).double()
        terms = log_p.exp() * (log_p - log_q)
        found += torch.where(log_p == -torch.inf, 0.0, terms).sum(dim=-1).tolist()  # impossible on both sides: nothing
    return found


def _coarse(reference: Reading, other: Reading, place: int) -> float:
    """Over the tokens both sides know, and all the rest as one: grained alike, so it never exceeds the true value."""
    known = [set(one.tokens[place].tolist()) for one in (reference, other) if one.tokens is not None]
    shared = sorted(set.intersection(*known) - {NOTHING})
    log_p, log_q = (_logs_of(one, place, shared) for one in (reference, other))
    rest_p, rest_q = (max(RESOLVED, 1 - float(logs.exp().sum())) for logs in (log_p, log_q))
    return float((log_p.exp() * (log_p - log_q)).sum()) + rest_p * math.log(rest_p / rest_q)


def _logs_of(reading: Reading, place: int, tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of these tokens, every one of which the reading knows."""
    import torch

    if reading.tokens is None:
        return reading.logs[place][tokens].double()
    where = {token: column for column, token in enumerate(reading.tokens[place].tolist())}
    return reading.logs[place][torch.tensor([where[token] for token in tokens], dtype=torch.long)].double()
