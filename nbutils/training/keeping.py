"""Progress that is not lost: each saved checkpoint is carried to keep while the training goes on.

Not here: how a checkpoint travels (checkpoints), or when a session is over (budget).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import checkpoints, scaling, tracking
from nbutils.disk import require_disk
from nbutils.paths import GIB
from nbutils.platforms import drive
from nbutils.training import budget
from nbutils.training.resuming import let_others_train, sealed, trained_already

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from nbutils.lessons import Lesson

CHECKPOINT_EXTRAS = 64 * 2**20  # tokenizer, trainer state, random states


class Onlooker(checkpoints.Carrier):
    """What a process beside the main one holds: it carries nothing and has nothing to say."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def messages(self) -> list[str]:
        """Nothing."""
        return []


def carrier(lesson: Lesson, mark: dict[str, Any], keep_last: int) -> checkpoints.Carrier:
    """The thread that carries this run's checkpoints and logs home while it trains."""
    if not scaling.is_main():
        return Onlooker()
    route = checkpoints.Route(sealed(lesson), lesson.run.checkpoints, keep_last, still_mounted(lesson.run.path))
    return checkpoints.Carrier(route, mark, (lesson.scratch / lesson.run.logs.name, lesson.run.logs))


def still_mounted(folder: Path) -> Callable[[], None]:
    """A check that raises once the disk under `folder` is gone: its mount point is then an ordinary, empty folder."""
    mount = drive.mount_point_of(folder)

    def check() -> None:
        if mount is not None and not drive.is_mount(mount):
            raise OSError(errno.ENOTCONN, f"{mount} is not mounted any more")

    return check


def require_room(trainer: Trainer, keep: Path, keep_last: int) -> None:
    """Stop before a training whose checkpoints do not fit: weights and two optimizer states, in float32."""
    assert trainer.model and trainer.args.output_dir
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    one = (trainable * 12 + CHECKPOINT_EXTRAS) / GIB
    there = len(checkpoints.look(keep)[0])
    require_disk(Path(trainer.args.output_dir), 3 * one, "writing checkpoints")
    require_disk(keep, max(keep_last + 1 - there, 1) * one, "keeping checkpoints")


def keep_checkpoints(way_home: checkpoints.Carrier) -> TrainerCallback:
    """A callback that hands each saved checkpoint to the carrier and shows what the carrier has to say."""
    from accelerate import PartialState
    from transformers import TrainerCallback

    class KeepCheckpoints(TrainerCallback):
        """on_save -> Carrier.take. Saving steps are logged too, so that a continued run logs the same losses."""

        def __init__(self) -> None:
            self.begun = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.begun:
                raise trained_already()
            self.begun = True

        def begin_again(self) -> None:
            """Allow one more beginning: the ladder's, which goes on with the weights of the last finished step."""
            self.begun = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log |= control.should_save or state.global_step >= state.max_steps
            for line in way_home.messages():
                print(line, flush=True)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            PartialState().wait_for_everyone()  # every process adds its random state to the folder
            if state.is_world_process_zero:
                way_home.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return KeepCheckpoints()


def bring_home(lesson: Lesson, way_home: checkpoints.Carrier) -> None:
    """Wait until the last checkpoint and the logs are in keep; the only time a lesson waits for that disk.

    Of several processes only the main one goes on from here.
    """
    scaling.leave_it_to_main()
    tracking.end()
    kept = way_home.finish()
    checkpoints.clear(way_home.route.sealed)  # all of it is in keep; whoever deletes a run there means to begin anew
    let_others_train(lesson)
    budget.stop_listening()
    print(f"safe: checkpoint {kept.step} in {kept.archive.parent}" if kept else "nothing new had to be kept")
