"""Prompts of an exact length that are the same tokens for every engine, given as tokens or as text.

Not here: questions that mean something (evaluation). Speed depends on lengths; words drawn at random share no
beginning, so that no engine answers from its prefix cache what another has to compute.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError

CANDIDATES, TRIES = 4000, 200
ANY_VOCABULARY = range(100, 1000)  # ids that every model has


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and the text that becomes exactly these tokens; "" where no tokenizer is at hand."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True)
class Settings:
    """How many ask at once, with how many tokens, for how many; each place in line is filled `rounds` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4
    least: int = 10  # requests, when few ask at once

    def requests(self, concurrency: int) -> int:
        """How many requests a level makes."""
        return max(self.least, self.rounds * concurrency)

    def few(self, most: int = 8) -> Settings:
        """The same for a server that answers one after the other: fewer at a time, and each place filled once."""
        fewer = tuple(many for many in self.concurrency if many <= most) or (1,)
        return replace(self, concurrency=fewer, rounds=1, least=2)

    def prompts(self, tokenizer: Any, concurrency: int) -> list[Prompt]:
        """The prompts of one level, the same for every engine."""
        return make_prompts(tokenizer, self.prompt_tokens, self.requests(concurrency), seed=concurrency)


def tokenizer_of(folder: Path | None) -> Any:
    """The tokenizer of a model folder; None where there is no folder."""
    if folder is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as problem:
        raise CourseError(
            f"there is no tokenizer to be read in {folder} ({type(problem).__name__}).",
            "a model folder with its tokenizer", "give the folder lesson 04 wrote",
        ) from problem  # fmt: skip


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[Prompt]:
    """So many different prompts of so many tokens, the same for the same seed; without a tokenizer as ids only."""
    rng = random.Random(seed)
    if tokenizer is None:
        return [Prompt(rng.choices(ANY_VOCABULARY, k=tokens)) for _ in range(count)]
    words = plain_words(tokenizer, rng)
    return [_prompt(tokenizer, words, tokens, rng) for _ in range(count)]


def plain_words(tokenizer: Any, rng: random.Random) -> list[str]:
    """Texts of tokens that are readable and begin a word, so that gluing them makes few other tokens."""
    known = range(len(tokenizer))
    special = set(tokenizer.all_special_ids)
    chosen = rng.sample(known, min(CANDIDATES, len(known)))
    texts = [tokenizer.decode([token]) for token in chosen if token not in special]
    words = [text for text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii()]
    return words or [text for text in texts if text.isprintable() and "\ufffd" not in text]


def _prompt(tokenizer: Any, words: list[str], tokens: int, rng: random.Random) -> Prompt:
    """Random words, cut to length, until text and tokens lead to each other."""
    for _ in range(TRIES):
        ids = tokenizer("".join(rng.choices(words, k=tokens)))["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        if len(ids) == tokens and tokenizer(text)["input_ids"] == ids:
            return Prompt(ids, text)
    raise CourseError(
        f"no text of exactly {tokens} tokens was found in {TRIES} tries.",
        "a tokenizer that reads its own text back as the same tokens", "choose another number of prompt tokens",
    )  # fmt: skip
