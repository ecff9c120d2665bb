"""What is measured and shown: servers against plain `generate`, the limit of the GPU's memory, table and plot.

Every step is kept in the file when it is done, and one that fails stops no other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nbutils import dashboard, hardware, paths, profiles, serving
from nbutils.bench import client
from nbutils.bench.client import Level, Prompt, Request, Settings, find_target, measure, summarize, tokenizer_of
from nbutils.errors import CourseError
from nbutils.merging.safetensors_io import read_header

RIVALS = ("generate", "transformers-serve")
BATCHES = (1, 32)  # of plain generate
MAX_CONCURRENCY = 4096
SPARE_TOKENS = 16  # of context beyond prompt and answer
DASH = "–"


def chosen(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in RIVALS]:
        raise CourseError("bench.unknown_rivals", names=", ".join(unknown), rivals=", ".join(RIVALS))
    return names


def static(model: Any, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """`generate` one at a time and in batches, on the first prompts that servers get at the same concurrency."""
    for batch in BATCHES:
        prompts = settings.prompts(tokenizer, batch)[: max(2, batch)]
        yield generate(model, prompts, settings.answer_tokens, batch)


def generate(model: Any, prompts: Sequence[Prompt], tokens: int, batch: int) -> Level:
    """Static batches of `batch` prompts, one after the other, greedy, each answer exactly `tokens` long."""
    import torch
    from transformers import GenerationConfig

    def run(some: Sequence[Prompt], new_tokens: int) -> list[Request]:
        ids, began = torch.tensor([prompt.ids for prompt in some], device=model.device), time.perf_counter()
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens).tolist()
        seconds, made = time.perf_counter() - began, [len(answer) - ids.shape[1] for answer in out]
        return [Request(None, seconds, n, "" if n == new_tokens else f"{n} of {new_tokens} tokens") for n in made]

    own, pad = model.generation_config, model.generation_config.pad_token_id or 0
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=pad)  # without a stop token
    try:
        run(prompts[:batch], client.WARM_UP_TOKENS)
        started = time.perf_counter()
        done = [one for first in range(0, len(prompts), batch) for one in run(prompts[first : first + batch], tokens)]
        return summarize("generate", batch, done, time.perf_counter() - started)
    finally:
        model.generation_config = own


def copy_bandwidth(device: str = "cuda", size: int = 2**30, repeats: int = 10) -> float:
    """Bytes a second that a copy reads and writes in the device's memory, the best of several."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, wait = torch.empty_like(source), torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def limit(folder: Path, bandwidth: float) -> dict[str, Any]:
    """The most tokens a second one stream can get: a token reads all weights once, of an untied embedding one row."""
    sizes = {
        name: one.size for file in sorted(folder.glob("*.safetensors")) for name, one in read_header(file)[0].items()
    }
    if not sizes:
        raise CourseError("bench.no_weights", folder=folder)
    whole = sum(sizes.values())
    tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
    read = whole - sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight") and not tied)
    return {
        "weights_gb": round(whole / 1e9, 3), "read_per_token_gb": round(read / 1e9, 3),
        "copy_gb_per_second": round(bandwidth / 1e9, 1),
        "tokens_per_second": round(bandwidth / whole, 1), "tokens_per_second_strict": round(bandwidth / read, 1),
    }  # fmt: skip


class Board:
    """The levels of all engines; the file is written anew after each, so that nothing is lost when time runs out."""

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
            self._save()

    def limit(self, engine: str, found: dict[str, Any]) -> None:
        """Keep what the memory's bandwidth allows an engine at most."""
        self.limits[engine] = found
        self._save()

    def leave_out(self, what: str, reason: str) -> None:
        """Keep why something was not measured."""
        self.left_out[what] = reason
        print(f"  {what} left out: {reason}", flush=True)
        self._save()

    def invited(self, named: str, obstacle: str = "") -> list[str]:
        """The rivals that were named, if the model can be loaded for them; why it cannot is kept."""
        names = chosen(named)
        for name in names if obstacle else []:
            self.leave_out(name, obstacle)
        return [] if obstacle else names

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and concurrency."""
        found: dict[str, dict[str, float]] = {}
        for level in self.levels:
            found.setdefault(level.engine, {})[str(level.concurrency)] = level.tokens_per_second
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        speeds = self.speeds()
        plain = speeds.pop("generate", {})
        ratios = {
            f"{engine}_over_generate_at_{many}": round(speed / plain[many], 2)
            for engine, levels in speeds.items() for many, speed in levels.items() if speed and plain.get(many)
        }  # fmt: skip
        return {
            "about": self.about, "settings": asdict(self.settings), "levels": [asdict(one) for one in self.levels],
            "ratios": ratios, "bandwidth_limit": self.limits, "percent_of_limit_at_1": self._percent_of_limit(),
            "left_out": self.left_out,
        }  # fmt: skip

    def _percent_of_limit(self) -> dict[str, dict[str, float]]:
        """What one stream gets of the bandwidth's limit: whole requests, and the tokens after the first."""
        found = {}
        for level in self.levels:
            if (most := self.limits.get(level.engine)) and level.concurrency == 1 and level.tpot_ms:
                whole, decoding = most["tokens_per_second"], 1000 / level.tpot_ms["p50"]
                found[level.engine] = {
                    "request": round(100 * level.tokens_per_second / whole, 1),
                    "decoding": round(100 * decoding / whole, 1),
                    "decoding_strict": round(100 * decoding / most["tokens_per_second_strict"], 1),
                }
        return found

    def _save(self) -> None:
        if self.path:
            paths.write_json(self.path, self.as_dict())

    def show(self, title: str = "Speed") -> None:
        """The table, and below it what it means."""
        rows = [_row(level) for level in self.levels]
        dashboard.show_table(rows, title, dashboard.aligned(rows) if rows else "nothing was measured")
        found = self.as_dict()
        for name, ratio in found["ratios"].items():
            engine, _, many = name.partition("_over_generate_at_")
            print(f"{many} at a time: {engine} gives {ratio:.1f} times the tokens of plain generate")
        for engine, share in found["percent_of_limit_at_1"].items():
            most = self.limits[engine]["tokens_per_second"]
            if share["request"] >= 1:  # a tiny model waits for the processor, not for memory
                print(f"{engine} alone: {share['request']:.0f} % of the {most:,.0f} tokens/s that memory allows")
        for what, reason in self.left_out.items():
            print(f"not measured: {what} ({reason})")

    def plot(self, path: Path | None = None) -> None:
        """Tokens a second and the wait for the first token, over the concurrency."""
        import matplotlib.pyplot as plt

        figure, (speed, wait) = plt.subplots(1, 2, figsize=(9, 3.5))
        many = sorted({level.concurrency for level in self.levels})
        for place, name in enumerate(self.speeds()):
            mine = sorted((one for one in self.levels if one.engine == name), key=lambda one: one.concurrency)
            speeds = {one.concurrency: one.tokens_per_second for one in mine if one.tokens_per_second}
            waits = {one.concurrency: one.ttft_ms["p50"] for one in mine if one.ttft_ms}
            for axes, points in ((speed, speeds), (wait, waits)):
                axes.plot(list(points), list(points.values()), "o-", color=f"C{place}", label=name)
        for axes, title, unit in ((speed, "Throughput", "tokens/s"), (wait, "First token, median", "ms")):
            axes.set(title=title, xlabel="requests at a time", ylabel=unit, xscale="log", yscale="log")
            axes.set_xticks(many, [str(one) for one in many])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        names = speed.get_legend_handles_labels()
        figure.legend(*names, loc="lower center", ncols=max(1, len(names[1])), frameon=False)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        dashboard.show_figure(figure, path)


def _row(level: Level) -> dict[str, str]:
    def three(spread: client.Spread | None) -> str:
        """p50 / p90 / p99; a dash for what too few requests cannot tell."""
        if spread is None:
            return DASH
        digits, values = 1 if max(spread.values()) < 100 else 0, [spread.get(f"p{n}") for n in client.PERCENTILES]
        return " / ".join(DASH if value is None else f"{value:,.{digits}f}" for value in values)

    def one(name: str, unit: str = "") -> str:
        return f"{level.during[name]:.4g}{unit}" if name in level.during else DASH

    return {
        "engine": level.engine, "at a time": str(level.concurrency), "tokens/s": f"{level.tokens_per_second:,.0f}",
        "first token ms": three(level.ttft_ms), "per token ms": three(level.tpot_ms),
        "answer ms": three(level.latency_ms), "errors": f"{level.errors} of {level.requests}",
        "running": one("running_mean"), "queue": one("waiting_max"),
        "KV cache": one("kv_cache_percent_max", " %"),
    }  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """One model folder on this machine, and the board its numbers go to."""

    folder: Path
    board: Board
    card: hardware.Card | None = None

    @property
    def dtype(self) -> str:
        """The precision every engine computes in."""
        return hardware.DTYPES[hardware.precision(self.card).value]

    def generate(self) -> None:
        """Plain generate in this process; its memory is given back."""
        from transformers import AutoModelForCausalLM

        if self.card:
            self.board.about["copy_bytes_per_second"] = copy_bandwidth()
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype, device_map={"": 0 if self.card else "cpu"}, trust_remote_code=False
        ).eval()
        self.board.add(static(model, self.board.settings, tokenizer_of(self.folder)))
        del model
        serving.free_card()

    def vllm(self, name: str, folder: Path) -> None:
        """vLLM with its defaults; only what this GPU wants and the prompts need is set."""
        settings = self.board.settings
        flags = {flag: choice.value for flag, choice in serving.flags_for(self.card, folder).items()} | {
            "served-model-name": "bench", "max-num-seqs": max(settings.concurrency),
            "max-model-len": settings.prompt_tokens + settings.answer_tokens + SPARE_TOKENS,
        }  # fmt: skip
        if bandwidth := self.board.about.get("copy_bytes_per_second"):
            self.board.limit(name, limit(folder, bandwidth))
        with serving.Server(folder, hardware.engine(self.card).value, flags=flags) as server:
            self.board.add(measure(client.target_of(server), name, settings, tokenizer_of(folder)))

    def transformers(self) -> None:
        """`transformers serve`, with its continuous batching where there is a GPU; fewer requests, as it is slow."""
        settings, device = self.board.settings.few(32 if self.card else 8), "cuda:0" if self.card else "cpu"
        flags = {"dtype": self.dtype, "device": device, "continuous-batching": self.card is not None}
        with serving.Server(self.folder, "transformers", flags=flags) as server:
            self.board.add(measure(client.target_of(server), "transformers serve", settings, tokenizer_of(self.folder)))

    def try_transformers(self) -> None:
        """The same, where a failure is only written down."""
        run_steps({"transformers serve": self.transformers}, self.board)


def run_steps(steps: Mapping[str, Callable[[], None]], board: Board) -> None:
    """One after the other; what fails is written down, and the others go on."""
    for name, step in steps.items():
        print(f"{name}:", flush=True)
        try:
            step()
        except Exception as problem:  # an engine may fail in any way; what was measured before it counts
            board.leave_out(name, str(problem) if isinstance(problem, CourseError) else repr(problem))


def bench_model(
    folder: Path, board: Board, *, rivals: Sequence[str] = RIVALS, variants: Mapping[str, Path] | None = None
) -> None:
    """Measure a model folder: plain generate, vLLM, vLLM with other forms of the same model, `transformers serve`."""
    chosen(",".join(rivals))
    hardware.share_processors()
    card = hardware.card()
    engine, bench = hardware.engine(card).value, Bench(Path(profiles.model_folder(folder)), board, card)
    board.about |= {"model": bench.folder.name, "dtype": bench.dtype, "machine": card.name if card else "cpu"}
    board.about |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    board.about["load_before"] = round(os.getloadavg()[0], 1)  # of a busy machine only ratios mean something
    steps: dict[str, Callable[[], None]] = {"generate": bench.generate} if "generate" in rivals else {}
    if engine != "transformers":
        forms = {"vllm": bench.folder} | {f"vllm {name}": Path(place) for name, place in (variants or {}).items()}
        steps |= {name: partial(bench.vllm, name, place) for name, place in forms.items()}
    if "transformers-serve" in rivals or engine == "transformers":
        steps["transformers serve"] = bench.transformers
    run_steps(steps, board)


def levels_in(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal() or not 1 <= int(part) <= MAX_CONCURRENCY]:
        raise CourseError("bench.wrong_concurrency", parts=", ".join(map(repr, wrong)), most=MAX_CONCURRENCY)
    return tuple(sorted({int(part) for part in parts}))


def answer(
    model: Path | None, url: str, name: str, settings: Settings, rivals: Sequence[str], out: Path | None
) -> Board:
    """The command line: a model folder with its rivals, or a running server, whose key is in VLLM_API_KEY."""
    if not (model or url):
        raise CourseError("bench.no_model_or_url")
    if out:
        paths.make_folder(out, "the results")
    board = Board(out / "bench.json" if out else None, settings, {})
    if url:
        target = find_target(url, name, os.environ.get("VLLM_API_KEY") or None)
        engine, tokenizer = "vllm" if target.vllm else "server", tokenizer_of(model)
        run_steps({engine: lambda: board.add(measure(target, engine, settings, tokenizer))}, board)
    elif model:
        bench_model(model, board, rivals=rivals)
    if out:
        board.plot(out / "bench.png")
    missing = {level.engine: level.first_error for level in board.levels if level.failed} | board.left_out
    if missing:
        board.show()
        reasons = "; ".join(f"{what}: {reason.splitlines()[0]}" for what, reason in missing.items())
        raise CourseError("bench.not_measured", reasons=reasons)
    return board
