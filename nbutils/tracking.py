"""Experiment tracking: TensorBoard always, W&B online with a key and else offline; never a prompt, never a lost run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nbutils import platforms, scaling
from nbutils.masking import mask_secrets
from nbutils.paths import make_folder


def begin(logs: Path, run: str) -> list[str]:
    """Start tracking; the values for `report_to`."""
    if not scaling.is_main():
        return []
    make_folder(logs, "logs")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / "tensorboard")
    os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    print(f"logs      TensorBoard; W&B {_start_wandb(logs, run)}")
    return ["tensorboard", "wandb"]


def end() -> None:
    """Finish an offline W&B run; an online one finishes by itself."""
    import wandb

    if wandb.run is not None and wandb.run.offline:
        wandb.finish()


def _start_wandb(logs: Path, run: str) -> str:
    """Start the W&B run that the trainer will use; whatever keeps it from going online makes it an offline one."""
    import wandb

    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "finetune-course"), "name": run, "dir": logs}
    excepthook = sys.excepthook  # wandb.init replaces it, and prints a traceback before a CourseError
    wandb.finish()  # of an earlier run of this cell
    reason = _offline_reason()
    try:
        if reason is None:
            wandb.init(**options, mode="online", settings=wandb.Settings(init_timeout=30))
            return "online"
    except Exception as problem:  # a refused key, a dead network: neither may cost the training
        reason = f"{type(problem).__name__}: {mask_secrets(str(problem))[:120]}"
    finally:
        sys.excepthook = excepthook
    os.environ["WANDB_MODE"] = "offline"
    wandb.init(**options, mode="offline")
    sys.excepthook = excepthook
    return f"offline: {reason}"


def _offline_reason() -> str | None:
    if os.environ.get("WANDB_MODE", "online") != "online":
        return "WANDB_MODE says so"
    key = platforms.secret("WANDB_API_KEY")
    if not key:
        return "no WANDB_API_KEY"
    os.environ["WANDB_API_KEY"] = key
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return None if platforms.answers(host, seconds=5) else mask_secrets(f"{host} does not answer")
