"""Attention for packed rows without a mask: torch's kernel for rows of different length, registered as `varlen`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "varlen"
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def use(name: str) -> str:
    """The name for `attn_implementation`; `varlen` is registered."""
    # TRL warns that rows may mix without FlashAttention; with the implementations used here they do not (tests compare)
    logging.getLogger("trl.trainer.sft_trainer").setLevel(logging.ERROR)
    return register() if name == NAME else name


def register() -> str:
    """Register `varlen` with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


def boundaries(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where the examples of flattened rows begin and end, and the longest one."""
    import torch

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
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **rest)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the shapes of transformers: heads before tokens in the input, after them in the output."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    unsupported = {"dropout": dropout or None, "s_aux": kwargs.get("s_aux"), "softcap": kwargs.get("softcap")}
    if parts := [name for name, value in unsupported.items() if value is not None]:
        raise CourseError("training.unsupported_attention", parts=", ".join(parts))
    rows, heads, length, size = query.shape
    edges, longest = _edges(query, kwargs)
    q, k, v = (states.transpose(1, 2).reshape(rows * length, -1, size) for states in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # 0: no token sees a later one
    more: dict[str, Any] = {"scale": scaling, "window_size": window, **_gqa(heads, key.shape[1])}
    out: Any = varlen_attn(q, k, v, edges, edges, longest, longest, **more)
    return out.view(rows, length, heads, size), None


def _edges(query: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """The boundaries from the collator, else from the positions, else one example per row."""
    import torch

    rows, _, length, _ = query.shape
    if kwargs.get(BOUNDARIES[0]) is not None:
        return kwargs[BOUNDARIES[0]], int(kwargs[BOUNDARIES[2]])
    if (positions := kwargs.get("position_ids")) is not None:
        return boundaries(positions.expand(rows, length))
    return torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length, length


@cache
def _gqa(heads: int, kv_heads: int) -> dict[str, bool]:
    """The option for grouped-query attention, which newer versions of torch need."""
    from torch.nn.attention.varlen import varlen_attn

    known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if known and heads != kv_heads else {}
