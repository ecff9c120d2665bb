"""The folders of a platform: where to work, what may vanish, what outlives the machine, what was attached; Drive.

Nothing is ever made below Drive's mount point before it is a mount: a folder there would keep Drive from being mounted
at all, and what lies in it would be gone with the machine.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.files import CHECKOUT
from nbutils.masking import mask_secrets
from nbutils.platforms.detection import Platform, fs_root

MAX_INPUT_DEPTH = 8  # /kaggle/input/notebooks/<owner>/<slug>/runs/<run>/checkpoints is 6 deep
MOUNT_POINT = "content/drive"
SECONDS = 130.0
STATE = "NBUTILS_DRIVE"  # "off" by the learner; "failed" after one failure, inherited by child processes
DISCONNECTED = (errno.ENOTCONN, errno.EIO, errno.ESTALE)
FALLBACK = "Runs stay on this machine's disk and are deleted with it."
MANUALLY = "from google.colab import drive; drive.mount('/content/drive', force_remount=True)"


@dataclass(frozen=True)
class Folders:
    """work: fast and large; scratch: may vanish; keep: outlives the machine; inputs: read-only, or None.

    `earlier` are further places in which a run of an earlier start may lie, for example because the better keep
    was not there then. `lasting` says whether keep really outlives the machine, `remark` why or for how long.
    """

    work: Path
    scratch: Path
    keep: Path
    inputs: Path | None
    earlier: tuple[Path, ...] = ()
    lasting: bool = True
    remark: str = ""

    def is_attached(self, place: Path) -> bool:
        """Whether a place lies in the inputs: anybody may have made what is there."""
        return self.inputs is not None and place.is_relative_to(self.inputs)


def folders(platform: Platform, env: Mapping[str, str] | None = None, root: Path | None = None) -> Folders:
    """The folders of a platform; `NBUTILS_HOME` moves the one in which runs are kept."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    home = Path(os.path.expanduser(env["NBUTILS_HOME"])).absolute() if env.get("NBUTILS_HOME") else None
    if platform.name == "local":
        work = CHECKOUT or Path.cwd()
        keep = home or work / "runs"
        return Folders(work, keep / ".scratch", keep, None, remark="a folder of this computer")
    entry = platform.entry
    work, scratch = root / entry.work[1:], root / entry.scratch[1:]
    lasting = {root / place[1:] / "runs": remark for place, remark in entry.keep.items()}
    lasting = {place: remark for place, remark in lasting.items() if os.path.isdir(place.parent)}
    known = [*lasting, work / "runs"]
    lasting = {place: remark for place, remark in lasting.items() if not cannot_write(place.parent)}
    if platform.name == "colab" and is_mounted(root):
        lasting = {runs_folder(root): "it is on your Drive"}
    elif platform.name == "colab" and home and home.is_relative_to(root / MOUNT_POINT):
        home = None  # a folder made there now would keep Drive from being mounted
    keep = home or next(iter(lasting), work / "runs")
    remark = next((remark for place, remark in lasting.items() if keep.is_relative_to(place.parent)), "")
    if home and (mounted := mount_point_of(home, root)) and not home.is_relative_to(scratch):
        remark = f"NBUTILS_HOME is on the disk mounted at {mounted}"
    earlier = tuple(place for place in dict.fromkeys(known) if place != keep)
    inputs = root / entry.inputs[1:] if entry.inputs else None
    text = remark or "nothing that lasts can be written here"
    return Folders(work, scratch, keep, inputs, earlier, bool(remark), text)


def cannot_write(folder: Path) -> str:
    """Why no file can be made in a folder (full, out of inodes, read-only, not there); empty if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            return ""
    except OSError as problem:
        return problem.strerror or type(problem).__name__


def use_model_cache(platform: Platform, places: Folders) -> str:
    """Move the download cache off a small system disk, before huggingface_hub is imported; says what was done."""
    chosen = any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    filled = any(Path("~/.cache/huggingface/hub").expanduser().glob("models--*"))
    if not platform.entry.cache or chosen or filled:
        return ""
    cache = getattr(places, platform.entry.cache) / "huggingface"
    os.environ["HF_HUB_CACHE"] = str(cache)
    return f"downloaded models go to {cache}"


def find_inputs(inputs: Path | None, marker: str) -> Iterator[Path]:
    """Every path below `inputs` whose end matches the glob `marker` ("checkpoints/checkpoint-*.json"), in order."""
    last = marker.rpartition("/")[2]
    for place, inner, files in os.walk(inputs) if inputs else ():
        here = Path(place)
        inner[:] = sorted(inner) if len(here.relative_to(str(inputs)).parts) < MAX_INPUT_DEPTH else []
        found = (here / name for name in sorted(fnmatch.filter([*inner, *files], last)))
        yield from (path for path in found if path.match(marker))


def find_input(inputs: Path | None, name: str) -> Path | None:
    """The file or folder a learner names by the end of its path ("train.jsonl", "owner/slug/train.jsonl")."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        return None
    found = list(find_inputs(inputs, glob.escape("/".join(parts))))
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise CourseError("platforms.ambiguous_input", name=name, count=len(found), places=places, inputs=inputs)
    return found[0] if found else None


# ---- mounts and Google Drive


def _mounts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every (mount point, type) the kernel lists, as paths below `root`."""
    file = root / "proc/mounts"
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if file.exists() else []
    for words in (line.split() for line in lines if len(line.split()) >= 3):
        place = Path(words[1])
        yield (place if place.is_relative_to(root) else root / words[1].lstrip("/")), words[2]


def is_mount(path: Path, root: Path | None = None) -> bool:
    """Whether something is mounted at exactly this path, even if it no longer answers."""
    return os.path.ismount(path) or any(place == path for place, _ in _mounts(root or fs_root()))


def mount_point_of(path: Path, root: Path | None = None) -> Path | None:
    """The mount a path lies on; None if that is the root disk. `is_mount` tells later whether it is still there."""
    root, path = root or fs_root(), path.absolute()
    end = root if path.is_relative_to(root) else Path(path.anchor)
    nearest = [path, *path.parents]
    return next((place for place in nearest[: nearest.index(end)] if is_mount(place, root)), None)


def is_mounted(root: Path | None = None) -> bool:
    """Whether Drive is really there: an empty folder of that name is not Drive, nor is a connection that died."""
    root = root or fs_root()
    place = root / MOUNT_POINT
    try:
        os.stat(place)
    except OSError as problem:
        if problem.errno in DISCONNECTED:
            return False
    return os.path.ismount(place) or (place, "fuse.drive") in _mounts(root)


def runs_folder(root: Path | None = None) -> Path:
    """Where runs are kept on a mounted Drive."""
    return (root or fs_root()) / MOUNT_POINT / "MyDrive/finetune-course"


def mount_drive(platform: Platform, seconds: float = SECONDS, root: Path | None = None) -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    root = root or fs_root()
    if platform.name != "colab":
        return f"No Drive on {platform.name}: runs are kept on its own disk, or where NBUTILS_HOME says."
    state = os.environ.get(STATE, "")
    if not is_mounted(root) and state in ("off", "failed"):
        return f"Drive is not used ({STATE}={state}). {FALLBACK}"
    problem = "" if is_mounted(root) else _mount(root, seconds)
    if not problem:
        os.environ.pop(STATE, None)
        return f"Drive is mounted: runs are kept in {runs_folder(root)}."
    os.environ[STATE] = "failed"
    return f"Drive could not be mounted ({problem}). {FALLBACK} To do: in a cell of an open Colab page, {MANUALLY}"


class _Alarm(BaseException):
    """Not an Exception, so that no `except Exception` on the way keeps it."""


def _mount(root: Path, seconds: float) -> str:
    """Request Drive from Colab; why it failed, or nothing. A signal ends a call that hangs, on this thread."""

    def ring(*_: Any) -> None:
        raise _Alarm

    patience = int(max(seconds - 20, seconds * 0.8) * 1000)  # Colab's own, shorter, so that it may clean up
    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        from google.colab import drive

        drive.mount(str(root / MOUNT_POINT), timeout_ms=patience)
    except _Alarm:
        return f"it was not allowed within {seconds:.0f} s"
    except Exception as problem:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        return mask_secrets(f"{type(problem).__name__}: {problem}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    return "" if is_mounted(root) else "nothing is mounted at /content/drive"
