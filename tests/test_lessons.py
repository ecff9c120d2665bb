"""lessons: parameters, run folders and names, what an earlier session left, notice and power-off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import simulate
from support import refused

from nbutils import config as reading
from nbutils import hardware, lessons, paths, platforms, record, scaling

LOCAL = platforms.Platform("local", "test")
CARD = hardware.Card("A card", (8, 0), 24.0, 1)
SCRIPT = "STEPS: int = 3\nHOURS: float = 1\nRUN: str = ''\nSHOW: bool = True\nlower: int = 1\n"


def opened(values: dict[str, Any], folders: platforms.Folders | None = None) -> tuple[lessons.RunFolder, Any]:
    return lessons.open_run(values, LOCAL, folders or platforms.folders(LOCAL), None)


def begin(stem: str, **values: str) -> lessons.Lesson:
    return lessons.begin(stem, {"__annotations__": dict.fromkeys(values, str), **values})


# --- parameters ------------------------------------------------------------------------------------------------------


def collected(words: str, monkeypatch: pytest.MonkeyPatch, **values: Any) -> dict[str, Any]:
    """The parameters of a script, which may have changed some in a cell and got others on its command line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, namespace)
    monkeypatch.setattr(sys, "argv", ["lesson.py", *words.split()])
    return lessons.collect(namespace | values)


def test_parameters_come_typed_from_the_cell_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = collected("--STEPS=20 --HOURS 0.5 --SHOW no", monkeypatch, RUN=2024)
    assert values == {"STEPS": 20, "HOURS": 0.5, "RUN": "2024", "SHOW": False}
    assert repr(collected("", monkeypatch)["HOURS"]) == "1.0"
    (tmp_path / "x.py").write_text(SCRIPT + "raise SystemExit\n")
    assert lessons.declared_in(tmp_path / "x.py") == {"STEPS": int, "HOURS": float, "RUN": str, "SHOW": bool}


@pytest.mark.parametrize(
    ("words", "cell", "code"),
    [
        ("--STEP 3", {}, "parameter_unknown"), ("--STEPS", {}, "command_line"), ("STEPS 3", {}, "command_line"),
        ("--STEPS many", {}, "parameter_type"), ("--SHOW perhaps", {}, "parameter_type"),
        ("--HOURS 1h", {}, "parameter_type"), ("", {"STEPS": "20"}, "parameter_type"),
        ("", {"STEPS": True}, "parameter_type"), ("--STEPS -5", {}, "parameter_negative"),
        ("", {"HOURS": float("nan")}, "parameter_negative"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_meant_are_refused(
    words: str, cell: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(f"lessons.{code}", *(["did you mean STEPS?"] if code == "parameter_unknown" else [])):
        collected(words, monkeypatch, **cell)


def test_what_papermill_injected_must_be_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "in_kernel", lambda: True)
    cell = '# Parameters\nSTEPS = 5\nPAPERMILL_OUTPUT_PATH = "o"\n'
    assert collected("", monkeypatch, In=["", "x = 1", cell, "Y = 2"])["STEPS"] == 3
    with refused("lessons.parameter_unknown", names="STEPZ"):
        collected("", monkeypatch, In=[cell + "STEPZ = 5\n"])


# --- the run folder, profile and SET ---------------------------------------------------------------------------------


def test_a_run_without_a_name_is_called_after_its_profile(home: Path) -> None:
    run, resolved = opened({"PROFILE": "auto"})
    assert run.path == home / "tiny" and resolved.name == "tiny" and run.path.stat().st_mode & 0o077 == 0
    assert lessons.default_run_name("tiny", "/models/Qwen 2.5") == "tiny-Qwen-2.5"
    assert lessons.default_run_name("我的 配置", "") == "我的-配置" and lessons.RUN_NAME.fullmatch("我的-配置")
    facts = record.read(run.facts)
    assert facts["profile"] == "tiny" and facts["model"] == "tiny" and facts["lessons"] == {} and facts["by_auto"]
    opened({"RUN_NAME": "tiny"})
    assert record.read(run.facts) == facts


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "with space", "x" * 81])
def test_a_run_name_that_is_no_folder_is_refused(home: Path, name: str) -> None:
    with refused("lessons.run_name", value=name):
        opened({"RUN_NAME": name})


def test_what_cannot_work_is_refused_before_the_training(home: Path) -> None:
    with refused("lessons.resume", value="yes"):
        opened({"PROFILE": "tiny", "RESUME": "yes"})
    assert not (home / "tiny").exists()
    (home / "tiny").mkdir(parents=True)
    (home / "tiny/facts.json").write_text("{")
    with refused("record.invalid"):
        opened({})


def test_a_run_keeps_the_profile_and_model_it_began_with(home: Path) -> None:
    (home / "demo").mkdir(parents=True)
    (home / "demo/facts.json").write_text(json.dumps({"profile_source": "paper_r64", "model": str(paths.TINY_MODEL)}))
    _, resolved = opened({"PROFILE": "auto", "RUN_NAME": "demo"})
    assert (resolved.name, resolved.model) == ("paper_r64", str(paths.TINY_MODEL))


def test_set_is_kept_for_every_later_lesson_of_the_run(home: Path) -> None:
    run, resolved = opened(
        {"PROFILE": "tiny", "SET": "lora.rank=8, train.max_steps=9", "MAX_STEPS": 7, "SAVE_STEPS": 0}
    )
    assert record.read(run.facts)["set"] == resolved.set_values == {"lora.rank": 8, "train.max_steps": 9}
    assert resolved.profile.train.max_steps == 7 and "MAX_STEPS" in resolved.choices["train.max_steps"].reason
    for later in ({"RUN_NAME": "tiny"}, {"PROFILE": "auto", "SET": ""}, {"PROFILE": "tiny"}):
        profile = opened(later)[1].profile
        assert (profile.lora.rank, profile.train.max_steps) == (8, 9), later
    assert opened({"PROFILE": "tiny", "SET": "", "RESUME": "never"})[1].profile.lora.rank != 8
    assert record.read(run.facts)["set"] == {}


def test_a_set_that_does_not_fit_what_was_trained_is_not_remembered(home: Path) -> None:
    run, _ = opened({"SET": "lora.rank=8"})
    run.checkpoints.mkdir()
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    assert opened({"SET": "lora.rank=4"})[1].profile.lora.rank == 4  # and lesson 03 refuses it by its fingerprint
    assert opened({"RUN_NAME": run.name})[1].profile.lora.rank == 8
    lesson = begin("03_qlora", SET="train.max_steps=3")
    lesson.finish()
    facts = record.read(run.facts)
    assert facts["set"] == {"train.max_steps": 3}
    assert facts["lessons"]["03_qlora"]["settings"]["train.max_steps"] == 3


def test_begin_and_finish_write_the_facts(home: Path) -> None:
    lesson = begin("01_environment", PROFILE="auto")
    assert lesson.model == str(paths.TINY_MODEL) and lesson.model_name == "tiny"
    lesson.finish(answer=42)
    facts = json.loads((home / "tiny/facts.json").read_text())
    assert {"platform", "profile", "versions"} <= set(facts) and facts["lessons"]["01_environment"]["answer"] == 42
    assert {"torch", "transformers", "peft", "trl"} <= set(facts["versions"]) and (home / "tiny/report.md").exists()


def test_an_earlier_lesson_runs_with_the_same_profile_and_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened({"RUN_NAME": "demo", "SET": "lora.target_modules=[q_proj, v_proj], lora.rank=8"})
    lesson = begin("04_merge", RUN_NAME="demo")
    passed: list[dict[str, Any]] = []
    monkeypatch.setattr(scaling, "launch", lambda script, values, *_: passed.append(values))
    lesson.require("03_qlora")
    assert passed[0]["PROFILE"] == "tiny" and passed[0]["RUN_NAME"] == "demo"
    assert reading.settings_in(passed[0]["SET"]) == {"lora.target_modules": ["q_proj", "v_proj"], "lora.rank": 8}
    with paths.whole_folder(lesson.run.adapter, {}):
        pass
    lesson.require("03_qlora")
    assert len(passed) == 1, "it is there now"


# --- runs of earlier sessions ----------------------------------------------------------------------------------------


def begun(home: Path, name: str, profile: str, by_auto: bool = True, **trained: int) -> lessons.RunFolder:
    """A run folder with one kept checkpoint."""
    run = lessons.RunFolder(home / name)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    record.begin(run.facts, {"profile": profile, "profile_source": profile, "model": "tiny"}, by_auto)
    if trained:
        record.update(run.facts, {}, "03_qlora", trained)
    return run


def test_an_unnamed_run_that_was_cut_off_goes_on_with_whatever_gpu_comes_next(home: Path) -> None:
    begun(home, "done", "t4_16gb", steps=9, planned_steps=9)
    begun(home, "named", "t4_16gb", by_auto=False)
    begun(home, "toy", "tiny")
    assert lessons.unfinished_run(home, CARD) == ""
    begun(home, "t4_16gb", "t4_16gb", steps=4, planned_steps=9)
    assert lessons.unfinished_run(home, None) == "" and lessons.unfinished_run(home, CARD) == "t4_16gb"
    run, _ = opened({"PROFILE": "tiny"})
    assert run.name == "tiny" and record.read(run.facts)["by_auto"] is False


@pytest.fixture
def attached(tmp_path: Path) -> tuple[lessons.RunFolder, platforms.Folders]:
    """A run in the attached output of an earlier version, and the folders of this session."""
    former = begun(tmp_path / "input/notebooks/me/qlora/runs", "mine", "tiny")
    former.data.mkdir()
    for name in ("data_card.json", "train.jsonl"):
        (former.data / name).write_text("{}")
    return former, platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")


def test_data_and_facts_of_an_attached_run_are_copied(attached: Any, tmp_path: Path) -> None:
    former, folders = attached
    (tmp_path / "secret").write_text("mine")
    (former.data / "planted.jsonl").symlink_to(tmp_path / "secret")
    record.begin(former.facts, {"set": {"data.source": "/etc/passwd", "lora.rank": 8}}, by_auto=True)
    run, resolved = opened({"RUN_NAME": "mine", "DATA": ""}, folders)
    assert run.has("02_data_prep") and record.read(run.facts)["by_auto"] is True
    assert sorted(file.name for file in run.data.iterdir()) == ["data_card.json", "train.jsonl"], "no link is followed"
    assert resolved.set_values == {"lora.rank": 8}, "it chooses no data of this machine"


@pytest.mark.parametrize(("model", "profile"), [("evil/model", "tiny"), ("tiny", "/kaggle/input/x/mine.yaml")])
def test_an_attached_run_does_not_choose_a_model_or_profile(attached: Any, model: str, profile: str) -> None:
    former, folders = attached
    record.begin(former.facts, {"model": model, "profile_source": profile}, by_auto=True)
    with refused("lessons.attached_run", folder=former.path):
        opened({"RUN_NAME": "mine"}, folders)
    assert not (folders.keep / "mine/facts.json").exists()
    with pytest.raises(lessons.CourseError) as caught:  # named by the learner, it is only missing
        opened({"RUN_NAME": "mine", "MODEL": model, "PROFILE": profile}, folders)
    assert caught.value.code != "lessons.attached_run"


@pytest.mark.parametrize("name", ["data", "facts.json"])
def test_an_attached_run_that_is_a_link_is_left_alone(attached: Any, name: str, tmp_path: Path) -> None:
    former, folders = attached
    (former.path / name).rename(tmp_path / name)
    (former.path / name).symlink_to(tmp_path / name)
    run, _ = opened({"RUN_NAME": "mine", "PROFILE": "tiny"}, folders)
    assert not run.data.exists() and record.read(run.facts)["by_auto"] is False


def test_an_attached_run_overwrites_no_data(attached: Any) -> None:
    mine = attached[1].keep / "mine/data/train.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    opened({"RUN_NAME": "mine"}, attached[1])
    assert mine.read_text() == "mine" and not mine.with_name("data_card.json").exists()


# --- the machine -----------------------------------------------------------------------------------------------------

GOODBYE = """
from pathlib import Path
from nbutils import checkpoints, lessons, platforms
from nbutils.platforms import shutdown as afterwards
afterwards.power_off.__defaults__ = (0.0, None)
run = lessons.RunFolder(Path("runs/demo"))
run.path.mkdir(parents=True)
platform = platforms.detect()
lessons.say_goodbye(platform, run, "text")
folder = Path("checkpoint-5"); folder.mkdir(); (folder / "x").write_text("x")
run.checkpoints.mkdir(); checkpoints.pack(folder, run.checkpoints, {})
with lessons.deferred_goodbye():
    lessons.say_goodbye(platform, run, "text")
print("LATER")
lessons.say_goodbye(platform, run, "text")
"""


@pytest.mark.parametrize("value", ["", "0", "off", "1"])
def test_a_machine_is_powered_off_only_when_asked_and_when_the_run_is_safe(tmp_path: Path, value: str) -> None:
    machine = simulate.autodl(tmp_path)
    machine.env |= {"NBUTILS_POWER_OFF": value, "NBUTILS_NOTICE": value}
    ran = machine.python("-c", GOODBYE)
    before, _, after = ran.stdout.partition("LATER\n")
    assert ran.returncode == 0, ran.stderr
    log = machine.root / "shutdown.log"
    if value == "1":
        assert "no checkpoint is kept" in before and "AUTODL_TOKEN" in before and before.count("Not powered off") == 1
        assert "Powered off" in after and log.read_text() == "called with []\n"
    else:
        assert before == after == "" and not log.exists()


def test_a_gpu_torch_has_no_kernels_for_stops_every_lesson_at_its_start(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    machine.packages += ("torch_p100",)
    ran = machine.python("-c", "from nbutils import lessons; lessons.find_machine(False)")
    assert ran.returncode == 1 and "GPU T4 x2" in ran.stderr and "cu126" in ran.stderr
