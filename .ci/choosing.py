"""docs/choosing.md from `configs`: tasks, models, GPUs and platforms; `make sync` writes it in each language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from nbutils import platforms
from nbutils.language import joined, tr
from nbutils.models import known_models
from nbutils.plan import gpus, of_options
from nbutils.plan.forecast import Forecast, time_text
from nbutils.plan.gpus import GPUSpec, Price
from nbutils.plan.memory import Recipe, peak_gib
from nbutils.plan.speed import tokens_per_second

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
        tr("**Without kernels**: the model has Gated DeltaNet layers (Qwen3.5 and later), whose kernels need a GPU of "
           "capability 8.0. Older ones train it correctly, with transformers' own code in float32, in many times the "
           "time (17 times on an H200, in 16 bits)."),
        tr("**Fastest** is the setting that the course chooses by itself. **Smallest** is the one with the least "
           "memory, for a GPU that others use too, mostly "
           '`SET = "sft.per_device_train_batch_size=1, sft.activation_offloading=true"`; '
           "the tables of one GPU name it."),
        tr("## What do you want to do?"),
        tr("Look for your task, then for the GPU you can get. The model is the one that "
           '`PROFILE = "auto"` trains there. The cells are peak memory, time and cost. '
           "Long documents take `--length 4096`, and "
           '`SET = "sft.max_length=4096, vllm.max_model_len=4096"` in the lessons.'),
        _by_task(),
        tr("## Which model on which GPU?"),
        tr("Time and cost of 10,000 rows of 300 tokens, three epochs, with the fastest setting; – does not fit."),
        _by_model(),
        tr("## One GPU and all models"),
        tr("Open your GPU. The rows are the same; a setting is the micro-batch and gradient checkpointing (off, on, or "
           "offload to RAM)."),
        *map(_by_gpu, sorted(gpus.every(), key=lambda gpu: gpu.memory_gib)),
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
            lines.append((first, name, made.shape.name, _fastest(made), _smallest(made)))
    return _table((tr("task"), "GPU", tr("model"), tr("fastest"), tr("smallest")), lines)


def _by_model() -> str:
    lines = []
    for model in known_models():
        line = [model]
        for gpu in COLUMNS:
            made = of_options(gpus.find(gpu), ROWS | {"model": model})
            line.append(_time_and_cost(made) if made.fits else NO)
        lines.append(line)
    return _table((tr("model"), *COLUMNS), lines)


def _by_gpu(gpu: GPUSpec) -> str:
    """A GPU to be opened: its price, its note, every model on it."""
    lines = []
    for model in known_models():
        made = of_options(gpu, ROWS | {"model": model})
        fastest = _with_setting(made, made.recipe, _fastest(made))
        smallest = _with_setting(made, made.smallest, _smallest(made))
        lines.append((model, fastest, smallest))
    price = tr("price unknown") if gpu.price_from == "unknown" else tr(gpu.price_from)
    if any(gpu.price):
        price = tr("{price} an hour ({source})", price=gpu.price, source=tr(gpu.price_from))
    facts = joined([f"{gpu.memory_gib:g} GiB", price])
    head = f"<details><summary>{joined([f'<b>{gpu.name}</b>', facts], ':')}</summary>"
    table = _table((tr("model"), tr("fastest"), tr("smallest")), lines)
    return "\n\n".join(filter(None, [head, tr(gpu.note), table, "</details>"]))


def _by_platform() -> str:
    lines = []
    for name, entry in platforms.table().items():
        offered = []
        for gpu in gpus.every():
            if name in gpu.platforms:
                price = Price(gpu.yuan, None) if entry.china else Price(None, gpu.dollars)
                offered.append(f"{gpu.name} {price}" if name in gpu.price_from.lower() else gpu.name)
        hours = tr("{hours:.0f} h", hours=entry.hours) if entry.hours else NO
        kept = joined(f"`{path}`" for path in entry.keep) or NO
        if offered or entry.limits:
            lines.append((f"`{name}`", joined(offered) or NO, hours, kept, tr(entry.limits) or NO))
    return _table((tr("platform"), tr("GPUs"), tr("lives"), tr("keeps"), tr("limits")), lines)


def _fastest(made: Forecast) -> str:
    """Memory, time and cost of the fastest setting."""
    if not made.fits:
        return tr("needs {size:.1f} GiB", size=made.peak_gib)
    return joined([f"{made.peak_gib:.1f} GiB", _time_and_cost(made)])


def _smallest(made: Forecast) -> str:
    """Memory, time and cost of the smallest setting."""
    size = peak_gib(made.shape, made.smallest)
    if not made.fits:
        return tr("needs {size:.1f} GiB", size=size)
    fast, slow = made.tokens_per_second, tokens_per_second(made.shape, made.smallest, made.gpu)
    times = fast / slow if fast and slow else 1.0
    return joined([f"{size:.1f} GiB", _time_and_cost(made, times)])


def _with_setting(made: Forecast, recipe: Recipe, text: str) -> str:
    """The same with the setting before it, where it fits."""
    if not made.fits:
        return text
    setting = joined([str(recipe.per_device_train_batch_size), recipe.recompute])
    return joined([setting, text], ":")


def _time_and_cost(made: Forecast, times: float = 1.0) -> str:
    """The cost in yuan, in dollars where these alone are known, or none."""
    if made.hours is None:
        return tr("without kernels")
    takes = time_text(made.hours * times)
    cost = made.cost.times(times)
    if cost == (None, None):
        return takes
    if cost.yuan is not None:
        cost = Price(cost.yuan, None)
    return joined([takes, str(cost)])


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
