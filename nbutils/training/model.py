"""The model of a training: its weights, attention for packed rows, and fused LoRA layers.

Fused layers compute the numbers of PEFT's own in fewer passes over memory:
- `y = x W + s (x A) B` is accumulated in place by the second matrix product; PEFT copies, scales and adds outputs.
- The activation of an MLP is recomputed in the backward pass instead of stored.
- With gradient checkpointing, a recomputed layer skips its last product, whose result nobody reads.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nbutils import distributed, hardware, merging
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.masking import describe
from nbutils.training import hybrid, sharding
from nbutils.training.hybrid import boundaries, packed_inputs, replace_forward

VARLEN = "varlen"  # attention for packed rows without a mask
KNOWN_MLPS = ("Qwen2MLP", "Qwen3MLP", "Qwen3_5MLP", "LlamaMLP", "MistralMLP")  # exactly down(silu(gate(x)) * up(x))
# Layers that end with `residual + mlp(...)`: recomputing them does not need the last product.
ENDS_WITH_MLP = (
    "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3_5DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer",
)  # fmt: skip
Checksums = dict[str, tuple[bool, int]]  # by name: whether a weight is trained, and its checksum
Batch = dict[str, Any]
Collator = Callable[..., Batch]
_signature = cache(inspect.signature)


def require_unquantized(model: str) -> None:
    """Stop at a base model that is quantized already: it would be quantized twice."""
    if merging.is_quantized(PreTrainedConfig.get_config_dict(model)[0]):
        raise CourseError(
            "The config.json of {model} says that it is already quantized.",
            todo="Set MODEL to the unquantized one (without -AWQ, -GPTQ, -FP8, -bnb-4bit in its name).",
            model=model,
        )


def require_own_weights(model: str) -> None:
    """Stop at weights of another model than config.json describes: what it lacks would begin as random numbers.

    transformers compares them as it loads; on the meta device no weight is read.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as problem:  # a model that only sees, half a file, sizes without sense: it raises anything
        reason = shorten(describe(problem), 300)
        raise CourseError(
            "transformers does not load {model} as a text model: {reason}",
            todo="Take a model of configs/models.yaml. If it is one of these, download or copy it again.",
            model=model,
            reason=reason,
        ) from problem
    built, report = loaded
    stacks = {_stack(name) for name in built.state_dict()} - {""}
    # beside its layers a checkpoint may have parts that this model does not use, to see for instance
    ignored = [name for name in report["unexpected_keys"] if _stack(name) in stacks and not name.endswith("inv_freq")]
    if report["mismatched_keys"]:
        name, stored, wanted = min(report["mismatched_keys"])
        seen = tr("{name} is stored as {stored}, not {wanted}", name=name, stored=[*stored], wanted=[*wanted])
    elif report["missing_keys"]:
        seen = tr("{name} is missing", name=min(report["missing_keys"]))
    elif ignored:
        seen = tr("{name} is stored, and has no place", name=min(ignored))
    else:
        return
    raise CourseError(
        "The safetensors files of {model} do not fit its config.json: {seen}.",
        todo="Download or copy that model again, config.json and weights together.",
        model=model,
        seen=seen,
    )


def _stack(name: str) -> str:
    """The stack of layers that a weight belongs to; empty for one outside."""
    before, layers, _ = name.partition(".layers.")
    return before + layers if layers else ""


def repair_precision(model: nn.Module) -> None:
    """Cast trainable weights to float32: TRL casts QLoRA adapters to bfloat16 unasked."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)


def load_checkpoint(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, which perhaps only the main process can see."""
    all_weights = checkpoint / "model.safetensors"  # of a pre-training
    if all_weights.exists():
        load_model(model, all_weights, strict=False)  # tied weights are stored once
        return
    weights = None
    if distributed.is_main():
        weights = sharding.adapter_weights(model, checkpoint)
    sharding.load_weights(model, distributed.broadcast(weights))


def weight_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights of the base model have which dtype; quantized ones as `nf4, double`."""
    kinds: Counter[str] = Counter()
    for weight in model.parameters():
        kind = str(weight.dtype).removeprefix("torch.")
        if state := getattr(weight, "quant_state", None):
            kind = f"{state.quant_type}, double" if state.nested else state.quant_type
        if not weight.requires_grad:
            kinds[kind] += 1
    return dict(kinds)


def weight_checksums(model: nn.Module) -> Checksums:
    """By name: whether a weight is trainable, and its checksum; of a sharded weight, that of this process's shard."""
    sharding.reshard(model)
    checksums = {}
    for name, weight in model.named_parameters():
        shard = sharding.local_shard(weight).detach().contiguous()
        content = shard.reshape(-1).view(torch.uint8).cpu().numpy()
        checksums[name] = (weight.requires_grad, zlib.crc32(content))
    return checksums


def attention(name: str) -> str:
    """The name for `attn_implementation`; `varlen`, torch's kernel for rows of different length, is registered."""
    # TRL warns that rows may mix without FlashAttention; with the implementations used here they do not (tests compare)
    logging.getLogger("trl.trainer.sft_trainer").setLevel(logging.ERROR)
    if name == VARLEN:
        AttentionInterface.register(VARLEN, _attend)
        AttentionMaskInterface.register(VARLEN, _mask)
    return name


def with_boundaries(collate: Collator) -> Collator:
    """A collator that adds the boundaries on the CPU: computing them on the GPU would stall it in each layer."""

    def collate_with_boundaries(rows: Any) -> Batch:
        batch = collate(rows)
        if "position_ids" in batch:
            batch |= packed_inputs(batch["position_ids"])
        return batch

    return collate_with_boundaries


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Tensor | None:
    """No mask for whole rows without padding, which is what packed rows are."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **rest)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the shapes of transformers: heads before tokens in the input, after them in the output."""
    from torch.nn.attention.varlen import varlen_attn  # older versions of torch have none

    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if dropout or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise CourseError(
            "This model's attention has dropout, sinks or softcap, which torch's kernel for packed rows has not.",
            todo="Set from_pretrained.attn_implementation to sdpa in a copy of the profile.",
        )
    rows, heads, length, size = query.shape
    edges = kwargs.get("cu_seq_lens_q")  # from the collator
    longest = kwargs.get("max_length_q", 0)
    if edges is None:
        edges, longest = boundaries(kwargs["position_ids"].expand(rows, length))
    window = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (window, 0)}  # 0: no token sees a later one
    if heads != key.shape[1] and "enable_gqa" in _signature(varlen_attn).parameters:  # some versions of torch need it
        options["enable_gqa"] = True
    # the tokens of all rows end to end, each with its heads
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out: Any = varlen_attn(
        query,
        key,
        value,
        edges,
        edges,
        longest,
        longest,
        **options,
    )
    return out.view(rows, length, heads, size), None


def patch_lora_kernels(trainer: Any) -> int:
    """Cast adapters to float32, collate numpy rows with boundaries, fuse LoRA layers, of which it gives the number."""
    fused = trainer.args.use_liger_kernel
    trainer.args.use_liger_kernel = False  # added here: the trainer would put them over the fused layers
    trainer.data_collator = with_boundaries(trainer.data_collator)
    trainer.train_dataset = trainer.train_dataset.with_format("numpy")  # four times as fast as lists
    if how := hybrid.adapt_layers(trainer.model):
        print(how)
    if distributed.strategy() == "zero3":  # it gathers a weight when its own layer is called, and not before
        return 0
    repair_precision(trainer.model)
    return patch_model(trainer.model, fused)


def patch_model(model: nn.Module, fused: bool) -> int:
    """Give every plain LoRA layer, and every known MLP, its fused forward; how many LoRA layers have one."""
    hardware.keep_4bit_layout(model)
    if fused:
        from transformers.integrations.liger import apply_liger_kernel

        logging.getLogger("liger_kernel").setLevel(logging.ERROR)
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})  # TRL has its own loss
    layers = [part for part in model.modules() if isinstance(part, LoraLayer) and _is_plain(part)]
    for layer in layers:
        replace_forward(layer, _linear_forward)
    for block in model.modules():
        mlp: Any = getattr(block, "mlp", None)
        is_known = type(mlp).__name__ in KNOWN_MLPS and mlp.config.hidden_act in ("silu", "swish")
        if is_known and hasattr(mlp.down_proj, "stock_forward"):
            mlp.fused = fused
            mlp.skips_last = type(block).__name__ in ENDS_WITH_MLP
            replace_forward(mlp, _mlp_forward)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """One plain adapter over a frozen nn.Linear or bitsandbytes 4-bit layer: what the arithmetic below covers."""
    base = layer.get_base_layer()
    kind = type(base)
    four_bit = kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes")
    if len(layer.lora_A) != 1 or not (kind is nn.Linear or four_bit):
        return False
    [name] = layer.lora_A
    return (
        not any(weight.requires_grad for weight in base.parameters())
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
    )


def _is_active(layer: Any) -> bool:
    """Whether its one adapter is to be added now; everything else is PEFT's forward."""
    names = list(getattr(layer, "lora_A", ()))
    is_alone = len(names) == 1 and layer.active_adapters == names
    return is_alone and layer.training and not layer.disable_adapters and not layer.merged


def _linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_active(self) or args or kwargs:
        return self.stock_forward(x, *args, **kwargs)
    layer = _Operands(self, x)
    return _FusedLora.apply(
        x,
        None,
        layer.a,
        layer.b,
        layer,
    )


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if not _is_active(self.down_proj):
        return self.stock_forward(x)
    layer = _Operands(self.down_proj, x)
    layer.fused = self.fused
    layer.skips_last = self.skips_last and not self._forward_hooks
    return _FusedLora.apply(
        self.gate_proj(x),
        self.up_proj(x),
        layer.a,
        layer.b,
        layer,
    )


class _Operands:
    """What a fused layer computes with, besides its input: its adapter and its frozen part."""

    def __init__(self, layer: Any, x: Tensor) -> None:
        [name] = layer.lora_A
        base = layer.get_base_layer()
        device = x.device.type
        self.a = layer.lora_A[name].weight
        self.b = layer.lora_B[name].weight
        self.scale = layer.scaling[name]
        self.dropout = getattr(layer.lora_dropout[name], "p", 0.0)
        self.weight = base.weight
        self.bias = base.bias
        self.quant_state = getattr(base.weight, "quant_state", None) or getattr(base, "quant_state", None)  # FSDP's
        self.dtype = getattr(base, "compute_dtype", None) or x.dtype  # of its products: a quantized layer has its own
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)
        self.fused = False  # the MLP's activation is Liger's kernel
        self.skips_last = False  # nobody reads its output where it is recomputed

    def dense(self) -> Tensor:
        """The weight as a matrix (out, in), dequantized for the moment it is needed."""
        weight = self.weight
        if self.quant_state is not None:
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(weight.data.view(-1, 1), self.quant_state)
        return weight.to(self.dtype)


def _flat(states: Tensor, dtype: torch.dtype) -> Tensor:
    """All tokens of all rows, one below the other."""
    return states.reshape(-1, states.shape[-1]).to(dtype)


def _product(x: Tensor, low: Tensor, b: Tensor, layer: _Operands) -> Tensor:
    """x W^T + bias + scale (x A^T) B^T, the last sum made by the product itself; `low` is x A^T."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    out = functional.linear(x, layer.dense(), bias)
    return out.addmm_(low, b.to(x.dtype).t(), alpha=layer.scale)


class _FusedLora(torch.autograd.Function):
    """A linear layer with its adapter; given `up`, of silu(x) * up, which is computed again instead of stored."""

    @staticmethod
    def forward(ctx: Any, x: Any, up: Any, a: Tensor, b: Tensor, layer: _Operands) -> Tensor:
        ctx.layer = layer
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        x = _flat(x, layer.dtype)
        hidden = x
        if up is not None:
            up = _flat(up, layer.dtype)
            hidden = _swiglu(x, up, layer.fused)
        dropped = hidden
        mask = None
        if layer.dropout:
            dropped, mask = torch.native_dropout(hidden, layer.dropout, True)
        low = dropped @ a.to(layer.dtype).t()
        ctx.save_for_backward(a, b, low, mask, x, up)
        out_shape = (*ctx.shape[:-1], b.shape[0])
        is_recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass: gradient checkpointing
        if layer.skips_last and is_recomputing:
            return x.new_full(out_shape, float("nan"))  # so that whoever reads it notices
        out = _product(hidden, low, b, layer).view(out_shape)
        return out.to(ctx.dtype) if up is None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, low, mask, x, up = ctx.saved_tensors
        layer = ctx.layer
        scale = layer.scale / (1 - layer.dropout)
        grad = _flat(grad, x.dtype)
        low_grad = grad @ b.to(x.dtype)
        hidden = x if up is None else _swiglu(x, up, layer.fused)
        if mask is not None:
            hidden = hidden * mask
        grad_a = low_grad.t() @ hidden
        grad_a = grad_a.to(a.dtype).mul_(scale)
        del hidden  # as large as its gradient, which comes next
        grad_b = grad.t() @ low
        grad_b = grad_b.to(b.dtype).mul_(layer.scale)
        if not ctx.needs_input_grad[0]:
            return None, None, grad_a, grad_b, None
        grad_x = grad @ layer.dense()
        if mask is None:
            grad_x.addmm_(low_grad, a.to(x.dtype), alpha=layer.scale)
        else:
            through_a = low_grad @ a.to(x.dtype)
            grad_x.add_(through_a.mul_(mask), alpha=scale)
        if up is None:
            grad_x = grad_x.to(ctx.dtype)
            return grad_x.view(ctx.shape), None, grad_a, grad_b, None
        grad_gate, grad_up = _swiglu_backward(x, up, grad_x, layer.fused)
        return grad_gate.view(ctx.shape), grad_up.view(ctx.shape), grad_a, grad_b, None


def _swiglu(gate: Tensor, up: Tensor, fused: bool) -> Tensor:
    if fused:
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)[2]
    return functional.silu(gate).mul_(up)


def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; written over what nobody needs any more."""
    if fused:
        from liger_kernel.ops.swiglu import swiglu_backward

        return swiglu_backward(gate, up, grad)
    grad_up = functional.silu(gate).mul_(grad)
    grad_gate = torch.ops.aten.silu_backward(grad.mul_(up), gate)
    return grad_gate, grad_up
