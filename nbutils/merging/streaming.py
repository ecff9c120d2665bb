"""`merge_adapter`: an adapter put into its base, shard by shard, into a folder that is whole or not there.

Not here: the arithmetic (formula), one shard (writing), the checks before it (checks), the proof afterwards (parity).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils import disk, paths, platforms
from nbutils.errors import CourseError
from nbutils.merging import bases, checks, dequantized, marks, plan
from nbutils.merging.companions import write_companions, write_index
from nbutils.merging.formula import Recipe
from nbutils.merging.readback import intact
from nbutils.merging.writing import JOURNAL, Journal, Workshop

DTYPES = ("auto", "float32", "float16", "bfloat16")
ONTO = ("full", "dequantized")
MOST_WORKERS = 8


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. `resumed_shards`: finished by an earlier start; `reused`: the folder was there already."""

    folder: Path
    base: str
    adapter: str
    dtype: str
    onto: str
    device: str
    merged: int
    copied: int
    bytes: int
    seconds: float
    resumed_shards: int = 0
    reused: bool = False
    untied: bool = False

    def __str__(self) -> str:
        size = f"{self.bytes / paths.GIB:.2f} GiB, {self.dtype}"
        if self.reused:
            return f"merged: {self.folder} ({size}) is there already and of this very adapter: nothing to do"
        form = ", onto the dequantised 4-bit base" if self.onto == "dequantized" else ""
        resumed = f"; {self.resumed_shards} files were there from an interrupted merge" if self.resumed_shards else ""
        untied = "; the output layer now has a weight of its own, as the adapter gave it one" if self.untied else ""
        speed = self.bytes / max(self.seconds, 1e-9) / 1e6
        return (
            f"merged: {self.merged} weights changed, {self.copied} copied{form}: {self.folder} ({size}) "
            f"in {self.seconds:.1f} s, {speed:,.0f} MB/s on {self.device}, on the disk, verified{resumed}{untied}"
        )

    def facts(self) -> dict[str, Any]:
        """The report for a record; the folder as text."""
        return asdict(self) | {"folder": str(self.folder)}


def merge_adapter(
    base: str | Path, adapter: str | Path | Sequence[Path], out: str | Path, *, dtype: str = "auto", onto: str = "full",
    device: str = "cpu", quantization: Mapping[str, Any] | None = None, progress: bool = True,
    replace_other: bool = True,
) -> MergeReport:  # fmt: skip
    """Write base + adapter (or several, one after another) to `out`, streaming; a finished merge of them is kept.

    `replace_other`: whether a model this course made of something else may be replaced there.
    """
    began = time.perf_counter()
    _require_known("dtype", dtype, DTYPES)
    _require_known("onto", onto, ONTO)
    checks.require_device(device)
    base, adapters, out = os.path.expanduser(base), checks.adapters_of(adapter), Path(out).expanduser()
    for one in adapters:
        checks.check_base(base, one)
    opened = bases.open_base(base)
    checks.require_place(out, opened.folder, adapters)
    recipes, untied = plan.recipes(opened, [bases.open_adapter(one) for one in adapters])
    form = dequantized.settings(quantization)
    if onto == "dequantized":
        recipes = _through_four_bits(opened, recipes)
    written = opened.dtype if dtype == "auto" else dtype
    about = checks.describe(opened, adapters, written, onto, quantization if onto == "dequantized" else None)
    changed = sum(recipe.changed for recipe in recipes.values())
    report = MergeReport(
        out, opened.called, ", ".join(str(one) for one in adapters), written, onto, device, changed,
        len(recipes) - changed, checks.size_bytes(recipes, written), 0.0, untied=untied,
    )  # fmt: skip
    if paths.stamp(out) == about:
        return replace(report, reused=True)
    if not replace_other:
        checks.require_new(out)
    return _make(opened, recipes, report, about, form, adapters, progress, began)


def cast_model(model: str | Path, out: Path, dtype: str, *, progress: bool = True) -> MergeReport:
    """Write a model in another type, streaming, as a merge without an adapter."""
    began = time.perf_counter()
    _require_known("dtype", dtype, DTYPES[1:])
    opened = bases.open_base(model)
    checks.require_place(out, opened.folder, [])
    recipes, _ = plan.recipes(opened, [])
    about = {"model": opened.called, "dtype": dtype, "of": paths.stamp(opened.folder), "mark": marks.of_model(opened)}
    size = checks.size_bytes(recipes, dtype)
    report = MergeReport(out, opened.called, "", dtype, "full", "cpu", 0, len(recipes), size, 0.0)
    if paths.stamp(out) == about:
        return replace(report, reused=True)
    return _make(opened, recipes, report, about, dequantized.DEFAULTS, [], progress, began)


def _make(
    base: bases.Base, recipes: dict[str, Recipe], report: MergeReport, about: dict[str, Any],
    form: Mapping[str, Any], adapters: list[Path], progress: bool, began: float,
) -> MergeReport:  # fmt: skip
    """Write all shards and what belongs beside them, continuing an interrupted merge."""
    from tqdm.auto import tqdm

    out = report.folder
    workers = max(1, min(MOST_WORKERS, int(platforms.processors().value))) if report.device == "cpu" else 2
    left = disk.folder_gib(paths.partial_of(out)) * paths.GIB
    paths.make_folder(out.parent, "the merged model")
    checks.require_room(out, report.bytes, int(left), recipes.values(), workers)
    bar = tqdm(total=report.bytes, unit="B", unit_scale=True, desc="merging", disable=not progress)
    try:
        with bar, paths.whole_folder(out, about, resume=True) as folder:
            workshop = Workshop(report.dtype, report.device, form, workers, bar.update)
            resumed = _write_shards(folder, workshop, _by_shard(base, recipes), {"about": about, "base": _files(base)})
            write_companions(folder, base, adapters[-1] if adapters else None, report.dtype, report.untied)
            (folder / JOURNAL).unlink()  # last: until then an interrupted merge goes on from here
    except OSError as problem:
        raise _told(problem, report) from problem
    return replace(report, seconds=time.perf_counter() - began, resumed_shards=resumed)


def _told(problem: OSError, report: MergeReport) -> CourseError:
    """The error of a disk in plain words."""
    again = "run this again: the finished files are kept and the merge goes on"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f"{report.bytes / paths.GIB:.1f} GiB of free disk"
        return CourseError(f"the disk of {report.folder} filled up during the merge.", needed, f"make room and {again}")
    return CourseError(
        f"writing {report.folder} failed: {problem.strerror or problem}.", "a disk that takes files of several GB",
        f"look at that disk (read-only? a FAT stick?) or name a folder on another, and {again}",
    )  # fmt: skip


def _write_shards(folder: Path, workshop: Workshop, shards: dict[str, dict[str, Recipe]], of: dict[str, Any]) -> int:
    """Write the shards that are not there yet; how many were."""
    journal, resumed, places = Journal.open(folder, of), 0, {}
    for name, recipes in shards.items():
        _, places[name] = workshop.layout(folder / name, recipes)
        if name in journal.shards and intact(folder / name, journal.shards[name], workshop.workers):
            resumed += 1
            workshop.progress(sum(place.size for place in places[name].values()))
        else:
            journal.add(name, workshop.write(folder / name, recipes))
    write_index(folder, places)
    return resumed


def _by_shard(base: bases.Base, recipes: Mapping[str, Recipe]) -> dict[str, dict[str, Recipe]]:
    """The recipes by the file they go to: the base's own; an untied output layer goes with the embedding."""
    shards = {file: {name: recipes[name] for name in weights} for file, weights in base.shards.items()}
    extra = {name: recipe for name, recipe in recipes.items() if name not in base.weights}
    if extra:
        home = next(file for file, weights in shards.items() if any("embed_tokens" in name for name in weights))
        shards[home] |= extra
    return shards


def _files(base: bases.Base) -> list[Any]:
    """The base's files by size and date: shards of an interrupted merge count only for the same ones."""
    files = [(name, (base.folder / name).stat()) for name in base.shards]
    return [[name, seen.st_size, seen.st_mtime_ns] for name, seen in files]


def _through_four_bits(base: bases.Base, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes with the 4-bit form before the adapter, for every weight that training had in 4 bits."""
    dequantized.require_library()
    names = dequantized.quantised_modules(base.folder)
    return {name: replace(recipe, four_bit=name in names and not recipe.replaced) for name, recipe in recipes.items()}


def _require_known(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise CourseError(f"{what} is {given!r}.", ", ".join(known), f"set {what} to one of these")
