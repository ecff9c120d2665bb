"""live numbers: what they say, where they say it, and how seldom."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbutils import dashboard, hardware, training
from nbutils.errors import CourseError
from nbutils.plan import cards
from nbutils.training import live
from nbutils.training.meter import NO_SCALE, RECENT, Meter

CARD = hardware.Card("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1)


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def lesson_on(platform: str = "local", card: hardware.Card | None = None) -> Any:
    return SimpleNamespace(card=card, platform=SimpleNamespace(name=platform))


class Trainer:
    """Tells a callback what the real trainer would."""

    def __init__(self, callback: Any, clock: Clock, steps: int, logging_steps: int = 1, step: int = 0) -> None:
        self.callback, self.clock, self.logging_steps = callback, clock, logging_steps
        self.state = SimpleNamespace(global_step=step, max_steps=steps, log_history=[], is_world_process_zero=True)
        self.optimizer, self.tokens = SimpleNamespace(step_was_skipped=False), 0.0

    def begin(self) -> Trainer:
        self.callback.on_train_begin(None, self.state, None)
        return self

    def step(self, seconds: float = 1.0, tokens: float = 100.0, loss: float = 2.0, skipped: bool = False) -> None:
        self.clock.time += seconds
        self.tokens += tokens
        self.state.global_step += 1
        self.optimizer.step_was_skipped = skipped
        logs = self.state.global_step % self.logging_steps == 0
        control = SimpleNamespace(should_log=logs)
        self.callback.on_step_end(None, self.state, control, optimizer=self.optimizer)
        if logs:
            told = {"loss": loss, "num_tokens": self.tokens, "step": self.state.global_step}
            self.state.log_history.append(told)
            self.callback.on_log(None, self.state, control, logs=told)

    def end(self) -> None:
        self.callback.on_log(None, self.state, None, logs={"train_loss": 1.0, "train_runtime": 3.0})
        self.callback.on_train_end(None, self.state, None)


def started(steps: int, logging_steps: int = 1, step: int = 0, **options: Any) -> Trainer:
    clock = Clock()
    callback = live.live_numbers(options.pop("lesson", lesson_on()), now=clock, **options)
    return Trainer(callback, clock, steps, logging_steps, step).begin()


def test_speed_is_that_of_the_recent_steps_and_the_first_is_warm_up() -> None:
    trainer = started(1000)
    meter = trainer.callback.meter
    trainer.step(seconds=60)
    assert meter.tokens_per_second is None and meter.seconds_left is None
    trainer.step(seconds=2)
    assert meter.tokens_per_second == 50 and meter.seconds_left == 998 * 2
    for _ in range(RECENT + 5):
        trainer.step(seconds=0.5, tokens=200)
    assert meter.tokens_per_second == 400 and meter.seconds_left == pytest.approx((1000 - 57) * 0.5)
    assert meter.average == pytest.approx(trainer.tokens / (60 + 2 + 55 * 0.5))


def test_speed_is_there_at_the_first_log_when_several_steps_are_logged_together() -> None:
    trainer = started(30, logging_steps=10)
    trainer.step(seconds=60)
    for _ in range(9):
        trainer.step(seconds=2)
    assert trainer.callback.meter.tokens_per_second == 50


def test_a_continued_training_counts_what_is_left(capsys: Any) -> None:
    trainer = started(30, step=20)
    assert capsys.readouterr().out == "training 10 steps to go, the first takes longest\n"
    trainer.step(seconds=9)
    trainer.step(seconds=3)
    assert trainer.callback.meter.seconds_left == 8 * 3


def test_the_same_callback_may_begin_again_after_an_out_of_memory(capsys: Any) -> None:
    trainer = started(30)
    for _ in range(12):
        trainer.step(seconds=1)
    trainer.clock.time += 10
    trainer.begin()
    meter = trainer.callback.meter
    assert (meter.step, len(meter.losses), meter.tokens_per_second) == (12, 12, None)
    trainer.step(seconds=8)
    trainer.step(seconds=4)
    assert meter.tokens_per_second == 25 and meter.seconds_left == 16 * 4
    for _ in range(16):
        trainer.step()
    trainer.end()
    assert meter.spent == 12 + 10 + 12 + 16 and meter.average == trainer.tokens / meter.spent
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("trained 30 of 30 steps in 0:50 · loss 2.000 · 60 tokens/s · peak ")
    trainer.clock.time += 100
    assert meter.spent == 50


def test_after_an_out_of_memory_between_two_logs_the_mean_since_the_last_one_goes_on() -> None:
    trainer = started(100, logging_steps=10)
    for _ in range(16):
        trainer.step(seconds=1)
    trainer.begin()  # at step 16; the log at 20 counts from 10 on
    for seconds in (30, 2, 2, 2):
        trainer.step(seconds=seconds)
    assert trainer.callback.meter.tokens_per_second == 50


def test_after_an_out_of_memory_before_the_first_log_the_speed_is_right() -> None:
    trainer = started(100, logging_steps=10)
    for _ in range(8):
        trainer.step(seconds=1)
    trainer.begin()  # at step 8, nothing was logged yet
    for _ in range(12):
        trainer.step(seconds=1)
    assert trainer.callback.meter.tokens_per_second == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("text", ["nan", "inf", "-1"])
def test_a_pause_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(live.SECONDS, text)
    with pytest.raises(CourseError, match="a number of seconds"):
        live.live_numbers(lesson_on())


def test_another_trainer_counts_its_tokens_from_zero() -> None:
    meter = Meter(Clock())
    meter.begin(0, 10)
    meter.step_ended(1, False)
    meter.logged(1, 1.0, 500)
    meter.begin(0, 10)
    meter.step_ended(1, False)
    meter.logged(1, 1.0, 300)
    assert meter.tokens == 800


def test_skipped_steps_are_explained_once_and_counted(capsys: Any) -> None:
    trainer = started(100, seconds=0)
    trainer.step(skipped=True, loss=math.inf)
    trainer.step(skipped=True)
    trainer.step()
    lines = capsys.readouterr().out.splitlines()
    explained = [line for line in lines if "normal in the first steps" in line]
    assert len(explained) == 1 and explained[0].startswith("step 1 skipped: float16 looks for its loss scale")
    assert lines[-1].endswith("· 2 skipped") and not any("[WARN]" in line for line in lines)
    for _ in range(NO_SCALE + 5):
        trainer.step(skipped=True)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[WARN]")]
    assert len(warned) == 1 and "bfloat16" in warned[0] and "To do:" in warned[0]
    assert trainer.callback.meter.skipped == 2 + NO_SCALE + 5


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_once_at_once_and_with_what_to_do(loss: float, capsys: Any) -> None:
    trainer = started(1000)
    for number in range(20):
        trainer.step(seconds=0.1, loss=loss if number > 2 else 1.0)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[WARN]")]
    assert warned == [line for line in warned if f"the loss is {loss} at step 4" in line] and len(warned) == 1
    assert "halve train.learning_rate" in warned[0] and 'RESUME = "never"' in warned[0]


def test_the_cost_is_the_cards_price_by_the_hour_or_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cards, "hourly_price", lambda card: cards.Price(2.0, 0.4))
    assert live.hourly_price(lesson_on("autodl", CARD)) == {"¥": 2.0}
    assert live.hourly_price(lesson_on("runpod", CARD)) == {"$": 0.4}
    assert live.hourly_price(lesson_on("local", CARD)) == {"¥": 2.0, "$": 0.4}
    assert live.hourly_price(lesson_on("kaggle", CARD)) == {} == live.hourly_price(lesson_on("local"))
    monkeypatch.setattr(live, "memory", lambda card, over: "")
    trainer = started(10, lesson=lesson_on("local", CARD))
    trainer.step(seconds=1800)
    assert capsys.readouterr().out.splitlines()[-1] == "step 1 of 10 · loss 2.000 · cost ¥1.00 or $0.20 if rented"
    monkeypatch.setattr(cards, "hourly_price", lambda card: None)
    assert live.hourly_price(lesson_on("autodl", CARD)) == {}


def test_a_thousand_fast_steps_are_few_lines_and_long_trainings_about_fifty(capsys: Any) -> None:
    trainer = started(1000)
    for _ in range(1000):
        trainer.step(seconds=0.01)
    trainer.end()
    lines = capsys.readouterr().out.splitlines()
    assert 4 <= len(lines) <= 6 and not any("{" in line or "\r" in line or "%|" in line for line in lines)
    assert lines[1].startswith("step 1 of 1,000 ·") and lines[-1].startswith("trained 1,000 of 1,000 steps in 0:10 ·")
    trainer = started(3600)
    for _ in range(3600):
        trainer.step()
    assert 45 <= len(capsys.readouterr().out.splitlines()) <= 65
    trainer = started(360, logging_steps=50)  # ten hours: a line every five minutes, though a log comes every 83
    for _ in range(360):
        trainer.step(seconds=100)
    assert 100 <= len(capsys.readouterr().out.splitlines()) <= 125


def test_only_the_first_process_speaks(capsys: Any) -> None:
    trainer = started(5)
    capsys.readouterr()
    trainer.state.is_world_process_zero = False
    trainer.begin()
    for _ in range(5):
        trainer.step(seconds=60)
    trainer.end()
    assert capsys.readouterr().out == "" and trainer.callback.meter.step == 5


class Screen:
    """A notebook someone looks at: counts what is displayed and drawn over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from IPython import display

        self.pages: list[dict[str, str]] = []
        self.displayed, self.cell = 0, 1
        shell = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True), execution_count=1)
        self.shell = shell
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
        monkeypatch.setattr(display, "display", self.display)
        monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)

    def display(self, page: dict[str, str], raw: bool, display_id: bool) -> Any:
        self.displayed += 1
        self.update(page, raw)
        return self

    def update(self, page: dict[str, str], raw: bool) -> None:
        self.pages.append(page)


def test_in_a_notebook_one_output_is_drawn_over_at_most_once_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    screen = Screen(monkeypatch)
    trainer = started(1000)
    for _ in range(1000):
        trainer.step(seconds=0.01)
    trainer.begin()  # after an out-of-memory, in the same cell
    trainer.end()
    assert screen.displayed == 1 and 10 <= len(screen.pages) <= 15 and capsys.readouterr().out == ""
    last = screen.pages[-1]
    assert last["text/plain"].startswith("trained") and "<svg" in last["text/html"] and "<script" not in str(last)
    screen.shell.execution_count = 2
    trainer.begin()
    assert screen.displayed == 2


def test_nobody_watches_papermill_kaggles_batch_or_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dashboard.watched()
    screen = Screen(monkeypatch)
    assert dashboard.watched()
    monkeypatch.setenv("NBUTILS_PLATFORM", "kaggle")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert not dashboard.watched()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert dashboard.watched()
    screen.shell.kernel._allow_stdin = False
    assert not dashboard.watched()


def test_the_pause_can_be_wished_for_and_a_word_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(live.SECONDS, "0")
    trainer = started(20, logging_steps=5)
    for _ in range(20):
        trainer.step(seconds=0.01)
    assert len(capsys.readouterr().out.splitlines()) == 21
    monkeypatch.setenv(live.SECONDS, "often")
    with pytest.raises(CourseError, match="'often'"):
        started(20)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_real_trainer_shows_these_numbers_and_nothing_of_its_own(
    tmp_path: Path, quiet: bool, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer as RealTrainer
    from transformers import TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((x * self.weight - labels) ** 2).mean()}

    rows = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(8)]
    settings = TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=quiet
    )
    callback = live.live_numbers(lesson_on())
    trainer = RealTrainer(Line(), settings, train_dataset=rows, callbacks=[callback])  # type: ignore[arg-type]
    live.replace_bars(trainer)
    assert [type(one).__name__ for one in trainer.callback_handler.callbacks] == ["DefaultFlowCallback", "LiveNumbers"]
    monkeypatch.setattr(AcceleratedOptimizer, "step_was_skipped", property(lambda self: quiet))
    trainer.train()
    assert callback.meter.skipped == (4 if quiet else 0)
    shown = capfd.readouterr()
    lines = shown.out.splitlines()
    assert (
        lines[0].startswith("training 4 steps")
        and lines[-1].startswith("trained 4 of 4 steps")
        and len(lines) == 3 + 2 * quiet
    )
    assert "it/s" not in shown.err
    numbers = training.measured(trainer, 1.0, first_step=0)
    assert numbers["steps"] == 4 and numbers["skipped_steps"] is None  # no token was counted, so none was measured


@pytest.mark.parametrize("rented", [False, True])
def test_skipped_steps_cost_and_the_speed_of_all_trainings_are_written_down(rented: bool) -> None:
    trainer = started(4, lesson=lesson_on("autodl", CARD) if rented else lesson_on())
    trainer.step(seconds=10, skipped=True)
    trainer.step(seconds=10)
    trainer.end()
    handler = SimpleNamespace(callbacks=[SimpleNamespace(), trainer.callback])
    args = SimpleNamespace(world_size=1, train_batch_size=1, gradient_accumulation_steps=1)
    made = SimpleNamespace(state=trainer.state, callback_handler=handler, args=args)
    numbers = training.measured(made, 99.0, 0)  # type: ignore[arg-type]
    assert numbers["skipped_steps"] == 1 and numbers["tokens_per_second"] == 10.0 and numbers["train_seconds"] == 99.0
    price = cards.hourly_price(CARD)
    assert price and numbers.get("cost") == ({"¥": round(price.yuan * 20 / 3600, 2)} if rented else None)
    assert "cost" not in numbers or rented
