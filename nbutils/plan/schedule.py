"""What follows from the rows of the data: conversations per step, epochs, learning rate, saves, validation.

The GPU decides none of this, only how a step is cut into micro-batches (forecast). What a profile names is kept.
Where the numbers come from: `benchmarks/recipes.py`, and for other model sizes Schulman et al., "LoRA Without Regret".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from nbutils import scaling
from nbutils.config import Profile, Quantization, Train
from nbutils.hardware import Choice

STEPS_PER_EPOCH = 50  # fewer, of more conversations each, learn less; more take longer and learn no more
FEWEST = 8  # conversations per step: fewer follow single rows
LARGEST_STEP = 8  # rows of max_length: where data is large, the step a GPU computes at its full speed
PACK_FROM = 4  # rows of max_length in a step: below, packing could not meet the number of conversations
EPOCHS = ((100, 5.0), (10_000, 3.0), (50_000, 2.0), (math.inf, 1.0))  # up to so many rows
RATE, AT_HIDDEN, POWER = 4e-4, 2000, 0.78  # LoRA's best rate falls with the width of the model
FULL_RATE_FROM = 16  # conversations per step: noisier steps want a smaller rate, by the root of their size
SAVES, MOST_BETWEEN = 5, 50  # per run, and the steps between two of them in a long one
MOST_VALIDATED, LEAST_VALIDATED = 64, 4  # rows
SHARE, FORWARD = 0.05, 0.4  # of the training time for validation; the cost of a row without its backward pass
PACKED = 0.97  # share of a packed row that is real tokens, with best-fit packing
FEW_STEPS = 50
SMALL = 1e9  # parameters: below, 4 bits cost a model much of what it knows, and 16 fit every GPU
UNKNOWN_ROWS = "recipe: as for large data, until your rows are known"


@dataclass(frozen=True)
class Rows:
    """The data as far as the recipe depends on it: how many examples there are, and how long."""

    examples: int
    mean: float
    spread: float  # standard deviation of the lengths

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Rows:
        """Those of examples with these lengths in tokens."""
        return cls(len(lengths), fmean(lengths), pstdev(lengths))

    @classmethod
    def like(cls, examples: int, mean: float, longest: int) -> Rows:
        """A guess from the mean length alone: instruction data spreads about as wide as its mean."""
        return cls(examples, min(mean, longest), max(0.0, min(mean, longest - mean)))

    def packed(self, max_length: int) -> int:
        """Rows they fill when packed to this length: nearly full ones, unless all are long or of one length."""
        fill = PACKED
        if self.mean > max_length / 2 or self.spread < self.mean / 4:
            fill = min(PACKED, max_length // math.ceil(self.mean) * self.mean / max_length)
        return math.ceil(self.examples * self.mean / (fill * max_length))


@dataclass(frozen=True)
class Schedule:
    """Steps and their size."""

    steps: int
    examples_per_step: float
    tokens_per_step: float
    epochs: float
    learning_rate: float

    def __str__(self) -> str:
        return (
            f"{self.steps:,} steps of {self.examples_per_step:,.0f} conversations "
            f"({self.tokens_per_step:,.0f} tokens), {self.epochs:.3g} epochs, learning rate {self.learning_rate:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        rounded = {"examples_per_step": round(self.examples_per_step, 1), "epochs": round(self.epochs, 3)}
        return {"steps": self.steps, **rounded, "learning_rate": self.learning_rate}


def schedule(train: Train, rows: Rows) -> Schedule:
    """Steps and their size, for a profile whose values are settled."""
    per_epoch, each = _per_epoch(train, rows)
    steps = train.max_steps or math.ceil(per_epoch * float(train.epochs))
    return Schedule(steps, each, each * rows.mean, steps / per_epoch, float(train.learning_rate))


def few_steps(train: Train, pinned: Train, rows: Rows) -> str:
    """What to set where the batch a profile names leaves too few steps; empty where it does not."""
    made, better = schedule(train, rows), _examples_per_step(rows, train.max_length)
    enough = made.steps >= FEW_STEPS or better >= made.examples_per_step
    if pinned.batch == "auto" or train.max_steps or enough:
        return ""
    return (
        f"train.batch {train.batch} makes steps of {made.examples_per_step:,.0f} conversations and leaves "
        f"{made.steps} of them, too few to learn much: set train.batch={better}, train.packing=false"
    )


def choose_method(profile: Profile, params: int | None) -> tuple[Profile, dict[str, Choice]]:
    """The profile with 4 or 16 bits for the base, where it leaves that open; without a known size 4."""
    if profile.method != "auto":
        return profile, {}
    small = params is not None and params < SMALL
    if profile.quantization.type != "none" and not small:
        return profile.model_copy(update={"method": "qlora"}), {}  # the comment in the profile says why
    under = "recipe: a model under a billion parameters loses much in 4 bits, and 16 fit"
    unquantized = Quantization(type="none", double=False)
    found = {"method": Choice("lora", under if small else "quantization.type is none")}
    found |= {f"quantization.{key}": Choice(value, "method lora") for key, value in unquantized.model_dump().items()}
    return profile.model_copy(update={"method": "lora", "quantization": unquantized}), found


def choose(train: Train, rows: Rows | None, hidden: int | None, processes: int = 1) -> dict[str, Choice]:
    """The values a profile leaves to its data, by dotted name; without rows those of large data."""
    found = _batch(train, rows, processes)
    if train.learning_rate == "auto":
        found["learning_rate"] = _learning_rate(hidden, apply(train, found), rows)
    if train.epochs == "auto":
        epochs = next(epochs for most, epochs in EPOCHS if (rows.examples if rows else math.inf) <= most)
        known = f"recipe: for {rows.examples:,} examples; the best step by validation loss is kept" if rows else ""
        found["epochs"] = Choice(epochs, known or UNKNOWN_ROWS)
    if train.save_steps == "auto":
        found["save_steps"] = _save_steps(apply(train, found), rows)
    if train.validation_rows == "auto":
        found["validation_rows"] = _validation_rows(apply(train, found), rows)
    return {f"train.{name}": choice for name, choice in found.items()}


def apply(train: Train, found: Mapping[str, Choice]) -> Train:
    """The settings with these values in them."""
    return train.model_copy(update={name.removeprefix("train."): choice.value for name, choice in found.items()})


def _per_epoch(train: Train, rows: Rows) -> tuple[int, float]:
    """Steps of an epoch, and the conversations in each, for a batch that is settled."""
    whole = rows.packed(train.max_length) if train.packing else rows.examples
    return math.ceil(whole / train.step_rows), rows.examples * min(train.step_rows, whole) / whole


def _examples_per_step(rows: Rows, max_length: int) -> int:
    """A power of two that leaves about 50 steps in an epoch, up to the largest step."""
    ideal = 2 ** round(math.log2(max(rows.examples / STEPS_PER_EPOCH, FEWEST)))
    return max(1, min(ideal, int(LARGEST_STEP * max_length / rows.mean)))


def _batch(train: Train, rows: Rows | None, processes: int) -> dict[str, Choice]:
    """Batch and packing: conversations laid end to end, or, where a step holds many, rows packed to max_length."""
    found: dict[str, Choice] = {}
    each = _examples_per_step(rows, train.max_length) if rows else 0
    filled = each * rows.mean / train.max_length if rows else LARGEST_STEP
    if train.packing == "auto" and train.batch == "auto":
        text = f"{filled:.1f} rows of {train.max_length} tokens would fill a step: {PACK_FROM} or more are packed"
        found["packing"] = Choice(filled >= PACK_FROM, f"recipe: {text}")
    elif train.packing == "auto":
        text = "a batch that is named counts conversations; packing: true makes it count packed rows"
        found["packing"] = Choice(False, f"recipe: {text}")
    train = apply(train, found)
    if train.batch == "auto":
        size = max(1, round(filled)) if train.packing else each or FEWEST
        size = math.ceil(size / processes) * processes  # every process has its share
        train = train.model_copy(update={"batch": size})
        found["batch"] = Choice(size, f"recipe: {_step_size(train, rows)}")
    if train.micro_batch != "auto":
        size = scaling.micro_batch_for(train.step_rows, train.micro_batch, processes)
        shared = f"{processes} processes share it" if processes > 1 else "a step is made of whole micro-steps"
        reason = f"the largest up to {train.micro_batch} that divides the batch of {train.batch}: {shared}"
        found |= {} if size == train.micro_batch else {"micro_batch": Choice(size, reason)}
    return found


def _step_size(train: Train, rows: Rows | None) -> str:
    if rows is None:
        return "packed rows, as for large data, until your rows are known"
    steps, each = _per_epoch(train, rows)
    packed = f"{train.batch} rows of {train.max_length} tokens, about " if train.packing else ""
    large = LARGEST_STEP * train.max_length / rows.mean
    fewer = f"; steps of {large:.0f} would leave {math.ceil(rows.examples / large)}" if large > each * 1.5 else ""
    return f"{packed}{each:.0f} conversations a step: {steps} steps an epoch{fewer}"


def _learning_rate(hidden: int | None, train: Train, rows: Rows | None) -> Choice:
    if hidden is None:
        return Choice(2e-4, "recipe: usual for LoRA; the size of this model is not known before its download")
    each = _per_epoch(train, rows)[1] if rows else FULL_RATE_FROM
    small = min(1.0, each / FULL_RATE_FROM) ** 0.5
    rate = float(f"{small * RATE * (AT_HIDDEN / hidden) ** POWER:.1e}")
    why = f"a model {hidden} wide" + (f" and steps of {each:.0f} conversations" if small < 1 else "")
    return Choice(rate, f"recipe: LoRA's best rate for {why}; halve it if the loss jumps")


def _save_steps(train: Train, rows: Rows | None) -> Choice:
    if rows is None:
        return Choice(MOST_BETWEEN, UNKNOWN_ROWS)
    steps = schedule(train, rows).steps
    between = max(1, min(MOST_BETWEEN, math.ceil(steps / SAVES)))
    return Choice(between, f"recipe: {math.ceil(steps / between)} checkpoints, each with a validation loss")


def _validation_rows(train: Train, rows: Rows | None) -> Choice:
    if rows is None:
        return Choice(MOST_VALIDATED, UNKNOWN_ROWS)
    made = schedule(train, rows)
    times = math.ceil(made.steps / int(train.save_steps)) + 1
    budget = int(SHARE * made.steps * made.examples_per_step / (FORWARD * times))
    count = max(LEAST_VALIDATED, min(MOST_VALIDATED, budget))
    return Choice(count, f"recipe: held-back rows, {times} times; about {SHARE:.0%} of the training time or less")
