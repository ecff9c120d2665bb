"""What an export takes: the job, how it is made in words, and whether disk and memory hold it.

Not here: doing it (making), which formats there are (formats).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils import disk, hardware, paths, platforms
from nbutils.errors import CourseError
from nbutils.exporting.formats import Format
from nbutils.merging.bases import Base

GROUPS = (128, 64, 32)  # what vLLM's 4-bit kernels take
MOST_ROWS, BLOCK = 256, 512  # rows of a calibration, and tokens of the blocks they are joined to
LONG_GIB = 2.0  # of weights: a calibration on a CPU is then a matter of hours


def job_for(form: Format, base: Base, calibration: Sequence[Any]) -> dict[str, Any]:
    """What to do: with calibration rows 4 bits are chosen by GPTQ, without by rounding."""
    rows = list(calibration)[:: max(1, len(calibration) // MOST_ROWS)][:MOST_ROWS]
    if form.setting == "awq" and not rows:
        raise CourseError(
            "awq looks at data while it rounds, and no rows were given.", "some of the rows the model was trained on",
            "give them as calibration (on the command line: --data train.jsonl), or take w4a16, which needs none",
        )  # fmt: skip
    four_bits = form.setting in ("W4A16", "awq")
    job = {"do": form.work, "setting": form.setting, "group": group_size(base) if four_bits else 0}
    if four_bits and rows:
        setting = "awq" if form.setting == "awq" else "gptq"
        return job | {
            "do": "calibrate",
            "setting": setting,
            "rows": rows,
            "length": min(BLOCK, base.config.get("max_position_embeddings", BLOCK)),
        }
    return job


def leave_rows_out(form: Format, base: Base, job: dict[str, Any]) -> bool:
    """Whether the rows are to be left out, for want of memory; told, as is a calibration that takes very long."""
    full, free, wanted = memory_of(base)
    way = job["setting"].upper()
    if free < wanted and form.work == "compress":
        print(
            f"[WARN] {form.name}: {way} needs the whole model in memory, {wanted:.1f} GiB, and {free:.1f} GiB are "
            "free. It is rounded file by file instead, without looking at your rows: a little coarser.", flush=True,
        )  # fmt: skip
        return True
    if free >= wanted and full > LONG_GIB and hardware.card() is None:
        print(
            f"[WARN] {form.name}: {way} runs your rows through {full:.1f} GiB of weights, and without a card that "
            "takes very long, hours for a 7B. fp8, and w4a16 without calibration rows, take minutes.", flush=True,
        )  # fmt: skip
    return False


def method_of(job: dict[str, Any]) -> str:
    """How it is made, in words."""
    groups = f", groups of {job['group']}" if job["group"] else ""
    if job["do"] == "calibrate":
        return f"{job['setting'].upper()} on {len(job['rows'])} rows{groups}"
    return {"compress": f"{job['setting']}, rounded without data{groups}", "gguf": f"GGUF {job['setting']}",
            "int8": "8-bit integers for every row of a weight"}[job["do"]]  # fmt: skip


def group_size(base: Base) -> int:
    """The largest group that divides the width of every layer."""
    layers = {name: place.shape for name, place in base.weights.items() if len(place.shape) == 2}
    widths = {shape[1] for name, shape in layers.items() if "embed" not in name and "lm_head" not in name}
    found = next((size for size in GROUPS if not any(width % size for width in widths)), 0)
    if found:
        return found
    odd = sorted(width for width in widths if width % GROUPS[-1])
    raise CourseError(
        f"this model has layers {odd[0]} wide, which cannot be cut into groups of {GROUPS[-1]}.",
        f"widths that can be divided by one of {', '.join(map(str, GROUPS))}", "take fp8 or a gguf format instead",
    )  # fmt: skip


def require_room(form: Format, base: Base, out: Path, whole: bool) -> None:
    """Stop before a long job that the disk or the memory cannot hold."""
    full, free, wanted = memory_of(base)
    sixteen = full / 2 if base.dtype == "float32" else full
    between = sixteen if base.dtype == "float32" and form.work in ("compress", "calibrate") else 0.0
    disk.require_disk(out.parent, sixteen * form.size * 1.1 + between + 0.02, f"the export {form.name}")
    if whole and free < wanted:
        raise CourseError(
            f"{form.name} needs the whole model in memory, {wanted:.1f} GiB, and {free:.1f} GiB are free here.",
            f"at least {wanted:.1f} GiB", "stop other notebooks; fp8, w4a16 and the gguf formats need far less",
        )  # fmt: skip


def memory_of(base: Base) -> tuple[float, float, float]:
    """GiB of a model's weights, of free memory, and what a work needs that holds the whole model."""
    full = sum(place.size for place in base.weights.values()) / paths.GIB
    return full, platforms.free_memory_gib().value, full * 1.2 + 1.0
