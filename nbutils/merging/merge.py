"""`merge_adapter`: an adapter merged into its base, streamed from disk to disk, shard by shard.

Workers compute blocks of rows, the main thread writes them. The folder takes its name once all is on disk.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils import disk, files, platforms
from nbutils.errors import CourseError, require_choice
from nbutils.language import say, tr
from nbutils.merging.folder import (
    ADAPTER_CONFIG,
    ALL,
    CODES,
    FLOATS,
    INDEX,
    MIN_ROWS,
    QUANTIZED_SUFFIX,
    SINGLE,
    ModelFolder,
    StoredTensor,
    copy_companions,
    model_name,
    open_adapter,
    open_base,
    weights_fingerprint,
)
from nbutils.merging.weights import Factors, WeightPlan, compute_rows, plan_weights, read_factors, unties_head
from nbutils.record import Facts, RunFolder

ONTO = ("full", "dequantized")
MAX_WORKERS = 8
TOLERANCE = 1.01  # units in the last place in which a proof may differ: another CPU adds in another order
SPARE = 1.02  # of the weights' size on disk
# How lesson 03 loads the base in 4 bits; `dtype` is the one it is loaded in, None: the base's own.
FOUR_BIT: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "dtype": None}
Plans = Mapping[str, WeightPlan]


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. `reused`: the model was there already; `resumed_shards`: 0, a merge begins anew."""

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
        return tr(
            "merged: {merged} weights changed, {copied} copied: {folder} ({gib:.2f} GiB, {dtype})",
            merged=self.merged,
            copied=self.copied,
            folder=self.folder,
            gib=self.bytes / files.GIB,
            dtype=self.dtype,
        )

    def facts(self) -> Facts:
        """The report for facts.json."""
        return {"merge": asdict(self) | {"folder": str(self.folder)}}


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str = "auto",
    onto: str = "full",
    device: str = "cpu",
    quantization: Mapping[str, Any] | None = None,
    replace_other: bool = True,
) -> MergeReport:
    """Write base + adapter to `out`; a finished merge of them is reused.

    `dtype`: float32, float16, bfloat16 or auto, the base's own; `device`: cpu or cuda. `onto`: full, or dequantized,
    the base as 4-bit training saw it. `replace_other`: whether another model of this course may be replaced there.

    Example: `merging.merge_adapter("Qwen/Qwen3-0.6B", "runs/first/adapter", "runs/first/merged", dtype="bfloat16")`
    """
    require_choice("onto", onto, ONTO)
    model, trained = _open_both(base, Path(adapter))
    out = Path(out)
    files.require_apart(out, model.path, trained.path)
    if dtype == "auto":
        dtype = model.dtype
    four_bit = FOUR_BIT | dict(quantization or {}) if onto == "dequantized" else None
    plans = plan_weights(model, trained, dtype, four_bit)
    about: Facts = {  # the same on every machine
        "base": model.name,
        "base_mark": weights_fingerprint(model),
        "adapter": files.stamp(trained.path) or weights_fingerprint(trained),
        "dtype": dtype,
        "onto": onto,
    }
    if four_bit and quantization:
        about["quantization"] = dict(quantization)
    changed = sum(plan.is_tuned for plan in plans.values())
    report = MergeReport(
        folder=out,
        base=model.name,
        adapter=str(adapter),
        dtype=dtype,
        onto=onto,
        device=device,
        merged=changed,
        copied=len(plans) - changed,
        bytes=sum(plan.size for plan in plans.values()),
        untied=unties_head(model, trained),
    )
    if files.stamp(out) == about:
        return replace(report, reused=True)
    is_adapter = (out / ADAPTER_CONFIG).exists()  # the last name on a command line, OUT was forgotten
    if is_adapter or (not replace_other and (out / files.STAMP).exists()):
        raise CourseError(
            "{folder} holds another model, or an adapter.",
            todo="Name another folder as the last argument; --replace replaces a model.",
            folder=out,
        )
    return _write_model(model, plans, report, about, trained.path)


def _open_both(base: str | Path, adapter: Path) -> tuple[ModelFolder, ModelFolder]:
    """The base and its adapter; an adapter of another base is refused by its name."""
    trained = open_adapter(adapter)
    trained_on = str(trained.config.get("base_model_name_or_path") or base)
    if _bare_name(trained_on) != _bare_name(base):
        raise CourseError(
            "The adapter was trained on {trained_on}, the base is {base}.",
            todo="Use the MODEL of lesson 03, or another RUN_NAME; if it is the same model, give its folder that name.",
            trained_on=trained_on,
            base=base,
        )
    return open_base(base), trained


def _bare_name(base: str | Path) -> str:
    """The name without owner and quantization."""
    name = Path(model_name(base)).name
    return QUANTIZED_SUFFIX.sub("", name).lower()


def check(base: str | Path, adapter: Path, onto: str, method: str) -> None:
    """Stop early: base and adapter must fit, and `dequantized` needs an adapter that qlora trained on 4 bits.

    Example: `merging.check("Qwen/Qwen3-0.6B", Path("runs/first/adapter"), onto="full", method="qlora")`
    """
    require_choice("MERGE_ONTO", onto, ONTO if method == "qlora" else ("full",))
    plan_weights(*_open_both(base, adapter))


def size_gib(base: str | Path, adapter: Path, dtype: str = "auto") -> float:
    """GiB of disk that the merged model will take, with a little to spare."""
    plans = plan_weights(*_open_both(base, adapter), dtype)
    size = sum(plan.size for plan in plans.values())
    return size * SPARE / files.GIB + 0.05


def choose_folder(run: RunFolder, scratch: Path, gib: float) -> Path:
    """Where a merged model of `gib` goes: the run folder if it fits, else scratch, with a note for later lessons.

    Example: `folder = merging.choose_folder(lesson.run, lesson.scratch, gib=16)`
    """
    if run.has("04_merge"):
        return run.merged
    kept = run.path / "merged"
    if disk.free_gib(run.path) + disk.folder_gib(files.partial_of(kept)) >= gib:
        run.elsewhere.unlink(missing_ok=True)
        return kept
    folder = files.make_folder(scratch) / "merged"
    files.write_json(run.elsewhere, {"folder": str(folder)})
    say(
        "[WARN] no room for {gib:.1f} GiB in {run}: the merged model is in {folder}, which may not last",
        gib=gib,
        run=run.path,
        folder=folder,
    )
    return folder


def _write_model(model: ModelFolder, plans: Plans, report: MergeReport, about: Facts, adapter: Path) -> MergeReport:
    """Write the shards, and the files beside them."""
    from tqdm.auto import tqdm

    out = report.folder
    started = time.perf_counter()
    files.make_folder(out.parent)
    bar = tqdm(total=report.bytes, unit="B", unit_scale=True, desc=tr("merging"))
    with bar, files.complete_folder(out, about) as folder:
        disk.require_disk(folder, report.bytes * SPARE / files.GIB)
        _write_weights(folder, plans, report.device, bar)
        copy_companions(folder, model, adapter, report.dtype, report.untied)
    return replace(report, seconds=time.perf_counter() - started)


def cast_model(source: str | Path, out: Path, dtype: str) -> None:
    """Write a model with all its weights in another dtype, also those that transformers would leave out."""
    from tqdm.auto import tqdm

    model = open_base(source)
    plans = {}
    for name, tensor in model.weights.items():
        code = CODES[dtype] if tensor.dtype in FLOATS else tensor.dtype
        plans[name] = WeightPlan(tensor, tensor.file.name, code)
    with tqdm(disable=True) as bar:
        _write_weights(out, plans, "cpu", bar)
    copy_companions(out, model, model.path, dtype, untied=False)


def _write_weights(folder: Path, plans: Plans, device: str, bar: Any) -> None:
    """Write the shards; of several, an index says what is in which."""
    shards = sorted({plan.shard for plan in plans.values()})
    with _one_thread():
        for shard in shards:
            part = {name: plan for name, plan in plans.items() if plan.shard == shard}
            write_shard(folder / shard, part, device, bar)
    if shards != [SINGLE]:
        index = {
            "metadata": {"total_size": sum(plan.size for plan in plans.values())},
            "weight_map": {name: plan.shard for name, plan in plans.items()},
        }
        files.write_json(folder / INDEX, index)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let each worker compute on one core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_shard(file: Path, plans: Plans, device: str, bar: Any) -> None:
    """Compute and write one shard."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, plan in plans.items():
        end = offset + plan.size
        entries[name] = {"dtype": plan.dtype, "shape": plan.source.shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(file, "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for content in _compute_blocks(plans, device):
            out.write(content)
            bar.update(len(content))


def _compute_blocks(plans: Plans, device: str) -> Iterator[memoryview]:
    """The merged weights as bytes, in order, computed a few blocks ahead of the disk."""
    workers = min(MAX_WORKERS, math.ceil(platforms.processors()))
    if device != "cpu" or any(plan.dequantized for plan in plans.values()):  # a dequantized weight is computed whole
        workers = 1
    pending: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for plan in plans.values():
            factors = read_factors(plan, device)
            blocks = [ALL] if plan.dequantized else plan.source.blocks()
            for rows in blocks:
                pending.append(pool.submit(_compute_block, plan, factors, rows, device))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _compute_block(plan: WeightPlan, factors: Factors, rows: slice, device: str) -> memoryview:
    """Some rows of a merged weight as bytes; a result with infinite or undefined numbers is refused."""
    import torch

    if plan.dtype == plan.source.dtype and not (plan.is_tuned or plan.dequantized):
        return plan.source.read(rows)
    with torch.inference_mode():
        weight = compute_rows(plan, factors, rows, device)
        if not math.isfinite(weight.sum()) and not bool(weight.isfinite().all()):  # the sum is quick
            todo = tr("Use bfloat16 or float32: float16 ends at 65,504.")
            if plan.is_tuned:
                todo = tr("Merge in bfloat16 or float32; if that fails too, train again at a lower learning rate.")
            seen = tr("A weight has infinite or undefined values in the precision to be written.")
            raise CourseError(seen, todo=todo)
        return weight.view(-1).view(torch.uint8).numpy().data


def prove(base: str | Path, adapter: Path, folder: Path, *, onto: str = "full") -> str:
    """Compute some rows of every weight again: it finds a forgotten layer, another adapter, a changed file."""
    merged = open_base(folder)
    four_bit = FOUR_BIT if onto == "dequantized" else None
    plans = plan_weights(*_open_both(base, adapter), merged.dtype, four_bit)
    compared = {name: plan for name, plan in plans.items() if not plan.dequantized}  # those are computed whole
    indexed = files.read_object(folder / INDEX).get("weight_map", merged.weights)
    different = sorted((plans.keys() ^ merged.weights.keys()) | (plans.keys() ^ indexed.keys()))
    different = different or [name for name, plan in compared.items() if not _rows_agree(plan, merged.weights[name])]
    if different:
        raise CourseError(
            "{weight} in {folder} is not base + adapter.",
            todo="Delete that folder and run the merge again.",
            weight=different[0],
            folder=folder,
        )
    return tr(
        "computed again: rows of {compared} of {count} weights, all as written",
        compared=len(compared),
        count=len(plans),
    )


def _rows_agree(plan: WeightPlan, written: StoredTensor) -> bool:
    """Whether the first and the last rows of a written weight are what the plan gives, up to rounding."""
    import torch

    if (plan.source.shape, plan.dtype) != (written.shape, written.dtype):
        return False
    if written.dtype not in FLOATS:
        return written.read(ALL) == plan.source.read(ALL)
    factors = read_factors(plan)
    for rows in (slice(MIN_ROWS), slice(-MIN_ROWS, None)):
        actual = written.tensor(rows)
        expected = compute_rows(plan, factors, rows)
        step = torch.finfo(actual.dtype).eps
        noise = step * 1e-3 * expected.double().abs().mean()
        if not torch.allclose(actual.double(), expected.double(), rtol=TOLERANCE * step, atol=float(noise)):
            return False
    return True
