"""Hybrid models (Qwen3.5 and later): Gated DeltaNet layers on packed rows, which must not see each other.

A Gated DeltaNet layer carries a state from token to token, through a short convolution and the gated delta rule. Both
must begin anew with every row. On a GPU the kernels of flash-linear-attention are told where rows begin. Elsewhere
transformers' reference code computes one row after the other: correct, and slower.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nbutils import hardware
from nbutils.errors import CourseError
from nbutils.language import tr

KNOWN_LAYERS = ("Qwen3_5GatedDeltaNet",)
FIRST = (11, 3, 17, 5)  # tokens of the rows with which a model is tried
NOISE = 0.02  # of the size of the logits: more than 16 bits ever differ on equal rows, less than one foreign token does


def adapt_layers(model: nn.Module, replace_forward: Any) -> str:
    """Keep rows apart in every Gated DeltaNet layer; how they are computed, empty for a model that has none."""
    layers = [part for part in model.modules() if type(part).__name__ in KNOWN_LAYERS]
    if not layers:
        return ""
    kernels = hardware.delta_rule_kernels(hardware.gpu())
    for layer in layers:
        replace_forward(layer, _packed_forward if kernels.value else _forward_by_row)
    return tr("{count} Gated DeltaNet layers: {how}", count=len(layers), how=kernels.reason)


def _forward_by_row(self: Any, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
    """The layer's own forward, for each row of the packed ones."""
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None or cache_params is not None:
        return self.stock_forward(hidden_states, cache_params=cache_params, **kwargs)
    rows = [self.stock_forward(hidden_states[:, first:last]) for first, last in pairwise(edges.tolist())]
    return torch.cat(rows, dim=1)


def _packed_forward(self: Any, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
    """The layer's forward with kernels that begin anew at every row, for all packed rows at once.

    Unlike transformers' own it has no copies: heads of keys are not repeated for those of values, nothing is
    transposed, and decay, write strength and gate are computed inside the kernels.
    """
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None or cache_params is not None:
        return self.stock_forward(hidden_states, cache_params=cache_params, **kwargs)
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    shape = hidden_states.shape[:-1]
    gate = self.in_proj_z(hidden_states)
    strength = self.in_proj_b(hidden_states)
    decay = self.in_proj_a(hidden_states)
    mixed, _ = causal_conv1d(
        self.in_proj_qkv(hidden_states),
        self.conv1d.weight.squeeze(1),
        activation=self.activation,
        cu_seqlens=edges,
    )
    query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    out, _ = chunk_gated_delta_rule(
        query.view(*shape, -1, self.head_k_dim),
        key.view(*shape, -1, self.head_k_dim),
        value.view(*shape, -1, self.head_v_dim),
        g=decay,
        beta=strength,
        A_log=self.A_log,
        dt_bias=self.dt_bias,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=edges,
    )
    normed = rms_norm_gated(
        out,
        gate.view(*shape, -1, self.head_v_dim),
        self.norm.weight,
        None,
        activation="swish",
        eps=self.norm.variance_epsilon,
    )
    return self.out_proj(normed.flatten(-2))
