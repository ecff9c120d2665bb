"""Customers' messages to a shop, and the JSON ticket that belongs to each: the bundled train.jsonl and eval.jsonl.

The words and sentence patterns are in phrases.yaml.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nbutils.paths import SAMPLES, write_text

PHRASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8"))
LANGUAGES = ("zh", "en")
INTENTS = ("order", "refund", "delivery", "cancel")
SAMPLE_SHARE = 5  # one combination of item, city and day in five is kept for the sample rows
FILES = {"train.jsonl": (800, 2026), "eval.jsonl": (120, 2027)}  # rows and seed


class Word(NamedTuple):
    """One thing in both languages."""

    zh: str
    en: str


class Item(NamedTuple):
    """Something the shop sells, its Chinese measure word and its kind."""

    name: Word
    measure: str
    kind: Word


class City(NamedTuple):
    """A city the shop delivers to, and its region."""

    name: Word
    region: Word


MEASURES: dict[str, list[str]] = PHRASES["measures"]
ITEMS = tuple(
    Item(Word(*names), group["measure"], Word(PHRASES["kinds"][group["kind"]], group["kind"]))
    for group in PHRASES["items"]
    for names in group["names"].items()
)
CITIES = tuple(
    City(Word(*names), Word(*group["region"])) for group in PHRASES["cities"] for names in group["names"].items()
)
DAYS = tuple(Word(*names) for names in PHRASES["days"].items())
PAST_DAYS = DAYS[:-1]  # all but tomorrow
COMING_DAYS = (*DAYS[:-2], DAYS[-1])  # all but yesterday
PEOPLE = tuple(Word(*names) for names in PHRASES["people"].items())
LARGEST = len(PHRASES["numbers"]["en"])  # number with a word of its own


def number_word(value: int, language: str) -> str:
    """A number from 1 to LARGEST as a word."""
    return str(PHRASES["numbers"][language][value - 1])


@dataclass(frozen=True)
class Scene:
    """What a text is about: how many of which item, where and when, in one language."""

    language: str
    item: Item
    count: int
    spelled: bool
    city: City
    day: Word

    def say(self, word: Word) -> str:
        """A word in the language of this scene."""
        return str(getattr(word, self.language))

    def slots(self) -> dict[str, str]:
        """What the sentence patterns are filled with."""
        number = number_word(self.count, self.language) if self.spelled else str(self.count)
        if self.language == "en":
            amount_only = f"{number} {MEASURES[self.item.measure][self.count > 1]}"
            amount = f"{amount_only} of"
        else:
            amount = amount_only = ("两" if number == "二" else number) + self.item.measure
        day = self.say(self.day)
        when = f"on {day}" if self.language == "en" and day[0].isupper() else day
        names = {"item": self.say(self.item.name), "city": self.say(self.city.name)}
        return {"amount": amount, "amount_only": amount_only, "day": day, "when": when, **names}


@dataclass(frozen=True)
class Message:
    """A customer's message, what it is about, and which facts it contains."""

    scene: Scene
    intent: str
    text: str
    fields: dict[str, str | int | None]

    def ticket(self) -> str:
        """The one-line JSON answer that the fine-tuned model should give."""
        return json.dumps({"intent": self.intent, **self.fields}, ensure_ascii=False)


def kept_for_samples(item: Item, city: City, day: Word) -> bool:
    """Whether a combination belongs to the sample rows, and so never appears in pre-training text."""
    return zlib.crc32(f"{item.name.en}|{city.name.en}|{day.en}".encode()) % SAMPLE_SHARE == 0


def draw_scene(rng: random.Random, for_samples: bool = False, days: tuple[Word, ...] = DAYS) -> Scene:
    """A scene whose combination belongs to the sample rows, or to the pre-training text."""
    while True:
        item, city, day = rng.choice(ITEMS), rng.choice(CITIES), rng.choice(days)
        if kept_for_samples(item, city, day) == for_samples:
            break
    spelled = rng.random() < 0.5
    count = rng.randint(1, LARGEST if spelled or rng.random() < 0.7 else 60)
    return Scene(rng.choice(LANGUAGES), item, count, spelled, city, day)


def draw_message(rng: random.Random, for_samples: bool = False) -> Message:
    """A scene, and one way in which a customer may write about it."""
    intent = rng.choice(INTENTS)
    scene = draw_scene(rng, for_samples, PAST_DAYS if intent == "refund" else COMING_DAYS)
    pattern = rng.choice(PHRASES["messages"][scene.language][intent])
    opening = rng.choice(PHRASES["openings"][scene.language])
    closing = rng.choice(PHRASES["closings"][scene.language])
    body = pattern.format(**scene.slots())
    if opening.endswith(", ") and not body.startswith("I "):
        body = body[0].lower() + body[1:]
    fields = {
        "item": scene.say(scene.item.name),
        "count": scene.count if "{amount" in pattern else None,
        "city": scene.say(scene.city.name) if "{city}" in pattern else None,
        "day": scene.say(scene.day) if "{day}" in pattern or "{when}" in pattern else None,
    }
    return Message(scene, intent, opening + body + closing, fields)


def sample_rows(count: int, seed: int, taken: set[str] | None = None) -> list[dict[str, Any]]:
    """Chat rows of message and ticket; no two share a ticket, and none has a ticket of `taken`."""
    rng, used = random.Random(seed), set(taken or ())
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        message = draw_message(rng, for_samples=True)
        ticket = message.ticket()
        if ticket not in used:
            used.add(ticket)
            question = {"role": "user", "content": message.text}
            rows.append({"messages": [question, {"role": "assistant", "content": ticket}]})
    return rows


def write_samples(folder: Path = SAMPLES) -> list[Path]:
    """Write train.jsonl and eval.jsonl, the same bytes every time; they have no ticket in common."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, (count, seed) in FILES.items():
        rows = sample_rows(count, seed, taken)
        taken |= {row["messages"][-1]["content"] for row in rows}
        write_text(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [folder / name for name in FILES]
