"""The folders of a platform: where to work, what may vanish, what outlives the machine, what was attached.

Not here: which platform it is (detection), mounting anything (drive), or how much room there is (disk).
"""

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

DEEPEST_INPUT = 8  # /kaggle/input/notebooks/<owner>/<slug>/runs/<run>/checkpoints is 6 deep


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


@dataclass(frozen=True)
class Layout:
    """Fixed folders of a platform; `lasting` are places that outlive the machine, the best first, and how they do."""

    work: str
    scratch: str
    lasting: dict[str, str]
    inputs: str = ""


WIPED = "tmp/finetune-course"
ON_DRIVE = "it is on your Drive"
WORKSPACE = {"mnt/workspace": "the workspace disk; a free one is wiped 15 days after the last stop"}
STUDIO = "teamspace/studios/this_studio"
LAYOUTS = {
    "colab": Layout("content", "content/scratch", {}),  # its lasting place is Drive, where that is mounted
    "colab_enterprise": Layout("content", "content/scratch", {}),
    "kaggle": Layout(
        "kaggle/working", "kaggle/temp", {"kaggle/working": "saved with this version when the run ends"}, "kaggle/input"
    ),
    "autodl": Layout("root/autodl-tmp", "root/autodl-tmp/scratch", {
        "root/autodl-fs": "the file storage, which outlives the instance",
        "root/autodl-tmp": "the data disk; it is deleted with the instance, 15 days after the last stop",
    }),
    "pai_dsw": Layout("mnt/workspace", WIPED, WORKSPACE),
    "modelscope": Layout("mnt/workspace", WIPED, WORKSPACE),
    "featurize": Layout(
        "home/featurize/work", "home/featurize/data/scratch", {"home/featurize/work": "the work folder of your account"}
    ),
    "gpushare": Layout("hy-tmp", "hy-tmp/scratch", {"hy-netdisk": "your net disk", "hy-nas": "your storage"}),
    "matpool": Layout("root", "root/scratch", {"mnt": "your net disk"}),
    "paperspace": Layout("notebooks", WIPED, {
        "storage": "the storage of your account", "notebooks": "the folder of this notebook",
    }),
    "hf_spaces": Layout(WIPED, WIPED, {"data": "the persistent storage of this Space"}),
    "studio_lab": Layout("home/studio-lab-user", WIPED, {"home/studio-lab-user": "your home folder"}),
    "lightning": Layout(STUDIO, WIPED, {STUDIO: "the folder of this studio"}),
    "modal": Layout(WIPED, WIPED, {}),  # only a Volume lasts, and it may be mounted anywhere
    "runpod": Layout("workspace", WIPED, {"workspace": "the volume of this pod"}),
}  # fmt: skip


def folders(platform: Platform, env: Mapping[str, str] | None = None, root: Path | None = None) -> Folders:
    """The folders of a platform; `NBUTILS_HOME` moves the one in which runs are kept."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    home = _home(env)
    drive_is_gone = home and home.is_relative_to(root / drive.MOUNT_POINT) and not drive.is_mounted(root)
    home = None if drive_is_gone and platform.name == "colab" else home  # what is made there now would keep it away
    layout = LAYOUTS.get(platform.name)
    if layout is None:
        work = CHECKOUT or Path.cwd()
        keep = home or work / "runs"
        return Folders(work, keep / ".scratch", keep, None, remark="a folder of this computer")
    work, scratch = root / layout.work, root / layout.scratch
    places, refused = _lasting_places(platform, layout, root)
    keep = home or next(iter(places), work / "runs")
    good = {place.parent: remark for place, remark in places.items()}
    if home and (mounted := drive.mount_point_of(home, root)) and not home.is_relative_to(scratch):
        good[home] = f"NBUTILS_HOME is on the disk mounted at {mounted}"
    remark = next((remark for place, remark in good.items() if keep.is_relative_to(place)), "")
    earlier = tuple(place for place in dict.fromkeys([*places, *refused, work / "runs"]) if place != keep)
    inputs = root / layout.inputs if layout.inputs else None
    nothing = "NBUTILS_HOME names it, and it is on no disk of its own" if home else "nothing that lasts was found here"
    nothing = "NBUTILS_HOME is on Drive, which is not mounted" if drive_is_gone else nothing
    told = "; ".join(filter(None, [remark or nothing, *refused.values()]))
    return Folders(work, scratch, keep, inputs, earlier, bool(remark), told)


def _home(env: Mapping[str, str]) -> Path | None:
    """Where the learner wants runs to be kept."""
    named = env.get("NBUTILS_HOME")
    try:
        return Path(named).expanduser().absolute() if named else None
    except RuntimeError as problem:
        raise CourseError(
            f"NBUTILS_HOME is {named!r}, and there is no such user.", "the path of a folder", "correct it, or unset it"
        ) from problem


def _lasting_places(platform: Platform, layout: Layout, root: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Folders for runs that outlive the machine, and how; and those that are there but take no files, and why."""
    if platform.name == "colab":
        return {drive.runs_folder(root): ON_DRIVE} if drive.is_mounted(root) else {}, {}
    taken, refused = {}, {}
    for place, remark in layout.lasting.items():
        if not os.path.isdir(root / place):
            continue
        if why := cannot_write(root / place):
            refused[root / place / "runs"] = f"{root / place} takes no files: {why}"
        else:
            taken[root / place / "runs"] = remark
    return taken, refused


def cannot_write(folder: Path) -> str:
    """Why no file can be made in a folder (full, out of inodes, read-only, not there); empty if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            return ""
    except OSError as problem:
        return problem.strerror or type(problem).__name__


def model_cache(platform: Platform, places: Folders) -> Path | None:
    """Where downloaded models belong instead of the home folder, on platforms whose system disk is small or saved."""
    place = {"kaggle": places.scratch, "autodl": places.work, "gpushare": places.work, "runpod": places.work}
    return place[platform.name] / "huggingface" if platform.name in place else None


def use_model_cache(platform: Platform, places: Folders) -> str:
    """Move the cache for downloads there, before huggingface_hub is imported; what was done, or nothing.

    A learner's own setting wins, and so does a cache in the home folder that holds models already.
    """
    cache = model_cache(platform, places)
    if cache is None or any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")):
        return ""
    if any(Path("~/.cache/huggingface/hub").expanduser().glob("models--*")):
        return ""
    os.environ["HF_HUB_CACHE"] = str(cache)
    return f"downloaded models go to {cache}"


def find_inputs(inputs: Path | None, marker: str) -> Iterator[Path]:
    """Every path below `inputs` whose end matches the glob `marker` ("checkpoints/checkpoint-*.json"), in order."""
    last = marker.rpartition("/")[2]
    yield from (path for path in _below(inputs, last) if path.match(marker))


def find_input(inputs: Path | None, name: str) -> Path | None:
    """The file or folder a learner names by the end of its path ("train.jsonl", "owner/slug/train.jsonl")."""
    wanted = Path(name).parts
    if not wanted or Path(name).is_absolute() or ".." in wanted:
        return None
    found = [path for path in _below(inputs, wanted[-1]) if path.parts[-len(wanted) :] == wanted]
    if len(found) > 1:
        raise CourseError(
            f"{name!r} was found {len(found)} times: {', '.join(map(str, found))}.",
            f"a name that fits one path below {inputs}",
            "write more of the path in front of it, or the whole path",
        )
    return found[0] if found else None


def _below(inputs: Path | None, name: str) -> Iterator[Path]:
    """Every path below `inputs` of that name, in order; how deep the mounts lie differs, and there is an end to it."""
    if inputs is None:
        return
    for place, inner, files in os.walk(inputs):
        here = Path(place)
        inner[:] = sorted(inner) if len(here.relative_to(inputs).parts) < DEEPEST_INPUT else []
        yield from (here / found for found in sorted(fnmatch.filter([*inner, *files], name)))
