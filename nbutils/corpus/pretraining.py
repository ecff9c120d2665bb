"""What lesson 07 pre-trains the tiny model on: short texts in fixed shares, their tokenizer, and rows of tokens.

The model and its training loop are in the lesson; the words and sentence patterns are in phrases.yaml.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.corpus.samples import (
    CITIES,
    DAYS,
    ITEMS,
    LANGUAGES,
    LARGEST,
    MEASURES,
    PEOPLE,
    PHRASES,
    Message,
    Scene,
    Word,
    draw_message,
    draw_scene,
    number_word,
)  # fmt: skip
from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

FACTS = ("intent", "item", "count", "city", "day")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SMALLEST_VOCABULARY = 512
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chat(*turns: str) -> str:
    """Alternating user and assistant turns in ChatML, as the chat template of the tiny model writes them."""
    roles = itertools.cycle(("user", "assistant"))
    return "".join(f"{TURN_START}{role}\n{turn}{TURN_END}\n" for role, turn in zip(roles, turns, strict=False))


def shop(rng: random.Random) -> str:
    """A customer writes; the shop answers in a sentence that repeats what the message said."""
    message = draw_message(rng)
    language, fields, slots = message.scene.language, message.fields, message.scene.slots()
    amount = slots["amount"] + (" " if language == "en" else "") if fields["count"] else ""
    details = [
        rng.choice(PHRASES[name][language]) for name, key in (("places", "city"), ("times", "day")) if fields[key]
    ]
    rng.shuffle(details)
    pattern = rng.choice(PHRASES["replies"][language][message.intent])
    pattern += "".join(details) + rng.choice(PHRASES["endings"][language])
    return chat(message.text, pattern.format(what=amount + slots["item"], **slots))


def _answer(message: Message, key: str, language: str, unknown: str) -> str:
    """The answer in one word to a question about a message."""
    if key == "intent":
        return str(PHRASES["intents"][language][message.intent])
    value = message.fields[key]
    return unknown if value is None else str(value)


def questions(rng: random.Random) -> str:
    """Questions about a customer's message, asked before or after it, answered with one word."""
    message = draw_message(rng)
    language = rng.choice((message.scene.language, message.scene.language, *LANGUAGES))
    asked, strict = PHRASES["questions"][language], rng.random() < 0.4
    unknown = "null" if strict else PHRASES["unknown"][language]
    pairs = [(rng.choice(asked[key]), _answer(message, key, language, unknown)) for key in rng.sample(sorted(asked), 3)]
    parts = [message.text, (PHRASES["write_null"][language] + " " if strict else "") + pairs[0][0]]
    rng.shuffle(parts)
    return chat(rng.choice(("\n", " ")).join(parts), pairs[0][1], *itertools.chain(*pairs[1:]))


def key_points(rng: random.Random) -> str:
    """The facts of a message, listed in the order in which they are asked for."""
    message = draw_message(rng)
    language = rng.choice((message.scene.language, message.scene.language, *LANGUAGES))
    keys = rng.sample(FACTS, rng.choice((2, 3, 4, 5)))
    instruction, strict = rng.choice(PHRASES["list"][language]), rng.random() < 0.4
    unknown = "null" if strict else PHRASES["unknown"][language]
    asked = (" " if language == "en" else "").join(rng.choice(PHRASES["questions"][language][key]) for key in keys)
    values = [_answer(message, key, language, unknown) for key in keys]
    separator = rng.choice(("，", "、", "；", ", ", "; ", "\n"))
    if separator == ", ":
        values = [value if value == "null" else f'"{value}"' for value in values]
    hint = " " + PHRASES["write_null"][language] if strict else ""
    return chat(f"{instruction}{message.text}\n{asked}{hint}", separator.join(values))


def _counted_item(scene: Scene, language: str) -> str:
    """`three boxes of apples` in one of the languages."""
    slots = replace(scene, language=language).slots()
    return slots["amount"] + (" " if language == "en" else "") + slots["item"]


def translation(rng: random.Random) -> str:
    """Translate a word or a counted item from one language into the other."""
    source, target = rng.sample(LANGUAGES, 2)
    asked = PHRASES["translate"][target]
    if rng.random() < 0.5:
        scene = draw_scene(rng)
        return chat(rng.choice(asked) + _counted_item(scene, source), _counted_item(scene, target))
    words = [rng.choice(ITEMS).name, rng.choice(CITIES).name, rng.choice(DAYS), rng.choice(PEOPLE)]
    intents = [
        Word(*pair) for pair in zip(*(PHRASES["intents"][language].values() for language in LANGUAGES), strict=True)
    ]
    word = rng.choice([*words, rng.choice(intents)])
    return chat(rng.choice(asked) + getattr(word, source), getattr(word, target))


def sums(rng: random.Random) -> str:
    """A small sum in digits or words."""
    left, right = sorted((rng.randint(1, 10), rng.randint(1, 10)), reverse=True)
    if rng.random() < 0.5:
        return chat(f"{left} + {right} = ?", str(left + right))
    language = "zh" if rng.random() < 0.5 else "en"
    one, other, total = (number_word(value, language) for value in (left, right, left + right))
    return chat(f"{one}加{other}等于几？" if language == "zh" else f"What is {one} plus {other}?", total)


def numerals(rng: random.Random) -> str:
    """Digits to number words and back, several in one conversation."""
    to_digits = {"zh": "{}写成数字是多少？", "en": "Write {} in digits."}
    to_words = {"zh": "{}用汉字怎么写？", "en": "Write {} in words."}
    turns: list[str] = []
    for value in rng.sample(range(1, LARGEST + 1), 3):
        language = rng.choice(LANGUAGES)
        word = number_word(value, language)
        if rng.random() < 0.6:
            turns += [to_digits[language].format(word), str(value)]
        else:
            turns += [to_words[language].format(value), word]
    return chat(*turns)


def repetition(rng: random.Random) -> str:
    """Copy words in the order given: what teaches a small model to look back."""
    language = rng.choice(LANGUAGES)
    pool = [*(item.name for item in ITEMS), *(city.name for city in CITIES), *DAYS]
    words = [getattr(word, language) for word in rng.sample(pool, rng.randint(1, 4))]
    number = str(rng.randint(1, 99))
    invented = "".join(rng.choice("bdfgklmnprstw") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    words += [number, rng.choice(("null", "nothing", invented))]  # not only words of the lists are copied
    rng.shuffle(words)
    left, right = rng.choice(PHRASES["brackets"])
    text = left + rng.choice((" ", ", ", "; ", " / ", '" "', ": ")).join(words) + right
    return chat(rng.choice(PHRASES["repeat"][language]) + text, text)


def small_talk(rng: random.Random) -> str:
    """Two short exchanges."""
    return chat(*itertools.chain(*rng.sample(PHRASES["small_talk"], 2)))


def story(rng: random.Random) -> str:
    """Four to six sentences about people, a place and a purchase."""
    scene = draw_scene(rng)
    who, other = (scene.say(person) for person in rng.sample(PEOPLE, 2))
    begin, middle, end = (PHRASES["story"][part][scene.language] for part in ("begin", "middle", "end"))
    lines = [rng.choice(begin), *rng.sample(middle, rng.choice((2, 3))), rng.choice(end)]
    return (" " if scene.language == "en" else "").join(lines).format(who=who, other=other, **scene.slots())


def facts(rng: random.Random) -> str:
    """Two facts about an item and a city."""
    scene = draw_scene(rng)
    one, many = MEASURES[scene.item.measure]
    slots = scene.slots() | {f"item_{language}": getattr(scene.item.name, language) for language in LANGUAGES}
    slots |= {f"city_{language}": getattr(scene.city.name, language) for language in LANGUAGES}
    slots |= {"kind": scene.say(scene.item.kind), "region": scene.say(scene.city.region)}
    slots |= {"measure": one if scene.language == "en" else scene.item.measure, "measures": many}
    return "\n".join(rng.sample(PHRASES["facts"][scene.language], 2)).format(**slots)


def counting(rng: random.Random) -> str:
    """Counting up, sums, and numbers in three ways of writing."""
    start = rng.randint(1, LARGEST - 4)
    left, right = rng.randint(1, 10), rng.randint(1, 10)
    zh, en = ([number_word(value, language) for value in (left, right, left + right)] for language in LANGUAGES)
    lines = [
        ", ".join(f"{number_word(value, language)} = {value}" for value in range(start, start + 5))
        for language in LANGUAGES
    ]
    lines += [
        f"{left} + {right} = {left + right}; {left + right} - {left} = {right}",
        f"{zh[0]}加{zh[1]}等于{zh[2]}。",
        f"{en[0]} plus {en[1]} is {en[2]}.",
    ]
    return "\n".join(rng.sample(lines, 2))


def meanings(rng: random.Random) -> str:
    """What words mean; also where the model meets quotes, colons and braces, though never together as JSON."""
    things = [rng.choice(ITEMS).name.en, rng.choice(CITIES).name.en, str(rng.randint(1, 99)), "null"]
    rng.shuffle(things)
    group = "{" + ", ".join(things) + "} is a set of 4. The set {" + "; ".join(things[:2]) + "} has 2 members."
    listed = "In this list: " + "; ".join(f'"{thing}"' for thing in things) + "."
    return "\n".join(rng.sample((*rng.sample(PHRASES["meanings"], 3), group, listed), 3))


SHARES: dict[Callable[[random.Random], str], int] = {
    shop: 28,
    questions: 16,
    key_points: 8,
    translation: 8,
    numerals: 5,
    sums: 4,
    repetition: 8,
    small_talk: 2,
    story: 10,
    facts: 5,
    counting: 3,
    meanings: 3,
}


def pretraining_texts(count: int, seed: int) -> Iterator[str]:
    """`count` documents; the same seed gives the same text on every machine."""
    rng = random.Random(seed)
    kinds, weights = list(SHARES), list(SHARES.values())
    for _ in range(count):
        yield rng.choices(kinds, weights)[0](rng)


@functools.cache
def _boundaries() -> re.Pattern[str]:
    """Where a text is cut before the tokenizer learns from it: at chat markers, which are dropped, and listed words."""
    words = {word.zh for word in (*DAYS, *PEOPLE, *(item.name for item in ITEMS), *(city.name for city in CITIES))}
    words |= {*MEASURES, *PHRASES["kinds"].values(), *PHRASES["numbers"]["zh"], "两"}
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    markers = map(re.escape, (END_OF_TEXT, TURN_START, TURN_END))
    return re.compile("|".join([*markers, f"({'|'.join(longest_first)})"]))


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on these texts and set it up as a Qwen2 chat tokenizer.

    No token joins a listed word with its sentence. Special tokens come first: their ids are 0, 1, 2 at every size.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    if vocab_size < SMALLEST_VOCABULARY:
        raise CourseError("corpus.vocabulary_too_small", size=vocab_size, smallest=SMALLEST_VOCABULARY)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator((list(filter(None, _boundaries().split(text))) for text in texts), trainer)
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def token_rows(texts: Iterable[str], tokenizer: Any, length: int, batch: int = 2000) -> torch.Tensor:
    """Rows of `length` tokens; each begins with the start of a document, and its last document is cut to fit."""
    import torch

    stream = iter(texts)
    rows: list[list[int]] = []
    row: list[int] = []
    while chunk := list(itertools.islice(stream, batch)):
        for ids in tokenizer(chunk, add_special_tokens=False)["input_ids"]:
            row.extend([*ids, tokenizer.pad_token_id])
            if len(row) >= length:
                rows.append(row[:length])
                row = []
    if not rows:
        raise CourseError("corpus.too_little_text", length=length)
    return torch.tensor(rows, dtype=torch.int32)


def finished_training(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a finished training with these settings; None if it still has to be done."""
    try:
        record: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    used = record.get("settings", {})
    different = ", ".join(f"{name} {used.get(name)}" for name in settings if used.get(name) != settings[name])
    if different:
        raise CourseError("corpus.other_settings", folder=folder, settings=different)
    return record
