"""What a training needs around the trainer of lesson 03; loaded when a name is first used, as it imports torch."""

from importlib import import_module
from typing import Any

_NAMES = {
    "model": "attention patch_lora_kernels require_unquantized",
    "resume": "model_fingerprint",
    "run": "CourseCallback bookkeeping save_adapter train",
    "validation": "use_token_mean",
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
