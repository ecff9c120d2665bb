"""The forecast of a training: peak memory, speed, hours, cost and disk, and the fastest setting that fits.

Memory is the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one GPU. Speed was measured on one H200;
other GPUs are forecast from their published numbers. What cannot be known stays None, and a note says what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nbutils import distributed
from nbutils.config import Profile, Train
from nbutils.files import GIB
from nbutils.hardware import BF16_FROM
from nbutils.models import Shape, find_shape
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.schedule import PACKED, Rows, Schedule, apply, choose, few_steps, schedule

# weights: bytes of one weight of the linear layers
NF4 = 0.5 + 4 / 64  # 4 bits, and a float32 scale for each 64 weights
NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)  # the scales in 8 bits, and a float32 for each 256 of them
# adapters and optimizer: bytes of one adapter weight
ADAPTER, GRADIENT = 4, 4  # float32; gradients wait for the rest of the batch where micro-batches are accumulated
OPTIMIZER_8BIT, OPTIMIZER = 2, 8  # Adam's two moments; a paged one may live in RAM, counted all the same
# activations: tensors of a micro-step's tokens that one layer keeps for its backward pass
SAVED_HIDDEN = 4  # input and output of both norms
SAVED_HEADS = 2  # of the query heads' size: q and the result; k and v come on top, once each
SAVED_MLP = 2  # gate and up; their product is made again when it is needed
PLAIN_HIDDEN = 4.5  # without Liger: float32 copies in the norms, q and k before and after their rotation (measured)
ADAPTERS = 7  # each keeps its narrow result, rank wide
BACKWARD_HIDDEN, BACKWARD_MLP = 1, 1  # gradients alive while one layer's MLP is computed backwards
OFFLOAD_STASH = 5  # layer inputs that stay on the GPU while the others travel to RAM and back (TRL's own number)
# logits: the loss is computed in tiles, so the table of tokens x vocabulary never exists
LOSS_HIDDEN = 2 + 2 + 4  # bytes for each of tokens x hidden: the last state twice, and its gradient in float32
LOSS_TILE = (4096, 32768)  # tokens x words of one tile (TRL's own numbers); gone before the layers go backwards
# workspace
MASK = 14  # bytes for each pair of tokens where packed rows are kept apart by a mask (measured)
SLACK = 0.08 * GIB  # cuBLAS' own space, and small things that nobody names (measured)
# speed
ARITHMETIC = 0.58  # share of the published TFLOP/s that the matrix products reach (7B and 1.5B, 8,192 tokens and more)
BANDWIDTH = 0.6  # share of the published GB/s that element by element work reaches
ALONE = 0.48  # share of the published TFLOP/s the whole step reaches, for GPUs whose bandwidth nobody gave
ELEMENTWISE, PLAIN = 2.5, 6  # times a layer's inputs and outputs are read or written beside the products; without Liger
AGAIN = 0.71  # share of a layer's products that recomputation repeats: all but the last of its MLP
LAUNCH, LAUNCH_AGAIN = 0.0073, 0.0053  # seconds Python needs to start a layer's kernels: there and back, once more
LAUNCH_QUANTIZED, LAUNCH_OFFLOAD = 0.005, 0.004  # and for a layer in 4 bits, and for one whose input travels
RAM_LINK = 12e9  # bytes per second between GPU and RAM, over PCIe as rented machines have it: an assumption
OFFLOAD = 1.03  # what parking the layer inputs in RAM costs beside the travel
PARALLEL = 0.9  # what a second GPU adds, with gradients exchanged over PCIe: an estimate, not measured
RARE = 4  # standard deviations: of some hundred micro-batches, hardly one is larger
# limits
MARGIN = 0.08  # of the GPU's memory stays free: the forecast may be that much off, and memory gets fragmented
CONTEXT_GIB = 0.5  # CUDA's own, which torch's allocator does not count
NEARLY = 0.98  # settings this close to the fastest count as equal; the one with the lowest peak is taken
CHECKPOINTING = ("off", "on", "offload")
SPARE = 1.1  # merging needs a tenth more disk than the model has
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight


@dataclass(frozen=True)
class Recipe:
    """How one trains, as far as memory and speed depend on it; `checkpointing` is off, on or offload."""

    method: str = "qlora"
    rank: int = 16
    precision: str = "bf16"
    attention: str = "varlen"
    liger: bool = True
    optimizer: str = "paged_adamw_8bit"
    length: int = 2048
    micro_batch: int = 1
    checkpointing: str = "on"
    double: bool = True
    packing: bool = True
    accumulation: int = 1
    dropout: bool = False
    spread: float = 0.0  # standard deviation of the lengths, where rows are not packed

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step, laid end to end: all alike where rows are packed, else of one that is rarely met."""
        return round(self.micro_batch * self.length + RARE * self.spread * self.micro_batch**0.5)

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of the linear layers."""
        return self.wide if self.method != "qlora" else NF4_DOUBLE if self.double else NF4

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for one trained weight."""
        return OPTIMIZER_8BIT if self.optimizer.endswith("8bit") else OPTIMIZER

    @property
    def passes(self) -> float:
        """Times a layer's products are computed: forward, backward, and most of forward again with checkpointing."""
        return 2 if self.checkpointing == "off" else 2 + AGAIN

    @property
    def filled(self) -> float:
        """Share of the computed tokens that are real."""
        return PACKED if self.packing else 1.0


def from_profile(profile: Profile, gpu: GPUSpec, rows: Rows | None = None) -> Recipe:
    """A settled profile's recipe on a GPU; what it leaves to the machine is decided by the GPU's capability."""
    train, machine = profile.train, profile.machine
    new = gpu.capability >= BF16_FROM  # torch's varlen attention and Triton's kernels begin there too
    precision, attention, liger = ("bf16", "varlen", "on") if new else ("fp16", "sdpa", "off")
    single = rows if rows and not train.packing else None
    return Recipe(
        method=profile.method,
        rank=profile.lora.rank,
        precision=precision if machine.precision == "auto" else machine.precision,
        attention=attention if machine.attention == "auto" else machine.attention,
        liger=(liger if machine.liger == "auto" else machine.liger) == "on",
        optimizer=train.optimizer,
        length=round(single.mean) if single else train.max_length,
        spread=single.spread if single else 0.0,
        double=profile.quantization.double,
        packing=bool(train.packing),
        dropout=profile.lora.dropout > 0,
    )


def peak_gib(shape: Shape, recipe: Recipe) -> float:
    """The forecast peak on one GPU."""
    return sum(parts(shape, recipe).values())


def parts(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB by part; their sum is the forecast peak."""
    trained, tokens, wide = shape.adapter_params(recipe.rank), recipe.tokens, recipe.wide
    layer_input = tokens * shape.hidden * wide
    saved = _saved_by_layer(shape, recipe)
    # alive only while one layer is computed backwards: its gradients, what it computed again, one weight in 16 bits
    mlp = BACKWARD_MLP + recipe.dropout  # with dropout also the thinned activation
    backward: float = tokens * (BACKWARD_HIDDEN * shape.hidden + mlp * shape.intermediate) * wide
    backward += 0 if recipe.checkpointing == "off" else saved - layer_input
    backward += max(inner * outer for inner, outer in shape.linears) * wide if recipe.method == "qlora" else 0
    kept = {"off": shape.layers * saved, "on": shape.layers * layer_input,
            "offload": min(OFFLOAD_STASH, shape.layers) * layer_input}  # fmt: skip
    tile = min(LOSS_TILE[0], tokens) * min(LOSS_TILE[1], shape.vocab) * wide
    mask = MASK * tokens**2 if recipe.attention == "sdpa" else 0  # rows are laid end to end: one long one
    found = {
        "weights": shape.linear_params * recipe.weight_bytes + shape.other_params * wide,
        "adapters": trained * (ADAPTER + GRADIENT * (recipe.accumulation > 1)),
        "optimizer": trained * recipe.optimizer_bytes,
        "activations": kept[recipe.checkpointing] + backward,
        "logits": max(0.0, tokens * shape.hidden * LOSS_HIDDEN + tile - backward),  # before a layer at work
        "workspace": mask + SLACK,
    }
    return {name: size / GIB for name, size in found.items()}


def _saved_by_layer(shape: Shape, recipe: Recipe) -> float:
    """Bytes that one layer keeps for its backward pass."""
    numbers = (
        (SAVED_HIDDEN + (0 if recipe.liger else PLAIN_HIDDEN)) * shape.hidden
        + (SAVED_HEADS * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        + SAVED_MLP * shape.intermediate
        + ADAPTERS * recipe.rank
    )
    dropped = sum(inner for inner, _ in shape.linears) if recipe.dropout else 0  # a byte for each input of an adapter
    return recipe.tokens * (numbers * recipe.wide + dropped)


def tokens_per_second(shape: Shape, recipe: Recipe, gpu: GPUSpec) -> float | None:
    """Real tokens per second on all GPUs together; None where a GPU's arithmetic is not known."""
    if gpu.tflops is None:
        return None
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    if gpu.bandwidth is None:
        computing = _flops(shape, recipe) / (ALONE * gpu.tflops * 1e12)
    else:
        computing = _flops(shape, recipe) / (ARITHMETIC * gpu.tflops * 1e12)
        computing += _moved_bytes(shape, recipe) / (BANDWIDTH * gpu.bandwidth * 1e9)
    launching = LAUNCH + LAUNCH_QUANTIZED * (recipe.method == "qlora")  # a small step on a fast GPU waits for Python
    launching += LAUNCH_AGAIN * (recipe.checkpointing != "off") + LAUNCH_OFFLOAD * (recipe.checkpointing == "offload")
    seconds = max(computing, launching * shape.layers)
    if recipe.checkpointing == "offload":
        travelling = 2 * shape.layers * recipe.tokens * shape.hidden * recipe.wide / RAM_LINK
        seconds = max(computing * OFFLOAD, launching * shape.layers, travelling)
    together = 1.0 if gpu.count == 1 else gpu.count * PARALLEL
    return recipe.tokens * recipe.filled / seconds * together


def _flops(shape: Shape, recipe: Recipe) -> float:
    """Floating point operations of a micro-step: the frozen weights need no gradient of their own."""
    linear = 2 * shape.linear_params * recipe.passes
    head = 3 * 2 * shape.vocab * shape.hidden  # forward, again in the backward pass, and backward
    seen = recipe.tokens if recipe.attention == "sdpa" else recipe.length / 2
    attention = 4 * seen * shape.heads * shape.head_dim * shape.layers * (recipe.passes + 1)
    return recipe.tokens * (linear + head + attention)


def _moved_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes through the GPU's memory in a micro-step: weights brought to 16 bits, and work element by element."""
    brought = shape.linear_params * (NF4_DOUBLE + recipe.wide) if recipe.method == "qlora" else 0
    times = ELEMENTWISE if recipe.liger else PLAIN
    touched = recipe.tokens * shape.layers * sum(map(sum, shape.linears)) * recipe.wide * times
    return recipe.passes * (brought + touched)


def limit_gib(gpu: GPUSpec) -> float:
    """How much the plan lets torch use of one GPU."""
    return gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB


def candidates(recipe: Recipe, batch: int, gpu: GPUSpec, train: Train | None = None) -> list[Recipe]:
    """Every micro-batch that divides a GPU's share of the batch, with every checkpointing; what `train` names stays."""
    distributed.require_shares(batch, gpu.count)
    rows = batch // gpu.count
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    ways: Sequence[str] = CHECKPOINTING
    if train and train.micro_batch != "auto":
        sizes = [train.micro_batch]
    if train and train.gradient_checkpointing != "auto":
        ways = (train.gradient_checkpointing,)
    pairs = [(size, way) for size in sizes for way in ways]
    return [replace(recipe, micro_batch=size, checkpointing=way, accumulation=rows // size) for size, way in pairs]


def best_option(shape: Shape, recipes: Sequence[Recipe], gpu: GPUSpec) -> Recipe:
    """The fastest that fits, among nearly equals the one with the lowest peak; the smallest where nothing fits."""
    peaks = {recipe: peak_gib(shape, recipe) for recipe in recipes}
    fitting = [recipe for recipe in recipes if peaks[recipe] <= limit_gib(gpu)]
    if fitting and gpu.tflops is None:  # speed unknown: no recomputing, large steps
        return min(fitting, key=lambda recipe: (CHECKPOINTING.index(recipe.checkpointing), -recipe.micro_batch))
    rates = {recipe: tokens_per_second(shape, recipe, gpu) or 0.0 for recipe in fitting}
    good = [recipe for recipe in fitting if rates[recipe] >= NEARLY * max(rates.values())]
    return min(good or recipes, key=peaks.__getitem__)


def fastest(profile: Profile, shape: Shape, gpu: GPUSpec, rows: Rows | None) -> Recipe:
    """The best micro-batch and checkpointing for a profile, as far as it leaves them open."""
    recipe, train = from_profile(profile, gpu, rows), profile.train
    return best_option(shape, candidates(recipe, train.step_rows, gpu, train), gpu)


@dataclass(frozen=True)
class Forecast:
    """What a training will need; None where a fact is missing, and `notes` says which."""

    model: str
    gpu: GPUSpec
    recipe: Recipe
    batch: int
    parts: dict[str, float]
    tokens_per_second: float | None
    hours: float | None
    disk_gib: dict[str, float]
    after_gib: dict[str, float]
    schedule: Schedule | None
    notes: list[str]

    @property
    def peak_vram_gib(self) -> float:
        """The forecast peak of torch's allocator on each GPU."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_vram_gib <= limit_gib(self.gpu)

    @property
    def cost(self) -> dict[str, float | None]:
        """On all GPUs; None where hours or price are not known, 0 where it is free."""
        prices = {"yuan": self.gpu.yuan, "dollars": self.gpu.dollars}
        if self.hours is None:
            return {name: price if price == 0 else None for name, price in prices.items()}
        return {name: price and price * self.hours * self.gpu.count for name, price in prices.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, rounded as far as a forecast deserves."""
        made = self.schedule
        return {
            "model": self.model, "gpu": self.gpu.name, "gpus": self.gpu.count,
            "card": self.gpu.model_dump(exclude={"note", "called", "also"}),
            "recipe": asdict(self.recipe), "batch": self.batch,
            "steps": made and made.steps, "examples_per_step": made and round(made.examples_per_step, 1),
            "epochs": made and round(made.epochs, 3), "learning_rate": made and made.learning_rate,
            "peak_vram_gib": round(self.peak_vram_gib, 2), "limit_gib": round(limit_gib(self.gpu), 2),
            "fits": self.fits, "parts": _rounded(self.parts, 3),
            "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second),
            "hours": None if self.hours is None else round(self.hours, 2), "cost": _rounded(self.cost, 2),
            "disk_gib": _rounded(self.disk_gib, 1), "after_gib": _rounded(self.after_gib, 1), "notes": self.notes,
        }  # fmt: skip


def _rounded(numbers: dict[str, Any], digits: int) -> dict[str, Any]:
    return {name: None if value is None else round(value, digits) for name, value in numbers.items()}


def of_profile(
    profile: Profile, gpu: GPUSpec, model: str | Shape = "", rows: int | None = None,
    mean_length: float | None = None, data: Rows | None = None,
) -> Forecast:  # fmt: skip
    """A profile on a GPU; `auto` values become what the rows want and the fastest that fit, or the smallest."""
    shape = model if isinstance(model, Shape) else find_shape(model or profile.model)
    rows = data.examples if data else rows if rows is not None else profile.data.rows or None
    mean_length = data.mean if data else mean_length
    if data is None and rows and mean_length:
        data = Rows.like(rows, mean_length, profile.train.max_length)
    named, chosen = profile.train, choose(profile, data, shape, gpu.count)
    profile = apply(profile, chosen)
    train, recipe = profile.train, fastest(profile, shape, gpu, data)
    tokens = _tokens(recipe, train, rows, mean_length)
    rate = tokens_per_second(shape, recipe, gpu)
    whole = shape.params * 2 / GIB
    checkpoint = shape.adapter_params(recipe.rank) * (4 + recipe.optimizer_bytes) / GIB
    served = shape.params * recipe.wide / GIB
    notes = {
        "too large to be served in 16 bits on this GPU: export it as w4a16 first": served > gpu.memory_gib,
        "speed and hours are unknown: give the GPU's dense 16-bit TFLOP/s with --tflops": rate is None,
        "hours are unknown: give --rows and --mean-length": tokens is None,
        "the speed follows from published numbers: only the H200 was measured": rate is not None and gpu.name != "H200",
        f"the speed of {gpu.count} GPUs is an estimate: {PARALLEL:.0%} of {gpu.count} times one GPU": gpu.count > 1,
        chosen["method"].reason if "method" in chosen else "": True,
        few_steps(train, named, data) if data else "": True,
        gpu.note: True,
    }  # fmt: skip
    return Forecast(
        shape.name, gpu, recipe, train.step_rows, parts(shape, recipe), rate,
        hours=None if rate is None or tokens is None else tokens / rate / 3600,
        disk_gib={"download": whole, "merged": whole * SPARE, "checkpoints": checkpoint * train.keep_checkpoints},
        after_gib={"merge_ram": MERGE_RAM_GIB, "on_card": served},
        schedule=schedule(train, data) if data else None,
        notes=[note for note, holds in notes.items() if note and holds],
    )  # fmt: skip


def _tokens(recipe: Recipe, train: Train, rows: int | None, mean: float | None) -> float | None:
    """Real tokens of a training; None where a fact is missing."""
    if train.max_steps:
        return train.max_steps * train.step_rows * recipe.length * recipe.filled
    if rows is None or mean is None:
        return None
    return rows * (min(mean, recipe.length) if recipe.packing else mean) * (float(train.epochs) or 1.0)
