"""Hybrid models on packed rows: each row computes what it computes alone; where it would not, nothing is trained."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nbutils import distributed, hardware
from nbutils.hardware import Choice
from nbutils.training import hybrid, sharding
from nbutils.training import model as lora

VOCAB = 300
REFERENCE = hybrid.forward_with_reference_code
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": VOCAB, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = [  # of packed rows; the delta rule works in chunks of 64 tokens
    (5, 3),
    (64, 64, 2),
    (63, 1, 65, 17),
    (65, 128, 1, 2, 63),
    (1, 63, 64, 65, 2, 33, 127, 3, 31),
]
EXACT = 1e-5


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread for so small a model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hybrid_model(recompute: bool = False) -> Any:
    """A hybrid model in float32 with adapters that change what it says, as lesson 03 trains it."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SIZES)
    config._attn_implementation = lora.attention("sdpa")
    base = Qwen3_5ForCausalLM(config)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def random_rows(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def batch_of(rows: list[list[int]]) -> dict[str, Tensor]:
    """What the model of lesson 03 gets for one packed row."""
    tokens = [token for row in rows for token in row]
    packed = {"input_ids": tokens, "labels": tokens, "seq_lengths": [*map(len, rows)]}
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return lora.with_boundaries(collate)([packed])


def step(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of all batches, and the adapters' gradients of the summed loss of all their tokens."""
    model.zero_grad()
    logits = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        out = model(**inputs, use_cache=False).logits[0]
        targets = batch["labels"][0, 1:]  # those where a row begins are left out
        (cross_entropy(out[:-1], targets, ignore_index=-100, reduction="sum") / 100).backward()
        logits.append(out.detach())
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradients[name] = weight.grad.clone()
    return torch.cat(logits), gradients


@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows")
def test_packed_rows_have_the_logits_and_gradients_of_single_rows(lengths: tuple[int, ...], recompute: bool) -> None:
    rows = random_rows(lengths)
    untouched = hybrid_model()
    logits, gradients = step(untouched, [batch_of([row]) for row in rows])

    model = hybrid_model(recompute)
    assert "3 Gated DeltaNet layers" in hybrid.adapt_layers(model)
    lora.patch_model(model, fused=False)
    packed_logits, packed_gradients = step(model, [batch_of(rows)])

    assert (packed_logits - logits).abs().max() < EXACT
    assert packed_gradients.keys() == gradients.keys()
    assert any("linear_attn.in_proj_qkv.lora_A" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert (packed_gradients[name] - gradient).abs().max() < EXACT * max(1, gradient.abs().max()), name


def mixing_forward(self: Any, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
    """As a version of transformers that knows nothing of packed rows."""
    return self.stock_forward(hidden_states, cache_params=cache_params)


def test_rows_that_see_each_other_are_found_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_rows((40, 30))
    model = hybrid_model()
    alone, _ = step(model, [batch_of([first]), batch_of([second])])
    monkeypatch.setattr(hybrid, "forward_with_reference_code", mixing_forward)
    hybrid.adapt_layers(model)
    together, _ = step(model, [batch_of([first, second])])

    differences = (together - alone).abs().amax(dim=-1)
    assert (differences[:40] < EXACT).all(), "no later row changes the first one"
    assert differences[40] > 0.01, "the proof above can fail"
    with refused("packed rows of Qwen3_5TextModel see each other", "configs/models.yaml"):
        hybrid.require_rows_apart(model, nullcontext())
    assert model.training


def test_a_little_of_another_row_is_found_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        mixed = self.stock_forward(hidden_states)
        return 0.99 * by_row(self, hidden_states, **kwargs) + 0.01 * mixed

    model = hybrid_model()
    monkeypatch.setattr(hybrid, "forward_with_reference_code", leaking_forward)
    hybrid.adapt_layers(model)
    with refused("see each other", "configs/models.yaml"):
        hybrid.require_rows_apart(model, nullcontext())


def test_transformers_alone_computes_no_packed_rows() -> None:
    """If this fails, transformers keeps rows apart by itself, and the forwards of ours have nothing to do any more."""
    first, second = random_rows((40, 30))
    model = hybrid_model()
    alone, _ = step(model, [batch_of([first]), batch_of([second])])
    try:
        together, _ = step(model, [batch_of([first, second])])
    except ValueError:
        return
    assert (together - alone)[40].abs().max() > 0.01


def test_rows_apart_are_accepted_with_and_without_adapters() -> None:
    model = hybrid_model()
    hybrid.adapt_layers(model)
    hybrid.require_rows_apart(model, nullcontext())
    hybrid.require_rows_apart(model.merge_and_unload(), nullcontext())
    assert hybrid.adapt_layers(nn.Linear(2, 2)) == "", "a model without such layers"


def test_answers_are_those_of_the_untouched_model() -> None:
    prompts = torch.tensor([random_rows((5,))[0], random_rows((5, 5))[1]])
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = hybrid_model().eval()
    expected = model.generate(input_ids=prompts, **options)
    hybrid.adapt_layers(model)
    lora.patch_model(model, fused=False)
    assert torch.equal(model.generate(input_ids=prompts, **options), expected)


def test_zero3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "strategy", lambda: "zero3")
    assert hybrid.adapt_layers(nn.Linear(2, 2)) == ""
    with refused("ZeRO-3 cannot train a hybrid model", "fsdp"):
        hybrid.adapt_layers(hybrid_model())


def by_row(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return REFERENCE(self, hidden_states, **kwargs)


def wrong_output(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return 1.2 * by_row(self, hidden_states, **kwargs)


def wrong_gradient(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    out = by_row(self, hidden_states, **kwargs)
    return out.detach() + 1.2 * (out - out.detach())


def mixed_rows(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return self.stock_forward(hidden_states)


def does_not_compile(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    raise RuntimeError("the compiler says no\nand much more")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (by_row, "with kernels"),
        (wrong_output, "differ by"),
        (wrong_gradient, "differ by"),
        (mixed_rows, "differ by"),
        (does_not_compile, "RuntimeError: the compiler says no)"),
    ],
)
def test_kernels_are_used_if_they_compute_what_the_reference_code_does(
    kernels: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves need a GPU; here others stand for them."""
    monkeypatch.setattr(hardware, "delta_rule_kernels", lambda gpu: Choice(True, "with kernels"))
    monkeypatch.setattr(hybrid, "_allow_triton", lambda head_dim: None)
    monkeypatch.setattr(hybrid, "forward_with_kernels", kernels)
    model = hybrid_model()
    how = hybrid.adapt_layers(model)
    assert said in how
    forwards = {part.forward.__func__ for part in model.modules() if type(part).__name__ in hybrid.KNOWN_LAYERS}
    assert forwards == {kernels if kernels is by_row else hybrid.forward_with_reference_code}
    hybrid.require_rows_apart(model, nullcontext())


def test_a_package_of_kernels_that_cannot_be_imported_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "delta_rule_kernels", lambda gpu: Choice(True, "with kernels"))
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "ModuleNotFoundError" in hybrid.adapt_layers(hybrid_model())


def test_the_units_of_fsdp_are_layers_of_the_text_model() -> None:
    """What accelerate does not find ends the training; a checkpoint that also sees names its vision layers too."""
    model = hybrid_model()
    assert "Qwen3_5VisionBlock" in model._no_split_modules, "or this test tests nothing"
    sharding.name_units(model)
    assert model._no_split_modules == ["Qwen3_5DecoderLayer"]


def test_without_kernels_of_ours_those_that_transformers_found_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is too old for them they fail, and transformers would use them all the same."""
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    @wraps(reference)
    def kernels(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not on this GPU")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernels)
    model = hybrid_model()
    hybrid.adapt_layers(model)
    batch = batch_of(random_rows((3, 5)))
    assert model(**batch).logits.isfinite().all()
