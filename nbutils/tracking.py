"""Where a training reports: TensorBoard always, W&B when it can be had; never a login prompt, never a lost training.

Not here: what is reported (the trainer decides that).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from nbutils import platforms, scaling
from nbutils.masking import mask_secrets
from nbutils.paths import make_folder


def begin(logs: Path, run: str) -> list[str]:
    """Where the trainer reports: TensorBoard always; W&B online with a key, else as an offline run; no prompt ever."""
    if not scaling.is_main():
        return []
    make_folder(logs, "logs")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / "tensorboard")
    os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    print(f"logs      TensorBoard; W&B {_begin_wandb(logs, run)}")
    return ["tensorboard", "wandb"]


def end() -> None:
    """Complete the files of an offline W&B run; one that is online completes itself in its own time."""
    import wandb

    if wandb.run is not None and wandb.run.offline:
        wandb.finish()


def _begin_wandb(logs: Path, run: str) -> str:
    """Start the W&B run the trainer will use; whatever keeps it from going online makes it an offline one."""
    import wandb

    plainly = sys.excepthook  # wandb.init puts its own there, which prints a traceback before a learner's mistake

    def started(mode: Literal["online", "offline"], **more: Any) -> None:
        wandb.init(**options, mode=mode, **more)
        sys.excepthook = plainly

    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "finetune-course"), "name": run, "dir": logs}
    wandb.finish()  # of an earlier run of this cell
    why_not = _wandb_offline_reason()
    if why_not is None:
        try:
            started("online", settings=wandb.Settings(init_timeout=30))
            return "online"
        except Exception as problem:  # a refused key, a dead network: neither may cost the training
            why_not = f"{type(problem).__name__}: {mask_secrets(str(problem))[:120]}"
    os.environ["WANDB_MODE"] = "offline"
    started("offline")
    return f"offline: {why_not}"


def _wandb_offline_reason() -> str | None:
    """Why W&B need not be asked at all; None if it should be."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return "WANDB_MODE says so"
    key = platforms.secret("WANDB_API_KEY")
    if not key:
        return "no WANDB_API_KEY"
    os.environ["WANDB_API_KEY"] = key
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return None if platforms.answers(host, seconds=5) else mask_secrets(f"{host} does not answer")
