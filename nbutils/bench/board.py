"""What was measured so far: kept in a file after every step, shown as a table and as a plot.

Not here: measuring (load, rivals).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbutils import dashboard, paths
from nbutils.bench.numbers import POINTS, Level, Spread
from nbutils.bench.prompts import Settings
from nbutils.bench.rivals import chosen

DASH = "–"


class Board:
    """The levels of all engines. Each `add` writes the file anew, so that nothing is lost when time runs out."""

    def __init__(self, path: Path | None, settings: Settings, about: Mapping[str, Any]) -> None:
        self.path, self.settings, self.about = path, settings, dict(about)
        self.levels: list[Level] = []
        self.limits: dict[str, dict[str, Any]] = {}  # by engine: what its weights allow at 1
        self.left_out: dict[str, str] = {}

    def add(self, levels: Iterable[Level]) -> None:
        """Keep these, one after the other."""
        for level in levels:
            self.levels.append(level)
            print(f"  {level}", flush=True)
            self.save()

    def limit(self, engine: str, found: dict[str, Any]) -> None:
        """Keep what the memory's bandwidth allows an engine at most."""
        self.limits[engine] = found
        self.save()

    def leave_out(self, what: str, reason: str) -> None:
        """Keep why something was not measured."""
        self.left_out[what] = reason
        print(f"  {what} left out: {reason}", flush=True)
        self.save()

    def invited(self, named: str, obstacle: str = "") -> list[str]:
        """The rivals that were named, if the model can be loaded for them; why it cannot is kept."""
        names = chosen(named)
        for name in names if obstacle else []:
            self.leave_out(name, obstacle)
        return [] if obstacle else names

    def find(self, engine: str, concurrency: int) -> Level | None:
        """One level, if it was measured."""
        return next((one for one in self.levels if (one.engine, one.concurrency) == (engine, concurrency)), None)

    def ratio(self, engine: str, rival: str, concurrency: int) -> float | None:
        """How many times the rival's throughput an engine has."""
        ours, theirs = self.find(engine, concurrency), self.find(rival, concurrency)
        return round(ours.tokens_per_second / theirs.tokens_per_second, 2) if ours and theirs else None

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and number of askers."""
        found: dict[str, dict[str, float]] = {}
        for level in self.levels:
            found.setdefault(level.engine, {})[str(level.concurrency)] = level.tokens_per_second
        return found

    def of_limit(self, engine: str) -> dict[str, float] | None:
        """Percent of the bandwidth's limit that one stream gets: whole requests, and the tokens after the first."""
        level, limit = self.find(engine, 1), self.limits.get(engine)
        if not level or not limit or not level.tpot_ms:
            return None
        whole, strict = limit["tokens_per_second"], limit["tokens_per_second_strict"]
        decoding = 1000 / level.tpot_ms["p50"]
        return {
            "request": round(100 * level.tokens_per_second / whole, 1), "decoding": round(100 * decoding / whole, 1),
            "decoding_strict": round(100 * decoding / strict, 1),
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        engines = dict.fromkeys(level.engine for level in self.levels)
        served = [name for name in engines if name != "generate"]
        ratios = {
            f"{name}_over_generate_at_{level.concurrency}": self.ratio(name, "generate", level.concurrency)
            for name in served for level in self.levels if level.engine == "generate"
        }  # fmt: skip
        shares = {name: self.of_limit(name) for name in served}
        return {
            "about": self.about, "settings": asdict(self.settings), "levels": [asdict(one) for one in self.levels],
            "ratios": {name: value for name, value in ratios.items() if value}, "bandwidth_limit": self.limits,
            "percent_of_limit_at_1": {name: share for name, share in shares.items() if share},
            "left_out": self.left_out,
        }  # fmt: skip

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path:
            paths.write_json(self.path, self.as_dict())

    def rows(self) -> list[dict[str, str]]:
        """The table: one row per engine and number of askers."""
        return [_row(level) for level in self.levels]

    def show(self, title: str = "Speed") -> None:
        """The table, and below it what it means."""
        rows = self.rows()
        dashboard.show_table(rows, title, dashboard.aligned(rows) if rows else "nothing was measured")
        print(*self.sentences(), sep="\n")

    def sentences(self) -> list[str]:
        """Ratios, the share of the limit and what is missing, in words."""
        told = self.as_dict()
        lines = []
        for name, value in told["ratios"].items():
            engine, _, many = name.partition("_over_generate_at_")
            lines.append(f"{many} at a time: {engine} gives {value:.1f} times the tokens of plain generate")
        for engine, share in told["percent_of_limit_at_1"].items():
            most = self.limits[engine]["tokens_per_second"]
            if share["request"] >= 1:  # a tiny model waits for the processor, not for memory
                lines.append(f"{engine} alone: {share['request']:.0f} % of the {most:,.0f} tokens/s that memory allows")
        return lines + [f"not measured: {what} ({reason})" for what, reason in self.left_out.items()]

    def plot(self, path: Path | None = None) -> None:
        """Tokens a second and the wait for the first token, over how many ask at once."""
        import matplotlib.pyplot as plt

        figure, panels = plt.subplots(1, 2, figsize=(9, 3.5))
        for place, name in enumerate(dict.fromkeys(level.engine for level in self.levels)):
            mine = sorted((one for one in self.levels if one.engine == name), key=lambda one: one.concurrency)
            speeds = [(one.concurrency, one.tokens_per_second) for one in mine if one.tokens_per_second]
            waits = [(one.concurrency, one.ttft_ms["p50"]) for one in mine if one.ttft_ms]
            for axes, points in zip(panels, (speeds, waits), strict=True):
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{place}", label=name)
        _dress(panels[0], "Throughput", "tokens/s", self.levels)
        _dress(panels[1], "First token, median", "ms", self.levels)
        names = panels[0].get_legend_handles_labels()
        figure.legend(*names, loc="lower center", ncols=max(1, len(names[1])), frameon=False)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        dashboard.show_figure(figure, path)


def _dress(axes: Any, title: str, unit: str, levels: Iterable[Level]) -> None:
    """Both axes in steps of the same ratio, with numbers a person reads."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(title=title, xlabel="requests at a time", ylabel=unit, xscale="log", yscale="log")
    many = sorted({level.concurrency for level in levels})
    axes.set_xticks(many, [str(one) for one in many])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _row(level: Level) -> dict[str, str]:
    during = level.during
    return {
        "engine": level.engine, "at a time": str(level.concurrency), "tokens/s": f"{level.tokens_per_second:,.0f}",
        "first token ms": _three(level.ttft_ms), "per token ms": _three(level.tpot_ms),
        "answer ms": _three(level.latency_ms), "errors": f"{level.errors} of {level.requests}",
        "running": _one(during, "running_mean"), "queue": _one(during, "waiting_max"),
        "KV cache": _one(during, "kv_cache_percent_max", " %"), "GPU": _one(during, "gpu_percent_mean", " %"),
    }  # fmt: skip


def _three(spread: Spread | None) -> str:
    """p50 / p90 / p99; a dash for what too few requests cannot tell."""
    if spread is None:
        return DASH
    digits = 1 if max(spread.values()) < 100 else 0
    told = [spread.get(f"p{point}") for point in POINTS]
    return " / ".join(DASH if value is None else f"{value:,.{digits}f}" for value in told)


def _one(during: Mapping[str, float], name: str, unit: str = "") -> str:
    return f"{during[name]:.4g}{unit}" if name in during else DASH
