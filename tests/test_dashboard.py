"""dashboard: plain output where there is no frontend."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nbutils import dashboard
from nbutils.errors import CourseError
from nbutils.hardware import Choice


def test_a_table_is_text_outside_a_notebook(capsys) -> None:  # type: ignore[no-untyped-def]
    dashboard.show_table([{"question": "三个苹果", "base": "✗ x"}], "Before")
    assert capsys.readouterr().out.split() == ["Before", "question:", "三个苹果", "base:", "✗", "x"]


def test_choices_are_shown_with_their_reasons(capsys) -> None:  # type: ignore[no-untyped-def]
    dashboard.show_choices({"lora.rank": Choice(16, "room <enough>")}, text="rank 16: room enough")
    assert capsys.readouterr().out == "rank 16: room enough\n"
    page = dashboard._html_table([{"what": "lora.rank", "value": 16, "why": "room <enough>"}], "")
    assert "room &lt;enough&gt;" in page and page.count("<tr>") == 2


def test_the_loss_curve_is_saved(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    dashboard.plot_losses([(1, 3.0), (2, 1.0)], tmp_path / "logs/loss.png")
    assert (tmp_path / "logs/loss.png").read_bytes().startswith(b"\x89PNG")
    dashboard.plot_losses([], tmp_path / "no.png")
    assert "nothing to plot" in capsys.readouterr().out and not (tmp_path / "no.png").exists()


def test_the_live_line_puts_names_where_one_says_them() -> None:
    parts = {"step": "7 of 30", "loss": "1.5", "tokens/s": "2,000", "memory": "peak 3.00 GiB", "left": "0:42"}
    assert dashboard.live_line(parts) == "step 7 of 30 · loss 1.5 · 2,000 tokens/s · peak 3.00 GiB · 0:42 left"


def test_the_live_page_has_a_bar_the_numbers_and_a_curve_of_few_points() -> None:
    losses = [(step, 1 / step) for step in range(1, 5001)] + [(5001, math.nan), (5002, math.inf)]
    page = dashboard.live_page({"loss": "<0.1"}, (3000, 6000), losses, ["step 1 skipped"])
    assert "width:50.0%" in page and "&lt;0.1" in page and "step 1 skipped" in page and "nan" not in page
    points = page.split("points='")[1].split("'")[0].split()
    assert 100 < len(points) <= dashboard.POINTS + 1 and len(page) < 6000
    assert dashboard.loss_curve([], 9) == dashboard.loss_curve([(1, 2.0)], 9) == ""
    assert "points='380.0,16.0 760.0,16.0'" in dashboard.loss_curve([(5, 1.0), (10, 1.0)], 10)  # a flat one


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (59.6, "1:00")])
def test_seconds_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert dashboard.clock(seconds) == text


def test_of_all_a_lesson_prints_the_lines_of_a_training_reach_the_terminal(capsys) -> None:  # type: ignore[no-untyped-def]
    lines = dashboard.LiveLines()
    lines.write("profile   tiny\ntraining 30 steps to go\nstep 1 of 30 · lo")
    lines.write("ss 2.0\n[WARN] the loss is nan\nstep by step\ntrained 30 of 30 steps\nsafe: checkpoint 30\n")
    lines.write("out of memory at step 7: micro-batch 4 -> 2\nOne minute is left. Saving at step 9 of 30\n")
    lines.flush()
    assert capsys.readouterr().out.splitlines() == [
        "  training 30 steps to go",
        "  step 1 of 30 · loss 2.0",
        "  [WARN] the loss is nan",
        "  trained 30 of 30 steps",
        "  out of memory at step 7: micro-batch 4 -> 2",
        "  One minute is left. Saving at step 9 of 30",
    ]


@pytest.mark.parametrize(
    ("kernel", "looked_at", "calm"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_bars_of_libraries_are_calm_where_no_one_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel: bool, looked_at: bool, calm: bool
) -> None:
    import tqdm.auto

    before = tqdm.auto.tqdm
    monkeypatch.setattr(tqdm.auto, "tqdm", before)  # put back afterwards
    monkeypatch.setattr(dashboard, "in_kernel", lambda: kernel)
    monkeypatch.setattr(dashboard, "watched", lambda: looked_at)
    dashboard.calm_bars()
    assert (tqdm.auto.tqdm is not before) == calm
    list(tqdm.auto.tqdm(range(3), desc="short work"))
    assert ("short work" in capsys.readouterr().err) != calm


def test_a_picture_is_drawn_over_no_file_of_the_users(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "link.png").symlink_to(tmp_path / "mine.png")
    for name in ("mine.png", "link.png"):
        with pytest.raises(CourseError, match="not drawn here"):
            dashboard.show_figure(plt.figure(), tmp_path / name)
    assert (tmp_path / "mine.png").read_text() == "mine"
    for _ in range(2):
        dashboard.show_figure(plt.figure(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"
