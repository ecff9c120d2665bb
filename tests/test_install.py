"""install: only what is missing, never the platform's torch."""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbutils import install
from nbutils.errors import CourseError


def test_what_is_installed_is_not_asked_for_again() -> None:
    assert install.unsatisfied(["pytest>=1", "no-such-distribution>=3", "pytest>=9999"]) == [
        "no-such-distribution>=3",
        "pytest>=9999",
    ]


def test_the_extra_names_the_stack_and_this_environment_has_it() -> None:
    wanted = install.requirements("train")
    assert any(text.startswith("trl") for text in wanted) and not any("extra" in text for text in wanted)
    assert install.unsatisfied(wanted) == []


def test_the_platforms_torch_is_pinned_without_its_build_tag() -> None:
    [pin] = [line for line in install.platform_pins() if line.startswith("torch==")]
    assert pin == f"torch=={metadata.version('torch').split('+')[0]}"


def test_pip_is_held_to_the_pins_and_its_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def fake(command: list[str], **_: object) -> SimpleNamespace:
        seen["constraints"] = Path(command[command.index("--constraint") + 1]).read_text()
        return SimpleNamespace(returncode=1, stderr="ERROR: no network")

    monkeypatch.setattr(subprocess, "run", fake)
    with pytest.raises(CourseError, match=r"(?s)could not complete.*no network"):
        install.pip_install(["trl>=1"])
    assert "torch==" in seen["constraints"]


def test_a_package_replaced_under_a_running_kernel_asks_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "requirements", lambda extra: ["pytest>=9999"])
    monkeypatch.setattr(install, "pip_install", lambda wanted: None)
    with pytest.raises(CourseError, match="restart the kernel"):
        install.ensure("train")


def test_an_old_torchao_is_removed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    commands = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0" if name == "torchao" else "1")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    install.remove_blockers()
    assert commands[0][-3:] == ["-y", "-q", "torchao"] and "torchao 0.10.0" in capsys.readouterr().out
