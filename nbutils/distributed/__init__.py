"""One training of several processes, on one machine or several: torchrun or accelerate starts them, they share a step.

- `processes`: which process this is, what they tell each other, and how the job ends when one of them is lost.
- `strategies`: DDP, FSDP and DeepSpeed ZeRO: which one this is, and what it asks of loading and optimizing.
- `launching`: a lesson started as such a job from a notebook.
"""

from importlib import import_module
from typing import Any

from nbutils.distributed.processes import main_first as main_first  # a decorator, needed when a module is read

_NAMES = {
    "launching": "config_file hint launch micro_batch_for processes_for require_shares",
    "processes": "anyone barrier before_end broadcast gather is_main join leave_it_to_main local_rank peer_error rank"
    " require_same send_folder world_size",
    "strategies": "SHARDED STRATEGIES WHOLE device_map require_known_strategy require_method strategy strategy_name",
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
