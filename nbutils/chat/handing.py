"""What the trainer is handed, and what it made of it: the checked tokens with their labels, and no second rendering.

Rows as messages would pass through a table whose columns all rows share: tools and arguments of one row would turn up,
empty, in every other one, and be rendered. Tokens cannot change. Not here: the check of the rows (contract).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError

if TYPE_CHECKING:
    from datasets import Dataset

    from nbutils.chat.contract import ContractReport
    from nbutils.chat.fitting import Fitting
    from nbutils.chat.rendering import Example, Row

IGNORED = -100  # the label of a token without loss
BATCHES = 8  # through the collator; all of them treat their rows alike


def training_dataset(fitted: Fitting) -> Dataset:
    """The examples of the rows that fit, for SFTTrainer: it packs and shuffles these tokens, and changes none."""
    return _dataset(fitted.examples)


def validation_dataset(fitted: Fitting, held_back: Sequence[Row], count: int) -> Dataset:
    """`count` of the held-back rows, evenly spread, rendered as the training ones are; too long ones are left out."""
    chosen = (
        [held_back[number * len(held_back) // count] for number in range(count)]
        if count < len(held_back)
        else held_back
    )
    examples = fitted.view.encode_all(chosen) if count and held_back else []
    found = [one for one in examples if len(one.ids) <= (fitted.max_length or len(one.ids)) and any(one.trained)]
    if count and not found:
        print("no row is held back that could be validated on: trained without validation, the last step is kept")
    return _dataset(found)


def _dataset(examples: Sequence[Example]) -> Dataset:
    import numpy
    import pyarrow
    from datasets import Dataset

    edges = list(itertools.accumulate((len(example.ids) for example in examples), initial=0))
    ids, trained = array("i"), bytearray()
    for example in examples:
        ids += example.ids
        trained += example.trained
    tokens = numpy.frombuffer(ids, dtype=numpy.int32)
    labels = numpy.where(numpy.frombuffer(trained, dtype=bool), tokens, IGNORED).astype(numpy.int64)
    columns = [pyarrow.LargeListArray.from_arrays(edges, pyarrow.array(values)) for values in (tokens, labels)]
    return Dataset(pyarrow.table(columns, names=["input_ids", "labels"]))


def check_trainer(trainer: Any, report: ContractReport) -> str:
    """Stop unless, after packing, truncation and collation, exactly the tokens of the contract carry the loss."""
    import numpy

    trained = stops = 0
    for batch in trainer.train_dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        trained += int((labels != IGNORED).sum())
        stops += int(numpy.isin(labels, report.stop_ids).sum())
    if (trained, stops) != (report.trained, report.answers):
        raise _lost(f"{trained} tokens with {stops} stop tokens", f"{report.trained} with {report.answers}")
    rows = [trainer.train_dataset[at] for at in range(min(len(trainer.train_dataset), BATCHES))]
    wanted = sum(label != IGNORED for row in rows for label in row["labels"])
    found = int((trainer.data_collator(rows)["labels"] != IGNORED).sum())
    if found != wanted:
        raise _lost(f"{found} tokens of its first rows", f"{wanted}: its collator hides some")
    return f"collated, {trained} tokens are trained, {stops} stop tokens among them: as the contract counted"


def _lost(found: str, wanted: str) -> CourseError:
    return CourseError(
        f"The trainer would train {found}, and the contract counted {wanted}.",
        "the tokens of the contract, all of them and nothing else",
        "hand it chat.training_dataset(...), with the max_length of the contract, packing_strategy bfd and no collator",
    )
