"""Packed rows must not see each other: proven for any model, and made true for hybrid ones (Qwen3.5 and later).

A Gated DeltaNet layer carries a state from token to token, through a short convolution and the gated delta rule. Both
must begin anew with every row. On a GPU the kernels of flash-linear-attention are told where rows begin; they are used
if they give the output and the gradients of transformers' reference code on this very GPU. Elsewhere the reference
code computes the rows as a batch: correct, and slower.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from nbutils import distributed, hardware
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import say, tr
from nbutils.masking import describe

KNOWN_LAYERS = ("Qwen3_5GatedDeltaNet",)
DELTA_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")  # in the module of these layers
CHUNK = 64  # tokens that the reference code computes together
ROWS = (11, 3, 17, 5)  # tokens of the rows with which a model is tried
EDGES = (65, 1, 127, 64)  # of those with which kernels are tried, whose chunks have 64 tokens
MIXED = 0.1  # relative difference in 16 bits: rounding makes about 0.02, one foreign token 0.3 and more
MIXED_IN_32_BITS = 1e-4  # rounding makes 1e-6
WRONG = 0.05  # of one layer: 16 bits differ by less than 0.01, a miscompiled kernel by 0.5
TOKENS = 256  # ids that any vocabulary has
Forward = Callable[..., Tensor]
Boundaries = tuple[Tensor, int]


def boundaries(position_ids: Tensor) -> Boundaries:
    """Where the examples of flattened rows begin and end, and the longest one."""
    (edges, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    return edges, int(longest)


def packed_inputs(position_ids: Tensor) -> dict[str, Any]:
    """The boundaries under the names by which attention and Gated DeltaNet layers know them."""
    edges, longest = boundaries(position_ids)
    return {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def require_rows_apart(model: Any, precision: AbstractContextManager[Any]) -> None:
    """Refuse a model, or a version of transformers, in which packed rows see each other."""
    causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
    decoder: Any = causal_lm.base_model
    starts = [0, *accumulate(ROWS)]
    device = model.device
    ids = torch.arange(starts[-1], device=device)[None] * 31 % TOKENS
    positions = torch.cat([torch.arange(length, device=device) for length in ROWS])[None]
    training = model.training
    model.eval()

    def states(first: int, last: int) -> Tensor:
        inputs = {"input_ids": ids[:, first:last], "position_ids": positions[:, first:last]}
        boundaries_of_rows = packed_inputs(inputs["position_ids"])
        return decoder(**inputs, **boundaries_of_rows, use_cache=False).last_hidden_state

    with torch.no_grad(), precision:
        is_exact = decoder.dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
        together = states(0, starts[-1])
        differences = [_difference(together[:, first:last], states(first, last)) for first, last in pairwise(starts)]
    model.train(training)
    rounding, *others = differences  # no later row can change the first one
    limit = MIXED_IN_32_BITS if is_exact else MIXED
    if max(others) > max(limit, 5 * rounding):
        raise CourseError(
            "With this version of transformers, packed rows of {model} see each other (their states differ by "
            "{difference:.2%}).",
            todo="Take a model of configs/models.yaml, with transformers 5.17 to 5.19.",
            model=type(decoder).__name__,
            difference=max(others),
        )


def _difference(states: Tensor, expected: Tensor) -> float:
    """The size of a difference, relative to what was expected."""
    expected = expected.float()
    return float((states.float() - expected).norm() / expected.norm())


def replace_forward(part: Any, forward: Forward) -> None:
    """Give a module another forward, unless it has it because this cell ran before."""
    if not hasattr(part, "stock_forward"):
        part.stock_forward = part.forward
        part.forward = types.MethodType(forward, part)


def adapt_layers(model: Any) -> str:
    """Keep rows apart in every Gated DeltaNet layer; how that is computed, empty for a model without such layers."""
    layers = [part for part in model.modules() if type(part).__name__ in KNOWN_LAYERS]
    if not layers:
        return ""
    distributed.require_gathered_by_layer(distributed.strategy(), type(model).__name__)
    how = hardware.delta_rule_kernels(hardware.gpu())
    if how.value:
        say("Kernels for Gated DeltaNet layers are compiled and tuned: one to three minutes, once on a machine.")
        how = _checked_kernels(layers[0], model.config.get_text_config(), how)
    if not how.value:
        _use_reference_code(layers[0])
    for layer in layers:
        replace_forward(layer, forward_with_kernels if how.value else forward_with_reference_code)
    return tr("{count} Gated DeltaNet layers: {how}", count=len(layers), how=how.reason)


def forward_with_reference_code(self: Any, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
    """A Gated DeltaNet layer's own forward, with the packed rows as a batch for each number of chunks.

    The reference code fills the last chunk of a row with zeros in any case, and no token sees what follows it.
    """
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None or cache_params is not None:
        return self.stock_forward(hidden_states, cache_params=cache_params, **kwargs)
    lengths = edges.diff().tolist()
    rows = hidden_states[0].split(lengths)
    batches: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        chunks = math.ceil(length / CHUNK)
        batches.setdefault(chunks, []).append(number)
    computed: dict[int, Tensor] = {}
    for numbers in batches.values():
        alike = [rows[number] for number in numbers]
        out = self.stock_forward(pad_sequence(alike, batch_first=True))
        for number, states in zip(numbers, out, strict=True):
            computed[number] = states[: lengths[number]]
    in_order = [computed[number] for number in sorted(computed)]
    together = torch.cat(in_order)
    return together[None]


def forward_with_kernels(self: Any, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
    """A Gated DeltaNet layer's forward for all packed rows at once, with kernels that begin anew at every row.

    Unlike transformers' own it makes no copies: heads of keys are not repeated for those of values, nothing is
    transposed, and decay, write strength and output gate are computed inside the kernels.
    """
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None or cache_params is not None:
        return self.stock_forward(hidden_states, cache_params=cache_params, **kwargs)
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tokens = hidden_states.shape[:-1]
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
        query.view(*tokens, -1, self.head_k_dim),
        key.view(*tokens, -1, self.head_k_dim),
        value.view(*tokens, -1, self.head_v_dim),
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
        gate.view(*tokens, -1, self.head_v_dim),
        self.norm.weight,
        None,
        eps=self.norm.variance_epsilon,
    )
    return self.out_proj(normed.flatten(-2))


def _checked_kernels(layer: Any, config: Any, how: Choice) -> Choice:
    """The kernels, if their output and gradients are those of the reference code; else the reference code.

    They are tried with a layer of random weights: those of the model may still be in RAM, or elsewhere, under FSDP.
    """
    device = torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = layer.conv1d.weight.dtype
    with device:
        trial = type(layer)(config, layer.layer_idx).to(dtype)
    trial.stock_forward = trial.forward
    states = torch.randn(1, sum(EDGES), config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    linears = [part.weight for part in trial.modules() if isinstance(part, nn.Linear)]  # those that get adapters
    inputs = [states, *linears]
    starts = [0, *accumulate(EDGES)]
    edges = torch.tensor(starts, device=device, dtype=torch.int32)

    def results(forward: Forward) -> list[Tensor]:
        with torch.autocast(device.type, dtype=dtype):
            out = forward(trial, states, cu_seq_lens_q=edges)
        loss = out.float().square().sum()
        gradients = torch.autograd.grad(loss, inputs)
        return [out.detach(), *gradients]

    undo = _use_reference_code(layer)
    try:
        _allow_triton(layer.head_k_dim)
        expected = results(forward_with_reference_code)
        computed = results(forward_with_kernels)
        worst = max(map(_difference, computed, expected))
        problem = "" if worst < WRONG else tr("they differ by {worst:.0%} from the reference code", worst=worst)
    except Exception as error:  # compilers raise anything
        if hardware.out_of_memory(error):
            raise
        problem = describe(error).partition("\n")[0]
    finally:
        undo()
    if not problem:
        return how
    return Choice(False, hardware.reference_code(tr("the kernels fail on this GPU ({problem})", problem=problem)))


def _use_reference_code(layer: Any) -> Callable[[], None]:
    """Let transformers compute the delta rule by its own code, whatever kernels it has found; what undoes this."""
    where = type(layer).__module__
    names = vars(sys.modules[where])
    found = {name: names[name] for name in DELTA_RULES}
    for name, rule in found.items():
        names[name] = inspect.unwrap(rule)
    return partial(names.update, found)


def _allow_triton(head_dim: int) -> None:
    """Let flash-linear-attention use Triton before 3.7.1 on Hopper, where it refuses the backward pass of any model.

    The miscompiled kernel it fears is that for heads of 33 to 64 (its issue 640). Others are proven just below.
    """
    from fla.ops.common import chunk_o
    from fla.utils import TRITON_ABOVE_3_7_1

    chunk_o.TRITON_ABOVE_3_7_1 = TRITON_ABOVE_3_7_1 or head_dim > 64  # another model may have been here
