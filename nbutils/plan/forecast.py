"""The whole forecast: the fastest setting that fits, memory, speed, hours, cost, disk and RAM; and its text.

What cannot be known stays None, and a note says which fact is missing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nbutils import scaling
from nbutils.config import Profile, Train
from nbutils.errors import CourseError
from nbutils.models import Shape, find_shape, known_models
from nbutils.paths import GIB
from nbutils.plan import estimate
from nbutils.plan.estimate import ADAPTER, GRADIENT, Recipe, from_profile, peak_gib, tokens_per_second
from nbutils.plan.gpus import CardFacts
from nbutils.plan.schedule import Rows, Schedule, apply, choose, choose_method, few_steps, schedule

MARGIN = 0.08  # of the GPU's memory stays free: the forecast may be that much off, and memory gets fragmented
CONTEXT_GIB = 0.5  # CUDA's own, which torch's allocator does not count
NEARLY = 0.98  # settings this close to the fastest count as equal; the one with the lowest peak is taken
CHECKPOINTING = ("off", "on", "offload")
MEASURED = "H200"  # the one GPU whose speed was measured
SPARE = 1.1  # merging needs a tenth more disk than the model has
MERGE_RAM_GIB = 2.0  # Python, torch and the blocks of a merge, which never holds a whole weight
UNSCHEDULED = ("steps", "examples_per_step", "epochs", "learning_rate")  # without --rows and --mean-length
WIDTH = 120


@dataclass(frozen=True)
class Option:
    """One setting on one GPU: its forecast peak and its speed (None where the GPU's arithmetic is not known)."""

    recipe: Recipe
    peak_gib: float
    tokens_per_second: float | None


def limit_gib(gpu: CardFacts) -> float:
    """How much the plan lets torch use of one GPU."""
    return gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB


def divisors(number: int) -> list[int]:
    """All numbers that divide it, smallest first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def options(shape: Shape, recipe: Recipe, batch: int, gpu: CardFacts, train: Train | None = None) -> list[Option]:
    """Every micro-batch that divides a GPU's share of the batch, with every checkpointing; what `train` names stays."""
    scaling.require_shares(batch, gpu.count)
    rows, sizes = batch // gpu.count, divisors(batch // gpu.count)
    ways: Sequence[str] = CHECKPOINTING
    if train and train.micro_batch != "auto":
        sizes = [train.micro_batch]
    if train and train.gradient_checkpointing != "auto":
        ways = (train.gradient_checkpointing,)
    pairs = [(size, way) for size in sizes for way in ways]
    settings = [replace(recipe, micro_batch=size, checkpointing=way, accumulation=rows // size) for size, way in pairs]
    return [Option(one, peak_gib(shape, one), tokens_per_second(shape, one, gpu, gpu.count)) for one in settings]


def best_option(found: Sequence[Option], gpu: CardFacts) -> Option:
    """The fastest that fits, among nearly equals the one with the lowest peak; the smallest where nothing fits."""
    fitting = [one for one in found if one.peak_gib <= limit_gib(gpu)]
    rates = [one.tokens_per_second for one in fitting if one.tokens_per_second is not None]
    if fitting and not rates:  # speed unknown: no recomputing, large steps
        return min(fitting, key=lambda one: (CHECKPOINTING.index(one.recipe.checkpointing), -one.recipe.micro_batch))
    good = [one for one in fitting if (one.tokens_per_second or 0) >= NEARLY * max(rates)]
    return min(good or found, key=lambda one: one.peak_gib)


def require_fit(shape: Shape, recipe: Recipe, batch: int, gpu: CardFacts) -> None:
    """Stop where not even the smallest setting fits, with what would."""
    least = min(options(shape, recipe, batch, gpu), key=lambda one: one.peak_gib)
    limit = limit_gib(gpu)
    if least.peak_gib <= limit:
        return
    halved = [recipe.length >> step for step in range(1, 8) if recipe.length >> step >= 256]
    known = sorted(known_models().values(), key=lambda one: -one.params)
    smaller = [one for one in known if one.params < shape.params]
    fits = [f"length {one}" for one in halved if peak_gib(shape, replace(least.recipe, length=one)) <= limit][:1]
    fits += [f"model {one.name}" for one in smaller if peak_gib(one, least.recipe) <= limit][:1]
    raise CourseError(
        "plan.does_not_fit", model=shape.name, method=recipe.method, rank=recipe.rank, length=recipe.length,
        needed=least.peak_gib, gpu=gpu.name, limit=limit, memory=gpu.memory_gib, missing=least.peak_gib - limit,
        fits=" or ".join(fits) or "neither a shorter length nor a smaller course model",
    )  # fmt: skip


# ---- the forecast


@dataclass(frozen=True)
class Forecast:
    """What a training will need; None where a fact is missing, and `notes` says which."""

    model: str
    card: CardFacts
    recipe: Recipe
    batch: int
    parts: dict[str, float]
    tokens_per_second: float | None
    hours: float | None
    cost: dict[str, float | None]
    disk_gib: dict[str, float]
    after_gib: dict[str, float]
    amount: str
    schedule: Schedule | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def peak_vram_gib(self) -> float:
        """The forecast peak of torch's allocator on each GPU."""
        return sum(self.parts.values())

    @property
    def limit_gib(self) -> float:
        """What the plan lets torch use of one GPU."""
        return limit_gib(self.card)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_vram_gib <= self.limit_gib

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, rounded as far as a forecast deserves."""
        card = {key: value for key, value in asdict(self.card).items() if key != "note"}
        return {
            "model": self.model, "gpu": self.card.name, "gpus": self.card.count, "card": card,
            "recipe": asdict(self.recipe), "batch": self.batch,
            **(self.schedule.as_dict() if self.schedule else dict.fromkeys(UNSCHEDULED)),
            "peak_vram_gib": round(self.peak_vram_gib, 2), "limit_gib": round(self.limit_gib, 2), "fits": self.fits,
            "parts": {name: round(size, 3) for name, size in self.parts.items()},
            "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second),
            "hours": None if self.hours is None else round(self.hours, 2),
            "cost": {name: None if value is None else round(value, 2) for name, value in self.cost.items()},
            "disk_gib": {name: round(size, 1) for name, size in self.disk_gib.items()},
            "after_gib": {name: round(size, 1) for name, size in self.after_gib.items()},
            "notes": self.notes,
        }  # fmt: skip


def of_profile(
    profile: Profile, gpu: CardFacts, model: str | Shape = "", rows: int | None = None,
    mean_length: float | None = None, data: Rows | None = None,
) -> Forecast:  # fmt: skip
    """A profile on a GPU; `auto` values become what the rows want and the fastest that fit, or the smallest."""
    shape = model if isinstance(model, Shape) else find_shape(model or profile.model)
    profile, by_size = choose_method(profile, shape.params)
    rows = data.examples if data else rows if rows is not None else profile.data.rows or None
    mean_length = data.mean if data else mean_length
    if data is None and rows and mean_length:
        data = Rows.like(rows, mean_length, profile.train.max_length)
    train = apply(profile.train, choose(profile.train, data, shape.hidden, gpu.count))
    recipe = from_profile(profile.model_copy(update={"train": train}), gpu, data)
    recipe = best_option(options(shape, recipe, train.step_rows, gpu, train), gpu).recipe
    tokens, amount = _amount(recipe, train, rows, mean_length)
    rate = tokens_per_second(shape, recipe, gpu, gpu.count)
    hours = None if rate is None or tokens is None else tokens / rate / 3600
    prices = {"yuan": gpu.yuan, "dollars": gpu.dollars}
    cost = {name: _cost(price, hours, gpu.count) for name, price in prices.items()}
    whole = shape.params * 2 / GIB
    checkpoint = shape.adapter_params(recipe.rank) * (4 + estimate.optimizer_bytes(recipe.optimizer)) / GIB
    disk = {"download": whole, "merged": whole * SPARE, "checkpoints": checkpoint * train.keep_checkpoints}
    after = {"merge_ram": MERGE_RAM_GIB, "on_card": shape.params * recipe.wide / GIB}
    made = Forecast(
        shape.name, gpu, recipe, train.step_rows, estimate.parts(shape, recipe), rate, hours, cost, disk, after,
        amount, schedule(train, data) if data else None,
    )  # fmt: skip
    extra = [by_size["method"].reason if by_size else "", few_steps(train, profile.train, data) if data else ""]
    return replace(made, notes=[*_notes(made, tokens is None), *filter(None, extra)])


def _amount(recipe: Recipe, train: Train, rows: int | None, mean: float | None) -> tuple[float | None, str]:
    """Real tokens of a training, None where a fact is missing; and in words, what they are or what is missing."""
    if train.max_steps:
        text = f"{train.max_steps:,} steps of {train.batch} rows of {recipe.length:,} tokens"
        return train.max_steps * train.step_rows * recipe.length * estimate.filled(recipe), text
    if rows is None or mean is None:
        facts = {"--rows": rows, "--mean-length (tokens of a row)": mean}
        return None, f"give {' and '.join(name for name, value in facts.items() if value is None)}"
    epochs = float(train.epochs) or 1.0
    length = min(mean, recipe.length) if recipe.packing else mean
    longer = f" (of {mean:,.0f}: raise train.max_length, longer rows are left out)" if mean > length else ""
    text = f"{rows:,} rows x {length:,.0f} tokens{longer} x {epochs:g} epoch{'' if epochs == 1 else 's'}"
    return rows * length * epochs, text


def _cost(price: float | None, hours: float | None, gpus: int) -> float | None:
    """For all GPUs; None where hours or price are not known, 0 where it is free."""
    return price if not price else None if hours is None else price * hours * gpus


def _notes(made: Forecast, no_amount: bool) -> list[str]:
    """What a reader must know: what does not fit, what is missing, what was not measured."""
    gpu, known = made.card, made.card.tflops is not None
    free = 0 in made.cost.values()
    share = f"{estimate.PARALLEL:.0%} of {gpu.count} times the speed of one is an estimate"
    notes = {
        "merges here, but is too large to be served in 16 bits on this card: make a w4a16 of it in lesson 04":
            made.after_gib["on_card"] > gpu.memory_gib,
        "speed, hours and cost unknown: give the card's dense 16-bit arithmetic with --tflops": not known,
        f"{'hours' if free else 'hours and cost'} unknown: {made.amount}": no_amount and known,
        "price unknown: fill configs/cards.yaml": gpu.yuan is None and gpu.dollars is None,
        "bandwidth unknown: speed follows from the arithmetic alone": known and gpu.bandwidth is None,
        f"speed from published numbers: only the {MEASURED} was measured": known and gpu.name != MEASURED,
        f"{gpu.count} cards, each with its own copy of the model: {share}": gpu.count > 1,
        gpu.note: bool(gpu.note),
    }  # fmt: skip
    return [note for note, holds in notes.items() if holds]


# ---- its text


def as_rows(made: Forecast) -> list[dict[str, Any]]:
    """The forecast as rows of a table: what, how much, why."""
    recipe, gpu = made.recipe, made.card
    gpus = f" x {gpu.count} cards" if gpu.count > 1 else ""
    rows = f"rows packed to {recipe.length}" if recipe.packing else f"conversations of about {recipe.length} tokens"
    ways = {"off": "no recomputing", "on": "layers recomputed", "offload": "layers recomputed, inputs in RAM"}
    steps = f"{recipe.micro_batch} x {made.batch // gpu.count // recipe.micro_batch}{gpus} a step"
    setting = f"{recipe.method} rank {recipe.rank}, {rows}, {steps}, {ways[recipe.checkpointing]}"
    missing = f"DOES NOT FIT, {made.peak_vram_gib - made.limit_gib:.1f} GiB are missing"
    margin = f"{'fits' if made.fits else missing}: {MARGIN:.0%} and {CONTEXT_GIB:g} GiB for CUDA must stay free"
    rate = "unknown" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f} tokens/s"
    price = money({"yuan": gpu.yuan, "dollars": gpu.dollars})
    hourly = price if price in ("free", "unknown") else f"{price} an hour and card"
    lines = [
        ("training", f"{made.model} on {gpu}", setting),
        ("recipe", f"{made.schedule.steps:,} steps", str(made.schedule)) if made.schedule else None,
        ("peak of the card", f"{made.peak_vram_gib:.1f} GiB",
         ", ".join(f"{name} {size:.2f}" for name, size in made.parts.items())),
        ("the plan allows", f"{made.limit_gib:.1f} of {gpu.memory_gib:.1f} GiB", margin),
        ("speed", rate, "real tokens, on all cards together"),
        ("time", "unknown" if made.hours is None else f"{made.hours:.1f} h", made.amount),
        ("cost", money(made.cost) if price != "free" else "free", f"{hourly} ({gpu.price_from})"),
        ("disk", f"{sum(made.disk_gib.values()):.0f} GiB",
         ", ".join(f"{name} {size:.1f}" for name, size in made.disk_gib.items())),
        ("merging", f"{made.after_gib['merge_ram']:.0f} GiB of RAM", "from disk to disk"),
        ("serving", f"{made.after_gib['on_card']:.0f} GiB of the card", "in 16 bits, and some for the cache"),
        *(("note", "", note) for note in made.notes),
    ]  # fmt: skip
    return [{"what": line[0], "forecast": line[1], "from": line[2]} for line in lines if line]


def describe(made: Forecast | str) -> str:
    """The same as aligned text of at most 120 columns; the reason where there is no forecast."""
    if isinstance(made, str):
        return made
    rows, lines = as_rows(made), []
    wide = max(len(row["forecast"]) for row in rows)
    for row in rows:
        why = textwrap.wrap(row["from"], WIDTH - wide - 20) or [""]
        lines += [f"{row['what']:<17} {row['forecast']:<{wide}}  {why[0]}".rstrip()]
        lines += [" " * (wide + 20) + more for more in why[1:]]
    return "\n".join(lines)


def explain(shape: Shape, made: Forecast) -> str:
    """The formula of the peak with the numbers of this training."""
    recipe, waiting = made.recipe, made.recipe.accumulation > 1
    each = recipe.four_bit if recipe.method == "qlora" else recipe.wide
    adapter = f"{ADAPTER + GRADIENT} (value, gradient)" if waiting else f"{ADAPTER} (value; nothing is accumulated)"
    kept = {"off": "all each layer computed", "on": "each layer's input", "offload": "a few layers' inputs"}
    texts = {
        "weights": f"{shape.linear_params / 1e9:.2f} billion x {each:.3f} bytes"
        f" + {shape.embedding_params / 1e9:.2f} billion x {recipe.wide}",
        "adapters": f"{shape.adapter_params(recipe.rank) / 1e6:.1f} million x {adapter}",
        "optimizer": f"the same x {estimate.optimizer_bytes(recipe.optimizer)} ({recipe.optimizer})",
        "activations": f"{recipe.tokens:,} tokens: {kept[recipe.checkpointing]} of {shape.layers}, one layer at work",
        "logits": "the loss in tiles, where it needs more than a layer at work",
        "workspace": "masks of packed rows, cuBLAS, slack",
    }
    lines = [f"{name:<12}{made.parts[name]:7.2f} GiB  = {text}" for name, text in texts.items()]
    return "\n".join([*lines, f"{'peak':<12}{made.peak_vram_gib:7.2f} GiB"])


def money(cost: dict[str, float | None]) -> str:
    """Yuan and dollars as far as they are known."""
    known = [f"{sign}{cost[name]:.2f}" for name, sign in (("yuan", "¥"), ("dollars", "$")) if cost[name]]
    free = any(value == 0 for value in cost.values())
    return " or ".join(known) or ("free" if free else "unknown")
