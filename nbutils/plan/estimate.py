"""Peak memory and speed of a training step: the two formulas, every coefficient with its reason.

Memory is the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one GPU; what CUDA itself takes is in the
margin (forecast). Speed was measured on one H200; other GPUs are forecast from their published numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbutils.config import Profile
from nbutils.hardware import BF16_FROM
from nbutils.models import Shape
from nbutils.paths import GIB
from nbutils.plan.gpus import CardFacts
from nbutils.plan.schedule import PACKED, Rows

# ---- weights: bytes of one weight of the linear layers
NF4 = 0.5 + 4 / 64  # 4 bits, and a float32 scale for each 64 weights
NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)  # the scales in 8 bits, and a float32 for each 256 of them
# ---- adapters and optimizer: bytes of one adapter weight
ADAPTER, GRADIENT = 4, 4  # float32; gradients wait for the rest of the batch where micro-batches are accumulated
OPTIMIZER_8BIT, OPTIMIZER = 2, 8  # Adam's two moments; a paged one may live in RAM, counted all the same
# ---- activations: tensors of a micro-step's tokens that one layer keeps for its backward pass
SAVED_HIDDEN = 4  # input and output of both norms
SAVED_HEADS = 2  # of the query heads' size: q and the result; k and v come on top, once each
SAVED_MLP = 2  # gate and up; their product is made again when it is needed
PLAIN_HIDDEN = 4.5  # without Liger: float32 copies in the norms, q and k before and after their rotation (measured)
ADAPTERS = 7  # each keeps its narrow result, rank wide
BACKWARD_HIDDEN, BACKWARD_MLP = 1, 1  # gradients alive while one layer's MLP is computed backwards
OFFLOAD_STASH = 5  # layer inputs that stay on the GPU while the others travel to RAM and back (TRL's own number)
# ---- logits: the loss is computed in tiles, so the table of tokens x vocabulary never exists
LOSS_HIDDEN = 2 + 2 + 4  # bytes for each of tokens x hidden: the last state twice, and its gradient in float32
LOSS_TILE = (4096, 32768)  # tokens x words of one tile (TRL's own numbers); gone before the layers go backwards
# ---- workspace
MASK = 14  # bytes for each pair of tokens where packed rows are kept apart by a mask (measured)
SLACK = 0.08 * GIB  # cuBLAS' own space, and small things that nobody names (measured)
# ---- speed
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
    def four_bit(self) -> float:
        """Bytes of a quantized weight."""
        return NF4_DOUBLE if self.double else NF4

    @property
    def passes(self) -> float:
        """Times a layer's products are computed: forward, backward, and most of forward again with checkpointing."""
        return 2 if self.checkpointing == "off" else 2 + AGAIN


def for_card(gpu: CardFacts) -> dict[str, str | bool]:
    """Precision, attention and fused kernels by a GPU's capability, as lesson 03 would have them there."""
    if gpu.capability >= BF16_FROM:  # torch's varlen attention and Triton's kernels begin there too
        return {"precision": "bf16", "attention": "varlen", "liger": True}
    return {"precision": "fp16", "attention": "sdpa", "liger": False}


def from_profile(profile: Profile, gpu: CardFacts, rows: Rows | None = None) -> Recipe:
    """A settled profile's recipe on a GPU; what it leaves to the machine is decided by the GPU's capability."""
    train, machine, by_gpu = profile.train, profile.machine, for_card(gpu)
    single = rows if rows and not train.packing else None
    micro_batch = None if train.micro_batch == "auto" else train.micro_batch
    return Recipe(
        method=profile.method,
        rank=profile.lora.rank,
        precision=str(by_gpu["precision"]) if machine.precision == "auto" else machine.precision,
        attention=str(by_gpu["attention"]) if machine.attention == "auto" else machine.attention,
        liger=bool(by_gpu["liger"]) if machine.liger == "auto" else machine.liger == "on",
        optimizer=train.optimizer,
        length=round(single.mean) if single else train.max_length,
        spread=single.spread if single else 0.0,
        micro_batch=micro_batch or 1,
        checkpointing="on" if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
        double=profile.quantization.double,
        packing=bool(train.packing),
        dropout=profile.lora.dropout > 0,
        accumulation=max(train.step_rows // (micro_batch * gpu.count), 1) if micro_batch else 1,
    )


# ---- memory


def peak_gib(shape: Shape, recipe: Recipe) -> float:
    """The forecast peak on one GPU."""
    return sum(parts(shape, recipe).values())


def parts(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB by part; their sum is the forecast peak."""
    trained, tokens, wide = shape.adapter_params(recipe.rank), recipe.tokens, recipe.wide
    layer_input = tokens * shape.hidden * wide
    saved, backward = _saved_by_layer(shape, recipe), _backward(shape, recipe)
    kept = {"off": shape.layers * saved, "on": shape.layers * layer_input,
            "offload": min(OFFLOAD_STASH, shape.layers) * layer_input}  # fmt: skip
    tile = min(LOSS_TILE[0], tokens) * min(LOSS_TILE[1], shape.vocab) * wide
    mask = MASK * tokens**2 if recipe.attention == "sdpa" else 0  # rows are laid end to end: one long one
    found = {
        "weights": weights(shape, recipe),
        "adapters": trained * (ADAPTER + GRADIENT * (recipe.accumulation > 1)),
        "optimizer": trained * optimizer_bytes(recipe.optimizer),
        "activations": kept[recipe.checkpointing] + backward,
        "logits": max(0.0, tokens * shape.hidden * LOSS_HIDDEN + tile - backward),  # before a layer at work
        "workspace": mask + SLACK,
    }
    return {name: size / GIB for name, size in found.items()}


def weights(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the frozen model: linear layers in 4 bits (qlora) or as computed with; the rest never in 4 bits."""
    linear = recipe.four_bit if recipe.method == "qlora" else recipe.wide
    return shape.linear_params * linear + (shape.embedding_params + shape.norm_params) * recipe.wide


def optimizer_bytes(name: str) -> int:
    """Bytes of optimizer state for one trained weight."""
    return OPTIMIZER_8BIT if name.endswith("8bit") else OPTIMIZER


def _saved_by_layer(shape: Shape, recipe: Recipe) -> float:
    """Bytes that one layer keeps for its backward pass."""
    numbers = (
        (SAVED_HIDDEN + (0 if recipe.liger else PLAIN_HIDDEN)) * shape.hidden
        + (SAVED_HEADS * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        + SAVED_MLP * shape.intermediate
        + ADAPTERS * recipe.rank
    )
    dropped = sum(wide for wide, _ in shape.linears) if recipe.dropout else 0  # a byte for each input of an adapter
    return recipe.tokens * (numbers * recipe.wide + dropped)


def _backward(shape: Shape, recipe: Recipe) -> float:
    """Bytes alive only while one layer is computed backwards: its gradients, and what it computed again."""
    mlp = BACKWARD_MLP + recipe.dropout  # with dropout also the thinned activation
    gradients = recipe.tokens * (BACKWARD_HIDDEN * shape.hidden + mlp * shape.intermediate) * recipe.wide
    layer_input = recipe.tokens * shape.hidden * recipe.wide
    again = 0 if recipe.checkpointing == "off" else _saved_by_layer(shape, recipe) - layer_input
    dense = max(wide * high for wide, high in shape.linears) * recipe.wide  # a quantized weight, while multiplied with
    return gradients + again + (dense if recipe.method == "qlora" else 0)


# ---- speed


def step_seconds(shape: Shape, recipe: Recipe, gpu: CardFacts) -> float | None:
    """Seconds of a micro-step on one GPU; None where the GPU's arithmetic is not known."""
    if gpu.tflops is None:
        return None
    if gpu.bandwidth is None:
        computing = _flops(shape, recipe) / (ALONE * gpu.tflops * 1e12)
    else:
        computing = _flops(shape, recipe) / (ARITHMETIC * gpu.tflops * 1e12)
        computing += _moved_bytes(shape, recipe) / (BANDWIDTH * gpu.bandwidth * 1e9)
    launching = LAUNCH + LAUNCH_QUANTIZED * (recipe.method == "qlora")  # a small step on a fast GPU waits for Python
    launching += LAUNCH_AGAIN * (recipe.checkpointing != "off") + LAUNCH_OFFLOAD * (recipe.checkpointing == "offload")
    launching *= shape.layers
    if recipe.checkpointing != "offload":
        return max(computing, launching)
    travelling = 2 * shape.layers * recipe.tokens * shape.hidden * recipe.wide / RAM_LINK
    return max(computing * OFFLOAD, launching, travelling)


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


def filled(recipe: Recipe) -> float:
    """Share of the computed tokens that are real."""
    return PACKED if recipe.packing else 1.0


def tokens_per_second(shape: Shape, recipe: Recipe, gpu: CardFacts, gpus: int = 1) -> float | None:
    """Real tokens per second on all GPUs together; None where a fact is missing."""
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    seconds = step_seconds(shape, recipe, gpu)
    if seconds is None:
        return None
    together = 1.0 if gpus == 1 else gpus * PARALLEL
    return recipe.tokens * filled(recipe) / seconds * together
