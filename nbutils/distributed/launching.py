"""A lesson started as one training of several processes from a notebook."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import deque
from itertools import takewhile
from pathlib import Path
from typing import Any

from nbutils.display import LIVE_LINE
from nbutils.distributed.engines import WHOLE, require_known
from nbutils.distributed.engines import engine as this_engine
from nbutils.errors import CourseError
from nbutils.files import CONFIGS, NOTEBOOKS
from nbutils.hardware import Choice, driver_gpus
from nbutils.language import tr
from nbutils.masking import mask_secrets
from nbutils.processes import first_signals

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
    if not seen or this_engine() or (count := len(driver_gpus())) <= seen:
        return ""
    command = f"torchrun --nproc_per_node={count} {NOTEBOOKS / '03_qlora.py'}"
    words = {"count": count, "command": command}
    return tr("GPUs      this lesson uses one of {count}; lesson 06 trains on all, as does {command}", **words)


def command_for(processes: int, engine: str = "") -> list[str]:
    """The words before a script's name that start it with so many processes of an engine; one without: plain Python."""
    if engine:
        require_known(engine)
    if engine.startswith("zero") and not importlib.util.find_spec("deepspeed"):
        raise CourseError("distributed.no_deepspeed", engine=engine)
    if engine in WHOLE:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [sys.executable, *(torchrun if processes > 1 else [])]
    file = CONFIGS / "accelerate" / f"{engine}.yaml"
    words = ["--config_file", str(file), "--num_processes", str(processes), "--main_process_port", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *words]


def launch(
    script: Path, values: dict[str, Any], keep: Path, processes: int = 1, threads: int = 0, calm: bool = False,
    engine: str = "",
) -> None:  # fmt: skip
    """Run a lesson as a script and show its output, without what the launcher adds; with `calm` only its progress."""
    arguments = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [*command_for(processes, engine), str(script), *arguments]
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
    if signal.SIGINT in signals:
        raise CourseError("distributed.interrupted", lesson=script.stem)
    if signals:
        raise CourseError("distributed.terminated", lesson=script.stem)
    if status := child.returncode:
        raise CourseError("distributed.lesson_failed", lesson=script.stem, status=status, output="\n".join(tail))
