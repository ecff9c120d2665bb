"""Virtual environments of their own for libraries that must not share one with training: built once, checked, mended.

What one holds and whose it is: recipe. Whether it is whole: checking. Made, mended, replaced: building, by steps.
Not here: which packages (serving, exporting) and what runs in them.
"""

from __future__ import annotations

from nbutils.environments.building import ensure, rebuild
from nbutils.environments.checking import damage
from nbutils.environments.recipe import Recipe, is_ready, place, python_in, variables

__all__ = ["Recipe", "damage", "ensure", "is_ready", "place", "python_in", "rebuild", "variables"]
