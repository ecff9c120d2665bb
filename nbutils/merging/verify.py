"""`prove`: some rows of every merged weight computed again from base and adapter, and compared.

It finds a forgotten layer, another adapter's weights or a changed file, which hardly move a model's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.merging import dequantize
from nbutils.merging.adapters import WeightPlan, plan_weights
from nbutils.merging.folder import open_adapter, open_base
from nbutils.merging.merge import adapter_paths, compute_rows, one_thread_per_worker
from nbutils.merging.safetensors_io import MIN_ROWS, StoredTensor, split_rows

COPIED = 2**12  # elements compared at each end of a weight that was only copied
TOLERANCE = 1.01  # units in the last place: another CPU adds in another order


@dataclass(frozen=True)
class Proof:
    """How many weights were compared, how many of them are tuned, and how many can only be computed whole."""

    weights: int
    changed: int
    left_out: int

    def __str__(self) -> str:
        rest = f"; {self.left_out} can only be computed whole and were left out" if self.left_out else ""
        return f"computed again: rows of {self.weights} weights, {self.changed} of them tuned, all as written{rest}"


def prove(base: str | Path, adapter: str | Path | Sequence[Path], folder: Path, *, onto: str = "full") -> Proof:
    """Compare the first and last rows of every weight with base + adapter; refuse a model that differs."""
    model, merged = open_base(base), open_base(folder).weights
    plans, _ = plan_weights(model, [open_adapter(one) for one in adapter_paths(adapter)])
    whole = dequantize.quantized_weights(model.path) if onto == "dequantized" else set()
    compared = {name: plan for name, plan in plans.items() if name not in whole}
    with one_thread_per_worker():
        differing = sorted(plans.keys() ^ merged.keys()) or (
            name for name, plan in compared.items() if not _is_as_planned(plan, merged[name])
        )
        for name in differing:
            raise CourseError("merging.not_proven", weight=name, folder=folder)
    return Proof(len(compared), sum(plan.changed for plan in compared.values()), len(plans) - len(compared))


def _is_as_planned(plan: WeightPlan, written: StoredTensor) -> bool:
    """Whether the beginning and the end of a weight are what the plan makes."""
    if plan.source.shape != written.shape:
        return False
    if not plan.by_rows:
        plan, written = replace(plan, source=plan.source.flat), written.flat
    ranges = list(split_rows(0, written.rows, MIN_ROWS if plan.by_rows else COPIED))
    return all(_same_rows(plan, written, first, last) for first, last in {*ranges[:1], *ranges[-1:]})


def _same_rows(plan: WeightPlan, written: StoredTensor, first: int, last: int) -> bool:
    import torch

    if not written.is_float:
        return plan.source.read(first, last) == written.read(first, last)
    with torch.inference_mode():
        updates = [update.load("cpu") for update in plan.updates]
        expected = compute_rows(plan, updates, written.dtype, first, last).double()
        found = written.tensor(first, last)
        step = torch.finfo(found.dtype).eps
        allowed = TOLERANCE * step * expected.abs() + step * 1e-3 * expected.abs().mean()
        return bool(((found.double() - expected).abs() <= allowed).all())
