"""The forecast of a pre-training from scratch: every weight is trained in float32, matrix products are in 16 bits.

What a layer keeps for its backward pass was counted in torch (Qwen2, autocast). Speed adds three terms: matrix products
at a share of the published TFLOP/s, other work at a share of the published bandwidth, and a floor, the time Python
needs to start the kernels of a micro-batch, which a small model on a fast GPU waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from nbutils import display
from nbutils.files import GIB
from nbutils.language import tr
from nbutils.models import Shape
from nbutils.plan.forecast import ARITHMETIC, BANDWIDTH, LOSS_HIDDEN, LOSS_TILE, NEARLY, SLACK, limit_gib
from nbutils.plan.gpus import GPUSpec

WEIGHT, GRADIENT, ADAM, CAST = 4, 4, 8, 2  # bytes of a parameter; CAST: its copy in 16 bits
SAVED_HIDDEN, SAVED_MLP = 32, 8  # bytes for each of tokens x width, and x the MLP's, that one layer keeps
LAYER_INPUT = 4  # bytes for each of tokens x width that it keeps with gradient checkpointing
MOVED = 13  # times what a layer keeps is written or read in a step; this and the next two were fitted on an H200
UPDATE = 36  # bytes of a parameter that clipping its gradient and AdamW read and write
LOGIT = 2  # bytes of the score of one word
LAUNCH = 0.003  # seconds Python needs to start a layer's kernels, forward and backward
OTHERS = 2  # what is not a layer, counted in layers


@dataclass(frozen=True)
class Pretraining:
    """How a GPU trains a step, what memory that takes, and how long and how much the whole training."""

    gpu: GPUSpec
    per_device_train_batch_size: int
    gradient_checkpointing: bool
    tokens: int  # of the whole training
    parts: dict[str, float]  # GiB; their sum is the peak of torch's allocator
    tokens_per_second: float | None

    @property
    def peak_gib(self) -> float:
        """The forecast peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has that much to give."""
        return self.peak_gib <= limit_gib(self.gpu)

    @property
    def hours(self) -> float | None:
        """Of the whole training, without validations and checkpoints."""
        return self.tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None


def pretraining(shape: Shape, gpu: GPUSpec, length: int, batch: int, steps: int) -> Pretraining:
    """The fastest micro-batch that fits, of those that divide the batch; without one the smallest."""
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    made = []
    for size, recomputes in product(sizes, (False, True)):
        seconds = step_seconds(shape, gpu, length, size, batch // size, recomputes)
        rate = batch * length / seconds if seconds else None
        parts = memory(shape, size * length, recomputes)
        made.append(Pretraining(gpu, size, recomputes, steps * batch * length, parts, rate))
    fitting = [one for one in made if one.fits]
    best = max((one.tokens_per_second or 0.0 for one in fitting), default=0.0)
    near = [one for one in fitting if (one.tokens_per_second or 0.0) >= NEARLY * best]
    return min(near or made, key=lambda one: one.peak_gib)


def memory(shape: Shape, tokens: int, checkpointing: bool) -> dict[str, float]:
    """GiB by part, for micro-batches of so many tokens."""
    saved = tokens * (SAVED_HIDDEN * shape.hidden + SAVED_MLP * shape.intermediate)
    kept = shape.layers * tokens * shape.hidden * LAYER_INPUT + saved if checkpointing else shape.layers * saved
    tile = min(LOSS_TILE[0], tokens) * min(LOSS_TILE[1], shape.vocab) * 4
    parts = {
        "weights": shape.params * WEIGHT + (shape.linear_params + shape.vocab * shape.hidden) * CAST,
        "gradients": shape.params * GRADIENT, "optimizer": shape.params * ADAM, "activations": kept,
        "logits": tokens * shape.hidden * LOSS_HIDDEN + tile, "workspace": SLACK,
    }  # fmt: skip
    return {name: size / GIB for name, size in parts.items()}


def flops_per_token(shape: Shape, length: int) -> float:
    """6 for each weight of a matrix product, the output head among them, and causal attention over half the row."""
    products = shape.linear_params + shape.vocab * shape.hidden
    return 6 * (products + length * shape.heads * shape.head_dim * shape.layers)


def step_seconds(
    shape: Shape, gpu: GPUSpec, length: int, micro_batch: int, times: int, checkpointing: bool
) -> float | None:
    """One optimizer step of `times` micro-batches; None where the GPU's speed is not known."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens, again = micro_batch * length, 4 / 3 if checkpointing else 1.0  # the forward pass is a third
    saved = SAVED_HIDDEN * shape.hidden + SAVED_MLP * shape.intermediate
    moved = tokens * (shape.layers * saved + LOGIT * shape.vocab) * MOVED * again
    moved += shape.params * (WEIGHT + CAST + 2 * GRADIENT)  # cast for the products, gradients added up
    computing = tokens * flops_per_token(shape, length) * again / (ARITHMETIC * gpu.tflops * 1e12)
    bandwidth = BANDWIDTH * gpu.bandwidth * 1e9
    seconds = max(computing + moved / bandwidth, LAUNCH * (again * shape.layers + OTHERS))
    return times * seconds + shape.params * UPDATE / bandwidth


def describe(shape: Shape, made: Sequence[Pretraining]) -> str:
    """The model in a line, then a row for each GPU."""

    def money(one: Pretraining) -> str:
        prices = (("¥", one.gpu.yuan), ("$", one.gpu.dollars))
        known = [f"{sign}{price * one.hours:.2f}" for sign, price in prices if price and one.hours]
        return " / ".join(known) or (tr("free") if 0 in (one.gpu.yuan, one.gpu.dollars) else tr("unknown"))

    rows = [
        {
            tr("GPU"): one.gpu.name, tr("rows at a time"): one.per_device_train_batch_size,
            tr("recompute"): tr("yes") if one.gradient_checkpointing else tr("no"),
            tr("peak GiB"): f"{one.peak_gib:.1f}", tr("fits"): tr("yes") if one.fits else tr("no"),
            tr("tokens/s"): f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else tr("unknown"),
            tr("time"): display.clock(one.hours * 3600) if one.hours else tr("unknown"), tr("cost"): money(one),
        }
        for one in made
    ]  # fmt: skip
    head = tr(
        "{parameters} million parameters, {tokens} million tokens: {ratio} tokens per parameter (20 are usual)",
        parameters=f"{shape.params / 1e6:,.1f}", tokens=f"{made[0].tokens / 1e6:,.1f}",
        ratio=f"{made[0].tokens / shape.params:.2g}",
    )  # fmt: skip
    return f"{head}\n{display.aligned(rows)}"
