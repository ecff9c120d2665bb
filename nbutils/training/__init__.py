"""What a training needs around the trainer of lesson 03; loaded when a name is first used, as it imports torch."""

from importlib import import_module
from typing import Any

_MODULES = {
    "CourseCallback": "run",
    "attention": "model",
    "bookkeeping": "run",
    "model_fingerprint": "resume",
    "patch_lora_kernels": "model",
    "require_own_weights": "model",
    "require_unquantized": "model",
    "save_adapter": "run",
    "train": "run",
    "use_token_mean": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
