"""Fused LoRA layers: the numbers of PEFT's own layers in fewer passes over memory.

- `y = x W + s (x A) B` is accumulated in place by the second matrix product; PEFT copies, scales and adds outputs.
- The activation of an MLP is recomputed in the backward pass instead of stored.
- With gradient checkpointing, a recomputed layer skips its last product, whose result nobody reads.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import Trainer

from nbutils import attention
from nbutils.training.weights import repair_precision

KNOWN_MLPS = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")  # exactly down(silu(gate(x)) * up(x))
# Layers that end with `residual + mlp(...)`: recomputing them does not need the last product.
ENDS_WITH_MLP = ("Qwen2DecoderLayer", "Qwen3DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer")


def patch_lora_kernels(trainer: Trainer, fused: bool) -> str:
    """Cast adapters to float32, collate numpy rows with boundaries, fuse LoRA layers; `fused` adds Liger's kernels."""
    model, rows = trainer.model, trainer.train_dataset
    assert isinstance(model, nn.Module)
    cast = repair_precision(model)
    trainer.data_collator = attention.with_boundaries(trainer.data_collator)
    trainer.train_dataset = rows.with_format("numpy")  # type: ignore[union-attr]  # four times as fast as lists
    layers = patch_model(model, fused)
    kernels = "Liger kernels" if fused else "torch kernels"
    return f"{cast} adapter weights cast to float32; {layers} fused LoRA layers, {kernels}"


def patch_model(model: nn.Module, fused: bool) -> int:
    """Give every plain LoRA layer, and every known MLP, its fused forward; how many LoRA layers have one."""
    if fused:
        from transformers.integrations.liger import apply_liger_kernel

        logging.getLogger("liger_kernel").setLevel(logging.ERROR)
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})  # TRL has its own loss
    layers: list[Any] = [part for part in model.modules() if isinstance(part, LoraLayer) and _is_plain(part)]
    for layer in layers:
        if not hasattr(layer, "stock_forward"):  # else this cell ran before
            layer.stock_forward = layer.forward
            layer.forward = types.MethodType(_linear_forward, layer)
    _patch_mlps(model, {id(layer) for layer in layers}, fused)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """One plain adapter over a frozen nn.Linear or bitsandbytes 4-bit layer: what the arithmetic below covers."""
    base, names = layer.get_base_layer(), list(getattr(layer, "lora_A", {}))
    kind = type(base)
    four_bit = kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes")
    if len(names) != 1 or not (kind is nn.Linear or four_bit) or getattr(layer, "fan_in_fan_out", False):
        return False
    [name] = names
    return (
        not base.weight.requires_grad
        and isinstance(layer.lora_dropout[name], nn.Identity | nn.Dropout)
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        and (base.bias is None or not base.bias.requires_grad)
    )


def _patch_mlps(model: nn.Module, patched: set[int], fused: bool) -> None:
    for block in model.modules():
        mlp: Any = getattr(block, "mlp", None)
        if id(getattr(mlp, "down_proj", None)) not in patched or hasattr(mlp, "stock_forward"):
            continue
        if type(mlp).__name__ in KNOWN_MLPS and mlp.config.hidden_act in ("silu", "swish"):
            mlp.skips_last = type(block).__name__ in ENDS_WITH_MLP
            mlp.fused = fused
            mlp.stock_forward = mlp.forward
            mlp.forward = types.MethodType(_mlp_forward, mlp)


def _is_active(layer: Any) -> bool:
    """Whether its one adapter is to be added now; everything else is PEFT's forward."""
    names = list(getattr(layer, "lora_A", ()))
    one = layer.training and len(names) == 1 and layer.active_adapters == names
    return one and not (layer.disable_adapters or layer.merged)


def _linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_active(self) or args or kwargs:
        return self.stock_forward(x, *args, **kwargs)
    return _LoraLinear.apply(x, *_weights(self), _dtype(self, x))


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if not _is_active(self.down_proj):
        return self.stock_forward(x)
    gate, up, skips = self.gate_proj(x), self.up_proj(x), self.skips_last and not self._forward_hooks
    return _LoraDown.apply(gate, up, *_weights(self.down_proj), _dtype(self.down_proj, x), self.fused, skips)


def _weights(layer: Any) -> tuple[Any, ...]:
    """Frozen weight and bias, A, B, scale and dropout of a LoRA layer."""
    [name] = layer.lora_A
    base, dropout = layer.get_base_layer(), getattr(layer.lora_dropout[name], "p", 0.0)
    return base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], dropout


def _dtype(layer: Any, x: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, else the quantized layer's, else the input's."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return getattr(layer.get_base_layer(), "compute_dtype", None) or x.dtype


def _dense(weight: Any, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix (out, in), dequantized for the moment it is needed."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data.view(-1, 1), state).to(dtype)


def _recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as with gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _low_rank(x: Tensor, a: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    """x A^T after dropout, and the dropout mask."""
    if not dropout:
        return x @ a.to(x.dtype).t(), None
    dropped, mask = torch.native_dropout(x, dropout, True)
    return dropped @ a.to(x.dtype).t(), mask


def _product(x: Tensor, low: Tensor, weight: Any, bias: Tensor | None, b: Tensor, scale: float) -> Tensor:
    """x W^T + bias + scale (x A^T) B^T, the last sum made by the product itself; `low` is x A^T."""
    dense = _dense(weight, x.dtype).t()
    out = x @ dense if bias is None else torch.addmm(bias.to(x.dtype), x, dense)
    return out.addmm_(low, b.to(x.dtype).t(), alpha=scale)


def _adapter_gradients(
    ctx: Any, grad: Tensor, x: Tensor, low: Tensor, mask: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of A, B and x A^T in `_product`."""
    low_grad = grad @ b.to(grad.dtype)
    grad_b = (grad.t() @ low).to(b.dtype).mul_(ctx.scale)
    dropped = x if mask is None else x * mask
    return (low_grad.t() @ dropped).to(a.dtype).mul_(ctx.scale / (1 - ctx.dropout)), grad_b, low_grad


def _input_gradient(ctx: Any, grad: Tensor, low_grad: Tensor, mask: Tensor | None, a: Tensor) -> Tensor:
    """The gradient of x in `_product`."""
    grad_x = grad @ _dense(ctx.weight, grad.dtype)
    if mask is None:
        return grad_x.addmm_(low_grad, a.to(grad.dtype), alpha=ctx.scale)
    through = (low_grad @ a.to(grad.dtype)).mul_(mask)
    return grad_x.add_(through, alpha=ctx.scale / (1 - ctx.dropout))


class _LoraLinear(torch.autograd.Function):
    """A linear layer with its adapter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, a: Tensor, b: Tensor, scale: float, dropout: float, dtype: Any
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        low, mask = _low_rank(flat, a, dropout)
        out = _product(flat, low, weight, bias, b, scale)
        ctx.save_for_backward(a, b, low, mask, flat)
        ctx.weight, ctx.scale, ctx.dropout, ctx.dtype, ctx.shape = weight, scale, dropout, x.dtype, x.shape
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, mask, flat = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(flat.dtype)
        grad_a, grad_b, low_grad = _adapter_gradients(ctx, grad, flat, low, mask, a, b)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(ctx, grad, low_grad, mask, a).view(ctx.shape).to(ctx.dtype)
        return grad_x, None, None, grad_a, grad_b, None, None, None


class _LoraDown(torch.autograd.Function):
    """silu(gate) * up, then a linear layer with its adapter; stores gate and up, not their product."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Any, bias: Any, a: Tensor, b: Tensor, scale: float, dropout: float,
        dtype: Any, fused: bool, skips_last: bool,
    ) -> Tensor:  # fmt: skip
        shape = gate.shape
        gate, up = (states.reshape(-1, shape[-1]).to(dtype) for states in (gate, up))
        hidden = _swiglu(gate, up, fused)
        low, mask = _low_rank(hidden, a, dropout)
        ctx.save_for_backward(a, b, low, mask, gate, up)
        ctx.weight, ctx.scale, ctx.dropout, ctx.fused, ctx.shape = weight, scale, dropout, fused, shape
        if skips_last and _recomputing():  # NaN, so that whoever reads it notices
            return gate.new_full((*shape[:-1], b.shape[0]), float("nan"))
        return _product(hidden, low, weight, bias, b, scale).view(*shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, mask, gate, up = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(gate.dtype)
        hidden = _swiglu(gate, up, ctx.fused)
        grad_a, grad_b, low_grad = _adapter_gradients(ctx, grad, hidden, low, mask, a, b)
        del hidden  # as large as its gradient, which comes next
        grads = _swiglu_gradients(gate, up, _input_gradient(ctx, grad, low_grad, mask, a), ctx.fused)
        return *(one.view(ctx.shape) for one in grads), None, None, grad_a, grad_b, None, None, None, None, None


def _swiglu(gate: Tensor, up: Tensor, fused: bool) -> Tensor:
    if fused:
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)[2]
    return functional.silu(gate).mul_(up)


def _swiglu_gradients(gate: Tensor, up: Tensor, grad: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; Liger writes them over gate and up, which nobody needs any more."""
    if fused:
        from liger_kernel.ops.swiglu import swiglu_backward

        return swiglu_backward(gate, up, grad)
    grad_up = functional.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up
