"""The forecast of a training: the fastest setting that fits a GPU, with its memory, speed, time and cost.

What cannot be known stays None, and a note says what is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from nbutils import distributed
from nbutils.config import SFT, Profile, flat
from nbutils.files import GIB
from nbutils.hardware import BF16_FROM
from nbutils.language import tr
from nbutils.models import Shape
from nbutils.plan.gpus import GPUSpec, Price
from nbutils.plan.memory import ADAPTER, OPTIMIZER, Recipe, limit_gib, parts, peak_gib, ram_gib
from nbutils.plan.recipe import PACKED, Rows, Schedule, apply, choose, few_steps, rows_per_step, schedule
from nbutils.plan.speed import RAM_LINK, tokens_per_second

NEARLY = 0.98  # settings this close to the fastest count as equal; the one with the lowest peak is taken
STEP_ARGUMENTS = (  # of SFTConfig: they decide memory and speed of a step, and not what it learns
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "activation_offloading",
)  # fmt: skip
WAYS = ((False, False), (True, False), (True, True))  # gradient_checkpointing, activation_offloading
SCHEDULED = ("steps", "examples_per_step", "epochs", "learning_rate")
SPARE = 1.1  # merging needs a tenth more disk than the model has
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight


@dataclass(frozen=True)
class Forecast:
    """A training on a GPU, or on several."""

    shape: Shape
    gpu: GPUSpec
    recipe: Recipe
    smallest: Recipe  # the same training with the lowest peak
    batch: int  # rows of a step, on all GPUs
    checkpoints: int  # that are kept
    schedule: Schedule | None
    parts: dict[str, float]  # GiB of a GPU; their sum is the peak
    tokens_per_second: float | None
    hours: float | None
    notes: list[str]

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
    def smallest_gib(self) -> float:
        """The peak of the smallest setting."""
        return peak_gib(self.shape, self.smallest)

    @property
    def times_as_long(self) -> float | None:
        """How much longer the smallest setting takes."""
        slow = tokens_per_second(self.shape, self.smallest, self.gpu)
        return self.tokens_per_second / slow if self.tokens_per_second and slow else None

    @property
    def cost(self) -> Price:
        """Of the whole training."""
        price = self.gpu.price.times(self.gpu.count)
        return price.times(self.hours)

    @property
    def disk_gib(self) -> dict[str, float]:
        """What it writes to the disk."""
        whole = self.shape.params * 2 / GIB
        trained = self.shape.adapter_params(self.recipe.r) / GIB
        moments = trained * OPTIMIZER
        if self.recipe.engine == "ddp":
            moments = self.parts["optimizer"]
        checkpoint = trained * ADAPTER + moments
        return {
            "download": whole,
            "merged": whole * SPARE,
            "checkpoints": checkpoint * self.checkpoints,
        }

    @property
    def served_gib(self) -> float:
        """Memory that the trained model takes in 16 bits."""
        return self.shape.params * self.recipe.wide / GIB

    def facts(self) -> dict[str, Any]:
        """All of it, as `plan --json` prints it."""
        smallest = {
            "recipe": asdict(self.smallest),
            "peak_vram_gib": self.smallest_gib,
            "times_as_long": self.times_as_long,
        }
        return {
            "model": self.shape.name,
            "gpu": self.gpu.name,
            "gpus": self.gpu.count,
            "card": self.gpu.model_dump(exclude={"note", "called", "also", "platforms"}),
            "recipe": asdict(self.recipe),
            "batch": self.batch,
            **{name: getattr(self.schedule, name, None) for name in SCHEDULED},
            "peak_vram_gib": self.peak_gib,
            "limit_gib": self.limit_gib,
            "fits": self.fits,
            "parts": self.parts,
            "smallest": smallest,
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "cost": self.cost._asdict(),
            "disk_gib": self.disk_gib,
            "after_gib": {"merge_ram": MERGE_RAM_GIB, "on_card": self.served_gib},
            "ram_gib": ram_gib(self.shape, self.recipe),
            "notes": self.notes,
        }


def of_profile(
    profile: Profile,
    gpu: GPUSpec,
    shape: Shape,
    rows: Rows | None = None,
    strategy: str = "ddp",
) -> Forecast:
    """A profile on a GPU; `auto` values become what the rows want and the fastest that fit, or the smallest."""
    chosen = choose(profile, rows, shape, gpu.count)
    settled = apply(profile, chosen)
    step = rows_per_step(settled.sft, gpu.count)
    recipe = fastest(settled, profile.sft, shape, gpu, rows, strategy)
    rate = tokens_per_second(shape, recipe, gpu)
    tokens = _trained_tokens(settled.sft, recipe, step, rows)
    notes = _notes(shape, recipe, gpu, tokens)
    if "method" in chosen:
        notes.append(chosen["method"].reason)
    if rows:
        notes.append(few_steps(settled, profile, rows, gpu.count))
    notes.append(tr(gpu.note))
    return Forecast(
        shape=shape,
        gpu=gpu,
        recipe=recipe,
        smallest=smallest(shape, recipe, step, gpu, named_arguments(profile.sft)),
        batch=step,
        checkpoints=settled.sft.save_total_limit,
        schedule=schedule(settled.sft, rows, gpu.count) if rows else None,
        parts=parts(shape, recipe),
        tokens_per_second=rate,
        hours=tokens / rate / 3600 if tokens and rate else None,
        notes=[note for note in notes if note],
    )


def assumed_rows(profile: Profile, rows: int | None, mean_length: float | None) -> Rows | None:
    """Rows of which only number and mean length are known: instruction data spreads about as wide as its mean."""
    rows = rows or profile.course.rows
    if not rows or not mean_length:
        return None
    longest = profile.sft.max_length
    mean = min(mean_length, longest)
    return Rows(rows, mean, spread=min(mean, longest - mean))


def recipe_of(facts: Mapping[str, Any]) -> Recipe:
    """How a lesson 03 trained, from its facts."""
    cards = facts["processes"]
    recipe = _named_recipe(facts["settings"])
    return replace(
        recipe,
        gradient_accumulation_steps=facts["batch"] // cards // recipe.per_device_train_batch_size,
        engine=facts.get("engine") or "ddp",
        cards=cards,
    )


def _named_recipe(settings: Mapping[str, Any]) -> Recipe:
    """What settings, by dotted name, say of a recipe."""
    known = {field.name for field in fields(Recipe)}
    values: dict[str, Any] = {"length": settings["sft.max_length"]}
    for name, value in settings.items():
        argument = name.rpartition(".")[2]
        if argument in known:
            values[argument] = value
    return Recipe(**values)


def candidates(recipe: Recipe, step: int, gpu: GPUSpec, named: Collection[str] = ()) -> list[Recipe]:
    """Every micro-batch that divides a GPU's share of the step, with every way to recompute; what is named stays."""
    distributed.require_shares(step, gpu.count)
    rows = step // gpu.count
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    ways = list(WAYS)
    if recipe.engine != "ddp" and "activation_offloading" not in named:
        ways = ways[:2]
    recipes = []
    for size, (recompute, offload) in product(sizes, ways):
        option = replace(
            recipe,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=rows // size,
            gradient_checkpointing=recompute,
            activation_offloading=offload,
        )
        if all(getattr(option, name) == getattr(recipe, name) for name in named):
            recipes.append(option)
    return recipes


def best_option(shape: Shape, recipes: Sequence[Recipe], gpu: GPUSpec) -> Recipe:
    """The fastest that fits, among nearly equals the one with the lowest peak; the smallest where nothing fits."""
    limit = limit_gib(gpu)
    peaks = {recipe: peak_gib(shape, recipe) for recipe in recipes}
    fitting = [recipe for recipe in recipes if peaks[recipe] <= limit]
    if fitting and gpu.tflops is None:  # speed unknown: no recomputing, large steps
        return min(fitting, key=_slowness)
    rates = {}
    for recipe in fitting:
        rates[recipe] = tokens_per_second(shape, recipe, gpu) or 0.0
    enough = NEARLY * max(rates.values(), default=0.0)
    fast = [recipe for recipe in fitting if rates[recipe] >= enough]
    return min(fast or recipes, key=peaks.__getitem__)


def _slowness(recipe: Recipe) -> tuple[bool, bool, int]:
    return recipe.gradient_checkpointing, recipe.activation_offloading, -recipe.per_device_train_batch_size


def named_arguments(sft: SFT) -> list[str]:
    """The arguments of a step that a profile does not leave open."""
    return [name for name in STEP_ARGUMENTS if sft[name] != "auto"]


def fastest(profile: Profile, given: SFT, shape: Shape, gpu: GPUSpec, rows: Rows | None, strategy: str) -> Recipe:
    """The best micro-batch and checkpointing for a settled profile, as far as it left them open when it was given.

    The 8-bit optimizers of bitsandbytes do not take shards: strategies other than DDP train with AdamW in 32 bits.
    """
    recent = gpu.capability >= BF16_FROM  # torch's varlen attention and Triton's kernels begin there too
    usual: dict[str, Any] = {
        "from_pretrained.dtype": "bfloat16" if recent else "float16",
        "from_pretrained.attn_implementation": "varlen" if recent else "sdpa",
        "sft.use_liger_kernel": recent,
    }
    settings = flat(profile.model_dump(warnings=False))
    open_ones = {name: value for name, value in usual.items() if settings[name] == "auto"}
    recipe = replace(_named_recipe(settings | open_ones), engine=strategy, cards=gpu.count)
    if strategy != "ddp":
        method = distributed.STRATEGIES[strategy] or recipe.method
        recipe = replace(recipe, method=method, optim="adamw_torch_fused")
    if rows and not recipe.packing:
        recipe = replace(recipe, length=round(rows.mean), spread=rows.spread)
    step = rows_per_step(profile.sft, gpu.count)
    return best_option(shape, candidates(recipe, step, gpu, named_arguments(given)), gpu)


def smallest(shape: Shape, recipe: Recipe, step: int, gpu: GPUSpec, named: Collection[str] = ()) -> Recipe:
    """The same training with the lowest peak, as far as micro-batch and checkpointing are not named."""
    return min(candidates(recipe, step, gpu, named), key=lambda option: peak_gib(shape, option))


def _trained_tokens(sft: SFT, recipe: Recipe, step: int, rows: Rows | None) -> float | None:
    """Tokens of the whole training."""
    if sft.max_steps > 0:
        real = PACKED if recipe.packing else 1.0
        return sft.max_steps * step * recipe.length * real
    if rows is None:
        return None
    mean = min(rows.mean, sft.max_length)
    return rows.examples * mean * float(sft.num_train_epochs)


def _notes(shape: Shape, recipe: Recipe, gpu: GPUSpec, tokens: float | None) -> list[str]:
    """What a learner should know of a forecast."""
    notes = []
    if shape.params * recipe.wide / GIB > gpu.memory_gib:
        notes.append(tr("too large to be served in 16 bits on this GPU: export it as w4a16 first"))
    if gpu.tflops is None:
        notes.append(tr("speed and hours are unknown: give the GPU's dense 16-bit TFLOP/s with --tflops"))
    if tokens is None:
        notes.append(tr("hours are unknown: give --rows and --mean-length"))
    if gpu.tflops and gpu.name != "H200":
        notes.append(tr("the speed follows from published numbers: only the H200 was measured"))
    if gpu.count > 1:
        note = tr(
            "the speed of {count} GPUs is an estimate: what {engine} sends goes over PCIe at {link:.0f} GB/s, while "
            "nothing is computed",
            count=gpu.count,
            engine=recipe.engine,
            link=RAM_LINK / 1e9,
        )
        notes.append(note)
    ram = ram_gib(shape, recipe)
    if ram:
        note = tr(
            "{engine} needs {size:.0f} GiB of RAM on a machine with all {count} GPUs, beside what every training needs",
            engine=recipe.engine,
            size=ram,
            count=gpu.count,
        )
        notes.append(note)
    return notes
