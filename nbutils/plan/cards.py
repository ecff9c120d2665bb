"""What is known of a card: `configs/cards.yaml`, what torch says, or what a person gives; and what an hour costs.

Not here: asking the card of this machine what it can do (hardware). A fact nobody gave stays None, it is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from nbutils import paths
from nbutils.errors import CourseError
from nbutils.hardware import Card
from nbutils.profiles.reading import mistakes, read_sheet, refuse
from nbutils.profiles.schema import Strict, Text

FILE = "cards.yaml"
FOREIGN = re.compile(r"ascend|910[abc]|radeon|instinct|\bmi[23]\d\d|gaudi|\bmlu|\barc\b|kunlun", re.IGNORECASE)
ASSUMED = (8, 0)  # the capability of a card of which only memory is given; said with every forecast
Positive = Annotated[float, Field(gt=0)]
PriceOrNull = Annotated[float, Field(ge=0)] | None


class Listed(Strict):
    """One card of `configs/cards.yaml`."""

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
    """An hour of one card; None where it is free or not known."""

    yuan: float | None
    dollars: float | None


@dataclass(frozen=True)
class CardFacts:
    """One card, and how many of its kind; `yuan` and `dollars` are per hour and card, 0 is free, None unknown."""

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
    """The cards of `configs/cards.yaml` by name."""
    sheet = read_sheet(paths.CONFIGS / FILE)
    wrong = [
        f"{name}.{key}: {said}" for name, entry in sheet.tree.items() for key, said in mistakes(entry, Listed).items()
    ]
    refuse([*sheet.twice, *wrong], str(sheet.file), FILE)
    found = {str(name): Listed.model_validate(entry) for name, entry in sheet.tree.items()}
    names = {_plain(name) for name in found}
    taken = [f"{name}.also: {other} is a card of its own" for name, entry in found.items() for other in entry.also
             if _plain(other) in names - {_plain(name)}]  # fmt: skip
    refuse(taken, str(sheet.file), FILE)
    return found


def every() -> list[CardFacts]:
    """All cards of the table."""
    return [_facts(name, entry) for name, entry in listed().items()]


def find(
    name: str, vram: float | None = None, tflops: float | None = None, capability: tuple[int, int] | None = None
) -> CardFacts:
    """A card by its name ("4090", "A100 80GB", "T4 x2"); what is given overrules the table, or stands in for it."""
    base, count = split_count(name)
    table = listed()
    wanted = _plain(base)
    hit = next((key for key, entry in table.items() if wanted in {_plain(key), *map(_plain, entry.also)}), None)
    if other := FOREIGN.search(base):
        raise CourseError(
            f"{base!r} is a card of another maker ({other[0]}), and this course trains with CUDA.", "an NVIDIA card",
            "look for a course made for that card; its memory and speed cannot be forecast here",
        )  # fmt: skip
    if hit is None and vram is None:
        raise CourseError(
            f"the card {base!r} is not in configs/{FILE}, so its memory is not known.",
            f"{len(table)} cards: {', '.join(table)}",
            "give its memory with --vram GIB (what is on the box less about 5 %), and its dense 16-bit arithmetic with "
            "--tflops T for speed; or add it to that file",
        )
    known = _facts(hit, table[hit]) if hit else CardFacts(base, vram or 0.0, None, None, ASSUMED, note=_unlisted(base))
    given = {"memory_gib": vram, "tflops": tflops, "capability": capability}
    changes = {key: value for key, value in given.items() if value is not None}
    return replace(known, count=count, **changes)  # type: ignore[arg-type]


def _unlisted(name: str) -> str:
    major, minor = ASSUMED
    return f"{name} is not in {FILE}: taken as capability {major}.{minor} or newer unless --capability says otherwise"


def of_machine(card: Card) -> CardFacts:
    """The facts of one card torch has found: memory and capability from torch, the rest from the table."""
    hits = [(key, entry) for key, entry in listed().items() if _is_called(entry, card.name)]
    if not hits:
        note = f"{card.name} is not in {FILE}: its speed and price are not known (--tflops, or add it there)"
        return CardFacts(card.name, card.memory_gib, None, None, card.capability, note=note)
    closest = min(hits, key=lambda hit: (-max(map(len, hit[1].called)), abs(hit[1].memory_gib - card.memory_gib)))
    key, entry = closest  # the longest name first: a 4090 D is called RTX 4090 as well
    return replace(_facts(key, entry), memory_gib=card.memory_gib, capability=card.capability)


def hourly_price(card: Card | None) -> Price | None:
    """What an hour of this machine's cards costs, by the table; None without a card, or where it is free or unknown."""
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
    """A name without maker, spaces, dashes and unit: "NVIDIA RTX 4090" and "4090" are one, so are "80" and "80GB"."""
    words = re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.lower())
    return re.sub(r"gi?b?$", "", words) if re.search(r"\dgi?b?$", words) else words


def _is_called(entry: Listed, name: str) -> bool:
    """Whether torch's name for a card has one of the entry's words as a whole; laptop cards are others."""
    whole = [rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])" for word in entry.called]
    return "laptop" not in name.lower() and any(re.search(word, name, re.IGNORECASE) for word in whole)


def _facts(name: str, entry: Listed) -> CardFacts:
    major, minor = entry.capability
    return CardFacts(
        name, entry.memory_gib, entry.tflops, entry.bandwidth, (major, minor), entry.yuan, entry.dollars,
        entry.price_from, entry.note,
    )  # fmt: skip
