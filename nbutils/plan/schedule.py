"""What follows from the rows of the data: conversations per step, epochs, learning rate, saves, validation.

The GPU decides none of this, only how a step is cut into micro-batches (forecast). What a profile names is kept.
Where the numbers come from: `benchmarks/recipes.py`, and for other model sizes Schulman et al., "LoRA Without Regret".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from nbutils import distributed
from nbutils.config import Profile, Train
from nbutils.hardware import Choice
from nbutils.models import Shape

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
SMALL = 1e9  # parameters: below, 4 bits cost a model much of what it knows, and 16 fit every GPU
UNKNOWN_ROWS = "recipe: the value for large data, until lesson 03 knows your rows"


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


def schedule(train: Train, rows: Rows) -> Schedule:
    """Steps and their size, for a profile whose values are settled."""
    per_epoch, each = _per_epoch(train, rows)
    steps = train.max_steps or math.ceil(per_epoch * float(train.epochs))
    return Schedule(steps, each, each * rows.mean, steps / per_epoch, float(train.learning_rate))


def few_steps(train: Train, pinned: Train, rows: Rows) -> str:
    """What to set where the batch a profile names leaves too few steps; empty where it does not."""
    made, better = schedule(train, rows), _examples_per_step(rows, train.max_length)
    enough = made.steps >= STEPS_PER_EPOCH or better >= made.examples_per_step
    if pinned.batch == "auto" or train.max_steps or enough:
        return ""
    return (
        f"train.batch={train.batch} puts {made.examples_per_step:,.0f} conversations into a step and leaves only "
        f"{made.steps} steps, too few to learn much: set train.batch={better}, train.packing=false"
    )


def choose(profile: Profile, rows: Rows | None, shape: Shape | None, processes: int = 1) -> dict[str, Choice]:
    """The values a profile leaves to its model and its rows, by dotted name; without rows those of large data."""
    train, found = profile.train, _method(profile, shape)
    found |= _batch(train, rows, processes)
    if train.learning_rate == "auto":
        found["train.learning_rate"] = _learning_rate(apply(profile, found).train, rows, shape)
    if train.epochs == "auto":
        epochs = next(epochs for most, epochs in EPOCHS if (rows.examples if rows else math.inf) <= most)
        known = f"recipe: for {rows.examples:,} rows; the step with the best validation loss is kept" if rows else ""
        found["train.epochs"] = Choice(epochs, known or UNKNOWN_ROWS)
    if train.save_steps == "auto":
        steps = schedule(apply(profile, found).train, rows).steps if rows else 0
        between = max(1, min(MOST_BETWEEN, math.ceil(steps / SAVES))) if rows else MOST_BETWEEN
        text = f"recipe: {math.ceil(steps / between)} checkpoints, each with a validation loss"
        found["train.save_steps"] = Choice(between, text if rows else UNKNOWN_ROWS)
    if train.validation_rows == "auto":
        found["train.validation_rows"] = _validation_rows(apply(profile, found).train, rows)
    return found


def apply(profile: Profile, found: Mapping[str, Choice]) -> Profile:
    """The profile with these values in it."""
    for name, choice in found.items():
        group, _, key = name.rpartition(".")
        values = {key: choice.value}
        inner = {group: getattr(profile, group).model_copy(update=values)} if group else values
        profile = profile.model_copy(update=inner)
    return profile


def _method(profile: Profile, shape: Shape | None) -> dict[str, Choice]:
    """4 or 16 bits for the base model, where the profile leaves that open; 4 where its size is not known."""
    if profile.method != "auto":
        return {}
    small = shape is not None and shape.params < SMALL
    if profile.quantization.type != "none" and not small:
        return {"method": Choice("qlora", "")}  # the comment in the profile says why
    under = "recipe: a model below a billion parameters loses quality in 4 bits, and 16 bits fit"
    return {
        "method": Choice("lora", under if small else "quantization.type is none"),
        "quantization.type": Choice("none", "method lora"),
        "quantization.double": Choice(False, "method lora"),
    }


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
    packing, batch = train.packing, train.batch
    each = _examples_per_step(rows, train.max_length) if rows else 0
    filled = each * rows.mean / train.max_length if rows else LARGEST_STEP
    if packing == "auto":
        named = "the batch that is set counts conversations; with packing: true it counts packed rows"
        text = f"a step fills {filled:.1f} rows of {train.max_length} tokens; from {PACK_FROM} on, rows are packed"
        packing = batch == "auto" and filled >= PACK_FROM
        found["train.packing"] = Choice(packing, f"recipe: {text if batch == 'auto' else named}")
    if batch == "auto":
        size = max(1, round(filled)) if packing else each or FEWEST
        batch = math.ceil(size / processes) * processes  # every process has its share
        settled = train.model_copy(update={"batch": batch, "packing": packing})
        steps, conversations = _per_epoch(settled, rows) if rows else (0, 0)
        text = f"recipe: {conversations:.0f} conversations per step, {steps} steps per epoch"
        found["train.batch"] = Choice(batch, text if rows else UNKNOWN_ROWS)
    if train.micro_batch != "auto":
        size = distributed.micro_batch_for(batch, train.micro_batch, processes)
        reason = f"the largest up to {train.micro_batch} that divides each process's part of the batch of {batch}"
        found |= {} if size == train.micro_batch else {"train.micro_batch": Choice(size, reason)}
    return found


def _learning_rate(train: Train, rows: Rows | None, shape: Shape | None) -> Choice:
    if shape is None:
        return Choice(2e-4, "recipe: usual for LoRA; the size of this model is not known before its download")
    each = _per_epoch(train, rows)[1] if rows else FULL_RATE_FROM
    small = min(1.0, each / FULL_RATE_FROM) ** 0.5
    rate = float(f"{small * RATE * (AT_HIDDEN / shape.hidden) ** POWER:.1e}")
    why = f"a model of width {shape.hidden}" + (f" and {each:.0f} conversations per step" if small < 1 else "")
    return Choice(rate, f"recipe: for {why}; halve it if the loss is unstable")


def _validation_rows(train: Train, rows: Rows | None) -> Choice:
    if rows is None:
        return Choice(MOST_VALIDATED, UNKNOWN_ROWS)
    made = schedule(train, rows)
    times = math.ceil(made.steps / int(train.save_steps)) + 1
    budget = int(SHARE * made.steps * made.examples_per_step / (FORWARD * times))
    count = max(LEAST_VALIDATED, min(MOST_VALIDATED, budget))
    return Choice(count, f"recipe: {times} validations, in about {SHARE:.0%} of the training time or less")
