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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
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
    assert (distributed.world_size(), distributed.rank(), distributed.is_main()) == (1, 0, True)
    distributed.join()
    with distributed.main_first():
        assert distributed.broadcast(3) == 3
    assert distributed.anyone(True) and not distributed.barrier()
    distributed.leave_it_to_main()


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
    assert (distributed.rank(), distributed.local_rank(), distributed.is_main()) == (2, 0, False)


def test_an_engine_has_a_file_for_its_launcher_and_others_are_refused() -> None:
    assert distributed.config_file("fsdp_qlora").is_file()
    with refused("ENGINE is 'fsdp'."):
        distributed.config_file("fsdp")


def test_processes_with_other_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ({"seed": 1, "sft": {"save_steps": steps, "max_length": 8}} for steps in (2, 3))
    monkeypatch.setattr("nbutils.distributed.processes.gather", lambda ours: [ours, theirs])
    with refused("agree on: sft.save_steps."):
        distributed.require_same(ours)


def test_zero3_refuses_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.distributed.strategies.strategy", lambda: "zero3")
    with refused("zero3 is for", "has method qlora."):
        distributed.device_map("cpu", "fp32", "qlora")


def test_accelerate_reads_the_file_of_every_engine() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    for name in distributed.STRATEGIES:
        config = load_config_from_file(str(files.CONFIGS / "accelerate" / f"{name}.yaml"))
        kind = "MULTI_GPU" if name == "ddp" else "FSDP" if name.startswith("fsdp") else "DEEPSPEED"
        assert config.distributed_type.value == kind and config.mixed_precision == "no"


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
    state: dict[str, Any] = {"step": 7}
    for number, values in enumerate(moments, 1):
        kept, quantized = quantize_blockwise(values, blocksize=256)
        eight = {f"state{number}": kept, f"qmap{number}": quantized.code, f"absmax{number}": quantized.absmax}
        state |= eight if bits == 8 else {f"state{number}": values}
    file = tmp_path / "optimizer.pt"
    torch.save({"state": {0: state}, "param_groups": [{"lr": 1e-4, "params": [0]}]}, file)
    sharding.convert_optimizer_file(tmp_path, "adamw_torch")
    states = torch.load(file, weights_only=True)
    assert states["param_groups"] == [{"lr": 1e-4, "params": [0]}] and states["state"][0]["step"] == 7
    for name, values in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert torch.allclose(states["state"][0][name], values, rtol=0.05 if bits == 8 else 0)
    sharding.convert_optimizer_file(tmp_path, "adamw_torch")  # nothing to do
    sharding.convert_optimizer_file(tmp_path, "paged_adamw_8bit")
    back = torch.load(file, weights_only=True)["state"][0]
    assert back["step"] == 7 and torch.equal(back["state2"], states["state"][0]["exp_avg_sq"])


def test_there_is_a_process_for_each_gpu_and_they_share_the_batch_of_a_step() -> None:
    shares = {(8, 2, 1): 2, (8, 8, 2): 4, (2, 2, 2): 1, (8, 3, 1): 2, (12, 8, 2): 6}  # batch, micro-batch, processes
    assert {case: distributed.micro_batch_for(*case) for case in shares} == shares
    with refused("batch of 8 rows cannot", "evenly by 3 processes."):
        distributed.micro_batch_for(8, 2, 3)
    counts = {(0, 0): 2, (1, 0): 1, (2, 0): 2, (2, 1): 1, (0, 3): 3}  # GPUs, PROCESSES
    assert {case: distributed.processes_for(*case).value for case in counts} == counts
    with refused("3 processes should", "machine has 2 GPU(s)."):
        distributed.processes_for(2, 3)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "03_qlora.py"


def test_a_script_gets_its_parameters_and_its_failure_is_shown_without_what_torchrun_adds(
    script: Path, capsys: Any
) -> None:
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['NBUTILS_HOME'])")
    command = [sys.executable, str(script)]
    distributed.launch([*command, "--MAX_STEPS", "5"], script.parent / "runs", threads=3)
    assert f"['--MAX_STEPS', '5'] 3 {script.parent / 'runs'}" in capsys.readouterr().out
    noise = "E1115 08:08:19.998000 2141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    script.write_text(
        f"print('chatter'); print('[FAIL] the cause'); print({noise!r}); print('more of torchrun'); raise SystemExit(1)"
    )
    with refused("Lesson 03_qlora failed (exit status 1)", "chatter\n[FAIL] the cause"):
        distributed.launch(command, script.parent, calm=True)
    assert capsys.readouterr().out == "  | [FAIL] the cause\n"


def test_the_progress_of_a_lesson_is_recognised_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ["starting at step 0", "checkpoint {step} is kept ({size:,.1f} MiB, verified)"]
    shown += ["continuing from step {step}, kept in {folder}", "safe: checkpoint {step} in {folder}"]
    shown += ["training · steps {first:,} to {last:,} · the first is slow"]
    shown += ["trained before · nothing is left to train: this run has {steps} steps"]
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    for line in [*shown, *map(tr, shown)]:
        assert re.match(launching.PROGRESS, re.sub(r"{.*?}", "7", line)), line
    assert not re.match(launching.PROGRESS, "adapter: runs/tiny/adapter (1.9 MiB)")


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
        assert "saved" in capsys.readouterr().out and signal.getsignal(sent) is signal.default_int_handler
    finally:
        signal.signal(sent, before)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")  # without --master-port a c10d store


def torchrun() -> list[str]:
    """A launcher as the pages name it, at a free port."""
    return [*TORCHRUN, f"--master-port={free_port(0)}"]


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
distributed.leave_it_to_main()
"""


def _launch(told: str) -> list[str]:
    """How the pages and lesson 06 say that a training of several processes is started."""
    if told == "page":
        page = (files.NOTEBOOKS.parent / "docs/reference.md").read_text(encoding="utf-8")
        [options] = re.findall("^torchrun (.*) notebooks/03_qlora.py", page, re.MULTILINE)
        return ["torch.distributed.run", *options.split()]
    notebook = (files.NOTEBOOKS / "06_scale_out.py").read_text(encoding="utf-8")
    [port] = re.findall(r'"--main_process_port", "(\d+)"', notebook)
    launcher = ["accelerate.commands.launch", "--config_file", str(distributed.config_file("ddp"))]
    return [*launcher, "--num_processes", "2", "--main_process_port", port]


@pytest.mark.notebook
@pytest.mark.parametrize("told", ["page", "lesson 06"])
def test_no_store_of_a_job_holds_what_torch_would_unpickle(told: str, script: Path) -> None:
    script.write_text(SPIED)
    ran = python("-m", *_launch(told), script, home=script.parent, threads=1)
    lines = ran.stdout.splitlines()
    assert "keys" in lines and not any(line.startswith("keys ") for line in lines)
    assert {line.split()[-1] for line in lines if "worker" in line} <= {"127.0.0.1", "::1"}
    assert "[WARN]" not in ran.stdout


@pytest.mark.notebook
def test_a_store_that_torch_unpickles_is_warned_of(script: Path) -> None:
    script.write_text(SPIED)
    ran = python(*TORCHRUN, script, home=script.parent, threads=1)
    assert "keys torch.rendezvous" in ran.stdout and "--master-port" in ran.stdout


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
        "distributed.leave_it_to_main()\nsys.stderr.write(f'went on: {distributed.rank()}\\n')\n"
    )
    ran = python(*torchrun(), script, script.with_name("file"), home=script.parent, threads=1)
    assert {"0 False main True", "1 True main True", "went on: 0"} <= set(ran.stderr.splitlines())
    assert "went on: 1" not in ran.stderr and ran.stdout.strip() == "said by 0"


@pytest.mark.notebook
def test_a_main_process_that_fails_says_why_and_the_other_ends_quietly(script: Path) -> None:
    script.write_text(
        "from nbutils import distributed\ndistributed.join()\n"
        "with distributed.main_first():\n    raise SystemExit('[FAIL] the cause')\n"
    )
    ran = python(*torchrun(), script, home=script.parent, threads=1, ok=False)
    assert ran.stderr.count("[FAIL]") == 1 and "RuntimeError" not in ran.stderr


@pytest.mark.notebook
def test_a_process_that_is_silent_ends_the_job(script: Path) -> None:
    script.write_text(
        "import datetime, time\nfrom nbutils.distributed import processes\n"
        "processes.LOST = datetime.timedelta(seconds=2)\nprocesses.join()\n"
        "processes.rank() and time.sleep(60)\n"  # it says nothing more
        "processes.anyone(True)\n"
    )
    env = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "PYTHONPATH": str(files.PACKAGE.parent)}
    ran = subprocess.run([sys.executable, *torchrun(), script], env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "Another process of this training has ended or does not answer" in ran.stderr


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
    parameters = {"PROFILE": "tiny", "RUN_NAME": "r", "MAX_STEPS": 8, "SAVE_STEPS": 4} | values
    words = [word for name, value in parameters.items() for word in (f"--{name}", str(value))]
    words += ["--SET", ",".join(filter(None, (SETTINGS, ROWS, settings)))]
    launcher: list[str | Path] = []
    if engine:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", distributed.config_file(engine)]
        launcher += ["--num_processes", str(processes), "--main_process_port", "0"]
    return python(*launcher, files.NOTEBOOKS / "03_qlora.py", *words, home=home, threads=1, timeout=400)


def difference(first_home: Path, second_home: Path) -> tuple[float, float]:
    """The furthest two logged losses, and two weights of the final adapters, are apart."""
    from safetensors.torch import load_file

    logs = [files.read_json(home / "r/logs/history.json") for home in (first_home, second_home)]
    losses = [
        {(entry["step"], key): entry[key] for entry in log for key in ("loss", "eval_loss") if key in entry}
        for log in logs
    ]
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) >= 10
    first, second = (load_file(home / "r/adapter/adapter_model.safetensors") for home in (first_home, second_home))
    weights = max((first[name] - second[name]).abs().max().item() for name in first)
    return max(abs(losses[0][key] - losses[1][key]) for key in losses[0]), weights


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
    said = train(together, engine, 2).stdout
    assert max(difference(alone, together)) < 1e-5
    facts = lesson_facts(together / "r")
    assert (facts["processes"], facts["batch"], facts["base_moved"]) == (2, 4, 0)
    assert facts["adapter_moved"] == lesson_facts(alone / "r")["adapter_moved"]
    assert said.count("starting at step 0") == 1  # the main process alone prints
    if engine == "ddp":  # it leaves the files of one process, and reads them
        return
    shutil.copytree(alone, tmp_path / "continued")
    assert "continuing from step 4" in train(tmp_path / "continued", engine, 2, RESUME=4).stdout
    assert max(difference(alone, tmp_path / "continued")) < 1e-5
    assert "continuing from step 4" in train(together, RESUME=4).stdout
    assert max(difference(alone, together)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero2", "zero2_offload", "zero3", "fsdp_lora"])
def test_every_engine_trains_what_one_process_trains(tmp_path: Path, engine: str) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    settings = SIXTEEN if engine in ("zero3", "fsdp_lora") else ""
    train(tmp_path / "alone", settings=settings)
    train(tmp_path / "together", engine, 2, settings)
    most = 3e-5 if engine == "zero2_offload" else 1e-5  # DeepSpeed's own AdamW for CPUs rounds otherwise
    assert max(difference(tmp_path / "alone", tmp_path / "together")) < most
    shutil.copytree(tmp_path / "alone", tmp_path / "continued")
    train(tmp_path / "continued", engine, 2, settings, RESUME=4)
    assert max(difference(tmp_path / "alone", tmp_path / "continued")) < most
    train(tmp_path / "together", settings=settings, RESUME=4)
    assert max(difference(tmp_path / "alone", tmp_path / "together")) < most


@pytest.mark.notebook
@pytest.mark.long
def test_a_killed_process_ends_the_job_and_one_process_goes_on(tmp_path: Path) -> None:
    words = [files.NOTEBOOKS / "03_qlora.py", "--PROFILE", "tiny", "--RUN_NAME", "r", "--SAVE_STEPS", "2"]
    env = os.environ | {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, *words, "--MAX_STEPS", "500"]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kept = tmp_path / "r/checkpoints"
    wait_for(lambda: any(kept.glob("checkpoint-*.json")))
    ranks = [process for process in psutil.Process(job.pid).children() if "03_qlora.py" in " ".join(process.cmdline())]
    [victim] = [process for process in ranks if process.environ()["RANK"] == "1"]
    victim.kill()
    said, _ = job.communicate(timeout=30)
    assert job.returncode and said.count("[FAIL]") == 1 and not any(process.is_running() for process in ranks)
    assert "whole" in python("-m", "nbutils", "checkpoints", "verify", "r", home=tmp_path).stdout
    last = max(int(file.stem.partition("-")[2]) for file in kept.glob("checkpoint-*.json"))
    ran = python(*words, "--MAX_STEPS", str(last + 2), home=tmp_path, threads=1)
    assert f"continuing from step {last}" in ran.stdout
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
    (tmp_path / "impatient.py").write_text(IMPATIENT)

    def start(steps: int) -> list[subprocess.Popen[str]]:
        """The command of both machines, each with folders of its own."""
        jobs = []
        for number, (name, home) in enumerate(zip(networks, homes, strict=True)):
            env = os.environ | {"NBUTILS_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            env |= {"GLOO_SOCKET_IFNAME": f"v{number}", "PYTHONPATH": str(files.PACKAGE.parent)}
            where = ["--nnodes=2", "--nproc_per_node=1", f"--node-rank={number}", "--master-addr=10.9.0.1"]
            launcher = [sys.executable, "-m", "torch.distributed.run", *where, "--master-port=29500"]
            lesson = [tmp_path / "impatient.py", files.NOTEBOOKS / "03_qlora.py"]
            lesson += ["--PROFILE", "tiny", "--RUN_NAME", "r", "--SAVE_STEPS", "4"]
            command = ["ip", "netns", "exec", name, *launcher, *map(str, lesson), "--MAX_STEPS", str(steps)]
            with open(home.with_suffix(f".{steps}.log"), "w", encoding="utf-8") as log:
                jobs.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True))
        return jobs

    jobs = start(400)
    kept = homes[0] / "r/checkpoints"
    wait_for(lambda: (kept / "checkpoint-8.json").exists())
    subprocess.run(["ip", "-n", networks[1], "link", "set", "v1", "down"], check=True)
    cut = time.monotonic()
    assert all(job.wait(timeout=75) for job in jobs)
    assert time.monotonic() - cut < 65  # 30 seconds, and torchrun's own end
    assert "[FAIL] Another process of this training" in homes[0].with_suffix(".400.log").read_text()
    assert "whole" in python("-m", "nbutils", "checkpoints", "verify", "r", home=homes[0]).stdout
    assert [path.name for path in (homes[1] / "r").iterdir()] == ["data"]  # the first machine keeps all else
    last = max(int(file.stem.partition("-")[2]) for file in kept.glob("checkpoint-*.json"))
    subprocess.run(["ip", "-n", networks[1], "link", "set", "v1", "up"], check=True)
    assert [job.wait(timeout=200) for job in start(last + 4)] == [0, 0]
    assert f"continuing from step {last}" in homes[0].with_suffix(f".{last + 4}.log").read_text()
    assert lesson_facts(homes[0] / "r")["processes"] == 2
    words = ["--PROFILE", "tiny", "--RUN_NAME", "r", "--MAX_STEPS", str(last + 6)]
    ran = python(files.NOTEBOOKS / "03_qlora.py", *words, home=homes[0], threads=1)  # the first machine alone
    assert f"continuing from step {last + 4}" in ran.stdout


@pytest.mark.notebook
def test_lesson_06_trains_with_two_processes_what_one_would_have_trained(tmp_path: Path) -> None:
    text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(text.replace("validation_rows: auto", "validation_rows: 8"), encoding="utf-8")
    words = [files.NOTEBOOKS / "06_scale_out.ipynb", tmp_path / "out.ipynb", "-p", "PROFILE", tmp_path / "tiny.yaml"]
    words += ["-p", "TRIAL_STEPS", "2", "-p", "MAX_STEPS", "3", "-p", "ENGINE", "ddp"]
    python("-m", "papermill", *words, home=tmp_path, timeout=590)
    scaled, trained = (lesson_facts(tmp_path / "tiny", stem) for stem in ("06_scale_out", "03_qlora"))
    assert (scaled["processes"], scaled["engine"]) == (2, "ddp") and scaled["speedup"] > 0
    assert scaled["loss_difference"] < 1e-4  # float32: the same rows, added in another order
    alone, together = (lesson_facts(tmp_path / ".scratch/tiny/trials" / name) for name in ("alone", "together"))
    assert together["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-4)  # rows are shared
    assert (trained["processes"], trained["batch"], trained["steps"], trained["base_moved"]) == (2, 2, 3, 0)
    assert files.stamp(tmp_path / "tiny/adapter") is not None
    assert "[ OK ] equal steps, equal batch, losses within 1 %" in (tmp_path / "out.ipynb").read_text()
    with tarfile.open(tmp_path / "tiny/checkpoints/checkpoint-3.tar") as tar:
        assert {"checkpoint-3/rng_state_0.pth", "checkpoint-3/rng_state_1.pth"} <= set(tar.getnames())
