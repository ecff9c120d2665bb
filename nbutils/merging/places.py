"""Where a merged model goes when the run folder has no room for it.

Not here: how large it will be (checks.size_gib) and how it is written (streaming).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbutils import disk
from nbutils.paths import make_folder, partial_of, write_json

if TYPE_CHECKING:
    from nbutils.lessons import RunFolder
    from nbutils.platforms import Folders


def choose_place(run: RunFolder, folders: Folders, gib: float) -> Path:
    """The run folder if the merged model fits there, else scratch, told in a line and noted for the next lessons."""
    if run.has("04_merge"):
        return run.merged
    kept = run.path / "merged"
    if disk.free_gib(run.path) + disk.folder_gib(partial_of(kept)) >= gib:
        run.elsewhere.unlink(missing_ok=True)
        return kept
    scratch = make_folder(folders.scratch / run.name, "the merged model") / "merged"
    begun = disk.folder_gib(partial_of(scratch))  # an interrupted merge goes on, and has taken its room already
    disk.require_disk(scratch.parent, max(0.0, gib - begun), "the merged model")
    write_json(run.elsewhere, {"folder": str(scratch)})
    print(
        f"[WARN] {run.path} has no room for {gib:.1f} GiB: the merged model goes to {scratch}, which is not kept when "
        "this machine ends. The adapter is kept, and merging it again takes minutes."
    )
    return scratch
