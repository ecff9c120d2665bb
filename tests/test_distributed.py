"""distributed: one process does nothing special, several share a training, a lesson is launched and shown."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from solutions import run_solved
from support import lesson_facts, python, refused, wait_for

from nbutils import distributed, files
from nbutils.distributed import launching
from nbutils.errors import CourseError, StoppedByHand, Unfinished
from nbutils.language import tr
from nbutils.serving.server import free_port
from nbutils.training import sharding


def test_without_torchrun_there_is_one_process_whatever_a_container_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert distributed.world_size() == 1
    assert distributed.rank() == 0
    assert distributed.is_main()
    distributed.join()
    with distributed.main_first():
        assert distributed.broadcast(3) == 3
    assert distributed.anyone(True)
    assert not distributed.barrier()
    distributed.end_other_processes()


def test_more_processes_than_gpus_of_a_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("2 processes should", "machine has 1 GPU(s)."):
        distributed.join()


def test_only_the_first_process_of_all_machines_is_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert distributed.rank() == 2
    assert distributed.local_rank() == 0
    assert not distributed.is_main()


def test_an_engine_has_a_file_for_its_launcher_and_others_are_refused() -> None:
    assert distributed.config_file("fsdp_qlora").is_file()
    with refused("ENGINE is 'fsdp'."):
        distributed.config_file("fsdp")


def test_processes_with_other_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"seed": 1, "sft": {"save_steps": 2, "max_length": 8}}
    theirs = {"seed": 1, "sft": {"save_steps": 3, "max_length": 8}}
    monkeypatch.setattr("nbutils.distributed.processes.gather", lambda ours: [ours, theirs])
    with refused("agree on: sft.save_steps."):
        distributed.require_same(ours)


def test_zero3_refuses_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.distributed.strategies.strategy", lambda: "zero3")
    with refused("zero3 is for", "has method qlora."):
        distributed.device_map("cpu", "fp32", "qlora")


def test_accelerate_reads_the_file_of_every_engine() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    for name in distributed.STRATEGIES:
        config = load_config_from_file(str(files.CONFIGS / "accelerate" / f"{name}.yaml"))
        family, *_ = name.split("_")
        assert config.distributed_type.value == kinds[family]
        assert config.mixed_precision == "no"


def test_an_error_that_only_says_that_another_process_ended_is_told_by_the_main_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.9.0.2]:55321")
    assert distributed.peer_error(gone) is None  # one process alone
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert distributed.peer_error(ValueError("x")) is None
    assert distributed.peer_error(gone) is not None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert isinstance(distributed.peer_error(gone), SystemExit)


@pytest.mark.parametrize("bits", [8, 32])
def test_another_kind_of_adamw_continues_the_states_of_a_checkpoint(tmp_path: Path, bits: int) -> None:
    import torch
    from bitsandbytes.functional import quantize_blockwise

    moments = torch.rand(2, 4096) + 0.5
    kept: dict[str, Any] = {"step": 7}
    for number, moment in enumerate(moments, start=1):
        if bits == 8:
            quantized, state = quantize_blockwise(moment, blocksize=256)
            kept[f"state{number}"] = quantized
            kept[f"qmap{number}"] = state.code
            kept[f"absmax{number}"] = state.absmax
        else:
            kept[f"state{number}"] = moment
    groups = [{"lr": 1e-4, "params": [0]}]
    file = tmp_path / "optimizer.pt"
    torch.save({"state": {0: kept}, "param_groups": groups}, file)

    sharding.convert_optimizer_file(tmp_path, "adamw_torch")
    converted = torch.load(file, weights_only=True)
    assert converted["param_groups"] == groups
    plain = converted["state"][0]
    assert plain["step"] == 7
    tolerance = 0.05 if bits == 8 else 0
    assert torch.allclose(plain["exp_avg"], moments[0], rtol=tolerance)
    assert torch.allclose(plain["exp_avg_sq"], moments[1], rtol=tolerance)

    sharding.convert_optimizer_file(tmp_path, "adamw_torch")  # nothing to do
    sharding.convert_optimizer_file(tmp_path, "paged_adamw_8bit")
    back = torch.load(file, weights_only=True)["state"][0]
    assert back["step"] == 7
    assert torch.equal(back["state2"], plain["exp_avg_sq"])


@pytest.mark.parametrize(
    ("batch", "largest_micro_batch", "processes", "micro_batch"),
    [
        (8, 2, 1, 2),
        (8, 8, 2, 4),
        (2, 2, 2, 1),
        (8, 3, 1, 2),
        (12, 8, 2, 6),
    ],
)
def test_processes_share_the_batch_of_a_step(
    batch: int, largest_micro_batch: int, processes: int, micro_batch: int
) -> None:
    assert distributed.micro_batch_for(batch, largest_micro_batch, processes) == micro_batch


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "03_qlora.py"


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with refused("batch of 8 rows cannot", "evenly by 3 processes."):
        distributed.micro_batch_for(8, 2, 3)


@pytest.mark.parametrize(
    ("gpus", "asked_for", "processes"),
    [
        (0, 0, 2),
        (1, 0, 1),
        (2, 0, 2),
        (2, 1, 1),
        (0, 3, 3),
    ],
)
def test_there_is_a_process_for_each_gpu_unless_others_are_asked_for(gpus: int, asked_for: int, processes: int) -> None:
    assert distributed.processes_for(gpus, asked_for).value == processes


def test_more_processes_than_gpus_are_refused() -> None:
    with refused("3 processes should", "machine has 2 GPU(s)."):
        distributed.processes_for(2, 3)


def test_a_script_gets_its_parameters(script: Path, capsys: Any) -> None:
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['NBUTILS_HOME'])")
    home = script.parent / "runs"
    distributed.launch([sys.executable, str(script), "--MAX_STEPS", "5"], home, threads=3)
    assert f"['--MAX_STEPS', '5'] 3 {home}" in capsys.readouterr().out


def test_the_failure_of_a_script_is_shown_without_what_torchrun_adds(script: Path, capsys: Any) -> None:
    noise = "E1115 08:08:19.998000 2141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    lines = ["chatter", "[FAIL] the cause", noise, "more of torchrun"]
    script.write_text(f"print(*{lines!r}, sep='\\n'); raise SystemExit(1)")
    with refused("Lesson 03_qlora failed (exit status 1)", "chatter\n[FAIL] the cause"):
        distributed.launch([sys.executable, str(script)], script.parent, calm=True)
    assert capsys.readouterr().out == "  | [FAIL] the cause\n"


PROGRESS = (
    "starting at step 0",
    "checkpoint {step} is kept ({size:,.1f} MiB, verified)",
    "continuing from step {step}, kept in {folder}",
    "safe: checkpoint {step} in {folder}",
    "training · steps {first:,} to {last:,} · the first is slow",
    "trained before · nothing is left to train: this run has {steps} steps",
)


@pytest.mark.parametrize("english", PROGRESS)
def test_the_progress_of_a_lesson_is_recognised_in_both_languages(
    english: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    for text in (english, tr(english)):
        line = re.sub(r"{.*?}", "7", text)
        assert re.match(launching.PROGRESS, line), line


@pytest.mark.parametrize(("sent", "refusal"), [(signal.SIGTERM, Unfinished), (signal.SIGINT, StoppedByHand)])
def test_a_signal_ends_the_launched_script_and_says_whose_it_was(
    script: Path, capsys: Any, sent: signal.Signals, refusal: type[CourseError]
) -> None:
    ready = script.with_name("ready")
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )

    def send() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), sent)

    before = signal.signal(sent, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(refusal, match="03_qlora"):
            distributed.launch([sys.executable, str(script)], script.parent)
        assert "saved" in capsys.readouterr().out
        assert signal.getsignal(sent) is signal.default_int_handler
    finally:
        signal.signal(sent, before)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")  # without --master-port a c10d store


def torchrun() -> list[str]:
    """A launcher as the pages name it, at a free port."""
    return [*TORCHRUN, f"--master-port={free_port(0)}"]


def test_another_line_of_a_lesson_is_no_progress() -> None:
    assert not re.match(launching.PROGRESS, "adapter: runs/tiny/adapter (1.9 MiB)")


SPIED = """
import os, psutil, torch.distributed
from nbutils import distributed
distributed.join()
launcher = psutil.Process(os.getppid())
for process in (psutil.Process(), launcher):
    for connection in process.net_connections():
        if connection.status != "LISTEN":
            continue
        if process != launcher:
            print("worker listens at", connection.laddr.ip)
            continue
        store = torch.distributed.TCPStore("127.0.0.1", connection.laddr.port)
        print("keys", *(key for key in store.list_keys() if "rendezvous" in key))
distributed.end_other_processes()
"""


def launcher_of_the_page() -> list[str]:
    """How the reference says that a training of several processes is started."""
    page = (files.NOTEBOOKS.parent / "docs/reference.md").read_text(encoding="utf-8")
    [options] = re.findall("^torchrun (.*) notebooks/03_qlora.py", page, re.MULTILINE)
    return ["torch.distributed.run", *options.split()]


def launcher_of_lesson_06() -> list[str]:
    """How lesson 06 starts a training of several processes."""
    notebook = (files.NOTEBOOKS / "06_scale_out.py").read_text(encoding="utf-8")
    [port] = re.findall(r'"--main_process_port", "(\d+)"', notebook)
    launcher = ["accelerate.commands.launch", "--config_file", str(distributed.config_file("ddp"))]
    return [*launcher, "--num_processes", "2", "--main_process_port", port]


@pytest.mark.notebook
@pytest.mark.parametrize("launcher", [launcher_of_the_page, launcher_of_lesson_06])
def test_no_store_of_a_job_holds_what_torch_would_unpickle(launcher: Callable[[], list[str]], script: Path) -> None:
    script.write_text(SPIED)
    ran = python("-m", *launcher(), script, home=script.parent, threads=1)
    assert "[WARN]" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert "keys" in lines, "a store was found, and"
    for line in lines:
        assert not line.startswith("keys "), "it holds none"
        if line.startswith("worker listens at"):
            assert line.split()[-1] in ("127.0.0.1", "::1")


@pytest.mark.notebook
def test_a_store_that_torch_unpickles_is_warned_of(script: Path) -> None:
    script.write_text(SPIED)
    ran = python(*TORCHRUN, script, home=script.parent, threads=1)
    assert "keys torch.rendezvous" in ran.stdout
    assert "--master-port" in ran.stdout


@pytest.mark.notebook
def test_the_main_process_goes_first_broadcasts_and_goes_on_alone(script: Path) -> None:
    script.write_text(
        "import pathlib, sys\nfrom nbutils import distributed\ndistributed.join()\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "with distributed.main_first():\n    there = file.exists()\n    file.touch()\n"
        "value = distributed.broadcast(pathlib.Path('main') if distributed.is_main() else None)\n"
        "stop = distributed.anyone(distributed.rank() == 1)\n"
        "print('said by', distributed.rank())\n"
        "sys.stderr.write(f'{distributed.rank()} {there} {value} {stop}\\n')\n"  # in one piece: both write to it
        "distributed.end_other_processes()\nsys.stderr.write(f'went on: {distributed.rank()}\\n')\n"
    )
    ran = python(*torchrun(), script, script.with_name("file"), home=script.parent, threads=1)
    assert ran.stdout.strip() == "said by 0"
    errors = ran.stderr.splitlines()
    assert "0 False main True" in errors
    assert "1 True main True" in errors
    assert "went on: 0" in errors
    assert "went on: 1" not in ran.stderr


@pytest.mark.notebook
def test_a_main_process_that_fails_says_why_and_the_other_ends_quietly(script: Path) -> None:
    script.write_text(
        "from nbutils import distributed\ndistributed.join()\n"
        "with distributed.main_first():\n    raise SystemExit('[FAIL] the cause')\n"
    )
    ran = python(*torchrun(), script, home=script.parent, threads=1, ok=False)
    assert ran.stderr.count("[FAIL]") == 1
    assert "RuntimeError" not in ran.stderr


@pytest.mark.notebook
def test_a_process_that_is_silent_ends_the_job(script: Path) -> None:
    script.write_text(
        "import datetime, time\nfrom nbutils.distributed import processes\n"
        "processes.LOST = datetime.timedelta(seconds=2)\nprocesses.join()\n"
        "processes.rank() and time.sleep(60)\n"  # it says nothing more
        "processes.anyone(True)\n"
    )
    env = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "PYTHONPATH": str(files.PACKAGE.parent)}
    command = [sys.executable, *torchrun(), script]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "Another process of this training has ended or does not answer" in ran.stderr


@pytest.mark.notebook
@pytest.mark.long
def test_a_weight_that_fsdp_keeps_gathered_has_the_checksum_of_its_shard(script: Path) -> None:
    script.write_text(
        "import os, sys, torch\nos.environ['ACCELERATE_USE_FSDP'] = 'true'\n"
        "from torch.distributed.fsdp import fully_shard\nfrom nbutils import distributed\n"
        "from nbutils.training.model import weight_checksums\ndistributed.join()\n"
        "class Model(torch.nn.Sequential):\n"
        "    def forward(self, ids): return self[0](ids) @ self[1].weight.T\n"  # as the loss does: no call of the head
        "torch.manual_seed(0)\n"
        "model = Model(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False))\n"
        "model[1].weight = model[0].weight\n"
        "first = weight_checksums(model)\n"
        "fully_shard([*model], reshard_after_forward=False)\nfully_shard(model)\n"
        "shards = weight_checksums(model)\n"
        "with torch.no_grad(): model(torch.tensor([1]))\n"
        "gathered = not hasattr(model[0].weight, 'full_tensor')\n"
        "sys.stderr.write(f'{gathered} {first == shards == weight_checksums(model)}\\n')\n"
    )
    ran = python(*torchrun(), script, home=script.parent, threads=1)
    assert ran.stderr.splitlines().count("True True") == 2


SETTINGS = (
    "sft.per_device_train_batch_size=1,sft.gradient_accumulation_steps=4,sft.learning_rate=2e-4,"
    "sft.logging_steps=1,course.validation_rows=4"
)
ROWS = "course.rows=50"  # packed, they do not fill an epoch's last step
SIXTEEN = "method=lora,quantization.load_in_4bit=false,quantization.bnb_4bit_use_double_quant=false"


def train(home: Path, engine: str = "", processes: int = 1, settings: str = "", **values: Any) -> Any:
    """Lesson 03 in a process or as a job; 8 steps, saved every 4."""
    launcher: list[str | Path] = []
    if engine:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", distributed.config_file(engine)]
        launcher += ["--num_processes", str(processes), "--main_process_port", "0"]
    all_settings = [SETTINGS, ROWS]
    if settings:
        all_settings.append(settings)
    parameters = {"PROFILE": "tiny", "RUN_NAME": "r", "MAX_STEPS": 8, "SAVE_STEPS": 4, "SET": ",".join(all_settings)}
    words = []
    for name, value in (parameters | values).items():
        words += [f"--{name}", str(value)]
    return python(*launcher, files.NOTEBOOKS / "03_qlora.py", *words, home=home, threads=1, timeout=400)


def logged_losses(home: Path) -> dict[tuple[int, str], float]:
    """The losses of a run, of training and of held-out rows, by step and name."""
    losses = {}
    for entry in files.read_json(home / "r/logs/history.json"):
        for name in ("loss", "eval_loss"):
            if name in entry:
                losses[entry["step"], name] = entry[name]
    return losses


def assert_same_training(first_home: Path, second_home: Path, tolerance: float = 1e-5) -> None:
    """No logged loss of two runs, and no weight of their final adapters, is further apart."""
    from safetensors.torch import load_file

    first_losses = logged_losses(first_home)
    second_losses = logged_losses(second_home)
    assert len(first_losses) >= 10
    assert first_losses.keys() == second_losses.keys()
    for place, loss in first_losses.items():
        assert abs(loss - second_losses[place]) < tolerance, place

    first_weights = load_file(first_home / "r/adapter/adapter_model.safetensors")
    second_weights = load_file(second_home / "r/adapter/adapter_model.safetensors")
    for name, weight in first_weights.items():
        assert (weight - second_weights[name]).abs().max() < tolerance, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lesson 03 in one process, which accumulates four micro-batches. Read only."""
    home: Path = tmp_path_factory.mktemp("alone")
    train(home)
    return home


@pytest.mark.notebook
@pytest.mark.parametrize("engine", ["ddp", "fsdp_qlora"])
@pytest.mark.long
def test_two_processes_train_what_one_trains_and_each_continues_the_other(
    alone: Path, tmp_path: Path, engine: str
) -> None:
    together = tmp_path / "together"
    ran = train(together, engine, 2)
    assert ran.stdout.count("starting at step 0") == 1, "the main process alone prints"
    assert_same_training(alone, together)
    facts = lesson_facts(together / "r")
    assert facts["processes"] == 2
    assert facts["batch"] == 4
    assert facts["base_moved"] == 0
    assert facts["adapter_moved"] == lesson_facts(alone / "r")["adapter_moved"]
    if engine == "ddp":  # it leaves the files of one process, and reads them
        return

    continued = tmp_path / "continued"
    shutil.copytree(alone, continued)
    ran = train(continued, engine, 2, RESUME=4)
    assert "continuing from step 4" in ran.stdout
    assert_same_training(alone, continued)
    ran = train(together, RESUME=4)
    assert "continuing from step 4" in ran.stdout
    assert_same_training(alone, together)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero2", "zero2_offload", "zero3", "fsdp_lora"])
def test_every_engine_trains_what_one_process_trains(tmp_path: Path, engine: str) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    settings = SIXTEEN if engine in ("zero3", "fsdp_lora") else ""
    tolerance = 3e-5 if engine == "zero2_offload" else 1e-5  # DeepSpeed's own AdamW for CPUs rounds otherwise
    alone = tmp_path / "alone"
    together = tmp_path / "together"
    train(alone, settings=settings)
    train(together, engine, 2, settings)
    assert_same_training(alone, together, tolerance)

    continued = tmp_path / "continued"
    shutil.copytree(alone, continued)
    train(continued, engine, 2, settings, RESUME=4)
    assert_same_training(alone, continued, tolerance)
    train(together, settings=settings, RESUME=4)
    assert_same_training(alone, together, tolerance)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["fsdp_lora", "fsdp_qlora"])
def test_fsdp_trains_a_hybrid_model_as_one_process_does(tmp_path: Path, engine: str) -> None:
    settings = SIXTEEN if engine == "fsdp_lora" else ""
    alone = tmp_path / "alone"
    together = tmp_path / "together"
    train(alone, settings=settings, PROFILE="tiny_hybrid")
    train(together, engine, 2, settings, PROFILE="tiny_hybrid")
    assert_same_training(alone, together)


def newest_step(checkpoints: Path) -> int:
    """The newest step that a run has a checkpoint of."""
    return max(int(file.stem.removeprefix("checkpoint-")) for file in checkpoints.glob("checkpoint-*.json"))


@pytest.mark.notebook
@pytest.mark.long
def test_a_killed_process_ends_the_job_and_one_process_goes_on(tmp_path: Path) -> None:
    lesson = [files.NOTEBOOKS / "03_qlora.py", "--PROFILE", "tiny", "--RUN_NAME", "r", "--SAVE_STEPS", "2"]
    env = os.environ | {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, *lesson, "--MAX_STEPS", "500"]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    checkpoints = tmp_path / "r/checkpoints"
    wait_for(lambda: any(checkpoints.glob("checkpoint-*.json")))

    children = psutil.Process(job.pid).children()
    ranks = [process for process in children if "03_qlora.py" in " ".join(process.cmdline())]
    [victim] = [process for process in ranks if process.environ()["RANK"] == "1"]
    victim.kill()
    output, _ = job.communicate(timeout=30)
    assert job.returncode != 0
    assert output.count("[FAIL]") == 1
    assert not any(process.is_running() for process in ranks)
    verified = python("-m", "nbutils", "checkpoints", "verify", "r", home=tmp_path)
    assert "whole" in verified.stdout

    step = newest_step(checkpoints)
    ran = python(*lesson, "--MAX_STEPS", str(step + 2), home=tmp_path, threads=1)
    assert f"continuing from step {step}" in ran.stdout
    assert lesson_facts(tmp_path / "r")["processes"] == 1


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.9.0.1 at v0, 10.9.0.2 at v1."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    names = [f"nbutils-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.9.0.{number + 1}/24", "dev", f"v{number}")
            ip("-n", name, "link", "set", f"v{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"no network namespaces here: {problem}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


IMPATIENT = """
import datetime, runpy, sys
from nbutils.distributed import processes
processes.LOST = datetime.timedelta(seconds=30)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_two_machines_train_together_and_go_on_after_one_is_cut_off(tmp_path: Path, networks: list[str]) -> None:
    homes = [tmp_path / "first", tmp_path / "second"]
    first_home, second_home = homes
    impatient = tmp_path / "impatient.py"
    impatient.write_text(IMPATIENT)

    def start_machine(number: int, steps: int) -> subprocess.Popen[str]:
        """The command of one machine, which has folders of its own."""
        home = homes[number]
        env = os.environ | {
            "NBUTILS_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"v{number}",
            "PYTHONPATH": str(files.PACKAGE.parent),
        }
        command = ["ip", "netns", "exec", networks[number], sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc_per_node=1", f"--node-rank={number}"]
        command += ["--master-addr=10.9.0.1", "--master-port=29500"]
        command += [str(impatient), str(files.NOTEBOOKS / "03_qlora.py"), "--PROFILE", "tiny", "--RUN_NAME", "r"]
        command += ["--SAVE_STEPS", "4", "--MAX_STEPS", str(steps)]
        with open(home.with_suffix(f".{steps}.log"), "w", encoding="utf-8") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True)

    jobs = [start_machine(0, steps=400), start_machine(1, steps=400)]
    checkpoints = first_home / "r/checkpoints"
    wait_for(lambda: (checkpoints / "checkpoint-8.json").exists())
    subprocess.run(["ip", "-n", networks[1], "link", "set", "v1", "down"], check=True)
    cut_off = time.monotonic()
    for job in jobs:
        assert job.wait(timeout=75) != 0
    assert time.monotonic() - cut_off < 65  # 30 seconds, and torchrun's own end
    assert "[FAIL] Another process of this training" in first_home.with_suffix(".400.log").read_text()
    verified = python("-m", "nbutils", "checkpoints", "verify", "r", home=first_home)
    assert "whole" in verified.stdout
    assert [path.name for path in (second_home / "r").iterdir()] == ["data"]  # the first machine keeps all else

    subprocess.run(["ip", "-n", networks[1], "link", "set", "v1", "up"], check=True)
    step = newest_step(checkpoints)
    jobs = [start_machine(0, step + 4), start_machine(1, step + 4)]
    for job in jobs:
        assert job.wait(timeout=200) == 0
    log = first_home.with_suffix(f".{step + 4}.log").read_text()
    assert f"continuing from step {step}" in log
    assert lesson_facts(first_home / "r")["processes"] == 2

    # The first machine alone
    lesson = [files.NOTEBOOKS / "03_qlora.py", "--PROFILE", "tiny", "--RUN_NAME", "r"]
    ran = python(*lesson, "--MAX_STEPS", str(step + 6), home=first_home, threads=1)
    assert f"continuing from step {step + 4}" in ran.stdout


@pytest.mark.notebook
def test_lesson_06_trains_with_two_processes_what_one_would_have_trained(tmp_path: Path) -> None:
    profile = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    profile = profile.replace("validation_rows: auto", "validation_rows: 8")
    (tmp_path / "tiny.yaml").write_text(profile, encoding="utf-8")
    words = ["PROFILE", tmp_path / "tiny.yaml", "TRIAL_STEPS", "2", "MAX_STEPS", "3", "ENGINE", "ddp"]
    printed = run_solved("06_scale_out", tmp_path, "tiny", *words)

    run = tmp_path / "tiny"
    scaled = lesson_facts(run, "06_scale_out")
    assert scaled["processes"] == 2
    assert scaled["engine"] == "ddp"
    assert scaled["speedup"] > 0
    assert scaled["loss_difference"] < 1e-4  # float32: the same rows, added in another order
    trials = tmp_path / ".scratch/tiny/trials"
    alone = lesson_facts(trials / "alone")
    together = lesson_facts(trials / "together")
    assert together["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-4)  # rows are shared
    assert "[ OK ] 步数相同" in printed

    trained = lesson_facts(run, "03_qlora")
    assert trained["processes"] == 2
    assert trained["batch"] == 2
    assert trained["steps"] == 3
    assert trained["base_moved"] == 0
    assert files.stamp(run / "adapter") is not None
    with tarfile.open(run / "checkpoints/checkpoint-3.tar") as tar:
        names = tar.getnames()
    assert "checkpoint-3/rng_state_0.pth" in names
    assert "checkpoint-3/rng_state_1.pth" in names
