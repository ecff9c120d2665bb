"""The profile for this machine: `auto`, the model that can be had, what the card can do; each value with its reason.

Not here: how a YAML is read (reading) or which model a name means (models).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from nbutils import hardware, scaling
from nbutils.errors import CourseError
from nbutils.hardware import Card, Choice
from nbutils.platforms import Platform, folders
from nbutils.profiles import models, recipe, sizing
from nbutils.profiles.reading import Document, did_you_mean, problems, read, refuse
from nbutils.profiles.schema import Profile, flat, keys, shown

OLDEST = (7, 0)
BY_MEMORY = ((20.0, "t4_16gb"), (38.0, "ampere_24gb"), (70.0, "ampere_40gb"), (130.0, "hopper_80gb"))
LARGEST = "hopper_141gb"
WIDTH, VALUE_WIDTH = 120, 34
NOT_TO_SET = {"model": "is not set this way: use MODEL", "about": "is not set, it describes the profile"}
Overrides = Mapping[str, tuple[Any, str]]  # {dotted name: (value, reason)}


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
    rows: recipe.Rows | None = None  # those it is settled for
    set_values: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """Every value with its reason, as aligned text of at most 120 columns."""
        own = re.compile(rf"\s+\[{re.escape(self.name)}\.ya?ml\]$")
        rows = [
            (name, shown(choice.value), own.sub("", choice.reason))
            for name, choice in self.choices.items()
            if name != "about"
        ]
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

    `overrides` is asked, by the name of the profile, for values that replace the profile's own before any is decided.
    """
    chosen = automatic(card, platform, model) if profile == "auto" else Choice(profile, "parameter PROFILE")
    document = _read(chosen.value, overrides, card)
    places = folders(platform)
    called = model or document.profile.model
    wanted = models.meant(called, places.inputs)
    way = models.reachable(wanted.value, online, places.work)
    if not way:
        if profile != "auto" or model:
            raise models.unreachable(wanted.value)
        lost = f"{wanted.value} is not in the cache and the model hub does not answer"
        chosen = Choice("tiny", f"{chosen.value} would suit this machine, but {lost}: the bundled model instead")
        document, way = _read("tiny", overrides, card), "folder"
        called = document.profile.model
        wanted = models.meant(called)
    origin = "parameter MODEL" if model else _reason(document, "model")
    source = {"folder": "", "modelscope": ", from ModelScope"}.get(way, f", from the {way}")
    value = models.fetched(wanted.value, way, places.work)
    decided = Choice(value, f"{wanted.reason}{source}; {origin}")
    return _assemble(chosen, document, decided, card, models.name_of(called, wanted.value))


def _read(name: str, overrides: Callable[[str], Overrides], card: Card | None) -> Document:
    """The profile with the values that replace its own; what is wrong with them is told before any download."""
    document = read(name)
    document = with_overrides(document, overrides(document.file.stem))
    _refuse_impossible(document.profile, card)
    return document


def automatic(card: Card | None, platform: Platform, model: str = "") -> Choice:
    """The profile that suits a card, and why."""
    if models.is_tiny(model):
        return Choice("tiny", "auto: the bundled model has a profile of its own")
    if card is None:
        return Choice("tiny", f"auto: {platform.name} shows no card, so the bundled model on the CPU")
    name = for_card(card.capability, card.memory_gib)
    if card.capability < hardware.BF16_FROM:
        old = "; so old that current torch may lack its kernels (lesson 01 tries)" if card.capability < OLDEST else ""
        return Choice(name, f"auto: {platform.name} with {card}, older than bfloat16{old}")
    return Choice(name, f"auto: {platform.name} with {card}")


def for_card(capability: tuple[int, int], memory_gib: float) -> str:
    """The profile made for cards like this one."""
    if capability < hardware.BF16_FROM:
        return "t4_16gb"
    return next((name for below, name in BY_MEMORY if memory_gib < below), LARGEST)


def with_overrides(document: Document, overrides: Overrides) -> Document:
    """The profile with some values replaced, checked again as a whole."""
    known = [name for name in keys() if name not in NOT_TO_SET]
    wrong = [
        f"{name}: {NOT_TO_SET.get(name) or f'unknown key{did_you_mean(name, known)}'}"
        for name in overrides
        if name not in known
    ]
    tree = document.profile.model_dump()
    for name, (value, _) in overrides.items():
        group, _, leaf = name.rpartition(".")
        if name in known:
            (tree[group] if group else tree)[leaf] = value
    if tree["method"] == "auto" and overrides.get("quantization.type", ("none",))[0] != "none":
        tree["method"] = "qlora"  # whoever names a way to quantise wants it
    steps = tree["train"]["max_steps"]
    if "train.epochs" in overrides and "train.max_steps" not in overrides and steps:
        wrong.append(f"train.epochs: train.max_steps is {steps} and ends the run first; set train.max_steps=0 too")
    reasons = {name: reason for name, (_, reason) in overrides.items()}
    refuse([*wrong, *problems(tree)], f"{document.file.stem} with {' and '.join(dict.fromkeys(reasons.values()))}")
    return replace(document, profile=Profile.model_validate(tree), replaced=reasons)


def fit(resolved: Resolved, rows: recipe.Rows) -> Resolved:
    """The same with every value that was left to the data chosen for these rows."""
    return _settled(replace(resolved, rows=rows))


def _settled(resolved: Resolved) -> Resolved:
    profile, choices = _settle(resolved.given, resolved.reasons, resolved.card, resolved.rows)
    decided = {name: resolved.choices[name] for name in ("profile", "model")}
    return replace(resolved, profile=profile, choices=decided | choices)


def _assemble(chosen: Choice, document: Document, model: Choice, card: Card | None, called: str) -> Resolved:
    name = document.file.stem
    source = chosen.value if chosen.value == name else str(document.file)
    reasons = {key: _reason(document, key) for key in keys()} | {"model": model.reason}
    given = document.profile.model_copy(update={"model": model.value})
    first = {"profile": Choice(name, chosen.reason), "model": model}
    return _settled(Resolved(name, source, given, model.value, called, first, card, given, reasons))


def _reason(document: Document, key: str) -> str:
    """Why a value was replaced; else the comment beside it and the file it stands in."""
    if key in document.replaced:
        return document.replaced[key]
    comment = document.reasons.get(key, "")
    return f"{comment}  [{document.file.name}]" if comment else f"set in {document.file.name}"


def _settle(
    profile: Profile, reasons: Mapping[str, str], card: Card | None, rows: recipe.Rows | None
) -> tuple[Profile, dict[str, Choice]]:
    """The profile with its `auto` values decided by the card and the rows, and every value with its reason."""
    decided = _by_card(profile, card)
    profile = _with(profile, "machine", decided)
    shape = sizing.known_shape(profile.model)
    params, hidden = (shape.params, shape.hidden) if shape else (None, None)
    profile, by_model = recipe.choose_method(profile, params)
    by_rows = recipe.choose(profile.train, rows, hidden, scaling.world_size())
    profile = _with(profile, "train", by_rows)
    planned = sizing.by_plan(profile, shape, card, rows) | _without_bitsandbytes(profile.train.optimizer, card)
    profile, decided = _with(profile, "train", planned), decided | by_model | by_rows | planned
    values = flat(profile.model_dump())
    return profile, {key: decided.get(key, Choice(values[key], reasons[key])) for key in keys()}


def _with(profile: Profile, group: str, decided: Mapping[str, Choice]) -> Profile:
    """The profile with the decided values of one group."""
    values = {name.removeprefix(f"{group}."): choice.value for name, choice in decided.items()}
    return profile.model_copy(update={group: getattr(profile, group).model_copy(update=values)})


def _by_card(profile: Profile, card: Card | None) -> dict[str, Choice]:
    """The values left to the card."""
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


def _without_bitsandbytes(optimizer: str, card: Card | None) -> dict[str, Choice]:
    """A machine without a card opens the runs of one with a card, to merge or to serve: it must not stumble here."""
    if card is not None or not optimizer.endswith(("8bit", "32bit")):
        return {}
    return {"train.optimizer": Choice("adamw_torch_fused", f"{optimizer} needs a card: AdamW in 32 bits instead")}


def _refuse_impossible(profile: Profile, card: Card | None) -> None:
    """Stop at values this card cannot do, all at once."""
    machine = profile.machine
    old = card is not None and card.capability < hardware.BF16_FROM
    found = []
    if machine.precision in ("bf16", "fp16") and card is None:
        found.append(f"machine.precision: {machine.precision} needs a card: choose auto or fp32")
    if machine.precision == "bf16" and old:
        found.append("machine.precision: bf16 needs capability 8.0: choose auto or fp16")
    if machine.attention in ("flash_attention_2", "varlen") and (card is None or old):
        found.append(f"machine.attention: {machine.attention} needs a card of capability 8.0: choose auto or sdpa")
    if profile.train.gradient_checkpointing == "offload" and card is None:
        found.append("train.gradient_checkpointing: offload parks what is on a card: choose auto, off or on")
    if machine.liger == "on" and card is None:
        found.append("machine.liger: on needs a card: choose auto or off")
    if found:
        raise CourseError(
            f"this machine ({card or 'no card'}) cannot do:" + "".join(f"\n    - {line}" for line in found),
            "values this card has, or auto",
            "change the values named above in SET or in a copy of the profile, or use another machine",
        )
