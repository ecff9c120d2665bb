"""Micro-batch and checkpointing left to `auto`: the plan's fastest that fits this card, each with its reason.

Not here: the formulas (plan). A forecast never stops a lesson here; lesson 03 asks `plan.require` before it trains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbutils import scaling
from nbutils.errors import CourseError
from nbutils.hardware import Card, Choice
from nbutils.profiles.recipe import Rows
from nbutils.profiles.schema import Profile, Train

if TYPE_CHECKING:
    from nbutils.plan import CardFacts, Option, Shape

MICRO_BATCH, CHECKPOINTING = "train.micro_batch", "train.gradient_checkpointing"
WITHOUT_CARD = 2  # packed rows at a time on a CPU: they form one line there, attention grows with its square
CPU_TOKENS = 512  # in such a line, where rows are not packed


def known_shape(model: str) -> Shape | None:
    """The shape of a model, where it is known before its download."""
    from nbutils import plan

    try:
        return plan.find(model)
    except CourseError:
        return None


def by_plan(profile: Profile, shape: Shape | None, card: Card | None, rows: Rows | None) -> dict[str, Choice]:
    """The two values, as far as the profile leaves them to the plan."""
    train = profile.train
    left = {MICRO_BATCH: train.micro_batch, CHECKPOINTING: train.gradient_checkpointing}
    wanted = [name for name, value in left.items() if value == "auto"]
    if not wanted:
        return {}
    found = _without_card(train, rows) if card is None else _with_card(profile, shape, card, rows)
    return {name: found[name] for name in wanted}


def _without_card(train: Train, rows: Rows | None) -> dict[str, Choice]:
    most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not train.packing else WITHOUT_CARD
    size = scaling.micro_batch_for(train.step_rows, most, scaling.world_size())
    return {
        MICRO_BATCH: Choice(size, "plan: no card, so few tokens at a time: attention grows with their square"),
        CHECKPOINTING: Choice("off", "plan: no card, so memory is no worry and recomputing would cost time"),
    }


def _with_card(profile: Profile, shape: Shape | None, card: Card, rows: Rows | None) -> dict[str, Choice]:
    """The fastest that fits; the smallest, with a warning, if nothing does; careful values if the shape is unknown."""
    from nbutils import plan
    from nbutils.plan import choosing

    facts = replace(plan.cards.of_machine(card), count=scaling.world_size())
    train = profile.train
    if shape is None:
        reason = "plan: the model's shape is not known before its download, so the careful value"
        size = 1 if train.micro_batch == "auto" else train.micro_batch
        return {MICRO_BATCH: Choice(size, reason), CHECKPOINTING: Choice("on", reason)}
    recipe = plan.from_profile(profile, facts, rows)
    found = plan.options(shape, recipe, train.step_rows, facts, *choosing.left_open(train))
    return _reasoned(found, facts)


def _reasoned(found: list[Option], facts: CardFacts) -> dict[str, Choice]:
    """The chosen option with the reason, which names a neighbour that would not fit."""
    from nbutils.plan import choosing

    limit = choosing.limit_gib(facts)
    chosen = choosing.choose(found, facts)
    of = f"{chosen.peak_gib:.1f} of {facts.memory_gib:.1f} GiB by forecast"
    allowed = f"{limit:.1f} are used at most ({choosing.MARGIN:.0%} and {choosing.CONTEXT_GIB:g} GiB stay free)"
    if chosen.peak_gib > limit:
        missing = f"plan: DOES NOT FIT, {chosen.peak_gib - limit:.1f} GiB are missing ({of}, {allowed})"
        why = {MICRO_BATCH: missing, CHECKPOINTING: f"{missing}; choose a smaller MODEL or a shorter max_length"}
    else:
        why = {MICRO_BATCH: f"plan: {of}, the fastest that fits; {allowed}", CHECKPOINTING: _way(chosen, found, limit)}
    values = {MICRO_BATCH: chosen.recipe.micro_batch, CHECKPOINTING: chosen.recipe.checkpointing}
    return {name: Choice(values[name], why[name]) for name in values}


def _way(chosen: Option, found: list[Option], limit: float) -> str:
    """Why layers are recomputed, or why not."""
    if chosen.recipe.checkpointing == "off":
        return "plan: memory allows it, and recomputing would cost time"
    same = [one for one in found if one.recipe.micro_batch == chosen.recipe.micro_batch]
    off = next((one for one in same if one.recipe.checkpointing == "off"), None)
    if off is None:
        return "plan: the fastest that fits"
    rows = f"micro_batch {off.recipe.micro_batch} without recomputing"
    if off.peak_gib > limit:
        return f"plan: {rows} would need {off.peak_gib:.1f} GiB"
    return f"plan: no slower than {rows} by forecast, and it needs less memory"
