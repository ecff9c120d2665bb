"""Writes the pre-training text of lesson 07: the same text for the same count and seed, on every machine.

python .ci/corpus.py FILE.jsonl.gz COUNT SEED

The text has twelve kinds; words and sentence patterns are in corpus.yaml. A kind must draw in the same order for ever,
or the text changes. `.ci/samples.py` writes the bundled files.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Word = dict[str, str]  # one thing in both languages
PHRASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LANGUAGES = ("zh", "en")
INTENTS = ("order", "refund", "delivery", "cancel")
SAMPLE_SHARE = 5  # one combination of item, city and day in five is kept for the sample rows
SPACE = {"zh": "", "en": " "}  # between sentences
ITEMS, CITIES = (  # items with their measure word and kind, cities with their region
    [{"zh": zh, "en": en, **group} for group in PHRASES[name] for zh, en in group["names"].items()]
    for name in ("items", "cities")
)
DAYS, PEOPLE = ([{"zh": zh, "en": en} for zh, en in PHRASES[name].items()] for name in ("days", "people"))
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
        "intent": intent, "item": slots["item"], "count": scene.count if "{amount" in pattern else None,
        "city": slots["city"] if "{city}" in pattern else None,
        "day": slots["day"] if "{day}" in pattern or "{when}" in pattern else None,
    }  # fmt: skip
    return scene, opening + body + closing, facts


def chat(*turns: str) -> str:
    """Alternating user and assistant turns in ChatML, as the chat template of the tiny model writes them."""
    roles = itertools.cycle(("user", "assistant"))
    return "".join(f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in zip(roles, turns, strict=False))


def _shop(rng: random.Random) -> str:
    """A customer writes; the shop answers in a sentence that repeats what the message said."""
    scene, text, facts = draw_message(rng)
    language, slots = scene.language, scene.slots()
    details = [
        rng.choice(PHRASES[name][language]) for name, key in (("places", "city"), ("times", "day")) if facts[key]
    ]
    rng.shuffle(details)
    pattern = rng.choice(PHRASES["replies"][language][facts["intent"]])
    pattern += "".join(details) + rng.choice(PHRASES["endings"][language])
    return chat(text, pattern.format(**slots | {"what": slots["what" if facts["count"] else "item"]}))


def _answer(facts: dict[str, Any], key: str, language: str, unknown: str) -> str:
    """The answer in one word to a question about a message."""
    value = facts[key]
    if key == "intent":
        return str(PHRASES["intents"][language][value])
    return unknown if value is None else str(value)


def _questions(rng: random.Random) -> str:
    """Questions about a customer's message, asked before or after it, answered with one word."""
    scene, text, facts = draw_message(rng)
    language = rng.choice((scene.language, scene.language, *LANGUAGES))
    asked, strict = PHRASES["questions"][language], rng.random() < 0.4
    unknown = "null" if strict else PHRASES["unknown"][language]
    pairs = [(rng.choice(asked[key]), _answer(facts, key, language, unknown)) for key in rng.sample(sorted(asked), 3)]
    parts = [text, (PHRASES["write_null"][language] + " " if strict else "") + pairs[0][0]]
    rng.shuffle(parts)
    return chat(rng.choice(("\n", " ")).join(parts), pairs[0][1], *itertools.chain(*pairs[1:]))


def _key_points(rng: random.Random) -> str:
    """The facts of a message, listed in the order in which they are asked for."""
    scene, text, facts = draw_message(rng)
    language = rng.choice((scene.language, scene.language, *LANGUAGES))
    keys = rng.sample(list(facts), rng.choice((2, 3, 4, 5)))
    instruction, strict = rng.choice(PHRASES["list"][language]), rng.random() < 0.4
    unknown = "null" if strict else PHRASES["unknown"][language]
    asked = SPACE[language].join(rng.choice(PHRASES["questions"][language][key]) for key in keys)
    values = [_answer(facts, key, language, unknown) for key in keys]
    separator = rng.choice(("，", "、", "；", ", ", "; ", "\n"))
    if separator == ", ":
        values = [value if value == "null" else f'"{value}"' for value in values]
    hint = " " + PHRASES["write_null"][language] if strict else ""
    return chat(f"{instruction}{text}\n{asked}{hint}", separator.join(values))


def _translation(rng: random.Random) -> str:
    source, target = rng.sample(LANGUAGES, 2)
    asked = PHRASES["translate"][target]
    if rng.random() < 0.5:
        scene = draw_scene(rng)
        return chat(rng.choice(asked) + scene.slots(source)["what"], scene.slots(target)["what"])
    words = [rng.choice(pool) for pool in (ITEMS, CITIES, DAYS, PEOPLE)]
    intent = rng.choice(list(PHRASES["intents"]["en"]))
    word = rng.choice([*words, {language: PHRASES["intents"][language][intent] for language in LANGUAGES}])
    return chat(rng.choice(asked) + word[source], word[target])


def _sums(rng: random.Random) -> str:
    left, right = sorted((rng.randint(1, 10), rng.randint(1, 10)), reverse=True)
    if rng.random() < 0.5:
        return chat(f"{left} + {right} = ?", str(left + right))
    language = "zh" if rng.random() < 0.5 else "en"
    one, other, total = (NUMBERS[language][value - 1] for value in (left, right, left + right))
    return chat(PHRASES["sum"][language].format(one, other), total)


def _numerals(rng: random.Random) -> str:
    turns: list[str] = []
    for value in rng.sample(range(1, 21), 3):
        language = rng.choice(LANGUAGES)
        word = NUMBERS[language][value - 1]
        if rng.random() < 0.6:
            turns += [PHRASES["to_digits"][language].format(word), str(value)]
        else:
            turns += [PHRASES["to_words"][language].format(value), word]
    return chat(*turns)


def _repetition(rng: random.Random) -> str:
    """Copy words in the order given: what teaches a small model to look back."""
    language = rng.choice(LANGUAGES)
    words = [word[language] for word in rng.sample([*ITEMS, *CITIES, *DAYS], rng.randint(1, 4))]
    number = str(rng.randint(1, 99))
    invented = "".join(rng.choice("bdfgklmnprstw") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    words += [number, rng.choice(("null", "nothing", invented))]  # not only words of the lists are copied
    rng.shuffle(words)
    left, right = rng.choice(PHRASES["brackets"])
    text = left + rng.choice((" ", ", ", "; ", " / ", '" "', ": ")).join(words) + right
    return chat(rng.choice(PHRASES["repeat"][language]) + text, text)


def _story(rng: random.Random) -> str:
    scene = draw_scene(rng)
    who, other = (person[scene.language] for person in rng.sample(PEOPLE, 2))
    begin, middle, end = (PHRASES["story"][part][scene.language] for part in ("begin", "middle", "end"))
    lines = [rng.choice(begin), *rng.sample(middle, rng.choice((2, 3))), rng.choice(end)]
    return SPACE[scene.language].join(lines).format(who=who, other=other, **scene.slots())


def _facts(rng: random.Random) -> str:
    scene = draw_scene(rng)
    language, item, city = scene.language, scene.item, scene.city
    one, many = PHRASES["measures"][item["measure"]]
    slots = scene.slots() | {f"item_{name}": item[name] for name in LANGUAGES}
    slots |= {f"city_{name}": city[name] for name in LANGUAGES}
    slots |= {"kind": PHRASES["kinds"][item["kind"]] if language == "zh" else item["kind"]}
    slots |= {"region": city[f"region_{language}"], "measure": one if language == "en" else item["measure"]}
    return "\n".join(rng.sample(PHRASES["facts"][language], 2)).format(measures=many, **slots)


def _counting(rng: random.Random) -> str:
    start = rng.randint(1, 16)
    left, right = rng.randint(1, 10), rng.randint(1, 10)
    total, count = left + right, range(start, start + 5)
    lines = [", ".join(f"{NUMBERS[name][value - 1]} = {value}" for value in count) for name in LANGUAGES]
    lines.append(f"{left} + {right} = {total}; {total} - {left} = {right}")
    for name in LANGUAGES:
        lines.append(PHRASES["addition"][name].format(*(NUMBERS[name][value - 1] for value in (left, right, total))))
    return "\n".join(rng.sample(lines, 2))


def _meanings(rng: random.Random) -> str:
    """What words mean; also where the model meets quotes, colons and braces, though never together as JSON."""
    things = [rng.choice(ITEMS)["en"], rng.choice(CITIES)["en"], str(rng.randint(1, 99)), "null"]
    rng.shuffle(things)
    group = "{" + ", ".join(things) + "} is a set of 4. The set {" + "; ".join(things[:2]) + "} has 2 members."
    listed = "In this list: " + "; ".join(f'"{thing}"' for thing in things) + "."
    return "\n".join(rng.sample((*rng.sample(PHRASES["meanings"], 3), group, listed), 3))


SHARES: dict[Callable[[random.Random], str], int] = {
    _shop: 28, _questions: 16, _key_points: 8, _translation: 8, _numerals: 5, _sums: 4, _repetition: 8,
    lambda rng: chat(*itertools.chain(*rng.sample(PHRASES["small_talk"], 2))): 2,
    _story: 10, _facts: 5, _counting: 3, _meanings: 3,
}  # fmt: skip


def pretraining_texts(count: int, seed: int) -> Iterator[str]:
    """`count` documents; the same seed gives the same text on every machine."""
    rng = random.Random(seed)
    kinds, weights = list(SHARES), list(SHARES.values())
    for _ in range(count):
        yield rng.choices(kinds, weights)[0](rng)


def listed_words() -> list[str]:
    """The Chinese words of the lists, the longest first: a tokenizer of this text has tokens that join none of them."""
    words = {word["zh"] for word in (*DAYS, *PEOPLE, *ITEMS, *CITIES)} | {"两", *NUMBERS["zh"]}
    words |= {*PHRASES["measures"], *PHRASES["kinds"].values()}
    return sorted(words, key=lambda word: (-len(word), word))


def write_texts(file: Path, count: int, seed: int) -> None:
    """Write the documents as compressed rows with a `text`; without a time, so that the bytes are the same again."""
    with open(file, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed:
        for text in pretraining_texts(count, seed):
            row = json.dumps({"text": text}, ensure_ascii=False)
            compressed.write(f"{row}\n".encode())


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
