"""A lesson started as one training of several processes from a notebook, and two such runs compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from nbutils import record
from nbutils.display import LIVE_LINE, pad
from nbutils.distributed.engines import engine
from nbutils.errors import CourseError
from nbutils.files import NOTEBOOKS, read_json
from nbutils.hardware import Choice, driver_gpus
from nbutils.language import joined, tr
from nbutils.masking import mask_secrets
from nbutils.processes import first_signals

TOLERANCE = 0.01  # of the loss: sums in another order differ by a rounding each, 2^-8 of a value in bfloat16
PROGRESS = rf"{LIVE_LINE.pattern}|\[FAIL\]|continuing |starting at|checkpoint \d+ |safe: |Lesson \d"
PROGRESS += r"|从第 \d+ 步|已安全保存|没有要训练的了|第 \d+ 课"  # the same in Chinese
TORCHRUN_REPORT = r".*elastic/multiprocessing/api\.py:\d+\] failed"  # what follows is about torchrun itself


def require_shares(batch: int, processes: int) -> None:
    """Refuse a batch that the processes cannot share evenly."""
    if batch % processes:
        raise CourseError("distributed.uneven_batch", batch=batch, processes=processes)


def micro_batch_for(batch: int, micro_batch: int, processes: int) -> int:
    """The largest micro-batch up to `micro_batch` with which all processes together take `batch` rows in a step."""
    require_shares(batch, processes)
    share = batch // processes
    return max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)


def processes_for(gpus: int, processes: int = 0) -> Choice:
    """How many processes train together: `processes`, or one for each GPU, or two on the CPU."""
    if gpus and processes > gpus:
        raise CourseError("distributed.too_many_processes", processes=processes, gpus=gpus)
    if processes:
        return Choice(processes, tr("parameter {name}", name="PROCESSES"))
    if gpus:
        return Choice(gpus, tr("one for each GPU, of {gpus}", gpus=gpus))
    return Choice(2, tr("no GPU: each takes a core instead"))


def hint(seen: int) -> str:
    """What a lesson that trains with one process says on a machine with several GPUs; empty elsewhere."""
    if not seen or engine() or (count := len(driver_gpus())) <= seen:
        return ""
    command = f"torchrun --nproc_per_node={count} {NOTEBOOKS / '03_qlora.py'}"
    words = {"count": count, "command": command}
    return tr("GPUs      this lesson uses one of {count}; lesson 06 trains on all, as does {command}", **words)


def launch(
    script: Path, values: dict[str, Any], keep: Path, processes: int = 1, threads: int = 0, calm: bool = False
) -> None:
    """Run a lesson as a script and show its output, without what torchrun adds; with `calm` only its progress."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    arguments = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(script), *arguments]
    env = os.environ | {"NBUTILS_HOME": str(keep), "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
    env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", "TQDM_MININTERVAL": "15"}  # time to save; a bar fills lines here
    threads = threads or (max((os.cpu_count() or 1) // processes, 1) if processes > 1 else 0)
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = (line.rstrip() for line in child.stdout or () if line.strip())
    tail: deque[str] = deque(maxlen=15)  # for the error, if it fails
    signals: list[int] = []

    def forward(number: int) -> None:
        signals.append(number)
        child.terminate()  # it saves, and ends

    try:
        with first_signals(forward):
            for line in takewhile(lambda line: not re.match(TORCHRUN_REPORT, line), lines):
                tail.append(line)
                if not calm or re.match(PROGRESS, line):
                    print(f"  | {mask_secrets(line)}", flush=True)
    except BaseException:  # interrupted a second time: the child must not train on alone
        child.terminate()
        raise
    finally:
        child.communicate()  # to the end of its output, or it would block
    if signals:
        raise CourseError("distributed.terminated", lesson=script.stem)
    if status := child.returncode:
        raise CourseError("distributed.lesson_failed", lesson=script.stem, status=status, output="\n".join(tail))


@dataclass(frozen=True)
class Comparison:
    """The same training with one process and with several; the single process comes first in every pair."""

    numbers: dict[str, tuple[float, float]]
    speedup: float
    furthest: float  # the largest difference between two losses of the same step, relative to the loss
    same_work: bool  # equal steps over equally many rows, with equal losses

    def __str__(self) -> str:
        names = {"processes": tr("processes"), "steps": tr("steps"), "batch": tr("batch")}
        names["tokens_per_second"] = tr("tokens per second")
        lines = [
            f"{pad(names.get(name, name), 18)} {one:>10,.6g} {several:>10,.6g}\n"
            for name, (one, several) in self.numbers.items()
        ]
        speed = tr("{times:.2f} times the tokens per second", times=self.speedup)
        furthest = tr("losses differ by at most {most:.1e} of the loss", most=self.furthest)
        return "".join(lines) + joined([speed, furthest], ";")


def compare(alone: Path, together: Path) -> Comparison:
    """What lesson 03 left in two run folders."""
    one, several = (record.read(run / "facts.json")["lessons"]["03_qlora"] for run in (alone, together))
    numbers = {name: (one[name], several[name]) for name in ("processes", "steps", "batch", "tokens_per_second")}
    logs = (read_json(run / "logs/history.json") for run in (alone, together))
    first, second = ({entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in logs)
    if not (losses := {step: (first[step], second[step]) for step in first if step in second}):
        raise CourseError("distributed.no_common_step", one=alone.name, other=together.name)
    furthest = max(abs(a - b) / max(abs(a), 1e-6) for a, b in losses.values())
    same = first.keys() == second.keys() and all(len(set(numbers[name])) == 1 for name in ("steps", "batch"))
    speeds = numbers["tokens_per_second"]
    numbers |= {tr("loss at step {step}", step=step): pair for step, pair in losses.items()}
    return Comparison(numbers, speeds[1] / speeds[0], furthest, same and furthest <= TOLERANCE)


def facts(compared: Comparison | None) -> dict[str, Any]:
    """A comparison for facts.json; None keeps what an earlier run measured."""
    if compared is None:
        return dict.fromkeys(("speedup", "tokens_per_second", "loss_difference"))
    speeds = dict(zip(("alone", "together"), compared.numbers["tokens_per_second"], strict=True))
    return {"speedup": round(compared.speedup, 3), "tokens_per_second": speeds, "loss_difference": compared.furthest}
