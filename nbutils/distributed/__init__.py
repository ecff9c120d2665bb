"""One training of several processes, on one machine or several: torchrun or accelerate starts them, they share a step.

- `processes`: which process this is, what they tell each other, and how the job ends when one of them is lost.
- `engines`: DDP, FSDP and DeepSpeed ZeRO, what each does to the weights, and checkpoints that any of them continues.
- `launching`: a lesson started as such a job from a notebook, and two runs compared.
"""

from nbutils.distributed.engines import (
    ENGINES, SHARDED, adapter_weights, convert_optimizer_file, device_map, engine, full_weights, load_weights, optimizer_for,
    reshard, use_engine,
)  # fmt: skip
from nbutils.distributed.launching import (
    Comparison, compare, facts, hint, launch, micro_batch_for, processes_for, require_shares,
)  # fmt: skip
from nbutils.distributed.processes import (
    anyone, before_end, broadcast, gather, is_main, join, leave_it_to_main, local_rank, main_first, peer_error, rank, require_same, send_folder,
    world_size,
)  # fmt: skip

__all__ = [
    "ENGINES", "SHARDED", "Comparison", "adapter_weights", "anyone", "before_end", "broadcast", "compare", "convert_optimizer_file", "device_map", "engine", "facts", "full_weights",
    "gather", "hint", "is_main", "join", "launch", "load_weights", "optimizer_for", "leave_it_to_main", "local_rank", "main_first", "micro_batch_for",
    "peer_error", "processes_for", "rank", "require_same", "require_shares", "reshard", "send_folder", "use_engine", "world_size",
]  # fmt: skip
