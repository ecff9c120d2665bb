"""dashboard: plain output where there is no frontend."""

from __future__ import annotations

from pathlib import Path

from nbutils import dashboard
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


def test_the_chat_box_answers_one_example_when_nobody_can_type(capsys) -> None:  # type: ignore[no-untyped-def]
    dashboard.chat(str.upper, "hello")
    assert capsys.readouterr().out == "you    hello\nmodel  HELLO\n"
