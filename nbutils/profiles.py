"""The profile for this machine: `auto`, the model that can be had, what GPU and rows decide; each with its reason.

`load` reads one profile of `configs`, `resolve` settles it for this machine, `fit` for the rows of the data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from nbutils import config, distributed, hardware, models
from nbutils.config import Document, Overrides, Profile, flat, keys, load, names, shown
from nbutils.errors import CourseError
from nbutils.hardware import GPU, Choice
from nbutils.models import KnownModel, Shape, is_known, is_tiny, known_models, model_folder
from nbutils.plan import gpus
from nbutils.plan.forecast import fastest, limit_gib, peak_gib
from nbutils.plan.schedule import Rows, Schedule, apply, choose, few_steps, schedule
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
    gpu: GPU | None
    given: Profile = field(repr=False)  # the profile as it was written, `auto` values and all
    reasons: Mapping[str, str] = field(repr=False)
    rows: Rows | None = None  # those it is settled for
    set_values: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """Every value with its reason, as aligned text of at most 120 columns."""
        rows = [(name, shown(choice.value), choice.reason) for name, choice in self.choices.items() if name != "about"]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        second = min(second, VALUE_WIDTH)
        lines = [f"The values of the profile {self.name}, each with its reason."]
        for name, value, reason in rows:
            columns = [name], textwrap.wrap(value, second), textwrap.wrap(reason, WIDTH - first - second - 4)
            for head, middle, tail in zip_longest(*columns, fillvalue=""):
                lines.append(f"{head:<{first}}  {middle:<{second}}  {tail}".rstrip())
        return "\n".join(lines)


def resolve(
    profile: str = "auto", model: str = "", *, gpu: GPU | None, platform: Platform, online: Callable[[], bool],
    overrides: Callable[[str], Overrides] = lambda name: {},
) -> Resolved:  # fmt: skip
    """The profile and the model for this machine; `auto` falls back to the bundled model when no other can be had."""

    def read(name: str) -> Document:
        document = config.read(name)
        document = config.with_overrides(document, overrides(document.file.stem))
        _refuse_impossible(document.profile, gpu)  # before any download
        return document

    chosen = _automatic(gpu, platform, model) if profile == "auto" else Choice(profile, "parameter PROFILE")
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
    reasons = dict.fromkeys(keys(), f"set in {document.file.name}") | document.reasons
    origin = {"folder": "", "modelscope": ", from ModelScope"}.get(source, f", from the {source}")
    reasons["model"] = f"{found.reason}{origin}; {'parameter MODEL' if model else reasons['model']}"
    value = models.fetched(found.value, source, places.work)
    name, given = document.file.stem, document.profile.model_copy(update={"model": value})
    first = {"profile": Choice(name, chosen.reason), "model": Choice(value, reasons["model"])}
    path = chosen.value if chosen.value == name else str(document.file)
    return _settled(Resolved(name, path, given, value, models.name_of(called, found.value), first, gpu, given, reasons))


def fit(resolved: Resolved, rows: Rows) -> Resolved:
    """The same with every value that was left to the data chosen for these rows."""
    return _settled(replace(resolved, rows=rows))


def _automatic(gpu: GPU | None, platform: Platform, model: str) -> Choice:
    """The profile that suits a GPU, and why."""
    if is_tiny(model):
        return Choice("tiny", "auto: the bundled model has a profile of its own")
    if gpu is None:
        return Choice("tiny", f"auto: no GPU found ({platform.name}), so the bundled tiny model on the CPU")
    age = "; torch may have no kernels for so old a GPU" if gpu.capability < OLDEST else ""
    return Choice(gpus.profile_for(gpu.capability, gpu.memory_gib), f"auto: {platform.name} with {gpu}{age}")


def _settled(resolved: Resolved) -> Resolved:
    """Every `auto` value decided by GPU, model and rows, and every value with its reason."""
    given, gpu, rows = resolved.given, resolved.gpu, resolved.rows
    try:
        shape: Shape | None = models.find_shape(given.model)
    except CourseError:
        shape = None  # not known before its download
    decided = _by_gpu(given, gpu) | choose(given, rows, shape, distributed.world_size())
    decided |= _by_plan(apply(given, decided), shape, gpu, rows)
    profile = apply(given, decided)
    choices = {"profile": resolved.choices["profile"], "model": resolved.choices["model"]}
    for key, value in flat(profile.model_dump()).items():
        reason = decided[key].reason if key in decided else ""
        choices[key] = Choice(value, reason or resolved.reasons[key])
    return replace(resolved, profile=profile, choices=choices)


def _by_gpu(profile: Profile, gpu: GPU | None) -> dict[str, Choice]:
    """The values left to the GPU; without one also the optimizer, as a run of a GPU may be merged or served here."""
    machine, optimizer, decided = profile.machine, profile.train.optimizer, dict[str, Choice]()
    if machine.precision == "auto":
        decided["machine.precision"] = hardware.precision(gpu)
    if machine.attention == "auto":
        exact = Choice("sdpa", "FlashAttention needs 16 bits, and machine.precision is fp32")
        decided["machine.attention"] = exact if machine.precision == "fp32" else hardware.attention(gpu)
    if machine.liger == "auto":
        choice = hardware.liger(gpu)
        decided["machine.liger"] = Choice("on" if choice.value else "off", choice.reason)
    if gpu is None and optimizer.endswith(("8bit", "32bit")):
        reason = f"{optimizer} needs a GPU: AdamW in 32 bits instead"
        decided["train.optimizer"] = Choice("adamw_torch_fused", reason)
    return decided


def _refuse_impossible(profile: Profile, gpu: GPU | None) -> None:
    """Stop at values this GPU cannot do, all at once."""
    machine, train = profile.machine, profile.train
    old = gpu is None or gpu.capability < hardware.BF16_FROM
    impossible = {
        f"machine.precision={machine.precision}": (gpu is None and machine.precision == "fp16")
        or (old and machine.precision == "bf16"),
        f"machine.attention={machine.attention}": old and machine.attention in ("flash_attention_2", "varlen"),
        "machine.liger=on": gpu is None and machine.liger == "on",
        f"{CHECKPOINTING}=offload": gpu is None and train.gradient_checkpointing == "offload",
    }
    if found := ", ".join(name for name, holds in impossible.items() if holds):
        raise CourseError("profiles.impossible", gpu=gpu or "no GPU", problems=found)


def _by_plan(profile: Profile, shape: Shape | None, gpu: GPU | None, rows: Rows | None) -> dict[str, Choice]:
    """The fastest micro-batch and checkpointing that fit, as far as the profile leaves them to the plan."""
    train, processes = profile.train, distributed.world_size()
    left = {MICRO_BATCH: train.micro_batch, CHECKPOINTING: train.gradient_checkpointing}
    if "auto" not in left.values():
        return {}
    if gpu is None:
        most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not train.packing else CPU_ROWS
        size, way = distributed.micro_batch_for(train.step_rows, most, processes), "off"
        reason = "plan: without a GPU, few tokens at a time and no recomputing"
    elif shape is None:
        size, way = 1, "on"
        reason = "plan: the size of this model is not known before its download, so the safest value"
    else:
        spec = gpus.of_machine(gpu).model_copy(update={"count": processes})
        best = fastest(profile, shape, spec, rows)
        size, way = best.micro_batch, best.checkpointing
        peak, limit = peak_gib(shape, best), limit_gib(spec)
        verdict = "the fastest that fits" if peak <= limit else "DOES NOT FIT"
        reason = f"plan: {verdict}: {peak:.1f} GiB forecast, {limit:.1f} of {spec.memory_gib:.1f} GiB allowed"
    found = {MICRO_BATCH: Choice(size, reason), CHECKPOINTING: Choice(way, reason)}
    return {name: choice for name, choice in found.items() if left[name] == "auto"}
