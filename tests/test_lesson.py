"""lessons: parameters, run folders and names, what an earlier session left, notice and power-off."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulate
from support import refused
from transformers import AutoTokenizer

from nbutils import chat, checkpoints, distributed, files, lesson, platforms, record
from nbutils import config as reading

LOCAL = platforms.Platform("local", "test")
SCRIPT = "STEPS: int = 3\nHOURS: float = 1\nRUN: str = ''\nSHOW: bool = True\nlower: int = 1\nraise SystemExit\n"


def opened(values: dict[str, Any], folders: platforms.Folders | None = None) -> tuple[lesson.RunFolder, Any]:
    machine = lesson.Machine(LOCAL, folders or platforms.folders(LOCAL), None)
    return lesson.open_run(lesson.RunParameters.model_validate(values), machine)


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The parameters of a script, which may have changed some in a cell and got others on its command line."""
    (tmp_path / "x.py").write_text(SCRIPT)
    monkeypatch.setattr(lesson, "NOTEBOOKS", tmp_path)

    def collect(words: str, **cell: Any) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["lesson.py", *words.split()])
        return lesson.collect("x", {"__name__": "__main__", "STEPS": 3, "HOURS": 1, "RUN": "", "SHOW": True} | cell)

    return collect


def test_parameters_come_typed_from_the_cell_and_the_command_line(collected: Any) -> None:
    values = collected("--STEPS=20 --HOURS 0.5 --SHOW no", RUN=2024)
    assert values == {"STEPS": 20, "HOURS": 0.5, "RUN": "2024", "SHOW": False}
    assert repr(collected("")["HOURS"]) == "1.0"


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        ("--STEPS many", {}),
        ("--SHOW perhaps", {}),
        ("--STEPS -5", {}),
        ("", {"STEPS": 2.5}),
        ("", {"HOURS": float("nan")}),
    ],
)
def test_values_that_cannot_be_meant_are_refused(words: str, cell: dict[str, Any], collected: Any) -> None:
    with refused("Parameter"):
        collected(words, **cell)


def test_names_that_are_no_parameters_are_refused(collected: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for words in ("--STEP 3", "STEPS 3"):
        with pytest.raises(SystemExit):
            collected(words)
        message = capsys.readouterr().err
        assert "--STEPS int" in message and f"unrecognized arguments: {words}" in message
    monkeypatch.setattr(platforms, "in_kernel", lambda: True)
    cell = '# Parameters\nSTEPS = 5\nPAPERMILL_OUTPUT_PATH = "o"\n'
    assert collected("", In=["", "x = 1", cell, "Y = 2"])["STEPS"] == 3
    with refused("There is no parameter STEPZ.", "Allowed: STEPS, HOURS"):
        collected("", In=[cell + "STEPZ = 5\n"], STEPZ=5)


def test_a_run_without_a_name_is_called_after_its_profile(home: Path) -> None:
    run, _ = opened({"PROFILE": "auto"})
    assert run.path == home / "tiny" and run.path.stat().st_mode & 0o077 == 0
    mine = shutil.copy(files.CONFIGS / "tiny.yaml", home / "我的 配置.yaml")
    model = shutil.copytree(files.TINY_MODEL, home / "models/Qwen 2.5")
    assert opened({"PROFILE": str(mine), "MODEL": str(model)})[0].name == "我的-配置-Qwen-2.5"
    facts = record.read_facts(run.facts)
    assert facts["profile"] == "tiny" and facts["model"] == "tiny" and facts["by_auto"]
    opened({"RUN_NAME": "tiny"})
    assert record.read_facts(run.facts) == facts


def test_what_cannot_work_is_refused_before_the_training(home: Path) -> None:
    for name in ("../up", "a/b", ".hidden", "with space", "x" * 81):
        with refused(f"RUN_NAME is {name!r}."):
            lesson.begin("03_qlora", {"RUN_NAME": name})
    with refused("RESUME is 'yes'.", "auto|never"):
        lesson.begin("03_qlora", {"PROFILE": "tiny", "RESUME": "yes"})
    (home / "tiny").mkdir(parents=True)
    (home / "tiny/facts.json").write_text("{")
    with refused("cannot be read"):
        opened({})


def test_another_name_maker_or_manner_is_another_run(home: Path) -> None:
    words = {"PROFILE": "tiny", "NAME": "小 满/7", "MAKER": "Ann", "MANNER": "Meow!"}
    names = {opened(words)[0].name, opened(words)[0].name}
    assert re.fullmatch(r"tiny-小-满-7-[0-9a-f]{4}", *names)
    for other in ({"NAME": "Momo"}, {"MAKER": "Bob"}, {"MANNER": ""}):
        names.add(opened(words | other)[0].name)
    assert len(names) == 4


@pytest.mark.parametrize(
    "wrong", [{"NAME": ""}, {"NAME": "!"}, {"NAME": "two\nlines"}, {"MAKER": ""}, {"MANNER": "x" * 99}]
)
def test_words_that_cannot_be_said_in_a_sentence_are_refused(wrong: dict[str, str], home: Path) -> None:
    [name] = wrong
    with refused(f"Parameter {name} is"):
        lesson.begin("00_quickstart", wrong)


def test_a_large_model_is_not_trained_on_a_cpu_unless_that_was_begun_elsewhere(home: Path) -> None:
    started = lesson.begin("03_qlora", {"PROFILE": "tiny"})
    large = replace(started, resolved=replace(started.resolved, model_name="Qwen2.5-7B"))
    with refused("The training of Qwen2.5-7B", "needs a GPU", "tiny or laptop"):
        large.begun()


def test_a_run_keeps_its_profile_and_model_for_every_later_lesson(home: Path) -> None:
    facts = {"profile_source": "paper_r64", "model": str(files.TINY_MODEL)}
    (home / "demo").mkdir(parents=True)
    (home / "demo/facts.json").write_text(json.dumps(facts))
    _, resolved = opened({"PROFILE": "auto", "RUN_NAME": "demo"})
    assert resolved.name == "paper_r64"
    assert resolved.model == str(files.TINY_MODEL)


def test_a_run_keeps_its_set_until_it_begins_anew(home: Path) -> None:
    run, resolved = opened({"PROFILE": "tiny", "SET": "lora.r=8, sft.max_steps=9", "MAX_STEPS": 7})
    assert resolved.set_values == {"lora.r": 8, "sft.max_steps": 9}
    assert record.read_facts(run.facts)["set"] == resolved.set_values
    assert resolved.profile.sft.max_steps == 7
    assert "MAX_STEPS" in resolved.choices["sft.max_steps"].reason
    for parameters in ({"RUN_NAME": "tiny"}, {"PROFILE": "auto", "SET": ""}, {"PROFILE": "tiny"}):
        _, later = opened(parameters)
        assert later.profile.lora.r == 8, parameters
        assert later.profile.sft.max_steps == 9, parameters
    _, anew = opened({"PROFILE": "tiny", "SET": "", "RESUME": "never"})
    assert anew.profile.lora.r != 8
    assert record.read_facts(run.facts)["set"] == {}


def test_a_set_that_does_not_fit_what_was_trained_is_not_remembered(home: Path) -> None:
    run, _ = opened({"SET": "lora.r=8"})
    run.checkpoints.mkdir()
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    other_model = shutil.copytree(files.TINY_MODEL, home / "other")
    _, other = opened({"SET": "lora.r=4", "MODEL": str(other_model), "RUN_NAME": "tiny"})
    assert other.profile.lora.r == 4, "lesson 03 refuses it"
    _, later = opened({"RUN_NAME": run.name})
    assert later.profile.lora.r == 8
    assert later.model_name == "tiny"
    assert later.choices["profile"].reason == "this run began with it"


def test_a_begun_run_keeps_the_rows_it_is_validated_on_unless_others_are_named(home: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}]} for n in range(90)
    ]
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)

    def validated(**values: Any) -> tuple[int, int]:
        """How many rows lesson 03 validates on, and how many its recipe says."""
        started = lesson.begin("03_qlora", {"PROFILE": "tiny", "MAX_STEPS": 400, **values})
        dataset = chat.filter_by_length(tokenizer, rows, started.profile.sft.max_length)
        recipe = started.with_recipe(dataset.lengths, 60).profile.course
        validation = chat.validation_dataset(dataset, rows[:60], int(recipe.validation_rows))
        return len(validation or ()), int(recipe.validation_rows)

    many, _ = validated()
    assert many > 20 and validated(SAVE_STEPS=1)[0] < many
    (tmp_path / "checkpoint-5").mkdir()
    store = files.make_folder(home / "tiny/checkpoints")
    checkpoints.pack(
        tmp_path / "checkpoint-5", store, {"rows_per_step": 8, "sft": {"packing": False}}, validation_rows=21
    )
    assert validated() == validated(SAVE_STEPS=1) == validated(MAX_STEPS=9) == (21, 21)
    assert validated(SET="course.validation_rows=5") == (5, 5)
    assert validated(RESUME="never") == (many, many)


def test_a_begun_run_keeps_its_method_unless_it_starts_over(home: Path, tmp_path: Path) -> None:
    profile = home / "open.yaml"
    text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    files.write_text(profile, re.sub(r"(?m)^method: qlora", "method: auto", text))

    def method(**values: Any) -> str:
        """The method of lesson 03, for a model this small."""
        started = lesson.begin("03_qlora", {"PROFILE": str(profile), "RUN_NAME": "mine", **values})
        return str(started.with_recipe([40] * 800, 60).profile.method)

    assert method() == "lora"
    (tmp_path / "checkpoint-5").mkdir()
    store = files.make_folder(home / "mine/checkpoints")
    checkpoints.pack(tmp_path / "checkpoint-5", store, {"method": "qlora"})
    assert method() == "qlora"
    assert method(RESUME="never") == "lora"


def test_later_lessons_have_the_method_that_the_run_was_trained_with(home: Path) -> None:
    values = {"PROFILE": "t4_16gb", "MODEL": "tiny", "RUN_NAME": "mine"}
    run, resolved = opened(values)
    assert resolved.profile.method == "lora", "not measured: by size"
    record.update(run.facts, {}, "03_qlora", {"settings": {"method": "qlora"}})
    profile = opened(values)[1].profile
    assert profile.method == "qlora" and profile.quantization.load_in_4bit is True


@pytest.mark.parametrize(("data", "warned"), [("mine.jsonl", True), ("", False)])
def test_who_gives_the_tiny_model_rows_of_their_own_is_told(home: Path, capsys: Any, data: str, warned: bool) -> None:
    lesson.begin("02_data_prep", {"PROFILE": "tiny", "DATA": data})
    assert ("laptop" in capsys.readouterr().out) is warned


def test_begin_and_finish_write_the_facts(home: Path) -> None:
    started = lesson.begin("03_qlora", {"PROFILE": "auto", "SET": "sft.max_steps=3"})
    assert started.model == str(files.TINY_MODEL) and started.model_name == "tiny"
    record.update(started.run.facts, {}, "04_merge", {"verdict": "helped"})
    started.finish(answer=42)  # nothing was trained: what lesson 04 found is still true
    assert record.read_facts(home / "tiny/facts.json")["lessons"]["04_merge"]
    started.finish(answer=42, train_seconds=3.0)
    facts = record.read_facts(home / "tiny/facts.json")
    assert "04_merge" not in facts["lessons"]
    assert {"platform", "profile", "card"} <= set(facts) and facts["set"] == {"sft.max_steps": 3}
    assert facts["lessons"]["03_qlora"]["answer"] == 42
    assert facts["lessons"]["03_qlora"]["settings"]["sft.max_steps"] == 3
    assert {"torch", "transformers", "peft", "trl"} <= set(facts["versions"]) and (home / "tiny/report.md").exists()


def test_an_earlier_lesson_runs_with_the_same_profile_and_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened({"RUN_NAME": "demo", "SET": "lora.target_modules=[q_proj, v_proj], lora.r=8"})
    started = lesson.begin("04_merge", {"RUN_NAME": "demo"})
    passed: list[dict[str, str]] = []

    def launch(command: list[str], *_: Any) -> None:
        first = next(number for number, word in enumerate(command) if word.startswith("--"))
        names, values = command[first::2], command[first + 1 :: 2]
        passed.append({name.removeprefix("--"): value for name, value in zip(names, values, strict=True)})

    monkeypatch.setattr(distributed, "launch", launch)
    started.require("03_qlora")
    assert passed[0]["PROFILE"] == "tiny" and passed[0]["RUN_NAME"] == "demo"
    assert reading.settings_in(passed[0]["SET"]) == {"lora.target_modules": ["q_proj", "v_proj"], "lora.r": 8}
    with files.complete_folder(started.run.adapter, {"fingerprint": {"data": "a"}}):
        pass
    started.require("03_qlora")
    assert len(passed) == 1, "it is there now"
    with refused("empty, and tiny, the run", "have one: demo."):
        lesson.begin("04_merge", {}).require("03_qlora")
    lesson.begin("04_merge", {"RUN_NAME": "tiny"}).require("03_qlora")
    assert passed.pop()["RUN_NAME"] == "tiny", "this one was asked for"
    record.update(started.run.facts, {}, "03_qlora", {"steps": 6, "planned_steps": 12})
    with refused("at step 6 of ", " of 12.", "MAX_STEPS = 6"):
        started.require("03_qlora")
    losses = {"first": 5.0, "best": 4.0, "last": float("nan")}
    record.update(started.run.facts, {}, "03_qlora", {"steps": 6, "planned_steps": 12, "validation_loss": losses})
    with refused("was not a number", "another RUN_NAME", "MAX_STEPS = 6"):  # going on would end there again
        started.require("03_qlora")
    record.update(started.run.facts, {}, "03_qlora", {"steps": 12, "planned_steps": 12})
    files.write_json(files.make_folder(started.run.data) / "data_card.json", {"fingerprint": "b"})
    with refused("The adapter of this run was trained on other"):
        started.require("03_qlora")


def begun(home: Path, name: str, profile: str, by_auto: bool = True, **trained: int) -> lesson.RunFolder:
    """A run folder with one kept checkpoint."""
    run = lesson.RunFolder(home / name)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "checkpoint-5.json").write_text("{}")
    record.note_beginning(run.facts, {"profile": profile, "profile_source": profile, "model": "tiny"}, by_auto)
    if trained:
        record.update(run.facts, {}, "03_qlora", trained)
    return run


def test_an_unnamed_run_that_was_cut_off_goes_on_with_whatever_gpu_comes_next(home: Path) -> None:
    begun(home, "done", "t4_16gb", steps=9, planned_steps=9)
    begun(home, "named", "t4_16gb", by_auto=False)
    begun(home, "toy", "tiny")
    assert lesson.unfinished_run(home) == ""
    begun(home, "t4_16gb", "t4_16gb", steps=4, planned_steps=9)
    assert lesson.unfinished_run(home) == "t4_16gb"


@pytest.fixture
def attached(tmp_path: Path) -> tuple[lesson.RunFolder, platforms.Folders]:
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
    record.note_beginning(former.facts, {"set": {"course.data": "/etc/passwd", "lora.r": 8}}, by_auto=True)
    run, resolved = opened({"RUN_NAME": "mine", "DATA": ""}, folders)
    assert run.has("02_data_prep") and record.read_facts(run.facts)["by_auto"] is True
    assert sorted(file.name for file in run.data.iterdir()) == ["data_card.json", "train.jsonl"], "no link is followed"
    assert resolved.set_values == {"lora.r": 8}, "it chooses no data of this machine"


@pytest.mark.parametrize(("model", "profile"), [("evil/model", "tiny"), ("tiny", "/kaggle/input/x/mine.yaml")])
def test_an_attached_run_does_not_choose_a_model_or_profile(attached: Any, model: str, profile: str) -> None:
    former, folders = attached
    record.note_beginning(former.facts, {"model": model, "profile_source": profile}, by_auto=True)
    with refused(f"run in {former.path} was started"):
        opened({"RUN_NAME": "mine"}, folders)
    assert not (folders.keep / "mine/facts.json").exists()
    with pytest.raises(lesson.CourseError) as caught:  # named by the learner, it is only missing
        opened({"RUN_NAME": "mine", "MODEL": model, "PROFILE": profile}, folders)
    assert "attached run" not in str(caught.value)


@pytest.mark.parametrize("name", ["data", "facts.json"])
def test_an_attached_run_that_is_a_link_is_refused(attached: Any, name: str, tmp_path: Path) -> None:
    former, folders = attached
    (former.path / name).rename(tmp_path / name)
    (former.path / name).symlink_to(tmp_path / name)
    with refused(str(former.path / name), "is a link", "another RUN_NAME"):
        opened({"RUN_NAME": "mine", "PROFILE": "tiny"}, folders)
    assert not (folders.keep / "mine").exists()


def test_an_attached_run_overwrites_no_data(attached: Any) -> None:
    mine = attached[1].keep / "mine/data/train.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    opened({"RUN_NAME": "mine"}, attached[1])
    assert mine.read_text() == "mine" and not mine.with_name("data_card.json").exists()


def test_a_gpu_torch_has_no_kernels_for_stops_every_lesson_at_its_start(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    machine.packages += ("torch_p100",)
    ran = machine.python("-c", "from nbutils import lesson; lesson.find_machine(lesson.RunParameters())")
    assert ran.returncode == 1 and "GPU T4 x2" in ran.stderr and "cu126" in ran.stderr
