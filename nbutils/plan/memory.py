"""Peak memory of a training step, in parts: the formula, every coefficient with its reason.

It forecasts the peak of torch's allocator (`torch.cuda.max_memory_allocated`) on one card. What CUDA itself takes
beside that is in the margin (choosing). T below is the number of tokens in a micro-step.
"""

from __future__ import annotations

from nbutils.paths import GIB
from nbutils.plan.recipes import Recipe
from nbutils.plan.shapes import Shape

# ---- weights: bytes of one weight of the linear layers
NF4 = 0.5 + 4 / 64  # 4 bits, and a float32 scale for each 64 weights
NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)  # the scales in 8 bits, and a float32 for each 256 of them
# ---- adapters and optimizer: bytes of one adapter weight
ADAPTER, GRADIENT = 4, 4  # float32; gradients wait for the rest of the batch where micro-batches are accumulated
OPTIMIZER = {"8bit": 2, "32bit": 8, "other": 8}  # Adam's two moments; a paged one may live in RAM, counted all the same
# ---- activations: tensors of T tokens that one layer keeps for its backward pass
SAVED_HIDDEN = 4  # input and output of both norms
SAVED_HEADS = 2  # of the query heads' size: q and the result; k and v come on top, once each
SAVED_MLP = 2  # gate and up; their product is made again when it is needed (training/lean.py)
PLAIN_HIDDEN = 4.5  # without Liger: float32 copies in the norms, q and k before and after their rotation (measured)
ADAPTERS = 7  # each keeps its narrow result, rank wide
DROPOUT = 1  # byte for each input of an adapter: whether it was dropped
BACKWARD_HIDDEN, BACKWARD_MLP = 1, 1  # gradients alive while one layer's MLP is computed backwards
OFFLOAD_STASH = 5  # layer inputs that stay on the card while the others travel to RAM and back (TRL's own number)
# ---- logits: the loss is computed in tiles, so the table of T x vocabulary never exists
LOSS_HIDDEN = 2 + 2 + 4  # bytes for each of T x hidden: the last state twice, and its gradient in float32
LOSS_TILE = (4096, 32768)  # tokens x words of one tile (TRL's own numbers); gone before the layers go backwards
# ---- workspace
MASK = 14  # bytes for each pair of T x T tokens where packed rows are kept apart by a mask (measured)
SLACK = 0.08 * GIB  # cuBLAS' own space, and small things that nobody names (measured)


def parts(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB by part; their sum is the forecast peak."""
    found = {
        "weights": weights(shape, recipe),
        "adapters": shape.adapter_params(recipe.rank) * (ADAPTER + GRADIENT * (recipe.accumulation > 1)),
        "optimizer": shape.adapter_params(recipe.rank) * optimizer_bytes(recipe.optimizer),
        "activations": activations(shape, recipe),
        "logits": logits(shape, recipe),
        "workspace": workspace(shape, recipe),
    }
    return {name: size / GIB for name, size in found.items()}


def peak_gib(shape: Shape, recipe: Recipe) -> float:
    """The sum of the parts."""
    return sum(parts(shape, recipe).values())


def weights(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the frozen model: linear layers in 4 bits (qlora) or as computed with; the rest never in 4 bits."""
    four_bit = NF4_DOUBLE if recipe.double else NF4
    linear = four_bit if recipe.method == "qlora" else recipe.wide
    return shape.linear_params * linear + (shape.embedding_params + shape.norm_params) * recipe.wide


def optimizer_bytes(name: str) -> int:
    """Bytes of optimizer state for one trained weight."""
    return next((size for ending, size in OPTIMIZER.items() if name.endswith(ending)), OPTIMIZER["other"])


def saved_by_layer(shape: Shape, recipe: Recipe) -> float:
    """Bytes that one layer keeps for its backward pass."""
    plain = 0 if recipe.liger else PLAIN_HIDDEN
    numbers = (
        (SAVED_HIDDEN + plain) * shape.hidden
        + (SAVED_HEADS * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        + SAVED_MLP * shape.intermediate
        + ADAPTERS * recipe.rank
    )
    dropped = DROPOUT * sum(wide for wide, _ in shape.linears) if recipe.dropout else 0
    return recipe.tokens * (numbers * recipe.wide + dropped)


def backwards(shape: Shape, recipe: Recipe) -> float:
    """Bytes alive only while one layer is computed backwards: its gradients, and what it computed again."""
    mlp = BACKWARD_MLP + recipe.dropout  # with dropout also the thinned activation
    gradients = recipe.tokens * (BACKWARD_HIDDEN * shape.hidden + mlp * shape.intermediate) * recipe.wide
    layer_input = recipe.tokens * shape.hidden * recipe.wide
    again = 0 if recipe.checkpointing == "off" else saved_by_layer(shape, recipe) - layer_input
    return gradients + again + _dense_weight(shape, recipe)


def _dense_weight(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the largest quantised weight while it is multiplied with, in 16 bits."""
    return max(wide * high for wide, high in shape.linears) * recipe.wide if recipe.method == "qlora" else 0


def activations(shape: Shape, recipe: Recipe) -> float:
    """Bytes kept from forward to backward (all of each layer, or its input only), and those of the layer at work."""
    layer_input = recipe.tokens * shape.hidden * recipe.wide
    kept = {
        "off": shape.layers * saved_by_layer(shape, recipe),
        "on": shape.layers * layer_input,
        "offload": min(OFFLOAD_STASH, shape.layers) * layer_input,
    }
    return kept[recipe.checkpointing] + backwards(shape, recipe)


def logits(shape: Shape, recipe: Recipe) -> float:
    """Bytes of the loss as far as they exceed those of a layer at work, which come after it and replace them."""
    tile = min(LOSS_TILE[0], recipe.tokens) * min(LOSS_TILE[1], shape.vocab) * recipe.wide
    return max(0.0, recipe.tokens * shape.hidden * LOSS_HIDDEN + tile - backwards(shape, recipe))


def workspace(shape: Shape, recipe: Recipe) -> float:
    """Bytes in passing: the mask of packed rows, and slack."""
    pairs = recipe.tokens**2 if recipe.attention == "sdpa" else 0  # rows are laid end to end: one long one
    return MASK * pairs + SLACK
