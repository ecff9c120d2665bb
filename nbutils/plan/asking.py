"""The questions of the command line: a model and a card by name, with wishes; or, without a card, the table of all.

Not here: the forecast itself (forecasting). torch is loaded only if no card is named and one may be in this machine.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import astuple, dataclass, replace
from typing import Any

from nbutils import dashboard, hardware
from nbutils.errors import CourseError
from nbutils.plan import cards, choosing, forecasting, report, shapes
from nbutils.plan.cards import CardFacts
from nbutils.plan.forecasting import Forecast
from nbutils.plan.shapes import Shape
from nbutils.profiles.choosing import for_card, with_overrides
from nbutils.profiles.reading import Document, read, settings_in
from nbutils.profiles.schema import Profile
from nbutils.profiles.sizing import CHECKPOINTING, MICRO_BATCH


@dataclass(frozen=True)
class Answer:
    """The same answer for programs and for people."""

    data: Any
    text: str


@dataclass(frozen=True)
class Wishes:
    """What is asked for; None leaves it to the profile, or to what fits."""

    profile: str | None = None
    model: str | None = None
    method: str | None = None
    micro_batch: int | None = None
    checkpointing: str | None = None
    length: int | None = None
    rank: int | None = None
    rows: int | None = None
    mean_length: float | None = None
    epochs: float | None = None
    given: str | None = None  # as SET


def answer(
    gpu: str = "",
    gpus: int | None = None,
    vram: float | None = None,
    tflops: float | None = None,
    capability: str | None = None,
    **wished: Any,
) -> Answer:
    """One forecast; or the table of all cards where there is no card and none was named."""
    wishes = Wishes(**wished)
    card = _card(gpu, vram, tflops, capability, gpus)
    if card is None:
        return _table(wishes, gpus)
    shape, made = _forecast(card, wishes)
    return Answer(made.as_dict(), f"{report.describe(made)}\n\n{report.explain(shape, made)}")


def _forecast(card: CardFacts, wishes: Wishes) -> tuple[Shape, Forecast]:
    """A card with all wishes; micro-batch and recomputation, where nobody wishes, are the fastest that fit."""
    profile = _wished(read(wishes.profile or for_card(card.capability, card.memory_gib)), wishes)
    shape, asked = shapes.find(wishes.model or profile.model), wishes.micro_batch
    free = _changed(profile, train=_changed(profile.train, micro_batch="auto"))
    batch = forecasting.of_profile(free, card, shape, wishes.rows, wishes.mean_length).batch
    each = batch // card.count
    if asked and each % asked:
        raise CourseError(
            f"--micro-batch is {asked}, and of a step's {batch} rows each card takes {each}.",
            f"a number that divides {each}: {', '.join(map(str, choosing.divisors(each)))}",
            "choose one of these, or a profile of your own with another train.batch (--profile FILE)",
        )
    return shape, forecasting.of_profile(profile, card, shape, wishes.rows, wishes.mean_length)


def _wished(document: Document, wishes: Wishes) -> Profile:
    """The profile with the wishes in it; one that nobody named leaves open what can be left open."""
    left_open = {} if wishes.profile else dict.fromkeys((MICRO_BATCH, CHECKPOINTING), "auto")
    given = settings_in(wishes.given or "")
    replaced = {name: (value, "--set") for name, value in (left_open | given).items()}
    profile = with_overrides(document, replaced).profile
    by_rows = wishes.epochs is not None or (wishes.rows is not None and profile.train.epochs != 0)
    train = {
        "max_length": wishes.length, "epochs": wishes.epochs,
        "max_steps": 0 if by_rows and "train.max_steps" not in given else None,
        "micro_batch": wishes.micro_batch, "gradient_checkpointing": wishes.checkpointing,
    }  # fmt: skip
    groups = {"train": _changed(profile.train, **train), "lora": _changed(profile.lora, rank=wishes.rank)}
    return _changed(profile, method=wishes.method, **groups)


def _changed(part: Any, **wished: Any) -> Any:
    return part.model_copy(update={name: value for name, value in wished.items() if value is not None})


def _card(
    gpu: str, vram: float | None, tflops: float | None, capability: str | None, gpus: int | None
) -> CardFacts | None:
    """The card that was named or described, else this machine's, else None."""
    if tflops and not (gpu or vram):
        raise CourseError(
            "--tflops alone describes no card.", "--tflops together with --gpu or --vram",
            "add --vram with the memory of the card in GiB",
        )  # fmt: skip
    if gpu or vram:
        found = cards.find(gpu or "a card of your own", vram, tflops, _capability(capability))
    else:
        card = _of_this_machine()
        if card is None:
            return None
        found = cards.of_machine(card)
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


def _table(wishes: Wishes, gpus: int | None) -> Answer:
    """Which profile fits which card; with a wish, what was wished for on every card."""
    if gpus is None and not any(value is not None for value in astuple(wishes)):
        return Answer({"fits": forecasting.which_fits()}, _headed(dashboard.aligned(report.fits_table())))
    made = [_forecast(replace(card, count=gpus or 1), wishes)[1] for card in cards.every()]
    return Answer({"fits": [one.as_dict() for one in made]}, _headed(dashboard.aligned(report.compared(made))))


def _headed(table: str) -> str:
    return f"No card here and none named with --gpu: the cards one can rent.\n\n{table}\n\n{forecasting.REMARK}"
