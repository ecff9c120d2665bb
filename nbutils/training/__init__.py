"""What a training run needs around the trainer; lesson 03 builds the trainer and chooses its settings in full view.

The modules import torch and transformers, so they are loaded when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "callbacks": "KeepCheckpoints TimeBudget Validation require_room wait_for_sync",
    "fused": "patch_lora_kernels",
    "oom": "oom_rungs remove_progress_bars step_of train",
    "progress": "LiveNumbers bookkeeping loss_history measured validation_history write_history",
    "resume": "MAY_CHANGE load_finished model_fingerprint resume_point start_sync steps_left",
    "weights": "adapter_checksum changed_weights require_unquantised weight_checksums weight_kinds",
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
