"""Which build of an engine fits driver and Python, and which flags a card wants: `configs/serving.yaml`, with reasons.

Not here: building the environment (environment) and checking flags (flags). A lesson shows what is chosen, and why.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict

from nbutils import hardware, paths
from nbutils.errors import CourseError
from nbutils.hardware import Choice


class Strict(BaseModel):
    """A row: what it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Build(Strict):
    """One release of an engine and what it needs."""

    engine: str
    version: str
    torch: str
    cuda: str
    driver_from: int
    python: str
    steps: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()
    needs_gib: float
    variables: dict[str, str] = {}
    reason: str

    def __str__(self) -> str:
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{self.engine} {self.version} (torch {self.torch}{cuda}): {self.reason}"


class CardRow(Strict):
    """What a generation of cards is served with."""

    name: str
    capability_from: tuple[int, int] | None
    engine: str
    flags: dict[str, Any]
    variables: dict[str, str] = {}
    reason: str


class Table(Strict):
    """The whole file."""

    builds: tuple[Build, ...]
    cards: tuple[CardRow, ...]


@dataclass(frozen=True)
class Seen:
    """What the driver tells about the first card; asked without torch."""

    capability: tuple[int, int]
    driver: int


@lru_cache(maxsize=1)
def table() -> Table:
    """The table, read once."""
    return Table.model_validate(yaml.safe_load((paths.CONFIGS / "serving.yaml").read_text(encoding="utf-8")))


def seen_card() -> Seen | None:
    """The card as the driver tells it; None where there is no driver, or it tells something else."""
    told = hardware.ask_driver("--query-gpu=compute_cap,driver_version", "--format=csv,noheader").splitlines()
    try:
        capability, driver = (part.strip().split(".") for part in told[0].split(","))
        return Seen((int(capability[0]), int(capability[1])), int(driver[0]))
    except (IndexError, ValueError):
        return None


def build_for(engine: str, driver: int | None, python: str = "") -> Build:
    """The first build of an engine that fits; a driver nobody knows is taken for a new one."""
    python = python or platform.python_version()
    rows = [row for row in table().builds if row.engine == engine]
    for row in rows:
        if (driver is None or driver >= row.driver_from) and python in SpecifierSet(row.python):
            return row
    needs = "; ".join(f"{row.version}: driver from {row.driver_from}, Python {row.python}" for row in rows)
    raise CourseError(
        f"no build of {engine} fits driver {driver or 'none'} and Python {python}.", needs,
        "take an image with a newer driver or Python, set ENGINE to transformers, or NBUTILS_SERVE_PYTHON",
    )  # fmt: skip


def row_for(card: hardware.Card | Seen | None) -> CardRow:
    """The row of a card."""
    if card is None:
        return next(row for row in table().cards if row.capability_from is None)
    rows = [row for row in table().cards if row.capability_from is not None]
    return next(row for row in rows if card.capability >= (row.capability_from or (0, 0)))


def flags_for(card: hardware.Card | None, folder: Path) -> dict[str, Choice]:
    """The flags a card wants beyond what the lesson decides, each with its reason."""
    row = row_for(card)
    chosen = {name: Choice(value, f"{row.name}: {row.reason}") for name, value in row.flags.items()}
    if card is None or card.count == 1 or row.engine != "vllm":
        return chosen
    return chosen | {"tensor-parallel-size": tensor_parallel(folder, card.count)}


def tensor_parallel(folder: Path, cards: int) -> Choice:
    """Over how many of the visible cards a model can be split: its heads must divide evenly."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except OSError:
        return Choice(1, f"{folder} has no config.json to read the number of heads from")
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    shared = int(config.get("num_key_value_heads") or heads)
    parts = [n for n in range(1, cards + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    why = f"{cards} cards are visible, and {heads} heads ({shared} for keys and values)"
    return Choice(parts[-1], f"{why} divide evenly over {parts[-1]}")


def require_dtype(dtype: str | None, capability: tuple[int, int]) -> None:
    """Stop before vLLM does: a card older than 8.0 has no bfloat16."""
    if dtype == "bfloat16" and capability < hardware.BF16_FROM:
        raise CourseError(
            f"dtype is bfloat16, and this card (capability {capability[0]}.{capability[1]}) does not have it.",
            "half (float16) or float32 on cards below 8.0", "set dtype to half in the cell with the flags",
        )  # fmt: skip
