"""Pre-training from scratch (lesson 07): text, rows of tokens, a small Qwen2, lesson 03's trainer around it."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.arrow_writer import ArrowWriter
from pydantic import BaseModel
from transformers.utils.logging import disable_progress_bar

from nbutils import distributed, files, models
from nbutils.config import SFT, Profile
from nbutils.data import read
from nbutils.data.rows import RowError
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.plan import gpus
from nbutils.plan import pretraining as plan
from nbutils.profiles import Resolved
from nbutils.record import Facts
from nbutils.training.resume import run_fingerprint
from nbutils.training.run import CourseCallback

BUNDLED = files.SAMPLES / "pretraining.jsonl.gz"  # the course's text; `.ci/samples.py` writes it
CHAT_TEMPLATE = (files.TINY_MODEL / "chat_template.jinja").read_text(encoding="utf-8")
TEXT_FILES = (".txt", ".md")
COLUMN = "text"
PIECE = 1 << 16  # characters of a text file that make a document, with the rest of the paragraph
NO_CHARACTER = re.compile("[\udc80-\udcff]")  # a byte that is neither UTF-8 nor GBK
SAMPLE = 50_000_000  # bytes a tokenizer is trained on: more hardly change it
SMALLEST_VOCABULARY = 512  # the 256 bytes, the special tokens, and as many merges
WRITTEN = 1000  # rows written together
MOST_HELD_OUT = 64  # rows
CPU_TOKENS = 8192  # of a micro-batch without a GPU
RENTED_OFTEN = ("RTX 3090", "RTX 4090")  # in the forecast, where this machine has no GPU
WIDTH_STEP = 128  # heads of 64, two for the queries to each one for keys and values


class Texts:
    """The documents of files, a folder or a hub dataset, or the first `count` of the course; each loop reads anew.

    Example:
        for text in Texts("my_texts", count=0, seed=0): ...
    """

    def __init__(self, source: str, count: int, seed: int) -> None:
        self.bundled = not source
        self.limit = count if self.bundled and count else None  # documents
        self.seed = seed
        self.source = source or str(BUNDLED)
        formats = (*TEXT_FILES, *read.FORMATS)
        self.files = read.find_files(self.source, formats)

    def __iter__(self) -> Iterator[str]:
        self.read = 0  # documents of this loop
        self.left_out = 0  # rows without text
        for text in islice(self._documents(), self.limit):
            self.read += 1
            yield text
        if not self.read:
            raise CourseError(
                "No text was found in {source}.",
                todo="Name text files with DATA, or rows whose text is in a column `text`.",
                source=self.source,
            )

    def documents(self) -> Iterator[dict[str, str]]:
        """The same as rows of `datasets`."""
        for text in self:
            yield {COLUMN: text}

    def sample(self) -> Iterator[str]:
        """Documents from everywhere in the text, as many as a tokenizer needs."""
        size = sum(file.stat().st_size for file in self.files)
        rng = random.Random(self.seed)
        for text in self:
            if rng.random() * size < SAMPLE:
                yield text

    def identity(self) -> Facts:
        """What the text is: equal as long as no file changes."""
        known = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        return {"files": known, "count": self.limit}

    def _documents(self) -> Iterator[str]:
        for file in self.files:
            if read.format_of(file, TEXT_FILES):
                yield from _pieces(file)
            else:
                yield from self._column(file)

    def _column(self, file: Path) -> Iterator[str]:
        """The texts in the column `text` of a file with rows; other rows are counted."""
        for row in read.read_rows(file):
            if isinstance(row, RowError) and row.problems[0].kind == "damaged_file":
                raise _unreadable(file, row.problems[0].seen)
            text = row.raw.get(COLUMN) if isinstance(row.raw, dict) else None
            if not isinstance(text, str):
                self.left_out += 1
            elif text.strip():
                yield text.encode("utf-8", "replace").decode()  # a lone surrogate of JSON is no character


def _pieces(file: Path) -> Iterator[str]:
    """A text file as documents of about `PIECE` characters, each ending with a paragraph if there are any."""
    piece = ""
    try:
        for line in read.text_lines(file):
            if NO_CHARACTER.search(line):
                raise ValueError(tr("the bytes are neither UTF-8, UTF-16 nor GBK"))
            piece += line
            ends_paragraph = not line.strip()
            if len(piece) >= 2 * PIECE or (len(piece) >= PIECE and ends_paragraph):
                yield piece
                piece = ""
    except (EOFError, ValueError, zlib.error) as problem:  # of gzip, for a file that was cut short
        raise _unreadable(file, str(problem)) from problem
    if piece.strip():
        yield piece


def _unreadable(file: Path, problem: str) -> CourseError:
    return CourseError(
        "{file} cannot be read: {problem}.",
        todo="Convert it to UTF-8, download it again if it was cut short, or take it out of DATA.",
        file=file,
        problem=problem,
    )


def require_sizes(width: int, depth: int, vocab_size: int) -> None:
    """Refuse a model that cannot be built, before any text is read."""
    if not width or width % WIDTH_STEP or not depth or vocab_size < SMALLEST_VOCABULARY:
        raise CourseError(
            "WIDTH is {width}, DEPTH {depth} and VOCAB {size}.",
            todo="WIDTH must be a multiple of 128, DEPTH at least 1, VOCAB at least 512, as 128, 2 and 2048 are.",
            width=width,
            depth=depth,
            size=vocab_size,
        )


class Card(BaseModel):
    """What the rows hold."""

    documents: int
    tokens: int
    left_out: int
    fingerprint: str


@dataclass
class TokenRows:
    """The text as rows of tokens for SFTTrainer, some of them held out."""

    train: Dataset
    eval: Dataset
    length: int
    card: Card

    def facts(self) -> Facts:
        """What goes into facts.json."""
        return self.card.model_dump() | {"held_out_rows": len(self.eval)}

    def __str__(self) -> str:
        text = tr(
            "{documents:,} documents, {tokens:,} tokens: {rows:,} rows of {length}, and {held} held out",
            documents=self.card.documents,
            tokens=self.card.tokens,
            rows=len(self.train),
            length=self.length,
            held=len(self.eval),
        )
        if count := self.card.left_out:
            text += "\n" + tr("[WARN] {count:,} rows were left out: broken, or without a column `text`", count=count)
        return text


def write_rows(stream: IterableDataset, texts: Texts, tokenizer: Any, length: int, folder: Path) -> TokenRows:
    """Write rows of `length` tokens into the working folder, unless they are there, and hold some out.

    Example:
        rows = write_rows(stream, texts, tokenizer, 128, lesson.scratch)
    """
    code = tokenizer.backend_tokenizer.to_str().encode()
    stamp = {
        "texts": texts.identity(),
        "tokenizer": hashlib.sha256(code).hexdigest(),
        "length": length,
    }
    folder = files.make_folder(folder) / "tokens"
    if files.stamp(folder) != stamp:
        with files.complete_folder(folder, stamp) as place:
            card = _write_stream(stream, texts, length, place / "tokens.arrow")
            files.write_json(place / "card.json", card.model_dump())
    card = Card(**files.read_json(folder / "card.json"))
    rows = Dataset.from_file(str(folder / "tokens.arrow"))
    count = min(MOST_HELD_OUT, len(rows) // 10 + 1)
    if len(rows) <= count:
        raise CourseError(
            "The text has {tokens:,} tokens, and a row {length}.",
            todo="Add text (or raise TEXTS), or lower LENGTH: two rows are needed, one of them is held out.",
            tokens=card.tokens,
            length=length,
        )
    numbers = [number * len(rows) // count for number in range(count)]  # from everywhere in the text
    held_out = rows.select(numbers, keep_in_memory=True)
    train = rows.select(sorted(set(range(len(rows))).difference(numbers)), keep_in_memory=True)
    return TokenRows(train.with_format("numpy"), held_out, length=length, card=card)


def _write_stream(stream: IterableDataset, texts: Texts, length: int, file: Path) -> Card:
    """Write the rows as `datasets` reads them from disk; what they hold."""
    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int64"))})
    digest = hashlib.sha256(f"{length} ".encode())
    with ArrowWriter(path=str(file), features=features) as writer:
        for batch in stream.iter(WRITTEN):
            writer.write_batch(batch)
            digest.update(numpy.array(batch["input_ids"], numpy.int32).tobytes())
        rows, _ = writer.finalize()
    return Card(
        documents=texts.read,
        tokens=rows * length,
        left_out=texts.left_out,
        fingerprint=digest.hexdigest()[:16],
    )


def shape_of(config: Any) -> models.Shape:
    """The shape of a config, for the plan."""
    return models.shape_in("Qwen2", config.to_dict())


def with_recipe(resolved: Resolved, config: Any, recipe: Facts, batch: int, held_out: int) -> Profile:
    """The profile with a recipe for pre-training, SET and the micro-batch for this GPU; prints the forecast.

    Example:
        profile = with_recipe(lesson.resolved, config, recipe, batch=16, held_out=len(rows.eval))
    """
    shape = shape_of(config)
    length = recipe["max_length"]
    cards = [gpus.of_machine(resolved.gpu)] if resolved.gpu else [gpus.find(name) for name in RENTED_OFTEN]
    steps = recipe["max_steps"]
    forecasts = [plan.pretraining(shape, card, length, batch, steps) for card in cards]
    print(plan.describe(shape, forecasts))
    size = forecasts[0].per_device_train_batch_size
    if not resolved.gpu:
        size = distributed.micro_batch_for(batch, max(CPU_TOKENS // length, 1), processes=1)
    chosen = {}
    for name, value in resolved.profile.sft:
        if f"sft.{name}" in resolved.set_values and value != "auto":
            chosen[name] = value
    size = chosen.get("per_device_train_batch_size", size)
    for_machine = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": batch // size,
        "gradient_checkpointing": False,
    }
    sft = SFT(**recipe | for_machine | chosen)
    course = resolved.profile.course.model_copy(update={"validation_rows": held_out, "early_stopping_patience": 3})
    return resolved.profile.model_copy(update={"sft": sft, "course": course})


class PretrainingCallback(CourseCallback):
    """The callback of lesson 03 for a model of which every weight is trained."""

    def prepare(self, trainer: Any) -> str:
        """Check the disk and note what the run is; how much there is to train, in one line."""
        self.require_room(trainer)
        self.take_over(trainer)
        disable_progress_bar()  # of every saved checkpoint
        logging.getLogger("transformers.trainer").setLevel(logging.ERROR)  # tied weights are stored once, as meant
        rows = self.dataset
        shape = shape_of(trainer.model.config).model_dump()
        self.fingerprint = run_fingerprint(self.profile, shape, rows.card.fingerprint, trainer.args.seed)
        return tr("{tokens:,} tokens to train on", tokens=len(rows.train) * rows.length)
