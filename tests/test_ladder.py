"""The ladder: a training that runs out of memory ends with the steps, rows, rates and weights of one that did not."""

from __future__ import annotations

import gc
import json
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from nbutils import hardware, lessons, paths, platforms, training
from nbutils.errors import CourseError
from nbutils.training import budget, ladder, memory, rungs
from nbutils.training.rungs import Setting

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB"
FIRST = 1000  # the first token of row n is FIRST + n, so that a batch tells which rows it has
ROWS, STEPS = 21, 7  # 3 steps a pass with 8 rows each, the last of a pass with 5


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread for so small a model; and the garbage collector, called often here, spares what is there already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def rows(sizes: tuple[int, ...] = (10, 8), count: int = ROWS) -> Dataset:
    """Packed rows of examples of these sizes, all different."""
    tokens = [[FIRST + n, *((n * 31 + k * k) % 900 + 10 for k in range(sum(sizes) - 1))] for n in range(count)]
    return Dataset.from_list([{"input_ids": row, "labels": row, "seq_lengths": [*sizes]} for row in tokens])


def lesson_in(folder: Path, shorten: bool = False, card: hardware.Card | None = None) -> Any:
    (folder / "runs/demo").mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        run=lessons.RunFolder(folder / "runs/demo"), card=card, started=0.0,
        platform=platforms.Platform("local", ""), profile=SimpleNamespace(train=SimpleNamespace(shorten=shorten)),
    )  # fmt: skip


class Diary(TrainerCallback):
    """Which rows and which rate each finished step had."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.steps: dict[int, tuple[list[int], float]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen = []

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        assert state.global_step not in self.steps  # no step is done twice
        self.steps[state.global_step] = (self.seen, lr_scheduler.get_last_lr()[0])


def build(folder: Path, dataset: Dataset | None = None, **settings: Any) -> Any:
    """A real trainer on the first layer of the tiny model, with a diary."""
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32", num_hidden_layers=1)
    defaults: dict[str, Any] = {
        "max_length": 256, "packing": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 2e-3, "lr_scheduler_type": "cosine", "gradient_checkpointing": False,
        "use_cpu": True, "bf16": False, "dataloader_pin_memory": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 3, "save_steps": 100, "save_total_limit": 1, "seed": 1, "data_seed": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    torch.manual_seed(0)
    trainer: Any = SFTTrainer(
        model=model, args=SFTConfig(output_dir=str(folder / "trainer"), **defaults | settings),
        train_dataset=dataset or rows(), processing_class=AutoTokenizer.from_pretrained(paths.TINY_MODEL),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    training.make_lean(trainer, fused=False)
    trainer.diary = Diary()
    trainer.add_callback(trainer.diary)
    loss = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **words: Any) -> Any:
        tokens = inputs["input_ids"].flatten().tolist()
        trainer.diary.seen += [token - FIRST for token in tokens if FIRST <= token < FIRST + 900]
        return loss(model, inputs, **words)

    trainer.compute_loss = compute_loss
    return trainer


def run_out(trainer: Any, *calls: int) -> None:
    """Raise after these backward passes (counted from 1, over all attempts): their gradients are left behind."""
    inner, count = trainer.accelerator.backward, iter(range(1, 10**6))

    def backward(loss: Any, **words: Any) -> None:
        inner(loss, **words)
        if next(count) in calls:
            raise torch.OutOfMemoryError(OOM)

    trainer.accelerator.backward = backward


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in trainer.model.named_parameters() if one.requires_grad}


def told(trainer: Any) -> list[tuple[int, float, float]]:
    """Step, learning rate and tokens of everything logged while it trained."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["step"], entry["learning_rate"], entry["num_tokens"]) for entry in history]


def assert_same(trainer: Any, whole: Any) -> None:
    """The same steps, rows in the same order, rates, tokens, losses and weights."""
    assert trainer.state.global_step == whole.state.global_step == trainer.state.max_steps
    assert trainer.diary.steps == whole.diary.steps
    assert told(trainer) == told(whole)
    losses = [training.loss_history(one.state.log_history) for one in (trainer, whole)]
    assert losses[0] == [(step, pytest.approx(loss, abs=1e-5)) for step, loss in losses[1]]
    assert trainer.state.total_flos == whole.state.total_flos
    torch.testing.assert_close(weights(trainer), weights(whole), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The training nothing happens to; its checkpoint of step 3 is kept."""
    trainer = build(tmp_path_factory.mktemp("whole"), save_steps=3, save_total_limit=2)
    trainer.train()
    assert [len(seen) for seen, _ in trainer.diary.steps.values()] == [8, 8, 5, 8, 8, 5, 8]
    return trainer


def batch_of(trainer: Any) -> tuple[int, int]:
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("calls", "reached", "lines"),
    [
        ((1,), (2, 4), ["at step 1: micro-batch 4 -> 2, accumulation 2 -> 4; the batch stays 8; going on from step 0"]),
        ((4,), (2, 4), ["at step 2: micro-batch 4 -> 2, accumulation 2 -> 4; the batch stays 8; going on from step 1"]),
        ((7, 8), (1, 8), ["at step 4: micro-batch 4 -> 2", "at step 4: micro-batch 2 -> 1, accumulation 4 -> 8"]),
        ((6, 15), (1, 8), ["at step 3: micro-batch 4 -> 2", "at step 5: micro-batch 2 -> 1"]),
    ],
)
def test_a_training_goes_on_from_its_last_step(
    tmp_path: Path, capsys: Any, whole: Any, calls: tuple[int, ...], reached: tuple[int, int], lines: list[str]
) -> None:
    trainer, lesson = build(tmp_path), lesson_in(tmp_path)
    run_out(trainer, *calls)
    ladder.train(trainer, lesson, None)
    assert_same(trainer, whole)
    assert batch_of(trainer) == reached and trainer._train_batch_size == reached[0]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("out of memory")]
    assert len(said) == len(lines) and all(part in line for part, line in zip(lines, said, strict=True))
    recorded = memory.oom_rungs(lesson)
    assert [rung["step"] for rung in recorded] == [int(line.split()[5].rstrip(":")) for line in said]
    assert recorded[-1]["to"]["micro_batch"] == reached[0] and recorded[0]["from"]["micro_batch"] == 4
    assert json.dumps(recorded)


def break_first_update(monkeypatch: pytest.MonkeyPatch, moves: bool = True) -> list[bool]:
    """Run out of memory in the optimizer's first update, before or after it moved weights."""
    inner, broken = torch.optim.AdamW.step, []

    def step(self: Any, *words: Any) -> Any:
        if not broken:
            broken.append(True)
            if moves:
                inner(self, *words)  # all of it moved: worse than half
            raise torch.OutOfMemoryError(OOM)
        return inner(self, *words)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return broken


@pytest.mark.parametrize("moves", [False, True], ids=["before", "after it moved a weight"])
def test_the_first_update_of_the_optimizer_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, moves: bool
) -> None:
    trainer, broken = build(tmp_path), break_first_update(monkeypatch, moves)
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert broken
    assert_same(trainer, whole)


def break_update(trainer: Any, at: int) -> None:
    """An out-of-memory in the middle of an update, after the weights moved."""

    class Break(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at and not getattr(self, "done", False):
                self.done = True
                raise torch.OutOfMemoryError(OOM)

    trainer.add_callback(Break())


def test_a_later_update_that_broke_off_is_not_trained_on(tmp_path: Path) -> None:
    trainer, lesson = build(tmp_path), lesson_in(tmp_path)
    break_update(trainer, 3)
    with pytest.raises(CourseError, match=r"update of step 4: some weights have moved") as error:
        ladder.train(trainer, lesson, None)
    assert "newest checkpoint" in str(error.value)
    assert memory.oom_rungs(lesson)[0]["to"]["micro_batch"] == 2  # so that the next session fits


def test_nothing_of_a_broken_step_is_held_when_it_is_saved(tmp_path: Path) -> None:
    trainer, held = build(tmp_path, max_steps=3), []
    inner, save, broken = trainer.accelerator.backward, trainer._save_checkpoint, []

    def backward(loss: Any, **words: Any) -> None:
        inner(loss, **words)
        if trainer.state.global_step == 1 and not broken:
            broken.append(weakref.ref(loss))
            raise torch.OutOfMemoryError(OOM)

    def watched_save(*words: Any, **named: Any) -> None:
        held.extend(reference() for reference in broken)
        held.extend(one.grad for one in trainer.model.parameters())
        save(*words, **named)

    trainer.accelerator.backward, trainer._save_checkpoint = backward, watched_save
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert broken and len(held) > 1 and all(one is None for one in held)


def test_memory_that_ran_out_while_saving_repeats_no_step(tmp_path: Path, whole: Any) -> None:
    trainer, broken = build(tmp_path, save_steps=3), []
    inner = trainer._save_optimizer_and_scheduler

    def save(folder: str) -> None:
        if not broken:
            broken.append(True)
            raise torch.OutOfMemoryError(OOM)
        inner(folder)

    trainer._save_optimizer_and_scheduler = save
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert broken and batch_of(trainer) == (2, 4)
    assert_same(trainer, whole)


def test_a_continued_training_that_runs_out_at_once_continues_from_the_same_checkpoint(
    tmp_path: Path, whole: Any, capsys: Any
) -> None:
    trainer = build(tmp_path)
    trainer.diary.steps = {step: seen for step, seen in whole.diary.steps.items() if step <= 6}
    run_out(trainer, 1)
    ladder.train(trainer, lesson_in(tmp_path), Path(whole.args.output_dir) / "checkpoint-6")
    assert "at step 7: micro-batch 4 -> 2, accumulation 2 -> 4; the batch stays 8; going on from step 6" in (
        capsys.readouterr().out
    )
    assert trainer.state.global_step == STEPS and trainer.diary.steps == whole.diary.steps
    torch.testing.assert_close(weights(trainer), weights(whole), rtol=0, atol=1e-6)


def test_an_error_before_the_first_step_does_not_lose_the_checkpoint(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path)
    inner, broken = trainer._load_from_checkpoint, []

    def load(*words: Any) -> None:
        if not broken:
            broken.append(True)
            raise torch.OutOfMemoryError(OOM)
        inner(*words)

    trainer._load_from_checkpoint = load
    ladder.train(trainer, lesson_in(tmp_path), Path(whole.args.output_dir) / "checkpoint-6")
    assert broken and list(trainer.diary.steps) == [7]
    torch.testing.assert_close(weights(trainer), weights(whole), rtol=0, atol=1e-6)


def test_the_callbacks_allow_the_ladder_and_nobody_else_to_begin_again(tmp_path: Path, whole: Any) -> None:
    trainer, lesson, taken = build(tmp_path, save_steps=2), lesson_in(tmp_path), []
    way_home: Any = SimpleNamespace(messages=lambda: [], take=lambda folder: taken.append(folder.name), seconds=1.0)
    before = signal.getsignal(signal.SIGTERM)
    trainer.add_callback(training.keep_checkpoints(way_home))
    trainer.add_callback(training.time_budget(lesson, way_home, 0.0))
    run_out(trainer, 5, 9)
    ladder.train(trainer, lesson, None)
    budget.stop_listening()
    assert signal.getsignal(signal.SIGTERM) == before
    assert trainer.diary.steps == whole.diary.steps
    assert taken == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-7"]
    with pytest.raises(CourseError, match="mix two trainings"):
        trainer.train()
    with pytest.raises(CourseError, match="mix two trainings"):
        ladder.train(trainer, lesson, None)
    budget.stop_listening()


def test_checkpointing_goes_on_when_one_row_is_too_much(tmp_path: Path, capsys: Any, whole: Any) -> None:
    trainer = build(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    run_out(trainer, 12)
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert "gradient checkpointing goes on" in capsys.readouterr().out
    assert trainer.args.gradient_checkpointing and trainer.model.base_model.model.model.layers[0].gradient_checkpointing
    assert_same(trainer, whole)


def test_offloading_is_made_anew_after_a_broken_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    from trl.models import activation_offloading

    made: list[Any] = []
    monkeypatch.setattr(
        activation_offloading, "get_act_offloading_ctx_manager",
        lambda model: made.append(contextlib.nullcontext()) or made[-1],
    )  # fmt: skip
    trainer = build(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2)
    trainer.args.gradient_checkpointing = True
    card = hardware.Card("Tesla T4", (7, 5), 14.56, 1)
    run_out(trainer, 2)
    ladder.train(trainer, lesson_in(tmp_path, card=card), None)
    assert trainer.args.activation_offloading and trainer.maybe_activation_offload_context is made[-1]
    assert rungs.setting_of(trainer).checkpointing == "offload"


def test_a_row_is_cut_and_an_example_across_the_cut_becomes_two() -> None:
    row = {"input_ids": [*range(10)], "labels": [-100, -100, *range(2, 10)], "seq_lengths": [3, 4, 3]}
    first, second = rungs.cut(row, 5)
    assert first == {"input_ids": [0, 1, 2, 3, 4], "labels": [-100, -100, 2, 3, 4], "seq_lengths": [3, 2]}
    assert second == {"input_ids": [4, 5, 6, 7, 8, 9], "labels": [-100, 5, 6, 7, 8, 9], "seq_lengths": [3, 3]}
    assert rungs.cut(row, 10) == [row] and [len(one["input_ids"]) for one in rungs.cut(row, 3)] == [3, 3, 4, 2]
    assert all(sum(one["seq_lengths"]) == len(one["input_ids"]) <= 5 for one in rungs.cut(row, 4))


@pytest.mark.parametrize("length", range(1, 11))
def test_no_label_is_lost_or_doubled_by_a_cut(length: int) -> None:
    row = {"input_ids": [*range(10)], "labels": [-100, 1, 2, -100, -100, 5, 6, -100, 8, 9], "seq_lengths": [3, 4, 3]}
    trained = [label for piece in rungs.cut(row, length) for label in piece["labels"] if label != -100]
    assert trained == [1, 2, 5, 6, 8, 9]
    for piece in rungs.cut(row, length):  # the first token of an example is predicted from nothing
        starts = [sum(piece["seq_lengths"][:at]) for at in range(len(piece["seq_lengths"]))]
        assert all(piece["labels"][start] == -100 for start in starts)


def test_collated_pieces_carry_the_labels_of_the_whole_rows(tmp_path: Path) -> None:
    labels = [-100] * 5 + [*range(15, 20)] + [-100] * 4 + [*range(24, 30)]
    row = {"input_ids": [*range(10, 30)], "labels": labels, "seq_lengths": [10, 10]}
    batch = rungs.Cutter(build(tmp_path).data_collator, 7)([row, row])
    trained = [label for piece in batch["pieces"] for label in piece["labels"].flatten().tolist() if label != -100]
    assert len(batch["pieces"]) == 6 and trained == [label for label in labels if label != -100] * 2
    assert trained == [label for label in batch["labels"].flatten().tolist() if label != -100]


@pytest.mark.parametrize("sizes", [(100, 100), (150, 50)], ids=["between examples", "inside one"])
def test_halved_rows_keep_steps_order_and_tokens(tmp_path: Path, capsys: Any, sizes: tuple[int, int]) -> None:
    words: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 3}
    words |= {"gradient_checkpointing": True, "logging_steps": 1}
    uncut = build(tmp_path / "uncut", rows(sizes, 7), **words)
    uncut.train()
    trainer = build(tmp_path / "cut", rows(sizes, 7), **words)
    run_out(trainer, 5)
    ladder.train(trainer, lesson_in(tmp_path, shorten=True), None)
    assert "length 256 -> 128" in capsys.readouterr().out and trainer.data_collator.length == 128
    assert trainer.diary.steps == uncut.diary.steps
    for (*one, tokens), (*other, tokens_uncut) in zip(told(trainer), told(uncut), strict=True):
        assert one == other and tokens_uncut <= tokens <= tokens_uncut + 7  # one is read twice at each cut in an answer
    if sizes == (100, 100):  # then the pieces are the examples, and nothing at all is lost
        assert_same(trainer, uncut)
    else:
        assert all(one.isfinite().all() for one in weights(trainer).values())


def test_where_nothing_is_left_the_learner_is_told_and_the_last_step_is_kept(tmp_path: Path) -> None:
    trainer, lesson, taken = build(tmp_path, per_device_train_batch_size=2), lesson_in(tmp_path), []
    way_home: Any = SimpleNamespace(messages=lambda: [], take=lambda folder: taken.append(folder.name))
    trainer.add_callback(training.keep_checkpoints(way_home))
    run_out(trainer, *range(6, 100))
    with pytest.raises(CourseError, match=r"out of memory at step 3 with micro-batch 1, .* checkpointing on") as error:
        ladder.train(trainer, lesson, None)
    assert "Tried: micro-batch 2 -> 1, accumulation 2 -> 4; gradient checkpointing goes on" in error.value.seen
    assert "smaller model" in error.value.todo and "train.shorten" in error.value.todo
    assert taken == ["checkpoint-2"] and trainer.state.global_step == 2
    with pytest.raises(CourseError, match="mix two trainings"):
        trainer.train()


@pytest.mark.parametrize("problem", [RuntimeError("shapes do not match"), ValueError("CUDA out of memory")])
def test_other_errors_are_not_touched(tmp_path: Path, problem: Exception) -> None:
    trainer, lesson = build(tmp_path), lesson_in(tmp_path)

    def broken(*_: Any, **__: Any) -> None:
        raise problem

    trainer.compute_loss = broken
    with pytest.raises(type(problem)) as caught:
        ladder.train(trainer, lesson, None)
    assert caught.value is problem and batch_of(trainer) == (4, 2) and memory.oom_rungs(lesson) == []


def test_one_of_several_processes_does_not_climb_alone(tmp_path: Path) -> None:
    def train(**_: Any) -> None:
        raise torch.OutOfMemoryError(OOM)

    args = SimpleNamespace(
        world_size=2, per_device_train_batch_size=4, gradient_accumulation_steps=1, gradient_checkpointing=False,
        max_length=256,
    )  # fmt: skip
    ignored = {name: lambda callback: None for name in ("add_callback", "remove_callback")}
    trainer: Any = SimpleNamespace(train=train, args=args, **ignored)
    with pytest.raises(CourseError, match="step 1 in one of several processes: CUDA out of memory") as error:
        ladder.train(trainer, lesson_in(tmp_path), None)
    assert "halve train.micro_batch" in error.value.todo


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError(OOM), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(problem: Exception, expected: bool) -> None:
    assert hardware.out_of_memory(problem) is expected


def descent(setting: Setting, **allowed: bool) -> list[tuple[int, int, str, int]]:
    steps = []
    while (lower := setting.below(**allowed)) is not None:
        assert lower.batch == setting.batch
        setting = lower
        steps.append((setting.micro_batch, setting.accumulation, setting.checkpointing, setting.length))
    return steps


def test_the_rungs_come_in_their_order_and_the_batch_stays() -> None:
    assert descent(Setting(6, 2, "off", 512), shorten=True, offload=True) == [
        (3, 4, "off", 512), (1, 12, "off", 512), (1, 12, "on", 512), (1, 12, "offload", 512),
        (1, 12, "offload", 256), (1, 12, "offload", 128),
    ]  # fmt: skip
    assert descent(Setting(5, 1, "on", 512), shorten=False, offload=True) == [
        (1, 5, "on", 512), (1, 5, "offload", 512)
    ]  # fmt: skip
    assert descent(Setting(1, 8, "on", 0), shorten=True, offload=False) == []


def remembered(folder: Path, card: str, planned: Setting) -> memory.Memory:
    return memory.Memory(lesson_in(folder, card=hardware.Card(card, (7, 5), 14.56, 1)), planned)


def test_a_continued_run_begins_at_the_rung_it_reached(tmp_path: Path, capsys: Any) -> None:
    planned, checkpoint = Setting(4, 2, "off", 256), Path("checkpoint-9")
    reached = planned.below(shorten=False, offload=False)
    assert reached
    remembered(tmp_path, "Tesla T4", planned).add(9, (14.123, 14.56), planned, reached)
    again = remembered(tmp_path, "Tesla T4", planned)
    assert again.begin(checkpoint) == reached and "with micro-batch 2, accumulation 4" in capsys.readouterr().out
    assert again.rungs[0]["used_gib"] == 14.12 and again.rungs[0]["card"].startswith("Tesla T4")
    larger = remembered(tmp_path, "NVIDIA L4", planned)
    assert larger.begin(checkpoint) == planned and len(larger.rungs) == 1  # what happened stays on record
    other = Setting(8, 1, "off", 256)
    assert remembered(tmp_path, "Tesla T4", other).begin(checkpoint) == other
    assert remembered(tmp_path, "Tesla T4", planned).begin(None) == reached  # lost before its first checkpoint
    memory.forget(again.lesson)  # RESUME="never"
    assert remembered(tmp_path, "Tesla T4", planned).begin(None) == planned and memory.oom_rungs(again.lesson) == []


def test_a_run_begun_anew_on_another_card_knows_of_no_rungs(tmp_path: Path) -> None:
    planned = Setting(4, 2, "off", 256)
    first = remembered(tmp_path, "Tesla T4", planned)
    first.add(1, None, planned, Setting(2, 4, "off", 256))
    assert remembered(tmp_path, "NVIDIA L4", planned).begin(None) == planned and memory.oom_rungs(first.lesson) == []


@pytest.mark.parametrize(
    "reached",
    [
        {"micro_batch": 2, "accumulation": 2, "checkpointing": "off", "length": 256},  # another batch
        {"micro_batch": "2", "accumulation": 4, "checkpointing": "off", "length": 256},
        {"micro_batch": 0, "accumulation": 4, "checkpointing": "off", "length": 256},
        {"micro_batch": 2, "accumulation": 4, "checkpointing": "banana", "length": 256},
    ],
)
def test_a_setting_that_cannot_be_is_not_believed(tmp_path: Path, reached: dict[str, Any]) -> None:
    planned = Setting(4, 2, "off", 256)
    first = remembered(tmp_path, "Tesla T4", planned)
    paths.write_json(tmp_path / "runs/demo/memory.json", first.key | {"reached": reached, "rungs": ["x", {"from": 3}]})
    again = remembered(tmp_path, "Tesla T4", planned)
    assert again.begin(Path("checkpoint-9")) == planned and again.rungs == []


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_save", "on_train_end"])
def test_memory_that_runs_out_after_the_last_step_trains_no_step_more(tmp_path: Path, whole: Any, event: str) -> None:
    trainer = build(tmp_path)
    raised = []

    class Late(TrainerCallback):
        """Runs out of memory once, when all steps are done."""

    def late(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and not raised:
            raised.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    setattr(Late, event, late)
    trainer.add_callback(Late())
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert raised and trainer.state.global_step == whole.state.global_step == trainer.state.max_steps
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(trainer)[name], weight, rtol=0, atol=1e-6)
    assert (Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.max_steps}").exists()


def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    planned = Setting(4, 2, "off", 256)
    for text in ("{", "[]", '{"reached": 3, "rungs": 4}'):
        (tmp_path / "runs/demo").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs/demo/memory.json").write_text(text)
        assert remembered(tmp_path, "Tesla T4", planned).begin(Path("checkpoint-9")) == planned


def test_a_disk_that_takes_no_memory_does_not_end_the_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paths, "write_json", full)
    remembered(tmp_path, "Tesla T4", Setting(4, 2, "off", 256)).add(
        1, None, Setting(4, 2, "off", 1), Setting(2, 4, "off", 1)
    )
    assert "could not be written (No space left on device)" in capsys.readouterr().out


def test_a_resumed_trainer_takes_the_rung_before_it_trains(tmp_path: Path, whole: Any) -> None:
    lesson, trainer = lesson_in(tmp_path), build(tmp_path)
    planned = rungs.setting_of(trainer)
    memory.Memory(lesson, planned).add(4, None, planned, Setting(1, 8, "on", 256))
    ladder.train(trainer, lesson, Path(whole.args.output_dir) / "checkpoint-6")
    assert batch_of(trainer) == (1, 8) and trainer.args.gradient_checkpointing
    assert trainer.diary.steps == {7: whole.diary.steps[7]}
    torch.testing.assert_close(weights(trainer), weights(whole), rtol=0, atol=1e-6)


class Overflow(TrainerCallback):
    """The gradients of the first step are too large for the loss scale, as in float16."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            next(one for one in model.parameters() if one.requires_grad).grad.fill_(float("inf"))


def scaled(folder: Path) -> Any:
    """A trainer with a loss scale, whose first step is skipped."""
    trainer = build(folder, max_grad_norm=0.0, learning_rate=1e-3, optim="adamw_torch")
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    trainer.add_callback(Overflow())
    return trainer


@pytest.mark.parametrize("where", ["in a step", "in the first update"])
def test_the_loss_scale_goes_on_and_a_first_update_after_skipped_steps_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    undisturbed, trainer = scaled(tmp_path / "one"), scaled(tmp_path / "two")
    undisturbed.train()
    run_out(trainer, *([6] if where == "in a step" else []))
    if where == "in the first update":
        break_first_update(monkeypatch)
    ladder.train(trainer, lesson_in(tmp_path), None)
    assert batch_of(trainer) == (2, 4)
    assert undisturbed.diary.steps[1][1] == 1e-3  # the schedule waits for the first step that is not skipped
    scale = undisturbed.accelerator.scaler.state_dict()
    assert trainer.accelerator.scaler.state_dict() == scale and scale["scale"] == 1024 / 2 * 2**3
    assert_same(trainer, undisturbed)


def test_who_else_uses_the_card_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{os.getpid()}, python, 900 MiB'\necho '77, python3, 9000 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert memory.others() == " The card is also used by: 77, python3, 9000 MiB."
    assert "77, python3" in memory.nothing_left(Setting(1, 8, "on", 256), 3, (14.1, 14.6), []).seen
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.others() == ""
