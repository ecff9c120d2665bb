"""The arithmetic of scaling: what cards send each other in a step, and what that leaves of their speed.

Nothing is sent while a card computes, though DDP and FSDP hide a part of it. Computing is a measured speed of one card,
or the forecast. What is measured decides: `compare` holds it against this arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from nbutils.config import Profile, load
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.models import Shape, find_shape
from nbutils.plan import RENTED, forecast, gpus, money
from nbutils.plan.forecast import LARGEST_STEP, PACKED, Recipe, launch_seconds
from nbutils.plan.gpus import GPUSpec

REACHED = 0.8  # of the published number: an assumption, as are all of these until `compare` has seen your machine
LINKS = {  # GB/s that a card sends while it receives as much
    "pcie4": forecast.RAM_LINK / 1e9,  # x16, 31.5 published; 10 to 20 through RAM, where cards have no P2P
    "nvlink3": 300 * REACHED,  # A100: 600 in both directions (NVIDIA's data sheet)
    "nvlink4": 450 * REACHED,  # H100, H200: 900 in both directions (NVIDIA's data sheet)
    "10gbe": 10 / 8 * REACHED,  # Ethernet, Gbit/s in its name, shared by the cards of a machine: a ring crosses it once
    "25gbe": 25 / 8 * REACHED,
    "ib100": 100 / 8 * REACHED,  # InfiniBand EDR, one adapter in a machine
    "ib400": 400 / 8 * REACHED,  # InfiniBand NDR
}
SHOWN = ("nvlink4", "ib400", "pcie4", "25gbe")
CARDS = (1, 2, 4, 8, 16, 32, 64)
MOST = 4096  # cards looked at
ROWS = 10_000, 300.0  # of a usual training: how many, and their mean length


class Step(NamedTuple):
    """Seconds of an optimizer step of each card, and the tokens of all cards in it."""

    computing: float
    sending: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        """On all cards together."""
        return self.tokens / (self.computing + self.sending)


def bandwidth(link: str | float) -> float:
    """Bytes per second of a link by name, or of a number in GB/s."""
    if isinstance(link, str) and link not in LINKS:
        raise CourseError(
            tr("There is no link {name!r}.", name=link),
            allowed=tr("{names}, or a number in GB/s", names=", ".join(LINKS)),
            todo=tr("Choose one of these, or give the bandwidth you measured."),
        )
    return 1e9 * (LINKS[link] if isinstance(link, str) else link)


def sending_seconds(shape: Shape, recipe: Recipe, link: str | float) -> float:
    """What the cards of a recipe need to send in one optimizer step, whatever its engine."""
    return forecast.sent_bytes(shape, recipe) / bandwidth(link)


def step(shape: Shape, recipe: Recipe, rows: float, link: str | float, rate: float) -> Step:
    """A step in which each of `recipe.cards` takes so many rows; `rate` is the tokens per second of one card.

    Fewer rows than a micro-batch make the micro-step shorter, down to the time that starting its kernels takes.
    """
    size = recipe.per_device_train_batch_size
    micro = min(float(size), rows)
    each = recipe.length * (PACKED if recipe.packing else 1.0)
    floor = min(launch_seconds(shape, recipe), size * each / rate)  # what was measured was possible
    micro_steps = math.ceil(rows / micro)
    sending = sending_seconds(shape, replace(recipe, gradient_accumulation_steps=micro_steps), link)
    return Step(max(rows * each / rate, micro_steps * floor), sending, recipe.cards * rows * each)


def table(
    shape: Shape, recipe: Recipe, gpu: GPUSpec, batch: int = LARGEST_STEP, fixed: bool = False,
    link: str | float = "pcie4", network: str | float = "25gbe", in_machine: int = 8, rate: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """1 to 64 cards: with `batch` rows for each in a step (weak scaling), or, if it is `fixed`, for all (strong).

    A fixed batch has no line for more cards than rows. Above `in_machine` cards the link is the network.
    """
    alone = replace(recipe, engine="ddp", cards=1), gpu.model_copy(update={"count": 1})
    rate = rate or forecast.tokens_per_second(shape, *alone)
    if rate is None:
        raise CourseError(
            tr("The arithmetic of {gpu} is not known, so there is no speed of one card to begin with.", gpu=gpu.name),
            todo=tr("Give the tokens per second you measured on one card as rate."),
        )
    rows = []
    for cards in (cards for cards in CARDS if not fixed or batch % cards == 0):
        slowest = link if cards <= in_machine else network
        made = step(shape, replace(recipe, cards=cards), batch / cards if fixed else batch, slowest, rate)
        speed = made.tokens_per_second
        prices = (price and price * cards / speed / 3600 * 1e6 for price in (gpu.yuan, gpu.dollars))
        rows.append({
            tr("cards"): cards, tr("computing"): f"{made.computing:.2f} s", tr("sending"): f"{made.sending:.2f} s",
            "tokens/s": f"{speed:,.0f}", tr("efficiency"): f"{speed / cards / rate:.0%}",
            tr("a million tokens"): money(*prices),
        })  # fmt: skip
    return rows


def sending_wins(shape: Shape, recipe: Recipe, rows: int, link: str | float, rate: float, fixed: bool) -> int | None:
    """The fewest cards that send for as long as they compute; with `fixed` they share the rows. None: no number."""
    for cards in range(2, MOST + 1):
        made = step(shape, replace(recipe, cards=cards), rows / cards if fixed else rows, link, rate)
        if made.sending >= made.computing:
            return cards
    return None


def compare(shape: Shape, recipe: Recipe, alone: float, together: float, link: str | float) -> dict[str, float]:
    """A measured step of `recipe.cards` processes against the arithmetic.

    `alone` is the step of one process with as many rows as each of them takes in `together`.
    """
    sending = sending_seconds(shape, recipe, link)
    found = {"computing": alone, "sending": sending, "predicted": alone + sending, "measured": together}
    return found | {"ratio": together / (alone + sending)}


class Case(NamedTuple):
    """A training to reckon with, and the tokens per second of one card."""

    shape: Shape
    recipe: Recipe
    gpu: GPUSpec
    rate: float
    measured: bool

    def __str__(self) -> str:
        words = {"model": self.shape.name, "method": self.recipe.method, "gpu": self.gpu.name, "rate": self.rate}
        if self.measured:
            return tr("{model}, {method}, {gpu}: {rate:,.0f} tokens/s of one card, measured", **words)
        return tr("{model}, {method}, {gpu}: {rate:,.0f} tokens/s of one card, a forecast", **words)

    def table(self, engine: str) -> list[dict[str, Any]]:
        """1 to 64 cards under an engine, each with as many rows in a step."""
        return table(self.shape, replace(self.recipe, engine=engine), self.gpu, rate=self.rate)

    def limits(self, engines: Sequence[str], links: Sequence[str] = SHOWN) -> list[dict[str, Any]]:
        """For each link, the fewest cards that send for as long as they compute; a dash: no number of them."""
        rows = []
        for link in links:
            row: dict[str, Any] = {tr("link"): link, "GB/s": f"{LINKS[link]:g}"}
            for engine in engines:
                asked = self.shape, replace(self.recipe, engine=engine), LARGEST_STEP, link, self.rate
                words = {"engine": engine, "rows": LARGEST_STEP}
                row[tr("{engine}, {rows} rows a card", **words)] = sending_wins(*asked, fixed=False) or "–"
                row[tr("{engine}, {rows} rows in all", **words)] = sending_wins(*asked, fixed=True) or "–"
            rows.append(row)
        return rows


def case(resolved: Any, measured: float | None = None) -> Case:
    """This machine's model and GPU, with the speed `measured` or forecast; else a 7B model on a GPU to rent."""
    if resolved.gpu:
        with suppress(CourseError):  # the model's shape, or the GPU's speed, is not known
            return _case(resolved.profile, gpus.of_machine(resolved.gpu), find_shape(resolved.model), measured)
    rented = load(RENTED[1])
    return _case(rented, gpus.find(RENTED[0]), find_shape(rented.model))


def _case(profile: Profile, gpu: GPUSpec, shape: Shape, measured: float | None = None) -> Case:
    made = forecast.of_profile(profile, gpu, shape, *ROWS)
    rate = measured or made["tokens_per_second"]
    if rate is None:
        raise CourseError(
            tr("The arithmetic of {gpu} is not known, so there is no speed of one card to begin with.", gpu=gpu.name),
            todo=tr("Give the tokens per second you measured on one card as rate."),
        )
    return Case(shape, Recipe(**made["recipe"]), gpu, rate, bool(measured))
