"""What is known of a GPU: `configs/cards.yaml`, what torch says, or what a person gives; and what an hour costs.

A fact nobody gave stays None, it is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from nbutils.config import Strict, Text, read_table, refuse
from nbutils.errors import CourseError
from nbutils.hardware import Card

FILE = "cards.yaml"
OTHER_VENDORS = re.compile(r"ascend|910[abc]|radeon|instinct|\bmi[23]\d\d|gaudi|\bmlu|\barc\b|kunlun", re.IGNORECASE)
ASSUMED = (8, 0)  # the capability of a GPU of which only memory is given; said with every forecast
Positive = Annotated[float, Field(gt=0)]
PriceOrNull = Annotated[float, Field(ge=0)] | None


class Listed(Strict):
    """One GPU of `configs/cards.yaml`."""

    memory_gib: Positive
    tflops: Positive
    bandwidth: Positive
    capability: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
    called: Annotated[list[Text], Field(min_length=1)]
    also: list[Text]
    yuan: PriceOrNull
    dollars: PriceOrNull
    price_from: Text
    note: str


@dataclass(frozen=True)
class Price:
    """An hour of one machine; None where it is free or not known."""

    yuan: float | None
    dollars: float | None


@dataclass(frozen=True)
class CardFacts:
    """One GPU, and how many of its kind; `yuan` and `dollars` are per hour and GPU, 0 is free, None unknown."""

    name: str
    memory_gib: float
    tflops: float | None
    bandwidth: float | None
    capability: tuple[int, int]
    yuan: float | None = None
    dollars: float | None = None
    price_from: str = "unknown"
    note: str = ""
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


def listed() -> dict[str, Listed]:
    """The GPUs of `configs/cards.yaml` by name."""
    found = read_table(FILE, Listed)
    plain = {_plain(name): name for name in found}
    others = [(name, also) for name, entry in found.items() for also in entry.also]
    taken = [
        f"{name}.also: {also} is an entry of its own" for name, also in others if plain.get(_plain(also), name) != name
    ]
    refuse(taken, FILE, FILE)
    return found


def every() -> list[CardFacts]:
    """All GPUs of the table."""
    return [_facts(name, entry) for name, entry in listed().items()]


def find(
    name: str, vram: float | None = None, tflops: float | None = None, capability: tuple[int, int] | None = None
) -> CardFacts:
    """A GPU by its name ("4090", "A100 80GB", "T4 x2"); what is given overrules the table, or stands in for it."""
    base, count = split_count(name)
    table, plain = listed(), _plain(base)
    if other := OTHER_VENDORS.search(base):
        raise CourseError("plan.other_vendor", name=base, vendor=other[0])
    hit = next((key for key, entry in table.items() if plain in map(_plain, (key, *entry.also))), None)
    if hit is None and vram is None:
        raise CourseError("plan.unknown_gpu", name=base, names=", ".join(table))
    note = f"{base} is not in {FILE}: taken as capability 8.0 or newer unless --capability says otherwise"
    known = _facts(hit, table[hit]) if hit else CardFacts(base, vram or 0.0, None, None, ASSUMED, note=note)
    return replace(
        known, count=count, memory_gib=vram or known.memory_gib, tflops=tflops or known.tflops,
        capability=capability or known.capability,
    )  # fmt: skip


def of_machine(card: Card) -> CardFacts:
    """The facts of one GPU torch has found: memory and capability from torch, the rest from the table."""
    hits = [(key, entry) for key, entry in listed().items() if _is_called(entry, card.name)]
    if not hits:
        note = f"{card.name} is not in {FILE}: its speed and price are not known (--tflops, or add it there)"
        return CardFacts(card.name, card.memory_gib, None, None, card.capability, note=note)
    # the longest name first: a 4090 D is called RTX 4090 as well
    key, entry = min(hits, key=lambda hit: (-max(map(len, hit[1].called)), abs(hit[1].memory_gib - card.memory_gib)))
    return replace(_facts(key, entry), memory_gib=card.memory_gib, capability=card.capability)


def hourly_price(card: Card | None) -> Price | None:
    """What an hour of this machine's GPUs costs, by the table; None without a GPU, or where it is free or unknown."""
    if card is None:
        return None
    facts = of_machine(card)
    yuan, dollars = ((price or 0) * card.count or None for price in (facts.yuan, facts.dollars))
    return Price(yuan, dollars) if yuan or dollars else None


def split_count(name: str) -> tuple[str, int]:
    """ "T4 x2", "T4x2", "2xT4" and "2 x T4" as (T4, 2)."""
    if found := re.fullmatch(r"\s*([1-9]\d?)\s*[x×*]\s*(.+?)\s*", name, re.IGNORECASE):
        return found[2], int(found[1])
    if found := re.fullmatch(r"\s*(.+?)\s*[x×*]\s*([1-9]\d?)\s*", name, re.IGNORECASE):
        return found[1], int(found[2])
    return name.strip(), 1


def _plain(name: str) -> str:
    """A name without vendor, spaces, dashes and unit: "NVIDIA RTX 4090" and "4090" are one, so are "80" and "80GB"."""
    words = re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.lower())
    return re.sub(r"(?<=\d)gi?b?$", "", words)


def _is_called(entry: Listed, name: str) -> bool:
    """Whether torch's name for a GPU has one of the entry's words as a whole; laptop GPUs are others."""
    whole = [rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])" for word in entry.called]
    return "laptop" not in name.lower() and any(re.search(word, name, re.IGNORECASE) for word in whole)


def _facts(name: str, entry: Listed) -> CardFacts:
    major, minor = entry.capability
    known = entry.model_dump(exclude={"capability", "called", "also"})
    return CardFacts(name=name, capability=(major, minor), **known)
