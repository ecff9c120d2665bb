"""The recipe that follows from the rows of the data, and the forecast of a training with it.

The GPU decides nothing of the recipe, only how a step is cut into micro-batches; what a profile names is kept. Memory
is the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one GPU. Speed was measured on one H200; other
GPUs are forecast from their published numbers. What cannot be known stays None, and a note says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from nbutils import distributed
from nbutils.config import Profile, Train
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
CHECKPOINTING = ("off", "on", "offload")
Forecast = dict[str, Any]
SPARE = 1.1  # merging needs a tenth more disk than the model has
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight


@dataclass(frozen=True)
class Rows:
    """The data as far as the recipe depends on it: how many examples there are, and how long."""

    examples: int
    mean: float
    spread: float  # standard deviation of the lengths
    held_out: int = 0  # rows for the validation; 0: unknown

    @classmethod
    def of(cls, lengths: Sequence[int], held_out: int = 0) -> Rows:
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


def schedule(train: Train, rows: Rows) -> Schedule:
    """Steps and their size, for a profile whose values are settled."""
    per_epoch, each = _per_epoch(train, rows)
    steps = train.max_steps or math.ceil(per_epoch * float(train.epochs))
    return Schedule(steps, each, each * rows.mean, steps / per_epoch, float(train.learning_rate))


def few_steps(train: Train, pinned: Train, rows: Rows) -> str:
    """What to set where the batch a profile names leaves too few steps; empty where it does not."""
    made, better = schedule(train, rows), _examples_per_step(rows, train.max_length)
    enough = made.steps >= STEPS_PER_EPOCH or better >= made.examples_per_step
    if pinned.batch == "auto" or train.max_steps or enough:
        return ""
    return tr(
        "train.batch={batch} puts {each:,.0f} conversations into a step and leaves only {steps} steps, too few to "
        "learn much: set train.batch={better}, train.packing=false",
        batch=train.batch, each=made.examples_per_step, steps=made.steps, better=better,
    )  # fmt: skip


def choose(profile: Profile, rows: Rows | None, shape: Shape | None, processes: int = 1) -> dict[str, Choice]:
    """The values a profile leaves to its model and its rows, by dotted name; without rows those of large data."""
    train, found = profile.train, dict[str, Choice]()
    unknown_rows = _unknown_rows()
    small = shape is not None and shape.params < SMALL
    if profile.method == "auto" and profile.quantization.type != "none" and not small:
        found["method"] = Choice("qlora", "")  # the comment in the profile says why
    elif profile.method == "auto":
        under = tr("recipe: a model below a billion parameters loses quality in 4 bits, and 16 bits fit")
        found["method"] = Choice("lora", under if small else tr("quantization.type is none"))
        found["quantization.type"] = Choice("none", tr("method lora"))
        found["quantization.double"] = Choice(False, tr("method lora"))
    found |= _batch(train, rows, processes)
    if train.learning_rate == "auto" and shape is None:
        usual = tr("recipe: usual for LoRA; the size of this model is not known before its download")
        found["train.learning_rate"] = Choice(2e-4, usual)
    elif train.learning_rate == "auto" and shape:
        each = _per_epoch(apply(profile, found).train, rows)[1] if rows else FULL_RATE_FROM
        noise = min(1.0, each / FULL_RATE_FROM) ** 0.5
        rate = float(f"{noise * RATE * (AT_HIDDEN / shape.hidden) ** POWER:.1e}")
        why = tr("recipe: for a model of width {width}; halve it if the loss is unstable", width=shape.hidden)
        if noise < 1:
            why = tr(
                "recipe: for a model of width {width} and {each:.0f} conversations per step; halve it if the loss is "
                "unstable",
                width=shape.hidden, each=each,
            )  # fmt: skip
        found["train.learning_rate"] = Choice(rate, why)
    if train.epochs == "auto":
        epochs = next(epochs for most, epochs in EPOCHS if (rows.examples if rows else math.inf) <= most)
        text = unknown_rows
        if rows:
            text = tr("recipe: for {rows:,} rows; the step with the best validation loss is kept", rows=rows.examples)
        found["train.epochs"] = Choice(epochs, text)
    steps = schedule(apply(profile, found).train, rows).steps if rows else 0
    between = 0 if train.save_steps == "auto" else train.save_steps
    if not between:
        between = max(1, min(MOST_BETWEEN, math.ceil(steps / SAVES))) if rows else MOST_BETWEEN
        text = tr("recipe: {count} checkpoints, each with a validation loss", count=math.ceil(steps / between))
        found["train.save_steps"] = Choice(between, text if rows else unknown_rows)
    if train.validation_rows == "auto":
        times = math.ceil(steps / between) + 1
        each = schedule(apply(profile, found).train, rows).examples_per_step if rows else 0
        most = int(SHARE * steps * each / (FORWARD * times)) if rows else MOST_VALIDATED
        text = tr(
            "recipe: {times} validations, in about {share:.0%} of the training time or less", times=times, share=SHARE
        )
        count = min(max(LEAST_VALIDATED, min(MOST_VALIDATED, most)), (rows and rows.held_out) or MOST_VALIDATED)
        found["train.validation_rows"] = Choice(count, text if rows else unknown_rows)
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


def _per_epoch(train: Train, rows: Rows) -> tuple[int, float]:
    """Steps of an epoch, and the conversations in each, for a batch that is settled."""
    whole = rows.packed(train.max_length) if train.packing else rows.examples
    return math.ceil(whole / int(train.batch)), rows.examples * min(int(train.batch), whole) / whole


def _examples_per_step(rows: Rows, max_length: int) -> int:
    """A power of two that leaves about 50 steps in an epoch, up to the largest step."""
    ideal = 2 ** round(math.log2(max(rows.examples / STEPS_PER_EPOCH, FEWEST)))
    return max(1, min(ideal, int(LARGEST_STEP * max_length / rows.mean)))


def _batch(train: Train, rows: Rows | None, processes: int) -> dict[str, Choice]:
    """Batch and packing: conversations laid end to end, or, where a step holds many, rows packed to max_length."""
    found: dict[str, Choice] = {}
    packing, batch = train.packing, train.batch
    each = _examples_per_step(rows, train.max_length) if rows else 0
    filled = each * rows.mean / train.max_length if rows else LARGEST_STEP
    if packing == "auto":
        text = tr("recipe: the batch that is set counts conversations; with packing: true it counts packed rows")
        if batch == "auto":
            text = tr(
                "recipe: a step fills {filled:.1f} rows of {length} tokens; from {least} on, rows are packed",
                filled=filled, length=train.max_length, least=PACK_FROM,
            )  # fmt: skip
        packing = batch == "auto" and filled >= PACK_FROM
        found["train.packing"] = Choice(packing, text)
    if batch == "auto":
        # powers of two, so that one GPU's run can go on with 2 or 4; other numbers of processes round it up
        size = 2 ** round(math.log2(max(1, filled))) if packing else 2 ** int(math.log2(each or FEWEST))
        batch = math.ceil(size / processes) * processes
        settled = train.model_copy(update={"batch": batch, "packing": packing})
        steps, each_step = _per_epoch(settled, rows) if rows else (0, 0.0)
        text = tr("recipe: {each:.0f} conversations per step, {steps} steps per epoch", each=each_step, steps=steps)
        found["train.batch"] = Choice(batch, text if rows else _unknown_rows())
    if train.micro_batch != "auto":
        size = distributed.micro_batch_for(batch, train.micro_batch, processes)
        reason = tr(
            "the largest up to {most} that divides each process's part of the batch of {batch}",
            most=train.micro_batch, batch=batch,
        )  # fmt: skip
        found |= {} if size == train.micro_batch else {"train.micro_batch": Choice(size, reason)}
    return found


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
    engine: str = "ddp"
    cards: int = 1  # that train together, of all machines

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step, laid end to end: all alike where rows are packed, else of one that is rarely met."""
        return round(self.micro_batch * self.length + RARE * self.spread * self.micro_batch**0.5)

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def uses_liger(self) -> bool:
        """Whether Liger's kernels are used."""
        return self.liger and ENGINES[self.engine].fused_lora


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
    engine, trained, wide = ENGINES[recipe.engine], shape.adapter_params(recipe.rank), recipe.wide
    each = wide if recipe.method != "qlora" else NF4_DOUBLE if recipe.double else NF4
    base = shape.linear_params * each + (shape.params - shape.linear_params) * wide
    if recipe.engine == "ddp":
        adam = OPTIMIZER_8BIT if recipe.optimizer.endswith("8bit") else OPTIMIZER
        kept = trained * (ADAPTER + GRADIENT * (recipe.accumulation > 1))
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
    gradients = whole * GRADIENT * (engine.deepspeed or recipe.accumulation > 1)
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
        return shape.adapter_params(recipe.rank) * (ADAPTER + GRADIENT + OPTIMIZER) / machines / GIB
    base = sum(term.size for term in terms(shape, recipe)["weights"])
    copies = recipe.cards / machines if recipe.method == "qlora" else 1
    return base * copies / GIB if engine.shards else 0.0


def sent_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes a card sends in an optimizer step, by ring: (N-1)/N of what is gathered or scattered, twice of a sum.

    DDP sums float32 gradients once, FSDP2 scatters them once, DeepSpeed scatters 16-bit ones in every micro-step.
    ZeRO-2 then gathers the new adapters. Sharded weights are gathered twice in a micro-step, forward and backward:
    gradient checkpointing computes a layer again while its weights are there.
    """
    engine, trained, others = ENGINES[recipe.engine], shape.adapter_params(recipe.rank), 1 - 1 / recipe.cards
    if recipe.engine == "ddp":
        return 2 * others * trained * GRADIENT
    weights = sum(term.size for term in terms(shape, recipe)["weights"] if term.divided)
    gathered = 2 * weights * recipe.accumulation if engine.shards else trained * recipe.wide
    return others * (gathered + trained * (recipe.wide * recipe.accumulation if engine.deepspeed else GRADIENT))


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
        + ADAPTERS * recipe.rank
    )
    saved += sum(inner for inner, _ in shape.linears) if recipe.dropout else 0  # a byte for each input of an adapter
    saved *= tokens
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
        name: sum(term.size / (recipe.cards if term.divided else 1) for term in summands)
        for name, summands in terms(shape, recipe).items()
    } | {
        "activations": kept[recipe.checkpointing] + backward,
        "logits": max(0.0, tokens * shape.hidden * LOSS_HIDDEN + tile - backward),  # before a layer at work
        "workspace": mask + SLACK,
    }
    return {name: size / GIB for name, size in found.items()}


def launch_seconds(shape: Shape, recipe: Recipe) -> float:
    """Time Python needs to start the kernels of a micro-step: no micro-step is shorter."""
    way = recipe.checkpointing
    launching = LAUNCH + LAUNCH_QUANTIZED * (recipe.method == "qlora")
    return (launching + LAUNCH_AGAIN * (way != "off") + LAUNCH_OFFLOAD * (way == "offload")) * shape.layers


def tokens_per_second(shape: Shape, recipe: Recipe, gpu: GPUSpec) -> float | None:
    """Real tokens per second on all GPUs together; None where a GPU's arithmetic is not known."""
    if gpu.tflops is None:
        return None
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    way, quantized = recipe.checkpointing, recipe.method == "qlora"
    again, offload = way != "off", way == "offload"
    passes = 2 + AGAIN * again  # times a layer's products are computed: frozen weights need no gradient
    head = 3 * 2 * shape.vocab * shape.hidden  # forward, again in the backward pass, and backward
    seen = recipe.tokens if recipe.attention == "sdpa" else recipe.length / 2
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
    seconds += sent_bytes(shape, recipe) / recipe.accumulation / RAM_LINK  # as if nothing were computed meanwhile
    return recipe.tokens * (PACKED if recipe.packing else 1.0) / seconds * recipe.cards


def limit_gib(gpu: GPUSpec) -> float:
    """How much the plan lets torch use of one GPU."""
    return gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB


def recipe_of(facts: Mapping[str, Any]) -> Recipe:
    """How a lesson 03 trained, from its facts."""
    settings, cards = facts["settings"], facts["processes"]
    return Recipe(
        settings["method"], settings["lora.rank"], settings["machine.precision"], settings["machine.attention"],
        settings["machine.liger"] == "on", settings["train.optimizer"], settings["train.max_length"],
        settings["train.micro_batch"], settings["train.gradient_checkpointing"], settings["quantization.double"],
        settings["train.packing"], facts["batch"] // cards // settings["train.micro_batch"],
        settings["lora.dropout"] > 0, engine=facts.get("engine") or "ddp", cards=cards,
    )  # fmt: skip


def candidates(recipe: Recipe, batch: int, gpu: GPUSpec, train: Train | None = None) -> list[Recipe]:
    """Every micro-batch that divides a GPU's share of the batch, with every checkpointing; what `train` names stays."""
    distributed.require_shares(batch, gpu.count)
    rows = batch // gpu.count
    sizes: Sequence[int] = [size for size in range(1, rows + 1) if rows % size == 0]
    ways: Sequence[str] = CHECKPOINTING if recipe.engine == "ddp" else CHECKPOINTING[:2]
    if train and train.micro_batch != "auto":
        sizes = (train.micro_batch,)
    if train and train.gradient_checkpointing != "auto":
        ways = (train.gradient_checkpointing,)
    pairs = product(sizes, ways)
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


def fastest(profile: Profile, shape: Shape, gpu: GPUSpec, rows: Rows | None, engine: str = "ddp") -> Recipe:
    """The best micro-batch and checkpointing for a settled profile, as far as it leaves them open.

    The 8-bit optimizers of bitsandbytes do not take shards: engines other than DDP train with AdamW in 32 bits.
    """
    train, machine = profile.train, profile.machine
    new = gpu.capability >= BF16_FROM  # torch's varlen attention and Triton's kernels begin there too
    precision, attention, liger = ("bf16", "varlen", "on") if new else ("fp16", "sdpa", "off")
    single = rows if rows and not train.packing else None
    recipe = Recipe(
        distributed.ENGINES[engine] or str(profile.method), profile.lora.rank, double=profile.quantization.double,
        optimizer=train.optimizer if engine == "ddp" else "adamw_torch_fused", engine=engine, cards=gpu.count,
        precision=precision if machine.precision == "auto" else machine.precision,
        attention=attention if machine.attention == "auto" else machine.attention,
        liger=(liger if machine.liger == "auto" else machine.liger) == "on",
        length=round(single.mean) if single else train.max_length, spread=single.spread if single else 0.0,
        packing=bool(train.packing), dropout=profile.lora.dropout > 0,
    )  # fmt: skip
    return best_option(shape, candidates(recipe, int(train.batch), gpu, train), gpu)


def smallest(shape: Shape, recipe: Recipe, train: Train, gpu: GPUSpec) -> Recipe:
    """The same training with the lowest peak, as far as the profile leaves micro-batch and checkpointing open."""
    return min(candidates(recipe, int(train.batch), gpu, train), key=lambda one: peak_gib(shape, one))


def of_profile(
    profile: Profile, gpu: GPUSpec, model: str | Shape = "", rows: int | None = None,
    mean_length: float | None = None, data: Rows | None = None, engine: str = "ddp",
) -> Forecast:  # fmt: skip
    """A profile on a GPU; `auto` values become what the rows want and the fastest that fit, or the smallest.

    None stands where a fact is missing, and `notes` says which; a cost of 0 is free.
    """
    shape = model if isinstance(model, Shape) else find_shape(model or profile.model)
    rows = data.examples if data else rows if rows is not None else profile.data.rows or None
    mean = data.mean if data else mean_length
    if data is None and rows and mean:  # a guess: instruction data spreads about as wide as its mean
        longest = profile.train.max_length
        data = Rows(rows, min(mean, longest), max(0.0, min(mean, longest - mean)))
    named, chosen = profile.train, choose(profile, data, shape, gpu.count)
    profile = apply(profile, chosen)
    train, recipe = profile.train, fastest(profile, shape, gpu, data, engine)
    tokens = None  # of the whole training
    if train.max_steps:
        tokens = train.max_steps * int(train.batch) * recipe.length * (PACKED if recipe.packing else 1.0)
    elif rows is not None and mean is not None:
        tokens = rows * (min(mean, recipe.length) if recipe.packing else mean) * (float(train.epochs) or 1.0)
    rate = tokens_per_second(shape, recipe, gpu)
    hours = None if rate is None or tokens is None else tokens / rate / 3600
    cost = {
        name: price if not price else None if hours is None else price * hours * gpu.count
        for name, price in (("yuan", gpu.yuan), ("dollars", gpu.dollars))
    }
    ram = ram_gib(shape, recipe)
    whole, served = shape.params * 2 / GIB, shape.params * recipe.wide / GIB
    notes = {
        tr("too large to be served in 16 bits on this GPU: export it as w4a16 first"): served > gpu.memory_gib,
        tr("speed and hours are unknown: give the GPU's dense 16-bit TFLOP/s with --tflops"): rate is None,
        tr("hours are unknown: give --rows and --mean-length"): tokens is None,
        tr("the speed follows from published numbers: only the H200 was measured"):
            rate is not None and gpu.name != "H200",
        tr("the speed of {count} GPUs is an estimate: what {engine} sends goes over PCIe at {link:.0f} GB/s, while "
           "nothing is computed", count=gpu.count, engine=engine, link=RAM_LINK / 1e9): gpu.count > 1,
        tr("{engine} needs {size:.0f} GiB of RAM on a machine with all {count} GPUs, beside what every training needs",
           engine=engine, size=ram, count=gpu.count): ram > 0,
        chosen["method"].reason if "method" in chosen else "": True,
        few_steps(train, named, data) if data else "": True,
        tr(gpu.note): True,
    }  # fmt: skip
    least = smallest(shape, recipe, train, gpu)
    slow = tokens_per_second(shape, least, gpu)
    sizes, made = parts(shape, recipe), schedule(train, data) if data else None
    trained = shape.adapter_params(recipe.rank) / GIB
    checkpoint = trained * 4 + (sizes["optimizer"] if engine == "ddp" else trained * OPTIMIZER)
    peak, limit = sum(sizes.values()), limit_gib(gpu)
    return {
        "model": shape.name, "gpu": gpu.name, "gpus": gpu.count,
        "card": gpu.model_dump(exclude={"note", "called", "also", "platforms"}),
        "recipe": asdict(recipe), "batch": int(train.batch),
        "steps": made and made.steps, "examples_per_step": made and made.examples_per_step,
        "epochs": made and made.epochs, "learning_rate": made and made.learning_rate, "schedule": made and str(made),
        "peak_vram_gib": peak, "limit_gib": limit, "fits": peak <= limit, "parts": sizes,
        "smallest": {
            "micro_batch": least.micro_batch, "checkpointing": least.checkpointing,
            "peak_vram_gib": peak_gib(shape, least), "times_as_long": rate / slow if rate and slow else None,
        },
        "tokens_per_second": rate, "hours": hours, "cost": cost,
        "disk_gib": {"download": whole, "merged": whole * SPARE, "checkpoints": checkpoint * train.keep_checkpoints},
        "after_gib": {"merge_ram": MERGE_RAM_GIB, "on_card": served}, "ram_gib": ram,
        "notes": [note for note, holds in notes.items() if note and holds],
    }  # fmt: skip
