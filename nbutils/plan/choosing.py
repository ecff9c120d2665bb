"""The fastest micro-batch and checkpointing that fit a card, the effective batch and the length kept.

Not here: the formulas (memory, speed). What a profile names itself is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbutils import scaling
from nbutils.errors import CourseError
from nbutils.plan import memory, speed
from nbutils.plan.cards import CardFacts
from nbutils.plan.recipes import Recipe
from nbutils.plan.shapes import Shape, course_shapes

if TYPE_CHECKING:
    from nbutils.profiles.schema import Train

MARGIN = 0.08  # of the card's memory stays free: the forecast may be that much off, and memory gets fragmented
CONTEXT_GIB = 0.5  # CUDA's own, which torch's allocator does not count
NEARLY = 0.98  # settings this close to the fastest count as equal; the one with the lowest peak is taken
WAYS = ("off", "on", "offload")


@dataclass(frozen=True)
class Option:
    """One setting on one card: its forecast peak and its speed (None where the card's arithmetic is not known)."""

    recipe: Recipe
    peak_gib: float
    tokens_per_second: float | None


def limit_gib(card: CardFacts) -> float:
    """How much the plan lets torch use of one card."""
    return card.memory_gib * (1 - MARGIN) - CONTEXT_GIB


def left_open(train: Train) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What a profile leaves to the plan: the micro-batches to try (none named: all) and the ways of checkpointing."""
    sizes = () if train.micro_batch == "auto" else (train.micro_batch,)
    return sizes, WAYS if train.gradient_checkpointing == "auto" else (train.gradient_checkpointing,)


def choose(found: Sequence[Option], card: CardFacts) -> Option:
    """The fastest that fits a card, or the smallest where nothing does."""
    fitting = [one for one in found if one.peak_gib <= limit_gib(card)]
    return best(fitting) if fitting else smallest(found)


def smallest(found: Sequence[Option]) -> Option:
    """The one with the lowest peak."""
    return min(found, key=lambda one: one.peak_gib)


def options(
    shape: Shape,
    recipe: Recipe,
    batch: int,
    card: CardFacts,
    micro_batches: Sequence[int] = (),
    ways: Sequence[str] = WAYS,
) -> list[Option]:
    """Every micro-batch that divides a card's share of the batch, with every way of checkpointing."""
    found = []
    scaling.require_shares(batch, card.count)
    rows = batch // card.count
    for micro_batch in micro_batches or divisors(rows):
        for way in ways:
            one = replace(recipe, micro_batch=micro_batch, checkpointing=way, accumulation=rows // micro_batch)
            rate = speed.tokens_per_second(shape, one, card, card.count)
            found.append(Option(one, memory.peak_gib(shape, one), rate))
    return found


def best(fitting: Sequence[Option]) -> Option:
    """The fastest; among nearly equals the one with the lowest peak. Speed unknown: no recomputing, large steps."""
    rates = [one.tokens_per_second for one in fitting if one.tokens_per_second is not None]
    if not rates:
        return min(fitting, key=lambda one: (WAYS.index(one.recipe.checkpointing), -one.recipe.micro_batch))
    good = [one for one in fitting if (one.tokens_per_second or 0) >= NEARLY * max(rates)]
    return min(good, key=lambda one: one.peak_gib)


def divisors(number: int) -> list[int]:
    """All numbers that divide it, smallest first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def nothing_fits(shape: Shape, recipe: Recipe, batch: int, card: CardFacts) -> CourseError:
    """The error for a model that is too large for a card, with what would fit."""
    least = smallest(options(shape, recipe, batch, card))
    limit = limit_gib(card)
    shorter = [f"length {length}" for length in shorter_lengths(shape, least.recipe, limit)[:1]]
    smaller = [f"model {name}" for name in smaller_models(shape, least.recipe, limit)[:1]]
    ways = " or ".join([*shorter, *smaller]) or "neither a shorter length nor a smaller course model"
    return CourseError(
        f"{shape.name} with {recipe.method}, rank {recipe.rank} and rows of {recipe.length} tokens needs "
        f"{least.peak_gib:.1f} GiB at micro_batch {least.recipe.micro_batch} with {least.recipe.checkpointing}; "
        f"{card.name} gives {limit:.1f} of its {card.memory_gib:.1f}: {least.peak_gib - limit:.1f} GiB are missing.",
        f"what fits {card.name}: {ways}",
        "choose one of these, a larger card, or qlora instead of lora",
    )


def shorter_lengths(shape: Shape, recipe: Recipe, limit: float) -> list[int]:
    """Halved lengths that fit, longest first; below 256 tokens training makes little sense."""
    lengths = [recipe.length >> step for step in range(1, 8) if recipe.length >> step >= 256]
    return [one for one in lengths if memory.peak_gib(shape, replace(recipe, length=one)) <= limit]


def smaller_models(shape: Shape, recipe: Recipe, limit: float) -> list[str]:
    """Course models that are smaller and fit, largest first."""
    known = sorted(course_shapes(), key=lambda one: -one.params)
    return [one.name for one in known if one.params < shape.params and memory.peak_gib(one, recipe) <= limit]
