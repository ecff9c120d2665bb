"""Experiment tracking: TensorBoard, W&B and SwanLab, or what `report_to` names; curves, live numbers.

Never a prompt, never a lost run. `LiveNumbers` also writes what it shows to `progress.json`, for `nbutils watch`.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import psutil
from pydantic import BaseModel, FiniteFloat, TypeAdapter, ValidationError

from nbutils import display, distributed, hardware, install, platforms
from nbutils.config import SFT
from nbutils.display import Point, finite
from nbutils.files import fs_root, make_folder, read_json, read_object, write_json
from nbutils.language import joined, say, tr
from nbutils.masking import describe, mask_secrets
from nbutils.plan import gpus
from nbutils.record import Facts, reading

SHORTEST, LONGEST = 5.0, 300.0  # seconds between two lines, which become rarer
SILENT = 600.0  # seconds without an update after which a training on another machine is taken for dead
PROGRESS = "progress.json"  # in the logs, written every SHORTEST seconds
PANEL = "root/tf-logs"  # the folder that AutoDL's TensorBoard shows
PROJECT = "finetune-course"
USUAL = ("tensorboard", "wandb", "swanlab")  # unless a profile names others
SWANLAB = "swanlab>=0.10"  # earlier ones have other names for the settings
Curve = list[Point]
POINTS = TypeAdapter(list[tuple[float, float]])
Log = Sequence[Facts]  # of a trainer
State = Literal["training", "finished", "stopped", "failed", "died"]  # none writes the last: `trainings` finds it


def report_to(sft: SFT, scratch: Path) -> list[str]:
    """Prepare the trackers that the profile names (`sft.report_to`), or the usual ones; the value for `report_to`.

    transformers starts them when the training begins. Only W&B and SwanLab are started here: with a refused key or a
    dead network theirs would end the training, and both replace the excepthook, with a traceback before a CourseError.

    Example:
        SFTConfig(report_to=report_to(profile.sft, lesson.scratch))
    """
    names = getattr(sft, "report_to", USUAL)
    if isinstance(names, str):
        names = [names]
    if not distributed.is_main() or names in ([], ["none"]):
        return []
    logs = make_folder(scratch / "logs")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / "tensorboard")
    trackers = {}  # each with how it is shown
    excepthook = sys.excepthook
    started_here = {"wandb": _begin_wandb, "swanlab": _begin_swanlab}
    for name in names:
        begin = started_here.get(name)
        how = begin(logs, scratch.name) if begin else name
        if how:
            trackers[name] = how
    sys.excepthook = excepthook
    print(display.pad(tr("logs"), 10) + joined(trackers.values(), ";"))
    if "tensorboard" in trackers:
        print(" " * 10 + how_to_open(logs / "tensorboard", scratch.name, platforms.detect().name))
    return list(trackers)


def _begin_wandb(logs: Path, run: str) -> str:
    """Start a W&B run; how, or empty where W&B's own program does not start."""
    import wandb
    from wandb.sdk import wandb_setup

    os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    try:
        wandb_setup.singleton().ensure_service()  # where this fails, wandb.setup() would wait for itself for ever
    except Exception as problem:  # no permission to execute it, as on a mounted Drive
        say("[WARN] W&B is not used: its program does not start ({problem}).", problem=describe(problem))
        return ""
    with redirect_stderr(io.StringIO()):  # it is silent only once it has looked for the name of this notebook
        wandb.setup()
    wandb.finish()  # of an earlier run of this cell
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    settings = wandb.Settings(init_timeout=30)
    return _start_tracker("wandb", partial(wandb.init, project=project, name=run, dir=logs, settings=settings))


def _begin_swanlab(logs: Path, run: str) -> str:
    """Start a SwanLab run if there is a SWANLAB_API_KEY, or SWANLAB_MODE is offline; how, or empty."""
    mode = os.environ.get("SWANLAB_MODE", "online")
    if mode == "disabled" or (mode != "offline" and not platforms.secret("SWANLAB_API_KEY")):
        return ""
    os.environ |= {"SWANLAB_INTERACTIVE": "false", "SWANLAB_TERMINAL_PROXY_TYPE": "none"}
    if install.unsatisfied([SWANLAB]):
        say("[WARN] SwanLab is not used: it is not installed (pip install '{package}').", package=SWANLAB)
        return ""
    import swanlab

    if swanlab.has_run():  # of an earlier run of this cell
        swanlab.finish()
    project = os.environ.get("SWANLAB_PROJ_NAME", PROJECT)
    return _start_tracker("swanlab", partial(swanlab.init, project=project, name=run, log_dir=str(logs / "swanlab")))


def _start_tracker(name: str, init: Callable[..., object]) -> str:
    """Start a run of a tracker, online with its key and offline where that cannot be; how."""
    variable = name.upper()
    key = platforms.secret(f"{variable}_API_KEY")
    reason = tr("there is no key, or its mode is offline")
    if key and os.environ.get(f"{variable}_MODE", "online") == "online":
        os.environ[f"{variable}_API_KEY"] = key
        try:
            init(mode="online")
            return tr("{name} online", name=name)
        except Exception as problem:  # a refused key, a dead network: neither may cost the training
            reason = mask_secrets(repr(problem))[:130]
    init(mode="offline")
    return tr("{name} offline: {reason}", name=name, reason=reason)


def how_to_open(logs: Path, run: str, platform: str) -> str:
    """How TensorBoard is opened on a platform while it trains; AutoDL's panel gets a link to the logs."""
    if platform == "autodl":
        link = fs_root() / PANEL / run
        with suppress(OSError):  # no panel here, or a folder of that name is somebody else's
            if link.is_symlink():
                link.unlink()
            link.symlink_to(logs)
            return tr("TensorBoard: AutoPanel on AutoDL's page, run {run}", run=run)
    if platform == "colab":
        return tr(
            "TensorBoard: run this in a cell before the training\n          %load_ext tensorboard\n          "
            "%tensorboard --logdir {logs}",
            logs=logs,
        )
    return tr(
        "TensorBoard: tensorboard --logdir {logs} --port 6006\n          then http://127.0.0.1:6006; on a remote "
        "machine first ssh -L 6006:127.0.0.1:6006 USER@HOST",
        logs=logs,
    )


def end_trackers(logs: Path) -> None:
    """Finish offline runs and say how they are uploaded from `logs`, where they are kept; online ones finish alone."""
    import wandb

    if wandb.run is not None and wandb.run.offline:
        wandb.finish()
        say("W&B offline; upload it later: wandb sync {logs}/wandb/offline-*", logs=logs)
    swanlab = sys.modules.get("swanlab")
    if swanlab and swanlab.has_run():
        is_offline = swanlab.get_run().mode == "offline"
        swanlab.finish()
        if is_offline:
            say("SwanLab offline; upload it later: swanlab sync {logs}/swanlab/run-*", logs=logs)


def loss_history(log_history: Log) -> Curve:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def validation_history(log_history: Log) -> Curve:
    """(step, loss) pairs of the validation log, the last of each step."""
    losses = {entry["step"]: entry["eval_loss"] for entry in log_history if "eval_loss" in entry}
    return sorted(losses.items())


def read_history(path: Path, key: str = "") -> Log:
    """What `write_history` wrote, or the log under a key of a trainer's state; empty if there is no file."""
    if not path.is_file():
        return []
    with reading(path):
        content: Any = read_json(path)
        log = [dict(entry) for entry in (content[key] if key else content)]
        POINTS.validate_python(loss_history(log) + validation_history(log), strict=True)
    return log


def best_of(validation: Curve) -> Point | None:
    """The step with the lowest finite loss."""
    return min(finite(validation), key=itemgetter(1), default=None)


def write_history(log_history: Log, path: Path) -> None:
    """Write the curves as [{step, loss}, ..., {step, eval_loss}, ...]; values that are not finite are left out."""
    curves = {"loss": loss_history(log_history), "eval_loss": validation_history(log_history)}
    points = []
    for name, curve in curves.items():
        points += [{"step": step, name: loss} for step, loss in finite(curve)]
    write_json(path, points)


class Progress(BaseModel):
    """How far a training is."""

    state: State
    step: int
    steps: int  # 0 before the first
    left: FiniteFloat | None = None
    loss: Point | None = None
    validation: Point | None = None
    tokens_per_second: float = 0.0
    peak_gib: float = 0.0  # of memory
    cost: dict[str, float] = {}  # by currency
    notes: list[str] = []  # the newest lines
    host: str = socket.gethostname()
    pid: int = 0
    began: FiniteFloat = 0.0  # the process: a number alone may belong to another one later
    updated: FiniteFloat = 0.0

    @property
    def age(self) -> float:
        """Seconds since it was written."""
        return max(time.time() - self.updated, 0.0)

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, on this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether its process is still there; one of another machine counts as dead once it is silent for long."""
        if not self.is_here:
            return self.age < SILENT
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE
        return False

    def parts(self) -> dict[str, str]:
        """The numbers by name, as texts; what is not known is left out."""
        parts = {}
        if self.loss:
            parts["loss"] = f"{self.loss[1]:.3f}"
        if self.validation:
            step, loss = self.validation
            parts["validation"] = tr("{loss:.3f} (step {step})", loss=loss, step=step)
        if self.tokens_per_second:
            parts["tokens/s"] = f"{self.tokens_per_second:,.0f}"
        parts["peak"] = f"{self.peak_gib:.2f} GiB"
        if self.cost:
            parts["cost"] = tr(" or ").join(f"{sign}{amount:.2f}" for sign, amount in self.cost.items())
        if self.left is not None and self.state == "training":
            parts["time left"] = display.clock(self.left)
        return parts


def rent(gpu: hardware.GPU | None, platform: platforms.Platform) -> dict[str, float]:
    """The price of an hour by currency, as `plan` knows it; empty where it is free or not known."""
    price = gpus.hourly_price(gpu)
    hourly = {"¥": price.yuan, "$": price.dollars}
    return {sign: amount for sign, amount in hourly.items() if amount and sign in platform.entry.currency}


class LiveNumbers:
    """Step, losses, speed, memory, time left and cost: a panel in a notebook, now and then a line elsewhere.

    Its methods are called by the trainer's callback. The numbers go to `logs`, and in the end to `kept_logs` too.
    """

    def __init__(self, logs: Path, kept_logs: Path) -> None:
        self.file = logs / PROGRESS
        self.kept_file = kept_logs / PROGRESS
        self.price = rent(hardware.gpu(), platforms.detect())
        self.output = display.LiveOutput()
        self.watched = display.watched()
        self.notes: deque[str] = deque(maxlen=3)  # the newest lines below the numbers of the panel
        self.begin(step=0)
        self.shown_at = 0.0
        self.written_at = 0.0
        self.skipped = 0  # steps of float16 while it looks for its loss scale
        self.tokens = 0.0  # trained on in this session, at the last log
        self.speed = 0.0  # tokens per second until that log

    def begin(self, step: int) -> None:
        """Count from now, and from this step."""
        self.started = monotonic()
        self.start_step = step

    @property
    def seconds(self) -> float:
        """Since the training began."""
        return monotonic() - self.started

    def note(self, line: str) -> None:
        """Show a line: in the panel, or below what was printed."""
        self.notes.append(line)
        if not self.watched:
            print(line, flush=True)

    def on_train_begin(self, state: Any) -> None:
        """The training begins, or continues after it ran out of memory."""
        first = state.global_step + 1
        self._show(
            state, tr("training · steps {first:,} to {last:,} · the first is slow", first=first, last=state.max_steps)
        )
        self.shown_at = -LONGEST  # the first step is shown at once

    def on_step_end(self, state: Any, optimizer: Any) -> None:
        """A step is done."""
        if getattr(optimizer, "step_was_skipped", False):
            self.skipped += 1
        if monotonic() - self.written_at >= SHORTEST:
            self.write(self.progress(state))

    def on_log(self, state: Any, logs: Facts) -> None:
        """There are new numbers."""
        if "loss" not in logs:
            return
        self.tokens = logs.get("num_tokens", 0.0)
        self.speed = self.tokens / self.seconds
        pause = 1.0 if self.watched else min(max(self.seconds / 10, SHORTEST), LONGEST)
        if monotonic() - self.shown_at >= pause:
            text = tr("step {step:,} of {steps:,}", step=state.global_step, steps=state.max_steps)
            self._show(state, text)

    def on_train_end(self, state: Any, kind: State) -> None:
        """The training has ended, and how."""
        text = tr(
            "trained {step:,} of {steps:,} steps in {time}",
            step=state.global_step,
            steps=state.max_steps,
            time=display.clock(self.seconds),
        )
        self._show(state, text, kind)

    def cost(self, seconds: float) -> dict[str, float]:
        """What so many seconds cost by currency, where a price is known."""
        return {sign: round(hourly * seconds / 3600, 2) for sign, hourly in self.price.items()}

    def progress(self, state: Any, kind: State = "training") -> Progress:
        """How far it is now."""
        losses = loss_history(state.log_history)
        validation = validation_history(state.log_history)
        left = None
        done = state.global_step - self.start_step
        if done:
            left = self.seconds / done * (state.max_steps - state.global_step)
        return Progress(
            state=kind,
            step=state.global_step,
            steps=state.max_steps,
            left=left,
            loss=losses[-1] if losses else None,
            validation=validation[-1] if validation else None,
            tokens_per_second=self.speed,
            peak_gib=hardware.peak_memory_gib(),
            cost=self.cost(self.seconds),
            notes=list(self.notes),
            updated=time.time(),
            pid=os.getpid(),
            began=psutil.Process().create_time(),
        )

    def write(self, progress: Progress) -> None:
        """Write it for `nbutils watch`, in the end into the run folder too; a full disk does not end the training."""
        self.written_at = monotonic()
        if not distributed.is_main():
            return
        files = [self.file] if progress.state == "training" else [self.file, self.kept_file]
        for file in files:
            with suppress(OSError):
                write_json(file, progress.model_dump())

    @contextmanager
    def reported(self, trainer: Any) -> Iterator[None]:
        """Write that the training is under way, and if this block fails, that and why."""
        self.write(self.progress(trainer.state))
        try:
            yield
        except BaseException as problem:
            reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
            self.notes.append(mask_secrets(f"[FAIL] {reason}"))
            self.write(self.progress(trainer.state, "failed"))
            raise

    def _show(self, state: Any, text: str, kind: State = "training") -> None:
        """Draw the panel, or print a line; written for `nbutils watch` too."""
        self.shown_at = monotonic()
        progress = self.progress(state, kind)
        self.write(progress)
        numbers = progress.parts()
        page = ""
        if self.watched:
            page = display.live_page(
                {"": text, **numbers},
                state.global_step,
                state.max_steps,
                losses=loss_history(state.log_history),
                validation=validation_history(state.log_history),
                notes=self.notes,
            )
        self.output.show(f"{text} · {display.live_line(numbers)}", page)


def trainings(*places: Path, run: str = "*") -> dict[str, Progress]:
    """The newest progress of each run below these folders, `died` without its process; a damaged file is left out."""
    seen = []
    for place in places:
        for file in place.glob(f"{run}/logs/{PROGRESS}"):
            with suppress(ValidationError):
                progress = Progress.model_validate(read_object(file))
                if progress.state == "training" and not progress.lives:
                    progress.state = "died"
                seen.append((file.parent.parent.name, progress))
    seen.sort(key=lambda training: training[1].updated)
    return dict(seen)  # of each name the last
