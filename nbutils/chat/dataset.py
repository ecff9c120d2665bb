"""Datasets for SFTTrainer, made of the tokens that were checked; answers of a model; a row with its trained tokens."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbutils import display, profiles
from nbutils.chat.contract import ContractReport, FilteredRows, check_contract, filter_by_length
from nbutils.chat.render import Example, Row, View, find_stop_ids, may_skip_thinking, training_format
from nbutils.errors import CourseError
from nbutils.record import LessonLike

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100  # the label of a token without loss
COLLATED_ROWS = 8  # a collator treats all rows alike


@dataclass(frozen=True)
class ChatDataset:
    """Rows as tokens and labels for SFTTrainer, and what was checked of them."""

    train: Dataset = field(repr=False)
    eval: Dataset | None = field(repr=False)  # None: no held-back row can be validated on
    lengths: list[int] = field(repr=False)  # tokens of each example that is trained
    left_out: list[Row] = field(repr=False)  # too long
    report: ContractReport
    text: str

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json."""
        counts = {"examples": self.report.examples, "trained_tokens": self.report.trained}
        return {"form": self.report.form.value, **counts, "rows_left_out": len(self.left_out)}

    def __str__(self) -> str:
        return self.text


def build_dataset(
    tokenizer: Any, train_rows: Sequence[Row], eval_rows: Sequence[Row], lesson: LessonLike
) -> ChatDataset:
    """Render the rows, leave out those that are too long (too_long.jsonl lists them), and check the contract."""
    stop_ids = find_stop_ids(tokenizer, lesson.model)
    filtered = filter_by_length(tokenizer, train_rows, lesson.profile.train.max_length, stop_ids=stop_ids)
    filtered.write(lesson.run.data)
    report = check_contract(filtered)
    recipe = profiles.fit(lesson.resolved, profiles.Rows.of(filtered.lengths)).profile.train
    validation = validation_dataset(filtered, eval_rows, int(recipe.validation_rows))
    return ChatDataset(
        training_dataset(filtered), validation if len(validation) else None, filtered.lengths, filtered.left_out,
        report, f"{filtered}\n{report}",
    )  # fmt: skip


def training_dataset(filtered: FilteredRows) -> Dataset:
    """The examples of the kept rows, for SFTTrainer: it packs and shuffles these tokens, and changes none."""
    return _dataset(filtered.examples)


def validation_dataset(filtered: FilteredRows, held_back: Sequence[Row], count: int) -> Dataset:
    """`count` of the held-back rows, evenly spread, rendered as the training rows are; long ones are left out."""
    if count < len(held_back):
        held_back = [held_back[number * len(held_back) // count] for number in range(count)]
    examples = filtered.view.encode_all(held_back) if count and held_back else []
    usable = [one for one in examples if len(one.ids) <= (filtered.max_length or len(one.ids)) and any(one.trained)]
    if count and not usable:
        print("No held-back row can be used for validation: training goes without it, and the last step is kept.")
    return _dataset(usable)


def _dataset(examples: Sequence[Example]) -> Dataset:
    import numpy
    import pyarrow
    from datasets import Dataset

    offsets = list(itertools.accumulate((len(example.ids) for example in examples), initial=0))
    ids, trained = array("i"), bytearray()
    for example in examples:
        ids += example.ids
        trained += example.trained
    tokens = numpy.frombuffer(ids, dtype=numpy.int32)
    labels = numpy.where(numpy.frombuffer(trained, dtype=bool), tokens, IGNORED).astype(numpy.int64)
    # offsets of 64 bits: those of a plain list end at 2**31 tokens
    columns = [pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values)) for values in (tokens, labels)]
    return Dataset(pyarrow.table(columns, names=["input_ids", "labels"]))


def check_trainer(trainer: Any, report: ContractReport) -> str:
    """Stop unless, after packing, truncation and collation, exactly the tokens of the contract carry the loss."""
    import numpy

    dataset, trained, stops = trainer.train_dataset, 0, 0
    for batch in dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        trained += int((labels != IGNORED).sum())
        stops += int(numpy.isin(labels, report.stop_ids).sum())
    rows = [dataset[at] for at in range(min(len(dataset), COLLATED_ROWS))]
    hidden = sum(label != IGNORED for row in rows for label in row["labels"])
    hidden -= int((trainer.data_collator(rows)["labels"] != IGNORED).sum())
    if (trained, stops, hidden) != (report.trained, report.answers, 0):
        found = f"{trained} tokens with {stops} stop tokens, and its collator hides {hidden}"
        expected = f"{report.trained} tokens with {report.answers} stop tokens"
        raise CourseError("chat.trainer_mismatch", found=found, expected=expected)
    return f"collated, {trained} tokens are trained, {stops} stop tokens among them: as the contract counted"


def answer(model: Any, tokenizer: Any, rows: Sequence[Row], max_new_tokens: int = 128) -> list[str]:
    """The model's own answer to the last question of each row, as text; greedy, so it is the same every time."""
    import torch

    view = View(tokenizer, "prompt_completion", False if may_skip_thinking(tokenizer, rows) else None)
    stops, training, answers = sorted(find_stop_ids(tokenizer, model.generation_config)), model.training, []
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "use_cache": True}
    model.eval()
    for row in rows:
        ids = torch.tensor([view.prompt(row["messages"][:-1], row.get("tools"))], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                eos_token_id=stops, pad_token_id=stops[0], **settings,
            )  # fmt: skip
        answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
    model.train(training)
    return answers


def show_row(tokenizer: Any, row: Row) -> None:
    """Show one conversation with its trained tokens in color; in [brackets] outside a notebook."""
    form = training_format(tokenizer, [row]).value
    ids, trained = View(tokenizer, form).encode(row["messages"], row.get("tools"))
    groups = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    runs = [(tokenizer.decode([token for token, _ in pairs]), mask) for mask, pairs in groups]
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    if form == "prompt_completion" and answers > 1:
        print(f"This row has {answers} answers, each an example of its own; here is the last one.")
    print(f"{sum(trained)} of {len(ids)} tokens are trained. They are marked:")
    display.show("tokens.html", "".join(f"[{text}]" if mask else text for text, mask in runs), runs=runs)
