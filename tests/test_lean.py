"""The lean step gives the numbers of PEFT's own layers: outputs and gradients, with and without recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Glm4Config, LlamaConfig, Qwen2Config, Qwen3Config

from nbutils import paths
from nbutils.training import lean

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "glm4": Glm4Config}


def adapted(base: nn.Module, **settings: Any) -> Any:
    """A model with adapters that already speak: B of a fresh adapter is zero, which would hide mistakes in A."""
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    return model.train()


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KINDS[kind](**SIZES))


def tiny(four_bit: bool) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(
        paths.TINY_MODEL, dtype="float32", quantization_config=config if four_bit else None, device_map={"": "cpu"}
    )


def step(model: Any, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the adapter's gradients of one step."""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.zero_grad()
    ids = torch.randint(2, 100, (2, 17), generator=torch.Generator().manual_seed(3)).to(model.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return out.logits.detach(), grads


def assert_same(model: Any, recompute: bool, expected_layers: int) -> None:
    logits, grads = step(model, recompute)
    assert lean.lighten(model, fused=False) == expected_layers
    lean_logits, lean_grads = step(model, recompute)
    torch.testing.assert_close(lean_logits, logits, rtol=1e-4, atol=1e-4)
    assert set(lean_grads) == set(grads) and grads
    for name, grad in grads.items():
        assert (lean_grads[name] - grad).abs().max() < 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_numbers_are_those_of_peft(kind: str, recompute: bool) -> None:
    per_layer = 6 if kind == "glm4" else 7  # GLM-4 has one matrix for gate and up
    assert_same(adapted(random_model(kind)), recompute, 3 * per_layer)


@pytest.mark.parametrize("recompute", [False, True])
def test_numbers_are_those_of_peft_in_four_bits(recompute: bool) -> None:
    model = adapted(tiny(four_bit=True))
    assert_same(model, recompute, 7 * model.config.num_hidden_layers)


def errors_in_16_bits(device: str, fused: bool, recompute: bool) -> dict[str, float]:
    """How far PEFT's gradients and the lean ones are from those in 32 bits; the base in bfloat16, as in lesson 03."""
    model = adapted(random_model("qwen2").to(torch.bfloat16).float()).to(device)
    _, truth = step(model, recompute=False)
    for name, weight in model.named_parameters():
        weight.data = weight.data if "lora" in name else weight.data.to(torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        _, pefts = step(model, recompute)
        lean.lighten(model, fused)
        _, ours = step(model, recompute)
    assert {grad.dtype for grad in ours.values()} == {torch.float32} and set(ours) == set(truth)
    return {
        kind: sum(((grads[name] - truth[name]) ** 2).sum().item() for name in truth) ** 0.5
        for kind, grads in {"ours": ours, "pefts": pefts}.items()
    }


def test_in_16_bits_it_is_as_close_to_the_truth_as_peft_and_gradients_stay_in_32() -> None:
    far = errors_in_16_bits("cpu", fused=False, recompute=False)
    assert 0 < far["ours"] < 1.1 * far["pefts"]


def test_a_recomputed_layer_leaves_out_its_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(random_model("qwen2"))
    lean.lighten(model, fused=False)
    made: list[bool] = []
    product = lean._product
    monkeypatch.setattr(lean, "_product", lambda x, *rest: made.append(lean._recomputing()) or product(x, *rest))
    step(model, recompute=True)
    layers = SIZES["num_hidden_layers"]
    assert made.count(False) == 7 * layers and made.count(True) == 6 * layers


def test_a_layer_that_reads_its_last_product_computes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    block = random_model("glm4").model.layers[0]
    assert type(block).__name__ not in lean.ENDS_WITH_MLP  # it has a norm after its MLP


def test_evaluation_and_a_switched_off_adapter_go_pefts_way() -> None:
    model = adapted(random_model("qwen2"))
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
    lean.lighten(model, fused=False)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, before)
        with model.train().disable_adapter():
            torch.testing.assert_close(model(input_ids=ids).logits, base)


def test_variants_of_lora_keep_pefts_forward() -> None:
    assert lean.lighten(adapted(random_model("qwen2"), use_dora=True), fused=False) == 0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradients_are_those_of_the_function(dropout: float) -> None:
    torch.manual_seed(0)
    x, gate, up = (torch.randn(5, size, dtype=torch.float64, requires_grad=True) for size in (6, 7, 7))
    wide, down = (torch.randn(4, size, dtype=torch.float64) for size in (6, 7))
    a, low_a = (torch.randn(2, size, dtype=torch.float64, requires_grad=True) for size in (6, 7))
    b = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def linear(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)  # the same numbers are dropped each time
        return lean._LoraLinear.apply(x, wide, None, a, b, 1.5, dropout, torch.float64)

    def mlp(gate: torch.Tensor, up: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return lean._LoraDown.apply(gate, up, down, None, a, b, 1.5, dropout, torch.float64, False, False)

    assert torch.autograd.gradcheck(linear, (x, a, b)) and torch.autograd.gradcheck(mlp, (gate, up, low_a, b))


def test_with_dropout_a_recomputed_layer_drops_the_same_numbers() -> None:
    model = adapted(random_model("qwen2"), lora_dropout=0.2)
    assert lean.lighten(model, fused=False) == 21
    kept = []
    for recompute in (False, True):
        torch.manual_seed(5)
        kept.append(step(model, recompute))
    torch.testing.assert_close(kept[0][0], kept[1][0])
    for name, grad in kept[0][1].items():
        torch.testing.assert_close(kept[1][1][name], grad, msg=name)
    torch.manual_seed(6)
    assert (step(model, False)[0] - kept[0][0]).abs().max() > 1e-3


def test_other_quantised_layers_keep_pefts_forward() -> None:
    class Eight(nn.Linear):
        """Looks like a linear layer; its numbers are codes."""

    base = random_model("qwen2")
    base.model.layers[0].mlp.up_proj.__class__ = Eight
    assert lean.lighten(adapted(base), fused=False) == 20


def test_an_unknown_mlp_keeps_its_own_forward() -> None:
    base = random_model("qwen2")

    class Clamped(type(base.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-0.01, 0.01)

    for layer in base.model.layers:
        layer.mlp.__class__ = Clamped
    assert_same(adapted(base), False, 21)


def test_made_lean_twice_is_made_lean_once() -> None:
    model = adapted(random_model("qwen2"))
    assert lean.lighten(model, fused=False) == lean.lighten(model, fused=False) == 21
    model.eval()(input_ids=torch.arange(2, 9)[None])


def test_a_second_adapter_and_no_adapter_go_pefts_way() -> None:
    model = adapted(random_model("qwen2"))
    lean.lighten(model, fused=False)
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    model.train()(input_ids=torch.arange(2, 9)[None])
    base = model.merge_and_unload()
    base.train()(input_ids=torch.arange(2, 9)[None])


def test_a_hook_on_the_mlp_keeps_its_last_product() -> None:
    model = adapted(random_model("qwen2"))
    for layer in model.base_model.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, out: out * out)
    assert_same(model, True, 21)
