"""docs/choosing.md from `configs`: tasks, models, GPUs and platforms; `make sync` writes it in each language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from nbutils import platforms
from nbutils.language import joined, tr
from nbutils.models import known_models
from nbutils.plan import gpus, money, of_options, time_text
from nbutils.plan.forecast import Forecast, Recipe
from nbutils.plan.gpus import GPUSpec

ROWS = {"rows": 10_000, "mean_length": 300}
TASK_GPUS = ("T4", "RTX 4090", "A100-40GB", "A100-80GB")  # one for each profile that `auto` takes
COLUMNS = ("T4", "RTX 3080 Ti", "RTX 4090", "A100-40GB", "A100-80GB", "H200")
COMMAND = "python -m nbutils plan --model Qwen2.5-7B --gpu 4090 --rows 10000 --mean-length 300"
NO = "–"


def page() -> str:
    """The whole page in the language of the course."""
    dates = sorted(date for gpu in gpus.every() for date in re.findall(r"\d{4}-\d{2}", gpu.price_from))
    return "\n\n".join([
        tr("# Choosing a model, a GPU and a platform"),
        tr("This page is made from `configs/` by `make sync`: change it there."),
        tr("Memory is the forecast peak on one GPU. Times are forecasts for the training alone: only the H200 was "
           "measured, the other speeds follow from published numbers. Prices were seen between {first} and {last}; put "
           "yours into `configs/gpus.yaml`. For your own case ask", first=dates[0], last=dates[-1]),
        f"```\n{COMMAND}\n```",
        tr("**Fastest** is the setting that the course chooses by itself. **Smallest** is the one with the least "
           "memory, for a GPU that others use too: "
           '`SET = "sft.per_device_train_batch_size=1, sft.activation_offloading=true"`.'),
        tr("## What do you want to do?"),
        tr("Look for your task, then for the GPU you can get. The model is the one that "
           '`PROFILE = "auto"` trains there. The cells are peak memory, time and cost.'),
        _by_task(),
        tr("## Which model on which GPU?"),
        tr("Time and cost of 10,000 rows of 300 tokens, three epochs, with the fastest setting; – does not fit."),
        _by_model(),
        tr("## One GPU and all models"),
        tr("Open your GPU. The rows are the same; a setting is the micro-batch and gradient checkpointing (off, on, or "
           "offload to RAM)."),
        *map(_by_gpu, sorted(gpus.usable(), key=lambda gpu: gpu.memory_gib)),
        tr("## Which platform?"),
        tr("GPUs that a platform is known to offer, with the price of an hour where it is known; how long a machine "
           "lives at most; the folders it keeps afterwards. – is unknown or without limit."),
        _by_platform(),
    ]) + "\n"  # fmt: skip


def _by_task() -> str:
    tasks: dict[str, dict[str, Any]] = {
        tr("a style or a persona: 300 rows of 100 tokens"): {"rows": 300, "mean_length": 100},
        tr("a domain assistant: 10,000 rows of 300 tokens"): ROWS,
        tr("a large domain: 50,000 rows of 300 tokens"): {"rows": 50_000, "mean_length": 300},
        tr("long documents: 2,000 rows of 3,500 tokens"): {"rows": 2_000, "mean_length": 3_500, "length": 4096},
    }
    lines = []
    for task, options in tasks.items():
        for name in TASK_GPUS:
            made = of_options(gpus.find(name), options)
            first = task if name == TASK_GPUS[0] else ""
            lines.append((first, made["gpu"], made["model"], _cell(made), _cell(made, smallest=True)))
    return _table((tr("task"), "GPU", tr("model"), tr("fastest"), tr("smallest")), lines)


def _by_model() -> str:
    def cell(model: str, gpu: str) -> str:
        made = of_options(gpus.find(gpu), ROWS | {"model": model})
        return _time_and_cost(made) if made["fits"] else NO

    return _table((tr("model"), *COLUMNS), ((name, *(cell(name, gpu) for gpu in COLUMNS)) for name in known_models()))


def _by_gpu(gpu: GPUSpec) -> str:
    """A GPU to be opened: its price, its note, every model on it."""
    lines = []
    for name in known_models():
        made = of_options(gpu, ROWS | {"model": name})
        lines.append((name, _cell(made, setting=True), _cell(made, smallest=True, setting=True)))
    price = tr("price unknown") if gpu.price_from == "unknown" else tr(gpu.price_from)
    if gpu.yuan or gpu.dollars:
        price = tr("{price} an hour ({source})", price=money(gpu.yuan, gpu.dollars), source=tr(gpu.price_from))
    about = joined([f"<b>{gpu.name}</b>", joined([f"{gpu.memory_gib:g} GiB", price])], ":")
    head = f"<details><summary>{about}</summary>"
    table = _table((tr("model"), tr("fastest"), tr("smallest")), lines)
    return "\n\n".join(filter(None, [head, tr(gpu.note), table, "</details>"]))


def _by_platform() -> str:
    lines = []
    for name, entry in platforms.table().items():
        offered = []
        for gpu in (gpu for gpu in gpus.usable() if name in gpu.platforms):
            price = money(gpu.yuan, None) if entry.china else money(None, gpu.dollars)
            offered.append(f"{gpu.name} {price}" if name in gpu.price_from.lower() else gpu.name)
        hours = tr("{hours:.0f} h", hours=entry.hours) if entry.hours else NO
        kept = joined(f"`{path}`" for path in entry.keep) or NO
        if offered or entry.limits:
            lines.append((f"`{name}`", joined(offered) or NO, hours, kept, tr(entry.limits) or NO))
    return _table((tr("platform"), tr("GPUs"), tr("lives"), tr("keeps"), tr("limits")), lines)


def _cell(made: Forecast, smallest: bool = False, setting: bool = False) -> str:
    """Memory, time and cost of the fastest or the smallest setting of a forecast; with `setting` also the setting."""
    found = made["smallest"] if smallest else made | {"times_as_long": 1}
    if not made["fits"]:
        return tr("needs {size:.1f} GiB", size=found["peak_vram_gib"])
    recipe = Recipe(**found["recipe"])
    how = [joined([str(recipe.per_device_train_batch_size), recipe.recompute])] if setting else []
    takes = joined([f"{found['peak_vram_gib']:.1f} GiB", _time_and_cost(made, found["times_as_long"])])
    return joined([*how, takes], ":")


def _time_and_cost(made: Forecast, times: float = 1.0) -> str:
    """The cost in yuan, in dollars where these alone are known, or none."""
    yuan, dollars = (price if price is None else price * times for price in made["cost"].values())
    cost = money(yuan, dollars if yuan is None else None)
    return joined([time_text(made["hours"] * times), *([cost] if (yuan, dollars) != (None, None) else [])])


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))
