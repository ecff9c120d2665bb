"""The model of a training: its weights, attention for packed rows, and fused LoRA layers.

Fused layers compute the numbers of PEFT's own in fewer passes over memory:
- `y = x W + s (x A) B` is accumulated in place by the second matrix product; PEFT copies, scales and adds outputs.
- The activation of an MLP is recomputed in the backward pass instead of stored.
- With gradient checkpointing, a recomputed layer skips its last product, whose result nobody reads.
"""

from __future__ import annotations

import inspect
import logging
import types
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nbutils import distributed, hardware, merging
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.training import sharding

VARLEN = "varlen"  # attention for packed rows without a mask
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
KNOWN_MLPS = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")  # exactly down(silu(gate(x)) * up(x))
# Layers that end with `residual + mlp(...)`: recomputing them does not need the last product.
ENDS_WITH_MLP = ("Qwen2DecoderLayer", "Qwen3DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer")
_signature = cache(inspect.signature)


def require_unquantized(model: str) -> None:
    """Stop at a base model that is quantized already: it would be quantized twice."""
    if merging.is_quantized(PreTrainedConfig.get_config_dict(model)[0]):
        raise CourseError(
            tr("The config.json of {model} says that it is already quantized.", model=model),
            todo=tr("Set MODEL to the unquantized one (without -AWQ, -GPTQ, -FP8, -bnb-4bit in its name)."),
        )


def repair_precision(model: nn.Module) -> int:
    """Cast trainable weights to float32 and count them: TRL casts QLoRA adapters to bfloat16 unasked."""
    low = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype != torch.float32]
    for weight in low:
        weight.data = weight.data.to(torch.float32)
    return len(low)


def load_checkpoint(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint: the adapter, or all where all are trained."""
    if (adapter := checkpoint / "adapter_model.safetensors").exists():
        sharding.load_weights(model, sharding.adapter_weights(model, adapter))
    else:
        load_model(model, checkpoint / "model.safetensors", strict=False)  # tied weights are stored once


def weight_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights of the base model have which dtype; quantized ones as `nf4, double`."""
    kinds: Counter[str] = Counter()
    for weight in (one for one in model.parameters() if not one.requires_grad):
        state = getattr(weight, "quant_state", None)
        quantized = f"{state.quant_type}{', double' if state.nested else ''}" if state else ""
        kinds[quantized or str(weight.dtype).removeprefix("torch.")] += 1
    return dict(kinds)


def weight_checksums(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """By name: whether a weight is trainable, and its checksum; of a sharded weight, that of this process's shard."""
    sharding.reshard(model)
    found = {}
    for name, weight in model.named_parameters():
        content: Any = sharding.local_shard(weight).detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        found[name] = weight.requires_grad, zlib.crc32(content)
    return found


def attention(name: str) -> str:
    """The name for `attn_implementation`; `varlen`, torch's kernel for rows of different length, is registered."""
    # TRL warns that rows may mix without FlashAttention; with the implementations used here they do not (tests compare)
    logging.getLogger("trl.trainer.sft_trainer").setLevel(logging.ERROR)
    if name == VARLEN:
        AttentionInterface.register(VARLEN, _attend)
        AttentionMaskInterface.register(VARLEN, _mask)
    return name


def boundaries(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where the examples of flattened rows begin and end, and the longest one."""
    starts = position_ids == 0
    starts[:, 0] = True
    first = torch.nonzero(starts.flatten()).flatten()
    edges = torch.cat([first, first.new_tensor([starts.numel()])]).to(torch.int32)
    return edges, int(edges.diff().max())


def with_boundaries(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A collator that adds the boundaries on the CPU: computing them on the GPU would stall it in each layer."""

    def collate_with_boundaries(rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        if "position_ids" in batch and BOUNDARIES[0] not in batch:
            edges, longest = boundaries(batch["position_ids"])
            batch |= dict(zip(BOUNDARIES, (edges, edges, longest, longest), strict=True))
        return batch

    return collate_with_boundaries


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, attention_mask: Tensor | None = None, **rest: Any
) -> Tensor | None:
    """No mask for whole rows without padding, which is what packed rows are."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **rest)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the shapes of transformers: heads before tokens in the input, after them in the output."""
    from torch.nn.attention.varlen import varlen_attn  # older versions of torch have none

    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    unsupported = {"dropout": dropout or None, "s_aux": kwargs.get("s_aux"), "softcap": kwargs.get("softcap")}
    if parts := [name for name, value in unsupported.items() if value is not None]:
        raise CourseError(
            tr(
                "This model's attention has {parts}, which torch's kernel for packed rows does not support.",
                parts=", ".join(parts),
            ),
            allowed=tr("attention without dropout, sinks (s_aux) and softcap, as in Qwen, GLM and Llama"),
            todo=tr("Set from_pretrained.attn_implementation to sdpa in a copy of the profile."),
        )
    rows, heads, length, size = query.shape
    if kwargs.get(BOUNDARIES[0]) is not None:  # from the collator
        edges, longest = kwargs[BOUNDARIES[0]], int(kwargs[BOUNDARIES[2]])
    elif (positions := kwargs.get("position_ids")) is not None:
        edges, longest = boundaries(positions.expand(rows, length))
    else:  # one example per row
        edges, longest = torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length, length
    q, k, v = (states.transpose(1, 2).reshape(rows * length, -1, size) for states in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # 0: no token sees a later one
    more: dict[str, Any] = {"scale": scaling, "window_size": window}
    if heads != key.shape[1] and "enable_gqa" in _signature(varlen_attn).parameters:  # torch 2.11 and later need it
        more["enable_gqa"] = True
    out: Any = varlen_attn(q, k, v, edges, edges, longest, longest, **more)
    return out.view(rows, length, heads, size), None


def patch_lora_kernels(trainer: Any) -> str:
    """Cast adapters to float32, collate numpy rows with boundaries, fuse LoRA layers and add Liger's kernels."""
    fused = trainer.args.use_liger_kernel
    trainer.args.use_liger_kernel = False  # added here: the trainer would put them over the fused layers
    sharded = distributed.strategy() == "zero3"  # it gathers a weight when its own layer is called, and not before
    cast, layers = (0, 0) if sharded else (repair_precision(trainer.model), patch_model(trainer.model, fused))
    trainer.data_collator = with_boundaries(trainer.data_collator)
    trainer.train_dataset = trainer.train_dataset.with_format("numpy")  # four times as fast as lists
    kernels = tr("Liger kernels") if fused and not sharded else tr("torch kernels")
    done = {"cast": cast, "layers": layers, "kernels": kernels}
    return tr("{cast} adapter weights cast to float32; {layers} fused LoRA layers, {kernels}", **done)


def patch_model(model: nn.Module, fused: bool) -> int:
    """Give every plain LoRA layer, and every known MLP, its fused forward; how many LoRA layers have one."""
    hardware.keep_4bit_layout(model)
    if fused:
        from transformers.integrations.liger import apply_liger_kernel

        logging.getLogger("liger_kernel").setLevel(logging.ERROR)
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})  # TRL has its own loss
    layers: list[Any] = [part for part in model.modules() if isinstance(part, LoraLayer) and _is_plain(part)]
    for layer in layers:
        if not hasattr(layer, "stock_forward"):  # else this cell ran before
            layer.stock_forward = layer.forward
            layer.forward = types.MethodType(_linear_forward, layer)
    patched = {id(layer) for layer in layers}
    for block in model.modules():
        mlp: Any = getattr(block, "mlp", None)
        if id(getattr(mlp, "down_proj", None)) not in patched or hasattr(mlp, "stock_forward"):
            continue
        if type(mlp).__name__ in KNOWN_MLPS and mlp.config.hidden_act in ("silu", "swish"):
            mlp.skips_last, mlp.fused = type(block).__name__ in ENDS_WITH_MLP, fused
            mlp.stock_forward = mlp.forward
            mlp.forward = types.MethodType(_mlp_forward, mlp)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """One plain adapter over a frozen nn.Linear or bitsandbytes 4-bit layer: what the arithmetic below covers."""
    base, names = layer.get_base_layer(), list(getattr(layer, "lora_A", {}))
    four_bit = type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes")
    if len(names) != 1 or not (type(base) is nn.Linear or four_bit):
        return False
    [name] = names
    return (
        not base.weight.requires_grad
        and isinstance(layer.lora_dropout[name], nn.Identity | nn.Dropout)
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        and (base.bias is None or not base.bias.requires_grad)
    )


def _is_active(layer: Any) -> bool:
    """Whether its one adapter is to be added now; everything else is PEFT's forward."""
    names = list(getattr(layer, "lora_A", ()))
    one = layer.training and len(names) == 1 and layer.active_adapters == names
    return one and not (layer.disable_adapters or layer.merged)


def _linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_active(self) or args or kwargs:
        return self.stock_forward(x, *args, **kwargs)
    return _Lora.apply(x, None, *_operands(self, x), False, False)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if not _is_active(self.down_proj):
        return self.stock_forward(x)
    gate, up, skips = self.gate_proj(x), self.up_proj(x), self.skips_last and not self._forward_hooks
    return _Lora.apply(gate, up, *_operands(self.down_proj, x), self.fused, skips)


def _operands(layer: Any, x: Tensor) -> tuple[Any, ...]:
    """Frozen weight and bias, A, B, scale and dropout of a LoRA layer, and the dtype of its products."""
    [name], base, device = layer.lora_A, layer.get_base_layer(), x.device.type
    dtype = getattr(base, "compute_dtype", None) or x.dtype  # of a quantized layer, else of the input
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    a, b, dropout = layer.lora_A[name].weight, layer.lora_B[name].weight, getattr(layer.lora_dropout[name], "p", 0.0)
    state = getattr(base.weight, "quant_state", None) or getattr(base, "quant_state", None)  # FSDP leaves the second
    return (base.weight, state), base.bias, a, b, layer.scaling[name], dropout, dtype


def _dense(weight_and_state: tuple[Any, Any], dtype: torch.dtype) -> Tensor:
    """A weight as a matrix (out, in), dequantized for the moment it is needed."""
    weight, state = weight_and_state
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data.view(-1, 1), state).to(dtype)


def _product(x: Tensor, low: Tensor, weight: Any, bias: Tensor | None, b: Tensor, scale: float) -> Tensor:
    """x W^T + bias + scale (x A^T) B^T, the last sum made by the product itself; `low` is x A^T."""
    dense = _dense(weight, x.dtype).t()
    out = x @ dense if bias is None else torch.addmm(bias.to(x.dtype), x, dense)
    return out.addmm_(low, b.to(x.dtype).t(), alpha=scale)


class _Lora(torch.autograd.Function):
    """A linear layer with its adapter; given `up`, of silu(x) * up, which is computed again instead of stored."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, up: Any, weight: Any, bias: Any, a: Tensor, b: Tensor, scale: float, dropout: float,
        dtype: Any, fused: bool, skips_last: bool,
    ) -> Tensor:  # fmt: skip
        shape, ctx.dtype = x.shape, x.dtype
        x, up = (None if one is None else one.reshape(-1, shape[-1]).to(dtype) for one in (x, up))
        hidden = x if up is None else _swiglu(x, up, fused)
        dropped, mask = torch.native_dropout(hidden, dropout, True) if dropout else (hidden, None)
        low = dropped @ a.to(dtype).t()
        ctx.save_for_backward(a, b, low, mask, x, up)
        ctx.weight, ctx.scale, ctx.dropout, ctx.fused, ctx.shape = weight, scale, dropout, fused, shape
        recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass: gradient checkpointing
        if skips_last and recomputing:  # NaN, so that whoever reads it notices
            return x.new_full((*shape[:-1], b.shape[0]), float("nan"))
        out = _product(hidden, low, weight, bias, b, scale).view(*shape[:-1], -1)
        return out.to(ctx.dtype) if up is None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, mask, x, up = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(x.dtype)
        hidden = x if up is None else _swiglu(x, up, ctx.fused)
        low_grad, through_dropout = grad @ b.to(grad.dtype), ctx.scale / (1 - ctx.dropout)
        grad_b = (grad.t() @ low).to(b.dtype).mul_(ctx.scale)
        grad_a = (low_grad.t() @ (hidden if mask is None else hidden * mask)).to(a.dtype).mul_(through_dropout)
        del hidden  # as large as its gradient, which comes next
        grad_x = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _dense(ctx.weight, grad.dtype)
            if mask is None:
                grad_x.addmm_(low_grad, a.to(grad.dtype), alpha=ctx.scale)
            else:
                grad_x.add_((low_grad @ a.to(grad.dtype)).mul_(mask), alpha=through_dropout)
            if up is None:
                grad_x = grad_x.to(ctx.dtype)
            elif ctx.fused:  # written over x and up, which nobody needs any more
                from liger_kernel.ops.swiglu import swiglu_backward

                grad_x, grad_up = swiglu_backward(x, up, grad_x)
            else:
                grad_up = functional.silu(x).mul_(grad_x)
                grad_x = torch.ops.aten.silu_backward(grad_x.mul_(up), x)
        grads = (None if one is None else one.view(ctx.shape) for one in (grad_x, grad_up))
        return *grads, None, None, grad_a, grad_b, None, None, None, None, None


def _swiglu(gate: Tensor, up: Tensor, fused: bool) -> Tensor:
    if fused:
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)[2]
    return functional.silu(gate).mul_(up)
