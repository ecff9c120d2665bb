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
from nbutils.plan.forecast import Setting, divisors, fastest_fitting
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import LOSS_HIDDEN, SLACK, TILE_TOKENS, TILE_WORDS, limit_gib
from nbutils.plan.speed import ARITHMETIC, BANDWIDTH

WEIGHT = 4  # bytes of a parameter
CAST = 2  # its copy in 16 bits
GRADIENT = 4
ADAM = 8
SAVED_HIDDEN = 32  # bytes for each of tokens x width that one layer keeps
SAVED_MLP = 8  # and for each of tokens x the MLP's width
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
    settings = []
    for size, recomputes in product(divisors(batch), (False, True)):
        seconds = step_seconds(shape, gpu, length, size, times=batch // size, checkpointing=recomputes)
        rate = batch * length / seconds if seconds else None
        option = Pretraining(
            gpu=gpu,
            per_device_train_batch_size=size,
            gradient_checkpointing=recomputes,
            tokens=steps * batch * length,
            parts=memory(shape, size * length, recomputes),
            tokens_per_second=rate,
        )
        settings.append(Setting(option, option.peak_gib, rate or 0.0))
    best: Pretraining = fastest_fitting(settings, limit_gib(gpu))
    return best


def memory(shape: Shape, tokens: int, checkpointing: bool) -> dict[str, float]:
    """GiB by part, for micro-batches of so many tokens."""
    hidden = tokens * shape.hidden
    saved = SAVED_HIDDEN * hidden + SAVED_MLP * tokens * shape.intermediate  # of a layer
    activations = shape.layers * saved
    if checkpointing:
        activations = shape.layers * LAYER_INPUT * hidden + saved
    tile = min(TILE_TOKENS, tokens) * min(TILE_WORDS, shape.vocab)
    sizes = {
        "weights": shape.params * WEIGHT + _product_weights(shape) * CAST,
        "gradients": shape.params * GRADIENT,
        "optimizer": shape.params * ADAM,
        "activations": activations,
        "logits": hidden * LOSS_HIDDEN + tile * WEIGHT,
        "workspace": SLACK,
    }
    return {part: size / GIB for part, size in sizes.items()}


def _product_weights(shape: Shape) -> int:
    """Weights of matrix products, the output head among them."""
    return shape.linear_params + shape.vocab * shape.hidden


def flops_per_token(shape: Shape, length: int) -> float:
    """6 for each weight of a matrix product, and causal attention over half the row."""
    attention = length * shape.heads * shape.head_dim * shape.layers
    return 6 * (_product_weights(shape) + attention)


def step_seconds(
    shape: Shape, gpu: GPUSpec, length: int, micro_batch: int, times: int, checkpointing: bool
) -> float | None:
    """One optimizer step of `times` micro-batches; None where the GPU's speed is not known."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens = micro_batch * length
    again = 4 / 3 if checkpointing else 1.0  # the forward pass is a third
    arithmetic = ARITHMETIC * gpu.tflops * 1e12
    bandwidth = BANDWIDTH * gpu.bandwidth * 1e9
    saved = SAVED_HIDDEN * shape.hidden + SAVED_MLP * shape.intermediate
    written = shape.layers * saved + LOGIT * shape.vocab
    moved = tokens * written * MOVED * again
    moved += shape.params * (WEIGHT + CAST + 2 * GRADIENT)  # cast for the products, gradients added up
    flops = tokens * flops_per_token(shape, length) * again
    seconds = flops / arithmetic + moved / bandwidth
    launching = LAUNCH * (again * shape.layers + OTHERS)
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
    rows = []
    for forecast in forecasts:
        rate = forecast.tokens_per_second
        row = {
            "GPU": forecast.gpu.name,
            "rows": forecast.per_device_train_batch_size,
            "peak GiB": f"{forecast.peak_gib:.1f}",
            "fits": tr("yes") if forecast.fits else tr("no"),
            "tokens/s": f"{rate:,.0f}" if rate else tr("unknown"),
            "time": display.clock(forecast.hours * 3600) if forecast.hours else tr("unknown"),
            "cost": str(forecast.gpu.price.times(forecast.hours)),
        }
        rows.append(row)
    return f"{head}\n{display.aligned(rows)}"
