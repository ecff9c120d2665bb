"""The whole forecast: memory, speed, hours, cost, disk and RAM, for one card or for all cards of the table.

Not here: how it is shown (report). What cannot be known stays None, and a note says which fact is missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbutils import scaling
from nbutils.errors import CourseError
from nbutils.paths import GIB
from nbutils.plan import cards, choosing, memory, recipes, shapes, speed
from nbutils.plan.cards import CardFacts
from nbutils.plan.recipes import Recipe
from nbutils.plan.shapes import Shape
from nbutils.profiles.recipe import Rows, Schedule, apply, choose, choose_method, few_steps, schedule

if TYPE_CHECKING:
    from nbutils.profiles import Profile, Resolved

RENTED = ("RTX 4090", "ampere_24gb")  # the usual rented card, and its profile
MEASURED = "H200"  # the one card whose speed was measured
REMARK = f"Speed from published numbers; only the {MEASURED} was measured. Prices: configs/cards.yaml, yours to edit."
SPARE = 1.1  # merging asks for a tenth more disk than the model has
UNSCHEDULED = ("steps", "examples_per_step", "epochs", "learning_rate")  # without --rows and --mean-length
MERGING = 2.0  # GiB of RAM for Python, torch and the blocks of a merge, which never holds a whole weight


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
        """The forecast peak of torch's allocator on each card."""
        return sum(self.parts.values())

    @property
    def limit_gib(self) -> float:
        """What the plan lets torch use of one card."""
        return choosing.limit_gib(self.card)

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


def forecast(
    shape: Shape,
    recipe: Recipe,
    card: CardFacts,
    batch: int,
    rows: int | None = None,
    mean_length: float | None = None,
    epochs: float = 1.0,
    keep_checkpoints: int = 3,
    max_steps: int = 0,
    schedule: Schedule | None = None,
) -> Forecast:
    """Forecast one training; `card.count` cards share the batch. `max_steps` counts instead of rows and epochs."""
    rate = speed.tokens_per_second(shape, recipe, card, card.count)
    real, words = amount(recipe, batch, rows, mean_length, epochs, max_steps)
    hours = None if rate is None or real is None else real / rate / 3600
    made = Forecast(
        shape.name, card, recipe, batch, memory.parts(shape, recipe), rate, hours, cost(card, hours),
        disk(shape, recipe, keep_checkpoints), after(shape, recipe), words, schedule,
    )  # fmt: skip
    return replace(made, notes=notes(made, real))


def amount(
    recipe: Recipe, batch: int, rows: int | None, mean_length: float | None, epochs: float, max_steps: int
) -> tuple[float | None, str]:
    """Real tokens of a training, None where a fact is missing; and in words, what they are or what is missing."""
    if max_steps:
        words = f"{max_steps:,} steps of {batch} rows of {recipe.length:,} tokens"
        return max_steps * batch * recipe.length * speed.filled(recipe), words
    facts = {"--rows": rows, "--mean-length (tokens of a row)": mean_length}
    if missing := [name for name, value in facts.items() if value is None]:
        return None, f"give {' and '.join(missing)}"
    assert rows is not None and mean_length is not None
    length = min(mean_length, recipe.length) if recipe.packing else mean_length
    cut = f" (of {mean_length:,.0f}: raise train.max_length, longer rows are left out)" if mean_length > length else ""
    words = f"{rows:,} rows x {length:,.0f} tokens{cut} x {epochs:g} epoch{'' if epochs == 1 else 's'}"
    return rows * length * epochs, words


def cost(card: CardFacts, hours: float | None) -> dict[str, float | None]:
    """Yuan and dollars for all cards; None where hours or price are not known, 0 where it is free."""

    def of(price: float | None) -> float | None:
        return price if not price else None if hours is None else price * hours * card.count

    return {"yuan": of(card.yuan), "dollars": of(card.dollars)}


def disk(shape: Shape, recipe: Recipe, keep_checkpoints: int) -> dict[str, float]:
    """GiB on disk: the 16-bit download, the merged model, and checkpoints (adapter and optimizer)."""
    whole = shape.params * 2 / GIB
    trained = shape.adapter_params(recipe.rank) * (4 + memory.optimizer_bytes(recipe.optimizer)) / GIB
    return {"download": whole, "merged": whole * SPARE, "checkpoints": trained * keep_checkpoints}


def after(shape: Shape, recipe: Recipe) -> dict[str, float]:
    """GiB after the training: RAM for the merge, from disk to disk; of the card for the model in 16 bits."""
    return {"merge_ram": MERGING, "on_card": shape.params * recipe.wide / GIB}


def notes(made: Forecast, real_tokens: float | None) -> list[str]:
    """What a reader must know: what does not fit, what is missing, what was not measured."""
    card, found = made.card, []
    if made.after_gib["on_card"] > card.memory_gib:
        found.append(
            "merges here, but is too large to be served in 16 bits on this card: make a w4a16 of it in lesson 04"
        )
    if card.tflops is None:
        found.append("speed, hours and cost unknown: give the card's dense 16-bit arithmetic with --tflops")
    if real_tokens is None and made.tokens_per_second is not None:
        free = 0 in made.cost.values()
        found.append(f"{'hours' if free else 'hours and cost'} unknown: {made.amount}")
    if card.yuan is None and card.dollars is None:
        found.append("price unknown: fill configs/cards.yaml")
    if card.tflops is not None and card.bandwidth is None:
        found.append("bandwidth unknown: speed follows from the arithmetic alone")
    if card.tflops is not None and card.name != MEASURED:
        found.append(f"speed from published numbers: only the {MEASURED} was measured")
    if card.count > 1:
        share = f"{speed.PARALLEL:.0%} of {card.count} times the speed of one is an estimate"
        found.append(f"{card.count} cards, each with its own copy of the model: {share}")
    return [*found, card.note] if card.note else found


def of_profile(
    profile: Profile,
    card: CardFacts,
    model: str | Shape = "",
    rows: int | None = None,
    mean_length: float | None = None,
    data: Rows | None = None,
) -> Forecast:
    """A profile on a card; `auto` values become what the rows ask for and the fastest that fit, or the smallest."""
    shape = model if isinstance(model, Shape) else shapes.find(model or profile.model)
    profile, chosen_by_size = choose_method(profile, shape.params)
    amount = data.examples if data else rows if rows is not None else profile.data.rows or None
    mean_length = data.mean if data else mean_length
    if data is None and amount and mean_length:
        data = Rows.like(amount, mean_length, profile.train.max_length)
    train = apply(profile.train, choose(profile.train, data, shape.hidden, card.count))
    recipe = recipes.from_profile(profile.model_copy(update={"train": train}), card, data)
    found = choosing.options(shape, recipe, train.step_rows, card, *choosing.left_open(train))
    chosen = choosing.choose(found, card)
    made = forecast(
        shape, chosen.recipe, card, train.step_rows, amount, mean_length, float(train.epochs) or 1.0,
        train.keep_checkpoints, train.max_steps, schedule(train, data) if data else None,
    )  # fmt: skip
    told = [chosen_by_size["method"].reason] if chosen_by_size else []
    told += [few_steps(train, profile.train, data)] if data else []
    return replace(made, notes=[*made.notes, *filter(None, told)])


def example(resolved: Resolved, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's profile on its card; without a card, a 7B model on a card one can rent."""
    from nbutils.profiles.reading import load

    if resolved.card is None:
        return of_profile(load(RENTED[1]), cards.find(RENTED[0]), rows=rows, mean_length=mean_length)
    facts = cards.of_machine(resolved.card)
    try:
        shape = shapes.find(resolved.model)
    except CourseError:
        shape = shapes.find(load(resolved.source).model)
        unknown = f"the shape of {resolved.model} is not known before its download: this is {shape.name} instead"
        facts = replace(facts, note=unknown)
    return of_profile(resolved.profile, facts, shape, rows, mean_length)


def require(resolved: Resolved, rows: int | None = None, mean_length: float | None = None) -> Forecast | str:
    """This machine's forecast for lesson 03, or why there is none; stops where not even the smallest setting fits."""
    if resolved.card is None:
        return "No forecast: there is no card here."
    try:
        shape = shapes.find(resolved.model)
    except CourseError:
        return f"No forecast: the shape of {resolved.model} is not known before its download."
    card = replace(cards.of_machine(resolved.card), count=scaling.world_size())
    made = of_profile(resolved.profile, card, shape, rows, mean_length, resolved.rows)
    if choosing.smallest(choosing.options(shape, made.recipe, made.batch, card)).peak_gib > made.limit_gib:
        raise choosing.nothing_fits(shape, made.recipe, made.batch, card)
    return made


def which_fits() -> list[dict[str, Any]]:
    """For every card of the table, every card profile on it: whether it fits, how, how fast; `auto` marks its own."""
    from nbutils.profiles.choosing import BY_MEMORY, LARGEST
    from nbutils.profiles.reading import load

    profiles = {name: load(name) for name in [*(name for _, name in BY_MEMORY), LARGEST]}
    chosen = [(name, profile, shapes.find(profile.model)) for name, profile in profiles.items()]
    return [_row(name, profile, shape, card) for card in cards.every() for name, profile, shape in chosen]


def _row(name: str, profile: Profile, shape: Shape, card: CardFacts) -> dict[str, Any]:
    from nbutils.profiles.choosing import for_card

    made = of_profile(profile, card, shape)
    recipe = made.recipe
    return {
        "card": card.name, "memory_gib": card.memory_gib, "profile": name, "model": made.model, "fits": made.fits,
        "auto": name == for_card(card.capability, card.memory_gib),
        "peak_vram_gib": round(made.peak_vram_gib, 1), "micro_batch": recipe.micro_batch,
        "accumulation": made.batch // recipe.micro_batch, "checkpointing": recipe.checkpointing,
        "length": recipe.length, "tokens_per_second": round(made.tokens_per_second or 0),
        "yuan_per_hour": card.yuan, "dollars_per_hour": card.dollars,
    }  # fmt: skip
