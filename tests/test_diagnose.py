"""Errors that libraries really raise are recognised; each check finds its own fault in a run and none in a good one."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ESCAPES, python, refused, steers

from nbutils import cli, diagnose, display, record
from nbutils.diagnose import Trained
from nbutils.files import TINY_MODEL, read_json
from nbutils.record import CheckedRows, Evaluation, Interval, RunFolder, Score, TrainingFacts
from nbutils.tracking import Progress

CURVES = read_json(display.CURVES)
GOOD: dict[str, Any] = {"steps": 100, "planned_steps": 100, "examples": 800, "settings": {"sft.logging_steps": 1}}
FACTS = TrainingFacts(**GOOD)


def out_of_memory(folder: Path) -> Any:
    import torch

    return torch.empty(2**48)


def token_out_of_range(folder: Path) -> Any:
    import torch

    return torch.nn.Embedding(4, 2)(torch.tensor([9]))


def half_download(folder: Path) -> Any:
    from safetensors.torch import load_file

    whole = (TINY_MODEL / "model.safetensors").read_bytes()
    (folder / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    return load_file(folder / "half.safetensors")


def lfs_pointer(folder: Path) -> Any:
    from safetensors.torch import load_file

    (folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1234567\n")
    return load_file(folder / "pointer.safetensors")


def unknown_architecture(folder: Path) -> Any:
    from transformers import AutoConfig

    (folder / "config.json").write_text('{"model_type": "qwen99"}')
    return AutoConfig.from_pretrained(folder)


def no_chat_template(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = None
    return tokenizer.apply_chat_template([{"role": "user", "content": "?"}])


def old_api(folder: Path) -> Any:
    from trl import SFTConfig

    return SFTConfig(output_dir=str(folder), max_seq_length=512)


def offline(folder: Path) -> Any:
    from huggingface_hub import hf_hub_download

    return hf_hub_download("owner/name", "config.json", cache_dir=folder, local_files_only=True)


def no_network(folder: Path) -> Any:
    return socket.create_connection(("no-such-host.invalid", 443))


def port_in_use(folder: Path) -> Any:
    first = socket.create_server(("127.0.0.1", 0))
    return socket.create_server(first.getsockname())


def encoding(folder: Path) -> Any:
    return "你好".encode("gbk").decode("utf-8")


def first_cause(text: str) -> str:
    """The name of the most likely cause of an error; empty if none is known."""
    causes = list(diagnose.explain(text))
    return causes[0] if causes else ""


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (out_of_memory, "killed"),
        (token_out_of_range, "token_out_of_range"),
        (half_download, "half_download"),
        (lfs_pointer, "half_download"),
        (unknown_architecture, "unknown_architecture"),
        (no_chat_template, "no_chat_template"),
        (old_api, "old_api"),
        (offline, "offline"),
        (no_network, "no_network"),
        (port_in_use, "port_in_use"),
        (encoding, "encoding"),
    ],
)
def test_an_error_that_a_library_raises_is_recognised_first(
    fail: Callable[[Path], Any], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception) as caught:
        fail(tmp_path)
    error = caught.value
    assert first_cause(f"{type(error).__name__}: {error}") == cause, repr(error)


@pytest.mark.parametrize(
    "name, text",
    [  # what needs a GPU, another machine or an account, as the programs word it
        ("gpu_out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has ..."),
        ("killed", "nbclient.exceptions.DeadKernelError: Kernel died"),
        ("killed", "step 12\nKilled\n"),
        ("driver_too_old", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        ("no_kernels", "CUDA error: no kernel image is available for execution on the device"),
        ("no_gpu", "AssertionError: Torch not compiled with CUDA enabled"),
        ("no_bfloat16", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
        ("server_out_of_memory", "ValueError: No available memory for the cache blocks."),
        ("gated", "huggingface_hub.errors.GatedRepoError: 401 Client Error."),
        ("disk_full", "OSError: [Errno 28] No space left on device"),
        ("mixed_packages", "ImportError: libtorch_cuda.so: undefined symbol: ncclCommWindowRegister"),
        ("drive", "ValueError: Mountpoint must not already contain files"),
        ("several_gpus", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp"),
        ("shared_memory", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."),
        ("nan_in_log", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0002}"),
        ("packed_rows_mix", "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`."),
        (
            "triton_on_hopper",
            "RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for gated "
            "chunk_bwd_dqkwg (see #640). Please upgrade Triton to >= 3.7.1 or install tilelang",
        ),
        ("no_compiler", "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
        ("no_compiler", "NotImplementedError: SM90 GDN prefill DSL kernel is unavailable"),
        ("server_too_old", "Model architectures ['Qwen3_5ForConditionalGeneration'] are not supported for now."),
        ("server_too_old", "error loading model architecture: unknown model architecture: 'qwen35'"),
        ("slow_without_kernels", "`chunk_gated_delta_rule` is falling back to its reference PyTorch implementation."),
        ("no_torchvision", "ImportError: Qwen3VLVideoProcessor requires the Torchvision library but it was not found"),
        (
            "unknown_architecture",
            "ValueError: Unrecognized configuration class <class 'Qwen3VLConfig'> for this kind of AutoModel",
        ),
        ("certificate", "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    ],
)
def test_a_message_of_another_machine_is_recognised_first(name: str, text: str) -> None:
    assert first_cause(text) == name


def test_a_full_gpu_is_not_taken_for_a_full_machine() -> None:
    for name in ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"):
        assert list(diagnose.explain(f"{name}: CUDA out of memory. Tried to allocate 2 GiB")) == ["gpu_out_of_memory"]
    for name in ("MemoryError", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1. TiB"):
        assert list(diagnose.explain(name)) == ["killed"]


def test_a_progress_bar_of_megabytes_in_one_line_is_searched_at_once() -> None:
    bars = "".join(f"\rCUDA {step}%|####      | {step}/90000 [NCCL, 1.2it/s]" for step in range(20_000))
    began = time.monotonic()
    assert list(diagnose.explain(f"{bars}\nOSError: No space left on device")) == ["disk_full"]
    assert time.monotonic() - began < 20, "minutes, if each word is followed to the end of the line"


def test_an_ordinary_log_is_not_explained() -> None:
    assert diagnose.explain("step 12 of 100, loss 0.4, 822 tokens/s. Saved. Everything is fine.") == {}
    assert diagnose.explain("INFO Initializing a V1 LLM engine with config: trust_remote_code=False") == {}


@pytest.mark.parametrize(
    ("curve", "faults"),
    [
        ("healthy", []),
        ("too_slow", ["flat"]),
        ("diverging", ["diverging", "never_better"]),
        ("overfitting", ["overfitting"]),
    ],
)
def test_measured_curves_are_told_apart(curve: str, faults: list[str]) -> None:
    losses = CURVES[curve]
    trained = Trained(losses["train"], losses["validation"], FACTS)
    assert list(diagnose.examine(trained)) == faults


def facts_with(**changes: Any) -> TrainingFacts:
    """The facts of a good training, but for these."""
    return FACTS.model_copy(update=changes)


FEW_STOPPED = Evaluation(scores={"stopped": Score(merged=Interval(mean=0.4))})


@pytest.mark.parametrize(
    ("fault", "what", "value"),
    [
        ("failed", "failure", "died at step 5"),
        ("not_a_number", "facts", facts_with(skipped_steps=30)),
        ("not_a_number", "facts", facts_with(steps=140)),  # NaN is not written: the log ends at step 100
        ("never_better", "validation", [(0, 0.5), (50, 0.52), (100, 0.51)]),
        ("unfinished", "facts", facts_with(steps=60)),
        ("rows_lost", "rows", CheckedRows(rows=100, rejected=40)),
        ("rows_lost", "facts", facts_with(rows_left_out=300)),
        ("out_of_memory", "facts", facts_with(oom_rungs=["micro-batch 1"])),
        ("did_not_help", "evaluation", Evaluation(verdict="harmed")),
        ("endless_answers", "evaluation", FEW_STOPPED),
    ],
)
def test_each_check_finds_its_own_fault(fault: str, what: str, value: Any) -> None:
    healthy = CURVES["healthy"]
    good: dict[str, Any] = {"train": healthy["train"], "validation": healthy["validation"], "facts": FACTS}
    assert diagnose.examine(Trained(**good)) == {}
    faulty = good | {what: value}
    assert list(diagnose.examine(Trained(**faulty))) == [fault]


def test_every_fault_in_the_table_is_looked_for() -> None:
    source = Path(diagnose.__file__).read_text()
    for name in diagnose.symptoms()["runs"]:
        assert f'"{name}"' in source


def write_facts(run: RunFolder, lessons: Any) -> None:
    run.facts.write_text(json.dumps({"lessons": lessons}))


def write_history(run: RunFolder, log: list[Any]) -> None:
    run.logs.mkdir(parents=True, exist_ok=True)
    (run.logs / "history.json").write_text(json.dumps(log))


def test_an_empty_run_folder_has_no_findings(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert diagnose.examine(Trained.of(run)) == {}


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    write_history(run, [{"step": step, "loss": loss} for step, loss in CURVES["diverging"]["train"]])
    write_facts(run, {"03_qlora": GOOD | {"steps": 50}})
    assert list(diagnose.examine(Trained.of(run))) == ["diverging", "unfinished"]

    no_such_process = 2**22 + 1
    progress = Progress(state="training", step=50, steps=90, notes=["checkpoint 50"], pid=no_such_process)
    (run.logs / "progress.json").write_text(progress.model_dump_json())
    findings = diagnose.examine(Trained.of(run))
    assert list(findings) == ["failed"], "curves and facts are of an earlier stop"
    assert "50" in findings["failed"].symptom

    progress.state = "finished"
    (run.logs / "progress.json").write_text(progress.model_dump_json())
    assert "failed" not in diagnose.examine(Trained.of(run))


def test_the_command_explains_an_error_and_examines_a_run(home: Path) -> None:
    from click.testing import CliRunner

    def output(*words: str, paste: str = "") -> str:
        return CliRunner().invoke(cli.app, ["diagnose", *words], input=paste).output

    known = diagnose.symptoms()
    assert known["messages"]["disk_full"]["cause"] in output("--error", "-", paste="No space left on device")

    run = RunFolder(home / "mine")
    run.path.mkdir(parents=True)
    record.note_beginning(run.facts, {"lessons": {"03_qlora": GOOD | {"steps": 50}}}, by_auto=False)
    todo = known["runs"]["unfinished"]["todo"]
    assert todo in output("mine")
    assert todo in output(str(run.path))
    assert "Usage" in output()
    with refused("Allowed: mine\n", "path of a run folder"):
        record.find_run("yours")


def test_what_a_log_says_does_not_steer_the_terminal(capsys: Any) -> None:
    escapes = ESCAPES.replace("\r", "")  # which begins the line anew
    diagnose.show(diagnose.explain(f"RuntimeError: CUDA {escapes} out of memory"))
    shown = capsys.readouterr().out
    assert "out of memory" in shown
    assert not steers(shown)


@pytest.mark.slow
def test_a_log_of_any_size_is_searched_at_both_ends_within_seconds(tmp_path: Path) -> None:
    line = tmp_path / "line.log"
    line.write_text("CUDA NCCL DataLoader worker " * 100_000 + "OSError: No space left on device")
    log = tmp_path / "large.log"
    with open(log, "wb") as file:
        file.write(b"RuntimeError: NCCL error\n")
        file.write(b"step 12 of 100, loss 0.4, 822 tokens/s\n" * 100_000)
        file.write(b"OSError: No space left on device\n")
        file.write(b"step 13 of 100, loss 0.4, 822 tokens/s\n" * 100_000)  # what other processes go on to say
    messages = diagnose.symptoms()["messages"]
    disk_full = messages["disk_full"]["cause"]

    explained = python("-m", "nbutils", "diagnose", "--error", line, home=tmp_path, timeout=60)
    assert disk_full in explained.stdout
    explained = python("-m", "nbutils", "diagnose", "--error", log, home=tmp_path, timeout=60)
    assert disk_full in explained.stdout
    assert messages["several_gpus"]["cause"] in explained.stdout
    with open(log, "rb") as piped:
        explained = python("-m", "nbutils", "diagnose", "--error", "-", home=tmp_path, timeout=60, stdin=piped)
    assert disk_full in explained.stdout


@pytest.mark.slow
def test_what_has_no_end_is_not_waited_for(tmp_path: Path) -> None:
    python("-m", "nbutils", "diagnose", "--error", "/dev/zero", home=tmp_path, timeout=60)


def test_no_pattern_follows_a_word_to_the_end_of_a_line() -> None:
    for name, entry in diagnose.symptoms()["messages"].items():
        assert not re.search(r"\.[*+]", entry["seen"]), name


@pytest.mark.parametrize(
    ("stem", "facts"),
    [
        ("03_qlora", GOOD | {"settings": "x"}),
        ("03_qlora", GOOD | {"settings": None}),
        ("03_qlora", GOOD | {"steps": [1]}),
        ("03_qlora", GOOD | {"examples": "x"}),
        ("03_qlora", GOOD | {"rows_left_out": 10**400}),
        ("03_qlora", GOOD | {"oom_rungs": 7}),
        ("04_merge", {"evaluation": "x"}),
        ("04_merge", {"evaluation": {"scores": {"stopped": "x"}}}),
        ("04_merge", {"evaluation": {"verdict": [1]}}),
    ],
)
def test_damaged_facts_are_told_with_their_file(stem: str, facts: dict[str, Any], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    write_history(run, [])
    write_facts(run, {stem: facts})
    with refused(str(run.facts)):
        diagnose.examine(Trained.of(run))


@pytest.mark.parametrize(
    "entry",
    [
        1,
        {"step": 1, "loss": "x"},
        {"eval_loss": 1.0},
        {"step": 10**400, "loss": 1.5},
    ],
    ids=["no object", "no number", "no step", "too large"],
)
def test_a_damaged_history_is_told_with_its_file(entry: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    write_history(run, [entry])
    write_facts(run, {"03_qlora": GOOD})
    with refused(str(run.logs / "history.json")):
        diagnose.examine(Trained.of(run))
