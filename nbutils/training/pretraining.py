"""Pre-training from scratch (lesson 07): text, rows of tokens, a small Qwen2, lesson 03's trainer around it."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from nbutils import corpus, files, models, platforms
from nbutils.chat import find_stop_ids
from nbutils.config import SFT
from nbutils.data import read
from nbutils.data.rows import RowError
from nbutils.data.texts import shown
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.plan import gpus
from nbutils.plan import pretraining as plan
from nbutils.plan.forecast import rows_per_step
from nbutils.training import resume as resuming
from nbutils.training.run import CourseCallback, TrainingResult

TEXT_FILES = (".txt", ".md")
COLUMN = "text"
PIECE = 1 << 16  # characters of a text file that make a document, with the rest of the paragraph
NO_CHARACTER = re.compile("[\udc80-\udcff]")  # a byte that is neither UTF-8 nor GBK
SAMPLE = 50_000_000  # bytes a tokenizer is trained on: more hardly change it
BUNDLED_SAMPLE, BUNDLED_STEPS = 20_000, 300  # texts of the course: those of its tokenizer, and the steps they get
SMALLEST_VOCABULARY = 512  # the 256 bytes, the special tokens, and as many merges
WRITTEN = 1000  # rows written together
MOST_HELD_OUT = 64  # rows
CPU_TOKENS = 8192  # of a micro-batch without a GPU
SAVES, MOST_BETWEEN = 10, 500  # checkpoints of a training, and the steps between two of them in a long one
QUESTIONS = ("请周五给我送三箱苹果到杭州。", "Please send 3 boxes of apples to Hangzhou on Friday.", "三加四等于几？")
PROMPT = 24  # tokens of a held-out text that the model continues
HEAD = 64  # width of an attention head
BASE = "base"  # in the run folder: the finished model


class Texts:
    """The documents of files, a folder or a hub dataset, or `count` of the course's own; read anew by each loop."""

    def __init__(self, source: str, count: int, seed: int) -> None:
        self.source, self.count, self.seed = source, count, seed
        self.read = 0  # documents of the last loop
        self.left_out: Counter[str] = Counter()  # rows without text, by what was seen instead
        self.files = read.find_files(source, (*TEXT_FILES, *read.FORMATS)) if source else []

    def __iter__(self) -> Iterator[str]:
        self.read = 0
        self.left_out.clear()
        found = self._documents() if self.source else corpus.pretraining_texts(self.count, self.seed + 1)
        for text in found:
            self.read += 1
            yield text
        if not self.read:
            seen = "; ".join(self.left_out) or tr("the files are empty")
            raise CourseError(
                tr("No text was found in {source}: {seen}.", source=self.source or f"TEXTS = {self.count}", seen=seen),
                allowed=tr("text files, or rows with text in a column `text`"),
                todo=tr("Rename the column that holds the text to `text`, or name other files with DATA."),
            )

    def documents(self) -> Iterator[dict[str, str]]:
        """The same as rows of `datasets`."""
        for text in self:
            yield {COLUMN: text}

    def sample(self) -> Iterator[str]:
        """Documents from everywhere in the text, as many as a tokenizer needs."""
        if not self.source:
            return corpus.pretraining_texts(min(self.count, BUNDLED_SAMPLE), self.seed)
        share = SAMPLE / max(1, sum(file.stat().st_size for file in self.files))
        rng = random.Random(self.seed)
        return (text for text in self if rng.random() < share)

    @property
    def whole_words(self) -> str:
        """A pattern of the words that no token joins with others: the course's lists; nothing in another text."""
        return "(?!)" if self.source else "|".join(corpus.listed_words())

    @property
    def about(self) -> dict[str, Any]:
        """What the text is: equal as long as no file changes."""
        found = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        return {"files": found} if self.source else {"count": self.count, "seed": self.seed}

    def _documents(self) -> Iterator[str]:
        for file in self.files:
            if read.format_of(file, TEXT_FILES):
                yield from _pieces(file)
                continue
            for row in read.read_rows(file):
                if isinstance(row, RowError):
                    self.left_out[row.problems[0].seen] += 1
                elif isinstance(text := dict(row.raw).get(COLUMN) if isinstance(row.raw, dict) else None, str):
                    if text.strip():
                        yield text.encode("utf-8", "replace").decode()  # a lone surrogate of JSON is no character
                else:
                    columns = ", ".join(map(str, row.raw)) if isinstance(row.raw, dict) else type(row.raw).__name__
                    self.left_out[tr("{file} has {columns}", file=row.file, columns=shown(columns[:200]))] += 1


def _pieces(file: Path) -> Iterator[str]:
    """A text file as documents of about `PIECE` characters, each ending with a paragraph if there are any."""
    piece, size = list[str](), 0
    try:
        for number, line in enumerate(read.text_lines(file), start=1):
            if not line.isascii() and NO_CHARACTER.search(line):
                raise CourseError(
                    tr("{file}, line {line}: the bytes are neither UTF-8, UTF-16 nor GBK.", file=file, line=number),
                    todo=tr("Convert the file, for example with `iconv -f latin1 -t utf-8`, or take it out of DATA."),
                )
            piece.append(line)
            size += len(line)
            if size >= PIECE and (not line.strip() or size >= 2 * PIECE):
                yield "".join(piece)
                piece, size = [], 0
    except read.DAMAGED as problem:
        if getattr(problem, "errno", None):  # the disk, not the file
            raise
        raise CourseError(
            tr("{file} is damaged or cut short: {problem}.", file=file, problem=problem),
            todo=tr("Copy or download the file again."),
        ) from problem
    if "".join(piece).strip():
        yield "".join(piece)


def require_sizes(width: int, depth: int, vocab_size: int) -> None:
    """Refuse a model that cannot be built, before any text is read."""
    if width % (2 * HEAD) or not width or not depth:
        raise CourseError(
            tr("WIDTH is {width} and DEPTH {depth}.", width=width, depth=depth),
            allowed=tr("a WIDTH that is a multiple of {multiple}, and a DEPTH of 1 or more", multiple=2 * HEAD),
            todo=tr("Try WIDTH 128 and DEPTH 2, or WIDTH 768 and DEPTH 6."),
        )
    if vocab_size < SMALLEST_VOCABULARY:
        raise CourseError(
            tr("VOCAB is {size}.", size=vocab_size),
            allowed=tr("{smallest} or more: the 256 bytes come first", smallest=SMALLEST_VOCABULARY),
            todo=tr("Raise VOCAB; the bundled model has 3072."),
        )


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model: its course name, hub id or folder."""
    chosen = models.meant(name, platforms.folders(platforms.detect()).inputs).value
    try:
        return AutoTokenizer.from_pretrained(chosen, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        said = str(problem).partition("\n")[0]
        raise CourseError(
            tr("The tokenizer of {name} cannot be loaded: {problem}", name=name, problem=said),
            allowed=tr("a course model, a hub name, or a folder with a tokenizer; empty trains one"),
            todo=tr("Correct TOKENIZER, make the hub reachable, or leave it empty."),
        ) from problem


def separator_of(tokenizer: Any) -> int:
    """The token between documents: the padding token, as with Qwen's models, or else the end of a sequence."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


@dataclass(frozen=True)
class TokenRows:
    """The text as rows of tokens for SFTTrainer, some of them held out, and what the model is asked to continue."""

    train: Dataset = field(repr=False)
    eval: Dataset = field(repr=False)
    length: int
    prompts: list[str] = field(repr=False)
    bundled: bool
    card: dict[str, Any]  # documents, tokens, left_out and fingerprint

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json."""
        return {**self.card, "data_fingerprint": self.card["fingerprint"], "held_out_rows": len(self.eval)}

    def __str__(self) -> str:
        values = {name: f"{self.card[name]:,}" for name in ("documents", "tokens")}
        values |= {"rows": f"{len(self.train):,}", "held": f"{len(self.eval):,}", "length": str(self.length)}
        text = tr("{documents} documents, {tokens} tokens: {rows} rows of {length}, and {held} held out", **values)
        if count := self.card["left_out"]:
            text += "\n" + tr("[WARN] {count} rows were left out: {seen}", count=f"{count:,}", seen=self.card["seen"])
        return text


def write_rows(stream: IterableDataset, texts: Texts, tokenizer: Any, length: int, folder: Path) -> TokenRows:
    """Write rows of `length` tokens into the working folder, unless they are there, and hold some out."""
    code = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    about = {"texts": texts.about, "tokenizer": code, "length": length}
    folder = files.make_folder(folder, "tokens") / "tokens"
    if files.stamp(folder) != about:
        with files.complete_folder(folder, about) as place:
            files.write_json(place / "card.json", _write_card(stream, texts, length, place / "tokens.arrow"))
    card = files.read_json(folder / "card.json")
    rows = Dataset.from_file(str(folder / "tokens.arrow"))
    count = min(MOST_HELD_OUT, len(rows) // 10 + 1)
    if len(rows) <= count:
        raise CourseError(
            tr(
                "The text fills {rows} row(s) of {length} tokens ({tokens} tokens).",
                rows=len(rows),
                length=length,
                tokens=card["tokens"],
            ),
            allowed=tr("text for two rows or more: one is held out"),
            todo=tr("Add text (or raise TEXTS), or lower LENGTH."),
        )
    held_out = [number * len(rows) // count for number in range(count)]  # from everywhere in the text
    kept = sorted(set(range(len(rows))) - set(held_out))
    train, held = (rows.select(chosen, keep_in_memory=True) for chosen in (kept, held_out))
    prompts = [corpus.chat(one) + "<|im_start|>assistant\n" for one in QUESTIONS]
    if texts.source:
        prompts = [tokenizer.decode(held[at]["input_ids"][:PROMPT]) for at in range(min(3, count))]
    return TokenRows(train.with_format("numpy"), held, length, prompts, not texts.source, card)


def _write_card(stream: IterableDataset, texts: Texts, length: int, file: Path) -> dict[str, Any]:
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
    [(seen, _)] = texts.left_out.most_common(1) or [("", 0)]
    return {
        "documents": texts.read,
        "tokens": rows * length,
        "left_out": texts.left_out.total(),
        "seen": seen,
        "fingerprint": digest.hexdigest()[:16],
    }


def make_config(width: int, depth: int, tokenizer: Any, length: int) -> Any:
    """Qwen2.5's architecture in another size: heads of 64, two query heads for each of keys and values."""
    return Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 5 // 2, num_hidden_layers=depth,
        num_attention_heads=width // HEAD, num_key_value_heads=width // HEAD // 2, tie_word_embeddings=True,
        max_position_embeddings=max(1024, length), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def shape_of(config: Any) -> models.Shape:
    """The shape of a config, for the plan."""
    return models.Shape(
        name="Qwen2", layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, head_dim=HEAD, intermediate=config.intermediate_size,
        vocab=config.vocab_size, tied=True,
    )  # fmt: skip


def with_recipe(lesson: Any, config: Any, rows: TokenRows, steps: int, batch: int) -> Any:
    """The lesson with the recipe for this model and text, and the micro-batch for this GPU; prints the forecast."""
    given = {name: value for name, value in lesson.resolved.set_values.items() if value != "auto"}
    batch = given.get("course.conversations_per_step", batch)
    per_epoch = math.ceil(len(rows.train) / batch)
    steps = steps or (BUNDLED_STEPS if rows.bundled else per_epoch)
    shape, every = shape_of(config), [gpus.find("RTX 3090"), gpus.find("RTX 4090")]
    if lesson.gpu:
        here = gpus.of_machine(lesson.gpu)
        every = [here, *(one for one in every if one.name != here.name)]
    forecasts = [plan.pretraining(shape, gpu, rows.length, batch, steps) for gpu in every]
    size, recomputes = forecasts[0].per_device_train_batch_size, forecasts[0].gradient_checkpointing
    if not lesson.gpu:
        most = max(CPU_TOKENS // rows.length, 1)
        size = max(size for size in range(1, min(batch, most) + 1) if batch % size == 0)
        recomputes = False
    sft = SFT(
        max_length=rows.length, per_device_train_batch_size=size, gradient_accumulation_steps=batch // size,
        num_train_epochs=0.0, max_steps=steps, learning_rate=float(f"{0.5 / config.hidden_size:.1e}"),
        lr_scheduler_type="cosine", warmup_steps=min(0.1, 100 / steps), weight_decay=0.1, max_grad_norm=1.0,
        optim="adamw_torch_fused", packing=False, gradient_checkpointing=recomputes, activation_offloading=False,
        use_liger_kernel=False, save_total_limit=2, logging_steps=max(1, min(10, steps // 100)),
        save_steps=lesson.parameters.get("SAVE_STEPS") or max(1, min(MOST_BETWEEN, math.ceil(steps / SAVES))),
        load_best_model_at_end=True,
    )  # fmt: skip
    named = [name.removeprefix("sft.") for name in given if name.startswith("sft.")]
    sft = sft.model_copy(update={name: lesson.profile.sft[name] for name in named})
    if "per_device_train_batch_size" in named and "gradient_accumulation_steps" not in named:
        sft = sft.model_copy(update={"gradient_accumulation_steps": batch // int(sft.per_device_train_batch_size)})
    in_step = rows_per_step(sft)
    print(tr(
        "{steps} steps of {batch} rows ({tokens} tokens), {epochs} epochs; learning rate {rate}, {precision}",
        steps=f"{sft.max_steps:,}", batch=in_step, tokens=f"{in_step * rows.length:,}",
        epochs=f"{sft.max_steps / per_epoch:.2g}", rate=f"{sft.learning_rate:g}",
        precision=lesson.profile.from_pretrained.dtype,
    ))  # fmt: skip
    print(plan.describe(shape, forecasts))
    course = lesson.profile.course.model_copy(update={"validation_rows": len(rows.eval), "early_stopping_patience": 3})
    profile = lesson.profile.model_copy(update={"sft": sft, "course": course})
    return replace(lesson, resolved=replace(lesson.resolved, profile=profile))


class PretrainingCallback(CourseCallback):
    """The callback of lesson 03 for a model of which every weight is trained."""

    def prepare(self, trainer: Any) -> str:
        """Check the disk and the run; how much there is to train, in one line."""
        if files.stamp(self.lesson.run.adapter) is not None:
            raise CourseError(
                tr("The run {run} holds an adapter of lesson 03.", run=self.lesson.run.name),
                todo=tr("Choose another RUN_NAME."),
            )
        self.require_room(trainer)
        self.take_over(trainer)
        disable_progress_bar()  # of every saved checkpoint
        logging.getLogger("transformers.trainer").setLevel(logging.ERROR)  # tied weights are stored once, as meant
        rows: Any = self.dataset  # TokenRows
        sft = self.lesson.profile.sft
        self.fingerprint = {
            "model": shape_of(trainer.model.config).model_dump(),
            "data": rows.card["fingerprint"],
            "sft": sft.model_dump(mode="json", exclude=resuming.MAY_CHANGE),
            "rows_per_step": rows_per_step(sft),
            "seed": trainer.args.seed,
        }
        parameters, tokens = trainer.model.num_parameters(), len(rows.train) * rows.length
        return tr(
            "{parameters} parameters to train on {tokens} tokens",
            parameters=f"{parameters:,}", tokens=f"{tokens:,}",
        )  # fmt: skip


def complete(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int = 40) -> list[str]:
    """How the model continues each prompt; greedy, so it is the same every time."""
    stops, continued = sorted({*find_stop_ids(tokenizer), separator_of(tokenizer)}), []
    model.eval()
    for prompt in prompts:
        given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **given, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops, pad_token_id=stops[0]
            )
        continued.append(tokenizer.decode(output[0, given["input_ids"].shape[1] :]))
    return continued


def text_loss(model: Any, tokenizer: Any, text: str) -> float:
    """The mean loss of a text after a separator."""
    ids = torch.tensor(
        [[separator_of(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]], device=model.device
    )
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def summary(result: TrainingResult) -> str:
    """What a training took and brought, in lines."""
    losses = [loss for _, loss in result.history["validation"]]
    first, best = losses[0], min(losses)
    return result.described({
        tr("held-out loss"): f"{first:.3f} -> {best:.3f}",
        tr("perplexity"): f"{math.exp(first):,.0f} -> {math.exp(best):,.1f}",
    })  # fmt: skip


def save(result: TrainingResult, tokenizer: Any) -> Path:
    """Write model (bfloat16) and tokenizer to `base` of the run folder; one of this very training is left as it is."""
    model, folder = result.trainer.model, result.callback.lesson.run.path / BASE
    checksum = f"{zlib.crc32(repr(sorted(result.checksums.items())).encode()):08x}"
    about = {"steps": result.kept_step, "weights": checksum, "fingerprint": result.callback.fingerprint}
    if files.stamp(folder) != about:
        stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        with files.complete_folder(folder, about) as place:
            weights = {name: one.to(torch.bfloat16) for name, one in model.state_dict().items()}
            model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stop, pad_token_id=pad)
            model.save_pretrained(place, state_dict=weights)
            tokenizer.save_pretrained(place)
    return folder
