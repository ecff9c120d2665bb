"""Lesson 03 under every engine on this machine: losses beside those of one plain process, step times, peak memory.

    python benchmarks/scale_out.py FOLDER RESULT.json                          # without a GPU: the tiny model
    python benchmarks/scale_out.py FOLDER RESULT.json --model Qwen2.5-7B       # random weights in its shape, on a GPU
    ... --model PATH/SmolLM2-135M-Instruct --data ROWS.json                    # a real model and rows, also on a CPU
    ... --cases plain,torchrun_1,zero2_2                                       # some of them, added to RESULT.json

A name ends with the number of processes. Two processes are two "machines" of one process each, on this host: so two can
use one GPU (NCCL is told that the hosts differ, and sends over the loopback device). The same rows make up a step in
every case. DeepSpeed must be installed for zero2, zero2_offload and zero3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nbutils import files
from nbutils.models import find_shape
from nbutils.plan.forecast import recipe_of
from nbutils.plan.memory import peak_gib

CONFIGS = files.CONFIGS / "accelerate"
CASES = {  # name: engine, processes, method
    "plain": ("", 1, "qlora"), "torchrun_1": ("torchrun", 1, "qlora"), "fsdp_qlora_1": ("fsdp_qlora", 1, "qlora"),
    "zero2_1": ("zero2", 1, "qlora"), "ddp_2": ("ddp", 2, "qlora"), "fsdp_qlora_2": ("fsdp_qlora", 2, "qlora"),
    "zero2_2": ("zero2", 2, "qlora"), "zero2_offload_1": ("zero2_offload", 1, "qlora"),
    "plain_16": ("", 1, "lora"), "fsdp_lora_1": ("fsdp_lora", 1, "lora"), "zero3_1": ("zero3", 1, "lora"),
    "fsdp_lora_2": ("fsdp_lora", 2, "lora"), "zero3_2": ("zero3", 2, "lora"),
}  # fmt: skip
WARM_UP = 3  # steps that are not counted
LESSON = """
import runpy, sys
from nbutils import evaluation
evaluation.answer_rows = lambda model, tokenizer, rows: [""] * len(rows)  # a model of random weights never stops
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ALL_REDUCE = """
import os, time, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
one = torch.ones(2**24, device="cuda" if cuda else "cpu")  # 64 MiB
for turn in range(12):
    if turn == 2:
        dist.all_reduce(one); cuda and torch.cuda.synchronize(); began = time.perf_counter()
    dist.all_reduce(one)
cuda and torch.cuda.synchronize()
if dist.get_rank() == 0:
    print("GBPS", 10 * one.numel() * 4 / (time.perf_counter() - began) / 1e9, flush=True)  # 2(N-1)/N is 1 for two
dist.destroy_process_group()
"""


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def commands(engine: str, processes: int, script: list[str]) -> list[list[str]]:
    """One command for each "machine"."""
    python, port = sys.executable, str(free_port())
    if not engine:
        return [[python, *script]]
    if engine == "torchrun":
        launcher = [python, "-m", "torch.distributed.run", "--nnodes", str(processes), "--nproc-per-node", "1"]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
        return [[*launcher, str(number), *script] for number in range(processes)]
    launcher = [python, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{engine}.yaml")]
    launcher += ["--num_machines", str(processes), "--num_processes", str(processes)]
    launcher += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank"]
    return [[*launcher, str(number), *script] for number in range(processes)]


def run(engine: str, processes: int, script: list[str], home: Path) -> str:
    """Run a script as so many machines; what the first one printed."""
    env = os.environ | {"NBUTILS_HOME": str(home), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    env |= {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started = []
    for number, command in enumerate(commands(engine, processes, script)):
        log = home.with_suffix(f".{number}.log").open("w")
        alone = {"NCCL_HOSTID": f"machine{number}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(subprocess.Popen(command, env=env | alone, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=900) for process in started]
    said = home.with_suffix(".0.log").read_text(errors="replace")
    if any(codes):
        last = home.with_suffix(f".{processes - 1}.log").read_text(errors="replace")
        raise RuntimeError(f"{engine} {codes}\n{said[-3000:]}\n{last[-2000:]}")
    return said


def step_seconds(run_folder: Path) -> list[float]:
    """Between two logged steps, as TensorBoard's files have it; the first ones are left out."""
    [folder] = {file.parent for file in run_folder.glob("logs/**/events.out.tfevents*") if "loss" in tags(file.parent)}
    times = [event.wall_time for event in accumulator(folder).Scalars("train/loss")]
    return [second - first for first, second in itertools.pairwise(times)][WARM_UP:]


def accumulator(folder: Path) -> Any:
    """What TensorBoard knows of a folder."""
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def tags(folder: Path) -> str:
    """The names of its curves."""
    return " ".join(accumulator(folder).Tags()["scalars"])


def main() -> None:
    """Run the cases and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--data", default="", help="rows for lesson 02; none: the course's own")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--set", default="", help="more settings of the profile")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    cuda, model = torch.cuda.is_available(), given.folder / given.model  # an absolute path stays what it is
    if given.model and not model.exists():
        subprocess.run([sys.executable, Path(__file__).with_name("random_model.py"), given.model, model], check=True)
    profile = ["--PROFILE", "hopper_141gb" if given.model and cuda else "tiny"]
    profile += ["--MODEL", str(model)] if given.model else []
    profile += ["--DATA", given.data] if given.data else []
    settings = f"sft.per_device_train_batch_size=1,sft.gradient_accumulation_steps={given.batch}"
    settings += ",sft.packing=true,sft.logging_steps=1,course.validation_rows=8,lora.lora_dropout=0" + (
        f",{given.set}" if given.set else ""
    )
    sixteen = ",method=lora,quantization.load_in_4bit=false"
    results: dict[str, Any] = {"machine": torch.cuda.get_device_name() if cuda else "cpu"}
    results |= {"model": model.name if given.model else "tiny", "batch": given.batch, "steps": given.steps, "cases": {}}
    earlier = files.read_json(given.out) if given.out.exists() else results
    if any(earlier[name] != results[name] for name in ("machine", "model", "batch", "steps")):
        raise SystemExit(f"{given.out} is of another machine, model, batch or number of steps")
    results["cases"] = earlier["cases"]
    probe, wrapper = given.folder / "all_reduce.py", given.folder / "lesson.py"
    probe.write_text(ALL_REDUCE)
    wrapper.write_text(LESSON)
    said = run("torchrun", 2, [str(probe)], given.folder / "probe")
    results["two_processes_all_reduce_gb_per_second"] = float(said.split("GBPS")[1].split()[0])
    for name in given.cases.split(","):
        engine, processes, method = CASES[name]
        home = given.folder / name
        script = [str(wrapper), str(files.NOTEBOOKS / "03_qlora.py"), *profile, "--RUN_NAME", "r"]
        script += ["--MAX_STEPS", str(given.steps), "--SAVE_STEPS", str(given.steps)]
        script += ["--SET", settings + (sixteen if method == "lora" else "")]
        began = time.perf_counter()
        shutil.rmtree(home, ignore_errors=True)
        try:
            run(engine, processes, script, home)
        except (RuntimeError, subprocess.TimeoutExpired) as problem:
            results["cases"][name] = {"failed": str(problem)}
            print(name, "FAILED", problem, flush=True)
            continue
        facts = json.loads((home / "r/facts.json").read_text())["lessons"]["03_qlora"]
        history = json.loads((home / "r/logs/history.json").read_text())
        seconds = step_seconds(home / "r")
        first = results["cases"].get("plain" if method == "qlora" else "plain_16", {})
        losses = [entry["loss"] for entry in history if "loss" in entry]
        case = {
            "losses": losses, "validation": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
            "step_seconds": statistics.median(seconds), "fastest_step": min(seconds), "steps_timed": len(seconds),
            "peak_gib": facts["peak_memory_gib"], "base_moved": facts["base_moved"],
            "all_seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        if given.model and cuda:
            case["forecast_gib"] = round(peak_gib(find_shape(str(model)), recipe_of(facts)), 3)
        if "losses" in first:
            pairs = list(zip(first["losses"], losses, strict=True))
            case["furthest_loss"] = max(abs(one - other) / one for one, other in pairs)
            case["times_plain"] = case["step_seconds"] / first["step_seconds"]
        results["cases"][name] = case
        shown = {key: round(value, 6) for key, value in case.items() if isinstance(value, float | int)}
        print(name, shown, flush=True)
        files.write_json(given.out, results)
    files.write_json(given.out, results)


if __name__ == "__main__":
    main()
