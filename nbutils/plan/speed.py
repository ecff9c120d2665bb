"""Seconds of a training step and tokens per second: the formula, every coefficient with its reason.

The coefficients come from one H200; other cards are forecast from their published arithmetic and bandwidth. Not here:
memory (memory), and which setting is the fastest that fits (choosing).
"""

from __future__ import annotations

from dataclasses import replace

from nbutils.plan.cards import CardFacts
from nbutils.plan.memory import NF4_DOUBLE
from nbutils.plan.recipes import Recipe
from nbutils.plan.shapes import Shape
from nbutils.profiles.recipe import PACKED

ARITHMETIC = 0.58  # share of the published TFLOP/s that the matrix products reach (7B and 1.5B, 8,192 tokens and more)
BANDWIDTH = 0.6  # share of the published GB/s that element by element work reaches
ALONE = 0.48  # share of the published TFLOP/s the whole step reaches, for cards whose bandwidth nobody gave
ELEMENTWISE, PLAIN = 2.5, 6  # times a layer's inputs and outputs are read or written beside the products; without Liger
AGAIN = 0.71  # share of a layer's products that recomputation repeats: all but the last of its MLP
LAUNCH, LAUNCH_AGAIN = 0.0073, 0.0053  # seconds Python needs to start a layer's kernels: there and back, once more
LAUNCH_QUANTISED, LAUNCH_OFFLOAD = 0.005, 0.004  # and for a layer in 4 bits, and for one whose input travels
RAM_LINK = 12e9  # bytes per second between card and RAM, over PCIe as rented machines have it: an assumption
OFFLOAD = 1.03  # what parking the layer inputs in RAM costs beside the travel
PARALLEL = 0.9  # what a second card adds, with gradients exchanged over PCIe: an estimate, not measured


def passes(recipe: Recipe) -> float:
    """Times a layer's products are computed: forward, backward, and most of forward again with checkpointing."""
    return 2 if recipe.checkpointing == "off" else 2 + AGAIN


def flops(shape: Shape, recipe: Recipe) -> float:
    """Floating point operations of a micro-step: the frozen weights need no gradient of their own."""
    linear = 2 * shape.linear_params * passes(recipe)
    head = 3 * 2 * shape.vocab * shape.hidden  # forward, again in the backward pass, and backward
    seen = recipe.tokens if recipe.attention == "sdpa" else recipe.length / 2
    attention = 4 * seen * shape.heads * shape.head_dim * shape.layers * (passes(recipe) + 1)
    return recipe.tokens * (linear + head + attention)


def moved_bytes(shape: Shape, recipe: Recipe) -> float:
    """Bytes through the card's memory in a micro-step: weights brought to 16 bits, and work element by element."""
    brought = shape.linear_params * (NF4_DOUBLE + recipe.wide) if recipe.method == "qlora" else 0
    times = ELEMENTWISE if recipe.liger else PLAIN
    touched = recipe.tokens * shape.layers * sum(map(sum, shape.linears)) * recipe.wide * times
    return passes(recipe) * (brought + touched)


def launching(shape: Shape, recipe: Recipe) -> float:
    """Seconds in which Python starts the kernels of a micro-step: a small step on a fast card waits for it."""
    layer = LAUNCH + LAUNCH_QUANTISED * (recipe.method == "qlora")
    layer += LAUNCH_AGAIN * (recipe.checkpointing != "off") + LAUNCH_OFFLOAD * (recipe.checkpointing == "offload")
    return shape.layers * layer


def step_seconds(shape: Shape, recipe: Recipe, card: CardFacts) -> float | None:
    """Seconds of a micro-step on one card; None where the card's arithmetic is not known."""
    if card.tflops is None:
        return None
    if card.bandwidth is None:
        computing = flops(shape, recipe) / (ALONE * card.tflops * 1e12)
    else:
        computing = flops(shape, recipe) / (ARITHMETIC * card.tflops * 1e12)
        computing += moved_bytes(shape, recipe) / (BANDWIDTH * card.bandwidth * 1e9)
    if recipe.checkpointing != "offload":
        return max(computing, launching(shape, recipe))
    travelling = 2 * shape.layers * recipe.tokens * shape.hidden * recipe.wide / RAM_LINK
    return max(computing * OFFLOAD, launching(shape, recipe), travelling)


def filled(recipe: Recipe) -> float:
    """Share of the computed tokens that are real."""
    return PACKED if recipe.packing else 1.0


def tokens_per_second(shape: Shape, recipe: Recipe, card: CardFacts, gpus: int = 1) -> float | None:
    """Real tokens per second on all cards together; None where a fact is missing."""
    recipe = replace(recipe, spread=0.0)  # the usual micro-batch, not the rare one
    seconds = step_seconds(shape, recipe, card)
    if seconds is None:
        return None
    together = 1.0 if gpus == 1 else gpus * PARALLEL
    return recipe.tokens * filled(recipe) / seconds * together
