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


RAISED: dict[Callable[[Path], Any], str] = {
    out_of_memory: "killed", lfs_pointer: "half_download",
    **{fail: fail.__name__ for fail in (token_out_of_range, half_download, unknown_architecture, no_chat_template,
                                        old_api, offline, no_network, port_in_use, encoding)},
}  # fmt: skip


@pytest.mark.parametrize("fail", RAISED, ids=lambda fail: fail.__name__)
def test_an_error_that_a_library_raises_is_recognised_first(fail: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        fail(tmp_path)
    causes = diagnose.explain(f"{type(caught.value).__name__}: {caught.value}")
    assert next(iter(causes), "") == RAISED[fail], f"{caught.value!r}: {list(causes)}"


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
        ("certificate", "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    ],
)
def test_a_message_of_another_machine_is_recognised_first(name: str, text: str) -> None:
    assert next(iter(diagnose.explain(text)), "") == name


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
    "name, faults",
    [
        ("healthy", []),
        ("too_slow", ["flat"]),
        ("diverging", ["diverging", "never_better"]),
        ("overfitting", ["overfitting"]),
    ],
)
def test_measured_curves_are_told_apart(name: str, faults: list[str]) -> None:
    curves = CURVES[name]
    assert list(diagnose.examine(Trained(curves["train"], curves["validation"], FACTS))) == faults


@pytest.mark.parametrize(
    "name, faults",
    [
        ("failed", {"failure": "died at step 5"}),
        ("not_a_number", {"facts": FACTS.model_copy(update={"skipped_steps": 30})}),
        (
            "not_a_number",
            {"facts": FACTS.model_copy(update={"steps": 140})},
        ),  # NaN is not written: the log ends at step 100
        ("never_better", {"validation": [(0, 0.5), (50, 0.52), (100, 0.51)]}),
        ("unfinished", {"facts": FACTS.model_copy(update={"steps": 60})}),
        ("rows_lost", {"rows": CheckedRows(rows=100, rejected=40)}),
        ("rows_lost", {"facts": FACTS.model_copy(update={"rows_left_out": 300})}),
        ("out_of_memory", {"facts": FACTS.model_copy(update={"oom_rungs": ["micro-batch 1"]})}),
        ("did_not_help", {"evaluation": Evaluation(verdict="harmed")}),
        ("endless_answers", {"evaluation": Evaluation(scores={"stopped": Score(merged=Interval(mean=0.4))})}),
    ],
)
def test_each_check_finds_its_own_fault(name: str, faults: dict[str, Any]) -> None:
    curves = CURVES["healthy"]
    good: dict[str, Any] = {"train": curves["train"], "validation": curves["validation"], "facts": FACTS}
    assert diagnose.examine(Trained(**good)) == {}
    assert list(diagnose.examine(Trained(**good | faults))) == [name]


def test_every_fault_in_the_table_is_looked_for() -> None:
    source = Path(diagnose.__file__).read_text()
    assert [name for name in diagnose.symptoms()["runs"] if f'"{name}"' not in source] == []


def test_a_run_folder_is_read_and_an_empty_one_has_no_findings(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert diagnose.examine(Trained.of(run)) == {}
    run.logs.mkdir(parents=True)
    log = [{"step": step, "loss": loss} for step, loss in CURVES["diverging"]["train"]]
    (run.logs / "history.json").write_text(json.dumps(log))
    run.facts.write_text(json.dumps({"lessons": {"03_qlora": GOOD | {"steps": 50}}}))
    assert list(diagnose.examine(Trained.of(run))) == ["diverging", "unfinished"]
    ended = Progress(state="training", step=50, steps=90, notes=["checkpoint 50"], pid=2**22 + 1)
    (run.logs / "progress.json").write_text(ended.model_dump_json())
    findings = diagnose.examine(Trained.of(run))
    assert "50" in findings["failed"].symptom, "its process is gone"
    assert list(findings) == ["failed"], "curves and facts are of an earlier stop"
    (run.logs / "progress.json").write_text(ended.model_copy(update={"state": "finished"}).model_dump_json())
    assert "failed" not in diagnose.examine(Trained.of(run))


def test_the_command_explains_an_error_and_examines_a_run(home: Path) -> None:
    from click.testing import CliRunner

    def said(*words: str, paste: str = "") -> str:
        return CliRunner().invoke(cli.app, ["diagnose", *words], input=paste).output

    known = diagnose.symptoms()
    assert known["messages"]["disk_full"]["cause"] in said("--error", "-", paste="No space left on device")
    (home / "mine").mkdir(parents=True)
    record.note_beginning(
        RunFolder(home / "mine").facts, {"lessons": {"03_qlora": GOOD | {"steps": 50}}}, by_auto=False
    )
    for name in ("mine", str(home / "mine")):
        assert known["runs"]["unfinished"]["todo"] in said(name)
    assert "Usage" in said()
    with refused("Allowed: mine\n", "path of a run folder"):
        record.find_run("yours")


def test_what_a_log_says_does_not_steer_the_terminal(capsys: Any) -> None:
    diagnose.show(diagnose.explain(f"RuntimeError: CUDA {ESCAPES.replace(chr(13), '')} out of memory"))
    shown = capsys.readouterr().out
    assert "out of memory" in shown and not steers(shown)


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
    for file, names in ((line, ["disk_full"]), (log, ["disk_full", "several_gpus"])):
        ran = python("-m", "nbutils", "diagnose", "--error", file, home=tmp_path, timeout=60)
        causes = [diagnose.symptoms()["messages"][name]["cause"] for name in names]
        assert all(cause in ran.stdout for cause in causes)
    with open(log, "rb") as piped:
        ran = python("-m", "nbutils", "diagnose", "--error", "-", home=tmp_path, timeout=60, stdin=piped)
    assert diagnose.symptoms()["messages"]["disk_full"]["cause"] in ran.stdout


@pytest.mark.slow
def test_what_has_no_end_is_not_waited_for(tmp_path: Path) -> None:
    python("-m", "nbutils", "diagnose", "--error", "/dev/zero", home=tmp_path, timeout=60)


def test_no_pattern_follows_a_word_to_the_end_of_a_line() -> None:
    for name, entry in diagnose.symptoms()["messages"].items():
        assert not re.search(r"\.[*+]", entry["seen"]), name


@pytest.mark.parametrize(
    "facts, history",
    [
        ({"03_qlora": GOOD | {"settings": "x"}}, []),
        ({"03_qlora": GOOD | {"settings": None}}, []),
        ({"03_qlora": GOOD | {"steps": [1]}}, []),
        ({"03_qlora": GOOD | {"examples": "x"}}, []),
        ({"04_merge": {"evaluation": "x"}}, []),
        ({"04_merge": {"evaluation": {"scores": {"stopped": "x"}}}}, []),
        ({"04_merge": {"evaluation": {"verdict": [1]}}}, []),
        ({"03_qlora": GOOD}, [1]),
        ({"03_qlora": GOOD}, [{"step": 1, "loss": "x"}]),
        ({"03_qlora": GOOD}, [{"eval_loss": 1.0}]),
        ({"03_qlora": GOOD}, [{"step": 10**400, "loss": 1.5}]),
        ({"03_qlora": GOOD | {"rows_left_out": 10**400}}, []),
        ({"03_qlora": GOOD | {"oom_rungs": 7}}, []),
    ],
)
def test_a_damaged_run_is_told_with_its_file(facts: Any, history: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.facts.write_text(json.dumps({"lessons": facts}))
    (run.logs / "history.json").write_text(json.dumps(history))
    with refused(str(run.logs / "history.json" if history else run.facts)):
        diagnose.examine(Trained.of(run))
