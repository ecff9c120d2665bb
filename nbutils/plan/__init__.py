"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits."""

from __future__ import annotations

from nbutils.plan.answers import answer, describe, example, fits_table, require
from nbutils.plan.forecast import Forecast, Recipe

__all__ = ["Forecast", "Recipe", "answer", "describe", "example", "fits_table", "require"]
