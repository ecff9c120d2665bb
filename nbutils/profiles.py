"""The profile for this machine: `auto`, the model that can be had, what GPU and rows decide; each with its reason.

`load` reads one profile of `configs`, `resolve` settles it for this machine, `fit` for the rows of the data.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from nbutils import config, hardware, models, scaling
from nbutils.config import Document, Overrides, Profile, Train, flat, keys, load, names, shown
from nbutils.errors import CourseError
from nbutils.hardware import Card, Choice
from nbutils.models import KnownModel, Shape, is_known, is_tiny, known_models, model_folder
from nbutils.plan import estimate, forecast, gpus, profile_for
from nbutils.plan import schedule as recipe
from nbutils.plan.schedule import Rows, Schedule, few_steps, schedule
from nbutils.platforms import Platform, folders

__all__ = [
    "KnownModel", "Profile", "Resolved", "Rows", "Schedule", "few_steps", "fit", "is_known", "is_tiny",
    "known_models", "load", "model_folder", "names", "resolve", "schedule",
]  # fmt: skip

OLDEST = (7, 0)
WIDTH, VALUE_WIDTH = 120, 34
MICRO_BATCH, CHECKPOINTING = "train.micro_batch", "train.gradient_checkpointing"
CPU_ROWS, CPU_TOKENS = 2, 512  # at a time: packed rows, or tokens, as attention grows with their square on a CPU


@dataclass(frozen=True)
class Resolved:
    """A profile settled for this machine.

    `source` and `called` give the same profile and model again when they are passed to `resolve`, on another machine
    too: `model` may be the folder into which this machine downloaded what is `called` by its hub id.
    `set_values` is what SET replaced in it.
    """

    name: str
    source: str
    profile: Profile
    model: str
    called: str
    choices: dict[str, Choice]
    card: Card | None
    given: Profile = field(repr=False)  # the profile as it was written, `auto` values and all
    reasons: Mapping[str, str] = field(repr=False)
    rows: Rows | None = None  # those it is settled for
    set_values: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """Every value with its reason, as aligned text of at most 120 columns."""
        own = re.compile(rf"\s+\[{re.escape(self.name)}\.ya?ml\]$")
        shown_choices = {name: choice for name, choice in self.choices.items() if name != "about"}
        rows = [(name, shown(choice.value), own.sub("", choice.reason)) for name, choice in shown_choices.items()]
        first = max(len(name) for name, _, _ in rows)
        second = min(VALUE_WIDTH, max(len(value) for _, value, _ in rows))
        lines = [f"Values and reasons are those of the profile {self.name}, where the reason names no other source."]
        for name, value, reason in rows:
            values = textwrap.wrap(value, second) or [""]
            reasons = textwrap.wrap(reason, WIDTH - first - second - 4)
            for head, middle, tail in zip_longest([name], values, reasons, fillvalue=""):
                lines.append(f"{head:<{first}}  {middle:<{second}}  {tail}".rstrip())
        return "\n".join(lines)


def resolve(
    profile: str = "auto", model: str = "", *, card: Card | None, platform: Platform, online: Callable[[], bool],
    overrides: Callable[[str], Overrides] = lambda name: {},
) -> Resolved:  # fmt: skip
    """The profile and the model for this machine; `auto` falls back to the bundled model when no other can be had.

    `overrides` gives, for the name of the profile, values that replace the profile's own before any is decided.
    """

    def read(name: str) -> Document:
        document = config.read(name)
        document = config.with_overrides(document, overrides(document.file.stem))
        _refuse_impossible(document.profile, card)  # before any download
        return document

    chosen = _automatic(card, platform, model) if profile == "auto" else Choice(profile, "parameter PROFILE")
    document = read(chosen.value)
    places = folders(platform)
    called = model or document.profile.model
    found = models.meant(called, places.inputs)
    source = models.reachable(found.value, online, places.work)
    if not source and (profile != "auto" or model):
        raise CourseError("models.unreachable", model=found.value)
    if not source:
        lost = f"{found.value} is not in the cache and the model hub does not answer"
        chosen = Choice("tiny", f"{chosen.value} would suit this machine, but {lost}: the bundled model instead")
        document, source, called = read("tiny"), "folder", "tiny"
        found = models.meant(called)
    reasons = {key: _reason(document, key) for key in keys()}
    origin = {"folder": "", "modelscope": ", from ModelScope"}.get(source, f", from the {source}")
    reasons["model"] = f"{found.reason}{origin}; {'parameter MODEL' if model else reasons['model']}"
    value = models.fetched(found.value, source, places.work)
    name, given = document.file.stem, document.profile.model_copy(update={"model": value})
    first = {"profile": Choice(name, chosen.reason), "model": Choice(value, reasons["model"])}
    path = chosen.value if chosen.value == name else str(document.file)
    return _settled(
        Resolved(name, path, given, value, models.name_of(called, found.value), first, card, given, reasons)
    )


def fit(resolved: Resolved, rows: Rows) -> Resolved:
    """The same with every value that was left to the data chosen for these rows."""
    return _settled(replace(resolved, rows=rows))


def _automatic(card: Card | None, platform: Platform, model: str) -> Choice:
    """The profile that suits a GPU, and why."""
    if is_tiny(model):
        return Choice("tiny", "auto: the bundled model has a profile of its own")
    if card is None:
        return Choice("tiny", f"auto: {platform.name} shows no card, so the bundled model on the CPU")
    age = ", older than bfloat16" if card.capability < hardware.BF16_FROM else ""
    age += "; so old that current torch may lack its kernels (lesson 01 tries)" if card.capability < OLDEST else ""
    return Choice(profile_for(card.capability, card.memory_gib), f"auto: {platform.name} with {card}{age}")


def _reason(document: Document, key: str) -> str:
    """Why a value was replaced; else the comment beside it and the file it stands in."""
    comment = document.reasons.get(key, "")
    written = f"{comment}  [{document.file.name}]" if comment else f"set in {document.file.name}"
    return document.replaced.get(key, written)


def _settled(resolved: Resolved) -> Resolved:
    """Every `auto` value decided by GPU, model and rows, and every value with its reason."""
    card, rows = resolved.card, resolved.rows
    decided = _by_gpu(resolved.given, card)
    profile = _with(resolved.given, "machine", decided)
    try:
        shape: Shape | None = models.find_shape(profile.model)
    except CourseError:
        shape = None  # not known before its download
    profile, by_model = recipe.choose_method(profile, shape.params if shape else None)
    by_rows = recipe.choose(profile.train, rows, shape.hidden if shape else None, scaling.world_size())
    profile = _with(profile, "train", by_rows)
    planned = _by_plan(profile, shape, card, rows)
    optimizer = profile.train.optimizer
    if card is None and optimizer.endswith(("8bit", "32bit")):  # a run of a GPU may be merged or served without one
        reason = f"{optimizer} needs a card: AdamW in 32 bits instead"
        planned["train.optimizer"] = Choice("adamw_torch_fused", reason)
    profile = _with(profile, "train", planned)
    decided = decided | by_model | by_rows | planned
    values = flat(profile.model_dump())
    choices = {key: decided.get(key, Choice(values[key], resolved.reasons[key])) for key in keys()}
    first = {name: resolved.choices[name] for name in ("profile", "model")}
    return replace(resolved, profile=profile, choices=first | choices)


def _with(profile: Profile, group: str, decided: Mapping[str, Choice]) -> Profile:
    """The profile with the decided values of one group."""
    values = {name.removeprefix(f"{group}."): choice.value for name, choice in decided.items()}
    return profile.model_copy(update={group: getattr(profile, group).model_copy(update=values)})


def _by_gpu(profile: Profile, card: Card | None) -> dict[str, Choice]:
    """The values left to the GPU."""
    machine, decided = profile.machine, {}
    if machine.precision == "auto":
        decided["machine.precision"] = hardware.precision(card)
    if machine.attention == "auto":
        exact = Choice("sdpa", "machine.precision is fp32, which FlashAttention does not take")
        decided["machine.attention"] = exact if machine.precision == "fp32" else hardware.attention(card)
    if machine.liger == "auto":
        choice = hardware.liger(card)
        decided["machine.liger"] = Choice("on" if choice.value else "off", choice.reason)
    return decided


def _refuse_impossible(profile: Profile, card: Card | None) -> None:
    """Stop at values this GPU cannot do, all at once."""
    machine, offload = profile.machine, profile.train.gradient_checkpointing == "offload"
    old = card is None or card.capability < hardware.BF16_FROM
    flash = machine.attention in ("flash_attention_2", "varlen")
    needs = {
        f"machine.precision: {machine.precision} needs a GPU: choose auto or fp32":
            card is None and machine.precision in ("bf16", "fp16"),
        "machine.precision: bf16 needs capability 8.0: choose auto or fp16":
            card is not None and old and machine.precision == "bf16",
        f"machine.attention: {machine.attention} needs a GPU of capability 8.0: choose auto or sdpa": old and flash,
        f"{CHECKPOINTING}: offload parks what is on a GPU: choose auto, off or on": card is None and offload,
        "machine.liger: on needs a GPU: choose auto or off": card is None and machine.liger == "on",
    }  # fmt: skip
    if found := "".join(f"\n    - {line}" for line, holds in needs.items() if holds):
        raise CourseError("profiles.impossible", card=card or "no GPU", problems=found)


# ---- micro-batch and checkpointing by the plan


def _by_plan(profile: Profile, shape: Shape | None, card: Card | None, rows: Rows | None) -> dict[str, Choice]:
    """The fastest micro-batch and checkpointing that fit, as far as the profile leaves them to the plan."""
    train = profile.train
    left = {MICRO_BATCH: train.micro_batch, CHECKPOINTING: train.gradient_checkpointing}
    if "auto" not in left.values():
        return {}
    if card is None:
        found = _without_gpu(train, rows)
    elif shape is None:
        reason = "plan: the model's shape is not known before its download, so the careful value"
        found = {MICRO_BATCH: Choice(1, reason), CHECKPOINTING: Choice("on", reason)}
    else:
        facts = replace(gpus.of_machine(card), count=scaling.world_size())
        setting = estimate.from_profile(profile, facts, rows)
        found = _reasoned(forecast.options(shape, setting, train.step_rows, facts, train), facts)
    return {name: choice for name, choice in found.items() if left[name] == "auto"}


def _without_gpu(train: Train, rows: Rows | None) -> dict[str, Choice]:
    most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not train.packing else CPU_ROWS
    size = scaling.micro_batch_for(train.step_rows, most, scaling.world_size())
    return {
        MICRO_BATCH: Choice(size, "plan: no card, so few tokens at a time: attention grows with their square"),
        CHECKPOINTING: Choice("off", "plan: no card, so memory is no worry and recomputing would cost time"),
    }


def _reasoned(found: list[forecast.Option], facts: gpus.CardFacts) -> dict[str, Choice]:
    """The best option with its reasons, which name a neighbour that would not fit."""
    limit, best = forecast.limit_gib(facts), forecast.best_option(found, facts)
    size, way = best.recipe.micro_batch, best.recipe.checkpointing
    of = f"{best.peak_gib:.1f} of {facts.memory_gib:.1f} GiB by forecast"
    margin = f"{forecast.MARGIN:.0%} and {forecast.CONTEXT_GIB:g} GiB stay free"
    allowed = f"{limit:.1f} are used at most ({margin})"
    off = next((one for one in found if one.recipe == replace(best.recipe, checkpointing="off")), None)
    if best.peak_gib > limit:
        rows = f"plan: DOES NOT FIT, {best.peak_gib - limit:.1f} GiB are missing ({of}, {allowed})"
        why = f"{rows}; choose a smaller MODEL or a shorter max_length"
        return {MICRO_BATCH: Choice(size, rows), CHECKPOINTING: Choice(way, why)}
    if way == "off":
        why = "plan: memory allows it, and recomputing would cost time"
    elif off is None:
        why = "plan: the fastest that fits"
    elif off.peak_gib > limit:
        why = f"plan: micro_batch {size} without recomputing would need {off.peak_gib:.1f} GiB"
    else:
        why = f"plan: no slower than micro_batch {size} without recomputing by forecast, and it needs less memory"
    rows = f"plan: {of}, the fastest that fits; {allowed}"
    return {MICRO_BATCH: Choice(size, rows), CHECKPOINTING: Choice(way, why)}
