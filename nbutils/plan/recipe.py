"""The recipe: the values a profile leaves to the rows of the data and the size of the model, each with its reason.

The GPU decides nothing of it, only how a step is cut into micro-batches. What a profile names is kept. The numbers are
from `benchmarks/recipes.py`, and for other model sizes from Schulman et al., "LoRA Without Regret".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from nbutils import distributed
from nbutils.config import SFT, Profile
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.models import Shape

STEPS_PER_EPOCH = 50  # fewer, of more conversations each, learn less; more take longer and learn no more
FEWEST = 8  # conversations per step: the gradient of fewer is mostly the noise of single rows
LARGE_DATA = 100_000  # rows
LARGEST_STEP = 8  # rows of max_length: enough for a GPU's full speed
PACK_FROM = 4  # rows of max_length in a step: below, packing could not meet the number of conversations
PACKED = 0.97  # share of a packed row that is real tokens, with best-fit packing
EPOCHS = ((100, 5.0), (10_000, 3.0), (50_000, 2.0), (math.inf, 1.0))  # up to so many rows
USUAL_RATE = 2e-4  # for a model whose size is not known
RATE = 4e-4  # LoRA's best rate for a model of hidden size AT_HIDDEN
AT_HIDDEN = 2000
POWER = 0.78  # for others: RATE * (AT_HIDDEN / hidden) ** POWER
FULL_RATE_FROM = 16  # conversations per step: noisier steps want a smaller rate, by the root of their size
SAVES = 5  # checkpoints of a run
MOST_BETWEEN = 50  # steps between two of them in a long one
MOST_VALIDATED = 64  # rows
LEAST_VALIDATED = 4
SHARE = 0.05  # of the training time for validation
FORWARD = 0.4  # the cost of a row without its backward pass
PRICE = 0.05  # nats per token that 4 bits may cost before the training; after it 15 to 39 % of a cost were left
SMALL = 1e9  # parameters: where the cost is not known, smaller models get 16 bits, which fit every GPU
METHODS = ("lora", "qlora")
Choices = dict[str, Choice]  # by dotted name


@dataclass(frozen=True)
class Rows:
    """The data as far as the recipe depends on it: how many examples there are, and how long."""

    examples: int
    mean: float
    spread: float  # standard deviation of the lengths
    held_out: int | None = None  # rows for the validation; None: unknown

    @classmethod
    def of(cls, lengths: Sequence[int], held_out: int | None = None) -> Rows:
        """Those of examples with these lengths in tokens."""
        return cls(len(lengths), fmean(lengths), pstdev(lengths), held_out)

    def packed(self, max_length: int) -> int:
        """Rows they fill when packed to this length: nearly full ones, unless all are long or of one length."""
        mean = self.mean
        fill = PACKED
        if mean > max_length / 2 or self.spread < mean / 4:
            in_a_row = max(1, max_length // math.ceil(mean))
            full = in_a_row * mean / max_length
            fill = min(PACKED, full)
        tokens = self.examples * mean
        return math.ceil(tokens / (fill * max_length))


@dataclass(frozen=True)
class Schedule:
    """Steps and their size."""

    steps: int
    examples_per_step: float
    tokens_per_step: float
    epochs: float
    learning_rate: float

    def __str__(self) -> str:
        return tr(
            "{steps:,} steps of {examples_per_step:,.0f} conversations ({tokens_per_step:,.0f} tokens), {epochs:.3g} "
            "epochs, learning rate {learning_rate:g}",
            **asdict(self),
        )


@dataclass(frozen=True)
class Begun:
    """What a run that has begun keeps of its first session."""

    rows_per_step: int | None = None
    packing: bool | None = None
    validation_rows: int = 0
    method: str = ""


@dataclass(frozen=True)
class BaseLosses:
    """The loss of the base model on some held-out rows, before it is trained: unquantized (lora) and in 4 bits."""

    rows: int
    loss: dict[str, float]  # by method, in nats per token
    needed_gib: dict[str, float]  # that a training needs at least; empty without a GPU

    @property
    def cost(self) -> float:
        """What 4 bits add to the loss."""
        return self.loss["qlora"] - self.loss["lora"]

    def __str__(self) -> str:
        text = tr(
            "loss before training  {lora:.3f} unquantized, {qlora:.3f} in 4 bits: they cost {cost:.3f} nats per token "
            "on {rows} held-out rows (`auto` accepts {price} on a GPU)",
            lora=self.loss["lora"],
            qlora=self.loss["qlora"],
            cost=self.cost,
            rows=self.rows,
            price=PRICE,
        )
        if self.needed_gib:
            text += tr(
                "\ntraining needs        {lora:.1f} GiB unquantized, {qlora:.1f} GiB in 4 bits", **self.needed_gib
            )
        return text


def apply(profile: Profile, choices: Choices) -> Profile:
    """The profile with these values in it, by dotted name."""
    for name, choice in choices.items():
        block, _, key = name.rpartition(".")
        update = {key: choice.value}
        if block:
            update = {block: getattr(profile, block).model_copy(update=update)}
        profile = profile.model_copy(update=update)
    return profile


def choose(
    profile: Profile,
    rows: Rows | None,
    shape: Shape | None,
    processes: int = 1,
    begun: Begun = Begun(),
    losses: BaseLosses | None = None,
) -> Choices:
    """The values a profile leaves to its model and its rows, by dotted name; without rows those of large data."""
    method = _method(profile, shape, begun, losses)
    if rows is None:
        mean = profile.sft.max_length / 4  # placeholders, until the rows are known
        choices = choose(profile, Rows(LARGE_DATA, mean, spread=mean), shape, processes, begun)
        reason = tr("recipe: the value for large data, until lesson 03 knows your rows")
        by_rows = {name: Choice(choice.value, reason) for name, choice in choices.items()}
        return by_rows | method  # which does not depend on rows: it keeps its own reason
    choices = method | _step(profile, rows, processes, begun)
    sft = apply(profile, choices).sft
    if sft.learning_rate == "auto":
        choices["sft.learning_rate"] = _learning_rate(sft, shape, rows, processes)
    if sft.num_train_epochs == "auto":
        choices["sft.num_train_epochs"] = _epochs(rows)
    planned = schedule(apply(profile, choices).sft, rows, processes)
    if sft.save_steps == "auto":
        choices["sft.save_steps"] = _save_steps(planned)
    return choices | _validation(apply(profile, choices), rows, planned, begun)


def rows_per_step(sft: SFT, processes: int = 1) -> int:
    """Rows of an optimizer step, which all processes share: packed rows where rows are packed, else conversations."""
    return int(sft.per_device_train_batch_size) * int(sft.gradient_accumulation_steps) * processes


def schedule(sft: SFT, rows: Rows, processes: int = 1) -> Schedule:
    """Steps and their size, for a profile whose values are settled."""
    per_epoch, each = _epoch(sft, rows, rows_per_step(sft, processes))
    steps = sft.max_steps
    if steps <= 0:
        steps = math.ceil(per_epoch * float(sft.num_train_epochs))
    return Schedule(
        steps=steps,
        examples_per_step=each,
        tokens_per_step=each * rows.mean,
        epochs=steps / per_epoch,
        learning_rate=float(sft.learning_rate),
    )


def few_steps_warning(profile: Profile, as_written: Profile, rows: Rows, processes: int = 1) -> str:
    """A warning if the step size that a profile names leaves too few steps, with a better value; else empty."""
    named = "auto" not in (as_written.sft.gradient_accumulation_steps, as_written.sft.per_device_train_batch_size)
    chosen_by_course = as_written.course.conversations_per_step == "auto" and not named
    if chosen_by_course or profile.sft.max_steps > 0:
        return ""
    planned = schedule(profile.sft, rows, processes)
    better = _conversations_per_step(rows, profile.sft.max_length)
    if planned.steps >= STEPS_PER_EPOCH or better >= planned.examples_per_step:  # a smaller step would not help
        return ""
    return tr(
        "a step of {each:,.0f} conversations leaves only {steps} steps, too few to learn much: set "
        "course.conversations_per_step={better}",
        each=planned.examples_per_step,
        steps=planned.steps,
        better=better,
    )


def _epoch(sft: SFT, rows: Rows, step: int) -> tuple[int, float]:
    """Steps of an epoch, and the conversations in each, for steps of so many rows."""
    whole = rows.packed(sft.max_length) if sft.packing else rows.examples
    each = rows.examples * min(step, whole) / whole
    return math.ceil(whole / step), each


def _conversations_per_step(rows: Rows, max_length: int) -> int:
    """A power of two that leaves about 50 steps in an epoch, up to the largest step."""
    wanted = max(FEWEST, rows.examples / STEPS_PER_EPOCH)
    power = round(math.log2(wanted))
    most = int(LARGEST_STEP * max_length / rows.mean)
    most = max(1, most)
    return min(2**power, most)


def _kept(value: Any) -> Choice:
    return Choice(value, tr("this run began with it"))


def _method(profile: Profile, shape: Shape | None, begun: Begun, losses: BaseLosses | None) -> Choices:
    """4 or 16 bits, where the profile leaves it open."""
    if profile.method != "auto":
        return {}
    four_bits = profile.quantization.load_in_4bit
    if four_bits and begun.method in METHODS:
        choice = _kept(begun.method)
    elif four_bits and losses and losses.needed_gib:
        choice = _by_losses(losses)
    elif four_bits and (shape is None or shape.params >= SMALL):
        choice = Choice("qlora", "")  # the comment in the profile says why
    else:
        reason = tr(
            "recipe: quantization.load_in_4bit is false, or below a billion parameters, where nothing measured decides"
        )
        choice = Choice("lora", reason)
    if choice.value == "qlora":
        return {"method": choice}
    return {"method": choice, "quantization.load_in_4bit": Choice(False, tr("method lora"))}


def _by_losses(losses: BaseLosses) -> Choice:
    """4 bits, unless they cost more than `PRICE`; both fit."""
    reason = tr(
        "measured on {rows} held-out rows: 4 bits cost {cost:.3f} nats per token (accepted: {price}), and need "
        "{gib:.1f} GiB less",
        rows=losses.rows,
        cost=losses.cost,
        price=PRICE,
        gib=losses.needed_gib["lora"] - losses.needed_gib["qlora"],
    )
    return Choice("qlora" if losses.cost <= PRICE else "lora", reason)  # NaN is not accepted either


def _step(profile: Profile, rows: Rows, processes: int, begun: Begun) -> Choices:
    """The rows of an optimizer step, whether they are packed, and how they are cut into micro-batches.

    The conversations of a micro-batch are laid end to end without padding (`padding_free`); where a step holds many
    tokens, they are packed into rows of `max_length` first (`packing`). Where the profile leaves micro-batches to the
    plan, they are single rows for now.
    """
    sft = profile.sft
    conversations = profile.course.conversations_per_step
    if conversations == "auto":
        conversations = _conversations_per_step(rows, sft.max_length)
    filled = conversations * rows.mean / sft.max_length  # rows of max_length in a step
    choices = Choices()
    if sft.packing == "auto":
        choices["sft.packing"] = _packing(sft, filled, begun)
    decided = apply(profile, choices)  # packing is settled there; `sft` is what the profile names
    if "auto" not in (sft.per_device_train_batch_size, sft.gradient_accumulation_steps):
        step = rows_per_step(sft)  # the whole step: more processes divide it, they do not multiply it as in TRL
    elif begun.rows_per_step:  # not today's conversations_per_step: a begun run could not go on with another step
        step = begun.rows_per_step
    else:
        step = _wanted_rows(decided, rows, conversations, filled, processes)
    steps, each = _epoch(decided.sft, rows, step)
    reason = tr("recipe: {each:.0f} conversations per step, {steps} steps per epoch", each=each, steps=steps)
    choices["course.conversations_per_step"] = Choice(max(1, round(each)), reason)
    return choices | _micro_batches(sft, step, processes)


def _packing(sft: SFT, filled: float, begun: Begun) -> Choice:
    """Whether rows are packed; `filled` is how many rows of `max_length` tokens a step fills."""
    if begun.packing is not None:
        return _kept(begun.packing)
    text = tr(
        "recipe: rows are packed where a step fills at least 4 of max_length, unless gradient_accumulation_steps is set"
    )
    return Choice(filled >= PACK_FROM and sft.gradient_accumulation_steps == "auto", text)


def _wanted_rows(profile: Profile, rows: Rows, conversations: int, filled: float, processes: int) -> int:
    """The rows of a step of so many conversations, shared by all processes; `filled`: how many of `max_length`."""
    sft = profile.sft
    asked = profile.course.conversations_per_step != "auto"
    if asked and not sft.packing:
        return conversations  # as asked: a number that cannot be shared is refused, not changed
    if asked:
        step = round(conversations * rows.packed(sft.max_length) / rows.examples)
    elif sft.packing:  # a power of two, so that one GPU's run can go on with 2 or 4
        step = 2 ** round(math.log2(max(1, filled)))
    else:
        step = 2 ** int(math.log2(conversations))
    return math.ceil(max(1, step) / processes) * processes


def _micro_batches(sft: SFT, step: int, processes: int) -> Choices:
    """The share of a process in a step of so many rows, as micro-batches of the size that is named, or of one row."""
    named = sft.per_device_train_batch_size
    size = distributed.micro_batch_for(step, 1 if named == "auto" else named, processes)
    sizes = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": step // processes // size,
    }
    reason = tr(
        "{step} rows in a step, shared by {processes} process(es), {size} at a time",
        step=step,
        processes=processes,
        size=size,
    )
    return {f"sft.{name}": Choice(value, reason) for name, value in sizes.items() if value != sft[name]}


def _learning_rate(sft: SFT, shape: Shape | None, rows: Rows, processes: int) -> Choice:
    """LoRA's best rate for the width of the model; smaller where few conversations make a step noisy."""
    if shape is None:
        text = tr("recipe: usual for LoRA; the size of this model is not known before its download")
        return Choice(USUAL_RATE, text)
    _, each = _epoch(sft, rows, rows_per_step(sft, processes))
    noise = min(1.0, each / FULL_RATE_FROM) ** 0.5
    rate = noise * RATE * (AT_HIDDEN / shape.hidden) ** POWER
    text = tr(
        "recipe: for a model of width {width}, and less for small steps; halve it if the loss is unstable",
        width=shape.hidden,
    )
    return Choice(float(f"{rate:.1e}"), text)


def _epochs(rows: Rows) -> Choice:
    """The fewer rows, the more often they are read."""
    epochs = next(epochs for most, epochs in EPOCHS if rows.examples <= most)
    text = tr("recipe: for {rows:,} rows; the step with the best validation loss is kept", rows=rows.examples)
    return Choice(epochs, text)


def _save_steps(planned: Schedule) -> Choice:
    """The steps between two checkpoints."""
    between = max(1, min(MOST_BETWEEN, math.ceil(planned.steps / SAVES)))
    return Choice(between, tr("recipe: a handful of checkpoints, each with a validation loss"))


def _validation(profile: Profile, rows: Rows, planned: Schedule, begun: Begun) -> Choices:
    """How many held-out rows each validation takes; without any there is no best step."""
    count = profile.course.validation_rows
    if count == 0 or rows.held_out == 0:
        none = Choice(0, tr("no rows are validated"))
        return {
            "course.validation_rows": none,
            "course.early_stopping_patience": none,
            "sft.load_best_model_at_end": Choice(False, none.reason),
        }
    if count != "auto":
        return {}
    if begun.validation_rows:
        return {"course.validation_rows": _kept(begun.validation_rows)}
    return {"course.validation_rows": _affordable_rows(profile.sft, rows, planned)}


def _affordable_rows(sft: SFT, rows: Rows, planned: Schedule) -> Choice:
    """As many rows in each validation as cost a small share of the training."""
    validations = math.ceil(planned.steps / int(sft.save_steps)) + 1
    budget = SHARE * planned.steps * planned.examples_per_step
    affordable = int(budget / (FORWARD * validations))
    count = min(MOST_VALIDATED, affordable)
    count = max(LEAST_VALIDATED, count)
    if rows.held_out is not None:
        count = min(count, rows.held_out)
    return Choice(count, tr("recipe: validation takes a small share of the training time"))
