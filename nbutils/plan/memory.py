"""The memory of a training: the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one GPU, by parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nbutils.distributed import SHARDED
from nbutils.files import GIB
from nbutils.models import LinearAttention, Linears, Shape
from nbutils.plan.gpus import GPUSpec

# weights: bytes of one weight of the linear layers
FOUR_BITS = 0.5
NF4 = FOUR_BITS + 4 / 64  # 4 bits, and a float32 scale for each 64 weights
NF4_DOUBLE = FOUR_BITS + 1 / 64 + 4 / (64 * 256)  # the scales in 8 bits, and a float32 for each 256 of them
# adapters and optimizer: bytes of one adapter weight
ADAPTER = 4  # float32
GRADIENT = 4  # they wait for the rest of the batch where micro-batches are accumulated
OPTIMIZER_8BIT = 2  # Adam's two moments; a paged one may live in RAM, counted all the same
OPTIMIZER = 8
# strategies
GATHERED = 2  # layers whose weights FSDP2 has gathered: the one at work, and the next one
BUCKET = 5e8  # elements of the buffer in which DeepSpeed reduces gradients, however few (its reduce_bucket_size)
LIVE = 1e9  # weights that ZeRO-3 has gathered and not yet released (its stage3_max_live_parameters)
# activations: tensors of a micro-step's tokens that one layer keeps for its backward pass
SAVED_HIDDEN = 4  # input and output of both norms
PLAIN_HIDDEN = 8.5  # without Liger: float32 copies in the norms, q and k before and after their rotation (measured)
SAVED_MLP = 2  # gate and up, whose product is made again when needed
PLAIN_MLP = 3  # with PEFT's layers (measured)
SAVED_HEADS = 2  # of the query heads' size: q and the result; of that of the key heads: k and v
ADAPTERS = 7  # each keeps its narrow result, rank wide
GATED_HEADS = 6  # of the query heads' size where the result has a gate: q with it, q after norm and rotation, and so on
GATED_KV_HEADS = 3  # of the key heads' size there
# the same of a Gated DeltaNet layer
SAVED_CONVOLVED = 2  # of the convolution's width: its input; q, k and v
SAVED_VALUES = 3  # of the width of the values: the result, its gate, both together
WITHOUT_KERNELS = 3.6  # times as much is kept by transformers' own code (3.2 to 3.6, measured on a CPU)
CHUNK = 64  # tokens of the delta rule that are computed together: each keeps so many numbers for every head of values
BACKWARD_KEYS = 7  # of all heads' width, made again or new in the backward pass: a key for every head of values
BACKWARD_STATES = 2  # of a chunk's state, keys x values in every head: the state, and its gradient
OFFLOAD_STASH = 5  # layer inputs that stay on the GPU while the others travel to RAM and back (TRL's own number)
# logits: the loss is computed in tiles, so the table of tokens x vocabulary never exists
LOSS_HIDDEN = 2 + 2 + 4  # bytes for each of tokens x hidden: the last state twice, and its gradient in float32
TILE_TOKENS = 4096  # tokens x words of one tile (TRL's own numbers); gone before the layers go backwards
TILE_WORDS = 32768
# workspace
MASK = 14  # bytes for each pair of tokens where packed rows are kept apart by a mask (measured)
SLACK = 0.08 * GIB  # cuBLAS' own space, and small things that nobody names (measured)
RARE = 4  # standard deviations: of some hundred micro-batches, hardly one is larger
# limits
MARGIN = 0.08  # of the GPU's memory stays free: the forecast may be that much off, and memory gets fragmented
CONTEXT_GIB = 0.5  # CUDA's own, which torch's allocator does not count


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
    engine: str = "ddp"  # how cards share the training: `configs/accelerate/NAME.yaml`
    cards: int = 1  # that train together, of all machines

    @property
    def shards(self) -> bool:
        """Whether each card keeps its share of the base, and gathers the layer at work."""
        return self.engine.startswith(SHARDED)

    @property
    def fuses_lora(self) -> bool:
        """Whether the course's LoRA layers are used: they read weights that ZeRO-3 would have to gather first."""
        return self.engine != "zero3"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step, laid end to end: all alike where rows are packed, else of one that is rarely met."""
        rows = self.per_device_train_batch_size
        return round(rows * self.length + RARE * self.spread * rows**0.5)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == "float32" else 2

    @property
    def uses_liger(self) -> bool:
        """Whether Liger's kernels are used."""
        return self.use_liger_kernel and self.fuses_lora

    @property
    def uses_delta_rule_kernels(self) -> bool:
        """Whether kernels compute Gated DeltaNet layers: GPUs that cannot run them train such models in float32."""
        return self.dtype != "float32"

    def uses_reference_code(self, shape: Shape) -> bool:
        """Whether transformers' own code computes this model's Gated DeltaNet layers."""
        return shape.linear_attention is not None and not self.uses_delta_rule_kernels

    @property
    def moment_bytes(self) -> int:
        """Bytes of AdamW's moments for one trained weight; the 8-bit optimizers of bitsandbytes do not take shards."""
        return OPTIMIZER_8BIT if self.engine == "ddp" and self.optim.endswith("8bit") else OPTIMIZER

    @property
    def recompute(self) -> str:
        """For people: whether layers are recomputed in the backward pass, and activations offloaded to RAM."""
        if self.activation_offloading:
            return "offload"
        return "on" if self.gradient_checkpointing else "off"


def base_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the base's weights, which FSDP and ZeRO-3 share; 4-bit ones have scales beside them."""
    weights: float = shape.params * recipe.number_bytes
    if recipe.method == "qlora":
        weights -= shape.linear_params * (recipe.number_bytes - FOUR_BITS)
    return weights


def _by_strategy(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """Bytes of the parts that the strategy decides; activations, logits and workspace are whole under each of them.

    FSDP2 keeps gradients whole until the last micro-step: transformers' Trainer asks it to (no_sync).
    """
    weights = base_bytes(shape, recipe)
    if recipe.shards:
        weights /= recipe.cards
    if recipe.method == "qlora":  # scales are no parameters, and are never shared
        scale = (NF4_DOUBLE if recipe.bnb_4bit_use_double_quant else NF4) - FOUR_BITS
        weights += shape.linear_params * scale
    sizes = {"weights": weights}
    if recipe.shards:
        sizes["gathered"] = _gathered(shape, recipe)
    trained = shape.adapter_params(recipe.r)
    cards = 1 if recipe.engine == "ddp" else recipe.cards
    sizes["adapters"] = trained * ADAPTER / cards
    if recipe.gradient_accumulation_steps > 1:
        sizes["gradients"] = trained * GRADIENT
    sizes["optimizer"] = trained * recipe.moment_bytes / cards
    if recipe.engine.startswith("zero"):
        sizes["bucket"] = BUCKET * recipe.number_bytes
    return sizes


def _gathered(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the weights that a card has put together: the layer at work and the next one.

    The output head is a unit of its own (accelerate), gathered until its backward pass; the buffer it came in is there
    until the forward pass ends, when layers are not. The embedding is gathered when the head is not.
    ZeRO-3 keeps up to LIVE weights, beside the head.
    """
    number_bytes = recipe.number_bytes
    head = shape.vocab * shape.hidden * number_bytes
    if recipe.engine == "zero3":
        return head + min(LIVE, shape.params) * number_bytes
    weight = FOUR_BITS if recipe.method == "qlora" else number_bytes
    base = shape.linear_params * weight
    adapters = shape.adapter_params(recipe.r) * number_bytes
    layer = (base + adapters) / shape.layers
    layers = layer * min(GATHERED, recipe.cards)
    buffer = head if recipe.cards > 1 else 0  # a single card copies, without a buffer
    return head + max(layers, buffer)


def parts(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB by part; their sum is the forecast peak."""
    sizes = _by_strategy(shape, recipe)
    tokens = recipe.tokens
    number_bytes = recipe.number_bytes
    layer_input = tokens * shape.hidden * number_bytes
    layers = _layers(shape, recipe)
    backward = max(layer.backward for layer in layers)
    kept = sum(layer.number * layer.saved for layer in layers)
    if recipe.gradient_checkpointing:
        computed_again = max(layer.saved + layer.backward for layer in layers)
        backward = computed_again - layer_input
        kept = shape.layers * layer_input
    if recipe.activation_offloading:
        kept = min(OFFLOAD_STASH, shape.layers) * layer_input
    sizes["activations"] = kept + backward
    loss = loss_bytes(shape, tokens, number_bytes)
    sizes["logits"] = max(0.0, loss - backward)  # before a layer is at work
    sizes["workspace"] = SLACK
    if recipe.attn_implementation == "sdpa":  # rows are laid end to end: one long one
        sizes["workspace"] += MASK * tokens**2
    return {part: size / GIB for part, size in sizes.items()}


def loss_bytes(shape: Shape, tokens: int, number_bytes: int) -> float:
    """Bytes of the loss and its gradient; the logits of one tile are there at a time."""
    tile = min(TILE_TOKENS, tokens) * min(TILE_WORDS, shape.vocab)
    return tokens * shape.hidden * LOSS_HIDDEN + tile * number_bytes


class Layers(NamedTuple):
    """The layers of one kind: how many, and the bytes of one for its backward pass and while that is computed."""

    number: int
    saved: float
    backward: float


def _layers(shape: Shape, recipe: Recipe) -> list[Layers]:
    """Those with softmax attention, and those with Gated DeltaNet if there are any."""
    mlp = shape.intermediate * (SAVED_MLP if recipe.fuses_lora else PLAIN_MLP)
    norms = shape.hidden * (SAVED_HIDDEN if recipe.uses_liger else PLAIN_HIDDEN)
    shared = norms + mlp + recipe.r * ADAPTERS
    thinned = 2 if recipe.lora_dropout else 1  # with dropout also the thinned activation
    gradients: float = shape.hidden + thinned * shape.intermediate
    layers = [
        Layers(
            shape.softmax_layers,
            _saved(shape, recipe, shape.softmax_linears, shared + _softmax_numbers(shape)),
            _backward(shape, recipe, gradients),
        )
    ]
    if delta := shape.linear_attention:
        gradients = max(gradients, _rule_numbers(delta) - mlp)  # the MLP comes first: what it kept is free by then
        layers.append(
            Layers(
                delta.layers,
                _saved(shape, recipe, delta.linears(shape.hidden), shared + _delta_numbers(delta, recipe)),
                _backward(shape, recipe, gradients),
            )
        )
    return layers


def _softmax_numbers(shape: Shape) -> float:
    """Numbers of a token that softmax attention keeps."""
    if shape.linear_attention:
        heads = GATED_HEADS * shape.heads + GATED_KV_HEADS * shape.kv_heads
    else:
        heads = SAVED_HEADS * (shape.heads + shape.kv_heads)
    return shape.head_dim * heads


def _delta_numbers(delta: LinearAttention, recipe: Recipe) -> float:
    """Numbers of a token that Gated DeltaNet keeps."""
    chunk = CHUNK * delta.num_value_heads
    numbers = SAVED_CONVOLVED * delta.convolved + SAVED_VALUES * delta.values + chunk
    return numbers if recipe.uses_delta_rule_kernels else numbers * WITHOUT_KERNELS


def _rule_numbers(delta: LinearAttention) -> float:
    """Numbers of a token that are there only while the delta rule is computed backwards."""
    states = BACKWARD_STATES * delta.key_head_dim * delta.value_head_dim / CHUNK
    keys = BACKWARD_KEYS * delta.key_head_dim
    return delta.num_value_heads * (states + keys)


def _saved(shape: Shape, recipe: Recipe, attention: Linears, numbers: float) -> float:
    """Bytes that a layer keeps for its backward pass, with so many numbers of each token."""
    token = numbers * recipe.number_bytes
    if recipe.lora_dropout:
        token += sum(inner for inner, _ in attention + shape.mlp_linears)  # a byte for each input of an adapter
    return recipe.tokens * token


def _backward(shape: Shape, recipe: Recipe, numbers: float) -> float:
    """Bytes that are alive only while one layer is computed backwards: its gradients, one weight in 16 bits."""
    size = recipe.tokens * numbers
    if recipe.method == "qlora":
        size += shape.largest_linear
    return size * recipe.number_bytes


def peak_gib(shape: Shape, recipe: Recipe) -> float:
    """The forecast peak on one GPU."""
    return sum(parts(shape, recipe).values())


def limit_gib(gpu: GPUSpec) -> float:
    """How much the plan lets torch use of one GPU."""
    return gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB
