"""lessons: run folders, names, what an earlier lesson left."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import simulate

from nbutils import checkpoints, hardware, lessons, paths, platforms, record, scaling, training
from nbutils import config as reading
from nbutils.errors import CourseError

LOCAL = platforms.Platform("local", "test")


def opened(values: dict) -> tuple[lessons.RunFolder, object]:
    return lessons.open_run(values, LOCAL, platforms.folders(LOCAL), None)


def test_a_run_without_a_name_is_called_after_its_profile(home: Path) -> None:
    run, resolved = opened({"PROFILE": "auto"})
    assert run.path == home / "tiny" and resolved.name == "tiny"
    assert lessons.default_run_name("tiny", "/models/Qwen 2.5") == "tiny-Qwen-2.5"
    assert lessons.check_run_name(lessons.default_run_name("我的 配置", "")) == "我的-配置"


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "with space", "x" * 81])
def test_a_run_name_that_is_no_folder_is_refused(home: Path, name: str) -> None:
    with pytest.raises(CourseError, match="RUN_NAME is"):
        opened({"RUN_NAME": name})


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBUTILS_HOME", str(tmp_path / "file/runs"))
    with pytest.raises(CourseError, match="cannot be used for runs"):
        opened({})


def test_a_damaged_record_is_told_before_the_training(home: Path) -> None:
    (home / "tiny").mkdir(parents=True)
    (home / "tiny/facts.json").write_text("{")
    with pytest.raises(CourseError, match="cannot be read"):
        opened({})


def test_the_bundled_model_is_written_down_by_name(home: Path) -> None:
    lesson = lessons.begin("01_environment", {"__annotations__": {"PROFILE": str}, "PROFILE": "auto"})
    assert lesson.model == str(paths.TINY_MODEL) and lesson.model_name == "tiny"


def test_a_run_keeps_the_profile_and_model_it_began_with(home: Path) -> None:
    (home / "demo").mkdir(parents=True)
    (home / "demo/facts.json").write_text(json.dumps({"profile_source": "paper_r64", "model": str(paths.TINY_MODEL)}))
    _, resolved = opened({"PROFILE": "auto", "RUN_NAME": "demo"})
    assert (resolved.name, resolved.model) == ("paper_r64", str(paths.TINY_MODEL))
    assert resolved.choices["profile"].reason == "this run began with it"


def test_step_parameters_override_the_profile_and_say_so(home: Path) -> None:
    _, resolved = opened({"PROFILE": "tiny", "MAX_STEPS": 7, "SAVE_STEPS": 0})
    assert resolved.profile.train.max_steps == 7 and "MAX_STEPS" in resolved.choices["train.max_steps"].reason
    assert "SAVE_STEPS" not in resolved.choices["train.save_steps"].reason


def test_set_is_kept_for_every_later_lesson_of_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, resolved = opened({"PROFILE": "tiny", "SET": "lora.rank=8, quantization.type=fp4"})
    assert record.read(run.facts)["set"] == resolved.set_values == {"lora.rank": 8, "quantization.type": "fp4"}
    for later in (
        {"RUN_NAME": "tiny"},
        {"PROFILE": "auto", "RUN_NAME": "tiny", "SET": ""},
        {"PROFILE": "auto", "SET": ""},
        {"PROFILE": "tiny"},  # a lesson that has no SET
        {"PROFILE": "tiny", "SET": ""},  # `run --profile tiny --only 03`
    ):
        _, again = opened(later)
        assert again.profile.lora.rank == 8 and again.profile.quantization.type == "fp4", later
        assert "parameter SET" in again.choices["lora.rank"].reason
    _, anew = opened({"PROFILE": "tiny", "SET": "", "RESUME": "never"})
    assert anew.profile.lora.rank != 8 and record.read(run.facts)["set"] == {}
    assert "dropped" in capsys.readouterr().out.splitlines()[-1]


def test_a_parameter_of_its_own_wins_over_set(home: Path) -> None:
    run, resolved = opened({"SET": "train.max_steps=9, train.save_steps=4", "MAX_STEPS": 7})
    assert (resolved.profile.train.max_steps, resolved.profile.train.save_steps) == (7, 4)
    assert resolved.choices["train.max_steps"].reason == "parameter MAX_STEPS"
    assert opened({"RUN_NAME": run.name})[1].profile.train.max_steps == 9


def test_what_cannot_be_meant_is_refused_before_anything_is_made(home: Path) -> None:
    with pytest.raises(CourseError, match="RESUME is 'yes'"):
        opened({"PROFILE": "tiny", "RESUME": "yes"})
    with pytest.raises(CourseError, match=r"train\.max_steps=0"):
        opened({"PROFILE": "tiny", "SET": "train.epochs=3"})
    assert not (home / "tiny").exists()
    assert opened({"PROFILE": "tiny", "SET": "train.epochs=3, train.max_steps=0"})[1].profile.train.epochs == 3


def test_a_set_that_does_not_fit_what_was_trained_is_not_remembered(home: Path) -> None:
    run, _ = opened({"SET": "lora.rank=8"})
    run.checkpoints.mkdir()
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    assert opened({"SET": "lora.rank=4"})[1].profile.lora.rank == 4  # and lesson 03 refuses it by its fingerprint
    assert opened({"RUN_NAME": run.name})[1].profile.lora.rank == 8
    opened({"SET": "lora.rank=4", "RESUME": "never"})
    assert record.read(run.facts)["set"] == {"lora.rank": 4}
    namespace = {"__annotations__": {"SET": str}, "SET": "train.max_steps=3"}
    lesson = lessons.begin("03_qlora", namespace)
    lesson.finish()
    facts = record.read(run.facts)
    assert facts["set"] == {"train.max_steps": 3}
    assert facts["lessons"]["03_qlora"]["settings"]["train.max_steps"] == 3
    assert "train.warmup_ratio" not in run.report.read_text()


def test_set_is_part_of_what_must_be_equal_to_continue(home: Path) -> None:
    marks = []
    for text in ("", "train.save_steps=3", "lora.rank=8", "train.learning_rate=1e-4", "quantization.type=fp4"):
        profile = opened({"PROFILE": "tiny", "SET": text})[1].profile
        parts = {"method": profile.quantization.model_dump(), "lora": profile.lora.model_dump()}
        train = profile.train.model_dump(exclude=training.MAY_CHANGE)
        marks.append(checkpoints.fingerprint(train=train, **parts))
    checkpoints.refuse_other_run(marks[0], marks[1])
    for other in marks[2:]:
        with pytest.raises(CourseError, match="another training"):
            checkpoints.refuse_other_run(marks[0], other)


def test_begin_and_finish_write_the_promised_facts(home: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    lesson = lessons.begin("01_environment", {"__annotations__": {"PROFILE": str}, "PROFILE": "auto"})
    lesson.finish(answer=42)
    facts = json.loads((home / "tiny/facts.json").read_text())
    assert {"platform", "profile", "versions"} <= set(facts) and facts["profile"] == "tiny"
    assert facts["lessons"]["01_environment"]["answer"] == 42 and facts["lessons"]["01_environment"]["seconds"] >= 0
    assert "local" in capsys.readouterr().out and (home / "tiny/report.md").exists()


def test_a_failing_earlier_lesson_is_named_with_its_last_lines(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "02_data_prep.py"
    script.write_text("print('first'); print(' 50%|##', end='\\r'); raise SystemExit('it broke')")
    with pytest.raises(CourseError, match=r"(?s)lesson 02_data_prep failed .*it broke"):
        scaling.launch(script, {}, tmp_path)
    assert capsys.readouterr().out == "\r  | first\n\r  |  50%|##\r  | it broke\n"


def test_an_earlier_lesson_runs_with_the_same_profile_and_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened({"RUN_NAME": "demo", "SET": "lora.target_modules=[q_proj, v_proj], lora.rank=8"})
    lesson = lessons.begin("04_merge", {"__annotations__": {"RUN_NAME": str}, "RUN_NAME": "demo"})
    (tmp_path / "03_qlora.py").write_text(
        "PROFILE: str = 'auto'\nRUN_NAME: str = ''\nSET: str = ''\nfrom nbutils import parameters\n"
        "from pathlib import Path\nimport json, os\n"
        "v = parameters.collect(globals())\nf = Path(os.environ['NBUTILS_HOME'], RUN_NAME, 'adapter')\n"
        "f.mkdir(parents=True)\n"
        "(f / 'complete.json').write_text(json.dumps({'about': v, 'files': {}}))\n"
    )
    monkeypatch.setattr(lessons, "NOTEBOOKS", tmp_path)
    lesson.require("03_qlora")
    passed = json.loads((home / "demo/adapter/complete.json").read_text())["about"]
    assert passed["PROFILE"] == "tiny"
    assert reading.settings_in(passed["SET"]) == {"lora.target_modules": ["q_proj", "v_proj"], "lora.rank": 8}
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    lesson.require("03_qlora")  # is there now: nothing runs


def test_a_merge_older_than_its_adapter_does_not_count(tmp_path: Path) -> None:
    run = lessons.RunFolder(tmp_path)
    assert not run.has("03_qlora") and not run.has("04_merge")
    with paths.whole_folder(run.adapter, {"steps": 10}):
        pass
    with paths.whole_folder(run.merged, {"adapter": {"steps": 10}}):
        pass
    assert run.has("03_qlora") and run.has("04_merge")
    with paths.whole_folder(run.adapter, {"steps": 20}):
        pass
    assert run.has("03_qlora") and not run.has("04_merge")


CARD = hardware.Card("A card", (8, 0), 24.0, 1)


def begun(home: Path, name: str, profile: str, by_auto: bool = True, **trained: int) -> None:
    """A run folder with one kept checkpoint."""
    run = lessons.RunFolder(home / name)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    record.begin(run.facts, {"profile": profile, "profile_source": profile, "model": "tiny"}, by_auto)
    if trained:
        record.update(run.facts, {}, "03_qlora", trained)


def test_an_unnamed_run_that_was_cut_off_goes_on_whatever_card_comes_next(home: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    begun(home, "done", "t4_16gb", steps=9, planned_steps=9)
    begun(home, "named", "t4_16gb", by_auto=False)
    begun(home, "toy", "tiny")
    assert lessons.unfinished_run(home, CARD) == ""
    begun(home, "t4_16gb", "t4_16gb", steps=4, planned_steps=9)
    assert lessons.unfinished_run(home, None) == "" and "needs a card" in capsys.readouterr().out
    assert lessons.unfinished_run(home, CARD) == "t4_16gb"
    run, _ = opened({"PROFILE": "tiny"})
    assert run.name == "tiny" and record.read(run.facts)["by_auto"] is False


def test_a_run_notes_at_its_start_with_what_it_began(home: Path) -> None:
    run, resolved = opened({"RUN_NAME": "mine"})
    facts = record.read(run.facts)
    assert facts["profile"] == resolved.name and facts["model"] == "tiny" and facts["lessons"] == {}
    again, _ = opened({"RUN_NAME": "mine"})
    assert record.read(again.facts) == facts


def test_data_and_record_of_an_attached_former_version_are_taken_over(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    former = lessons.RunFolder(tmp_path / "input/notebooks/me/qlora/runs/mine")
    begun(former.path.parent, "mine", "tiny")
    former.data.mkdir()
    (former.data / "data_card.json").write_text("{}")
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")
    run, _ = lessons.open_run({"RUN_NAME": "mine"}, LOCAL, folders, None)
    assert run.has("02_data_prep") and record.read(run.facts)["by_auto"] is True


@pytest.mark.parametrize(("model", "profile"), [("evil/model", "tiny"), ("tiny", "/kaggle/input/x/mine.yaml")])
def test_an_attached_run_does_not_choose_a_model_or_profile_by_itself(
    tmp_path: Path, model: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    former = lessons.RunFolder(tmp_path / "input/notebooks/me/qlora/runs/mine")
    begun(former.path.parent, "mine", "tiny")
    record.begin(former.facts, {"model": model, "profile_source": profile}, by_auto=True)
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")
    with pytest.raises(CourseError, match=r"begun elsewhere.*(evil/model|mine\.yaml)"):
        lessons.open_run({"RUN_NAME": "mine"}, LOCAL, folders, None)
    assert f"model {model}" in capsys.readouterr().out and not (tmp_path / "runs/mine/facts.json").exists()
    lessons._require_named(record.read(former.facts), former.path, {"MODEL": model, "PROFILE": profile})


def test_links_in_an_attached_run_are_not_followed(tmp_path: Path) -> None:
    former = lessons.RunFolder(tmp_path / "input/notebooks/me/qlora/runs/mine")
    begun(former.path.parent, "mine", "tiny")
    former.data.mkdir()
    (former.data / "data_card.json").write_text("{}")
    (tmp_path / "secret").write_text("mine")
    (former.data / "train.jsonl").symlink_to(tmp_path / "secret")
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")
    run, _ = lessons.open_run({"RUN_NAME": "mine"}, LOCAL, folders, None)
    assert [file.name for file in run.data.iterdir()] == ["data_card.json"]


@pytest.mark.parametrize("name", ["data", "facts.json"])
def test_an_attached_run_that_is_a_link_is_left_alone(tmp_path: Path, name: str) -> None:
    former = lessons.RunFolder(tmp_path / "input/notebooks/me/qlora/runs/mine")
    begun(former.path.parent, "mine", "tiny")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data_card.json").write_text("{}")
    former.facts.replace(elsewhere / "facts.json")
    (former.path / name).symlink_to(elsewhere if name == "data" else elsewhere / name)
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")
    run, _ = lessons.open_run({"RUN_NAME": "mine", "PROFILE": "tiny"}, LOCAL, folders, None)
    assert not run.data.exists() and record.read(run.facts)["by_auto"] is False


def test_an_attached_run_overwrites_no_data_and_chooses_none(tmp_path: Path) -> None:
    former = lessons.RunFolder(tmp_path / "input/notebooks/me/qlora/runs/mine")
    begun(former.path.parent, "mine", "tiny")
    former.data.mkdir()
    for name in ("data_card.json", "train.jsonl"):
        (former.data / name).write_text("{}")
    mine = tmp_path / "runs/mine/data/train.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "runs", tmp_path / "input")
    record.begin(former.facts, {"set": {"data.source": "/etc/passwd"}}, by_auto=True)
    _, resolved = lessons.open_run({"RUN_NAME": "mine", "DATA": ""}, LOCAL, folders, None)
    assert not resolved.profile.data.source and not resolved.set_values
    assert mine.read_text() == "mine" and not mine.with_name("data_card.json").exists()


def test_scratch_is_the_users_alone(tmp_path: Path) -> None:
    folders = platforms.Folders(tmp_path, tmp_path / "scratch/course", tmp_path / "runs", None)
    run, _ = lessons.open_run({"RUN_NAME": "mine"}, LOCAL, folders, None)
    assert all(place.stat().st_mode & 0o077 == 0 for place in (folders.scratch, run.path))


@pytest.mark.parametrize("value", ["", "0", "off", "no", "false"])
def test_nobody_is_powered_off_who_did_not_say_yes(value: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("NBUTILS_POWER_OFF", value)
    monkeypatch.setenv("NBUTILS_NOTICE", value)
    lessons.say_goodbye(platforms.Platform("autodl", ""), lessons.RunFolder(Path("x")), "")
    assert capsys.readouterr().out == ""


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
with lessons.goodbye_later():
    lessons.say_goodbye(platform, run, "text")
print("LATER")
lessons.say_goodbye(platform, run, "text")
"""


def test_autodl_is_powered_off_only_when_asked_and_when_the_work_is_safe(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    ran = machine.python("-c", GOODBYE)
    assert ran.stdout == "LATER\n" and not (machine.root / "shutdown.log").exists(), ran.stderr
    (machine.root / "checkpoint-5/x").unlink()
    shutil.rmtree(machine.root / "runs")
    (machine.root / "checkpoint-5").rmdir()
    machine.env |= {"NBUTILS_POWER_OFF": "1", "NBUTILS_NOTICE": "1"}
    said, _, then = machine.python("-c", GOODBYE).stdout.partition("LATER\n")
    assert "no checkpoint is kept" in said and "AUTODL_TOKEN" in said and said.count("Not powered off") == 1
    assert "Powered off" in then and (machine.root / "shutdown.log").read_text() == "called with []\n"


def test_a_card_torch_has_no_kernels_for_stops_every_lesson_at_its_start(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    machine.packages += ("torch_p100",)
    ran = machine.python("-c", "from nbutils import lessons; lessons.find_machine(False)")
    assert ran.returncode == 1 and "GPU T4 x2" in ran.stderr and "cu126" in ran.stderr
