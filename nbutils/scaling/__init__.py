"""One training on several cards of one machine: who is the main process, what they share, how they start.

processes: who this process is, who waits, what the main one tells the others; launching: how many to start, and how;
comparing: one process beside several. In a notebook, and in a script that no launcher started, there is one process,
and nothing of this does anything.
Not here: averaging gradients (torch's DistributedDataParallel does, through the trainer), several machines.
"""

from __future__ import annotations

from nbutils.scaling.comparing import Comparison, compare, facts, losses
from nbutils.scaling.launching import cards_in_machine, command_line, hint, launch, processes_for
from nbutils.scaling.processes import (
    anyone,
    is_main,
    join,
    leave_it_to_main,
    main_first,
    micro_batch_for,
    rank,
    require_shares,
    told_by_main,
    world_size,
)

__all__ = [
    "Comparison", "anyone", "cards_in_machine", "command_line", "compare", "facts", "hint", "is_main", "join", "launch",
    "leave_it_to_main", "losses", "main_first", "micro_batch_for", "processes_for", "rank", "require_shares",
    "told_by_main", "world_size",
]  # fmt: skip
