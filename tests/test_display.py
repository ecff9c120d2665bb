"""Tables, plots and live numbers, plain without a frontend."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wcwidth

from nbutils import display
from nbutils.hardware import Choice


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a kernel with someone at its frontend displays."""
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(display, "in_kernel", lambda: True)
    monkeypatch.setattr(display, "watched", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, **_: shown.append(page))
    return shown


def test_a_table_is_text_outside_a_notebook(capsys: Any) -> None:
    display.show_table([{"question": "三个苹果", "base": "✗ x"}, {"question": "b", "base": "c"}], "Before")
    assert capsys.readouterr().out == "Before\n  question: 三个苹果\n  base: ✗ x\n\n  question: b\n  base: c\n\n"
    assert display.aligned([{"a": 1, "long": "x"}, {"a": 222, "long": ""}]) == "a    long\n1    x\n222"
    assert display.aligned([{"显存": 1, "b": "x"}, {"显存": "秩 8", "b": ""}]) == "显存  b\n1     x\n秩 8"
    text = "显存 24 GB，用 QLoRA 训练。 " * 3 + "a_very_long_name_without_any_space"
    lines = display.wrap(text, 20)
    assert max(map(wcwidth.width, lines)) == 20
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert display.wrap("选 Run All，或改", 9) == ["选 Run", "All，或改"], "a mark stays with a Latin word too"


def test_answers_stand_beside_the_question_and_the_expected_one(capsys: Any, notebook: list[Any]) -> None:
    row = [{"role": "system", "content": "s"}, {"role": "user", "content": "q?"}, {"role": "assistant", "content": "e"}]
    display.show_answers([{"messages": row}], before=["b"], after=["<a>"])
    assert notebook[0]["text/plain"] == "\n  question: q?\n  expected: e\n  before: b\n  after: <a>\n"
    assert "<td" in notebook[0]["text/html"] and "&lt;a&gt;" in notebook[0]["text/html"]


def test_choices_are_escaped_html_in_a_notebook(notebook: list[Any]) -> None:
    choices = {
        "lora.r": Choice(16, "room <enough>"),
        "course.rows": Choice(2, "one"),
        "sft.num_train_epochs": Choice(1, ""),
    }
    resolved = SimpleNamespace(name="tiny", choices=choices, set_values={})
    display.show_choices(resolved, only=("lora", "course.rows"))
    page, text = notebook[0]["text/html"], notebook[0]["text/plain"]
    assert "room &lt;enough&gt;" in page and page.count("<tr>") == 3 and "epochs" not in page + text
    assert text.splitlines()[1:] == ["lora.r       16     room <enough>", "course.rows  2      one"]
    resolved.set_values = {"sft.num_train_epochs": 1}
    display.show_choices(resolved, only=("lora",))
    assert "sft.num_train_epochs" in notebook[1]["text/plain"], "what SET names is always shown"


def test_a_plot_is_saved_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "logs/loss.png").symlink_to(tmp_path / "mine")
    display.plot_losses({"train": [(1, 3.0), (2, 1.0)], "validation": [(1, 3.0)]}, tmp_path / "logs/loss.png")
    display.plot_loss_examples(tmp_path / "logs/examples.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "logs").iterdir())
    assert (tmp_path / "mine").read_text() == "mine"
    assert [*json.loads(display.CURVES.read_text())] == ["healthy", "too_slow", "diverging", "overfitting"]


def test_figures_write_chinese_with_the_font_of_the_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setenv("NBUTILS_LANG", "zh")
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of characters that no font has
        display.plot_loss_examples(tmp_path / "examples.png")
        display.plot_losses({"train": [(1, 3.0)]}, tmp_path / "loss.png", title="预训练损失：“验证集”→ 100 %")
        with pytest.raises(UserWarning, match="missing"):
            display.plot_losses({"train": [(1, 3.0)]}, tmp_path / "loss.png", title="\U0001fae0")


def test_headings_of_tables_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert display.aligned([{"hours": 2, "GiB": 7}]).split() == ["小时", "GiB", "2", "7"]


def test_the_live_numbers_as_a_line_and_as_a_page() -> None:
    assert [display.clock(seconds) for seconds in (7, 59.6, 3723)] == ["0:00:07", "0:01:00", "1:02:03"]
    numbers = {"loss": "<1.5", "tokens/s": "2,000", "peak": "3.00 GiB", "time left": "0:00:42"}
    assert display.live_line(numbers) == "loss <1.5 · tokens/s 2,000 · peak 3.00 GiB · time left 0:00:42"
    losses = [(step, 1 / step) for step in range(1, 5001)] + [(5001, math.nan), (5002, math.inf)]
    page = display.live_page({"": "step 7", **numbers}, 3000, 6000, losses, [(10, 0.5)], ["[WARN] step 1 skipped"])
    assert "width:50.0%" in page and "&lt;1.5" in page and "[WARN] step 1 skipped" in page and "nan" not in page
    points = page.split('points="')[1].split('"')[0].split()
    assert 100 < len(points) <= display.POINTS + 1 and len(page) < 8000
    assert "<svg" not in display.live_page({}, 1, 9, [(1, 2.0)])


def test_of_all_a_lesson_prints_the_lines_of_a_training_reach_the_terminal(capsys: Any) -> None:
    lines, passed = display.LiveLines(), ["training · steps 1 to 30", "step 1 of 30 · loss 2.0", "[WARN] nan"]
    passed += ["trained 30 of 30 steps · peak 1 GiB", "第 1 / 30 步 · 损失 2.0"]
    text = "\n".join(["profile   tiny", *passed, "step by step", "q_proj: W + 2 · B · A", "safe: checkpoint 30\n"])
    lines.write(text[:50])
    lines.write(text[50:])
    lines.flush()
    assert capsys.readouterr().out.splitlines() == [f"  {line}" for line in passed]


@pytest.mark.parametrize("watched", [True, False])
def test_bars_of_libraries_are_calm_where_no_one_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, watched: bool
) -> None:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", tqdm.auto.tqdm)  # put back afterwards
    monkeypatch.setattr(display, "in_kernel", lambda: True)
    monkeypatch.setattr(display, "watched", lambda: watched)
    display.calm_bars()
    list(tqdm.auto.tqdm(range(3), desc="short work"))
    assert ("short work" in capsys.readouterr().err) is watched
