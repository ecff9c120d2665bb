"""training: the right weights in the right type, packing that keeps rows apart, logs without prompts."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nbutils import checkpoints, paths, platforms, training
from nbutils.errors import CourseError

MARK = checkpoints.fingerprint(seed=1)


@pytest.fixture(scope="module")
def tiny():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32", attn_implementation="sdpa").eval()


def test_only_trainable_weights_are_put_back_into_float32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    assert training.repair_precision(model) == 2
    assert {weight.dtype for weight in model[0].parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in model[1].parameters()} == {torch.float32}


def test_the_photograph_sees_one_changed_weight_and_two_swapped_ones() -> None:
    model = nn.Linear(40, 40)
    model.bias.requires_grad_(False)
    before = training.photograph(model)
    assert training.compare(before, model) == training.Moved(0, 1, 0, 1)
    with torch.no_grad():
        model.weight[3, 3] += 1e-3
    assert training.compare(before, model) == training.Moved(1, 1, 0, 1)
    swapped = copy.deepcopy(model)
    before = training.photograph(swapped)
    with torch.no_grad():
        swapped.bias[[0, 1]] = swapped.bias[[1, 0]]
    assert training.compare(before, swapped).base == 1


def test_packed_rows_do_not_see_each_other(tiny) -> None:  # type: ignore[no-untyped-def]
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [[5, 6, 7, 8, 9], [20, 21, 22], [30, 31, 32, 33]]
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    packed = {"input_ids": [*chain(*rows)], "labels": [*chain(*rows)], "seq_lengths": [len(row) for row in rows]}
    batch = collator([packed])
    batch.pop("labels")
    with torch.inference_mode():
        together = tiny(**batch, use_cache=False).logits[0]
        alone = torch.cat([tiny(input_ids=torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_an_unknown_resume_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="RESUME is 'yes'"):
        training.resume_point(tmp_path / "keep", tmp_path / "scratch", MARK, "yes")


def test_resume_never_forgets_and_auto_continues(tmp_path: Path) -> None:
    keep, scratch = tmp_path / "keep", tmp_path / "scratch"
    saved = scratch / "checkpoint-7"
    saved.mkdir(parents=True)
    (saved / "x").write_text("x")
    checkpoints.publish(saved, keep, MARK)
    (scratch / "checkpoint-99").mkdir()  # left by a killed run: proves nothing
    found = training.resume_point(keep, scratch, MARK, "auto")
    assert training.step_of(found) == 7 and not (scratch / "checkpoint-99").exists()
    assert training.resume_point(keep, scratch, MARK, "never") is None
    assert training.resume_point(keep, scratch, MARK, "auto") is None and training.step_of(None) == 0


def test_the_time_budget_saves_and_stops(capsys) -> None:  # type: ignore[no-untyped-def]
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=3)
    local = platforms.Platform("local", "")
    training.time_budget(0.0, local).on_step_end(None, state, control)
    assert control.should_training_stop is False
    training.time_budget(1e-9, local).on_step_end(None, state, control)
    assert control.should_save and control.should_training_stop
    assert "step 3" in capsys.readouterr().out


def test_measured_counts_only_what_this_session_trained() -> None:
    history = [{"step": 5, "loss": 2.0, "num_tokens": 900.0}, {"step": 10, "loss": 1.0, "num_tokens": 100.0}]
    trainer = SimpleNamespace(state=SimpleNamespace(log_history=history, global_step=10))
    numbers = training.measured(trainer, seconds=2.0, first_step=5)  # type: ignore[arg-type]
    assert numbers["tokens_per_second"] == 50.0 and numbers["final_loss"] == 1.0 and numbers["resumed_from_step"] == 5
    assert training.measured(trainer, 1.0, first_step=10)["tokens_per_second"] is None  # type: ignore[arg-type]


def test_a_second_training_in_the_same_run_is_refused(tmp_path: Path) -> None:
    scratch = tmp_path / "demo/trainer"
    training.resume_point(tmp_path / "keep", scratch, MARK, "auto")
    training.resume_point(tmp_path / "keep", scratch, MARK, "auto")  # the same kernel may start again
    other = f"from pathlib import Path; from nbutils import training; training._train_alone(Path({str(scratch)!r}))"
    ran = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert ran.returncode != 0 and "another process is training in demo" in ran.stderr


def test_checkpoints_that_do_not_fit_stop_the_training_before_it_begins(tmp_path: Path) -> None:
    huge = torch.empty(1, device="meta").expand(2**50).requires_grad_()
    trainer = SimpleNamespace(model=SimpleNamespace(parameters=lambda: [huge]), args=SimpleNamespace(output_dir="."))
    with pytest.raises(CourseError, match="writing checkpoints needs"):
        training.require_room(trainer, tmp_path, 2)  # type: ignore[arg-type]


def trainer_at(folder: Path, step: int, planned: int, max_steps: int) -> tuple[SimpleNamespace, Path]:
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": planned}))
    return SimpleNamespace(args=SimpleNamespace(max_steps=max_steps)), folder


@pytest.mark.parametrize(
    ("step", "planned", "max_steps", "left"), [(20, 20, 20, 0), (20, 20, 25, 5), (20, 20, 10, 0), (7, 9, -1, 2)]
)
def test_what_is_left_to_train_is_counted(tmp_path: Path, step: int, planned: int, max_steps: int, left: int) -> None:
    trainer, checkpoint = trainer_at(tmp_path / "checkpoint-x", step, planned, max_steps)
    assert training.steps_left(trainer, checkpoint) == left  # type: ignore[arg-type]
    assert training.steps_left(trainer, None) > 0  # type: ignore[arg-type]


def test_quantised_weights_are_counted_by_kind() -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, quantization_config=four_bit, dtype=torch.float32)
    kinds = training.weight_kinds(model)
    assert kinds["nf4, double"] == 7 * model.config.num_hidden_layers and set(kinds) == {"nf4, double", "float32"}


def test_equal_adapters_have_equal_checksums() -> None:
    one = nn.Linear(4, 4)
    other = copy.deepcopy(one)
    assert training.adapter_checksum(one) == training.adapter_checksum(other)
    with torch.no_grad():
        other.weight[0, 0] += 1
    assert training.adapter_checksum(one) != training.adapter_checksum(other)
