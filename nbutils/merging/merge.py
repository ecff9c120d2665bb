"""`merge_adapter`: an adapter merged into its base, streamed from disk to disk, shard by shard.

Every weight gets a plan; what cannot be merged exactly is refused before anything is written. Workers compute blocks of
rows, the main thread writes them. A shard takes its name when it is on disk: an interrupted merge goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import disk, files, models, platforms, record
from nbutils.config import BASE_KEEPING_INITS, UNMERGEABLE
from nbutils.errors import CourseError
from nbutils.language import joined, tr
from nbutils.merging import folder as model_folder
from nbutils.merging.folder import FLOATS, MIN_ROWS, ModelFolder, StoredTensor, open_adapter, open_base, split_rows

if TYPE_CHECKING:
    import torch

ALLOWED = {
    "dtype": ("auto", "float32", "float16", "bfloat16"), "onto": ("full", "dequantized"), "device": ("cpu", "cuda"),
}  # fmt: skip
JOURNAL = "journal.json"
MAX_WORKERS = 8
TOLERANCE = 1.01  # units in the last place in which a proof may differ: another CPU adds in another order
SPARE = 1.02  # of the weights' size on disk
# How lesson 03 loads the base in 4 bits; `dtype` is the one it is loaded in, None: the base's own.
FOUR_BIT: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "dtype": None}
HEAD = "lm_head.weight"
PARTS = re.compile(  # `base_layer`: PEFT also saves the untouched output layer beside a LoRA on it
    r"(.+?)\.(?:(lora_[AB])\.weight|(lora_magnitude_vector)(?:\.weight)?|(?:base_layer\.)?(weight|bias))"
)
# weight so far, weight of the base, first row, last row -> weight with the update
Apply = Callable[["torch.Tensor", "torch.Tensor", int, int], "torch.Tensor"]


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
        values = vars(self) | {"size": f"{self.bytes / files.GIB:.2f} GiB, {self.dtype}"}
        if self.reused:
            return tr("merged: {folder} ({size}) is there already, made from this adapter: nothing to do", **values)
        resumed = tr(", {resumed_shards} files from an interrupted merge", **values) if self.resumed_shards else ""
        values["size"] = joined([values["size"], f"{self.seconds:.1f} s, {self.device}"], ";")
        return tr("merged: {merged} weights changed, {copied} copied: {folder} ({size})", **values) + resumed

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
            raise CourseError(
                tr("{parameter} is {value!r}.", parameter=parameter, value=value),
                allowed=", ".join(allowed),
                todo=tr("Set {parameter} to one of these.", parameter=parameter),
            )
    base, out = os.path.expanduser(base), Path(out).expanduser()
    adapters = [Path(one).expanduser() for one in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    for one in adapters:
        check_base(base, one)
    model = open_base(base)
    files.require_apart(out, model.path, *adapters)
    if (out / model_folder.ADAPTER_CONFIG).exists():  # the last name on a command line may be an adapter
        raise CourseError(
            tr("{folder} is an adapter, and the merged model would replace it.", folder=out),
            todo=tr("Give the output folder as the last argument, after the adapters."),
        )
    plans, untied = plan_weights(model, [open_adapter(one) for one in adapters])
    if onto == "dequantized":
        names, settings = quantized_weights(model.path), FOUR_BIT | dict(quantization or {})
        in_4_bits = {name: one for name, one in plans.items() if name in names and not one.replaced}
        plans |= {name: replace(one, dequantized=settings) for name, one in in_4_bits.items()}
    dtype = model.dtype if dtype == "auto" else dtype
    fingerprints: list[Any] = []
    for one in adapters:  # the stamp of an adapter that lesson 03 wrote; of any other a checksum of its files
        parts = (model_folder.ADAPTER_CONFIG, model_folder.ADAPTER_WEIGHTS)
        content = "" if (stamp := files.stamp(one)) is not None else "".join(files.sha256(one / part) for part in parts)
        fingerprints.append(hashlib.sha256(content.encode()).hexdigest()[:16] if content else stamp)
    about = {  # the same on every machine
        "base": model.name, "base_mark": model_folder.weights_fingerprint(model), "dtype": dtype, "onto": onto,
        "adapter": fingerprints[0] if len(fingerprints) == 1 else fingerprints,
    }  # fmt: skip
    if quantization and onto == "dequantized":
        about["quantization"] = dict(quantization)
    changed = sum(bool(plan.updates or plan.replaced) for plan in plans.values())
    report = MergeReport(
        out, model.name, ", ".join(str(one) for one in adapters), dtype, onto, device, changed, len(plans) - changed,
        _size_bytes(plans, dtype), untied=untied,
    )  # fmt: skip
    if files.stamp(out) == about:
        return replace(report, reused=True)
    if not replace_other and (out / files.STAMP).exists():
        raise CourseError(
            tr("{folder} holds another model.", folder=out),
            todo=tr("Name another folder, or add --replace to replace it."),
        )
    return _write_model(model, plans, report, about, adapters[-1], progress)


def check(lesson: record.LessonLike, onto: str) -> None:
    """Stop a lesson early: base and adapter must fit, and there must be a 4-bit base to merge onto if one is named."""
    if onto not in ALLOWED["onto"] or (onto == "dequantized" and lesson.profile.method != "qlora"):
        raise CourseError(
            tr("MERGE_ONTO is {onto!r}, with method {method}.", onto=onto, method=lesson.profile.method),
            allowed=tr("full; or dequantized, for adapters that a qlora profile trained on 4 bits"),
            todo=tr('Set MERGE_ONTO = "full".'),
        )
    check_base(lesson.model, lesson.run.adapter)


def check_base(base: str | Path, adapter: Path) -> None:
    """Refuse a quantized base, and an adapter of another one, by the names and by the shapes of the weights."""
    config = models.read_config(adapter / model_folder.ADAPTER_CONFIG)
    trained_on = str(config.get("base_model_name_or_path") or base)
    names = (Path(model_folder.model_name(one)).name for one in (trained_on, base))
    if len({model_folder.QUANTIZED_SUFFIX.sub("", name).lower() for name in names}) > 1:
        raise CourseError(
            tr("The adapter was trained on {trained_on}, the base is {base}.", trained_on=trained_on, base=base),
            todo=tr(
                "Use the MODEL of lesson 03, or another RUN_NAME; if it is the same model, give its folder that name."
            ),
        )
    plan_weights(open_base(base), [open_adapter(adapter)])


def size_gib(base: str | Path, adapter: Path, dtype: str = "auto") -> float:
    """GiB of disk that the merged model will take, with a little to spare."""
    plans, _ = plan_weights(open_base(base), [open_adapter(adapter)])
    return _size_bytes(plans, dtype) * SPARE / files.GIB + 0.05


def choose_folder(lesson: record.LessonLike, dtype: str = "auto") -> Path:
    """Where the merged model goes: the run folder if it fits there, else scratch, with a note for later lessons."""
    run = lesson.run
    if run.has("04_merge"):
        return run.merged
    kept, gib = run.path / "merged", size_gib(lesson.model, run.adapter, dtype)
    if disk.free_gib(run.path) + disk.folder_gib(files.partial_of(kept)) >= gib:
        run.elsewhere.unlink(missing_ok=True)
        return kept
    folder = files.make_folder(lesson.scratch, tr("the merged model")) / "merged"
    files.write_json(run.elsewhere, {"folder": str(folder)})
    found = {"gib": gib, "run": run.path, "folder": folder}
    print(tr("[WARN] no room for {gib:.1f} GiB in {run}: the merged model is in {folder}, which may not last", **found))
    return folder


def _size_bytes(plans: Mapping[str, WeightPlan], dtype: str) -> int:
    return sum(plan.source.written_as(dtype)[1] for plan in plans.values())


@dataclass(frozen=True)
class LoraUpdate:
    """scale * B @ A is added; with a magnitude it is DoRA."""

    b: StoredTensor
    a: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None

    def load(self, device: str) -> Apply:
        """Read the factors; the function that applies them to a range of rows."""
        import torch

        b, a = (tensor.tensor().float().to(device) for tensor in (self.b, self.a))
        scale = self.scale
        if math.frexp(scale)[0] == 0.5:  # a power of two is exact: scaling B once gives the same bits
            b, scale = b * scale, 1.0
        magnitude = self.magnitude.tensor().float().to(device) if self.magnitude else None

        def apply(weight: torch.Tensor, base: torch.Tensor, first: int, last: int) -> torch.Tensor:
            delta = b[first:last] @ a
            delta = delta if scale == 1.0 else delta.mul_(scale)
            if magnitude is None:
                return weight.add_(delta)
            norm = torch.linalg.norm(base + delta, dim=1)
            return (magnitude[first:last] / norm).view(-1, 1) * (weight + delta)

        return apply


@dataclass(frozen=True)
class WeightPlan:
    """How one weight of the merged model is made: read from `source`, through 4 bits (settings), then updated."""

    source: StoredTensor
    updates: tuple[LoraUpdate, ...] = ()
    dequantized: Mapping[str, Any] | None = None
    replaced: bool = False  # by a weight of the adapter (modules_to_save)


def plan_weights(base: ModelFolder, adapters: Iterable[ModelFolder]) -> tuple[dict[str, WeightPlan], bool]:
    """The plan of every weight of the merged model, and whether its output layer was untied from the embedding."""
    plans = {name: WeightPlan(tensor) for name, tensor in base.weights.items()}
    untied = False
    for adapter in adapters:
        problems = [key for key in UNMERGEABLE if adapter.config.get(key)]  # only LoRA, rsLoRA and DoRA are merged
        if adapter.config.get("peft_type") != "LORA":
            problems.append(str(adapter.config.get("peft_type")))
        if init_changes_base(adapter.config):
            init = adapter.config["init_lora_weights"]
            problems.append(tr("init_lora_weights={init}, which changed the base", init=init))
        if problems:
            raise CourseError(
                tr("{folder} uses {kind}, which cannot be merged here.", folder=adapter.path, kind=problems[0]),
                allowed=tr("LoRA, rsLoRA and DoRA, with modules_to_save"),
                todo=tr("Merge it with PEFT's merge_and_unload on a machine with enough memory, or serve it unmerged."),
            )
        modules = _group_by_module(adapter)
        embedding = next((name for name in plans if name.endswith("embed_tokens.weight")), "")
        tied = base.config.get("tie_word_embeddings", HEAD not in base.weights)
        if tied and embedding and modules.keys() & {embedding.removesuffix(".weight"), HEAD.removesuffix(".weight")}:
            untied = True  # output layer and embedding may differ now
            plans.setdefault(HEAD, plans[embedding])
        for name, parts in modules.items():
            _add_module(plans, name, parts, adapter.config)
    return plans, untied


def init_changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter's init changed its base: such an adapter means nothing without that changed base."""
    init = config.get("init_lora_weights", True)
    return not isinstance(init, bool) and str(init).lower() not in BASE_KEEPING_INITS


def _group_by_module(adapter: ModelFolder) -> dict[str, dict[str, StoredTensor]]:
    """The adapter's tensors (lora_A, lora_B, ...; weight, bias: replacements) by the module they belong to."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in adapter.weights.items():
        match = PARTS.fullmatch(key.removeprefix("base_model.model."))
        if match is None or ".lora_" in match[1] or tensor.dtype not in FLOATS:
            raise CourseError(
                tr("The adapter holds {key} as {dtype}, which cannot be merged here.", key=key, dtype=tensor.dtype),
                allowed=tr("lora_A, lora_B, DoRA magnitudes and whole modules (modules_to_save), in 16 or 32 bits"),
                todo=tr(
                    "Save the adapter again with a current PEFT, or merge it with PEFT's merge_and_unload (a "
                    "LoRA on an embedding)."
                ),
            )
        part = next(part for part in match.groups()[1:] if part)
        modules.setdefault(match[1], {})[part] = tensor
    for name, parts in modules.items():
        missing = sorted({"lora_A", "lora_B"} - parts.keys())
        if len(missing) == 1 or (missing and "lora_magnitude_vector" in parts):
            raise CourseError(
                tr("The adapter has no {missing} for {module}.", module=name, missing=missing[0]),
                todo=tr("Download or save it again: a part of adapter_model.safetensors is missing."),
            )
    if not modules:
        raise CourseError(
            tr("The adapter has no {missing} for {module}.", module=tr("any module"), missing=tr("tensors")),
            todo=tr("Download or save it again: a part of adapter_model.safetensors is missing."),
        )
    return modules


def _add_module(
    plans: dict[str, WeightPlan], name: str, parts: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> None:
    """Put this adapter into the plans of a module's weight and bias."""
    for part in ("weight", "bias"):
        weight, has_lora = f"{name}.{part}", part == "weight" and "lora_A" in parts
        if not has_lora and part not in parts:
            continue
        if (before := plans.get(weight)) is None:
            raise CourseError(
                tr("The adapter changes {weight}, which the base does not have.", weight=weight),
                todo=tr("Use the base that adapter_config.json names."),
            )
        source, updates = parts.get(part, before.source), before.updates
        shapes = [source.shape]
        if has_lora:
            a, b = parts["lora_A"], parts["lora_B"]
            shapes.append((b.shape[0], a.shape[-1]))
            if (rank := a.rows) != config["r"]:
                raise CourseError(
                    tr(
                        "The weights of {module} have rank {rank}, but adapter_config.json gives another r.",
                        module=name,
                        rank=rank,
                    ),
                    todo=tr("Save the adapter again: the folder mixes two adapters."),
                )
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            updates = (*updates, LoraUpdate(b, a, scale, parts.get("lora_magnitude_vector")))
        for shape in shapes:
            if shape != before.source.shape:
                raise CourseError(
                    tr(
                        "The adapter was made for {weight} of shape {adapter}, the base has {base}.",
                        weight=weight,
                        adapter=shape,
                        base=before.source.shape,
                    ),
                    todo=tr(
                        "Use that base; if tokens were added before training, resize the base's embeddings and save "
                        "it first."
                    ),
                )
        replaced = before.replaced or not has_lora
        plans[weight] = replace(before, source=source, updates=updates, replaced=replaced)


def quantized_weights(folder: Path) -> set[str]:
    """The weights that transformers loads in 4 bits: linear layers, but not the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):  # no memory for weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    skipped = get_keys_to_not_convert(model)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return {f"{name}.weight" for name in linear if should_convert_module(name, skipped)}


def _write_model(
    model: ModelFolder, plans: Mapping[str, WeightPlan], report: MergeReport, about: dict[str, Any],
    adapter: Path, progress: bool,
) -> MergeReport:  # fmt: skip
    """Write the shards that an interrupted merge of the same source has not finished, and the files beside them."""
    import torch
    from tqdm.auto import tqdm

    out, started = report.folder, time.perf_counter()
    files.make_folder(out.parent, tr("the merged model"))
    needed = report.bytes * SPARE / files.GIB - disk.folder_gib(files.partial_of(out))  # of an interrupted merge
    disk.require_disk(out.parent, max(0.0, needed) + 0.05, tr("writing the merged model"))
    shards = {file: {name: plans[name] for name in weights} for file, weights in model.shards.items()}
    for name in plans.keys() - model.weights.keys():  # an untied output layer goes beside the embedding
        next(one for one in shards.values() if any("embed_tokens" in each for each in one))[name] = plans[name]
    stats = [(model.path / name).stat() for name in model.shards]
    source = json.dumps([about, [(stat.st_size, stat.st_mtime_ns) for stat in stats]], sort_keys=True)
    bar = tqdm(total=report.bytes, unit="B", unit_scale=True, desc=tr("merging"), disable=not progress)
    alone = report.device != "cpu" or report.onto == "dequantized"  # a dequantized weight is computed whole
    workers = 1 if alone else max(1, min(MAX_WORKERS, int(platforms.processors().value)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each worker computes on one core
    try:
        with bar, files.complete_folder(out, about, resume=True) as folder:
            finished = _finished_shards(folder, hashlib.sha256(source.encode()).hexdigest())
            for file, one in shards.items():
                if file in finished:
                    bar.update(_size_bytes(one, report.dtype))
                else:
                    write_shard(folder / file, one, report, workers, bar.update)
            if len(shards) > 1:
                weight_map = {name: file for file, one in shards.items() for name in one}
                index = {"metadata": {"total_size": report.bytes}, "weight_map": weight_map}
                files.write_json(folder / model_folder.INDEX, index)
            model_folder.copy_companions(folder, model, adapter, report.dtype, report.untied)
            (folder / JOURNAL).unlink()  # last: until then an interrupted merge continues
    except OSError as problem:
        raise CourseError(
            tr("Writing {folder} failed: {problem}.", folder=out, problem=problem.strerror or problem),
            todo=tr("Check that disk or name a folder on another one, and run this again: finished files are kept."),
        ) from problem
    finally:
        torch.set_num_threads(threads)
    return replace(report, seconds=time.perf_counter() - started, resumed_shards=len(finished))


def _finished_shards(folder: Path, source: str) -> list[str]:
    """The shards an interrupted merge of the same source finished; everything else is removed."""
    same = False
    with suppress(OSError, ValueError):
        same = files.read_json(folder / JOURNAL) == source
    for one in folder.iterdir():
        if not (same and one.suffix == ".safetensors" and one.is_file() and not one.is_symlink()):
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
    files.write_json(folder / JOURNAL, source)
    return [one.name for one in folder.glob("*.safetensors")]


def write_shard(
    file: Path, plans: Mapping[str, WeightPlan], report: MergeReport, workers: int, progress: Callable[[int], Any]
) -> None:
    """Compute and write one shard; it takes its name when it is on disk."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, plan in plans.items():
        code, size = plan.source.written_as(report.dtype)
        entries[name] = {"dtype": code, "shape": plan.source.shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    partial = file.with_suffix(".partial")
    with open(partial, "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for data in _compute_blocks(plans, report, workers):
            out.write(data)
            progress(len(data))
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


def _compute_blocks(plans: Mapping[str, WeightPlan], report: MergeReport, workers: int) -> Iterator[memoryview]:
    """The merged weights as bytes, in order, computed a few blocks ahead of the disk."""
    import torch

    def block(name: str, plan: WeightPlan, updates: list[Apply], first: int, last: int) -> memoryview:
        dtype, _ = plan.source.written_as(report.dtype)
        if plan.source.dtype == dtype and not (plan.updates or plan.replaced or plan.dequantized):
            return plan.source.read(first, last)
        with torch.inference_mode():
            rows = compute_rows(plan, updates, dtype, first, last, report.device)
            if not math.isfinite(rows.sum()) and not bool(rows.isfinite().all()):  # the sum is quick
                raise CourseError(
                    tr(
                        "{weight} has infinite or undefined values after the merge in {dtype}.",
                        weight=name,
                        dtype=FLOATS[dtype],
                    ),
                    todo=tr("Merge in bfloat16 or float32; if that fails too, train again at a lower learning rate."),
                )
            return rows.view(-1).view(torch.uint8).numpy().data

    pending: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for name, plan in plans.items():
            if not (plan.updates or plan.dequantized):  # in one dimension: a row of stacked experts is too large
                plan = replace(plan, source=replace(plan.source, shape=(math.prod(plan.source.shape),)))
            updates = [update.load(report.device) for update in plan.updates]
            for first, last in plan.source.blocks(whole=bool(plan.dequantized)):
                pending.append(pool.submit(block, name, plan, updates, first, last))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def compute_rows(
    plan: WeightPlan, updates: Sequence[Apply], dtype: str, first: int, last: int, device: str = "cpu"
) -> torch.Tensor:
    """Some rows of a merged weight: every update added in float32, rounded once to `dtype`."""
    import torch

    base = plan.source.tensor(first, last).to(device)
    if settings := plan.dequantized:  # the base as 4-bit training saw it
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        loaded = (base.to(getattr(torch, settings["dtype"])) if settings["dtype"] else base).contiguous()
        kind, double = settings["bnb_4bit_quant_type"], settings["bnb_4bit_use_double_quant"]
        base = dequantize_4bit(*quantize_4bit(loaded, quant_type=kind, compress_statistics=double))
    base = base.float()
    weight = base.clone() if len(updates) > 1 else base
    for apply in updates:
        weight = apply(weight, base, first, last)
    return weight.to("cpu", getattr(torch, FLOATS[dtype]))


def prove(base: str | Path, adapter: Path, folder: Path, *, onto: str = "full") -> str:
    """Compute some rows of every weight again: it finds a forgotten layer, another adapter, a changed file."""
    import torch

    model, merged = open_base(base), open_base(folder).weights
    plans, _ = plan_weights(model, [open_adapter(adapter)])
    whole = quantized_weights(model.path) if onto == "dequantized" else set()
    compared = {name: plan for name, plan in plans.items() if name not in whole}
    different = plans.keys() ^ merged.keys()
    for name, plan in compared.items() if not different else ():
        written, ranges = merged[name], list(split_rows(merged[name].rows, MIN_ROWS))
        same = plan.source.shape == written.shape
        for first, last in {*ranges[:1], *ranges[-1:]} if same else ():
            if written.dtype not in FLOATS:
                same &= plan.source.read(first, last) == written.read(first, last)
                continue
            updates, found = [one.load("cpu") for one in plan.updates], written.tensor(first, last)
            expected = compute_rows(plan, updates, written.dtype, first, last).double()
            step = torch.finfo(found.dtype).eps
            allowed = TOLERANCE * step * expected.abs() + step * 1e-3 * expected.abs().mean()
            same &= bool(((found.double() - expected).abs() <= allowed).all())
        if not same:
            different = {name}
            break
    if different:
        raise CourseError(
            tr("{weight} in {folder} is not base + adapter.", weight=min(different), folder=folder),
            todo=tr("Delete that folder and run the merge again."),
        )
    changed = sum(bool(plan.updates or plan.replaced) for plan in compared.values())
    sizes = {"compared": len(compared), "changed": changed}
    left_out = tr("; {count} can only be computed whole and were left out", count=len(whole)) if whole else ""
    return tr("computed again: rows of {compared} weights, {changed} of them tuned, all as written", **sizes) + left_out
