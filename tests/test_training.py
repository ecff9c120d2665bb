"""training: the right weights in the right type, packing that keeps rows apart, logs without prompts."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbutils import checkpoints, lessons, paths, platforms, training
from nbutils.errors import CourseError
from nbutils.platforms import drive
from nbutils.training import budget, keeping, weights

MARK = checkpoints.fingerprint(seed=1)


@pytest.fixture(scope="module")
def tiny():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32", attn_implementation="sdpa").eval()


def test_only_trainable_weights_are_put_back_into_float32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    assert weights.repair_precision(model) == 2
    assert {weight.dtype for weight in model[0].parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in model[1].parameters()} == {torch.float32}


def test_the_batches_of_a_lean_trainer_are_those_it_had(tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": [*range(5, 5 + size)], "labels": [-100, *range(6, 5 + size)]} for size in (7, 30, 3, 11, 16)]
    settings = SFTConfig(
        output_dir=str(tmp_path), max_length=32, packing=True, per_device_train_batch_size=2, use_cpu=True, bf16=False,
        dataloader_pin_memory=False, report_to="none", seed=1,
    )  # fmt: skip
    dataset = Dataset.from_list(rows)
    trainer = SFTTrainer(str(paths.TINY_MODEL), settings, train_dataset=dataset, peft_config=LoraConfig())
    before = [*trainer.get_train_dataloader()]
    training.make_lean(trainer, fused=False)
    after = [*trainer.get_train_dataloader()]
    assert isinstance(trainer.train_dataset[0]["input_ids"], numpy.ndarray)
    assert len(before) == len(after) > 1 and any((batch["labels"] == -100).any() for batch in after)
    for old, new in zip(before, after, strict=True):
        assert {*old} == {*new} and all(torch.equal(old[name], new[name]) for name in old if torch.is_tensor(old[name]))


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


def lesson_in(folder: Path, platform: str = "local", inputs: Path | None = None, earlier: tuple[Path, ...] = ()):  # type: ignore[no-untyped-def]
    """What training asks a lesson for."""
    folders = platforms.Folders(folder, folder / "scratch", folder / "runs", inputs, earlier=earlier)
    run = lessons.RunFolder(folder / "runs/demo")
    run.path.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        run=run,
        folders=folders,
        platform=platforms.Platform(platform, ""),
        started=0.0,
        scratch=folder / "scratch/demo",
    )


def keep_one(store: Path, step: int, mark: dict = MARK) -> None:
    folder = store.parent / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "x").write_text(str(step))
    store.mkdir(exist_ok=True)
    checkpoints.pack(folder, store, mark)
    shutil.rmtree(folder)


def test_resume_never_forgets_and_auto_continues(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path)
    keep_one(lesson.run.checkpoints, 7)
    (lesson.scratch / "trainer/checkpoint-99").mkdir(parents=True)  # left by a killed run: proves nothing
    found = training.resume_point(lesson, MARK, "auto")
    assert training.step_of(found) == 7 and not (lesson.scratch / "trainer/checkpoint-99").exists()
    assert training.resume_point(lesson, MARK, "never") is None
    assert training.resume_point(lesson, MARK, "auto") is None and training.step_of(None) == 0


def test_the_newest_is_found_in_scratch_in_keep_and_where_keep_was_before(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path, earlier=(tmp_path / "old",))
    keep_one(tmp_path / "old/demo/checkpoints", 5)
    assert training.step_of(training.resume_point(lesson, MARK, "auto")) == 5
    keep_one(lesson.run.checkpoints, 7)
    assert training.step_of(training.resume_point(lesson, MARK, "auto")) == 7
    keep_one(lesson.scratch / "sealed", 9)
    found = training.resume_point(lesson, MARK, "auto")
    assert found is not None and (found / "x").read_text() == "9"
    assert [one.step for one in checkpoints.look(lesson.scratch / "sealed")[0]] == [9]


def resumed_at(lesson: Any, resume: str = "auto") -> int:
    return training.step_of(training.resume_point(lesson, MARK, resume))


def test_a_chosen_checkpoint_is_gone_on_from_and_later_ones_are_set_aside(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    lesson = lesson_in(tmp_path)
    for step in (6, 8, 10):
        keep_one(lesson.run.checkpoints, step)
    keep_one(lesson.scratch / "sealed", 12)  # was on its way to keep
    with pytest.raises(CourseError, match="no whole checkpoint of step 7") as caught:
        resumed_at(lesson, "7")
    assert caught.value.allowed.endswith("6, 8, 10, 12") and "verify" in caught.value.todo
    assert resumed_at(lesson, "8") == 8
    [aside] = lesson.run.checkpoints.glob("after-8-*")
    assert {place.name for place in aside.iterdir()} == {
        f"checkpoint-{n}.{end}" for n in (10, 12) for end in ("tar", "json")
    }
    assert "checkpoint-10, checkpoint-12" in capsys.readouterr().out
    assert resumed_at(lesson) == 8, "before anything new is saved"
    way_home = training.carrier(lesson, MARK, 3)
    new = tmp_path / "checkpoint-10"
    new.mkdir()
    (new / "x").write_text("of the new branch")
    way_home.take(new)
    training.bring_home(lesson, way_home)
    way_home.close()
    found = training.resume_point(lesson, MARK, "auto")
    assert found is not None and (found / "x").read_text() == "of the new branch"


def test_later_checkpoints_elsewhere_do_not_win_over_the_chosen_one(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path, "kaggle", inputs=tmp_path / "input", earlier=(tmp_path / "old",))
    for step in (20, 40):
        keep_one(tmp_path / "input/qlora/runs/demo/checkpoints", step)
    keep_one(tmp_path / "old/demo/checkpoints", 60)
    assert resumed_at(lesson) == 60 and resumed_at(lesson, "20") == 20
    shutil.rmtree(lesson.scratch)  # a new machine
    assert resumed_at(lesson) == 20 and (tmp_path / "old/demo/checkpoints/checkpoint-60.tar").exists()


def test_a_chosen_checkpoint_that_is_damaged_or_of_another_training_is_refused(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path)
    keep_one(lesson.run.checkpoints, 6)
    keep_one(lesson.run.checkpoints, 8)
    (lesson.run.checkpoints / "checkpoint-6.tar").write_bytes(b"incomplete")
    with pytest.raises(CourseError, match="no whole checkpoint of step 6"):
        resumed_at(lesson, "6")
    with pytest.raises(CourseError, match="another training"):
        training.resume_point(lesson, {"other": 1}, "8")
    assert resumed_at(lesson) == 8


@pytest.mark.parametrize("layout", ["notebooks/me/qlora", "qlora", "datasets/me/qlora"])
def test_a_chained_run_continues_from_the_attached_output_of_the_last(tmp_path: Path, layout: str) -> None:
    attached = tmp_path / "input" / layout / "runs/demo/checkpoints"
    keep_one(attached, 20)
    keep_one(attached, 40)
    (attached / "checkpoint-40.tar").write_bytes(b"incomplete")
    keep_one(tmp_path / "input/datasets/me/another/runs/other/checkpoints", 90)
    for place in attached.iterdir():
        place.chmod(0o444)
    attached.chmod(0o555)
    lesson = lesson_in(tmp_path, "kaggle", inputs=tmp_path / "input")
    assert training.step_of(training.resume_point(lesson, MARK, "auto")) == 20
    way_home = training.carrier(lesson, MARK, 3)
    kept = way_home.finish(patience=10, bar=False)
    way_home.close()
    assert kept is not None and kept.archive.parent == lesson.run.checkpoints  # so that the chain can go on from here


def test_a_run_that_came_home_leaves_nothing_in_scratch_and_deleting_it_begins_anew(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path)
    keep_one(lesson.scratch / "sealed", 9)
    way_home = training.carrier(lesson, MARK, 3)
    training.bring_home(lesson, way_home)
    way_home.close()
    assert training.step_of(training.resume_point(lesson, MARK, "auto")) == 9
    training.bring_home(lesson, training.carrier(lesson, MARK, 3))
    shutil.rmtree(lesson.run.path)
    lesson.run.path.mkdir()
    assert training.resume_point(lesson, MARK, "auto") is None


class FakeTime:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def watch(tmp_path: Path, platform: str, max_hours: float, sync_seconds: float = 0.0):  # type: ignore[no-untyped-def]
    """A time budget on a hand-turned clock, and what turns it."""
    now, lesson = FakeTime(), lesson_in(tmp_path, platform)
    clock = budget.Clock(lesson, max_hours, now)
    callback = training.time_budget(lesson, SimpleNamespace(seconds=sync_seconds), max_hours, clock)  # type: ignore[arg-type]
    return callback, now


def hours_until_it_ends(callback, now: FakeTime, step_seconds: float, save_seconds: float = 0.0) -> float:  # type: ignore[no-untyped-def]
    state, control = SimpleNamespace(global_step=0, max_steps=10**6), SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(None, state, control)
    while not control.should_training_stop and now.seconds < 100 * 3600:
        now.seconds += step_seconds
        state.global_step += 1
        callback.on_step_end(None, state, control)
        if save_seconds and state.global_step % 10 == 0:
            now.seconds += save_seconds
            callback.on_save(None, state, control)
    budget.stop_listening()
    assert now.seconds >= 100 * 3600 or (control.should_save and control.should_log)
    return now.seconds / 3600


@pytest.mark.parametrize("platform", ["colab", "kaggle"])
def test_the_run_ends_before_the_platforms_limit_with_room_for_the_way_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, platform: str
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(platforms, "session_seconds", lambda platform: 2 * 3600.0)  # two hours gone before the lesson
    callback, now = watch(tmp_path, platform, 0.0, sync_seconds=600)
    ended = hours_until_it_ends(callback, now, step_seconds=30, save_seconds=20)
    left = 10.0 - ended
    assert (600 + 20 + 30 + 300) / 3600 < left < 0.4
    said = capsys.readouterr().out
    assert f"the 12 h of {platform}" in said and ("Add Input" in said if platform == "kaggle" else "run all" in said)


def test_max_hours_overrides_the_limit_and_counts_from_the_lesson(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(platforms, "session_seconds", lambda platform: 11 * 3600.0)
    callback, now = watch(tmp_path, "colab", 2.0)
    assert 1.7 < hours_until_it_ends(callback, now, step_seconds=10) < 2.0 - 300 / 3600


def test_a_slow_step_ends_the_run_earlier(tmp_path: Path) -> None:
    callback, now = watch(tmp_path, "local", 1.0)
    quick = hours_until_it_ends(callback, now, step_seconds=5)
    callback, now = watch(tmp_path, "local", 1.0)
    assert hours_until_it_ends(callback, now, step_seconds=300) <= quick - 300 / 3600


def test_where_nobody_counts_the_hours_the_run_goes_on(tmp_path: Path) -> None:
    callback, now = watch(tmp_path, "local", 0.0)
    assert hours_until_it_ends(callback, now, step_seconds=600) >= 100


def test_sigterm_saves_and_ends_and_leaves_the_old_handler(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    before = signal.getsignal(signal.SIGTERM)
    callback, _ = watch(tmp_path, "local", 0.0)
    state, control = SimpleNamespace(global_step=3, max_steps=9), SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(None, state, control)
    os.kill(os.getpid(), signal.SIGTERM)
    callback.on_step_end(None, state, control)
    assert control.should_save and control.should_training_stop and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    budget.stop_listening()
    assert signal.getsignal(signal.SIGTERM) == before
    assert "SIGTERM" in capsys.readouterr().out


def test_a_saving_step_is_logged_too(tmp_path: Path) -> None:
    callback = training.keep_checkpoints(SimpleNamespace(messages=lambda: []))  # type: ignore[arg-type]
    state = SimpleNamespace(global_step=3, max_steps=9)
    for saving in (True, False):
        control = SimpleNamespace(should_log=False, should_save=saving)
        callback.on_step_end(None, state, control)
        assert control.should_log is saving


def test_a_drive_that_dropped_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    mounted = [True]
    monkeypatch.setattr(drive, "is_mount", lambda place, *_: place == tmp_path and bool(mounted))
    check = keeping.still_mounted(tmp_path / "MyDrive/runs")
    check()
    mounted.clear()
    with pytest.raises(OSError, match="is not mounted any more"):
        check()


def test_measured_counts_only_what_this_session_trained() -> None:
    history = [{"step": 5, "loss": 2.0, "num_tokens": 900.0}, {"step": 10, "loss": 1.0, "num_tokens": 100.0}]
    args = SimpleNamespace(world_size=2, train_batch_size=3, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(state=SimpleNamespace(log_history=history, global_step=10, max_steps=12), args=args)
    numbers = training.measured(trainer, seconds=2.0, first_step=5)  # type: ignore[arg-type]
    assert (numbers["processes"], numbers["batch"]) == (2, 24)
    assert numbers["tokens_per_second"] == 50.0 and numbers["final_loss"] == 1.0 and numbers["resumed_from_step"] == 5
    again = training.measured(trainer, 1.0, first_step=10)  # type: ignore[arg-type]
    assert {again[name] for name in ("tokens_per_second", "peak_memory_gib", "processes", "batch")} == {None}


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    callback = training.keep_checkpoints(SimpleNamespace(messages=lambda: []))  # type: ignore[arg-type]
    callback.on_train_begin(None, None, None)
    with pytest.raises(CourseError, match="mix two trainings"):
        callback.on_train_begin(None, None, None)
    with pytest.raises(CourseError, match="mix two trainings"):
        training.steps_left(SimpleNamespace(), tmp_path / "checkpoint-5")  # type: ignore[arg-type]


def test_the_mark_of_a_model_is_its_content_and_not_its_place(tmp_path: Path) -> None:
    marks = []
    for name, content in (("one/m", b"w"), ("other/m", b"w"), ("third/m", b"v")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        marks.append(training.model_mark(SimpleNamespace(model=str(folder), model_name=str(folder))))  # type: ignore[arg-type]
    assert marks[0] == marks[1] and marks[0]["name"] == "m" and marks[0] != marks[2]


def test_other_weights_at_the_same_place_are_another_model(tmp_path: Path) -> None:
    size, weights = 3 * paths.CHUNK, tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")

    def mark(changed_at: int = 0, changed: bytes = b"") -> str:
        content = bytearray(size)
        content[changed_at : changed_at + len(changed)] = changed
        weights.write_bytes(content)
        lesson: Any = SimpleNamespace(model=str(tmp_path), model_name="m")
        return training.model_mark(lesson)["content"]

    layer = bytes([1]) * (size // 40)  # one matrix of many, wherever it is
    places = range(0, size - len(layer), size // 25)
    marks = {mark(), mark(size - 1, b"t"), *(mark(at, layer) for at in places)}
    assert len(marks) == len(places) + 2 and mark() in marks


def test_lesson_03_records_what_it_trained_on() -> None:
    lesson = (Path(__file__).parents[1] / "notebooks/03_qlora.py").read_text(encoding="utf-8")
    recorded = lesson[lesson.index("lesson.finish(") :]
    assert all(f" {fact}=" in recorded for fact in ("form", "examples", "trained_tokens", "rows_left_out"))


def test_a_machine_older_than_its_limit_has_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "session_seconds", lambda platform: 13 * 3600.0)
    callback, now = watch(tmp_path, "colab", 0.0)
    assert hours_until_it_ends(callback, now, step_seconds=600) >= 100


def test_a_second_training_in_the_same_run_is_refused(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path)
    training.resume_point(lesson, MARK, "auto")
    training.resume_point(lesson, MARK, "auto")  # the same kernel may start again
    alone = "from pathlib import Path; from nbutils.training.resuming import _train_alone"
    other = f"{alone}; _train_alone(Path({str(lesson.scratch)!r}))"
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
    args = SimpleNamespace(
        max_steps=max_steps, train_batch_size=2, world_size=1, gradient_accumulation_steps=2, num_train_epochs=1.5
    )
    return SimpleNamespace(args=args, train_dataset=range(21)), folder  # 11 batches, 6 steps a pass, 9 steps


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


def test_a_base_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    training.require_unquantised(str(paths.TINY_MODEL))
    config = json.loads((paths.TINY_MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CourseError, match=r"quantised already .*awq"):
        training.require_unquantised(str(tmp_path))
