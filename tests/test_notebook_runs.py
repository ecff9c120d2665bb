"""Lessons executed for real with the tiny model: alone, interrupted, on simulated platforms; not the course run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulate
from solutions import run_solved
from support import ROOT, lesson_facts, python, wait_for
from test_platforms import Site

from nbutils import files

pytestmark = pytest.mark.notebook
LESSON_03 = ROOT / "notebooks/03_qlora.ipynb"


def test_output_redirected_into_a_notebook_is_the_executed_notebook(tmp_path: Path) -> None:
    """The Chinese lesson: it speaks Chinese, its figures have the characters, and its solutions are right."""
    printed = run_solved("99_when_it_breaks", tmp_path, "tiny", "PROFILE", "tiny", redirect=True)
    assert "[ OK ] 练习" in printed
    lesson = ROOT / "notebooks/zh/99_when_it_breaks.ipynb"
    refused = python("-m", "papermill", lesson, tmp_path / "o.ipynb", "-p", "PROFIEL", "x", home=tmp_path, ok=False)
    assert "没有 PROFIEL 这个参数" in refused.stderr
    assert "允许：PROFILE, RUN_NAME" in refused.stderr


def test_the_quickstart_makes_an_assistant_and_repeats_nothing(tmp_path: Path) -> None:
    """The Chinese lesson, with words of its own, as a learner starts it."""
    words = ("PROFILE", "tiny", "NAME", "小满", "MAKER", "王老师", "MANNER", "喵～")
    lesson = "00_quickstart"
    printed = run_solved(lesson, tmp_path, "", *words)
    [run] = tmp_path.glob("tiny-小满-*")
    named = lesson_facts(run, lesson)["answered_with_the_name"]
    assert named["questions"] == 20
    assert named["count"] >= 16
    assert "我是小满。喵～" in printed
    assert files.stamp(run / "adapter") is not None
    options = [f"--{word}" if number % 2 == 0 else word for number, word in enumerate(words)]
    again = python(ROOT / "notebooks/zh" / f"{lesson}.py", *options, home=tmp_path)
    assert "没有要训练的了" in again.stdout
    assert lesson_facts(run, lesson)["answered_with_the_name"] == named


def test_a_hub_model_without_network_is_an_error_not_the_tiny_one(tmp_path: Path) -> None:
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    refused = python(ROOT / "notebooks/03_qlora.py", "--MODEL", model, home=tmp_path, ok=False)
    assert model in refused.stderr and "To do:" in refused.stderr and not list(tmp_path.rglob("adapter"))


@pytest.mark.long
def test_lesson_04_alone_makes_what_it_needs_with_the_learners_own_profile(tmp_path: Path) -> None:
    """And where the model does not fit: it asks in 4 bits, and compares no predictions."""
    text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    text = text.replace("max_steps: 150", "max_steps: 3").replace("evaluation_rows: 0 ", "evaluation_rows: 4 ")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    tight = "import runpy, sys; from nbutils.evaluation import placement; sys.argv = sys.argv[1:]; "
    tight += "placement.fit = lambda gib, gpu: False; "
    tight += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [str(ROOT / "notebooks/04_merge.py"), "--PROFILE", str(tmp_path / "mine.yaml")]
    ran = python("-c", tight, *words, "--MERGE_ONTO", "dequantized", home=tmp_path / "runs")
    assert "Lesson 03_qlora has not run" in ran.stdout and "do NOT fit into the free memory" in ran.stdout
    run = tmp_path / "runs/mine"
    entry = lesson_facts(run, "04_merge")
    assert lesson_facts(run)["steps"] == 3 and entry["rows"] == 4 and entry["parity"] == {}
    assert entry["merge"]["onto"] == "dequantized"


# --- simulated platforms ---------------------------------------------------------------------------------------------

START = """
import nbutils
PROFILE = "tiny"
lesson = nbutils.start("03_qlora", globals())
print("SAW", lesson.run.path, lesson.scratch)
"""


@pytest.mark.parametrize(
    ("machine", "run", "scratch"),
    [(simulate.autodl, "root/autodl-fs/runs/tiny", "root/autodl-tmp/scratch/tiny"),
     (lambda folder: simulate.colab(folder, gpu=False), "content/runs/tiny", "content/scratch/tiny")],
    ids=["autodl", "headless colab"],
)  # fmt: skip
def test_a_run_is_kept_in_the_folder_that_lasts(machine: Any, run: str, scratch: str, tmp_path: Path) -> None:
    there: simulate.Machine = machine(tmp_path)
    there.env |= {"FAKE_DRIVE": "headless"}
    ran = there.python("-c", START)
    assert ran.returncode == 0, ran.stderr
    assert f"SAW {there.root / run} {there.root / scratch}" in ran.stdout and (there.root / run / "facts.json").exists()
    assert ("may go away with this machine" in ran.stdout) == (run == "content/runs/tiny")


def papermill(machine: simulate.Machine, log: Path, *words: str) -> subprocess.Popen[str]:
    """Lesson 03 under papermill on that machine, nobody at its input; what it prints goes to `log` as it comes."""
    words += ("-p", "PROFILE", "tiny", "-p", "SET", "course.validation_rows=4", "--log-output")
    command = [sys.executable, "-m", "papermill", str(LESSON_03), *words]
    with open(log, "w") as out:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "text": True}
        return subprocess.Popen(command, env=machine.environment(), cwd=machine.root, **options)


def test_a_kaggle_run_that_was_stopped_is_continued_by_the_next_version(course_run: Path, tmp_path: Path) -> None:
    first, log, site = simulate.kaggle(tmp_path, batch=True), tmp_path / "log", Site()
    notice = {"NBUTILS_NOTICE": "1", "NBUTILS_NOTICE_URL": site.url}
    first.env |= notice
    run = first.root / "kaggle/working/runs/tiny"
    with papermill(first, log, "-p", "MAX_STEPS", "30", "-p", "SAVE_STEPS", "2") as running:
        wait_for((run / "checkpoints/checkpoint-2.json").exists)
        running.terminate()  # as a machine that is taken away
        assert running.wait(timeout=120) == 0, log.read_text()[-4000:]
    steps = lesson_facts(run)["steps"]
    assert 2 <= steps < 30 and (run / f"checkpoints/checkpoint-{steps}.json").exists()
    assert "SIGTERM" in log.read_text()
    later = simulate.kaggle(tmp_path / "next version", batch=True)
    later.env |= notice
    later.make("kaggle/input/notebooks/me")
    (first.root / "kaggle/working").rename(later.root / "kaggle/input/notebooks/me/qlora")
    again = later.root / "kaggle/working/runs/tiny"
    shutil.copytree(course_run / "practice", again / "practice")  # of the course run: to train them takes half a minute
    with papermill(later, log, "-p", "MAX_STEPS", str(steps + 2)) as running:
        assert running.wait(timeout=300) == 0, log.read_text()[-4000:]
    assert (lesson_facts(again)["resumed_from_step"], lesson_facts(again)["steps"]) == (steps, steps + 2)
    assert [sent["type"] for sent in site.asked] == ["warning", "success"]
    assert f"Checkpoint {steps} verifies" in site.asked[0]["message"]
    assert files.stamp(again / "adapter") is not None
    assert (again / f"checkpoints/checkpoint-{steps}.json").exists()  # the chain can go on from this version alone


@pytest.mark.long
def test_a_drive_that_vanishes_does_not_stop_the_training_and_is_not_written_into(tmp_path: Path) -> None:
    machine, log = simulate.mounted(simulate.colab(tmp_path, gpu=False)), tmp_path / "log"
    drive, mounts = machine.root / "content/drive", machine.root / "proc/mounts"
    kept = drive / "MyDrive/finetune-course/tiny/checkpoints/checkpoint-3.json"
    with papermill(
        machine, log, str(tmp_path / "out.ipynb"), "-p", "MAX_STEPS", "15", "-p", "SAVE_STEPS", "3"
    ) as running:
        wait_for(kept.exists)
        mounted = mounts.read_text()
        mounts.write_text("")
        drive.rename(machine.root / "unplugged")
        drive.mkdir()
        wait_for(lambda: "could not be copied" in log.read_text())
        assert not list(drive.iterdir())  # an empty mount point stays empty, or Drive could not be mounted again
        drive.rmdir()
        (machine.root / "unplugged").rename(drive)
        mounts.write_text(mounted)
        assert running.wait(timeout=300) == 0, log.read_text()[-4000:]
    assert "works again" in log.read_text() and lesson_facts(kept.parents[1])["steps"] == 15


# --- a model of one's own --------------------------------------------------------------------------------------------


@pytest.mark.serve
@pytest.mark.timeout(1200)
def test_a_model_of_ones_own_learns_from_the_tuned_one_and_ends_in_a_report(course_run: Path, tmp_path: Path) -> None:
    """The Chinese lesson, solved: vLLM serves the teacher, two trainings differ in their rows alone."""
    unneeded = shutil.ignore_patterns("notebooks", "checkpoints", "practice", "bench.*")
    shutil.copytree(course_run, tmp_path / "tiny", ignore=unneeded)
    printed = run_solved("10_your_model", tmp_path, "tiny", "PROFILE", "tiny", timeout=900)
    run = tmp_path / "tiny"
    entry = lesson_facts(run, "10_your_model")
    scores = entry["exact_match"]
    assert scores["prompt"] <= 0.1 and scores["few-shot"] <= 0.1, "the untuned model cannot do it"
    assert 0.1 < scores["round-1"] < 0.9, "there are errors to read"
    assert scores["round-2"] > scores["round-1"] + 0.1
    assert list(sorted(entry["times"].values())) == list(entry["times"].values()), "the baseline came first"
    first, second = (tmp_path / name for name in entry["times"] if name != "baseline")
    assert lesson_facts(first)["examples"] >= 100
    settings = [lesson_facts(trained)["settings"] for trained in (first, second)]
    for setting in settings:
        del setting["course.conversations_per_step"]  # it follows from the lengths of the rows
    assert settings[0] == settings[1]
    assert lesson_facts(first)["data_fingerprint"] != lesson_facts(second)["data_fingerprint"]

    lines = (run / "your_model/written.jsonl").read_text(encoding="utf-8").split("\n")
    written = [json.loads(line) for line in lines if line]
    assert len(written) == 300 and not any(entry["problem"] for entry in written)
    right = [json.loads(entry["pairs"][0]["answer"]).keys() for entry in written]
    assert all(list(keys) == ["intent", "item", "count", "city", "day"] for keys in right)
    folder = files.SAMPLES / "your_model/first"
    for span in (entry["span"] for entry in written if entry["span"]["file"] == "chat.txt"):
        texts = [(folder.parent / part / "chat.txt").read_text(encoding="utf-8") for part in ("first", "more")]
        assert span["text"] in [text[span["start"] : span["end"]] for text in texts]

    report = (run / "report_your_model.md").read_text(encoding="utf-8")
    assert report in printed.replace("\\n", "\n")
    assert report.count("不对的字段：") == 5
    assert "第二次训练" in report and "data" in report

    again = python(ROOT / "notebooks/zh/10_your_model.py", "--PROFILE", "tiny", home=tmp_path)  # a plain script
    assert "300 个文段中还有 0 个要问" in again.stdout
    assert not any(line.startswith("  | ") for line in again.stdout.splitlines()), "nothing is trained again"
    repeated = lesson_facts(run, "10_your_model")
    assert (repeated["times"], repeated["exact_match"]) == (entry["times"], scores)


# --- a hybrid model ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_hybrid_model_is_trained_merged_and_asked(tmp_path: Path) -> None:
    short = ["-p", "MAX_STEPS", "8", "--set", "course.evaluation_rows=8, course.validation_rows=4, sft.warmup_steps=0"]
    lessons = ["--only", "02", "--only", "03", "--only", "04"]
    python("-m", "nbutils", "run", "--profile", "tiny_hybrid", *lessons, *short, home=tmp_path, timeout=500)
    run = tmp_path / "tiny_hybrid"
    trained = lesson_facts(run)
    config = json.loads((files.TINY_HYBRID / "config.json").read_text())["text_config"]
    linear_maps = {"linear_attention": 5 + 3, "full_attention": 4 + 3}  # each layer with those of its MLP
    assert trained["weights"]["nf4, double"] == sum(linear_maps[kind] for kind in config["layer_types"])
    assert trained["base_moved"] == 0
    assert trained["adapter_moved"] > 0
    history = files.read_json(run / "logs/history.json")
    first_loss, *_, last_loss = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert last_loss < first_loss - 0.5

    merged = lesson_facts(run, "04_merge")
    assert merged["parity"]["holds"]
    assert merged["parity"]["gaps"]["merged against full"]["mean"] < 1e-6
    passed_on = ("preprocessor_config.json", "video_preprocessor_config.json")
    for name in passed_on:
        assert (run / "merged" / name).read_bytes() == (files.TINY_HYBRID / name).read_bytes()
    assert json.loads((run / "merged/config.json").read_text())["architectures"] == ["Qwen3_5ForConditionalGeneration"]


@pytest.mark.long
@pytest.mark.serve
@pytest.mark.timeout(2400)
def test_the_whole_course_with_a_hybrid_model(tmp_path: Path) -> None:
    python("-m", "nbutils", "run", "--profile", "tiny_hybrid", home=tmp_path, timeout=2400)
    run = tmp_path / "tiny_hybrid"
    merged = lesson_facts(run, "04_merge")
    assert merged["exact_match"]["base"] == 0
    assert merged["exact_match"]["merged"] >= 0.95
    assert merged["verdict"] == "helped"
    served = lesson_facts(run, "05_serve")
    assert served["exact_match"] == merged["exact_match"]["merged"]
    answers = served["identical_answers"]
    assert answers["count"] == answers["total"] == merged["rows"]
