"""training: the right weights in the right type, packing that keeps rows apart, logs without prompts."""

from __future__ import annotations

import copy
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


def test_logs_go_to_the_run_and_wandb_is_offline_without_a_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "WANDB_MODE",
        "WANDB_DIR",
        "WANDB_NAME",
        "WANDB_SILENT",
        "WANDB_CONSOLE",
        "WANDB_PROJECT",
        "TENSORBOARD_LOGGING_DIR",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    import os

    assert training.tracking(home / "logs", "demo") == ["tensorboard", "wandb"]
    assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_DIR"] == str(home / "logs")


def test_a_wandb_key_means_online_and_is_not_printed(home: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import os

    monkeypatch.setattr(os, "environ", {"WANDB_API_KEY": "k" * 40})
    training.tracking(home / "logs", "demo")
    assert os.environ["WANDB_MODE"] == "online" and "kkkk" not in capsys.readouterr().out


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
