"""A training step with fewer passes over memory: LoRA's sums folded into its matrix products, and fused kernels.

The numbers are those of PEFT's own layers (a test compares outputs and gradients). What makes it faster:
- `y = x W + s (x A) B` is written in place by the second product; PEFT copies, scales and adds whole outputs,
- the activation of an MLP is recomputed in the backward pass instead of kept,
- a recomputed layer leaves out its last product, whose result nobody reads.
Not here: which of it a machine can do (hardware, profiles).
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Layers that end with `residual + mlp(...)`: there the last product of a recomputed layer is not needed.
KNOWN_MLPS = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")  # exactly down(silu(gate(x)) * up(x))
ENDS_WITH_MLP = ("Qwen2DecoderLayer", "Qwen3DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer")


def lighten(model: nn.Module, fused: bool) -> int:
    """Give every LoRA layer and MLP that allows it the lean forward; how many layers got one."""
    from peft.tuners.lora import LoraLayer

    if fused:
        _use_liger(model)
    layers: list[Any] = [part for part in model.modules() if isinstance(part, LoraLayer) and _is_plain(part)]
    for layer in layers:
        if hasattr(layer, "stock_forward"):  # this cell was run before
            continue
        layer.stock_forward = layer.forward
        layer.forward = types.MethodType(_linear_forward, layer)
    _lighten_mlps(model, layers, fused)
    return len(layers)


def _use_liger(model: nn.Module) -> None:
    """Liger's norms and rotations; the loss is TRL's own, which builds no table of logits either."""
    from transformers.integrations.liger import apply_liger_kernel

    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it tells of kernels for other makers' cards
    apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def _is_plain(layer: Any) -> bool:
    """One adapter over a linear layer, and no variant of LoRA: what the arithmetic below covers."""
    base = layer.get_base_layer()
    names = list(getattr(layer, "lora_A", {}))
    if len(names) != 1 or not _is_known(base) or getattr(layer, "fan_in_fan_out", False):
        return False
    [name] = names
    return (
        isinstance(layer.lora_dropout[name], nn.Identity | nn.Dropout)
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        and (base.bias is None or not base.bias.requires_grad)
    )


def _is_known(base: nn.Module) -> bool:
    """A plain linear layer or bitsandbytes' 4-bit one, frozen; other quantised ones look like the first but are not."""
    kind = type(base)
    four_bit = kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes")
    return (kind is nn.Linear or four_bit) and not base.weight.requires_grad


def _lighten_mlps(model: nn.Module, layers: list[Any], fused: bool) -> None:
    lean = set(map(id, layers))
    for block in model.modules():
        mlp: Any = getattr(block, "mlp", None)
        if id(getattr(mlp, "down_proj", None)) not in lean or hasattr(mlp, "stock_forward"):
            continue
        if type(mlp).__name__ in KNOWN_MLPS and mlp.config.hidden_act in ("silu", "swish"):
            mlp.skips_last = type(block).__name__ in ENDS_WITH_MLP
            mlp.fused = fused
            mlp.stock_forward = mlp.forward
            mlp.forward = types.MethodType(_mlp_forward, mlp)


def _in_use(layer: Any) -> bool:
    """Whether its one adapter is to be added right now; everything else goes PEFT's way."""
    names = list(getattr(layer, "lora_A", ()))
    return layer.training and len(names) == 1 and layer.active_adapters == names and not (
        layer.disable_adapters or layer.merged
    )  # fmt: skip


def _linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _in_use(self) or args or kwargs:
        return self.stock_forward(x, *args, **kwargs)
    return _LoraLinear.apply(x, *_weights(self), _dtype(self, x))


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if not _in_use(self.down_proj):
        return self.stock_forward(x)
    gate, up, skips = self.gate_proj(x), self.up_proj(x), self.skips_last and not self._forward_hooks
    return _LoraDown.apply(gate, up, *_weights(self.down_proj), _dtype(self.down_proj, x), self.fused, skips)


def _weights(layer: Any) -> tuple[Any, ...]:
    """The frozen weight and bias, A, B, the scale and the dropout of a LoRA layer."""
    [name] = layer.lora_A
    base, dropout = layer.get_base_layer(), getattr(layer.lora_dropout[name], "p", 0.0)
    return base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], dropout


def _dtype(layer: Any, x: Tensor) -> torch.dtype:
    """The type the products are computed in: autocast's, else the quantised layer's, else the input's."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return getattr(layer.get_base_layer(), "compute_dtype", None) or x.dtype


def _dense(weight: Any, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix (out, in): quantised ones are unpacked for the moment they are needed."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data.view(-1, 1), state).to(dtype)


def _recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as gradient checkpointing lets it."""
    return torch._C._current_graph_task_id() != -1


def _narrow(x: Tensor, a: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    """x A^T, x thinned out if there is dropout; and which numbers stayed, a byte each."""
    if not dropout:
        return x @ a.to(x.dtype).t(), None
    thinned, stayed = torch.native_dropout(x, dropout, True)
    return thinned @ a.to(x.dtype).t(), stayed


def _product(x: Tensor, low: Tensor, weight: Any, bias: Tensor | None, b: Tensor, scale: float) -> Tensor:
    """x W^T + bias + scale (x A^T) B^T, the last sum made by the product itself; `low` is x A^T."""
    dense = _dense(weight, x.dtype).t()
    out = x @ dense if bias is None else torch.addmm(bias.to(x.dtype), x, dense)
    return out.addmm_(low, b.to(x.dtype).t(), alpha=scale)


def _adapter_gradients(
    ctx: Any, grad: Tensor, x: Tensor, low: Tensor, stayed: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of A, B and of x A^T in `_product`."""
    low_grad = grad @ b.to(grad.dtype)
    grad_b = (grad.t() @ low).to(b.dtype).mul_(ctx.scale)
    thinned = x if stayed is None else x * stayed
    return (low_grad.t() @ thinned).to(a.dtype).mul_(ctx.scale / (1 - ctx.dropout)), grad_b, low_grad


def _input_gradient(ctx: Any, grad: Tensor, low_grad: Tensor, stayed: Tensor | None, a: Tensor) -> Tensor:
    """The gradient of x in `_product`."""
    grad_x = grad @ _dense(ctx.weight, grad.dtype)
    if stayed is None:
        return grad_x.addmm_(low_grad, a.to(grad.dtype), alpha=ctx.scale)
    through = (low_grad @ a.to(grad.dtype)).mul_(stayed)
    return grad_x.add_(through, alpha=ctx.scale / (1 - ctx.dropout))


class _LoraLinear(torch.autograd.Function):
    """A linear layer with its adapter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, a: Tensor, b: Tensor, scale: float, dropout: float, dtype: Any
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        low, stayed = _narrow(flat, a, dropout)
        out = _product(flat, low, weight, bias, b, scale)
        ctx.save_for_backward(a, b, low, stayed, flat)
        ctx.weight, ctx.scale, ctx.dropout, ctx.kind, ctx.shape = weight, scale, dropout, x.dtype, x.shape
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, stayed, flat = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(flat.dtype)
        grad_a, grad_b, low_grad = _adapter_gradients(ctx, grad, flat, low, stayed, a, b)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(ctx, grad, low_grad, stayed, a).view(ctx.shape).to(ctx.kind)
        return grad_x, None, None, grad_a, grad_b, None, None, None


class _LoraDown(torch.autograd.Function):
    """silu(gate) * up, then a linear layer with its adapter; keeps gate and up, not what they make."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Any, bias: Any, a: Tensor, b: Tensor, scale: float, dropout: float,
        dtype: Any, fused: bool, skips_last: bool,
    ) -> Tensor:  # fmt: skip
        shape = gate.shape
        gate, up = (states.reshape(-1, shape[-1]).to(dtype) for states in (gate, up))
        middle = _silu_times(gate, up, fused)
        low, stayed = _narrow(middle, a, dropout)
        ctx.save_for_backward(a, b, low, stayed, gate, up)
        ctx.weight, ctx.scale, ctx.dropout, ctx.fused, ctx.shape = weight, scale, dropout, fused, shape
        if skips_last and _recomputing():  # not a number, so that whoever reads it notices
            return gate.new_full((*shape[:-1], b.shape[0]), float("nan"))
        return _product(middle, low, weight, bias, b, scale).view(*shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, stayed, gate, up = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(gate.dtype)
        middle = _silu_times(gate, up, ctx.fused)
        grad_a, grad_b, low_grad = _adapter_gradients(ctx, grad, middle, low, stayed, a, b)
        del middle  # as wide as its gradient, which comes next
        grads = _silu_gradients(gate, up, _input_gradient(ctx, grad, low_grad, stayed, a), ctx.fused)
        return *(one.view(ctx.shape) for one in grads), None, None, grad_a, grad_b, None, None, None, None, None


def _silu_times(gate: Tensor, up: Tensor, fused: bool) -> Tensor:
    if fused:
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)[2]
    return functional.silu(gate).mul_(up)


def _silu_gradients(gate: Tensor, up: Tensor, grad: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; Liger writes them over gate and up, which nobody needs any more."""
    if fused:
        from liger_kernel.ops.swiglu import swiglu_backward

        return swiglu_backward(gate, up, grad)
    grad_up = functional.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up
