"""The forecast of a training: the fastest setting that fits a GPU, with its memory, speed, time and cost.

What cannot be known stays None, and a note says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, TypeVar

from nbutils import distributed
from nbutils.config import SFT, Profile, flat
from nbutils.errors import CourseError
from nbutils.files import GIB
from nbutils.hardware import BF16_FROM, Choice
from nbutils.language import tr
from nbutils.models import Config, Shape, find_shape, shape_in
from nbutils.plan.gpus import GPUSpec, Price
from nbutils.plan.memory import ADAPTER, Recipe, limit_gib, parts, peak_gib
from nbutils.plan.recipe import Rows, Schedule, apply, choose, rows_per_step, schedule
from nbutils.plan.speed import tokens_per_second
from nbutils.record import Facts

NEARLY_FASTEST = 0.98  # of the highest speed: from here on settings count as equally fast
STEP_ARGUMENTS = (  # of SFTConfig: they decide the memory and speed of a step, not what it learns
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "activation_offloading",
)  # fmt: skip
RECOMPUTE_MODES = {  # (gradient_checkpointing, activation_offloading) by the name of both together
    "off": (False, False),
    "on": (True, False),
    "offload": (True, True),
}
SCHEDULE_FACTS = ("steps", "examples_per_step", "epochs", "learning_rate")
ASSUMED_SPEED = {"off": 1e6, "on": 1e3, "offload": 1.0}  # of a row, on an unknown GPU: only the order matters
MERGE_DISK_FACTOR = 1.1  # a merged model needs a tenth more disk than its weights have
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight


Option = TypeVar("Option")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory, speed, time and cost of any training on one or several GPUs."""

    gpu: GPUSpec
    parts: dict[str, float]  # GiB on each GPU by purpose; their sum is the peak of torch's allocator
    tokens_per_second: float | None
    hours: float | None

    @property
    def peak_gib(self) -> float:
        """The peak on one GPU."""
        return sum(self.parts.values())

    @property
    def limit_gib(self) -> float:
        """How much of the GPU the plan lets torch use."""
        return limit_gib(self.gpu)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_gib <= self.limit_gib

    @property
    def cost(self) -> Price:
        """The price of the whole training."""
        return self.gpu.price.times(self.gpu.count).times(self.hours)

    def columns(self) -> dict[str, str]:
        """The numbers by the heads of a table."""
        return {
            "limit GiB": f"{self.limit_gib:.1f}",
            "peak GiB": f"{self.peak_gib:.1f}",
            "fits": tr("yes") if self.fits else tr("no"),
            "tokens/s": f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else tr("unknown"),
            "time": time_text(self.hours) if self.hours else tr("unknown"),
            "cost": str(self.cost),
        }


@dataclass(frozen=True, kw_only=True)
class Forecast(Estimate):
    """What is expected of a fine-tuning."""

    shape: Shape
    recipe: Recipe
    batch: int  # rows of an optimizer step, on all GPUs together
    checkpoints: int  # how many are kept
    schedule: Schedule | None
    mean_length: float = 0.0  # of the rows that were asked about

    @property
    def smallest(self) -> Recipe:
        """The same training with the lowest peak that any micro-batch and recomputing reaches."""
        recipes = candidates(self.recipe, self.batch, self.gpu)
        return min(recipes, key=lambda recipe: peak_gib(self.shape, recipe))

    @property
    def least_gib(self) -> float:
        """The peak of the smallest setting."""
        return peak_gib(self.shape, self.smallest)

    @property
    def requirement(self) -> str:
        """The memory that is needed at least, and what there is."""
        return tr(
            "{model} with {strategy} needs at least {least:.1f} GiB on each {gpu}, which allows {limit:.1f}",
            model=self.shape.name,
            strategy=self.recipe.engine,
            least=self.least_gib,
            gpu=self.gpu.name,
            limit=self.limit_gib,
        )

    def require_room(self) -> None:
        """Refuse a training whose smallest setting does not fit, whatever the profile names."""
        if self.least_gib > self.limit_gib:
            raise CourseError(
                f"{self.requirement}.",
                todo=(
                    "Take more or larger GPUs, a smaller MODEL, a shorter sft.max_length, or qlora instead of "
                    "lora; `python -m nbutils plan --gpus N --engine NAME` forecasts it."
                ),
            )

    @property
    def disk_gib(self) -> dict[str, float]:
        """What goes to the disk, by purpose."""
        weights = self.shape.stored_params * 2 / GIB
        trained = self.shape.adapter_params(self.recipe.r) / GIB
        checkpoint = trained * (ADAPTER + self.recipe.moment_bytes)
        return {
            "download": weights,
            "merged": weights * MERGE_DISK_FACTOR,
            "checkpoints": checkpoint * self.checkpoints,
        }

    @property
    def notes(self) -> list[str]:
        """What a learner should know about the forecast."""
        notes = []
        if self.gpu.name != "H200":
            notes.append(tr("the speed follows from published numbers: only the H200 was measured"))
        if self.mean_length > self.recipe.length:
            notes.append(
                tr(
                    "lesson 03 leaves out rows of more than {length} tokens, which is most of yours: ask again with "
                    "--length, and set sft.max_length and vllm.max_model_len to it",
                    length=self.recipe.length,
                )
            )
        if self.gpu.note:
            notes.append(tr(self.gpu.note))
        if self.recipe.uses_reference_code(self.shape):
            notes.append(
                tr(
                    "the kernels for the Gated DeltaNet layers of {model} do not run on this GPU. Without them a "
                    "step took 17 times as long where both were measured (Qwen3.5-0.8B, one H200): take a model "
                    "without such layers, as Qwen3-4B-Instruct-2507 is",
                    model=self.shape.name,
                )
            )
        elif self.hours is None:
            notes.append(tr("hours need --rows and --mean-length, and --tflops for a GPU that is not in the table"))
        return notes

    def columns(self) -> dict[str, str]:
        """The numbers by the heads of a table; in place of an unknown speed, why it is low."""
        columns = super().columns()
        if self.recipe.uses_reference_code(self.shape):
            columns["tokens/s"] = tr("without kernels")
        return columns

    def facts(self) -> Facts:
        """The forecast as `plan --json` prints it."""
        return {
            "model": self.shape.name,
            "gpu": self.gpu.name,
            "gpus": self.gpu.count,
            "card": self.gpu.model_dump(),
            "recipe": asdict(self.recipe),
            "batch": self.batch,
            **{name: getattr(self.schedule, name, None) for name in SCHEDULE_FACTS},
            "peak_vram_gib": self.peak_gib,
            "limit_gib": self.limit_gib,
            "fits": self.fits,
            "parts": self.parts,
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "cost": self.cost._asdict(),
            "disk_gib": self.disk_gib,
            "after_gib": {"merge_ram": MERGE_RAM_GIB, "on_card": self.shape.params * self.recipe.number_bytes / GIB},
            "notes": self.notes,
        }


def time_text(hours: float) -> str:
    """Minutes below an hour, else hours."""
    if hours < 1:
        return tr("{minutes:.0f} min", minutes=max(1.0, 60 * hours))
    return tr("{hours:.1f} h", hours=hours)


def known_shape(model: str, config: Config | None = None) -> Shape | None:
    """The shape of a model, also by the config.json of one that is not here yet; None if nothing tells it."""
    with suppress(CourseError):
        return find_shape(model)
    with suppress(ValueError, TypeError, KeyError, ZeroDivisionError):
        return shape_in(model, config or {})
    return None


def of_profile(
    profile: Profile,
    gpu: GPUSpec,
    shape: Shape,
    rows: Rows | None = None,
    strategy: str = "ddp",
) -> Forecast:
    """Forecast a profile on a GPU: the recipe decides `auto` values by the rows, then the fastest setting that fits.

    If nothing fits, it is the setting with the lowest peak.
    """
    if shape.linear_attention:
        distributed.require_gathered_by_layer(strategy, shape.name)
    settled = apply(profile, choose(profile, rows, shape, gpu.count))
    if shape.linear_attention and gpu.capability < BF16_FROM:
        settled = apply(settled, {"from_pretrained.dtype": Choice("float32", "")})  # as in the lessons
    recipe = best_option(shape, open_recipes(settled, profile.sft, gpu, rows, strategy), gpu)
    rate = tokens_per_second(shape, recipe, gpu)
    planned = schedule(settled.sft, rows, gpu.count) if rows else None
    hours = None
    if planned and rate:
        hours = planned.steps * planned.tokens_per_step / rate / 3600
    return Forecast(
        shape=shape,
        gpu=gpu,
        recipe=recipe,
        batch=rows_per_step(settled.sft, gpu.count),
        checkpoints=settled.sft.save_total_limit,
        schedule=planned,
        parts=parts(shape, recipe),
        tokens_per_second=rate,
        hours=hours,
    )


def assumed_rows(profile: Profile, rows: int | None, mean_length: float | None) -> Rows | None:
    """Rows of which only number and mean length are known; None if one of them is not."""
    rows = rows or profile.course.rows
    if not rows or not mean_length:
        return None
    longest = profile.sft.max_length
    mean = min(mean_length, longest)
    # in instruction data the standard deviation of lengths is about their mean
    return Rows(rows, mean, spread=min(mean, longest - mean))


def recipe_of(facts: Mapping[str, Any]) -> Recipe:
    """The recipe that lesson 03 trained with, from its facts."""
    cards = facts["processes"]
    strategy = facts.get("engine") or "ddp"
    recipe = _recipe_from_settings(facts["settings"], strategy, cards)
    share = facts["batch"] // cards
    times = share // recipe.per_device_train_batch_size
    return replace(recipe, gradient_accumulation_steps=times)


def _recipe_from_settings(settings: Mapping[str, Any], strategy: str, cards: int) -> Recipe:
    """The recipe in settings by dotted name: a field of Recipe is called as the last part of its setting."""
    by_last_part = {name.rpartition(".")[2]: value for name, value in settings.items()}
    values = {field.name: by_last_part[field.name] for field in fields(Recipe) if field.name in by_last_part}
    return Recipe(length=settings["sft.max_length"], engine=strategy, cards=cards, **values)


def candidates(recipe: Recipe, step_rows: int, gpu: GPUSpec, fixed: Collection[str] = ()) -> list[Recipe]:
    """Every micro-batch that divides a GPU's share of the step, with every way to recompute; `fixed` fields stay."""
    distributed.require_shares(step_rows, gpu.count)
    rows = step_rows // gpu.count
    recipes = []
    for size, (recompute, offload) in product(distributed.divisors(rows), RECOMPUTE_MODES.values()):
        option = replace(
            recipe,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=rows // size,
            gradient_checkpointing=recompute,
            activation_offloading=offload,
        )
        # with shards, activations are offloaded only if the profile says so
        allowed = not offload or recipe.engine == "ddp" or "activation_offloading" in fixed
        if allowed and all(getattr(option, name) == getattr(recipe, name) for name in fixed):
            recipes.append(option)
    return recipes


def best_option(shape: Shape, recipes: Sequence[Recipe], gpu: GPUSpec) -> Recipe:
    """The recipe that `fastest_fitting` chooses for this GPU."""

    def peak(recipe: Recipe) -> float:
        return peak_gib(shape, recipe)

    def speed(recipe: Recipe) -> float:
        rate = tokens_per_second(shape, recipe, gpu)
        if rate is not None:
            return rate
        rows = recipe.per_device_train_batch_size
        return rows * ASSUMED_SPEED[recipe.recompute]

    limit = limit_gib(gpu)
    return fastest_fitting(recipes, limit, peak, speed)


def fastest_fitting(
    options: Sequence[Option],
    limit: float,
    peak: Callable[[Option], float],
    speed: Callable[[Option], float],
) -> Option:
    """The fastest within a limit in GiB; of nearly equal ones, and if nothing fits, that with the lowest peak."""
    fitting = [option for option in options if peak(option) <= limit]
    if not fitting:
        return min(options, key=peak)
    fast_enough = NEARLY_FASTEST * max(map(speed, fitting))
    fast = [option for option in fitting if speed(option) >= fast_enough]
    return min(fast, key=peak)


def open_recipes(profile: Profile, as_written: SFT, gpu: GPUSpec, rows: Rows | None, strategy: str) -> list[Recipe]:
    """The recipes that a settled profile leaves open: every STEP_ARGUMENT that is `auto` in `as_written` may vary."""
    recent = gpu.capability >= BF16_FROM  # torch's varlen attention and Triton's kernels need it too
    by_gpu: Facts = {
        "from_pretrained.dtype": "bfloat16" if recent else "float16",
        "from_pretrained.attn_implementation": "varlen" if recent else "sdpa",
        "sft.use_liger_kernel": recent,
    }
    settings = flat(profile.model_dump(warnings=False))
    settings |= {name: value for name, value in by_gpu.items() if settings[name] == "auto"}
    settings["method"] = distributed.STRATEGIES[strategy] or settings["method"]
    recipe = _recipe_from_settings(settings, strategy, gpu.count)
    if rows and not recipe.packing:
        recipe = replace(recipe, length=round(rows.mean), spread=rows.spread)
    fixed = [name for name in STEP_ARGUMENTS if as_written[name] != "auto"]
    step_rows = rows_per_step(profile.sft, gpu.count)
    return candidates(recipe, step_rows, gpu, fixed)
