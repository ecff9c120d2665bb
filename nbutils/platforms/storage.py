"""The folders of a platform: where to work, what may vanish, what outlives the machine, what was attached."""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.paths import CHECKOUT
from nbutils.platforms import drive
from nbutils.platforms.detection import Platform, fs_root

MAX_INPUT_DEPTH = 8  # /kaggle/input/notebooks/<owner>/<slug>/runs/<run>/checkpoints is 6 deep


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
    home = _home(env)
    if platform.name == "local":
        work = CHECKOUT or Path.cwd()
        keep = home or work / "runs"
        return Folders(work, keep / ".scratch", keep, None, remark="a folder of this computer")
    entry = platform.entry
    work, scratch = root / entry.work[1:], root / entry.scratch[1:]
    lasting, refused = _lasting_folders(platform, root)
    notes = list(refused.values())
    on_drive = platform.name == "colab" and home and home.is_relative_to(root / drive.MOUNT_POINT)
    if on_drive and not drive.is_mounted(root):  # a folder made there now would keep Drive from being mounted
        home = None
        notes.append("NBUTILS_HOME is on Drive, which is not mounted")
    keep = home or next(iter(lasting), work / "runs")
    remark = next((remark for place, remark in lasting.items() if keep.is_relative_to(place.parent)), "")
    if home and (mounted := drive.mount_point_of(home, root)) and not home.is_relative_to(scratch):
        remark = f"NBUTILS_HOME is on the disk mounted at {mounted}"
    earlier = tuple(place for place in dict.fromkeys([*lasting, *refused, work / "runs"]) if place != keep)
    inputs = root / entry.inputs[1:] if entry.inputs else None
    text = "; ".join([remark or "nothing that lasts was found here", *notes])
    return Folders(work, scratch, keep, inputs, earlier, bool(remark), text)


def _home(env: Mapping[str, str]) -> Path | None:
    try:
        return Path(env["NBUTILS_HOME"]).expanduser().absolute() if env.get("NBUTILS_HOME") else None
    except RuntimeError as problem:
        raise CourseError("platforms.unknown_home", folder=env["NBUTILS_HOME"]) from problem


def _lasting_folders(platform: Platform, root: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Folders for runs that outlive the machine, and how long; and those that are there but take no files, and why."""
    if platform.name == "colab":
        return {drive.runs_folder(root): "it is on your Drive"} if drive.is_mounted(root) else {}, {}
    usable: dict[Path, str] = {}
    refused: dict[Path, str] = {}
    for place, remark in platform.entry.keep.items():
        folder = root / place[1:]
        if os.path.isdir(folder):
            why = cannot_write(folder)
            (refused if why else usable)[folder / "runs"] = f"{folder} takes no files: {why}" if why else remark
    return usable, refused


def cannot_write(folder: Path) -> str:
    """Why no file can be made in a folder (full, out of inodes, read-only, not there); empty if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            return ""
    except OSError as problem:
        return problem.strerror or type(problem).__name__


def use_model_cache(platform: Platform, places: Folders) -> str:
    """Move the download cache off a small system disk, before huggingface_hub is imported; what was done, or nothing.

    A learner's own setting wins, and so does a cache in the home folder that holds models already.
    """
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
    pattern = "/".join(part.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]") for part in parts)
    found = list(find_inputs(inputs, pattern))
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise CourseError("platforms.ambiguous_input", name=name, count=len(found), places=places, inputs=inputs)
    return found[0] if found else None
