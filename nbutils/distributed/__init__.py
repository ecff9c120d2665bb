"""One training of several processes, on one machine or several: torchrun or accelerate starts them, they share a step.

- `processes`: which process this is, and what they tell each other.
- `strategies`: DDP, FSDP and DeepSpeed ZeRO: which one this is, and what it asks of loading and optimizing.
- `launching`: a lesson started as such a job from a notebook.
"""

from nbutils.distributed.launching import (
    config_file,
    divisors,
    launch,
    micro_batch_for,
    processes_for,
    require_shares,
)
from nbutils.distributed.processes import (
    anyone,
    barrier,
    broadcast,
    end_other_processes,
    gather,
    is_main,
    join,
    local_rank,
    main_first,
    peer_error,
    rank,
    require_same,
    send_folder,
    world_size,
)
from nbutils.distributed.strategies import (
    SHARDED,
    STRATEGIES,
    WHOLE,
    device_map,
    require_gathered_by_layer,
    require_method,
    strategy,
    strategy_name,
)
