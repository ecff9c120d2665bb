"""Customers' messages to a shop, and the JSON ticket that belongs to each: the bundled train.jsonl and eval.jsonl."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nbutils.files import SAMPLES, write_text

Word = dict[str, str]  # one thing in both languages
PHRASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8"))
LANGUAGES = ("zh", "en")
INTENTS = ("order", "refund", "delivery", "cancel")
SAMPLE_SHARE = 5  # one combination of item, city and day in five is kept for the sample rows
FILES = {"train.jsonl": (800, 2026), "eval.jsonl": (120, 2027)}  # rows and seed


def _words(names: dict[str, str], **more: str) -> list[Word]:
    return [{"zh": zh, "en": en, **more} for zh, en in names.items()]


ITEMS = [word for group in PHRASES["items"] for word in _words(**group)]  # with their measure word and kind
CITIES = [word for group in PHRASES["cities"] for word in _words(**group)]  # with their region
DAYS, PEOPLE = _words(PHRASES["days"]), _words(PHRASES["people"])
PAST_DAYS, COMING_DAYS = DAYS[:-1], [*DAYS[:-2], DAYS[-1]]  # without tomorrow, without yesterday
NUMBERS: dict[str, list[str]] = PHRASES["numbers"]  # from one to twenty


@dataclass(frozen=True)
class Scene:
    """What a text is about: how many of which item, where and when, in one language."""

    language: str
    item: Word
    count: int
    spelled: bool
    city: Word
    day: Word

    def slots(self, language: str = "") -> dict[str, str]:
        """What the sentence patterns are filled with."""
        language = language or self.language
        number = NUMBERS[language][self.count - 1] if self.spelled else str(self.count)
        item, day = self.item[language], self.day[language]
        slots = {"item": item, "city": self.city[language], "day": day, "when": day}
        if language == "zh":
            amount = ("两" if number == "二" else number) + self.item["measure"]
            return slots | {"amount": amount, "amount_only": amount, "what": amount + item}
        amount = f"{number} {PHRASES['measures'][self.item['measure']][self.count > 1]}"
        when = f"on {day}" if day[0].isupper() else day
        return slots | {"when": when, "amount": f"{amount} of", "amount_only": amount, "what": f"{amount} of {item}"}


def draw_scene(rng: random.Random, for_samples: bool = False, days: Sequence[Word] = DAYS) -> Scene:
    """A scene whose combination belongs to the sample rows, or to the pre-training text."""
    while True:
        item, city, day = rng.choice(ITEMS), rng.choice(CITIES), rng.choice(days)
        names = f"{item['en']}|{city['en']}|{day['en']}"
        if (zlib.crc32(names.encode()) % SAMPLE_SHARE == 0) == for_samples:
            break
    spelled = rng.random() < 0.5
    count = rng.randint(1, 20 if spelled or rng.random() < 0.7 else 60)
    return Scene(rng.choice(LANGUAGES), item, count, spelled, city, day)


def draw_message(rng: random.Random, for_samples: bool = False) -> tuple[Scene, str, dict[str, Any]]:
    """A scene, what a customer writes about it, and the facts that the message contains."""
    intent = rng.choice(INTENTS)
    scene = draw_scene(rng, for_samples, PAST_DAYS if intent == "refund" else COMING_DAYS)
    pattern = rng.choice(PHRASES["messages"][scene.language][intent])
    opening = rng.choice(PHRASES["openings"][scene.language])
    closing = rng.choice(PHRASES["closings"][scene.language])
    slots = scene.slots()
    body = pattern.format(**slots)
    if opening.endswith(", ") and not body.startswith("I "):
        body = body[0].lower() + body[1:]
    facts = {
        "intent": intent,
        "item": slots["item"],
        "count": scene.count if "{amount" in pattern else None,
        "city": slots["city"] if "{city}" in pattern else None,
        "day": slots["day"] if "{day}" in pattern or "{when}" in pattern else None,
    }
    return scene, opening + body + closing, facts


def write_samples(folder: Path = SAMPLES) -> list[Path]:
    """Write train.jsonl and eval.jsonl, the same bytes every time; no two rows share a ticket."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, (count, seed) in FILES.items():
        rng, lines = random.Random(seed), list[str]()
        while len(lines) < count:
            _, text, facts = draw_message(rng, for_samples=True)
            ticket = json.dumps(facts, ensure_ascii=False)
            if ticket not in taken:
                taken.add(ticket)
                turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ticket}]
                lines.append(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
        write_text(folder / name, "".join(lines))
    return [folder / name for name in FILES]
