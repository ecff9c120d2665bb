"""training.validation: the loss on held-back rows while it trains, the best step kept, through saves and new starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ladder import STEPS, build, rows
from torch.nn import functional

from nbutils import training
from nbutils.training import validation
from nbutils.training.weights import trained_weights


def trainer_with(
    folder: Path, losses: Sequence[float] = (), monkeypatch: pytest.MonkeyPatch | None = None, **settings: Any
) -> tuple[Any, Any]:
    """A real trainer that saves every second step, and its validation; `losses` replaces what it would measure."""
    keep = {name: settings.pop(name) for name in ("keep_best", "patience") if name in settings}
    held_back = settings.pop("held_back", rows(count=5))
    trainer = build(folder, save_steps=2, **settings)
    callback = training.validation_loss(held_back, every=2, **keep)
    trainer.add_callback(callback)
    if monkeypatch:
        script = iter(losses)
        monkeypatch.setattr(validation, "loss_on", lambda *_: next(script))
    assert validation.of(trainer) is callback
    return trainer, callback


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_loss_is_the_mean_over_all_trained_tokens_whatever_the_batches(tmp_path: Path) -> None:
    held_back = rows(sizes=(9, 7), count=5)
    labels = [[-100] * (3 + number) + row["labels"][3 + number :] for number, row in enumerate(held_back)]
    held_back = held_back.remove_columns("labels").add_column("labels", labels)
    trainer, _ = trainer_with(tmp_path, per_device_train_batch_size=1)
    total, count = 0.0, 0
    trainer.model.eval()
    for row in held_back:
        start = 0
        for size in row["seq_lengths"]:  # the examples of a packed row do not see each other
            ids = torch.tensor([row["input_ids"][start : start + size]])
            wanted = torch.tensor(row["labels"][start : start + size])[1:]
            logits = trainer.model(input_ids=ids).logits[0, :-1]
            total += float(functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100).detach())
            count += int((wanted != -100).sum())
            start += size
    first = sum(int(row["labels"][0] != -100) for row in held_back)
    assert not first, "the first label of a row has no loss, and would be counted"
    counted = sum(label != -100 for row in held_back for label in row["labels"])
    assert validation.loss_on(trainer, held_back) == pytest.approx(total / counted, rel=1e-4)
    assert trainer.model.training is False


def test_it_is_measured_at_the_start_at_each_save_and_at_the_end_and_changes_nothing(tmp_path: Path) -> None:
    plain = build(tmp_path / "plain", save_steps=2)
    plain.train()
    trainer, callback = trainer_with(tmp_path / "with", keep_best=False)
    trainer.train()
    assert [step for step, _ in training.validation_history(trainer.state.log_history)] == [0, 2, 4, 6, STEPS]
    assert training.loss_history(trainer.state.log_history) == training.loss_history(plain.state.log_history)
    assert same(trained_weights(trainer.model), trained_weights(plain.model))
    assert callback.restore_best() is None


def test_the_weights_of_the_best_step_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, callback = trainer_with(tmp_path, (5.0, 4.0, 3.0, 3.5, 3.6), monkeypatch)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    trainer.add_callback(_recorder(seen))
    trainer.train()
    assert not same(trained_weights(trainer.model), seen[4])
    assert callback.restore_best() == (4, 3.0)
    assert same(trained_weights(trainer.model), seen[4])
    found = validation.facts(trainer.state.log_history)
    assert found == {"validation_loss": {"first": 5.0, "best": 3.0, "last": 3.6}, "best_step": 4}


def _recorder(seen: dict[int, dict[str, torch.Tensor]]) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen[state.global_step] = trained_weights(model)

    return Recorder()


def test_a_continued_run_knows_the_best_step_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = trainer_with(tmp_path, (5.0, 3.0, 4.0), monkeypatch, max_steps=4)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    first.add_callback(_recorder(seen))
    first.train()
    place = tmp_path / "trainer/checkpoint-4"
    assert (place / validation.BEST).exists()
    again, callback = trainer_with(tmp_path, (4.5, 4.6), monkeypatch, max_steps=7)
    again.train(resume_from_checkpoint=str(place))
    assert callback.restore_best() == (2, 3.0)
    assert same(trained_weights(again.model), seen[2])


def test_it_ends_early_when_validation_has_risen_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, callback = trainer_with(tmp_path, (5.0, 3.0, 3.1, 3.2), monkeypatch, patience=2, max_steps=20)
    trainer.train()
    assert trainer.state.global_step == 6
    assert callback.restore_best() == (2, 3.0)
    assert training.measured(trainer, 1.0, 0)["planned_steps"] == 6
    assert training.steps_left(trainer, tmp_path / "trainer/checkpoint-6") == 0


def test_a_loss_that_is_no_number_ends_it_with_the_last_good_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, callback = trainer_with(tmp_path, (5.0, 4.0, math.nan), monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 4
    assert not (tmp_path / "trainer/checkpoint-4").exists(), "spoilt weights are not kept"
    assert callback.restore_best() == (2, 4.0)
    assert "[WARN]" in capsys.readouterr().out
    assert validation.facts(trainer.state.log_history)["validation_loss"]["last"] is None


def test_without_held_back_rows_it_trains_as_ever(tmp_path: Path) -> None:
    trainer, callback = trainer_with(tmp_path, held_back=rows(count=0))
    trainer.train()
    assert trainer.state.global_step == STEPS and callback.restore_best() is None
    assert validation.facts(trainer.state.log_history) == {"validation_loss": None, "best_step": None}


def test_a_run_that_stopped_between_two_validations_is_validated_before_the_best_is_taken(tmp_path: Path) -> None:
    trainer, callback = trainer_with(tmp_path, max_steps=7)
    trainer.add_callback(_stop_at(5))
    trainer.train()
    saved = [step for step, _ in training.validation_history(trainer.state.log_history)]
    assert saved == [0, 2, 4]
    assert callback.restore_best() is not None
    assert training.validation_history(trainer.state.log_history)[-1][0] == 5


def _stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == step

    return Stop()


def test_rows_are_grouped_by_tokens() -> None:
    assert validation.in_batches([5, 5, 5, 20, 1], 10) == [[0, 1], [2], [3], [4]]
    assert validation.in_batches([], 10) == [[]]
