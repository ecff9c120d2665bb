"""`merge_adapter`: an adapter merged into its base, streamed from disk to disk, shard by shard.

Workers compute blocks of rows, and the main thread writes them in order. A shard takes its
name when it is on disk, so an interrupted merge continues with the next one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import disk, files, platforms
from nbutils.errors import CourseError
from nbutils.merging import folder as model_folder
from nbutils.merging.adapters import FOUR_BIT, Apply, WeightPlan, plan_weights, quantized_weights, round_trip
from nbutils.merging.folder import ModelFolder, open_adapter, open_base
from nbutils.merging.safetensors_io import CODES, FLOATS, MIN_ROWS, StoredTensor, make_header, split_rows

if TYPE_CHECKING:
    import torch

    from nbutils.lesson import Lesson

ALLOWED = {
    "dtype": ("auto", "float32", "float16", "bfloat16"), "onto": ("full", "dequantized"), "device": ("cpu", "cuda"),
}  # fmt: skip
JOURNAL = "journal.json"
MAX_WORKERS = 8
TOLERANCE = 1.01  # units in the last place in which a proof may differ: another CPU adds in another order
Shards = Mapping[str, Mapping[str, WeightPlan]]  # file name -> weight name -> plan


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. `resumed_shards`: written by an interrupted merge; `reused`: the model was there already."""

    folder: Path
    base: str
    adapter: str
    dtype: str
    onto: str
    device: str
    merged: int
    copied: int
    bytes: int
    seconds: float = 0.0
    resumed_shards: int = 0
    reused: bool = False
    untied: bool = False

    def __str__(self) -> str:
        size = f"{self.bytes / files.GIB:.2f} GiB, {self.dtype}"
        if self.reused:
            return f"merged: {self.folder} ({size}) is there already, made from this very adapter: nothing to do"
        text = f"merged: {self.merged} weights changed, {self.copied} copied: {self.folder} ({size})"
        resumed = f", {self.resumed_shards} files from an interrupted merge" if self.resumed_shards else ""
        return f"{text} in {self.seconds:.1f} s on {self.device}{resumed}"

    def facts(self) -> dict[str, Any]:
        """The report for facts.json."""
        return {"merge": asdict(self) | {"folder": str(self.folder)}}


def merge_adapter(
    base: str | Path, adapter: str | Path | Sequence[Path], out: str | Path, *, dtype: str = "auto", onto: str = "full",
    device: str = "cpu", quantization: Mapping[str, Any] | None = None, progress: bool = True,
    replace_other: bool = True,
) -> MergeReport:  # fmt: skip
    """Write base + adapter (or several, one after another) to `out`; a finished merge of them is reused.

    `replace_other`: whether a model that this course made from something else may be replaced there.
    """
    for parameter, value in {"dtype": dtype, "onto": onto, "device": device}.items():
        if value not in (allowed := ALLOWED[parameter]):
            raise CourseError("merging.unknown_value", parameter=parameter, value=value, allowed=", ".join(allowed))
    base, adapters, out = os.path.expanduser(base), adapter_paths(adapter), Path(out).expanduser()
    for one in adapters:
        check_base(base, one)
    model = open_base(base)
    files.require_apart(out, model.path, *adapters)
    if (out / model_folder.ADAPTER_CONFIG).exists():  # the last name on a command line may be an adapter
        raise CourseError("merging.out_is_adapter", folder=out)
    plans, untied = plan_weights(model, [open_adapter(one) for one in adapters])
    if onto == "dequantized":
        names = quantized_weights(model.path)
        settings = FOUR_BIT | dict(quantization or {})
        in_4_bits = {name: one for name, one in plans.items() if name in names and not one.replaced}
        plans |= {name: replace(one, dequantized=settings) for name, one in in_4_bits.items()}
    dtype = model.dtype if dtype == "auto" else dtype
    fingerprints = [model_folder.adapter_fingerprint(one) for one in adapters]
    about = {  # the same on every machine
        "base": model.name, "base_mark": model_folder.model_fingerprint(model), "dtype": dtype, "onto": onto,
        "adapter": fingerprints[0] if len(fingerprints) == 1 else fingerprints,
    }  # fmt: skip
    if quantization and onto == "dequantized":
        about["quantization"] = dict(quantization)
    changed = sum(plan.changed for plan in plans.values())
    report = MergeReport(
        out, model.name, ", ".join(str(one) for one in adapters), dtype, onto, device, changed, len(plans) - changed,
        _size_bytes(plans, dtype), untied=untied,
    )  # fmt: skip
    if files.stamp(out) == about:
        return replace(report, reused=True)
    if not replace_other and (out / files.STAMP).exists():
        raise CourseError("merging.other_model", folder=out)
    return _write_model(model, plans, report, about, adapters[-1], progress)


def check(lesson: Lesson, onto: str) -> None:
    """Stop a lesson early: base and adapter must fit, and there must be a 4-bit base to merge onto if one is named."""
    if onto not in ALLOWED["onto"] or (onto == "dequantized" and lesson.profile.method != "qlora"):
        raise CourseError("merging.wrong_onto", onto=onto, method=lesson.profile.method)
    check_base(lesson.model, lesson.run.adapter)


def check_base(base: str | Path, adapter: Path) -> None:
    """Refuse a quantized base, and an adapter of another one; headers are compared if the base is on this machine."""
    config = model_folder.read_config(adapter / model_folder.ADAPTER_CONFIG)
    trained_on = str(config.get("base_model_name_or_path") or base)
    names = (Path(model_folder.model_name(one)).name for one in (trained_on, base))
    if len({model_folder.QUANTIZED_SUFFIX.sub("", name).lower() for name in names}) > 1:
        raise CourseError("merging.wrong_base", trained_on=trained_on, base=base)
    if found := model_folder.find_folder(base, download=False):
        plan_weights(open_base(found), [open_adapter(adapter)])


def size_gib(base: str | Path, adapter: Path, dtype: str = "auto") -> float:
    """GiB of disk that the merged model will take, with a little to spare."""
    plans, _ = plan_weights(open_base(base), [open_adapter(adapter)])
    return _gib(_size_bytes(plans, dtype)) + 0.05


def choose_folder(lesson: Lesson, dtype: str = "auto") -> Path:
    """Where the merged model goes: the run folder if it fits there, else scratch, with a note for later lessons."""
    run = lesson.run
    if run.has("04_merge"):
        return run.merged
    kept, gib = run.path / "merged", size_gib(lesson.model, run.adapter, dtype)
    if disk.free_gib(run.path) + disk.folder_gib(files.partial_of(kept)) >= gib:
        run.elsewhere.unlink(missing_ok=True)
        return kept
    folder = files.make_folder(lesson.scratch, "the merged model") / "merged"
    files.write_json(run.elsewhere, {"folder": str(folder)})
    print(f"[WARN] no room for {gib:.1f} GiB in {run.path}: the merged model goes to {folder}, which may not last")
    return folder


def adapter_paths(adapter: str | Path | Sequence[Path]) -> list[Path]:
    """One adapter or several, as a list."""
    given = [adapter] if isinstance(adapter, str | Path) else adapter
    return [Path(one).expanduser() for one in given]


def target_dtype(tensor: StoredTensor, dtype: str) -> str:
    """The safetensors dtype a weight is written in; integers keep theirs."""
    return tensor.dtype if dtype == "auto" or not tensor.is_float else CODES[dtype]


def _gib(size: int) -> float:
    return size * 1.02 / files.GIB  # with a little to spare


def _size_bytes(plans: Mapping[str, WeightPlan], dtype: str) -> int:
    return sum(plan.source.size_as(target_dtype(plan.source, dtype)) for plan in plans.values())


def _write_model(
    model: ModelFolder, plans: Mapping[str, WeightPlan], report: MergeReport, about: dict[str, Any],
    adapter: Path, progress: bool,
) -> MergeReport:  # fmt: skip
    """Write all shards and the files beside them."""
    from tqdm.auto import tqdm

    out, started = report.folder, time.perf_counter()
    files.make_folder(out.parent, "the merged model")
    written = disk.folder_gib(files.partial_of(out))  # by an interrupted merge
    disk.require_disk(out.parent, max(0.0, _gib(report.bytes) - written) + 0.05, "writing the merged model")
    shards = {file: {name: plans[name] for name in weights} for file, weights in model.shards.items()}
    for name in plans.keys() - model.weights.keys():  # an untied output layer goes beside the embedding
        next(one for one in shards.values() if any("embed_tokens" in each for each in one))[name] = plans[name]
    stats = [(model.path / name).stat() for name in model.shards]
    source = json.dumps([about, [(stat.st_size, stat.st_mtime_ns) for stat in stats]], sort_keys=True)
    bar = tqdm(total=report.bytes, unit="B", unit_scale=True, desc="merging", disable=not progress)
    alone = report.device != "cpu" or report.onto == "dequantized"  # a dequantized weight is computed whole
    workers = 1 if alone else max(1, min(MAX_WORKERS, int(platforms.processors().value)))
    writer = ShardWriter(report.dtype, report.device, workers, bar.update)
    try:
        with bar, files.complete_folder(out, about, resume=True) as folder:
            resumed = writer.write_all(folder, shards, hashlib.sha256(source.encode()).hexdigest())
            model_folder.copy_companions(folder, model, adapter, report.dtype, report.untied)
            (folder / JOURNAL).unlink()  # last: until then an interrupted merge continues
    except OSError as problem:
        raise CourseError("merging.write_failed", folder=out, problem=problem.strerror or problem) from problem
    return replace(report, seconds=time.perf_counter() - started, resumed_shards=resumed)


@dataclass(frozen=True)
class ShardWriter:
    """Computes and writes shards in this dtype, with so many workers."""

    dtype: str
    device: str
    workers: int
    progress: Callable[[int], Any]

    def write_all(self, folder: Path, shards: Shards, source: str) -> int:
        """Write the shards that an interrupted merge of the same source has not finished; how many it had."""
        finished = _finished_shards(folder, source)
        for name, plans in shards.items():
            if name in finished:
                self.progress(_size_bytes(plans, self.dtype))
            else:
                self.write(folder / name, plans)
        if len(shards) > 1:
            weight_map = {name: file for file, plans in shards.items() for name in plans}
            size = sum(_size_bytes(plans, self.dtype) for plans in shards.values())
            files.write_json(folder / model_folder.INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        return len(finished)

    def write(self, file: Path, plans: Mapping[str, WeightPlan]) -> None:
        """Write one shard; it takes its name when it is on disk."""
        partial = file.with_suffix(".partial")
        sources = {name: (plan.source, target_dtype(plan.source, self.dtype)) for name, plan in plans.items()}
        header = make_header({name: (dtype, one.shape, one.size_as(dtype)) for name, (one, dtype) in sources.items()})
        with open(partial, "wb") as out, one_thread_per_worker():
            out.write(header)
            for data in self._blocks(plans):
                out.write(data)
                self.progress(len(data))
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)

    def _blocks(self, plans: Mapping[str, WeightPlan]) -> Iterator[memoryview]:
        """The merged weights as bytes, in order, computed a few blocks ahead of the disk."""
        pending: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            for name, plan in plans.items():
                plan = plan if plan.by_rows else replace(plan, source=plan.source.flat)
                updates = [update.load(self.device) for update in plan.updates]
                for first, last in plan.source.blocks(whole=bool(plan.dequantized)):
                    pending.append(pool.submit(self._block, name, plan, updates, first, last))
                    if len(pending) > 2 * self.workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _block(self, name: str, plan: WeightPlan, updates: list[Apply], first: int, last: int) -> memoryview:
        """Some rows of a merged weight as bytes."""
        import torch

        dtype = target_dtype(plan.source, self.dtype)
        if not plan.changed and not plan.dequantized and plan.source.dtype == dtype:
            return plan.source.read(first, last)
        with torch.inference_mode():
            rows = compute_rows(plan, updates, dtype, first, last, self.device)
            if not math.isfinite(rows.sum()) and not bool(rows.isfinite().all()):  # the sum is quick
                raise CourseError("merging.not_finite", weight=name, dtype=FLOATS[dtype])
            return rows.view(-1).view(torch.uint8).numpy().data


def compute_rows(
    plan: WeightPlan, updates: Sequence[Apply], dtype: str, first: int, last: int, device: str = "cpu"
) -> torch.Tensor:
    """Some rows of a merged weight: every update added in float32, rounded once to `dtype`."""
    import torch

    stored = plan.source.tensor(first, last).to(device)
    base = round_trip(stored, plan.dequantized) if plan.dequantized else stored.float()
    weight = base.clone() if len(updates) > 1 else base
    for apply in updates:
        weight = apply(weight, base, first, last)
    return weight.to("cpu", getattr(torch, FLOATS[dtype]))


@contextmanager
def one_thread_per_worker() -> Iterator[None]:
    """Let each worker compute on one CPU core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _finished_shards(folder: Path, source: str) -> list[str]:
    """The shards an interrupted merge of the same source finished; everything else is removed."""
    try:
        same = files.read_json(folder / JOURNAL) == source
    except (OSError, ValueError):
        same = False
    for one in folder.iterdir():
        if not (same and one.suffix == ".safetensors" and one.is_file() and not one.is_symlink()):
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
    files.write_json(folder / JOURNAL, source)
    return [one.name for one in folder.glob("*.safetensors")]


def prove(base: str | Path, adapter: str | Path | Sequence[Path], folder: Path, *, onto: str = "full") -> str:
    """Compute the first and last rows of every weight again from base and adapter; refuse a model that differs.

    It finds a forgotten layer, another adapter's weights or a changed file, which hardly move a model's answers.
    """
    model, merged = open_base(base), open_base(folder).weights
    plans, _ = plan_weights(model, [open_adapter(one) for one in adapter_paths(adapter)])
    whole = quantized_weights(model.path) if onto == "dequantized" else set()
    compared = {name: plan for name, plan in plans.items() if name not in whole}
    with one_thread_per_worker():
        differing = sorted(plans.keys() ^ merged.keys()) or (
            name for name, plan in compared.items() if not _is_as_planned(plan, merged[name])
        )
        for name in differing:
            raise CourseError("merging.not_proven", weight=name, folder=folder)
    changed = sum(plan.changed for plan in compared.values())
    left_out = f"; {len(whole)} can only be computed whole and were left out" if whole else ""
    return f"computed again: rows of {len(compared)} weights, {changed} of them tuned, all as written{left_out}"


def _is_as_planned(plan: WeightPlan, written: StoredTensor) -> bool:
    """Whether the beginning and the end of a weight are what the plan makes."""
    import torch

    if plan.source.shape != written.shape:
        return False
    ranges = list(split_rows(0, written.rows, MIN_ROWS))
    for first, last in {*ranges[:1], *ranges[-1:]}:
        if not written.is_float:
            same = plan.source.read(first, last) == written.read(first, last)
        else:
            expected = compute_rows(plan, [one.load("cpu") for one in plan.updates], written.dtype, first, last)
            found, expected = written.tensor(first, last), expected.double()
            step = torch.finfo(found.dtype).eps
            allowed = TOLERANCE * step * expected.abs() + step * 1e-3 * expected.abs().mean()
            same = bool(((found.double() - expected).abs() <= allowed).all())
        if not same:
            return False
    return True
