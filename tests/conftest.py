"""Shared by the tests: clean folders for runs, and no network by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbutils import hardware

hardware.share_processors()  # inherited by the lessons the tests start
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs that belongs to one test."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("NBUTILS_HOME", str(folder))
    for name in ("NBUTILS_PLATFORM", "WANDB_API_KEY", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return folder
