"""nbutils.exporting: every format is offered, complete or not there, reused, and compared with the merged model."""

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import merge_models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from solutions import run_solved
from support import lesson_facts, refused
from test_contracts import FROZEN, missing

from nbutils import cli, disk, evaluation, exporting, files, hardware, parity, platforms, record, served_model
from nbutils.errors import CourseError
from nbutils.exporting import export, make
from nbutils.exporting.worker import SPLITS, Job
from nbutils.merging.folder import open_base
from nbutils.parity import FixedSet, Gap, Predictions

T4 = hardware.GPU("Tesla T4", (7, 5), 14.6, 1)
ADA = hardware.GPU("NVIDIA L4", (8, 9), 22.0, 1)
FIXED = FixedSet([[1, 2]], [1])
NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 units: more than ten minutes"
)
ROWS = [json.loads(line) for line in (files.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:24]]
JOB = Job("cast", "here")
Jobs = list[Job]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Fast tests never touch a real environment."""
    if request.node.get_closest_marker("install"):
        return
    monkeypatch.delenv("NBUTILS_EXPORT_PYTHON", raising=False)
    monkeypatch.delenv("NBUTILS_EXPORT_PYTHONPATH", raising=False)
    monkeypatch.setenv("NBUTILS_EXPORT_ENV", str(tmp_path / "venv"))


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """The merged model of a run, complete and stamped."""
    merged = tmp_path / "run/merged"
    merged.parent.mkdir()
    with files.complete_folder(merged, {"base": "tiny_base", "onto": "full"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    return merged


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs that were run; instead of the real work each copies the model it starts from."""
    done: Jobs = []

    def copy(job: Job, title: str) -> None:
        done.append(job)
        out = Path(job.out)
        if job.work == "gguf":
            (out / f"model-{job.setting}.gguf").write_bytes(b"GGUF")
        else:
            shutil.copytree(job.source, out, dirs_exist_ok=True)
        if job.work in ("compress", "calibrate"):
            config = files.read_json(Path(job.source, "config.json"))
            config["quantization_config"] = {"bits": 8}
            files.write_json(out / "config.json", config)

    monkeypatch.setattr(make, "run_job", copy)
    return done


def edit(merged: Path, how: Any) -> None:
    """Replace every weight by `how(name, weight)`."""
    weights = load_file(merged / "model.safetensors")
    changed = {name: how(name, weight) for name, weight in weights.items()}
    save_file(changed, merged / "model.safetensors", {"format": "pt"})


def predictions(*probabilities: float) -> Predictions:
    """What a model of a vocabulary of this size says of one position."""
    log_probabilities = torch.tensor([probabilities]).log()
    ordered = log_probabilities.sort(descending=True)
    return Predictions(ordered.values, ordered.indices)


def store_merged_predictions(merged: Path) -> parity.PredictionStore:
    """What lesson 04 stores of the merged model."""
    store = parity.new_store(merged.parent, FIXED, files.stamp(merged) or {})
    store.add("merged", predictions(0.7, 0.3))
    return store


def test_formats_are_parsed() -> None:
    assert exporting.parse_formats(" fp8, GGUF-q8_0,fp8,") == ["fp8", "gguf-q8_0"]
    assert exporting.parse_formats("") == []
    with refused("w4a6", "Choose one of: bf16, fp16, fp8"):
        exporting.parse_formats("fp8,w4a6")


def test_formats_are_offered_with_their_size_and_where_they_run() -> None:
    offers = {row["format"]: row for row in exporting.offer(files.TINY_MODEL, T4)}
    assert list(offers) == list(make.FORMATS)
    run_on_t4 = [name for name, row in offers.items() if "Tesla T4" in row["runs on"]]
    assert run_on_t4 == ["bf16", "fp8"]
    # As large as they really are:
    assert offers["fp16"]["size"] == "about 10 MB"
    assert offers["fp8"]["size"] == "about 6 MB"
    assert offers["w4a16"]["size"] == "about 4 MB"
    assert offers["gguf-q8_0"]["size"] == "about 5 MB"


def test_an_export_is_complete_reused_and_made_again_for_another_model(merged: Path, jobs: Jobs) -> None:
    first = export(merged, "fp8")
    assert first.folder == merged.parent / "exports/fp8"
    assert files.stamp(first.folder) is not None
    assert (first.folder / "tokenizer.json").exists()
    assert f"vllm serve {first.folder}" in str(first)

    assert export(merged, "fp8") == first
    assert len(jobs) == 1, "it was reused"

    def change_one_layer(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1 if "layers.3.mlp.up_proj" in name else weight

    edit(merged, change_one_layer)
    export(merged, "fp8")
    assert len(jobs) == 2


def test_a_gguf_export_is_one_file_that_llama_cpp_opens(merged: Path, jobs: Jobs) -> None:
    gguf = export(merged, "gguf-f16")
    file = gguf.folder / "model-f16.gguf"
    assert f"llama-cli -m {file}" in str(gguf)
    assert gguf.bytes == 4
    assert {path.name for path in gguf.folder.iterdir()} == {file.name, files.STAMP}


@pytest.mark.parametrize(
    ("free_gib", "problem"),
    [
        pytest.param(9.0, "no rows were given", id="the job fails"),
        pytest.param(0.001, "Not enough disk space", id="no space"),
    ],
)
def test_a_failed_export_leaves_nothing_that_looks_finished(
    free_gib: float, problem: str, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, title: str) -> None:
        (Path(job.out) / "model.safetensors").write_bytes(b"half")
        raise CourseError("no rows were given")

    monkeypatch.setattr(make, "run_job", fail)
    monkeypatch.setattr(disk, "free_gib", lambda folder: free_gib)
    with refused(problem):
        export(merged, "w4a16")
    assert not (merged.parent / "exports/w4a16").exists()


def test_an_export_never_replaces_the_model_or_foreign_files(merged: Path, jobs: Jobs) -> None:
    root = merged.parent.parent
    mine = root / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    for out in (merged, merged.parent, mine):
        with pytest.raises(CourseError):
            export(merged, "fp8", out)
    for file, content in before.items():
        assert file.read_bytes() == content


def test_awq_needs_rows_and_is_reused_with_the_same(merged: Path, jobs: Jobs) -> None:
    export(merged, "awq", calibration=ROWS)
    export(merged, "awq", calibration=ROWS)
    assert [job.rows for job in jobs] == [ROWS]
    with refused("The format awq calibrates on data, and no rows"):
        export(merged, "awq")


def test_a_float32_model_is_cast_for_vllm_alone(merged: Path, jobs: Jobs) -> None:
    export(merged, "awq", calibration=ROWS)
    edit(merged, lambda name, weight: weight.float())
    export(merged, "fp8", calibration=ROWS)
    export(merged, "gguf-f16")
    awq, fp8, gguf = jobs
    assert awq.dtype == "auto", "the model was in 16 bits"
    assert awq.rows == ROWS
    assert fp8.dtype == "bfloat16"
    assert not fp8.rows, "it needs none"
    assert gguf.dtype == "auto"
    assert not gguf.rows, "it needs none"


@pytest.mark.parametrize(("width", "group"), [(640, 128), (704, 64), (672, 32)])
def test_groups_of_4_bit_weights_divide_every_width(width: int, group: int, merged: Path) -> None:
    wide = torch.zeros(256, width, dtype=torch.bfloat16)

    def widen(name: str, weight: torch.Tensor) -> torch.Tensor:
        return wide if name == "model.layers.0.mlp.down_proj.weight" else weight

    edit(merged, widen)
    assert f"group_size: {group} " in exporting.recipe_for(merged, "w4a16")


def test_of_a_model_that_also_sees_the_text_model_decides_size_and_groups(tmp_path: Path) -> None:
    base = merge_models.make_seeing_base(tmp_path / "base", tied=True)
    weights = merge_models.weights(base)
    text = sum(weight.numel() for name, weight in weights.items() if "language_model." in name)
    beside = sum(weight.numel() for weight in weights.values()) - text
    embedding = weights["model.language_model.embed_tokens.weight"].numel()
    model = open_base(base)
    assert make.FORMATS["gguf-f16"].expected_bytes(model) == 2 * text
    assert make.FORMATS["bf16"].expected_bytes(model) == 2 * (text + beside)
    assert make.FORMATS["fp8"].expected_bytes(model) == text - embedding + 2 * (embedding + beside)
    assert "group_size: 64 " in exporting.recipe_for(base, "w4a16")  # its vision layers are 32 wide


def test_each_format_has_its_recipe(merged: Path) -> None:
    assert "FP8_DYNAMIC" in exporting.recipe_for(merged, "fp8")
    assert "group_size: 128" in exporting.recipe_for(merged, "awq")
    assert exporting.recipe_for(merged, "gguf-f16") == ""


def test_a_changed_recipe_makes_another_export(merged: Path, jobs: Jobs) -> None:
    ours = exporting.recipe_for(merged, "fp8")
    changed = ours.replace("re:.*lm_head", "re:.*down_proj")
    for recipe in (ours, "", changed, changed, ours):  # "" is ours too
        export(merged, "fp8", recipe=recipe)
    assert [job.recipe for job in jobs] == [ours, changed, ours], "only one with another recipe is made anew"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that a job runs, in this environment; a test writes it."""
    script = tmp_path / "worker.py"
    monkeypatch.setattr(make, "ensure_environment", lambda: Path(sys.executable))
    monkeypatch.setattr(make, "WORKER", script)
    return script


@pytest.mark.parametrize(
    ("code", "status", "last_line"),
    [
        pytest.param("import os; os.kill(os.getpid(), 9)", 137, "137", id="killed"),
        pytest.param("{}['dance']", 1, "KeyError", id="raised"),
    ],
)
def test_a_failed_job_is_reported_with_its_last_lines(code: str, status: int, last_line: str, worker: Path) -> None:
    worker.write_text(code, encoding="utf-8")
    with refused(f"exit status {status}", last_line):
        make.run_job(JOB, "the dance")


def test_nobody_is_told_to_remove_a_python_of_their_own(worker: Path, tmp_path: Path) -> None:
    worker.write_text("import not_installed", encoding="utf-8")
    with refused("not_installed", f"remove the folder {tmp_path / 'venv'}") as caught:  # the one the course builds
        make.run_job(JOB, "a job")
    assert sys.prefix not in caught.value.todo


def test_a_job_gets_no_secrets(tmp_path: Path, worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_correcthorsebatterystaple0123456")
    monkeypatch.setenv("PYTHONPATH", "of this kernel")
    environment_file = tmp_path / "environment.json"
    worker.write_text(
        "import json, os, nbutils\n"  # nbutils is found without the PYTHONPATH of this kernel
        f"json.dump(dict(os.environ), open({str(environment_file)!r}, 'w'))\n",
        encoding="utf-8",
    )
    make.run_job(JOB, "a job")
    environment = files.read_json(environment_file)
    assert "HF_TOKEN" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "of this kernel" not in environment.values()


FP8 = make.Export("fp8", Path("x"), Path("y"), bytes=60, merged_bytes=100)


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (0.0005, "next to the same"),
        (0.01, "hardly differs"),
        (0.1, "differs a little"),
        (0.9, "clearly differs"),
        (3.0, "BROKEN"),
        (float("nan"), "BROKEN"),
    ],
)
def test_the_verdict_in_words(mean: float, verdict: str) -> None:
    compared = replace(FP8, gap=Gap(mean, 2 * mean, 9, 10))
    assert compared.verdict == verdict


def test_a_row_of_the_table_has_the_size_and_the_choices() -> None:
    row = replace(FP8, gap=Gap(0.01, 0.02, 9, 10)).row
    assert row["of merged"] == "0.60"
    assert row["same next token"] == "9 of 10"


def test_an_export_that_memory_cannot_hold_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: 12.0)
    monkeypatch.setattr(hardware, "gpu", lambda: None)
    large = replace(FP8, bytes=5 * 2**30, merged_bytes=14 * 2**30)
    [checked] = make.check_exports([large], Path("run"))
    assert checked.gap is None
    assert checked.facts["ratio"] == 5 / 14
    assert "not compared" in checked.row["verdict"]


def run_export(*words: Any) -> Any:
    """`nbutils export` with these words."""
    return CliRunner().invoke(cli.app, ["export", *map(str, words)])


def test_the_command_lists_the_formats(merged: Path, jobs: Jobs) -> None:
    ran = run_export(merged)
    assert ran.exit_code == 0
    assert "gguf-q8_0" in ran.output
    assert not jobs


def test_the_command_exports_into_a_folder(merged: Path, jobs: Jobs, tmp_path: Path) -> None:
    ran = run_export(merged, "fp8", "gguf-f16", "--no-check", "--out", tmp_path)
    assert ran.exit_code == 0
    assert ran.output.startswith("fp8: ")
    assert f"vllm serve {tmp_path}/fp8" in ran.output
    assert files.stamp(tmp_path / "fp8")
    assert (tmp_path / "gguf-f16/model-f16.gguf").exists()


def test_the_command_refuses_before_the_work(merged: Path, jobs: Jobs) -> None:
    exports = merged.parent / "exports"
    assert run_export(merged, "int8", "fp9").exit_code == 1
    assert not (exports / "int8").exists()

    without_predictions = run_export(merged, "int8")
    assert without_predictions.exit_code == 1
    assert "Run lesson 04" in without_predictions.stderr
    assert not (exports / "int8").exists()


def test_the_command_calibrates_on_data_and_compares(merged: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = store_merged_predictions(merged)
    monkeypatch.setattr(make, "read_predictions", lambda *arguments: stored.forms["merged"])
    ran = run_export(merged, "awq", "--data", files.SAMPLES / "general.jsonl")
    assert "next to the same" in ran.output, ran.output
    assert jobs[-1].rows


def serving_dtype(folder: Path, run: Path, gpu: hardware.GPU | None = None, dtype: str = "float32", **more: Any) -> Any:
    """How a folder is served on a GPU (by vLLM) or a CPU, of a run with this dtype."""
    load_options = SimpleNamespace(dtype=dtype)
    flags = SimpleNamespace(gpu_memory_utilization=0.85)
    profile: Any = SimpleNamespace(from_pretrained=load_options, vllm=flags)
    options = {"engine": "vllm" if gpu else "vllm-cpu"} | more
    merged = record.RunFolder(run).merged
    return served_model.serving_dtype(folder, merged, profile, gpu=gpu, **options)


def test_an_export_is_served_in_16_bits_where_its_format_runs(merged: Path, jobs: Jobs) -> None:
    run = merged.parent
    fp8 = export(merged, "fp8").folder
    dtype, served = serving_dtype(fp8, run, ADA, "bfloat16")
    assert dtype == "bfloat16"
    assert served
    assert served.merged == merged
    assert served.folder == fp8

    with refused("weights, and vllm on Tesla T4 cannot compute"):
        serving_dtype(fp8, run, T4, "float16")
    with refused("weights, and vllm-cpu on CPU cannot compute"):
        serving_dtype(fp8, run, None, "float16")
    with refused(f"weights, and transformers on {ADA.name} cannot compute"):
        serving_dtype(fp8, run, ADA, "float16", engine="transformers")

    w4a16 = export(merged, "w4a16").folder
    dtype, _ = serving_dtype(w4a16, run, T4, "float16")
    assert dtype == "float16"


def test_quantized_weights_that_are_no_complete_export_are_not_served(merged: Path, jobs: Jobs, tmp_path: Path) -> None:
    run = merged.parent
    fp8 = export(merged, "fp8").folder
    with refused("is quantized, but it is not a complete export"):
        serving_dtype(fp8, tmp_path / "no run")
    (fp8 / files.STAMP).unlink()
    with refused("is quantized, but it is not a complete export"):
        serving_dtype(fp8, run)


def test_a_model_is_served_where_it_fits_and_else_an_export_is_named(
    merged: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = merged.parent
    w4a16 = export(merged, "w4a16").folder
    assert serving_dtype(merged, run) == ("float32", None)

    monkeypatch.setattr(served_model, "fit", lambda *sizes: False)
    monkeypatch.setattr(served_model, "weights_bytes", lambda folder: int(14.2 * 2**30))
    for gpu in (T4, None):
        with refused(f'FOLDER = "{w4a16}'):
            serving_dtype(merged, run, gpu, "float16")
    two_gpus = replace(T4, count=2)
    assert serving_dtype(merged, run, two_gpus, "float16") == ("float16", None)


def test_exports_are_compared_with_what_lesson_04_stored(merged: Path, jobs: Jobs, monkeypatch: Any) -> None:
    run = merged.parent
    fp8 = export(merged, "fp8")
    with refused("No predictions of"):
        exporting.check_exports([fp8], run)
    store_merged_predictions(merged)
    monkeypatch.setattr(make, "read_predictions", lambda *arguments: predictions(0.6, 0.4))
    [compared] = exporting.check_exports([fp8], run)
    assert compared.verdict == "differs a little"
    assert compared.facts["same_choices"] == 1


def test_a_served_export_has_a_price_and_a_served_merged_model_must_agree(merged: Path, jobs: Jobs) -> None:
    stored = store_merged_predictions(merged)
    served = served_model.ServedModel.__new__(served_model.ServedModel)  # `judge` reads its export alone

    served.export = export(merged, "fp8")
    price = served.judge(stored, predictions(0.6, 0.4))
    assert "differs a little" in str(price)
    assert price.facts()["parity"]["price"]["format"] == "fp8"
    assert "vllm" not in stored.forms

    served.export = None
    agreement = served.judge(stored, stored.forms["merged"])
    assert agreement.facts()["parity"]["holds"]
    assert "vllm" in stored.forms


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model, with its predictions on a fixed set beside it as lesson 04 stores them."""
    from transformers import AutoTokenizer

    run = tmp_path_factory.mktemp("run")
    merged = run / "merged"
    with files.complete_folder(merged, {"onto": "full"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    size = evaluation.Size(rows=8, batch_size=4, max_new_tokens=16)
    evaluator = evaluation.Evaluator(run, tokenizer, ROWS[-8:], size, "float32")
    fixed_set = parity.fixed_set(evaluator)
    stored = parity.new_store(run, fixed_set, files.stamp(merged) or {})
    stored.add("merged", make.read_predictions("merged", merged, stored.fixed))
    return merged


@pytest.mark.install
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "largest_ratio", "largest_gap"),
    [
        ("fp8", 0.6, 0.1),
        ("gguf-q8_0", 0.6, 0.01),
        ("bf16", 1.01, 0.01),
        ("w4a16", 0.4, 0.4),
        ("int8", 0.6, 0.01),
        ("gguf-f16", 1.05, 1e-4),
        pytest.param("awq", 0.4, 0.4, marks=NEEDS_BF16),
    ],
)
def test_a_real_export_is_smaller_and_nearly_the_same_model(
    name: str, largest_ratio: float, largest_gap: float, real: Path
) -> None:
    """Half a minute each: made by the real libraries, and read back as its users would load it."""
    calibration = ROWS[:8] if name == "awq" else []
    made = export(real, name, calibration=calibration)
    [compared] = make.check_exports([made], real.parent)
    assert compared.ratio < largest_ratio
    assert compared.gap
    assert compared.gap.mean < largest_gap

    folder = compared.folder
    if not name.startswith("gguf"):
        assert (folder / "chat_template.jinja").exists()
        assert (folder / "tokenizer.json").exists()
    if name in ("fp8", "w4a16", "int8", "awq"):
        assert "quantization_config" in (folder / "config.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model that also sees, whose text model is hybrid, with its predictions as lesson 04 stores them."""
    run = tmp_path_factory.mktemp("seeing")
    merged = run / "merged"
    with files.complete_folder(merged, {"onto": "full"}) as folder:
        merge_models.make_seeing_base(folder, tied=True, vocabulary=3072)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(files.TINY_MODEL / name, folder)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        of_qwen2, of_qwen35 = (json.dumps(SPLITS[name]) for name in ("qwen2", "qwen35"))
        (folder / "tokenizer.json").write_text(text.replace(of_qwen2, of_qwen35), encoding="utf-8")
    stored = parity.new_store(run, FixedSet([list(range(5, 40))], [30]), files.stamp(merged) or {})
    stored.add("merged", make.read_predictions("merged", merged, stored.fixed))
    return merged


@pytest.mark.install
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "largest_gap"),
    [
        ("fp8", 0.01),
        ("w4a16", 0.2),
        ("int8", 0.01),
        ("gguf-f16", 1e-4),
        ("gguf-q8_0", 0.01),
        ("bf16", 1e-4),
        pytest.param("awq", 0.2, marks=NEEDS_BF16),
    ],
)
def test_a_model_that_also_sees_is_exported_without_touching_what_sees(
    name: str, largest_gap: float, seeing: Path
) -> None:
    """Half a minute each. For int8 and GGUF it is the text model alone."""
    made = export(seeing, name, calibration=ROWS[:8] if name == "awq" else [])
    [compared] = make.check_exports([made], seeing.parent)
    assert compared.gap
    assert compared.gap.mean < largest_gap
    if name == "int8" or name.startswith("gguf"):
        return
    config = files.read_json(made.folder / "config.json")
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    before, after = merge_models.weights(seeing), merge_models.weights(made.folder)
    vision = [weight for weight in before if "visual" in weight]
    assert vision
    for weight in vision:
        exact = before[weight] if name in ("fp8", "w4a16") else before[weight].bfloat16()
        assert torch.equal(after[weight], exact)
    assert (made.folder / "preprocessor_config.json").exists()


@pytest.mark.long
@pytest.mark.install
def test_llm_compressor_follows_a_changed_recipe(real: Path, tmp_path: Path) -> None:
    ours = exporting.recipe_for(real, "fp8")
    changed = ours.replace("- re:.*lm_head", "- re:.*down_proj\n      - re:.*lm_head")
    folder = export(real, "fp8", tmp_path / "changed", recipe=changed).folder
    weights = load_file(folder / "model.safetensors")
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    with refused("failed in the export environment (exit status", "awq"):
        export(real, "fp8", tmp_path / "awq", recipe=exporting.recipe_for(real, "awq"))


@pytest.mark.notebook
@pytest.mark.serve
@pytest.mark.install
@pytest.mark.timeout(1200)
def test_lesson_08_exports_compares_and_packs_the_merged_model(course_run: Path, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    run = home / "tiny"
    shutil.copytree(course_run, run, ignore=shutil.ignore_patterns("logs", "notebooks", "checkpoints"))
    run_solved("08_export", home, "tiny", "PROFILE", "tiny", "PUSH_TO", "file")

    facts = lesson_facts(run, "08_export")
    assert missing(FROZEN["facts"]["lessons"]["08_export"], facts) == []
    assert "merged.tar" in facts["pushed"]
    [made] = facts["exports"]
    assert made["format"] == "gguf-q8_0"
    assert made["ratio"] < 0.6
    assert made["mean"] < 0.01


@pytest.mark.install
@pytest.mark.long
def test_llama_cpps_converter_runs_no_code_of_a_model(tmp_path: Path) -> None:
    """For GLM and some others it asks transformers to trust whatever code lies beside the tokenizer."""
    from transformers import GlmConfig, GlmForCausalLM

    folder = tmp_path / "glm"
    config = GlmConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        pad_token_id=0,
    )
    GlmForCausalLM(config).save_pretrained(folder)
    shutil.copy(files.TINY_MODEL / "tokenizer.json", folder)
    tokenizer_config = json.loads((files.TINY_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = "Evil"
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    files.write_json(folder / "tokenizer_config.json", tokenizer_config)
    it_ran = tmp_path / "ran"
    (folder / "evil.py").write_text(
        f"open({str(it_ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n",
        encoding="utf-8",
    )
    with contextlib.suppress(CourseError):  # the converter may not know this tokenizer
        export(folder, "gguf-f16")
    assert not it_ran.exists()
