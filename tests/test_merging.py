"""merging: the right base, the same logits, and never half a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nbutils import merging, paths
from nbutils.errors import CourseError


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(paths.TINY_MODEL)}))
    return folder


def test_a_quantised_base_is_refused(tmp_path: Path, adapter: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    with pytest.raises(CourseError, match="is a quantised model"):
        merging.check_base(str(tmp_path), adapter)


def test_another_base_is_refused(adapter: Path) -> None:
    merging.check_base(str(paths.TINY_MODEL), adapter)
    with pytest.raises(CourseError, match="was trained on"):
        merging.check_base("Qwen/Qwen2.5-7B-Instruct", adapter)


ADAPTER = [torch.linspace(-3, 3, 60).reshape(2, 30)]
BASE = [ADAPTER[0].flip(1)]


def test_parity_wants_the_adapter_and_not_the_base() -> None:
    assert merging.parity([ADAPTER[0] + 1e-5], ADAPTER, BASE, "float32").holds
    for wrong in (BASE, [ADAPTER[0] + 0.5]):
        result = merging.parity(wrong, ADAPTER, BASE, "float32")
        assert not result.holds
        with pytest.raises(CourseError, match="THE MERGE CHANGED THE MODEL"):
            merging.require_parity(result)


def test_a_merge_that_lost_the_tuning_is_caught_also_where_rounding_is_coarse() -> None:
    base = [ADAPTER[0] + 0.02]
    assert not merging.parity(base, ADAPTER, base, "bfloat16").holds


def test_an_untrained_adapter_is_no_proof() -> None:
    assert not merging.parity(ADAPTER, ADAPTER, ADAPTER, "float32").holds


def test_a_merged_adapter_gives_the_same_logits_after_saving_and_loading(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    prompts = [[5, 6, 7, 8], [40, 41]]
    base_logits = merging.logits(base, prompts)
    tuned = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    tuned_logits = merging.logits(tuned, prompts)
    with paths.whole_folder(tmp_path / "merged", {}) as folder:
        tuned.merge_and_unload().save_pretrained(folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    result = merging.parity(merging.logits(merged, prompts), tuned_logits, base_logits, "float32")
    assert result.holds, str(result)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    weight = torch.empty(1, dtype=torch.float32, device="meta").expand(2**55)
    with pytest.raises(CourseError, match="saving the merged model needs"):
        merging.require_room(tmp_path, type("Huge", (), {"parameters": lambda self: [weight]})())
