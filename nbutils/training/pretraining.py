"""Pre-training from scratch (lesson 07): text, rows of tokens, a small Qwen2, lesson 03's trainer around it."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from pydantic import BaseModel
from transformers import GenerationConfig, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from nbutils import files, models
from nbutils.chat import find_stop_ids
from nbutils.config import SFT, Profile
from nbutils.data import read
from nbutils.data.rows import RowError
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.plan import gpus
from nbutils.plan import pretraining as plan
from nbutils.plan.recipe import rows_per_step
from nbutils.profiles import Resolved
from nbutils.training import resume as resuming
from nbutils.training.run import CourseCallback, TrainingResult

BUNDLED = files.SAMPLES / "pretraining.jsonl.gz"  # the course's text; `.ci/samples.py` writes it
BUNDLED_STEPS = 300
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
SAVES = 10  # checkpoints of a training
MOST_BETWEEN = 500  # steps between two of them in a long one
QUESTIONS = ("请周五给我送三箱苹果到杭州。", "Please send 3 boxes of apples to Hangzhou on Friday.", "三加四等于几？")
PROMPT = 24  # tokens of a held-out text that the model continues
CONTINUED = 40  # tokens it may add
HEAD = 64  # width of an attention head
BASE = "base"  # in the run folder: the finished model


class Texts:
    """The documents of files, a folder or a hub dataset, or the first `count` of the course; each loop reads anew.

    Example:
        for text in Texts("my_texts", count=0, seed=0): ...
    """

    def __init__(self, source: str, count: int, seed: int) -> None:
        self.bundled = not source
        self.count = count
        self.seed = seed
        self.read = 0  # documents of the last loop
        self.left_out = 0  # rows without text
        self.source = source or str(BUNDLED)
        self.files = read.find_files(self.source, (*TEXT_FILES, *read.FORMATS))

    def __iter__(self) -> Iterator[str]:
        self.read = 0
        self.left_out = 0
        limit = self.count if self.bundled and self.count else None
        for text in islice(self._documents(), limit):
            self.read += 1
            yield text
        if not self.read:
            raise CourseError(
                tr("No text was found in {source}.", source=self.source),
                todo=tr("Name text files with DATA, or rows whose text is in a column `text`."),
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

    def identity(self) -> dict[str, Any]:
        """What the text is: equal as long as no file changes."""
        known = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        return {"files": known, "count": self.count}

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
        tr("{file} cannot be read: {problem}.", file=file, problem=problem),
        todo=tr("Convert it to UTF-8, download it again if it was cut short, or take it out of DATA."),
    )


def require_sizes(width: int, depth: int, vocab_size: int) -> None:
    """Refuse a model that cannot be built, before any text is read."""
    if not width or width % (2 * HEAD) or not depth or vocab_size < SMALLEST_VOCABULARY:
        raise CourseError(
            tr("WIDTH is {width}, DEPTH {depth} and VOCAB {size}.", width=width, depth=depth, size=vocab_size),
            todo=tr(
                "WIDTH must be a multiple of {multiple}, DEPTH at least 1, VOCAB at least {smallest}, as 128, 2 and "
                "2048 are.",
                multiple=2 * HEAD,
                smallest=SMALLEST_VOCABULARY,
            ),
        )


def separator_of(tokenizer: Any) -> int:
    """The token between documents: the padding token, as with Qwen's models, or else the end of a sequence."""
    separator = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(separator)


class Card(BaseModel, frozen=True):
    """What the rows hold."""

    documents: int
    tokens: int
    left_out: int
    fingerprint: str


@dataclass(frozen=True)
class TokenRows:
    """The text as rows of tokens for SFTTrainer, some of them held out, and what the model is asked to continue."""

    train: Dataset
    eval: Dataset
    length: int
    prompts: list[str]
    bundled: bool
    card: Card

    def facts(self) -> dict[str, Any]:
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
        if self.card.left_out:
            count = self.card.left_out
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
            tr("The text has {tokens:,} tokens, and a row {length}.", tokens=card.tokens, length=length),
            todo=tr("Add text (or raise TEXTS), or lower LENGTH: two rows are needed, one of them is held out."),
        )
    held_out = [number * len(rows) // count for number in range(count)]  # from everywhere in the text
    kept = sorted(set(range(len(rows))) - set(held_out))
    train = rows.select(kept, keep_in_memory=True)
    held = rows.select(held_out, keep_in_memory=True)
    return TokenRows(
        train.with_format("numpy"),
        held,
        length,
        prompts=_prompts(texts, tokenizer, held),
        bundled=texts.bundled,
        card=card,
    )


def _prompts(texts: Texts, tokenizer: Any, held: Dataset) -> list[str]:
    """Questions to the shop of the course's text, or beginnings of held-out rows."""
    if texts.bundled:
        return [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tokenizer.decode(row["input_ids"][:PROMPT]) for row in islice(held, 3)]


def _write_stream(stream: IterableDataset, texts: Texts, length: int, file: Path) -> Card:
    """Write the rows as `datasets` reads them from disk; what they hold."""
    import numpy
    import pyarrow

    schema = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32()), "labels": pyarrow.list_(pyarrow.int64())})
    digest = hashlib.sha256(f"{length} ".encode())
    rows = 0
    with pyarrow.ipc.new_stream(str(file), schema) as writer:
        for batch in stream.iter(WRITTEN):
            writer.write_batch(pyarrow.record_batch(batch, schema=schema))
            digest.update(numpy.array(batch["input_ids"], numpy.int32).tobytes())
            rows += len(batch["input_ids"])
    return Card(
        documents=texts.read,
        tokens=rows * length,
        left_out=texts.left_out,
        fingerprint=digest.hexdigest()[:16],
    )


def make_config(width: int, depth: int, tokenizer: Any, length: int) -> Any:
    """Qwen2.5's architecture in another size: heads of 64, two query heads for each of keys and values."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=depth,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD // 2,
        tie_word_embeddings=True,
        max_position_embeddings=max(1024, length),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def shape_of(config: Any) -> models.Shape:
    """The shape of a config, for the plan."""
    return models.shape_in("Qwen2", config.to_dict())


def with_recipe(
    resolved: Resolved, config: Any, rows: TokenRows, steps: int, batch: int, save_steps: int = 0
) -> Profile:
    """The profile with the recipe for this model and text, and the micro-batch for this GPU; prints the forecast.

    Example:
        profile = with_recipe(lesson.resolved, config, rows, steps=300, batch=16)
    """
    per_epoch = math.ceil(len(rows.train) / batch)
    if not steps:
        steps = BUNDLED_STEPS if rows.bundled else per_epoch
    shape = shape_of(config)
    cards = [gpus.of_machine(resolved.gpu)] if resolved.gpu else [gpus.find(name) for name in RENTED_OFTEN]
    forecasts = [plan.pretraining(shape, card, rows.length, batch, steps) for card in cards]
    size = forecasts[0].per_device_train_batch_size
    recomputes = forecasts[0].gradient_checkpointing
    if not resolved.gpu:
        size = _micro_batch_on_cpu(batch, rows.length)
        recomputes = False
    chosen = _chosen(resolved)
    size = chosen.get("per_device_train_batch_size", size)
    recipe: dict[str, Any] = {
        "max_length": rows.length,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": batch // size,
        "num_train_epochs": 0.0,
        "max_steps": steps,
        "learning_rate": float(f"{0.5 / config.hidden_size:.1e}"),
        "lr_scheduler_type": "cosine",
        "warmup_steps": min(0.1, 100 / steps),
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "packing": False,
        "gradient_checkpointing": recomputes,
        "activation_offloading": False,
        "use_liger_kernel": False,
        "save_total_limit": 2,
        "logging_steps": max(1, min(10, steps // 100)),
        "save_steps": save_steps or max(1, min(MOST_BETWEEN, math.ceil(steps / SAVES))),
        "load_best_model_at_end": True,
    }
    sft = SFT(**recipe | chosen)
    in_step = rows_per_step(sft)
    print(
        tr(
            "{steps:,} steps of {batch} rows ({tokens:,} tokens), {epochs:.2g} epochs; learning rate {rate:g}, "
            "{precision}",
            steps=sft.max_steps,
            batch=in_step,
            tokens=in_step * rows.length,
            epochs=sft.max_steps / per_epoch,
            rate=sft.learning_rate,
            precision=resolved.profile.from_pretrained.dtype,
        )
    )
    print(plan.describe(shape, forecasts))
    course = resolved.profile.course.model_copy(
        update={"validation_rows": len(rows.eval), "early_stopping_patience": 3}
    )
    return resolved.profile.model_copy(update={"sft": sft, "course": course})


def _chosen(resolved: Resolved) -> dict[str, Any]:
    """The arguments of SFTConfig that SET names."""
    chosen = {}
    for name, value in resolved.set_values.items():
        block, _, argument = name.partition(".")
        if block == "sft" and value != "auto":
            chosen[argument] = resolved.profile.sft[argument]
    return chosen


def _micro_batch_on_cpu(batch: int, length: int) -> int:
    """The largest part of a batch that a CPU computes at a time."""
    most = max(CPU_TOKENS // length, 1)
    return max(size for size in range(1, min(batch, most) + 1) if batch % size == 0)


class PretrainingCallback(CourseCallback):
    """The callback of lesson 03 for a model of which every weight is trained."""

    def prepare(self, trainer: Any) -> str:
        """Check the disk and note what the run is; how much there is to train, in one line."""
        self.require_room(trainer)
        self.take_over(trainer)
        disable_progress_bar()  # of every saved checkpoint
        logging.getLogger("transformers.trainer").setLevel(logging.ERROR)  # tied weights are stored once, as meant
        rows: TokenRows = self.dataset
        self.fingerprint = {
            "model": shape_of(trainer.model.config).model_dump(),
            "data": rows.card.fingerprint,
            "sft": self.profile.sft.model_dump(mode="json", exclude=resuming.MAY_CHANGE),
            "rows_per_step": rows_per_step(self.profile.sft),
            "seed": trainer.args.seed,
        }
        return tr(
            "{parameters:,} parameters to train on {tokens:,} tokens",
            parameters=trainer.model.num_parameters(),
            tokens=len(rows.train) * rows.length,
        )


def continue_texts(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """How the model continues each prompt; greedy, so it is the same every time.

    Example:
        continue_texts(model, tokenizer, ["Once upon a time"])
    """
    stops = sorted({*find_stop_ids(tokenizer), separator_of(tokenizer)})
    model.eval()
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                max_new_tokens=CONTINUED,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=stops[0],
            )
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    return texts


def save_model(result: TrainingResult, tokenizer: Any) -> Path:
    """Write model (bfloat16) and tokenizer to `base` of the run folder; one of this very training is left as it is."""
    model = result.trainer.model
    folder = result.callback.run.path / BASE
    stamp = result.stamp()
    if files.stamp(folder) != stamp:
        with files.complete_folder(folder, stamp) as place:
            model.generation_config = GenerationConfig(
                do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
            )
            weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
            model.save_pretrained(place, state_dict=weights)
            tokenizer.save_pretrained(place)
    return folder
