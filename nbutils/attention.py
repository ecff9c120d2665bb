"""Attention for packed rows: torch's own variable-length kernel, registered with transformers under the name `varlen`.

Packed rows restart their positions; the kernel is told where, so no token sees another example and no mask is built.
Not here: choosing it (hardware). Whatever is not packed (padding, a cache) goes to torch's ordinary attention.
"""

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
NEEDLESS = ("Padding-free training is enabled, but", "You are using packing, but the attention")
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def use(name: str) -> str:
    """The name for `attn_implementation`, made known to transformers if it is ours.

    TRL warns that rows may mix unless FlashAttention is used. With the ways used here they do not, which tests prove.
    """
    logging.getLogger("trl.trainer.sft_trainer").addFilter(_is_not_about_packing)
    return register() if name == NAME else name


def _is_not_about_packing(record: logging.LogRecord) -> bool:
    return not any(words in str(record.msg) for words in NEEDLESS)


def register() -> str:
    """Make `varlen` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


def boundaries(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where the examples of flattened rows begin and end, and the longest one; every row begins one too."""
    import torch

    starts = position_ids == 0
    starts[:, 0] = True
    ends = torch.nonzero(starts.flatten()).flatten()
    edges = torch.cat([ends, ends.new_tensor([starts.numel()])]).to(torch.int32)
    return edges, int(edges.diff().max())


def with_boundaries(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A collator that also says where examples begin: known on the CPU, asking the card would stop it in each layer."""

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
    """No mask for whole rows without padding, which is what packed rows are; torch's ordinary one for the others."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **rest)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the shapes transformers uses: heads before tokens on the way in, after them on the way out."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _refuse_unknown({"dropout": dropout} | {name: kwargs.get(name) for name in ("s_aux", "softcap")})
    rows, heads, length, size = query.shape
    edges, longest = _edges(query, kwargs)
    q, k, v = (states.transpose(1, 2).reshape(rows * length, -1, size) for states in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # 0: no token sees a later one
    more: dict[str, Any] = {"scale": scaling, "window_size": window, **_grouped(heads, key.shape[1])}
    out: Any = varlen_attn(q, k, v, edges, edges, longest, longest, **more)
    return out.view(rows, length, heads, size), None


def _edges(query: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """The boundaries the collator gave, else those of the positions, else one example per row."""
    import torch

    if kwargs.get(BOUNDARIES[0]) is not None:
        return kwargs[BOUNDARIES[0]], int(kwargs[BOUNDARIES[2]])
    rows, _, length, _ = query.shape
    positions = kwargs.get("position_ids")
    if positions is not None:
        return boundaries(positions.expand(rows, length))
    return torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length, length


@cache
def _grouped(heads: int, kv_heads: int) -> dict[str, bool]:
    """Fewer key than query heads: the kernel shares keys without copying them; newer torch wants to be told."""
    from torch.nn.attention.varlen import varlen_attn

    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if asked and heads != kv_heads else {}


def _refuse_unknown(wishes: dict[str, Any]) -> None:
    """Stop at a model whose attention has parts that torch's kernel for packed rows has not."""
    asked = [name for name, value in wishes.items() if value is not None and not (name == "dropout" and value == 0)]
    if asked:
        raise CourseError(
            f"this model's attention has {', '.join(asked)}, and torch's kernel for packed rows has not.",
            "attention without dropout, sinks (s_aux) and softcap, as Qwen, GLM and Llama have it",
            "set machine.attention to sdpa in a copy of the profile",
        )
