"""The processes of one training: which one this is, and what they tell each other."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbutils import files
from nbutils.config import flat
from nbutils.errors import CourseError
from nbutils.language import say

PATIENCE = timedelta(hours=2)  # while the main process downloads a model or prepares data
LOST = timedelta(minutes=30)  # in a training, who is silent for so long is lost
SILENT = {  # bars and warnings of the libraries
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
PEER_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Timed out waiting",
)
_patient_group: Any = None  # of all processes, for waits of up to PATIENCE


def _launched() -> bool:
    return "LOCAL_RANK" in os.environ


def _number(name: str, alone: int) -> int:
    """A number that torchrun gives; platforms set WORLD_SIZE and RANK too, but never LOCAL_RANK."""
    return int(os.environ.get(name, alone)) if _launched() else alone


def world_size() -> int:
    """How many processes train together, on all machines."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """The number of this process among all."""
    return _number("RANK", local_rank())


def local_rank() -> int:
    """The number of this process on its machine, which is also the index of its GPU."""
    return _number("LOCAL_RANK", 0)


def is_main() -> bool:
    """Whether this process prints, keeps checkpoints and writes facts."""
    return rank() == 0


def _several_machines() -> bool:
    return _number("LOCAL_WORLD_SIZE", world_size()) < world_size()


def join() -> None:
    """Join the process group and select the GPU of this process; every process but the main one stops printing."""
    if not _launched():
        return
    if not is_main():  # the main process prints it already; errors still go to stderr
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        warnings.simplefilter("ignore")
        os.environ |= SILENT
    import torch

    require_gpus(torch.cuda.device_count(), _number("LOCAL_WORLD_SIZE", world_size()))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    _keep_to_this_machine()
    if not torch.distributed.is_initialized():  # Ray has done it
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=LOST)
    global _patient_group
    _patient_group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def require_gpus(gpus: int, processes: int) -> None:
    """Refuse more processes on a machine than it has GPUs; without any, each takes a core."""
    if 0 < gpus < processes:
        raise CourseError(
            "{processes} processes should train together, and this machine has {gpus} GPU(s).",
            todo="Set PROCESSES (or --nproc_per_node of torchrun) to {gpus} or less.",
            processes=processes,
            gpus=gpus,
        )


def _keep_to_this_machine() -> None:
    """Where all processes are on one machine, let them listen there only; warn of a launcher that does not."""
    if _several_machines() or os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost"):
        return
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":  # so torchrun calls a job whose machines are fixed
        say(
            "[WARN] torchrun opened a c10d store: whoever reaches it over the network can run programs as you. "
            "With --master-port=29500 (any free port), and without --standalone, it opens none."
        )


def peer_error(problem: BaseException) -> CourseError | SystemExit | None:
    """What to raise instead of an error that only says that another process has ended; None for any other error."""
    theirs = isinstance(problem, RuntimeError) and any(text in str(problem) for text in PEER_ERRORS)
    if not _launched() or not theirs:
        return None
    if not is_main():
        return SystemExit(1)
    return CourseError(
        "Another process of this training has ended or does not answer; see above, or on its machine.",
        todo=(
            "Mend what it says, then start the same command again, also with fewer processes: it "
            "continues from the newest checkpoint."
        ),
    )


@contextmanager
def _quiet_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise (peer_error(problem) or problem) from None


@contextmanager
def main_first() -> Iterator[None]:
    """The main process runs this block, then the first process of each other machine, then all others.

    Who comes later finds the work done, on a disk that the machines share as on one of its own.
    """
    turn = 2
    if is_main():
        turn = 0
    elif local_rank() == 0:
        turn = 1
    for _ in range(turn):
        barrier()
    yield
    for _ in range(turn, 2):
        barrier()


def broadcast(value: Any) -> Any:
    """What the main process gave; if that one has failed, this one exits without a second error."""
    if not _launched():
        return value
    import torch.distributed

    values = [value]
    with _quiet_peers():
        torch.distributed.broadcast_object_list(values, src=0, group=_patient_group)
    return values[0]


def gather(value: Any, group: Any = None) -> list[Any]:
    """What each process gave, in the order of their ranks."""
    if not _launched():
        return [value]
    import torch.distributed

    values = [None] * world_size()
    with _quiet_peers():
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def require_same(fingerprint: Mapping[str, Any]) -> None:
    """Refuse to train together on other rows, another model or other settings, as on machines prepared apart."""
    others = [flat(other) for other in gather(fingerprint) if other != fingerprint]
    if not others:
        return
    different = ", ".join(name for name, value in flat(fingerprint).items() if value != others[0].get(name))
    raise CourseError(
        "The processes of this training do not agree on: {different}.",
        todo=(
            "Give every machine the same parameters, SET too (only the main one remembers it), and the "
            "same files. Rows that were prepared apart: delete the run's data folder there. Different "
            "GPUs: name sft.per_device_train_batch_size and sft.gradient_checkpointing in SET."
        ),
        different=different,
    )


def anyone(yes: bool) -> bool:
    """Whether any process says yes: all must stop at the same step, or the rest would wait for ever."""
    return any(gather(yes))


def barrier() -> None:
    """Wait until every process has come here, also for a main process that downloads or prepares data before it."""
    gather(None, _patient_group)


def send_folder(folder: Path) -> None:
    """Copy a folder of the main process to every machine on which it is not there, or not the same."""
    if not _several_machines():
        return
    sizes = files.sizes(folder)
    wanted = broadcast(sizes)
    receives = local_rank() == 0 and sizes != wanted
    if receives:
        shutil.rmtree(folder.parent, ignore_errors=True)  # with what an earlier run left there
    for name in wanted:
        _send_file(folder / name, receives)
    barrier()


def _send_file(file: Path, receives: bool) -> None:
    """The main process reads a file, and those that receive write it; the others only listen."""
    if is_main():
        with open(file, "rb") as source:
            while broadcast(source.read(files.CHUNK)):
                pass
        return
    if receives:
        files.make_folder(file.parent)
    with open(file if receives else os.devnull, "wb") as copy:
        while part := broadcast(None):
            copy.write(part)


def end_other_processes() -> None:
    """End every process but the main one, once all have arrived here."""
    if not _launched():
        return
    import torch.distributed

    barrier()
    torch.distributed.destroy_process_group()
    if not is_main():
        raise SystemExit(0)
