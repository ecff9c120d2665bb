"""Out of memory: training goes on from the last finished step; only how many rows are computed at a time changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl.models import activation_offloading

from nbutils import distributed, files, hardware
from nbutils.checkpoints import step_of
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.plan.forecast import STEP_ARGUMENTS
from nbutils.training import sharding
from nbutils.training.resume import OOM_FILE


@dataclass(frozen=True)
class StepSettings:
    """The arguments of SFTConfig that decide the memory of a step, and not what it learns."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    activation_offloading: bool

    def smaller(self, offload: bool) -> StepSettings | None:
        """The next settings that need less memory; `offload` says whether activations may go to the CPU."""
        size = self.per_device_train_batch_size
        if size > 1:
            rows = distributed.divisors(size)[-2]  # at most half as many
            times = size * self.gradient_accumulation_steps // rows
            return replace(self, per_device_train_batch_size=rows, gradient_accumulation_steps=times)
        if not self.gradient_checkpointing:
            return replace(self, gradient_checkpointing=True)
        if not self.activation_offloading and offload:
            return replace(self, activation_offloading=True)
        return None


class UpdateWatch(TrainerCallback):
    """Whether the optimizer is updating the weights right now."""

    updating = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updating = False


def train_within_memory(
    trainer: Any, run_folder: Path, resume_from: Path | None, note: Callable[[str], object] = print
) -> None:
    """Train to the end; where memory runs out, go on from the last finished step with smaller settings."""
    first_weights = {} if distributed.strategy() else sharding.full_weights(trainer.model)
    watch = UpdateWatch()
    trainer.callback_handler.callbacks.insert(0, watch)  # before those that may run out of memory themselves
    while not _trains_to_the_end(trainer, resume_from):
        step = max(trainer.state.global_step, step_of(resume_from))
        settings = settings_of(trainer)
        smaller = settings.smaller(offload=trainer.args.device.type == "cuda")
        if distributed.strategy():
            raise _cannot_go_on(step, settings)
        _free_broken_step(trainer)
        if step > step_of(resume_from) and not watch.updating:
            resume_from = _save_finished_step(trainer)
            if step >= trainer.state.max_steps:  # only its checkpoint was missing
                trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
                return
        if smaller is None or step > step_of(resume_from):  # an update broke off: some weights have changed
            raise _cannot_go_on(step, settings)
        if resume_from is None:  # the first update may have broken off
            sharding.load_weights(trainer.model, first_weights)
        apply_settings(trainer, smaller)
        change = {"step": step + 1, "from": asdict(settings), "to": asdict(smaller)}
        with suppress(OSError):  # a disk that is gone does not end the training
            files.write_json(run_folder / OOM_FILE, {"rungs": [*oom_changes(run_folder), change]})
        note(tr("[WARN] out of memory at step {step}: continuing with {settings}", step=step + 1, settings=smaller))


def _cannot_go_on(step: int, settings: StepSettings) -> CourseError:
    """The error of a training that cannot continue in this process."""
    return CourseError(
        "Out of memory at step {step} with {settings}; the training cannot go on from here by itself.",
        todo=(
            "Close other programs on the GPU (other notebooks too) and start again: it resumes from its newest "
            "checkpoint. If it happens again, halve sft.per_device_train_batch_size (the batch stays the same), or "
            "choose a smaller model or sft.max_length, method qlora or a larger GPU."
        ),
        step=step + 1,
        settings=settings,
    )


def _trains_to_the_end(trainer: Any, resume_from: Path | None) -> bool:
    """Whether the memory suffices; the error is not passed on, as it holds the tensors of the step."""
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    except Exception as error:
        if not hardware.out_of_memory(error):
            raise
        return False
    return True


def _free_broken_step(trainer: Any) -> None:
    """Free what a step that broke off still holds."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.callback_handler.train_dataloader = None
    hardware.free_memory()  # the reported peak is that of the settings that fit


def _save_finished_step(trainer: Any) -> Path:
    """Write a checkpoint of the last finished step to resume from."""
    folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    shutil.rmtree(folder, ignore_errors=True)  # its files may be on their way to the run folder
    trainer._save_checkpoint(trainer.model, trial=None)
    return folder


def settings_of(trainer: Any) -> StepSettings:
    """The settings a trainer was built with."""
    return StepSettings(**{name: getattr(trainer.args, name) for name in STEP_ARGUMENTS})


def apply_settings(trainer: Any, new: StepSettings) -> None:
    """Give a trainer whose training broke off new settings; its next `train` builds all that depends on them."""
    trainer.optimizer = trainer.lr_scheduler = None  # made again and loaded from the checkpoint
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    if trainer.accelerator.scaler:  # it would refuse to unscale a second time
        trainer.accelerator.scaler._per_optimizer_states.clear()
    args = trainer.args
    if new.gradient_checkpointing and not args.gradient_checkpointing:  # `train` enables it in the model
        # as TRL does where it is on from the start
        args.gradient_checkpointing_kwargs = {"use_reentrant": False} | (args.gradient_checkpointing_kwargs or {})
        trainer.model.enable_input_require_grads()  # a frozen base passes on no gradients otherwise
    for name, value in asdict(new).items():
        setattr(args, name, value)
    trainer._train_batch_size = trainer.state.train_batch_size = args.train_batch_size
    if args.activation_offloading:  # always a new one: that of a broken step still holds its tensors
        context = activation_offloading.get_act_offloading_ctx_manager(trainer.model)
        trainer.maybe_activation_offload_context = context


def oom_changes(run_folder: Path) -> list[dict[str, Any]]:
    """Every change this run made, in all its sessions, for facts.json."""
    return files.read_object(run_folder / OOM_FILE).get("rungs", [])
