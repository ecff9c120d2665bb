"""Profiles: `configs/*.yaml` as frozen values, each with the reason a learner is shown for it.

`load` reads one profile and reports all its mistakes at once; `resolve` settles a profile and a model for this machine.
Not here: a default that no YAML shows. The rooms: `schema` (the keys), `reading` (YAML), `models`, `packaged`, `recipe`
(what follows from the rows), `sizing` (what follows from the GPU), `choosing`.
"""

from __future__ import annotations

from nbutils.profiles.choosing import Resolved, fit, resolve
from nbutils.profiles.models import KnownModel, is_known, is_tiny, known_models, model_folder
from nbutils.profiles.reading import load, names
from nbutils.profiles.recipe import Rows, Schedule, few_steps, schedule
from nbutils.profiles.schema import Profile

__all__ = [
    "KnownModel",
    "Profile",
    "Resolved",
    "Rows",
    "Schedule",
    "few_steps",
    "fit",
    "is_known",
    "is_tiny",
    "known_models",
    "load",
    "model_folder",
    "names",
    "resolve",
    "schedule",
]
