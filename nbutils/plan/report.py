"""The forecast for people: its lines, the formula with this training's numbers, the table of cards.

Not here: any number of its own.
"""

from __future__ import annotations

import textwrap
from typing import Any

from nbutils.plan import forecasting, memory
from nbutils.plan.choosing import CONTEXT_GIB, MARGIN
from nbutils.plan.forecasting import Forecast
from nbutils.plan.recipes import Recipe
from nbutils.plan.shapes import Shape

WIDTH = 120
WAYS = {"off": "no recomputing", "on": "layers recomputed", "offload": "layers recomputed, inputs in RAM"}


def as_rows(made: Forecast) -> list[dict[str, Any]]:
    """The forecast as rows of a table: what, how much, why."""
    parts = ", ".join(f"{name} {size:.2f}" for name, size in made.parts.items())
    disk = ", ".join(f"{name} {size:.1f}" for name, size in made.disk_gib.items())
    rate = "unknown" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f} tokens/s"
    price = money({"yuan": made.card.yuan, "dollars": made.card.dollars})
    hourly = price if price in ("free", "unknown") else f"{price} an hour and card"
    lines = {
        "training": (f"{made.model} on {made.card}", _setting(made)),
        "recipe": (f"{made.schedule.steps:,} steps", str(made.schedule)) if made.schedule else None,
        "peak of the card": (f"{made.peak_vram_gib:.1f} GiB", parts),
        "the plan allows": (f"{made.limit_gib:.1f} of {made.card.memory_gib:.1f} GiB", _margin(made)),
        "speed": (rate, "real tokens, on all cards together"),
        "time": ("unknown" if made.hours is None else f"{made.hours:.1f} h", made.amount),
        "cost": (money(made.cost) if price != "free" else "free", f"{hourly} ({made.card.price_from})"),
        "disk": (f"{sum(made.disk_gib.values()):.0f} GiB", disk),
        "merging": (f"{made.after_gib['merge_ram']:.0f} GiB of RAM", "from disk to disk"),
        "serving": (f"{made.after_gib['on_card']:.0f} GiB of the card", "in 16 bits, and some for the cache"),
    }
    found = [{"what": name, "forecast": told[0], "from": told[1]} for name, told in lines.items() if told]
    return found + [{"what": "note", "forecast": "", "from": note} for note in made.notes]


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


def compared(made: list[Forecast]) -> list[dict[str, Any]]:
    """One training on several cards, a row for each."""
    return [
        {
            "card": str(one.card), "GiB": one.card.memory_gib, "model": one.model, "length": one.recipe.length,
            "peak GiB": round(one.peak_vram_gib, 1), "fits": "yes" if one.fits else "no",
            "rows": f"{one.recipe.micro_batch} x {one.recipe.accumulation}", "recompute": one.recipe.checkpointing,
            "tokens/s": "unknown" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            "hours": "unknown" if one.hours is None else f"{one.hours:.1f}", "cost": money(one.cost),
            "an hour": money({"yuan": one.card.yuan, "dollars": one.card.dollars}),
        }
        for one in made
    ]  # fmt: skip


def money(cost: dict[str, float | None]) -> str:
    """Yuan and dollars as far as they are known."""
    known = [f"{sign}{cost[name]:.2f}" for name, sign in (("yuan", "¥"), ("dollars", "$")) if cost[name]]
    free = any(value == 0 for value in cost.values())
    return " or ".join(known) or ("free" if free else "unknown")


def _setting(made: Forecast) -> str:
    recipe, each = made.recipe, made.batch // made.card.count
    cards = f" x {made.card.count} cards" if made.card.count > 1 else ""
    rows = f"rows packed to {recipe.length}" if recipe.packing else f"conversations of about {recipe.length} tokens"
    return (
        f"{recipe.method} rank {recipe.rank}, {rows}, {recipe.micro_batch} x "
        f"{each // recipe.micro_batch}{cards} a step, {WAYS[recipe.checkpointing]}"
    )


def _margin(made: Forecast) -> str:
    stay_free = f"{MARGIN:.0%} and {CONTEXT_GIB:g} GiB for CUDA must stay free"
    missing = made.peak_vram_gib - made.limit_gib
    return f"fits: {stay_free}" if made.fits else f"DOES NOT FIT, {missing:.1f} GiB are missing: {stay_free}"


def explain(shape: Shape, made: Forecast) -> str:
    """The formula of the peak with the numbers of this training."""
    recipe, parts = made.recipe, made.parts
    small = recipe.method == "qlora"
    each = (memory.NF4_DOUBLE if recipe.double else memory.NF4) if small else recipe.wide
    kept = {"off": "all each layer computed", "on": "each layer's input", "offload": "a few layers' inputs"}
    rows = {
        "weights": f"{shape.linear_params / 1e9:.2f} billion x {each:.3f} bytes"
        f" + {shape.embedding_params / 1e9:.2f} billion x {recipe.wide}",
        "adapters": f"{shape.adapter_params(recipe.rank) / 1e6:.1f} million x {_adapter_bytes(recipe)}",
        "optimizer": f"the same x {memory.optimizer_bytes(recipe.optimizer)} ({recipe.optimizer})",
        "activations": f"{recipe.tokens:,} tokens: {kept[recipe.checkpointing]} of {shape.layers}, one layer at work",
        "logits": "the loss in tiles, where it needs more than a layer at work",
        "workspace": "masks of packed rows, cuBLAS, slack",
    }
    lines = [f"{name:<12}{parts[name]:7.2f} GiB  = {words}" for name, words in rows.items()]
    return "\n".join([*lines, f"{'peak':<12}{made.peak_vram_gib:7.2f} GiB"])


def _adapter_bytes(recipe: Recipe) -> str:
    if recipe.accumulation > 1:
        return f"{memory.ADAPTER + memory.GRADIENT} (value, gradient)"
    return f"{memory.ADAPTER} (value; nothing is accumulated)"


def fits_table() -> list[dict[str, Any]]:
    """For every card: what PROFILE auto trains there, how, how fast, for what price; and the largest."""
    rows, table = forecasting.which_fits(), []
    for row in [row for row in rows if row["auto"]]:
        largest = [one["model"] for one in rows if one["card"] == row["card"] and one["fits"]]
        price = money({"yuan": row["yuan_per_hour"], "dollars": row["dollars_per_hour"]}).replace(" or ", " ")
        table.append({
            "card": row["card"], "GiB": row["memory_gib"], "profile": row["profile"], "model": row["model"],
            "rows": f"{row['micro_batch']} x {row['accumulation']}", "recompute": row["checkpointing"],
            "peak GiB": row["peak_vram_gib"], "tokens/s": f"{row['tokens_per_second']:,}", "an hour": price,
            "largest model": largest[-1] if largest else "none of the profiles",
        })  # fmt: skip
    return table
