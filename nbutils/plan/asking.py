"""The questions of the command line: a model and a card by name, with wishes; or, without a card, the table of all.

Not here: the forecast itself (forecasting). torch is loaded only if no card is named and one may be in this machine.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import dataclass, replace
from typing import Any

from nbutils import hardware
from nbutils.errors import CourseError
from nbutils.plan import cards, choosing, forecasting, recipes, report, shapes
from nbutils.plan.cards import CardFacts
from nbutils.profiles.choosing import BY_MEMORY, LARGEST, for_card
from nbutils.profiles.reading import load


@dataclass(frozen=True)
class Answer:
    """The same answer for programs and for people."""

    data: Any
    text: str


def answer(
    model: str = "",
    gpu: str = "",
    method: str | None = None,
    micro_batch: int | None = None,
    checkpointing: str | None = None,
    length: int | None = None,
    rank: int | None = None,
    gpus: int | None = None,
    rows: int | None = None,
    mean_length: float | None = None,
    epochs: float | None = None,
    vram: float | None = None,
    tflops: float | None = None,
    capability: str | None = None,
) -> Answer:
    """One forecast; or the table of all cards where there is no card and none was named."""
    card = _card(gpu, vram, tflops, capability, gpus)
    if card is None:
        return _table(model)
    profile = load(for_card(card.capability, card.memory_gib))
    shape = shapes.find(model or profile.model)
    wishes = {"method": method, "rank": rank, "length": length}
    recipe = replace(recipes.from_profile(profile, card), **{k: v for k, v in wishes.items() if v is not None})  # type: ignore[arg-type]
    whole = micro_batch * card.count if micro_batch else 1
    batch = whole if profile.train.batch % whole else profile.train.batch  # a step is made of whole micro-steps
    recipe = _settled(shape, recipe, batch, card, micro_batch, checkpointing)
    passes = epochs or profile.train.epochs or 1.0
    made = forecasting.forecast(shape, recipe, card, batch, rows, mean_length, passes, profile.train.keep_checkpoints)
    return Answer(made.as_dict(), f"{report.describe(made)}\n\n{report.explain(shape, made)}")


def _settled(
    shape: shapes.Shape, recipe: recipes.Recipe, batch: int, card: CardFacts, micro_batch: int | None, way: str | None
) -> recipes.Recipe:
    """The recipe with what was asked for; what was not is the fastest that fits, or the smallest if nothing does."""
    if micro_batch and way:
        return replace(recipe, micro_batch=micro_batch, checkpointing=way)
    sizes = (micro_batch,) if micro_batch else ()
    found = choosing.options(shape, recipe, batch, card, sizes, (way,) if way else choosing.WAYS)
    fitting = [one for one in found if one.peak_gib <= choosing.limit_gib(card)]
    return (choosing.best(fitting) if fitting else min(found, key=lambda one: one.peak_gib)).recipe


def _card(
    gpu: str, vram: float | None, tflops: float | None, capability: str | None, gpus: int | None
) -> CardFacts | None:
    """The card that was named or described, else this machine's, else None."""
    if gpu or vram:
        found = cards.find(gpu or "a card of your own", vram, tflops, _capability(capability))
    else:
        card = _of_this_machine()
        if card is None:
            return None
        found = replace(cards.of_machine(card), count=1)
    return replace(found, count=gpus) if gpus else found


def _of_this_machine() -> hardware.Card | None:
    """The card of this machine; torch is asked only where there is a driver."""
    if importlib.util.find_spec("torch") is None or not shutil.which("nvidia-smi"):
        return None
    return hardware.card()


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)\.(\d)", text.strip())
    if not found:
        raise CourseError(f"--capability is {text!r}.", "two numbers, as 7.5 or 8.9", "look it up at NVIDIA's list")
    return int(found[1]), int(found[2])


def _table(model: str) -> Answer:
    """Which profile fits which card; with a model, that model on every card."""
    if not model:
        return Answer({"fits": forecasting.which_fits()}, _headed(report.aligned(report.fits_table())))
    shape, profiles = shapes.find(model), {name: load(name) for name in [*(name for _, name in BY_MEMORY), LARGEST]}
    every = [(card, profiles[for_card(card.capability, card.memory_gib)]) for card in cards.every()]
    made = [forecasting.of_profile(profile, card, shape) for card, profile in every]
    rows = [
        {
            "card": one.card.name, "GiB": one.card.memory_gib, "peak": round(one.peak_vram_gib, 1), "fits": one.fits,
            "rows a step": f"{one.recipe.micro_batch} x {one.batch // one.recipe.micro_batch}",
            "recomputing": one.recipe.checkpointing, "tokens/s": f"{one.tokens_per_second or 0:,.0f}",
            "an hour": report.money({"yuan": one.card.yuan, "dollars": one.card.dollars}),
        }
        for one in made
    ]  # fmt: skip
    return Answer({"fits": [one.as_dict() for one in made]}, _headed(report.aligned(rows)))


def _headed(table: str) -> str:
    return f"No card here and none named with --gpu: the cards one can rent.\n\n{table}\n\n{forecasting.REMARK}"
