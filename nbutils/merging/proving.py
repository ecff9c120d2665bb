"""`prove`: some rows of every weight of a merged model computed once more from base and adapter, and compared.

It sees a forgotten layer, another adapter's weights and a changed file, which hardly move a model's answers.
Not here: whether the model says the same (parity), and reading back what was just written (readback).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.merging import bases, checks, dequantized, plan
from nbutils.merging.formula import Recipe
from nbutils.merging.shards import LEAST, Stored
from nbutils.merging.writing import Workshop, one_thread_each

FEW = 2**12  # numbers of a weight that was only copied
STEPS = 1.01  # of the written type: another processor adds in another order, and may round to the neighbour


@dataclass(frozen=True)
class Proof:
    """How many weights were computed once more, and how many could not be in pieces."""

    weights: int
    changed: int
    left_out: int

    def __str__(self) -> str:
        rest = f"; {self.left_out} can only be computed whole and were left out" if self.left_out else ""
        return f"computed once more: rows of {self.weights} weights, {self.changed} of them tuned, all as written{rest}"


def prove(base: str | Path, adapter: str | Path | Sequence[Path], folder: Path, *, onto: str = "full") -> Proof:
    """Compare the first and last rows of every weight with base + adapter, and refuse a model that is another."""
    opened, merged = bases.open_base(base), bases.open_base(folder).weights
    recipes, _ = plan.recipes(opened, [bases.open_adapter(one) for one in checks.adapters_of(adapter)])
    whole = dequantized.quantised_modules(opened.folder) if onto == "dequantized" else set()
    pieces = {name: one for name, one in recipes.items() if not one.whole and name not in whole}
    if set(recipes) != set(merged):
        raise _other(folder, sorted(set(recipes) ^ set(merged))[0])
    with one_thread_each():
        for name, recipe in pieces.items():
            if not _is_written(recipe, merged[name]):
                raise _other(folder, name)
    return Proof(len(pieces), sum(one.changed for one in pieces.values()), len(recipes) - len(pieces))


def _is_written(recipe: Recipe, place: Stored) -> bool:
    """Whether the beginning and the end of a weight are what the recipe makes."""
    if recipe.source.shape != place.shape:
        return False
    if not recipe.by_rows:
        recipe, place = replace(recipe, source=recipe.source.flat), place.flat
    parts = list(place.cut(0, place.rows, LEAST if recipe.by_rows else FEW))
    return all(_same_rows(recipe, place, first, last) for first, last in {*parts[:1], *parts[-1:]})


def _same_rows(recipe: Recipe, place: Stored, first: int, last: int) -> bool:
    import torch

    if not place.is_float:
        return recipe.source.read(first, last) == place.read(first, last)
    workshop = Workshop("auto", "cpu", dequantized.DEFAULTS, 1, lambda size: None)
    with torch.inference_mode():
        wanted, _ = workshop.rows(recipe, [change.load("cpu") for change in recipe.changes], place, first, last)
        found, wanted = place.tensor(first, last).double(), wanted.double()
        step = torch.finfo(place.tensor(first, first).dtype).eps
        allowed = STEPS * step * wanted.abs() + step * 1e-3 * wanted.abs().mean()
        return bool(((found - wanted).abs() <= allowed).all())


def _other(folder: Path, name: str) -> CourseError:
    return CourseError(
        f"{name} in {folder} is not what base and adapter make.", "the merged model as it was written",
        "delete that folder and run the merge again",
    )  # fmt: skip
