"""merging: the same bits as PEFT's merge, the right base, and never half a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import merge_models as models
import pytest
import torch

from nbutils import merging, paths
from nbutils.errors import CourseError
from nbutils.merging import bases, dequantized, shards


def merge(base: Path, adapter: Any, out: Path, **wishes: Any) -> merging.MergeReport:
    return merging.merge_adapter(base, adapter, out, progress=False, **wishes)


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype and torch.equal(weight, theirs[name]), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale of two": {"lora_alpha": 8},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 8, r"layers.1.mlp.down_proj": 2}, "alpha_pattern": {"layers.0.self_attn.o_proj": 3},
    },
    "dora": {"use_dora": True},
    "bias all": {"bias": "all"},
    "bias lora_only": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "lora_bias": {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "dora on embeddings": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "tokens": {"trainable_token_indices": [3, 150]},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [9]}},
    "16-bit adapter": {"dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_merge_has_the_bits_of_pefts_own(case: str, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base")
    adapter = models.make_adapter(base, tmp_path / "adapter", **CASES[case])
    for dtype in ("bfloat16", "float32"):
        report = merge(base, adapter, tmp_path / dtype, dtype=dtype)
        assert report.merged and not report.resumed_shards and not report.untied
        assert_same_bits(models.weights(tmp_path / dtype), models.merged_by_peft(base, adapter, dtype=dtype))


@pytest.mark.parametrize("kind", ["qwen3", "glm4"])
@pytest.mark.parametrize("sharded", ["", "60KB"])
def test_every_architecture_and_every_number_of_files(kind: str, sharded: str, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base", kind, shards=sharded)
    adapter = models.make_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(base.glob("*.safetensors")))
    assert_same_bits(models.weights(tmp_path / "out"), models.merged_by_peft(base, adapter, dtype="bfloat16"))
    tuned, merged = models.with_adapter(base, adapter), models.load(tmp_path / "out")
    assert (
        (models.logits(tuned) - models.logits(merged)).abs().max()
        < 0.05
        < (models.logits(models.load(base)) - models.logits(merged)).abs().max()
    )


@pytest.mark.parametrize("case", ["embeddings", "dora", "dora on embeddings", "tokens", "modules_to_save", "lora_bias"])
def test_pieces_of_a_weight_have_the_bits_of_the_whole(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one row would be left over (161 = 5 x 32 + 1): a product of one row is rounded otherwise."""
    monkeypatch.setattr(shards, "BLOCK", 64 * 40)
    monkeypatch.setattr(shards, "STEP", 64)
    base = models.make_base(tmp_path / "base")
    assert len(list(bases.open_base(base).weights["lm_head.weight"].blocks())) > 2
    adapter = models.make_adapter(base, tmp_path / "adapter", r=16, **CASES[case])
    merge(base, adapter, tmp_path / "out", dtype="float32")
    assert_same_bits(models.weights(tmp_path / "out"), models.merged_by_peft(base, adapter))


TIED: dict[str, dict[str, Any]] = {
    "linear only": {},
    "tokens": {"trainable_token_indices": [3, 150]},
    "saved together": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_stay_tied_where_the_adapter_leaves_them_equal(case: str, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base", tied=True)
    adapter = models.make_adapter(base, tmp_path / "adapter", **TIED[case])
    assert not merge(base, adapter, tmp_path / "out").untied
    theirs = models.merged_by_peft(base, adapter, dtype="bfloat16")
    assert torch.equal(theirs.pop("lm_head.weight"), theirs["model.embed_tokens.weight"])
    assert_same_bits(models.weights(tmp_path / "out"), theirs)


UNTIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "output": {"target_modules": ["lm_head", "q_proj"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("case", UNTIED)
def test_tied_embeddings_are_untied_where_the_adapter_made_them_differ(case: str, tmp_path: Path) -> None:
    """PEFT adds to the one shared matrix and so makes another model; untied first, it gives the bits we give."""
    base = models.make_base(tmp_path / "base", tied=True)
    adapter = models.make_adapter(base, tmp_path / "adapter", **UNTIED[case])
    report = merge(base, adapter, tmp_path / "out")
    assert report.untied and "weight of its own" in str(report)
    untied = models.untied_copy(base, tmp_path / "untied")
    assert_same_bits(models.weights(tmp_path / "out"), models.merged_by_peft(untied, adapter, dtype="bfloat16"))
    trained = models.logits(models.with_adapter(base, adapter))
    merge(base, adapter, tmp_path / "exact", dtype="float32")
    assert (models.logits(models.load(tmp_path / "exact")) - trained).abs().max() < 1e-4


def test_several_adapters_are_merged_one_after_another(tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base")
    first = models.make_adapter(base, tmp_path / "first")
    second = models.make_adapter(base, tmp_path / "second", seed=12, target_modules=["q_proj", "o_proj"], r=2)
    merge(base, [first, second], tmp_path / "out", dtype="float32")
    assert_same_bits(models.weights(tmp_path / "out"), models.merged_by_peft(base, first, second))


def test_pefts_own_16_bit_merge_gives_the_same_bits_unless_it_is_the_safe_one(tmp_path: Path) -> None:
    """With `safe_merge` PEFT rounds the change before adding it, and a part of the weights is off by some steps."""
    base = models.make_base(tmp_path / "base")
    adapter = models.make_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "out")
    ours = models.weights(tmp_path / "out")
    assert_same_bits(ours, models.merged_by_peft(base, adapter, dtype="bfloat16", computed_in="bfloat16"))
    safe = models.with_adapter(base, adapter, dtype="bfloat16").merge_and_unload(safe_merge=True).state_dict()
    truth = models.merged_by_peft(base, adapter)
    for name in (name for name in ours if "_proj.weight" in name):
        steps = models.ulps(ours[name], safe[name])
        assert 0.1 < float((steps > 0).float().mean()) < 0.5, name
        assert torch.all((ours[name].float() - truth[name]).abs() <= (safe[name].float() - truth[name]).abs())


def in_four_bits(base: Path, folder: Path, **form: Any) -> Path:
    """The base as transformers and bitsandbytes load it in 4 bits, its weights taken back to 16."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, **form)
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype="bfloat16", device_map="cpu")
    model = models.load(base, "bfloat16")
    seen = {name: part for name, part in loaded.named_modules() if isinstance(part, Linear4bit)}
    assert len(seen) == 14
    for name, part in seen.items():
        model.get_submodule(name).weight.data = dequantize_4bit(part.weight.data, part.weight.quant_state)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_the_dequantised_base_is_the_one_bitsandbytes_trains_on(tied: bool, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base", tied=tied)
    adapter = models.make_adapter(base, tmp_path / "adapter")
    for form in ({"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_type": "fp4"}):
        seen = in_four_bits(base, tmp_path / form["bnb_4bit_quant_type"], **form)
        out = tmp_path / f"out-{form['bnb_4bit_quant_type']}"
        wishes = {"double_quant": False} | form
        report = merge(base, adapter, out, onto="dequantized", quantization=wishes)
        theirs = models.merged_by_peft(seen, adapter, dtype="bfloat16")
        theirs = {name: weight for name, weight in theirs.items() if not (tied and name == "lm_head.weight")}
        assert_same_bits(models.weights(out), theirs)
        assert "dequantised" in str(report) and paths.stamp(out) != merging.describe(base, adapter, "bfloat16")
    merge(base, adapter, tmp_path / "full")
    one = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(models.weights(tmp_path / "full")[one], models.weights(out)[one])


def test_the_four_bit_form_is_checked_and_its_library_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dequantized.settings(None) == dequantized.settings({"type": "nf4", "double": True})
    for wrong in ({"quant_type": "int4"}, {"bits": 3}):
        with pytest.raises(CourseError, match="the 4-bit form was given as"):
            dequantized.settings(wrong)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(CourseError, match="needs bitsandbytes"):
        dequantized.require_library()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_weight_is_proved_and_a_forgotten_one_is_found(dtype: str, tmp_path: Path) -> None:
    """What parity cannot see in 16 bits: one matrix without its change, or every change a tenth too small."""
    from safetensors.torch import load_file, save_file

    base = models.make_base(tmp_path / "base", "qwen3")
    adapter = models.make_adapter(base, tmp_path / "adapter")
    merging.merge_adapter(base, adapter, tmp_path / "out", dtype=dtype, progress=False)
    proof = merging.prove(base, adapter, tmp_path / "out")
    assert proof.changed == 14 and not proof.left_out and str(proof.weights) in str(proof)
    file = tmp_path / "out/model.safetensors"
    right, before = load_file(file), models.weights(base)
    name = "model.layers.1.self_attn.v_proj.weight"
    tenth = before[name].float() + 0.9 * (right[name].float() - before[name].float())
    for wrong in (before[name], tenth):
        save_file(right | {name: wrong.to(right[name].dtype)}, file, {"format": "pt"})
        with pytest.raises(CourseError, match=rf"{name} in .* is not what base and adapter make"):
            merging.prove(base, adapter, tmp_path / "out")
    norm = "model.norm.weight"
    save_file(right | {norm: right[norm] * 1.5}, file, {"format": "pt"})
    with pytest.raises(CourseError, match=norm):
        merging.prove(base, adapter, tmp_path / "out")
    save_file({key: one for key, one in right.items() if key != norm}, file, {"format": "pt"})
    with pytest.raises(CourseError, match=norm):
        merging.prove(base, adapter, tmp_path / "out")


def test_what_can_only_be_computed_whole_is_left_out_of_the_proof_and_told(tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base", "qwen3", tied=True)
    adapter = models.make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"], use_dora=True)
    merging.merge_adapter(base, adapter, tmp_path / "out", progress=False)
    proof = merging.prove(base, adapter, tmp_path / "out")
    assert proof.left_out == 1 and proof.changed >= 2 and "left out" in str(proof)
