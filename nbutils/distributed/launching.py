"""A lesson started as one training of several processes from a notebook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import deque
from pathlib import Path

from nbutils.display import LIVE_LINE
from nbutils.distributed.processes import require_gpus
from nbutils.distributed.strategies import STRATEGIES
from nbutils.errors import CourseError, StoppedByHand, Unfinished, require_choice
from nbutils.files import CONFIGS
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.masking import mask_secrets
from nbutils.processes import first_signals

PROGRESS = (
    rf"{LIVE_LINE.pattern}|\[FAIL\]|continuing |starting at|checkpoint \d+ |safe: |Lesson \d"
    r"|从第 \d+ 步|已安全保存|没有要训练的了|第 \d+ 课"  # the same in Chinese
)
TORCHRUN_REPORT = r".*elastic/multiprocessing/api\.py:\d+\] failed"  # what follows is about torchrun itself


def require_shares(batch: int, processes: int) -> None:
    """Refuse a batch that the processes cannot share evenly."""
    if batch % processes:
        raise CourseError(
            "A batch of {batch} rows cannot be shared evenly by {processes} processes.",
            todo=(
                "Set course.conversations_per_step, with SET or in a profile of your own, or use another "
                "number of processes."
            ),
            batch=batch,
            processes=processes,
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, in rising order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def micro_batch_for(batch: int, micro_batch: int, processes: int) -> int:
    """The largest micro-batch up to `micro_batch` with which all processes together take `batch` rows in a step."""
    require_shares(batch, processes)
    return max(size for size in divisors(batch // processes) if size <= micro_batch)


def processes_for(gpus: int, processes: int = 0) -> Choice:
    """How many processes train together: `processes`, or one for each GPU, or two on the CPU.

    Example:
        print(distributed.processes_for(gpus=2).value)
    """
    require_gpus(gpus, processes)
    if processes:
        return Choice(processes, tr("parameter {name}", name="PROCESSES"))
    if gpus:
        return Choice(gpus, tr("one for each GPU, of {gpus}", gpus=gpus))
    return Choice(2, tr("no GPU: each takes a core instead"))


def config_file(name: str) -> Path:
    """The file that tells accelerate how the processes share the model.

    Example:
        command = ["accelerate", "launch", "--config_file", str(distributed.config_file("fsdp_qlora")), "03_qlora.py"]
    """
    require_choice("ENGINE", name, STRATEGIES)
    return CONFIGS / "accelerate" / f"{name}.yaml"


def launch(command: list[str], keep: Path, processes: int = 1, threads: int = 0, calm: bool = False) -> None:
    """Run the command line of a lesson, show its output without what the launcher adds; with `calm` only progress.

    Example:
        distributed.launch([sys.executable, "notebooks/03_qlora.py", "--PROFILE", "tiny"], keep=Path("runs"))
    """
    lesson = next(Path(word).stem for word in command if word.endswith(".py"))
    env = os.environ | {
        "NBUTILS_HOME": str(keep),
        "MPLBACKEND": "agg",
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # time to save
        "TQDM_MININTERVAL": "15",  # a bar fills lines here
    }
    if processes > 1 and not threads:
        threads = max((os.cpu_count() or 1) // processes, 1)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tail: deque[str] = deque(maxlen=15)  # for the error, if it fails
    signals: list[int] = []

    def forward(number: int) -> None:
        signals.append(number)
        child.terminate()  # it saves, and ends

    try:
        with first_signals(forward):
            for line in child.stdout or ():
                if re.match(TORCHRUN_REPORT, line):
                    break
                line = line.rstrip()
                if not line:
                    continue
                tail.append(line)
                if not calm or re.match(PROGRESS, line):
                    print(f"  | {mask_secrets(line)}", flush=True)
    except BaseException:  # interrupted a second time: the child must not train on alone
        child.terminate()
        raise
    finally:
        child.communicate()  # to the end of its output, or it would block
    if signals:
        kind = StoppedByHand if signal.SIGINT in signals else Unfinished
        raise kind(
            tr("Lesson {lesson} was told to stop, and has saved its training.", lesson=lesson),
            todo=tr("Run this again, unchanged: the training continues from its last checkpoint."),
        )
    if status := child.returncode:
        raise CourseError(
            "Lesson {lesson} failed (exit status {status}):\n{output}",
            todo="Open {lesson}.ipynb and run it on its own; the first error there is the cause.",
            lesson=lesson,
            status=status,
            output="\n".join(tail),
        )
