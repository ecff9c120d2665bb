"""The processes of one training: which one this is, what they tell each other, and how all end when one is lost."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.files import CHUNK

TIMEOUT = timedelta(hours=2)  # for a main process that prepares data; the heartbeat notices a lost one sooner
BEAT, ANSWER, LOST = 5.0, 10.0, 40.0  # seconds: between two beats, for the store to answer, until a process is lost
PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "NCCL error", "Broken pipe")
_state: dict[str, Any] = {"before_end": lambda: None}  # group: of the CPU; beating: until it is set


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
        os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "error"}
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import torch

    local, gpus = _number("LOCAL_WORLD_SIZE", world_size()), torch.cuda.device_count()
    if 0 < gpus < local:
        raise CourseError("distributed.too_many_processes", processes=local, gpus=gpus)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    if not torch.distributed.is_initialized():  # Ray has done it
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)
    _state["group"] = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    _state["beating"] = threading.Event()
    if world_size() > 1 and "MASTER_ADDR" in os.environ:
        beating = (broadcast(uuid.uuid4().hex), _state["beating"])  # a restarted job finds the keys of the former one
        threading.Thread(target=_beat, args=beating, daemon=True).start()


def _beat(job: str, over: threading.Event) -> None:
    """Say that this process lives, and watch the main one; the main one watches all. End where one is silent."""
    from torch.distributed import PrefixStore, TCPStore

    address, told = os.environ["MASTER_ADDR"], f"{rank()} ({socket.gethostname()})"
    watched = range(1, world_size()) if is_main() else range(1)
    heard = {other: ("", time.monotonic()) for other in watched}
    store: Any = None
    lost, count = "", 0
    while not lost and not over.wait(BEAT):
        count += 1
        with suppress(Exception):  # a network that is gone says many things; nothing is heard then
            if store is None:
                port, patience = int(os.environ["MASTER_PORT"]), timedelta(seconds=ANSWER)
                store = PrefixStore(job, TCPStore(address, port, is_master=False, timeout=patience))
            store.set(str(rank()), f"{told} {count}")
            for other in watched:
                if store.check([str(other)]) and (beat := store.get(str(other)).decode()) != heard[other][0]:
                    heard[other] = beat, time.monotonic()
            lost = store.get("lost").decode() if store.check(["lost"]) else ""
        silent = [other for other, (_, when) in heard.items() if time.monotonic() - when > LOST]
        if silent and not lost:
            lost = heard[silent[0]][0].rpartition(" ")[0] or str(silent[0])
            with suppress(Exception):
                store.set("lost", lost)
    if lost and not over.is_set():
        _state["before_end"]()
        if local_rank() == 0 and sys.__stderr__:
            sys.__stderr__.write(f"{CourseError('distributed.lost', process=lost, seconds=LOST)}\n")
            sys.__stderr__.flush()
        os._exit(1)  # the main thread may wait for the lost one for hours


def before_end(do: Callable[[], object]) -> None:
    """What this process does before it ends because another one is lost."""
    _state["before_end"] = do


def peer_error(problem: BaseException) -> CourseError | SystemExit | None:
    """What to raise instead of an error that only says that another process has ended; None for any other error."""
    if not _launched() or not any(text in str(problem) for text in PEER_ERRORS):
        return None
    return CourseError("distributed.peer_ended") if is_main() else SystemExit(1)


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
    turns = 2 if _several_machines() else 1
    mine = 0 if is_main() else min(1 + (local_rank() > 0), turns)
    for _ in range(mine):
        anyone(False)
    yield
    for _ in range(mine, turns):
        anyone(False)


def broadcast(value: Any) -> Any:
    """What the main process gave; if that one has failed, this one exits without a second error."""
    if not _launched():
        return value
    import torch.distributed

    values = [value]
    with _quiet_peers():
        torch.distributed.broadcast_object_list(values, src=0, group=_state["group"], device=torch.device("cpu"))
    return values[0]


def gather(value: Any) -> list[Any]:
    """What each process gave, in the order of their ranks."""
    if not _launched():
        return [value]
    import torch.distributed

    values = [None] * world_size()
    with _quiet_peers():
        torch.distributed.all_gather_object(values, value, group=_state["group"])
    return values


def require_same(fingerprint: Mapping[str, Any]) -> None:
    """Refuse to train together on other rows, another model or other settings, as on machines prepared apart."""
    if others := [one for one in gather(fingerprint) if one != fingerprint]:
        different = ", ".join(name for name in fingerprint if fingerprint[name] != others[0].get(name))
        raise CourseError("distributed.different", different=different)


def anyone(yes: bool) -> bool:
    """Whether any process says yes: all must stop at the same step, or the rest would wait for ever."""
    return any(gather(yes))


def send_folder(root: Path, name: str) -> Path:
    """The folder `name` of the main process's `root`, copied into the root of every machine that does not share it."""
    folder = root / name
    if not _several_machines():
        return folder
    mark = root / f"{name}.shared"
    token = broadcast(uuid.uuid4().hex)
    if is_main():
        mark.write_text(token)
    anyone(False)
    receives = local_rank() == 0 and not (mark.exists() and mark.read_text() == token)
    if receives:
        shutil.rmtree(root, ignore_errors=True)  # of an earlier run
    for file in broadcast([str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file()]):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        with open(root / file, "rb") if is_main() else open(root / file if receives else os.devnull, "wb") as stream:
            while part := broadcast(stream.read(CHUNK) if is_main() else None):
                if not is_main():
                    stream.write(part)
    anyone(False)
    mark.unlink(missing_ok=True)
    return folder


def leave_it_to_main() -> None:
    """End every process but the main one, once all have arrived here."""
    if not _launched():
        return
    import torch.distributed

    anyone(False)
    _state["beating"].set()
    torch.distributed.destroy_process_group()
    if not is_main():
        raise SystemExit(0)
