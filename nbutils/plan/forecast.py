"""The recipe that follows from the rows of the data, and the forecast of a training with it.

The GPU decides nothing of the recipe, only how a step is cut into micro-batches; what a profile names is kept. Memory
is the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one GPU. Speed was measured on one H200; other
GPUs are forecast from their published numbers. What cannot be known stays None, and a note says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from nbutils import distributed
from nbutils.config import SFT, Profile, nested
from nbutils.files import GIB
from nbutils.hardware import BF16_FROM, Choice
from nbutils.language import tr
from nbutils.models import Shape, find_shape
from nbutils.plan.gpus import GPUSpec

# the recipe: `benchmarks/recipes.py`, and for other model sizes Schulman et al., "LoRA Without Regret"
STEPS_PER_EPOCH = 50  # fewer, of more conversations each, learn less; more take longer and learn no more
FEWEST = 8  # conversations per step: fewer follow single rows
LARGEST_STEP = 8  # rows of max_length: where data is large, the step a GPU computes at its full speed
PACK_FROM = 4  # rows of max_length in a step: below, packing could not meet the number of conversations
EPOCHS = ((100, 5.0), (10_000, 3.0), (50_000, 2.0), (math.inf, 1.0))  # up to so many rows
RATE, AT_HIDDEN, POWER = 4e-4, 2000, 0.78  # LoRA's best rate falls with the width of the model
FULL_RATE_FROM = 16  # conversations per step: noisier steps want a smaller rate, by the root of their size
SAVES, MOST_BETWEEN = 5, 50  # per run, and the steps between two of them in a long one
MOST_VALIDATED, LEAST_VALIDATED = 64, 4  # rows
SHARE, FORWARD = 0.05, 0.4  # of the training time for validation; the cost of a row without its backward pass
PACKED = 0.97  # share of a packed row that is real tokens, with best-fit packing
SMALL = 1e9  # parameters: below, 4 bits cost a model much of what it knows, and 16 fit every GPU
# weights: bytes of one weight of the linear layers
FOUR_BITS = 0.5
NF4 = FOUR_BITS + 4 / 64  # 4 bits, and a float32 scale for each 64 weights
NF4_DOUBLE = FOUR_BITS + 1 / 64 + 4 / (64 * 256)  # the scales in 8 bits, and a float32 for each 256 of them
# adapters and optimizer: bytes of one adapter weight
ADAPTER, GRADIENT = 4, 4  # float32; gradients wait for the rest of the batch where micro-batches are accumulated
OPTIMIZER_8BIT, OPTIMIZER = 2, 8  # Adam's two moments; a paged one may live in RAM, counted all the same
# engines; BUCKET and LIVE are defaults of DeepSpeed (zero/config.py), which accelerate leaves as they are
GATHERED = 2  # layers whose weights FSDP2 has gathered: the one at work, and the next one
BUCKET = 5e8  # reduce_bucket_size: elements of the buffer in which gradients are reduced, however few there are
LIVE = 1e9  # stage3_max_live_parameters: weights that ZeRO-3 has gathered and not yet released
# activations: tensors of a micro-step's tokens that one layer keeps for its backward pass
SAVED_HIDDEN, SAVED_MLP = 4, 2  # input and output of both norms; gate and up, whose product is made again when needed
SAVED_HEADS = 2  # of the query heads' size: q and the result; k and v come on top, once each
PLAIN_HIDDEN = 4.5  # without Liger: float32 copies in the norms, q and k before and after their rotation (measured)
PLAIN_MLP = 3  # with PEFT's layers (measured)
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
RARE = 4  # standard deviations: of some hundred micro-batches, hardly one is larger
# limits
MARGIN = 0.08  # of the GPU's memory stays free: the forecast may be that much off, and memory gets fragmented
CONTEXT_GIB = 0.5  # CUDA's own, which torch's allocator does not count
NEARLY = 0.98  # settings this close to the fastest count as equal; the one with the lowest peak is taken
STEP_ARGUMENTS = (  # of SFTConfig: they decide memory and speed of a step, and not what it learns
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "activation_offloading",
)  # fmt: skip
WAYS = ((False, False), (True, False), (True, True))  # gradient_checkpointing, activation_offloading
Forecast = dict[str, Any]
SPARE = 1.1  # merging needs a tenth more disk than the model has
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight


@dataclass(frozen=True)
class Rows:
    """The data as far as the recipe depends on it: how many examples there are, and how long."""

    examples: int
    mean: float
    spread: float  # standard deviation of the lengths
    held_out: int | None = None  # rows for the validation; None: unknown

    @classmethod
    def of(cls, lengths: Sequence[int], held_out: int | None = None) -> Rows:
        """Those of examples with these lengths in tokens."""
        return cls(len(lengths), fmean(lengths), pstdev(lengths), held_out)

    def packed(self, max_length: int) -> int:
        """Rows they fill when packed to this length: nearly full ones, unless all are long or of one length."""
        fill = PACKED
        if self.mean > max_length / 2 or self.spread < self.mean / 4:
            fill = min(PACKED, max(max_length // math.ceil(self.mean), 1) * self.mean / max_length)
        return math.ceil(self.examples * self.mean / (fill * max_length))


@dataclass(frozen=True)
class Schedule:
    """Steps and their size."""

    steps: int
    examples_per_step: float
    tokens_per_step: float
    epochs: float
    learning_rate: float

    def __str__(self) -> str:
        return tr(
            "{steps:,} steps of {examples_per_step:,.0f} conversations ({tokens_per_step:,.0f} tokens), {epochs:.3g} "
            "epochs, learning rate {learning_rate:g}",
            **asdict(self),
        )


def rows_per_step(sft: SFT, processes: int = 1) -> int:
    """Rows of an optimizer step, which all processes share: packed rows where rows are packed, else conversations."""
    return int(sft.per_device_train_batch_size) * int(sft.gradient_accumulation_steps) * processes


def schedule(sft: SFT, rows: Rows, processes: int = 1) -> Schedule:
    """Steps and their size, for a profile whose values are settled."""
    per_epoch, each = _per_epoch(rows_per_step(sft, processes), bool(sft.packing), sft.max_length, rows)
    steps = sft.max_steps if sft.max_steps > 0 else math.ceil(per_epoch * float(sft.num_train_epochs))
    return Schedule(steps, each, each * rows.mean, steps / per_epoch, float(sft.learning_rate))


def few_steps(profile: Profile, given: Profile, rows: Rows, processes: int = 1) -> str:
    """What to set where the step a profile names leaves too few of them; empty where it does not."""
    made = schedule(profile.sft, rows, processes)
    better = _conversations_per_step(rows, profile.sft.max_length)
    named = "auto" not in (given.sft.gradient_accumulation_steps, given.sft.per_device_train_batch_size)
    enough = made.steps >= STEPS_PER_EPOCH or better >= made.examples_per_step
    left_open = given.course.conversations_per_step == "auto" and not named
    if left_open or profile.sft.max_steps > 0 or enough:
        return ""
    return tr(
        "a step of {each:,.0f} conversations leaves only {steps} steps, too few to learn much: set "
        "course.conversations_per_step={better}",
        each=made.examples_per_step, steps=made.steps, better=better,
    )  # fmt: skip


def choose(
    profile: Profile, rows: Rows | None, shape: Shape | None, processes: int = 1, kept: Mapping[str, Any] | None = None
) -> dict[str, Choice]:
    """The values a profile leaves to its model and its rows, by dotted name; without rows those of large data.

    `kept` is what a run that has begun keeps of its first session: its rows per step among them.
    """
    found = _method(profile, shape)
    found |= _step(profile, rows, processes, kept or {})
    sft = apply(profile, found).sft
    if sft.learning_rate == "auto":
        each = float(FULL_RATE_FROM)
        if rows:
            step = rows_per_step(sft, processes)
            _, each = _per_epoch(step, bool(sft.packing), sft.max_length, rows)
        found["sft.learning_rate"] = _learning_rate(shape, each)
    if sft.num_train_epochs == "auto":
        examples = rows.examples if rows else math.inf
        epochs = next(epochs for most, epochs in EPOCHS if examples <= most)
        text = _unknown_rows()
        if rows:
            text = tr("recipe: for {rows:,} rows; the step with the best validation loss is kept", rows=rows.examples)
        found["sft.num_train_epochs"] = Choice(epochs, text)
    made = schedule(apply(profile, found).sft, rows, processes) if rows else None
    found |= _saves(profile, made)
    found |= _validation(apply(profile, found), rows, made, kept or {})
    nothing_held_out = rows is not None and rows.held_out == 0
    if nothing_held_out or apply(profile, found).course.validation_rows == 0:
        nothing = tr("no rows are validated")
        found["course.validation_rows"] = Choice(0, nothing)
        found["sft.load_best_model_at_end"] = Choice(False, nothing)
        found["course.early_stopping_patience"] = Choice(0, nothing)
    return found


def apply(profile: Profile, found: Mapping[str, Choice]) -> Profile:
    """The profile with these values in it."""
    for name, choice in found.items():
        group, _, key = name.rpartition(".")
        values = {key: choice.value}
        inner = {group: getattr(profile, group).model_copy(update=values)} if group else values
        profile = profile.model_copy(update=inner)
    return profile


def _unknown_rows() -> str:
    """The reason of a value that will follow from the rows."""
    return tr("recipe: the value for large data, until lesson 03 knows your rows")


def _method(profile: Profile, shape: Shape | None) -> dict[str, Choice]:
    """4 or 16 bits, where the profile leaves it open."""
    if profile.method != "auto":
        return {}
    small = shape is not None and shape.params < SMALL
    if profile.quantization.load_in_4bit and not small:
        return {"method": Choice("qlora", "")}  # the comment in the profile says why
    reason = tr("quantization.load_in_4bit is false")
    if small:
        reason = tr("recipe: a model below a billion parameters loses quality in 4 bits, and 16 bits fit")
    return {"method": Choice("lora", reason), "quantization.load_in_4bit": Choice(False, tr("method lora"))}


def _learning_rate(shape: Shape | None, conversations: float) -> Choice:
    """LoRA's best rate for the width of the model; smaller where few conversations make a step noisy."""
    if shape is None:
        return Choice(2e-4, tr("recipe: usual for LoRA; the size of this model is not known before its download"))
    noise = min(1.0, conversations / FULL_RATE_FROM) ** 0.5
    rate = float(f"{noise * RATE * (AT_HIDDEN / shape.hidden) ** POWER:.1e}")
    if noise == 1:
        return Choice(
            rate, tr("recipe: for a model of width {width}; halve it if the loss is unstable", width=shape.hidden)
        )
    why = tr(
        "recipe: for a model of width {width} and {each:.0f} conversations per step; halve it if the loss is "
        "unstable",
        width=shape.hidden, each=conversations,
    )  # fmt: skip
    return Choice(rate, why)


def _saves(profile: Profile, made: Schedule | None) -> dict[str, Choice]:
    """The steps between two checkpoints."""
    if profile.sft.save_steps != "auto":
        return {}
    if made is None:
        return {"sft.save_steps": Choice(MOST_BETWEEN, _unknown_rows())}
    between = max(1, min(MOST_BETWEEN, math.ceil(made.steps / SAVES)))
    count = math.ceil(made.steps / between)
    return {
        "sft.save_steps": Choice(between, tr("recipe: {count} checkpoints, each with a validation loss", count=count))
    }


def _validation(
    profile: Profile, rows: Rows | None, made: Schedule | None, kept: Mapping[str, Any]
) -> dict[str, Choice]:
    """How many held-out rows each validation takes: as many as cost a small share of the training."""
    if profile.course.validation_rows != "auto":
        return {}
    if "validation_rows" in kept:
        return {"course.validation_rows": Choice(kept["validation_rows"], tr("this run began with it"))}
    if rows is None or made is None:
        return {"course.validation_rows": Choice(MOST_VALIDATED, _unknown_rows())}
    times = math.ceil(made.steps / int(profile.sft.save_steps)) + 1
    affordable = int(SHARE * made.steps * made.examples_per_step / (FORWARD * times))
    count = max(LEAST_VALIDATED, min(MOST_VALIDATED, affordable))
    if rows.held_out is not None:
        count = min(count, rows.held_out)
    text = tr(
        "recipe: {times} validations, in about {share:.0%} of the training time or less", times=times, share=SHARE
    )
    return {"course.validation_rows": Choice(count, text)}


def _per_epoch(step: int, packing: bool, max_length: int, rows: Rows) -> tuple[int, float]:
    """Steps of an epoch, and the conversations in each, for steps of so many rows."""
    whole = rows.packed(max_length) if packing else rows.examples
    return math.ceil(whole / step), rows.examples * min(step, whole) / whole


def _conversations_per_step(rows: Rows, max_length: int) -> int:
    """A power of two that leaves about 50 steps in an epoch, up to the largest step."""
    ideal = 2 ** round(math.log2(max(rows.examples / STEPS_PER_EPOCH, FEWEST)))
    return max(1, min(ideal, int(LARGEST_STEP * max_length / rows.mean)))


def _step(profile: Profile, rows: Rows | None, processes: int, kept: Mapping[str, Any]) -> dict[str, Choice]:
    """The rows of an optimizer step, whether they are packed, and how they are cut into micro-batches.

    Conversations are laid end to end, or, where a step holds many, packed into rows of `max_length` tokens. Where the
    profile leaves micro-batches to the plan, they are single rows for now.
    """
    sft, asked = profile.sft, profile.course.conversations_per_step
    conversations = _conversations_per_step(rows, sft.max_length) if rows else 0
    if asked != "auto":
        conversations = asked
    filled = conversations * rows.mean / sft.max_length if rows else LARGEST_STEP
    found = _packing(sft, filled, kept)
    packing = found["sft.packing"].value if found else sft.packing
    if "auto" not in (sft.per_device_train_batch_size, sft.gradient_accumulation_steps):
        step = rows_per_step(sft)  # as on one GPU: several share it
    elif "rows_per_step" in kept:  # whatever is asked for today: a begun run could not go on with another step
        step = kept["rows_per_step"]
    elif asked != "auto" and packing and rows:
        packed = round(asked * rows.packed(sft.max_length) / rows.examples)
        step = math.ceil(max(1, packed) / processes) * processes
    elif asked != "auto" and not packing:
        step = asked
    else:  # powers of two, so that one GPU's run can go on with 2 or 4; other numbers of processes round it up
        step = 2 ** round(math.log2(max(1, filled))) if packing else 2 ** int(math.log2(conversations or FEWEST))
        step = math.ceil(step / processes) * processes
    if rows:
        steps, each = _per_epoch(step, bool(packing), sft.max_length, rows)
        text = tr("recipe: {each:.0f} conversations per step, {steps} steps per epoch", each=each, steps=steps)
        if "rows_per_step" in kept:
            text = tr("this run began with it")
        found["course.conversations_per_step"] = Choice(max(1, round(each)), text)
    return found | _micro_batches(sft, step, processes)


def _packing(sft: SFT, filled: float, kept: Mapping[str, Any]) -> dict[str, Choice]:
    """Whether rows are packed, where the profile leaves it open; a step fills so many rows of `max_length` tokens."""
    if sft.packing != "auto":
        return {}
    if "packing" in kept:
        return {"sft.packing": Choice(kept["packing"], tr("this run began with it"))}
    if sft.gradient_accumulation_steps != "auto":
        text = tr("recipe: the rows of a step that are set are conversations; with packing: true they are packed rows")
        return {"sft.packing": Choice(False, text)}
    text = tr(
        "recipe: a step fills {filled:.1f} rows of {length} tokens; from {least} on, rows are packed",
        filled=filled, length=sft.max_length, least=PACK_FROM,
    )  # fmt: skip
    return {"sft.packing": Choice(filled >= PACK_FROM, text)}


def _micro_batches(sft: SFT, step: int, processes: int) -> dict[str, Choice]:
    """The share of a process in a step of so many rows, as micro-batches of the size that is named, or of one row."""
    asked = sft.per_device_train_batch_size
    size = distributed.micro_batch_for(step, 1 if asked == "auto" else asked, processes)
    found: dict[str, Choice] = {}
    if asked == "auto":
        found["sft.per_device_train_batch_size"] = Choice(size, "")
    elif size != asked:
        reason = tr(
            "the largest up to {most} that divides each process's part of a step of {step} rows", most=asked, step=step
        )
        found["sft.per_device_train_batch_size"] = Choice(size, reason)
    accumulation = step // processes // size
    if accumulation != sft.gradient_accumulation_steps:
        found["sft.gradient_accumulation_steps"] = Choice(accumulation, _accumulation_reason(step, size, processes))
    return found


def _accumulation_reason(step: int, size: int, processes: int) -> str:
    if processes == 1:
        return tr("{step} rows in a step, {size} at a time", step=step, size=size)
    words = {"step": step, "size": size, "processes": processes}
    return tr("{step} rows in a step of {processes} processes, {size} at a time in each", **words)


@dataclass(frozen=True)
class Recipe:
    """How one trains, as far as memory and speed depend on it, in the words of a profile; a row has `length` tokens."""

    method: str = "qlora"
    r: int = 16
    dtype: str = "bfloat16"
    attn_implementation: str = "varlen"
    use_liger_kernel: bool = True
    optim: str = "paged_adamw_8bit"
    length: int = 2048
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True
    activation_offloading: bool = False
    bnb_4bit_use_double_quant: bool = True
    packing: bool = True
    lora_dropout: float = 0.0
    spread: float = 0.0  # standard deviation of the lengths, where rows are not packed
    engine: str = "ddp"
    cards: int = 1  # that train together, of all machines

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step, laid end to end: all alike where rows are packed, else of one that is rarely met."""
        rows = self.per_device_train_batch_size
        return round(rows * self.length + RARE * self.spread * rows**0.5)

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == "float32" else 2

    @property
    def uses_liger(self) -> bool:
        """Whether Liger's kernels are used."""
        return self.use_liger_kernel and ENGINES[self.engine].fused_lora

    @property
    def recompute(self) -> str:
        """For people: whether layers are recomputed in the backward pass, and activations offloaded to RAM."""
        if self.activation_offloading:
            return "offload"
        return "on" if self.gradient_checkpointing else "off"


@dataclass(frozen=True)
class Engine:
    """How cards share a training: `configs/accelerate/NAME.yaml`."""

    shards: bool = False  # each card keeps its share of the base, and gathers the layer at work
    deepspeed: bool = False
    offload: bool = False  # float32 weights, gradients and Adam's moments are in RAM
    fused_lora: bool = True  # with the course's LoRA layers, which read weights that ZeRO-3 would have to gather first


ENGINES = {
    "ddp": Engine(),
    "fsdp_qlora": Engine(shards=True),
    "fsdp_lora": Engine(shards=True),
    "zero2": Engine(deepspeed=True),
    "zero2_offload": Engine(deepspeed=True, offload=True),
    "zero3": Engine(shards=True, deepspeed=True, fused_lora=False),
}


class Term(NamedTuple):
    """A summand of a part, in bytes; one that is `divided` is shared by all cards."""

    name: str
    size: float
    divided: bool = False


def terms(shape: Shape, recipe: Recipe) -> dict[str, list[Term]]:
    """What the engine decides of a card's memory; activations, logits and workspace are whole under each of them.

    With N cards: weights/N under fsdp and zero3, but 4-bit weights have scales, which are no parameters and stay whole.
    Gathered on top: FSDP2 has the layer at work and the next one. The output head is a unit of its own (accelerate),
    gathered until its backward pass; the buffer it came in is there until the forward pass ends, when layers are not.
    The embedding is gathered when the head is not. ZeRO-3 keeps up to LIVE weights, beside the head, which it needs.
    DeepSpeed computes with a 16-bit copy of the adapters beside float32/N, and reduces gradients in a bucket.
    """
    engine, trained, wide = ENGINES[recipe.engine], shape.adapter_params(recipe.r), recipe.wide
    each = wide if recipe.method != "qlora" else NF4_DOUBLE if recipe.bnb_4bit_use_double_quant else NF4
    base = shape.linear_params * each + (shape.params - shape.linear_params) * wide
    if recipe.engine == "ddp":
        adam = OPTIMIZER_8BIT if recipe.optim.endswith("8bit") else OPTIMIZER
        kept = trained * (ADAPTER + GRADIENT * (recipe.gradient_accumulation_steps > 1))
        return {"weights": [Term("weights", base)], "adapters": [Term("adapters, gradients", kept)],
                "optimizer": [Term("AdamW's moments", trained * adam)]}  # fmt: skip
    scales = shape.linear_params * (each - FOUR_BITS) if recipe.method == "qlora" else 0.0
    found = {"weights": [Term("weights", base - scales, engine.shards), Term("scales", scales)]}
    head = shape.vocab * shape.hidden * wide
    layer = (shape.linear_params * (FOUR_BITS if scales else wide) + trained * wide) / shape.layers
    if engine.shards and engine.deepspeed:
        found["gathered"] = [Term("output head", head), Term("live weights", min(LIVE, shape.params) * wide)]
    elif engine.shards:
        layers = layer * min(GATHERED, recipe.cards)  # a single card copies, without a buffer
        buffer = Term("its buffer", head) if head > layers and recipe.cards > 1 else Term("layers", layers)
        found["gathered"] = [Term("output head", head), buffer]
    whole = 0 if engine.offload else trained
    # FSDP2 keeps gradients whole until the last micro-step, as transformers' Trainer asks it to (no_sync)
    gradients = whole * GRADIENT * (engine.deepspeed or recipe.gradient_accumulation_steps > 1)
    copy = [Term("16-bit copy", trained * wide, engine.shards)] if engine.deepspeed else []
    found["adapters"] = [
        Term("float32 weights", whole * ADAPTER, True),
        Term("gradients", gradients, engine.deepspeed),
        *copy,
    ]
    found["optimizer"] = [Term("AdamW's moments", whole * OPTIMIZER, True)]
    return found | ({"bucket": [Term("bucket", BUCKET * wide)]} if engine.deepspeed else {})


def ram_gib(shape: Shape, recipe: Recipe, machines: int = 1) -> float:
    """RAM of one machine that the engine takes: while loading, or for what it offloads; the rest is the same for all.

    Of fsdp_qlora every process loads the 4-bit model for itself, of the 16-bit engines one process of a machine.
    """
    engine = ENGINES[recipe.engine]
    if engine.offload:
        return shape.adapter_params(recipe.r) * (ADAPTER + GRADIENT + OPTIMIZER) / machines / GIB
    base = sum(term.size for term in terms(shape, recipe)["weights"])
    copies = recipe.cards / machines if recipe.method == "qlora" else 1
    return base * copies / GIB if engine.shards else 0.0


def sent_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes a card sends in an optimizer step, by ring: (N-1)/N of what is gathered or scattered, twice of a sum.

    DDP sums float32 gradients once, FSDP2 scatters them once, DeepSpeed scatters 16-bit ones in every micro-step.
    ZeRO-2 then gathers the new adapters. Sharded weights are gathered twice in a micro-step, forward and backward:
    gradient checkpointing computes a layer again while its weights are there.
    """
    engine, trained, others = ENGINES[recipe.engine], shape.adapter_params(recipe.r), 1 - 1 / recipe.cards
    if recipe.engine == "ddp":
        return 2 * others * trained * GRADIENT
    weights = sum(term.size for term in terms(shape, recipe)["weights"] if term.divided)
    gathered = 2 * weights * recipe.gradient_accumulation_steps if engine.shards else trained * recipe.wide
    return others * (
        gathered + trained * (recipe.wide * recipe.gradient_accumulation_steps if engine.deepspeed else GRADIENT)
    )


def peak_gib(shape: Shape, recipe: Recipe) -> float:
    """The forecast peak on one GPU."""
    return sum(parts(shape, recipe).values())


def parts(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB by part; their sum is the forecast peak."""
    tokens, wide = recipe.tokens, recipe.wide
    layer_input = tokens * shape.hidden * wide
    saved = wide * (  # what one layer keeps of a token for its backward pass
        (SAVED_HIDDEN + (0 if recipe.uses_liger else PLAIN_HIDDEN)) * shape.hidden
        + (SAVED_HEADS * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        + (SAVED_MLP if ENGINES[recipe.engine].fused_lora else PLAIN_MLP) * shape.intermediate
        + ADAPTERS * recipe.r
    )
    saved += (
        sum(inner for inner, _ in shape.linears) if recipe.lora_dropout else 0
    )  # a byte for each input of an adapter
    saved *= tokens
    # alive only while one layer is computed backwards: its gradients, what it computed again, one weight in 16 bits
    mlp = BACKWARD_MLP + (recipe.lora_dropout > 0)  # with dropout also the thinned activation
    backward: float = tokens * (BACKWARD_HIDDEN * shape.hidden + mlp * shape.intermediate) * wide
    backward += saved - layer_input if recipe.gradient_checkpointing else 0
    backward += max(inner * outer for inner, outer in shape.linears) * wide if recipe.method == "qlora" else 0
    kept: float = shape.layers * saved
    if recipe.gradient_checkpointing:
        kept = shape.layers * layer_input
    if recipe.activation_offloading:
        kept = min(OFFLOAD_STASH, shape.layers) * layer_input
    tile = min(LOSS_TILE[0], tokens) * min(LOSS_TILE[1], shape.vocab) * wide
    mask = MASK * tokens**2 if recipe.attn_implementation == "sdpa" else 0  # rows are laid end to end: one long one
    found = {
        name: sum(term.size / (recipe.cards if term.divided else 1) for term in summands)
        for name, summands in terms(shape, recipe).items()
    } | {
        "activations": kept + backward,
        "logits": max(0.0, tokens * shape.hidden * LOSS_HIDDEN + tile - backward),  # before a layer at work
        "workspace": mask + SLACK,
    }
    return {name: size / GIB for name, size in found.items()}


def launch_seconds(shape: Shape, recipe: Recipe) -> float:
    """Time Python needs to start the kernels of a micro-step: no micro-step is shorter."""
    launching = LAUNCH
    if recipe.method == "qlora":
        launching += LAUNCH_QUANTIZED
    if recipe.gradient_checkpointing:
        launching += LAUNCH_AGAIN
    if recipe.activation_offloading:
        launching += LAUNCH_OFFLOAD
    return launching * shape.layers


def tokens_per_second(shape: Shape, recipe: Recipe, gpu: GPUSpec) -> float | None:
    """Real tokens per second on all GPUs together; None where a GPU's arithmetic is not known."""
    if gpu.tflops is None:
        return None
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    quantized, offload = recipe.method == "qlora", recipe.activation_offloading
    passes = (
        2 + AGAIN * recipe.gradient_checkpointing
    )  # times a layer's products are computed: frozen weights need no gradient
    head = 3 * 2 * shape.vocab * shape.hidden  # forward, again in the backward pass, and backward
    seen = recipe.tokens if recipe.attn_implementation == "sdpa" else recipe.length / 2
    attention = 4 * seen * shape.heads * shape.head_dim * shape.layers * (passes + 1)
    flops = recipe.tokens * (2 * shape.linear_params * passes + head + attention)
    computing = flops / ((ALONE if gpu.bandwidth is None else ARITHMETIC) * gpu.tflops * 1e12)
    if gpu.bandwidth is not None:  # weights brought to 16 bits, and work element by element
        brought = shape.linear_params * (NF4_DOUBLE + recipe.wide) if quantized else 0
        touched = recipe.tokens * shape.layers * sum(map(sum, shape.linears)) * recipe.wide
        moved = passes * (brought + touched * (ELEMENTWISE if recipe.uses_liger else PLAIN))
        computing += moved / (BANDWIDTH * gpu.bandwidth * 1e9)
    # a small step on a fast GPU waits for Python
    seconds = max(computing * (OFFLOAD if offload else 1), launch_seconds(shape, recipe))
    if offload:
        seconds = max(seconds, 2 * shape.layers * recipe.tokens * shape.hidden * recipe.wide / RAM_LINK)
    seconds += (
        sent_bytes(shape, recipe) / recipe.gradient_accumulation_steps / RAM_LINK
    )  # as if nothing were computed meanwhile
    return recipe.tokens * (PACKED if recipe.packing else 1.0) / seconds * recipe.cards


def limit_gib(gpu: GPUSpec) -> float:
    """How much the plan lets torch use of one GPU."""
    return gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB


def recipe_of(facts: Mapping[str, Any]) -> Recipe:
    """How a lesson 03 trained, from its facts."""
    settings, cards = nested(facts["settings"]), facts["processes"]
    lora, quantization, sft, load = (settings[block] for block in ("lora", "quantization", "sft", "from_pretrained"))
    return Recipe(
        method=settings["method"], r=lora["r"], lora_dropout=lora["lora_dropout"], length=sft["max_length"],
        bnb_4bit_use_double_quant=quantization["bnb_4bit_use_double_quant"],
        per_device_train_batch_size=sft["per_device_train_batch_size"],
        gradient_accumulation_steps=facts["batch"] // cards // sft["per_device_train_batch_size"],
        gradient_checkpointing=sft["gradient_checkpointing"], activation_offloading=sft["activation_offloading"],
        use_liger_kernel=sft["use_liger_kernel"], optim=sft["optim"], packing=sft["packing"],
        engine=facts.get("engine") or "ddp", cards=cards, **load,
    )  # fmt: skip


def candidates(recipe: Recipe, step: int, gpu: GPUSpec, sft: SFT | None = None) -> list[Recipe]:
    """Every micro-batch that divides a GPU's share of the step, with every way to recompute; what `sft` names stays."""
    distributed.require_shares(step, gpu.count)
    rows = step // gpu.count
    sizes: Sequence[int] = [size for size in range(1, rows + 1) if rows % size == 0]
    offload = recipe.engine == "ddp" or (sft is not None and sft.activation_offloading is True)
    ways: Sequence[tuple[bool, bool]] = WAYS if offload else WAYS[:2]
    if sft and sft.per_device_train_batch_size != "auto":
        sizes = (distributed.micro_batch_for(step, sft.per_device_train_batch_size, gpu.count),)
    if sft and sft.gradient_checkpointing != "auto":
        ways = [way for way in ways if way[0] == sft.gradient_checkpointing]
    if sft and sft.activation_offloading != "auto":
        ways = [way for way in ways if way[1] == sft.activation_offloading]
    return [
        replace(
            recipe, per_device_train_batch_size=size, gradient_accumulation_steps=rows // size,
            gradient_checkpointing=recompute, activation_offloading=to_ram,
        )
        for size, (recompute, to_ram) in product(sizes, ways)
    ]  # fmt: skip


def best_option(shape: Shape, recipes: Sequence[Recipe], gpu: GPUSpec) -> Recipe:
    """The fastest that fits, among nearly equals the one with the lowest peak; the smallest where nothing fits."""
    peaks = {recipe: peak_gib(shape, recipe) for recipe in recipes}
    fitting = [recipe for recipe in recipes if peaks[recipe] <= limit_gib(gpu)]
    if fitting and gpu.tflops is None:  # speed unknown: no recomputing, large steps
        return min(fitting, key=_slowness)
    rates = {recipe: tokens_per_second(shape, recipe, gpu) or 0.0 for recipe in fitting}
    good = [recipe for recipe in fitting if rates[recipe] >= NEARLY * max(rates.values())]
    return min(good or recipes, key=peaks.__getitem__)


def _slowness(recipe: Recipe) -> tuple[bool, bool, int]:
    return recipe.gradient_checkpointing, recipe.activation_offloading, -recipe.per_device_train_batch_size


def fastest(
    profile: Profile, shape: Shape, gpu: GPUSpec, rows: Rows | None, named: SFT | None = None, engine: str = "ddp"
) -> Recipe:
    """The best micro-batch and checkpointing for a settled profile, as far as `named`, the profile's own, leaves open.

    The 8-bit optimizers of bitsandbytes do not take shards: engines other than DDP train with AdamW in 32 bits.
    """
    sft, load = profile.sft, profile.from_pretrained
    new = gpu.capability >= BF16_FROM  # torch's varlen attention and Triton's kernels begin there too
    dtype, attention = ("bfloat16", "varlen") if new else ("float16", "sdpa")
    single = rows if rows and not sft.packing else None
    recipe = Recipe(
        method=distributed.STRATEGIES[engine] or str(profile.method), r=profile.lora.r,
        lora_dropout=profile.lora.lora_dropout,
        bnb_4bit_use_double_quant=profile.quantization.bnb_4bit_use_double_quant,
        optim=sft.optim if engine == "ddp" else "adamw_torch_fused", engine=engine, cards=gpu.count,
        dtype=dtype if load.dtype == "auto" else load.dtype,
        attn_implementation=attention if load.attn_implementation == "auto" else load.attn_implementation,
        use_liger_kernel=new if sft.use_liger_kernel == "auto" else sft.use_liger_kernel,
        length=round(single.mean) if single else sft.max_length, spread=single.spread if single else 0.0,
        packing=bool(sft.packing),
    )  # fmt: skip
    return best_option(shape, candidates(recipe, rows_per_step(sft, gpu.count), gpu, named or sft), gpu)


def smallest(shape: Shape, recipe: Recipe, step: int, named: SFT, gpu: GPUSpec) -> Recipe:
    """The same training with the lowest peak, as far as the profile leaves micro-batch and checkpointing open."""
    return min(candidates(recipe, step, gpu, named), key=lambda one: peak_gib(shape, one))


def of_profile(
    profile: Profile, gpu: GPUSpec, model: str | Shape = "", rows: int | None = None,
    mean_length: float | None = None, data: Rows | None = None, engine: str = "ddp",
) -> Forecast:  # fmt: skip
    """A profile on a GPU; `auto` values become what the rows want and the fastest that fit, or the smallest.

    None stands where a fact is missing, and `notes` says which; a cost of 0 is free.
    """
    shape = model if isinstance(model, Shape) else find_shape(model or profile.model)
    rows = data.examples if data else rows if rows is not None else profile.course.rows or None
    mean = data.mean if data else mean_length
    if data is None and rows and mean:  # a guess: instruction data spreads about as wide as its mean
        longest = profile.sft.max_length
        data = Rows(rows, min(mean, longest), max(0.0, min(mean, longest - mean)))
    given, chosen = profile, choose(profile, data, shape, gpu.count)
    profile = apply(profile, chosen)
    sft, step = profile.sft, rows_per_step(profile.sft, gpu.count)
    recipe = fastest(profile, shape, gpu, data, given.sft, engine)
    tokens = None  # of the whole training
    if sft.max_steps > 0:
        tokens = sft.max_steps * step * recipe.length * (PACKED if recipe.packing else 1.0)
    elif rows is not None and mean is not None:
        tokens = rows * (min(mean, recipe.length) if recipe.packing else mean) * (float(sft.num_train_epochs) or 1.0)
    rate = tokens_per_second(shape, recipe, gpu)
    hours = None if rate is None or tokens is None else tokens / rate / 3600
    cost = {
        name: price if not price else None if hours is None else price * hours * gpu.count
        for name, price in (("yuan", gpu.yuan), ("dollars", gpu.dollars))
    }
    whole = shape.params * 2 / GIB
    least = smallest(shape, recipe, step, given.sft, gpu)
    slow = tokens_per_second(shape, least, gpu)
    sizes, made = parts(shape, recipe), schedule(sft, data, gpu.count) if data else None
    notes = list(_notes(shape, recipe, gpu, rate, tokens))
    if "method" in chosen:
        notes.append(chosen["method"].reason)
    if data:
        notes.append(few_steps(profile, given, data, gpu.count))
    notes.append(tr(gpu.note))
    trained = shape.adapter_params(recipe.r) / GIB
    checkpoint = trained * 4 + (sizes["optimizer"] if engine == "ddp" else trained * OPTIMIZER)
    peak, limit = sum(sizes.values()), limit_gib(gpu)
    return {
        "model": shape.name, "gpu": gpu.name, "gpus": gpu.count,
        "card": gpu.model_dump(exclude={"note", "called", "also", "platforms"}),
        "recipe": asdict(recipe), "batch": step,
        "steps": made and made.steps, "examples_per_step": made and made.examples_per_step,
        "epochs": made and made.epochs, "learning_rate": made and made.learning_rate, "schedule": made and str(made),
        "peak_vram_gib": peak, "limit_gib": limit, "fits": peak <= limit, "parts": sizes,
        "smallest": {
            "recipe": asdict(least), "peak_vram_gib": peak_gib(shape, least),
            "times_as_long": rate / slow if rate and slow else None,
        },
        "tokens_per_second": rate, "hours": hours, "cost": cost,
        "disk_gib": {"download": whole, "merged": whole * SPARE, "checkpoints": checkpoint * sft.save_total_limit},
        "after_gib": {"merge_ram": MERGE_RAM_GIB, "on_card": shape.params * recipe.wide / GIB},
        "ram_gib": ram_gib(shape, recipe), "notes": list(filter(None, notes)),
    }  # fmt: skip


def _notes(shape: Shape, recipe: Recipe, gpu: GPUSpec, rate: float | None, tokens: float | None) -> Iterator[str]:
    """What a learner should know of a forecast."""
    if shape.params * recipe.wide / GIB > gpu.memory_gib:
        yield tr("too large to be served in 16 bits on this GPU: export it as w4a16 first")
    if rate is None:
        yield tr("speed and hours are unknown: give the GPU's dense 16-bit TFLOP/s with --tflops")
    if tokens is None:
        yield tr("hours are unknown: give --rows and --mean-length")
    if rate is not None and gpu.name != "H200":
        yield tr("the speed follows from published numbers: only the H200 was measured")
    if gpu.count > 1:
        yield tr(
            "the speed of {count} GPUs is an estimate: what {engine} sends goes over PCIe at {link:.0f} GB/s, while "
            "nothing is computed",
            count=gpu.count, engine=recipe.engine, link=RAM_LINK / 1e9,
        )  # fmt: skip
    if (ram := ram_gib(shape, recipe)) > 0:
        yield tr(
            "{engine} needs {size:.0f} GiB of RAM on a machine with all {count} GPUs, beside what every training needs",
            engine=recipe.engine, size=ram, count=gpu.count,
        )  # fmt: skip
