"""Asked before a merge: is this the right base, does the adapter fit it, is there room on disk and in memory?

Not here: the merge itself (streaming), and whether the result is the same model (parity).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils import disk, platforms
from nbutils.errors import CourseError
from nbutils.merging import bases, marks, plan
from nbutils.merging.formula import Product, Recipe
from nbutils.merging.shards import BITS, BLOCK, CODES, LEAST, Stored
from nbutils.paths import GIB, STAMP, require_apart, stamp

SPARE = 0.2  # GiB of memory for what was not counted


def check_base(base: str | Path, adapter: Path) -> None:
    """Refuse a quantised base, and an adapter that was trained on another one or does not fit its weights.

    The weights' names and shapes are compared where the base is on this machine; only headers are read.
    """
    settings = bases.read_settings(adapter / "adapter_config.json", "an adapter folder")
    trained_on = str(settings.get("base_model_name_or_path") or base)  # not written down: names and shapes decide
    folder = Path(base) if Path(base).is_dir() else None
    if folder:
        bases.require_unquantised(bases.called(base), bases.read_settings(folder / "config.json", "a model folder"))
    if bases.plain_name(bases.called(trained_on)) != bases.plain_name(bases.called(base)):
        raise CourseError(
            f"the adapter was trained on {trained_on}, the base is {base}{'' if folder else ', no folder here'}.",
            trained_on, "use the MODEL of lesson 03 (in a lesson: or another RUN_NAME); the same model in a renamed "
            "folder: give it that name",
        )  # fmt: skip
    if found := folder or bases.find_folder(base, fetch=False):
        plan.recipes(bases.open_base(found), [bases.open_adapter(adapter)])


def require_place(out: Path, base: Path, adapters: Sequence[Path]) -> None:
    """Refuse to write over what is merged, and over an adapter: the last name on a command line may be one."""
    require_apart(out, base, *adapters)
    if (out / "adapter_config.json").exists():
        raise CourseError(
            f"{out} is an adapter, and the merged model would replace it.", "a new folder for the result",
            "name the result's folder after the adapters",
        )  # fmt: skip


def target_code(place: Stored, dtype: str) -> str:
    """The type a weight is written in; whole numbers keep theirs."""
    return place.dtype if dtype == "auto" or not place.is_float else CODES[dtype]


def size_bytes(recipes: Mapping[str, Recipe], dtype: str) -> int:
    """How large the merged weights will be."""
    return sum(recipe.source.elements * BITS[target_code(recipe.source, dtype)] // 8 for recipe in recipes.values())


def size_gib(base: str | Path, adapter: Path, dtype: str = "auto") -> float:
    """GiB of disk that merging this adapter into this base will take, with a little to spare."""
    made, _ = plan.recipes(bases.open_base(base), [bases.open_adapter(adapter)])
    return size_bytes(made, dtype) * 1.02 / GIB + 0.05


def memory_gib(recipes: Iterable[Recipe], workers: int) -> float:
    """GiB of memory the merge will need: a few blocks for each worker, or the largest weight that must be whole."""
    most = 0
    for recipe in recipes:
        block = max(BLOCK, 2 * LEAST * recipe.source.width if recipe.by_rows else 0)
        blocks = workers * block * 16  # bytes: what is read, in float32, the change, what is written
        products = [change for change in recipe.changes if isinstance(change, Product)]
        factors = sum(4 * (change.up.elements + change.down.elements) for change in products)
        whole = recipe.source.elements * 20 if recipe.whole else 0
        most = max(most, blocks + factors, whole + factors)
    return most / GIB + SPARE


def require_memory(gib: float) -> None:
    """Stop before a merge that the system would kill."""
    free = platforms.free_memory_gib().value
    if free < gib:
        raise CourseError(
            f"merging needs {gib:.1f} GiB of memory, and {free:.1f} GiB are free here.", f"at least {gib:.1f} GiB",
            "restart the kernel to free what other lessons hold, and run this lesson alone",
        )  # fmt: skip


def require_room(out: Path, needed: int, present: int, recipes: Iterable[Recipe], workers: int) -> None:
    """Stop before a merge that does not fit on the disk or in memory; what an interrupted one left is counted."""
    disk.require_disk(out.parent, max(0, needed * 1.02 - present) / GIB + 0.05, "writing the merged model")
    require_memory(memory_gib(recipes, workers))


def describe(
    base: str | Path | bases.Base, adapter: Path | Sequence[Path], dtype: str, onto: str = "full",
    quantization: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a merged folder was made from, as its stamp says; equal for the same merge on another machine."""
    opened = base if isinstance(base, bases.Base) else bases.open_base(base)
    about: dict[str, Any] = {"base": opened.called, "base_mark": marks.of_model(opened), "dtype": dtype, "onto": onto}
    found = [marks.of_adapter(one) for one in adapters_of(adapter)]
    about["adapter"] = found[0] if len(found) == 1 else found
    return about | ({"quantization": dict(quantization)} if quantization else {})


def adapters_of(adapter: str | Path | Sequence[Path]) -> list[Path]:
    """One adapter or several, as a list; none is a mistake."""
    given = [adapter] if isinstance(adapter, str | Path) else list(adapter)
    if not given:
        raise CourseError("no adapter was given.", "one adapter folder or more", "name the folder that lesson 03 left")
    return [Path(one).expanduser() for one in given]


def require_new(out: Path) -> None:
    """Refuse a folder that holds another finished model."""
    if (out / STAMP).exists():
        found = stamp(out) or {}
        raise CourseError(
            f"{out} holds another model: onto {found.get('base', 'a base')}, in {found.get('dtype', 'some type')}.",
            "a new folder", "name another folder, or add --replace to put the new model in its place",
        )  # fmt: skip


def require_device(device: str) -> None:
    """Refuse a device that is not here."""
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as problem:  # torch says it in many ways
        raise CourseError(
            f"device is {device!r}, and nothing can be computed there.", "cpu; cuda on a machine with a card",
            "leave device out: the merge is limited by the disk, and the CPU is as quick",
        ) from problem  # fmt: skip
