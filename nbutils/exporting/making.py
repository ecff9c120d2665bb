"""One export: from a merged folder to a folder (or a GGUF file in one) that is whole or not there at all.

Not here: what it takes (planning), the arithmetic (inside), casting (merging.cast_model), whether it is still the
same model (checking).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import paths
from nbutils.errors import CourseError
from nbutils.exporting import planning, process
from nbutils.exporting.formats import Format, find
from nbutils.merging import cast_model, marks
from nbutils.merging.bases import Base, open_base
from nbutils.merging.companions import TOKENIZER

NOTE = "export.json"


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
        lesson = "    # or lesson 05 with FOLDER set to it" if self.load.startswith("vllm") else ""
        return (
            f"{self.name}: {self.bytes / 1e6:,.1f} MB, {self.ratio:.2f} of the merged model ({self.method}; {made})\n"
            f"  {self.file or self.folder}\n  {self.load}{lesson}"
        )


def export(
    merged: Path, name: str, out: Path | None = None, *, calibration: Sequence[Any] = (), progress: bool = True
) -> Export:
    """Write a merged model in another format; a finished export of this very model is reused.

    `calibration` are train rows, texts or token lists: AWQ needs them, and with them w4a16 is made by GPTQ, or, where
    the memory does not hold the whole model, by plain rounding all the same.
    """
    form, base = find(name), open_base(merged)
    out = out or merged.parent / "exports" / name
    paths.require_apart(out, base.folder)
    if form.work == "cast":
        return _cast(base, form, out, progress)
    job = planning.job_for(form, base, calibration)
    made_before = paths.stamp(out) == _about(form, base, job)
    if job["do"] == "calibrate" and not made_before and planning.leave_rows_out(form, base, job):
        job = planning.job_for(form, base, ())
    method, about = planning.method_of(job), _about(form, base, job)
    if paths.stamp(out) == about:
        return _finished(form, out, base, method, reused=True)
    planning.require_room(form, base, out, whole=form.whole or job["do"] == "calibrate")
    paths.make_folder(out.parent, "exports")
    if progress:
        print(f"Exporting {merged} as {name} ({method}).", flush=True)
        if former := paths.stamp(out):
            print(f"  It takes the place of one made otherwise ({former.get('method', 'unknown')}).", flush=True)
    began = time.monotonic()
    with paths.whole_folder(out, about) as folder, ExitStack() as things:
        source = _sixteen_bits(base, form, folder, things)
        process.run(form.needs, job | _places(form, source, folder), f"the export {name}", progress)
        if form.work != "gguf":
            _copy_missing(base.folder, folder)
        paths.write_json(folder / NOTE, {"format": name, "method": method, "seconds": time.monotonic() - began})
    return _finished(form, out, base, method)


def _about(form: Format, base: Base, job: dict[str, Any]) -> dict[str, Any]:
    """What an export was made from and how: two that are equal need not be made twice."""
    made_from = (paths.stamp(base.folder) or {}).get("base", "")
    return {
        "format": form.name, "base": made_from, "method": planning.method_of(job), "of": marks.of_model(base),
        "rows": _digest(job.get("rows", [])),
    }  # fmt: skip


def _places(form: Format, source: Path, folder: Path) -> dict[str, str]:
    found = {"source": source, "out": folder, "file": _gguf(form, folder)}
    return {name: str(place.absolute()) for name, place in found.items()}


def _gguf(form: Format, folder: Path) -> Path:
    return folder / f"model-{form.setting}.gguf"


def _sixteen_bits(base: Base, form: Format, folder: Path, things: ExitStack) -> Path:
    """The folder to start from: vLLM's formats keep some weights as they are, and those should have 16 bits."""
    if base.dtype != "float32" or form.work not in ("compress", "calibrate"):
        return base.folder
    place = things.enter_context(tempfile.TemporaryDirectory(prefix=".sixteen-", dir=folder))  # goes with the attempt
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
    paths.make_folder(out.parent, "exports")
    report = cast_model(base.folder, out, form.setting, progress=progress)
    sizes = weights_bytes(out), weights_bytes(base.folder)
    return Export(form.name, out, base.folder, *sizes, report.seconds, f"cast to {form.setting}", reused=report.reused)


def _finished(form: Format, out: Path, base: Base, method: str, reused: bool = False) -> Export:
    seconds = 0.0
    with suppress(OSError, ValueError, KeyError, TypeError):  # only told, so a damaged note does no harm
        seconds = float(json.loads((out / NOTE).read_text(encoding="utf-8"))["seconds"])
    file = _gguf(form, out) if form.work == "gguf" else None
    sizes = weights_bytes(out), weights_bytes(base.folder)
    return Export(form.name, out, base.folder, *sizes, seconds, method, file, reused)


def opened(folder: Path, merged: Path) -> Export:
    """An export that was made earlier from this merged model."""
    about = paths.stamp(folder) or {}
    if "of" not in about or not (merged / "config.json").is_file() or about["of"] != marks.of_model(open_base(merged)):
        made = "of another model" if "of" in about else "that lesson 04 did not make, or that is not whole"
        raise CourseError(
            f"{folder} is a quantised model {made}, and there is nothing to compare it with.",
            f"an export of {merged}",
            f"name it in EXPORTS of lesson 04 and take what is then in {merged.parent / 'exports'}; or set RUN_NAME to "
            "the run it comes from",
        )  # fmt: skip
    return _finished(find(about["format"]), folder, open_base(merged), about["method"], reused=True)


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    files = [file for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind)]
    return sum(file.stat().st_size for file in files)


def _digest(rows: Sequence[Any]) -> str:
    text = json.dumps(rows, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
