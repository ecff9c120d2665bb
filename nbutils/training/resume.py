"""Where a training resumes, and the sync of its new checkpoints. Loads no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import BaseFileLock, Timeout

from nbutils import checkpoints, distributed, files, platforms
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, GIB
from nbutils.language import tr
from nbutils.plan.forecast import STEP_ARGUMENTS, rows_per_step
from nbutils.record import LessonLike
from nbutils.tracking import best_of, read_history, validation_history

MODEL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
SAMPLES, SAMPLE_BYTES = 64, 2**16  # blocks hashed of a weights file: a moment even for 15 GB
# Of `sft:` in a profile, what may change when a run is resumed. The rows of a step may not.
MAY_CHANGE = {
    *STEP_ARGUMENTS, "num_train_epochs", "max_steps", "save_steps", "save_total_limit", "logging_steps",
    "load_best_model_at_end", "use_liger_kernel", "optim", "report_to",
}  # fmt: skip
ANEW = "Started over, or at a chosen step: only what is here counts.\n"
ADAPTER = "adapter_model.safetensors"
FORMER_BEST = "best_adapter.safetensors"  # in a checkpoint of the version before whose own weights are not the best
OOM_FILE = "memory.json"  # in the run folder: what `oom` changed
_LOCKS: dict[Path, BaseFileLock] = {}


def resume_point(lesson: LessonLike, fingerprint: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    step = int(resume) if resume.isdecimal() else None
    scratch, stores = lesson.scratch, checkpoints.stores(lesson.folders, lesson.run.name)
    files.make_folder(scratch, tr("working space"))
    try:  # until this process ends: a second trainer would delete the files of this one
        _LOCKS[scratch] = _LOCKS.get(scratch) or files.lock(scratch / "training.lock", timeout=0)
        _LOCKS[scratch].acquire()
    except Timeout:
        raise CourseError(
            tr("Another process is training in {run} right now.", run=scratch.name),
            todo=tr("Wait for it, stop it (restart its kernel), or choose another RUN_NAME."),
        ) from None
    checkpoints.end_earlier(scratch / "outbox")
    for unproven in ("trainer", "outbox"):  # left by a killed run; only archives that verify count
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    keep = files.make_folder(lesson.run.checkpoints, tr("checkpoints of this run"))
    if resume == "never":
        (lesson.run.path / OOM_FILE).unlink(missing_ok=True)
        removed = sum(checkpoints.clear(store) for store in stores if not lesson.folders.is_attached(store))
        files.write_text(keep / checkpoints.BEGAN_ANEW, ANEW)
        print(tr('RESUME is "never": {count} earlier checkpoints removed.', count=removed))
        print(tr('Set RESUME back to "auto" for the next start.'))
        return None
    best = checkpoints.newest_verified(stores, fingerprint, step)
    if best is None:
        return None
    attached = tr(", which is attached: go on only if it is yours") if lesson.folders.is_attached(best.archive) else ""
    print(tr("continuing from step {step}, kept in {folder}", step=best.step, folder=best.archive.parent) + attached)
    if best.archive.parent != keep:
        require_disk(keep, best.size / GIB, tr("keeping the checkpoint this run continues from"))
        best = checkpoints.copy(best, keep)
    if step is not None:  # it becomes the newest of its run; later ones go to a folder nothing looks into
        files.write_text(keep / checkpoints.BEGAN_ANEW, ANEW)
        aside = keep / time.strftime(f"after-{step}-%Y%m%d-%H%M%S")
        for one in (one for one in checkpoints.look(keep)[0] if one.step > step):
            aside.mkdir(exist_ok=True)
            for path in (one.archive.with_suffix(".json"), one.archive):  # an archive without manifest does not count
                if path.exists():
                    shutil.move(path, aside)
        if aside.exists():
            print(tr("Later checkpoints are in {folder}.", folder=aside))
        print(tr('Set RESUME back to "auto" for the next start.'))
    folder = checkpoints.unpack(best, scratch / "trainer")
    bring_best(folder, lesson, fingerprint, stores)
    return folder


def bring_best(newest: Path, lesson: LessonLike, fingerprint: dict[str, Any], stores: list[Path]) -> None:
    """Unpack the checkpoint of the best step beside the newest one, and let the trainer's state know where it is."""
    state = files.read_object(newest / checkpoints.STATE)
    if not state:  # `spent_until` will say so
        return
    state["log_history"] = read_history(newest / checkpoints.STATE, "log_history")
    state["global_step"] = checkpoints.step_of(newest)
    if (newest / FORMER_BEST).exists() or state.get("best_global_step") is None:
        _adopt_former_best(newest, state)
    step = state["best_global_step"]
    folder = newest.parent / f"checkpoint-{step}"
    is_known = bool(checkpoints.NAME.fullmatch(folder.name))
    if is_known and not folder.exists():
        best = checkpoints.verified_at(stores, fingerprint, step)
        if best is None:
            print(
                tr("the checkpoint of step {step}, the best so far, is gone: the best from here on counts", step=step)
            )
            state["best_global_step"] = state["best_metric"] = None
            is_known = False
        else:
            if best.archive.parent != lesson.run.checkpoints:
                best = checkpoints.copy(best, lesson.run.checkpoints)
            checkpoints.unpack(best, newest.parent)
    state["best_model_checkpoint"] = str(folder) if is_known else None
    (newest / checkpoints.STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")


def _adopt_former_best(newest: Path, state: dict[str, Any]) -> None:
    """A checkpoint of the version before has the best weights within it: they become a folder of their own."""
    from safetensors.torch import load_file, save_file

    best = best_of(validation_history(state["log_history"]))
    state["best_global_step"], state["best_metric"] = best or (None, None)
    if best is None or best[0] == state["global_step"]:
        return
    if not (newest / FORMER_BEST).exists():
        state["best_global_step"] = state["best_metric"] = None
        return
    weights = load_file(newest / FORMER_BEST)
    name = ADAPTER if any(".lora_A." in key for key in weights) else "model.safetensors"
    folder = newest.parent / f"checkpoint-{best[0]}"
    folder.mkdir(exist_ok=True)
    save_file({key.replace(".default.", "."): weight for key, weight in weights.items()}, folder / name)
    shutil.copy(newest / FORMER_BEST, folder)


def carry_former_best(checkpoint: Path, best: str | None) -> None:
    """Best weights that have no checkpoint of their own in the run folder go on within the newest one."""
    if best and (Path(best) / FORMER_BEST).exists():
        shutil.copy(Path(best) / FORMER_BEST, checkpoint)


def spent_until(checkpoint: Path | None) -> dict[str, Any]:
    """What was logged last before a checkpoint, with the time and cost until then; empty without one."""
    log = read_history(checkpoint / checkpoints.STATE, "log_history") if checkpoint else []
    return dict(log[-1]) if log else {}


def start_sync(lesson: LessonLike, fingerprint: dict[str, Any], keep_last: int, validation_rows: int = 0) -> Any:
    """Start copying this run's checkpoints and logs to the run folder; a process beside the main one copies nothing."""
    if not distributed.is_main():
        return SimpleNamespace(seconds=0.0, messages=list, finish=lambda patience=0.0: None)
    logs = (lesson.scratch / lesson.run.logs.name, lesson.run.logs)
    outbox, check = lesson.scratch / "outbox", partial(mount_check, platforms.mount_point_of(lesson.run.path))
    keep = lesson.run.checkpoints
    return checkpoints.CheckpointSync(outbox, keep, fingerprint, keep_last, check, logs, validation_rows)


def mount_check(mount: Path | None) -> None:
    """Raise once the disk with this mount point is gone: it is then an ordinary, empty folder."""
    if mount is not None and not platforms.is_mount(mount):
        raise OSError(errno.ENOTCONN, tr("{mount} is not mounted any more", mount=mount))


def unlock_run(lesson: LessonLike) -> None:
    """The training is over and its checkpoint is in the run folder."""
    if lock := _LOCKS.pop(lesson.scratch, None):
        lock.release(force=True)


def run_fingerprint(lesson: LessonLike, seed: int) -> dict[str, Any]:
    """What must be equal for a run to be resumed: the model, the data, the adapter, the way of training, the seed."""
    profile = lesson.profile
    return {
        "model": model_fingerprint(lesson.model, lesson.model_name),
        "data": files.read_json(lesson.run.data / "data_card.json")["fingerprint"],
        "method": profile.method,
        "quantization": profile.quantization.model_dump(mode="json") if profile.method == "qlora" else {},
        "lora": profile.lora.model_dump(mode="json"),
        "sft": profile.sft.model_dump(mode="json", exclude=MAY_CHANGE),
        "rows_per_step": rows_per_step(profile.sft, distributed.world_size()),
        "seed": seed,
    }


def model_fingerprint(model: str, name: str) -> dict[str, str]:
    """What the base model is: its name, and a checksum of config, tokenizer and samples of the weights."""
    from transformers.utils import cached_file

    folder = Path(str(cached_file(model, "config.json"))).parent
    digest, local = hashlib.sha256(), Path(model).is_dir()
    for path in sorted(folder.iterdir()):
        if path.name in MODEL_FILES or path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with open(path, "rb") as file:
                digest.update(file.read(CHUNK))
                rest = path.stat().st_size - CHUNK
                for part in range(SAMPLES + 1) if local and rest > 0 else ():  # Hub files never change under a name
                    file.seek(CHUNK + max(rest - SAMPLE_BYTES, 0) * part // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    return {"name": Path(name).name if Path(name).is_absolute() else name, "content": digest.hexdigest()[:16]}
