"""The processes of one training: which one this is, who goes first, what the main one tells the others.

A launcher (torchrun) starts one process for each card and numbers them in the environment. Number 0, the main process,
prepares, prints and keeps; the others compute along and end when the training does.
Not here: starting them (launching).
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from nbutils.errors import CourseError

PATIENCE = timedelta(hours=2)  # for a main process that prepares data; a dead one is noticed at once, by the launcher
Result = TypeVar("Result")


def launched() -> bool:
    """Whether a launcher started this process; the others of these names also stand in some platforms' containers."""
    return "LOCAL_RANK" in os.environ


def world_size() -> int:
    """How many processes train together; 1 where no launcher started this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1


def rank() -> int:
    """The number of this process; it is also the number of its card."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def is_main() -> bool:
    """Whether this process is the one that prepares, prints and keeps."""
    return rank() == 0


def join() -> None:
    """Meet the other processes, take the card of this one's number, and be quiet if it is not the main one."""
    if not launched():
        return
    if not is_main():
        _be_quiet()
    import torch

    _refuse_too_many(torch.cuda.device_count())
    if torch.cuda.is_available():
        torch.cuda.set_device(rank())
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=PATIENCE)


def _refuse_too_many(cards: int) -> None:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if here != world_size():
        raise CourseError(
            f"{world_size()} processes were started on several machines.", "the cards of one machine",
            "start it on one machine: its processes meet in folders that only that machine has",
        )  # fmt: skip
    if 0 < cards < here:
        raise CourseError(
            f"{here} processes were started for {cards} card{'s' if cards > 1 else ''}.", "one process for each card",
            f"write --nproc_per_node={cards}",
        )  # fmt: skip


def _be_quiet() -> None:
    """Print nothing: the main process says it already. What goes wrong is still told, on the error channel."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    warnings.simplefilter("ignore")
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "error"}
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def main_first() -> Iterator[None]:
    """The main process goes through this block while the others wait, and then find its work done."""
    if not is_main():
        _share(None)
    yield
    if is_main():
        _share(None)


def told_by_main(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that only the main process calls; the others get what it returned."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Result:
        return _share(function(*args, **named) if is_main() else None)

    return call


def _share(value: Any) -> Any:
    """What the main process gave; a process whose main one has failed ends without a word, as that one said why."""
    if not launched():
        return value
    import torch.distributed

    box = [value]
    try:
        torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    except RuntimeError:
        if is_main():
            raise
        raise SystemExit(1) from None
    return box[0]


def anyone(yes: bool) -> bool:
    """Whether any process says yes: all of them must stop at the same step, or the rest would wait for ever."""
    if not launched():
        return yes
    import torch

    said = torch.tensor(int(yes))
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
    return bool(said.item())


def leave_it_to_main() -> None:
    """The training is over: the main process goes on alone, the others end here."""
    if not launched():
        return
    import torch.distributed

    anyone(False)  # nobody leaves before the last has come
    torch.distributed.destroy_process_group()
    if not is_main():
        raise SystemExit(0)


def micro_batch_for(batch: int, micro_batch: int, processes: int) -> int:
    """The largest micro-batch up to the asked one with which all processes together take `batch` rows in a step."""
    require_shares(batch, processes)
    each = batch // processes
    return max(size for size in range(1, min(micro_batch, each) + 1) if each % size == 0)


def require_shares(batch: int, processes: int) -> None:
    """Stop before a training whose batch cannot be shared evenly."""
    if batch % processes:
        raise CourseError(
            f"a batch of {batch} rows cannot be shared by {processes} cards.", f"a batch that {processes} divides",
            "change train.batch in a profile of your own, or use another number of cards (processes)",
        )  # fmt: skip
