"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits."""

from __future__ import annotations

from nbutils.models import Shape
from nbutils.models import find_shape as find
from nbutils.plan import gpus
from nbutils.plan.asking import answer, example, fits_table, profile_for, require, which_fits
from nbutils.plan.estimate import Recipe
from nbutils.plan.forecast import Forecast, as_rows, describe, explain, of_profile

cards = gpus  # its former name

__all__ = [
    "Forecast", "Recipe", "Shape", "answer", "as_rows", "cards", "describe", "example", "explain", "find",
    "fits_table", "gpus", "of_profile", "profile_for", "require", "which_fits",
]  # fmt: skip
