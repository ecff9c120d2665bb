"""One training on several GPUs of one machine: which process this is, how a lesson is launched, how runs compare.

torchrun numbers the processes; rank 0, the main process, prepares, prints and writes. Without torchrun all of this does
nothing. accelerate's PartialState is not used: `join` runs before a lesson has installed it, and after an error of the
main process its barriers would add one of every other process.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from nbutils import checkpoints, record
from nbutils.dashboard import LIVE_LINE
from nbutils.errors import CourseError
from nbutils.hardware import Choice, ask_driver
from nbutils.masking import mask_secrets
from nbutils.paths import NOTEBOOKS

TIMEOUT = timedelta(hours=2)  # for a main process that prepares data; torchrun notices a dead one at once
CPU_PROCESSES = 2
SHUTDOWN_SECONDS = "600"  # what torchrun gives a training to save; its own 30 s may be less than a step
TOLERANCE = 0.01  # of the loss: sums in another order differ by a rounding each, 2^-8 of a value in bfloat16
TAIL_LINES = 15  # of a failed lesson's output
PROGRESS_LINES = re.compile(
    rf"{LIVE_LINE.pattern}|\[FAIL\]|resuming |starting at step|checkpoint \d+ is kept|safe: |Nothing is left|Lesson "
)
PROGRESS_BAR = re.compile(r"\d%\|")
TORCHRUN_REPORT = re.compile(r"elastic/multiprocessing/api\.py:\d+\] failed")  # what follows is about torchrun itself
Result = TypeVar("Result")


def _launched() -> bool:
    """Whether torchrun started this process; containers of some platforms set WORLD_SIZE and RANK, never LOCAL_RANK."""
    return "LOCAL_RANK" in os.environ


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if _launched() else 1


def rank() -> int:
    """The number of this process, which is also the index of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if _launched() else 0


def is_main() -> bool:
    """Whether this process prepares, prints and writes."""
    return rank() == 0


def join() -> None:
    """Join the process group and select the GPU of this process; every process but the main one stops printing."""
    if not _launched():
        return
    if not is_main():  # the main process prints it already; errors still go to stderr
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        warnings.simplefilter("ignore")
        os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "error"}
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import torch

    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())), torch.cuda.device_count()
    if local != world_size():
        raise CourseError("scaling.several_machines", processes=world_size())
    if 0 < gpus < local:
        raise CourseError("scaling.more_processes_than_gpus", processes=local, gpus=gpus)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank())
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)


@contextmanager
def main_first() -> Iterator[None]:
    """The main process runs this block while the others wait; then they run it and find the work done."""
    if not is_main():
        _broadcast(None)
    yield
    if is_main():
        _broadcast(None)


def told_by_main(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that only the main process calls; the others get what it returned."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Result:
        return _broadcast(function(*args, **named) if is_main() else None)

    return call


def _broadcast(value: Any) -> Any:
    """What the main process gave; if that one has failed, this one exits without a second error."""
    if not _launched():
        return value
    import torch.distributed

    values = [value]
    try:
        torch.distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    except RuntimeError:
        if is_main():
            raise
        raise SystemExit(1) from None
    return values[0]


def anyone(yes: bool) -> bool:
    """Whether any process says yes: all must stop at the same step, or the rest would wait for ever."""
    if not _launched():
        return yes
    import torch

    answer = torch.tensor(int(yes))
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
    return bool(answer.item())


def leave_it_to_main() -> None:
    """End every process but the main one, once all have arrived here."""
    if not _launched():
        return
    import torch.distributed

    anyone(False)
    torch.distributed.destroy_process_group()
    if not is_main():
        raise SystemExit(0)


def require_shares(batch: int, processes: int) -> None:
    """Refuse a batch that the processes cannot share evenly."""
    if batch % processes:
        raise CourseError("scaling.uneven_batch", batch=batch, processes=processes)


def micro_batch_for(batch: int, micro_batch: int, processes: int) -> int:
    """The largest micro-batch up to `micro_batch` with which all processes together take `batch` rows in a step."""
    require_shares(batch, processes)
    share = batch // processes
    return max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)


def processes_for(cards: int, asked: int = 0) -> Choice:
    """How many processes train together: `asked`, or one for each GPU, or two on the CPU."""
    if cards and asked > cards:
        raise CourseError("scaling.too_many_processes", processes=asked, gpus=cards)
    if asked:
        return Choice(asked, "parameter PROCESSES")
    if not cards:
        return Choice(CPU_PROCESSES, "no GPU: each process takes a core instead")
    if cards == 1:
        return Choice(1, "this machine has one GPU, so this is lesson 03 as you know it; with two it would use both")
    return Choice(cards, f"one for each of the {cards} GPUs")


def hint(seen: int) -> str:
    """What a lesson that trains with one process says on a machine with several GPUs; empty elsewhere."""
    if not seen or _launched():
        return ""
    gpus = sum(line.startswith("GPU ") for line in ask_driver("-L").splitlines())
    if gpus <= seen:
        return ""
    return (
        f"GPUs      {gpus} are here, and this lesson uses one. Lesson 06 trains on all of them, as does\n"
        f"          torchrun --nproc_per_node={gpus} {NOTEBOOKS / '03_qlora.py'}"
    )


def launch(
    script: Path, values: dict[str, Any], keep: Path, processes: int = 1, threads: int = 0, calm: bool = False
) -> None:
    """Run a lesson as a script and show its output as it comes; with `calm` only its progress.

    `threads` limits each process; 0 leaves one process to torch, and shares the cores among several.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    arguments = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(script), *arguments]
    env = os.environ | {"NBUTILS_HOME": str(keep), "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
    env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_SECONDS}
    threads = threads or (max((os.cpu_count() or 1) // processes, 1) if processes > 1 else 0)
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    terminated = threading.Event()

    def forward(*_: object) -> None:
        terminated.set()
        child.terminate()  # it saves, and ends

    handler = signal.signal(signal.SIGTERM, forward)
    try:
        with child:
            tail = _show_output(child, calm)
    finally:
        signal.signal(signal.SIGTERM, handler)
    if terminated.is_set():
        raise CourseError("scaling.terminated", lesson=script.stem)
    if child.returncode != 0:
        raise CourseError("scaling.lesson_failed", lesson=script.stem, status=child.returncode, output="\n".join(tail))


def _show_output(child: subprocess.Popen[str], calm: bool) -> list[str]:
    """Print what a process writes, without what torchrun adds at its end, and return the last lines."""
    assert child.stdout
    lines: list[str] = []
    torchrun_reports = False
    try:
        for line in filter(str.strip, child.stdout):  # to the end, or the child would block
            torchrun_reports = torchrun_reports or TORCHRUN_REPORT.search(line) is not None
            if torchrun_reports:
                continue
            lines = [*lines[1 - TAIL_LINES :], line.rstrip()]
            if not calm or PROGRESS_LINES.match(line):
                end = "" if PROGRESS_BAR.search(line) else "\n"  # a bar is drawn over itself
                print(f"\r  | {mask_secrets(line.rstrip())}", end=end, flush=True)
    except BaseException:  # the stop button: the child must not train on alone
        child.terminate()
        raise
    return lines


@dataclass(frozen=True)
class Comparison:
    """The same training with one process and with several; the single process comes first in every pair."""

    processes: tuple[int, int]
    steps: tuple[int, int]
    batch: tuple[int, int]
    tokens_per_second: tuple[float, float]
    losses: dict[int, tuple[float, float]]

    @property
    def speedup(self) -> float:
        """How many times the tokens per second."""
        one, several = self.tokens_per_second
        return several / one if one and several else math.nan

    @property
    def furthest(self) -> float:
        """The largest difference between two losses of the same step, relative to the loss."""
        if not all(math.isfinite(loss) for pair in self.losses.values() for loss in pair):
            return math.inf
        return max(abs(one - other) / max(abs(one), 1e-6) for one, other in self.losses.values())

    @property
    def same_work(self) -> bool:
        """Whether both took the same steps over the same number of rows with the same losses."""
        return self.steps[0] == self.steps[1] and self.batch[0] == self.batch[1] and self.furthest <= TOLERANCE

    def __str__(self) -> str:
        rows: dict[str, tuple[float, float]] = {"processes": self.processes, "steps": self.steps}
        rows |= {"rows per step": self.batch, "tokens per second": self.tokens_per_second}
        rows |= {f"loss at step {step}": pair for step, pair in self.losses.items()}
        lines = [f"{name:18} {one:>10,.6g} {other:>10,.6g}" for name, (one, other) in rows.items()]
        speed = f"{self.speedup:.2f} times the tokens per second"
        return "\n".join([*lines, f"{speed}; losses differ by at most {self.furthest:.1e} of the loss"])


def compare(alone: Path, together: Path) -> Comparison:
    """What lesson 03 left in two run folders."""
    one, several = (record.read(run / "facts.json")["lessons"]["03_qlora"] for run in (alone, together))
    numbers = {name: (one[name], several[name]) for name in ("processes", "steps", "batch", "tokens_per_second")}
    first, second = _losses(alone), _losses(together)
    common = {step: (first[step], second[step]) for step in sorted(first) if step in second}
    if not common:
        raise CourseError("scaling.no_common_step", one=alone.name, other=together.name)
    return Comparison(**numbers, losses=common)


def _losses(run: Path) -> dict[int, float]:
    """The loss at each logged step, from the trainer state in the newest checkpoint of a run."""
    newest = checkpoints.look(run / "checkpoints")[0][0].archive
    with tarfile.open(newest, "r:") as tar:
        state = tar.extractfile(f"{newest.stem}/trainer_state.json")
        assert state
        history = json.load(state)["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def facts(compared: Comparison | None) -> dict[str, Any]:
    """A comparison for facts.json; None keeps what an earlier run measured."""
    if compared is None:
        return dict.fromkeys(("speedup", "tokens_per_second", "loss_difference"))
    speeds = dict(zip(("alone", "together"), compared.tokens_per_second, strict=True))
    return {"speedup": round(compared.speedup, 3), "tokens_per_second": speeds, "loss_difference": compared.furthest}
