"""`merge_adapter`: an adapter merged into its base, streamed from disk to disk, shard by shard.

Workers compute blocks of rows, and the main thread writes them in order. A finished shard is on disk with its checksum
in a journal, so an interrupted merge continues with the next one.
"""

from __future__ import annotations

import errno
import functools
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

from nbutils import disk, paths, platforms
from nbutils.errors import CourseError
from nbutils.merging import dequantize, safetensors_io
from nbutils.merging import folder as model_folder
from nbutils.merging.adapters import Apply, WeightPlan, plan_weights
from nbutils.merging.folder import ModelFolder, open_adapter, open_base
from nbutils.merging.safetensors_io import CODES, FLOATS, SIZES, StoredTensor, make_header, split_rows

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "float16", "bfloat16")
ONTO = ("full", "dequantized")
JOURNAL = "journal.json"
MAX_WORKERS = 8


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
    seconds: float
    resumed_shards: int = 0
    reused: bool = False
    untied: bool = False

    def __str__(self) -> str:
        size = f"{self.bytes / paths.GIB:.2f} GiB, {self.dtype}"
        if self.reused:
            return f"merged: {self.folder} ({size}) is there already, made from this very adapter: nothing to do"
        text = f"merged: {self.merged} weights changed, {self.copied} copied: {self.folder} ({size})"
        text += f" in {self.seconds:.1f} s on {self.device}"
        text += ", onto the dequantized 4-bit base" if self.onto == "dequantized" else ""
        text += f"; {self.resumed_shards} files were there from an interrupted merge" if self.resumed_shards else ""
        return text + ("; the output layer now has a weight of its own" if self.untied else "")

    def facts(self) -> dict[str, Any]:
        """The report for facts.json."""
        return asdict(self) | {"folder": str(self.folder)}


def merge_adapter(
    base: str | Path, adapter: str | Path | Sequence[Path], out: str | Path, *, dtype: str = "auto", onto: str = "full",
    device: str = "cpu", quantization: Mapping[str, Any] | None = None, progress: bool = True,
    replace_other: bool = True,
) -> MergeReport:  # fmt: skip
    """Write base + adapter (or several, one after another) to `out`; a finished merge of them is reused.

    `replace_other`: whether a model that this course made from something else may be replaced there.
    """
    _require_one_of("dtype", dtype, DTYPES)
    _require_one_of("onto", onto, ONTO)
    _require_one_of("device", device.partition(":")[0], ("cpu", "cuda"))
    base, adapters, out = os.path.expanduser(base), adapter_paths(adapter), Path(out).expanduser()
    for one in adapters:
        check_base(base, one)
    model = open_base(base)
    paths.require_apart(out, model.path, *adapters)
    if (out / model_folder.ADAPTER_CONFIG).exists():  # the last name on a command line may be an adapter
        raise CourseError("merging.out_is_adapter", folder=out)
    plans, untied = plan_weights(model, [open_adapter(one) for one in adapters])
    four_bit = dequantize.DEFAULTS | dict(quantization or {})
    if onto == "dequantized":
        names = dequantize.quantized_weights(model.path)
        plans = {name: replace(one, dequantized=name in names and not one.replaced) for name, one in plans.items()}
    dtype = model.dtype if dtype == "auto" else dtype
    about = describe(model, adapters, dtype, onto, quantization if onto == "dequantized" else None)
    changed = sum(plan.changed for plan in plans.values())
    report = MergeReport(
        out, model.name, ", ".join(str(one) for one in adapters), dtype, onto, device, changed, len(plans) - changed,
        _size_bytes(plans, dtype), 0.0, untied=untied,
    )  # fmt: skip
    found = paths.stamp(out)
    if found != about and not replace_other and (out / paths.STAMP).exists():
        found = found or {}
        raise CourseError("merging.other_model", folder=out, base=found.get("base"), dtype=found.get("dtype"))
    return _write_model(model, plans, report, about, four_bit, adapters[-1], progress)


def cast_model(base: str | Path, out: Path, dtype: str, *, progress: bool = True) -> MergeReport:
    """Write a model in another dtype, as a merge without an adapter."""
    _require_one_of("dtype", dtype, DTYPES[1:])
    model = open_base(base)
    paths.require_apart(out, model.path)
    plans, _ = plan_weights(model, [])
    fingerprint = model_folder.model_fingerprint(model)
    about = {"model": model.name, "dtype": dtype, "of": paths.stamp(model.path), "mark": fingerprint}
    size = _size_bytes(plans, dtype)
    report = MergeReport(out, model.name, "", dtype, "full", "cpu", 0, len(plans), size, 0.0)
    return _write_model(model, plans, report, about, dequantize.DEFAULTS, None, progress)


def check_base(base: str | Path, adapter: Path) -> None:
    """Refuse a quantized base, and an adapter that was trained on another one or does not fit its weights.

    Names and shapes are compared if the base is on this machine; only headers are read.
    """
    config = model_folder.read_config(adapter / model_folder.ADAPTER_CONFIG)
    trained_on = str(config.get("base_model_name_or_path") or base)
    if Path(base).is_dir():
        model_folder.require_unquantized(base, model_folder.read_config(Path(base) / "config.json"))
    names = (Path(model_folder.model_name(one)).name for one in (trained_on, base))
    if len({model_folder.QUANTIZED_SUFFIX.sub("", name).lower() for name in names}) > 1:
        raise CourseError("merging.wrong_base", trained_on=trained_on, base=base)
    if found := model_folder.find_folder(base, download=False):
        plan_weights(open_base(found), [open_adapter(adapter)])


def describe(
    base: str | Path | ModelFolder, adapter: Path | Sequence[Path], dtype: str, onto: str = "full",
    quantization: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the stamp of a merged model says: what it was made from, the same on every machine."""
    model = base if isinstance(base, ModelFolder) else open_base(base)
    adapters = [model_folder.adapter_fingerprint(one) for one in adapter_paths(adapter)]
    return {
        "base": model.name, "base_mark": model_folder.model_fingerprint(model), "dtype": dtype, "onto": onto,
        "adapter": adapters[0] if len(adapters) == 1 else adapters,
        **({"quantization": dict(quantization)} if quantization else {}),
    }  # fmt: skip


def size_gib(base: str | Path, adapter: Path, dtype: str = "auto") -> float:
    """GiB of disk that the merged model will take, with a little to spare."""
    plans, _ = plan_weights(open_base(base), [open_adapter(adapter)])
    return _size_bytes(plans, dtype) * 1.02 / paths.GIB + 0.05


def adapter_paths(adapter: str | Path | Sequence[Path]) -> list[Path]:
    """One adapter or several, as a list."""
    given = [adapter] if isinstance(adapter, str | Path) else list(adapter)
    if not given:
        raise CourseError("merging.no_adapter")
    return [Path(one).expanduser() for one in given]


def target_dtype(tensor: StoredTensor, dtype: str) -> str:
    """The safetensors dtype a weight is written in; integers keep theirs."""
    return tensor.dtype if dtype == "auto" or not tensor.is_float else CODES[dtype]


def _size_bytes(plans: Mapping[str, WeightPlan], dtype: str) -> int:
    return sum(plan.source.elements * SIZES[target_dtype(plan.source, dtype)] for plan in plans.values())


def _require_one_of(parameter: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CourseError("merging.unknown_value", parameter=parameter, value=value, allowed=", ".join(allowed))


def _write_model(
    model: ModelFolder, plans: Mapping[str, WeightPlan], report: MergeReport, about: dict[str, Any],
    four_bit: Mapping[str, Any], adapter: Path | None, progress: bool,
) -> MergeReport:  # fmt: skip
    """Write all shards and the files beside them, unless the very same model is there already."""
    from tqdm.auto import tqdm

    out, started = report.folder, time.perf_counter()
    if paths.stamp(out) == about:
        return replace(report, reused=True)
    workers = max(1, min(MAX_WORKERS, int(platforms.processors().value))) if report.device == "cpu" else 2
    paths.make_folder(out.parent, "the merged model")
    written = disk.folder_gib(paths.partial_of(out))  # by an interrupted merge
    needed = max(0.0, report.bytes * 1.02 / paths.GIB - written) + 0.05
    disk.require_disk(out.parent, needed, "writing the merged model")
    shards = {file: {name: plans[name] for name in weights} for file, weights in model.shards.items()}
    for name in plans.keys() - model.weights.keys():  # an untied output layer goes beside the embedding
        next(one for one in shards.values() if any("embed_tokens" in each for each in one))[name] = plans[name]
    stats = [(model.path / name).stat() for name in model.shards]
    source = json.dumps([about, [(stat.st_size, stat.st_mtime_ns) for stat in stats]], sort_keys=True)
    bar = tqdm(total=report.bytes, unit="B", unit_scale=True, desc="merging", disable=not progress)
    writer = ShardWriter(report.dtype, report.device, four_bit, workers, bar.update)
    try:
        with bar, paths.whole_folder(out, about, resume=True) as folder:
            resumed = writer.write_all(folder, shards, hashlib.sha256(source.encode()).hexdigest())
            model_folder.copy_companions(folder, model, adapter, report.dtype, report.untied)
            (folder / JOURNAL).unlink()  # last: until then an interrupted merge continues
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CourseError("merging.disk_full", folder=out, needed=report.bytes / paths.GIB) from problem
        raise CourseError("merging.write_failed", folder=out, problem=problem.strerror or problem) from problem
    return replace(report, seconds=time.perf_counter() - started, resumed_shards=resumed)


@dataclass(frozen=True)
class ShardWriter:
    """Computes and writes shards in this dtype, with so many workers."""

    dtype: str
    device: str
    four_bit: Mapping[str, Any]
    workers: int
    progress: Callable[[int], Any]

    def write_all(self, folder: Path, shards: Mapping[str, Mapping[str, WeightPlan]], source: str) -> int:
        """Write the shards that an interrupted merge of the same source has not finished; how many it had."""
        checksums = _finished_shards(folder, source)
        resumed = len(checksums)
        for name, plans in shards.items():
            if name in checksums:
                self.progress(_size_bytes(plans, self.dtype))
            else:
                checksums[name] = self.write(folder / name, plans)
                paths.write_json(folder / JOURNAL, {"of": source, "shards": checksums})
        if len(shards) > 1:
            weight_map = {name: file for file, plans in shards.items() for name in plans}
            size = sum(_size_bytes(plans, self.dtype) for plans in shards.values())
            paths.write_json(folder / model_folder.INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        return resumed

    def write(self, file: Path, plans: Mapping[str, WeightPlan]) -> str:
        """Write one shard to disk; its checksum."""
        import xxhash

        header = make_header(
            {name: (target_dtype(plan.source, self.dtype), plan.source.shape) for name, plan in plans.items()}
        )
        digest = xxhash.xxh3_64(header)
        with open(file, "wb") as out, one_thread_per_worker():
            out.write(header)
            for data in self._in_order(self._blocks(plans)):
                out.write(data)
                digest.update(data)
                self.progress(len(data))
            out.flush()
            os.fsync(out.fileno())
        return str(digest.hexdigest())

    def _in_order(self, jobs: Iterator[tuple[bool, Callable[[], memoryview]]]) -> Iterator[memoryview]:
        """The results in order, a few blocks ahead of the disk; a job that holds a whole weight runs alone."""
        pending: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            for alone, job in jobs:
                while len(pending) > (0 if alone else 2 * self.workers):
                    yield pending.popleft().result()
                pending.append(pool.submit(job))
                if alone:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _blocks(self, plans: Mapping[str, WeightPlan]) -> Iterator[tuple[bool, Callable[[], memoryview]]]:
        for name, plan in plans.items():
            plan = plan if plan.by_rows else replace(plan, source=plan.source.flat)
            updates = [update.load(self.device) for update in plan.updates]
            for first, last in plan.source.blocks(whole=plan.dequantized):
                yield plan.dequantized, functools.partial(self._block, name, plan, updates, first, last)

    def _block(self, name: str, plan: WeightPlan, updates: list[Apply], first: int, last: int) -> memoryview:
        """Some rows of a merged weight as bytes."""
        import torch

        dtype = target_dtype(plan.source, self.dtype)
        if not plan.changed and not plan.dequantized and plan.source.dtype == dtype:
            return plan.source.read(first, last)
        with torch.inference_mode():
            rows = compute_rows(plan, updates, dtype, first, last, self.device, self.four_bit)
            if not math.isfinite(rows.sum()) and not bool(rows.isfinite().all()):  # the sum is quick
                raise CourseError("merging.not_finite", weight=name, dtype=FLOATS[dtype])
            return rows.view(-1).view(torch.uint8).numpy().data


def compute_rows(
    plan: WeightPlan, updates: Sequence[Apply], dtype: str, first: int, last: int, device: str = "cpu",
    four_bit: Mapping[str, Any] = dequantize.DEFAULTS,
) -> torch.Tensor:  # fmt: skip
    """Some rows of a merged weight: every update added in float32, rounded once to `dtype`."""
    import torch

    stored = plan.source.tensor(first, last)
    made = torch.empty(stored.shape, dtype=getattr(torch, FLOATS[dtype]))
    whole = plan.dequantized or device != "cpu"
    for begin, end in split_rows(first, last, last - first if whole else safetensors_io.STEP // plan.source.width):
        rows = stored[begin - first : end - first].to(device)
        base = dequantize.round_trip(rows, four_bit) if plan.dequantized else rows.float()
        weight = base.clone() if len(updates) > 1 else base
        for apply in updates:
            weight = apply(weight, base, begin, end)
        made[begin - first : end - first] = weight
    return made


@contextmanager
def one_thread_per_worker() -> Iterator[None]:
    """Let each worker compute on one CPU core, and a GPU compute products in full float32."""
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _finished_shards(folder: Path, source: str) -> dict[str, str]:
    """Checksums of the shards an interrupted merge of the same source finished; everything else is removed."""
    try:
        journal = paths.read_json(folder / JOURNAL)
        written = dict(journal["shards"]) if journal["of"] == source else {}
    except (OSError, ValueError, KeyError, TypeError):
        written = {}
    finished = {name: checksum for name, checksum in written.items() if _checksum(folder / name) == checksum}
    for other in folder.iterdir():
        if other.name not in finished and not (finished and other.name == JOURNAL):
            shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()
    return finished


def _checksum(file: Path) -> str:
    """The checksum of a plain file; "" of anything else."""
    import xxhash

    if file.is_symlink() or not file.is_file():
        return ""
    digest = xxhash.xxh3_64()
    with open(file, "rb") as opened:
        while piece := opened.read(paths.CHUNK):
            digest.update(piece)
    return str(digest.hexdigest())
