"""`python -m nbutils export`: what can be made here, or the exports that were asked for, each beside its parity line.

Not here: making (making), comparing (checking).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils import dashboard, hardware, paths
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.exporting import checking
from nbutils.exporting.formats import find
from nbutils.exporting.making import export
from nbutils.exporting.offering import offer
from nbutils.merging.bases import open_base


def answer(folder: Path, names: Sequence[str], out: Path | None, data: Path | None, check: bool) -> None:
    """Make and check the exports that were named; show what there is if none was."""
    if not names:
        dashboard.show_table([one.row for one in offer(hardware.card())])
        return
    rows = read_rows(data) if data else []
    forms = [find(name) for name in names]  # all of them, before the first is made
    open_base(folder)  # what is no model is refused before its tokenizer is looked for
    lines, reference, held_back = [], None, checked_on(folder)
    fixed = checking.quick_set(folder, read_rows(held_back)) if check else None
    for form in forms:
        made = export(folder, form.name, out / form.name if out else None, calibration=rows)
        print(made)
        if fixed:
            reference = reference or (checking.read_merged(made, fixed) if checking.readable(made) else None)
            lines.append(checking.check(made, fixed, reference))
    if fixed:
        print(f"Compared on {len(fixed.texts)} rows of {held_back}; only tables of the same rows compare.")
        dashboard.show_table(checking.table(lines))


def checked_on(folder: Path) -> Path:
    """The rows an export is compared on: those its run held back, else general questions; never those of --data."""
    of_run = folder.parent / "data/eval.jsonl"
    return of_run if of_run.is_file() else paths.SAMPLES / "general.jsonl"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The chat rows of a file that lesson 02 wrote."""
    try:
        rows = stored_rows(file)
        whole = bool(rows) and all(row["messages"][-1]["content"] for row in rows)
    except (ValueError, KeyError, TypeError, IndexError):
        whole = False
    if not whole:
        raise CourseError(
            f"{file} holds something else than chat rows.", "a train.jsonl of lesson 02",
            "let `python -m nbutils data check FILE --out FOLDER` write one from your data",
        )  # fmt: skip
    return rows
