"""The folders of a platform: where to work, what may vanish, what outlives the machine, what was attached.

Not here: which platform it is (detection), or mounting anything (drive).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbutils.paths import CHECKOUT
from nbutils.platforms import drive
from nbutils.platforms.detection import Platform, fs_root

DEEPEST_INPUT = 8  # /kaggle/input/notebooks/<owner>/<slug>/runs/<run>/checkpoints is 6 deep


@dataclass(frozen=True)
class Folders:
    """work: fast and large; scratch: may vanish; keep: outlives the machine; inputs: read-only, or None.

    `earlier` are further places in which a run of an earlier start may lie, for example because the better keep
    was not there then.
    """

    work: Path
    scratch: Path
    keep: Path
    inputs: Path | None
    earlier: tuple[Path, ...] = ()


def folders(platform: Platform, env: Mapping[str, str] | None = None, root: Path | None = None) -> Folders:
    """The folders of a platform; `NBUTILS_HOME` moves the one in which runs are kept."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    home = Path(env["NBUTILS_HOME"]).expanduser().absolute() if env.get("NBUTILS_HOME") else None
    if platform.name == "kaggle":
        work = root / "kaggle/working"
        return Folders(work, root / "kaggle/temp", home or work / "runs", root / "kaggle/input")
    if platform.name in ("colab", "colab_enterprise"):
        work = root / "content"
        keep = drive.runs_folder(root) if drive.is_mounted(root) else work / "runs"
        return Folders(work, work / "scratch", home or keep, None, (work / "runs",))
    if platform.name == "autodl":
        work = root / "root/autodl-tmp"
        lasting = root / "root/autodl-fs"
        keep = (lasting if lasting.is_dir() else work) / "runs"
        return Folders(work, work / "scratch", home or keep, None, (work / "runs",))
    work = CHECKOUT or Path.cwd()
    keep = home or work / "runs"
    return Folders(work, keep / ".scratch", keep, None)


def find_inputs(inputs: Path | None, marker: str) -> Iterator[Path]:
    """Every path below `inputs` whose end matches the glob `marker` ("checkpoints/checkpoint-*.json"), in order."""
    if inputs is None:
        return
    for place, inner, files in os.walk(inputs):
        here = Path(place)
        inner[:] = sorted(inner) if len(here.relative_to(inputs).parts) < DEEPEST_INPUT else []
        yield from (here / name for name in sorted([*inner, *files]) if (here / name).match(marker))
