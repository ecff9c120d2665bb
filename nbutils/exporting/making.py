"""One export: from a merged folder to a folder (or a GGUF file in one) that is whole or not there at all.

Not here: the arithmetic (inside), casting (merging.cast_model), whether it is still the same model (checking).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nbutils import disk, paths, platforms
from nbutils.errors import CourseError
from nbutils.exporting import process
from nbutils.exporting.formats import Format, find
from nbutils.merging import cast_model
from nbutils.merging.bases import Base, open_base
from nbutils.merging.companions import TOKENIZER

NOTE = "export.json"
GROUPS = (128, 64, 32)  # what vLLM's 4-bit kernels take
MOST_ROWS, BLOCK = 256, 512  # rows of a calibration, and tokens of the blocks they are joined to
SAMPLES, SAMPLE = 32, 2**16  # places of a file, and bytes at each, that tell two models apart


@dataclass(frozen=True)
class Export:
    """A finished export; `file` is the GGUF file, if it is one."""

    name: str
    folder: Path
    merged: Path
    bytes: int
    merged_bytes: int
    seconds: float
    method: str
    file: Path | None = None
    reused: bool = False

    @property
    def ratio(self) -> float:
        """Its size as a share of the merged model's."""
        return self.bytes / self.merged_bytes

    @property
    def load(self) -> str:
        """The line that loads it."""
        return find(self.name).load.format(path=self.file or self.folder)

    def __str__(self) -> str:
        made = "made before" if self.reused else f"{self.seconds:.0f} s"
        return (
            f"{self.name}: {self.bytes / 1e6:,.1f} MB, {self.ratio:.2f} of the merged model ({self.method}; {made})\n"
            f"  {self.file or self.folder}\n  {self.load}"
        )


def export(
    merged: Path, name: str, out: Path | None = None, *, calibration: Sequence[Any] = (), progress: bool = True
) -> Export:
    """Write a merged model in another format; a finished export of this very model is reused.

    `calibration` are train rows, texts or token lists: AWQ needs them, and with them w4a16 is made by GPTQ.
    """
    form, base = find(name), open_base(merged)
    out = out or merged.parent / "exports" / name
    if form.work == "cast":
        return _cast(base, form, out, progress)
    job = _job(form, base, calibration)
    method = _method(job, len(job.get("rows", ())))
    made_from = (paths.stamp(base.folder) or {}).get("base", "")
    about = {
        "format": name,
        "base": made_from,
        "method": method,
        "of": mark(base.folder),
        "rows": _digest(job.get("rows", [])),
    }
    if paths.stamp(out) == about:
        return _finished(form, out, base, method, reused=True)
    _require_room(form, base, out, whole=form.whole or job["do"] == "calibrate")
    paths.make_folder(out.parent, "exports")
    if progress:
        print(f"Exporting {merged} as {name} ({method}).", flush=True)
    began = time.monotonic()
    with paths.whole_folder(out, about) as folder, ExitStack() as things:
        source = _sixteen_bits(base, form, folder, things)
        process.run(form.needs, job | _places(form, source, folder), f"the export {name}", progress)
        if form.work != "gguf":
            _copy_missing(base.folder, folder)
        paths.write_json(folder / NOTE, {"format": name, "method": method, "seconds": time.monotonic() - began})
    return _finished(form, out, base, method)


def _job(form: Format, base: Base, calibration: Sequence[Any]) -> dict[str, Any]:
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


def _method(job: dict[str, Any], rows: int) -> str:
    """How it is made, in words."""
    groups = f", groups of {job['group']}" if job["group"] else ""
    if job["do"] == "calibrate":
        return f"{job['setting'].upper()} on {rows} rows{groups}"
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


def _places(form: Format, source: Path, folder: Path) -> dict[str, str]:
    found = {"source": source, "out": folder, "file": _gguf(form, folder)}
    return {name: str(place.absolute()) for name, place in found.items()}


def _gguf(form: Format, folder: Path) -> Path:
    return folder / f"model-{form.setting}.gguf"


def _sixteen_bits(base: Base, form: Format, folder: Path, things: ExitStack) -> Path:
    """The folder to start from: vLLM's formats keep some weights as they are, and those should have 16 bits."""
    if base.dtype != "float32" or form.work not in ("compress", "calibrate"):
        return base.folder
    place = things.enter_context(tempfile.TemporaryDirectory(prefix=".sixteen-", dir=folder.parent))
    return cast_model(base.folder, Path(place) / base.folder.name, "bfloat16", progress=False).folder


def _copy_missing(merged: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation settings belong to the export too; what is no part of it goes."""
    for pattern in (*TOKENIZER, "generation_config.json"):
        for file in merged.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    for name in (paths.STAMP, "training.json"):
        (folder / name).unlink(missing_ok=True)


def _cast(base: Base, form: Format, out: Path, progress: bool) -> Export:
    """Another type, streaming; a model that has it already is its own export."""
    if base.dtype == form.setting:
        size = weights_bytes(base.folder)
        return Export(form.name, base.folder, base.folder, size, size, 0.0, "it was merged in this type", reused=True)
    if paths.stamp(base.folder) is None:
        shutil.rmtree(out, ignore_errors=True)  # nothing says whether it was made from this very model
    paths.make_folder(out.parent, "exports")
    report = cast_model(base.folder, out, form.setting, progress=progress)
    sizes = weights_bytes(out), weights_bytes(base.folder)
    return Export(form.name, out, base.folder, *sizes, report.seconds, f"cast to {form.setting}", reused=report.reused)


def _finished(form: Format, out: Path, base: Base, method: str, reused: bool = False) -> Export:
    seconds = json.loads((out / NOTE).read_text(encoding="utf-8"))["seconds"]
    file = _gguf(form, out) if form.work == "gguf" else None
    sizes = weights_bytes(out), weights_bytes(base.folder)
    return Export(form.name, out, base.folder, *sizes, seconds, method, file, reused)


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    files = [file for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind)]
    return sum(file.stat().st_size for file in files)


def _require_room(form: Format, base: Base, out: Path, whole: bool) -> None:
    """Stop before a long job that the disk or the memory cannot hold."""
    full = sum(place.size for place in base.weights.values()) / paths.GIB
    sixteen = full / 2 if base.dtype == "float32" else full
    between = sixteen if base.dtype == "float32" and form.work in ("compress", "calibrate") else 0.0
    disk.require_disk(out.parent, sixteen * form.size * 1.1 + between + 0.02, f"the export {form.name}")
    free = min(psutil.virtual_memory().available / paths.GIB, platforms.memory_gib().value)
    wanted = full * 1.2 + 1.0
    if whole and free < wanted:
        raise CourseError(
            f"{form.name} needs the whole model in memory, {wanted:.1f} GiB, and {free:.1f} GiB are free here.",
            f"at least {wanted:.1f} GiB",
            "stop other notebooks; fp8, the gguf formats, and w4a16 without calibration rows need far less",
        )  # fmt: skip


def mark(folder: Path) -> str:
    """A checksum over samples of all weights and the settings: two models have two, and it takes no time."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for place in range(SAMPLES):
                opened.seek(max(0, size - SAMPLE) * place // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()[:16]


def _digest(rows: Sequence[Any]) -> str:
    text = json.dumps(rows, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
