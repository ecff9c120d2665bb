"""The speed of a training, from a GPU's published numbers; the shares of them it reaches were measured on one H200."""

from __future__ import annotations

from dataclasses import replace

from nbutils.models import Shape
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import GRADIENT, NF4_DOUBLE, Recipe, base_bytes
from nbutils.plan.recipe import PACKED

ARITHMETIC = 0.58  # share of the published TFLOP/s that the matrix products reach (7B and 1.5B, 8,192 tokens and more)
BANDWIDTH = 0.6  # share of the published GB/s that element by element work reaches
ALONE = 0.48  # share of the published TFLOP/s the whole step reaches, for GPUs whose bandwidth nobody gave
ELEMENTWISE = 2.5  # times a layer's inputs and outputs are read or written beside the products
PLAIN = 6  # the same without Liger
DELTA_RULE = 70  # numbers that the kernels of a Gated DeltaNet layer read or write for each of a token's values
AGAIN = 0.71  # share of a layer's products that recomputation repeats: all but the last of its MLP
LAUNCH = 0.0073  # seconds Python needs to start a layer's kernels, there and back
LAUNCH_AGAIN = 0.0053  # and once more
LAUNCH_QUANTIZED = 0.005  # and for a layer in 4 bits
LAUNCH_OFFLOAD = 0.004  # and for one whose input travels
LAUNCH_DELTA_RULE = 0.0025  # and for one with Gated DeltaNet
RAM_LINK = 12e9  # bytes per second between GPU and RAM, over PCIe as rented machines have it: an assumption
OFFLOAD = 1.03  # what parking the layer inputs in RAM costs beside the travel


def sent_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes a card sends in an optimizer step, by ring: (N-1)/N of what is gathered or scattered, twice of a sum.

    Float32 gradients are summed once, or scattered where weights are sharded. Those are gathered twice in a
    micro-step, forward and backward: gradient checkpointing computes a layer again while its weights are there.
    """
    size: float = shape.adapter_params(recipe.r) * GRADIENT
    if recipe.shards:
        size += 2 * base_bytes(shape, recipe) * recipe.gradient_accumulation_steps
    else:
        size *= 2
    return size * (1 - 1 / recipe.cards)


def launch_seconds(shape: Shape, recipe: Recipe) -> float:
    """Time Python needs to start the kernels of a micro-step: no micro-step is shorter."""
    seconds = LAUNCH
    if recipe.method == "qlora":
        seconds += LAUNCH_QUANTIZED
    if recipe.gradient_checkpointing:
        seconds += LAUNCH_AGAIN
    if recipe.activation_offloading:
        seconds += LAUNCH_OFFLOAD
    seconds *= shape.layers
    if shape.linear_attention:
        seconds += LAUNCH_DELTA_RULE * shape.linear_attention.layers
    return seconds


def tokens_per_second(shape: Shape, recipe: Recipe, gpu: GPUSpec) -> float | None:
    """Real tokens per second on all GPUs together; None where a GPU's arithmetic or the code's speed is not known."""
    if gpu.tflops is None or recipe.uses_reference_code(shape):
        return None
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    tokens = recipe.tokens
    at_peak = tokens * _flops_per_token(shape, recipe) / (gpu.tflops * 1e12)
    if gpu.bandwidth is None:
        seconds = at_peak / ALONE
    else:
        moving = _moved_bytes(shape, recipe) / (BANDWIDTH * gpu.bandwidth * 1e9)
        seconds = at_peak / ARITHMETIC + moving
    if recipe.activation_offloading:
        travel = 2 * shape.layers * tokens * shape.hidden * recipe.number_bytes
        seconds = max(seconds * OFFLOAD, travel / RAM_LINK)
    seconds = max(seconds, launch_seconds(shape, recipe))  # a small step on a fast GPU waits for Python
    sent = sent_bytes(shape, recipe) / recipe.gradient_accumulation_steps
    seconds += sent / RAM_LINK  # as if nothing were computed meanwhile
    real = PACKED if recipe.packing else 1.0
    return tokens * real / seconds * recipe.cards


def _passes(recipe: Recipe) -> float:
    """Times a layer's products are computed: frozen weights need no gradient."""
    return 2 + AGAIN if recipe.gradient_checkpointing else 2.0


def _flops_per_token(shape: Shape, recipe: Recipe) -> float:
    passes = _passes(recipe)
    linears = 2 * shape.linear_params * passes
    head = 3 * 2 * shape.vocab * shape.hidden  # forward, again in the backward pass, and backward
    seen = recipe.length / 2
    if recipe.attn_implementation == "sdpa":
        seen = recipe.tokens
    attention = 4 * seen * shape.heads * shape.head_dim
    attention *= shape.softmax_layers * (passes + 1)
    return linears + head + attention


def _moved_bytes(shape: Shape, recipe: Recipe) -> float:
    """Of a micro-step: weights brought to 16 bits, and work element by element."""
    width = shape.adapter_params(1)  # inputs and outputs of all linear maps
    numbers = recipe.tokens * width
    moved: float = numbers * recipe.number_bytes
    moved *= ELEMENTWISE if recipe.uses_liger else PLAIN
    if delta := shape.linear_attention:
        values = recipe.tokens * delta.layers * delta.values
        moved += values * DELTA_RULE * recipe.number_bytes
    if recipe.method == "qlora":
        weight = NF4_DOUBLE + recipe.number_bytes
        moved += shape.linear_params * weight
    return _passes(recipe) * moved
