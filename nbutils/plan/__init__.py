"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits.

The rooms: `shapes` (models), `cards` (`configs/cards.yaml`), `recipes` (how one trains), `memory` and `speed` (the two
formulas, every coefficient with its reason), `choosing` (what fits), `forecasting` (all of it), `report` (for people).
Not here: measuring, which benchmarks do; and what happens when memory runs out all the same (training.ladder).
"""

from __future__ import annotations

from nbutils.plan import cards, memory, shapes, speed
from nbutils.plan.cards import CardFacts, Price, hourly_price
from nbutils.plan.choosing import Option, choose, limit_gib, options
from nbutils.plan.forecasting import Forecast, example, forecast, of_profile, require, which_fits
from nbutils.plan.recipes import Recipe, for_card, from_profile
from nbutils.plan.report import as_rows, describe, explain, fits_table
from nbutils.plan.shapes import Shape, find

__all__ = [
    "CardFacts",
    "Forecast",
    "Option",
    "Price",
    "Recipe",
    "Shape",
    "as_rows",
    "cards",
    "choose",
    "describe",
    "example",
    "explain",
    "find",
    "fits_table",
    "for_card",
    "forecast",
    "from_profile",
    "hourly_price",
    "limit_gib",
    "memory",
    "of_profile",
    "options",
    "require",
    "shapes",
    "speed",
    "which_fits",
]
