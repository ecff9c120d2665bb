"""The forecast of a pre-training from scratch: every weight is trained in float32, matrix products are in 16 bits.

What a layer keeps for its backward pass was counted in torch (Qwen2, autocast). Speed adds three terms: matrix products
at a share of the published TFLOP/s, other work at a share of the published bandwidth, and a floor, the time Python
needs to start the kernels of a micro-batch, which a small model on a fast GPU waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from nbutils import display, distributed
from nbutils.files import GIB
from nbutils.language import tr
from nbutils.models import Shape
from nbutils.plan.forecast import Estimate, fastest_fitting
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import GRADIENT, SLACK, limit_gib, loss_bytes
from nbutils.plan.speed import ARITHMETIC, BANDWIDTH

WEIGHT = 4  # bytes of a parameter
CAST = 2  # its copy in 16 bits
ADAM = 8
SAVED_HIDDEN = 32  # bytes for each of tokens x width that one layer keeps
SAVED_MLP = 8  # and for each of tokens x the MLP's width
MOVED = 13  # times what a layer keeps is written or read in a step; this and the next two were fitted on an H200
UPDATE = 36  # bytes of a parameter that clipping its gradient and AdamW read and write
LOGIT = 2  # bytes of the score of one word
LAUNCH = 0.003  # seconds Python needs to start a layer's kernels, forward and backward
OTHERS = 2  # what is not a layer, counted in layers


@dataclass(frozen=True, kw_only=True)
class Pretraining(Estimate):
    """How a GPU trains a step; the hours are without validations and checkpoints."""

    per_device_train_batch_size: int
    tokens: int  # of the whole training


def pretraining(shape: Shape, gpu: GPUSpec, length: int, batch: int, steps: int) -> Pretraining:
    """The fastest micro-batch that fits, of those that divide the batch; without one the smallest."""
    options = []
    for size in distributed.divisors(batch):
        seconds = step_seconds(shape, gpu, length, size, times=batch // size)
        rate = batch * length / seconds if seconds else None
        option = Pretraining(
            gpu=gpu,
            per_device_train_batch_size=size,
            tokens=steps * batch * length,
            parts=memory(shape, size * length),
            tokens_per_second=rate,
            hours=steps * seconds / 3600 if seconds else None,
        )
        options.append(option)

    def speed(option: Pretraining) -> float:
        return option.tokens_per_second or 0.0

    return fastest_fitting(options, limit_gib(gpu), peak=attrgetter("peak_gib"), speed=speed)


def memory(shape: Shape, tokens: int) -> dict[str, float]:
    """GiB by part, for micro-batches of so many tokens, without gradient checkpointing."""
    sizes = {
        "weights": shape.params * WEIGHT + _product_weights(shape) * CAST,
        "gradients": shape.params * GRADIENT,
        "optimizer": shape.params * ADAM,
        "activations": tokens * shape.layers * _saved(shape),
        "logits": loss_bytes(shape, tokens, WEIGHT),
        "workspace": SLACK,
    }
    return {part: size / GIB for part, size in sizes.items()}


def _saved(shape: Shape) -> int:
    """Bytes for each token that one layer keeps for its backward pass."""
    return SAVED_HIDDEN * shape.hidden + SAVED_MLP * shape.intermediate


def _product_weights(shape: Shape) -> int:
    """Weights of matrix products, the output head among them."""
    return shape.linear_params + shape.vocab * shape.hidden


def flops_per_token(shape: Shape, length: int) -> float:
    """6 for each weight of a matrix product, and causal attention over half the row."""
    attention = length * shape.heads * shape.head_dim * shape.layers
    return 6 * (_product_weights(shape) + attention)


def step_seconds(shape: Shape, gpu: GPUSpec, length: int, micro_batch: int, times: int) -> float | None:
    """One optimizer step of `times` micro-batches; None where the GPU's speed is not known."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens = micro_batch * length
    arithmetic = ARITHMETIC * gpu.tflops * 1e12
    bandwidth = BANDWIDTH * gpu.bandwidth * 1e9
    written = shape.layers * _saved(shape)
    written += LOGIT * shape.vocab
    moved = tokens * written * MOVED
    moved += shape.params * (WEIGHT + CAST + 2 * GRADIENT)  # cast for the products, gradients added up
    flops = tokens * flops_per_token(shape, length)
    seconds = flops / arithmetic + moved / bandwidth
    launching = LAUNCH * (shape.layers + OTHERS)
    seconds = times * max(seconds, launching)
    updating = shape.params * UPDATE / bandwidth
    return seconds + updating


def describe(shape: Shape, forecasts: Sequence[Pretraining]) -> str:
    """The model in a line, then a row for each GPU."""
    tokens = forecasts[0].tokens
    head = tr(
        "{parameters:,.1f} million parameters, {tokens:,.1f} million tokens: {ratio:.2g} tokens per parameter (20 are "
        "usual)",
        parameters=shape.params / 1e6,
        tokens=tokens / 1e6,
        ratio=tokens / shape.params,
    )
    rows: list[dict[str, Any]] = []
    for forecast in forecasts:
        row = {"GPU": forecast.gpu.name, "rows": forecast.per_device_train_batch_size}
        rows.append(row | forecast.columns())
    return f"{head}\n{display.aligned(rows)}"
