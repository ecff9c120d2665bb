"""tracking: TensorBoard always; W&B offline when it cannot be online, for whatever reason; no key in any output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import wandb

from nbutils import tracking

KEY = "k" * 40


@pytest.fixture(autouse=True)
def clean_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("WANDB", "TENSORBOARD")):
            monkeypatch.delenv(name)
    for name in ("WANDB_MODE", "WANDB_SILENT", "WANDB_CONSOLE", "WANDB_API_KEY", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "x")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(name)


def modes(monkeypatch: pytest.MonkeyPatch, refuse: Exception | None = None) -> list[str]:
    """Record the modes wandb is started in; online may be refused."""
    seen: list[str] = []

    def init(**options: object) -> None:
        seen.append(str(options["mode"]))
        if options["mode"] == "online" and refuse:
            raise refuse

    monkeypatch.setattr(wandb, "init", init)
    return seen


def test_without_a_key_the_run_is_really_offline_and_in_the_run_folder(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert tracking.begin(tmp_path / "logs", "demo") == ["tensorboard", "wandb"]
    wandb.finish()
    assert list((tmp_path / "logs").rglob("offline-run-*"))
    assert "W&B offline: no WANDB_API_KEY" in capsys.readouterr().out
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "logs/tensorboard")


def test_a_key_without_network_goes_offline_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    seen = modes(monkeypatch)
    tracking.begin(tmp_path, "demo")
    said = capsys.readouterr().out
    assert seen == ["offline"] and "does not answer" in said and KEY not in said


def test_a_refused_key_goes_offline_and_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr("nbutils.platforms.answers", lambda url, seconds: True)
    seen = modes(monkeypatch, refuse=RuntimeError(f"key {KEY} is not valid"))
    tracking.begin(tmp_path, "demo")
    said = capsys.readouterr().out
    assert seen == ["online", "offline"] and "RuntimeError" in said and KEY not in said
    assert os.environ["WANDB_MODE"] == "offline"


def test_a_good_key_goes_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr("nbutils.platforms.answers", lambda url, seconds: True)
    assert modes(monkeypatch) == [] and tracking._begin_wandb(tmp_path, "demo") == "online"
