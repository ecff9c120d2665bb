"""What is measured and shown: servers against plain `generate`, the limit of the GPU's memory, table and plot.

Every step is kept in the file when it is done, and one that fails stops no other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nbutils import display, files, hardware, profiles, serving
from nbutils.bench import client
from nbutils.bench.client import Level, Request, Settings, measure, summarize
from nbutils.errors import CourseError

RIVALS = ("generate", "transformers-serve")
BATCHES = (1, 32)  # of plain generate
SPARE_TOKENS = 16  # of context beyond prompt and answer


def parse_rivals(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in RIVALS]:
        raise CourseError("bench.unknown_rivals", names=", ".join(unknown), rivals=", ".join(RIVALS))
    return names


def copy_bandwidth(device: str = "cuda", size: int = 2**30) -> float:
    """Bytes a second that a copy reads and writes in the device's memory."""
    import torch
    from torch.utils.benchmark import Timer

    source = torch.ones(size, dtype=torch.uint8, device=device)
    timer = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
    return 2 * size / timer.timeit(10).mean


def limit(folder: Path, bandwidth: float) -> dict[str, float]:
    """The most tokens a second one stream can get: every token reads all weights once."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    speed = round(bandwidth / weights, 1)
    return {"weights_gb": weights / 1e9, "copy_gb_per_second": bandwidth / 1e9, "tokens_per_second": speed}


class Results:
    """The levels of all engines; the file is written anew after each, so that nothing is lost when time runs out."""

    def __init__(self, path: Path | None, settings: Settings, about: Mapping[str, Any]) -> None:
        self.path, self.settings, self.about = path, settings, dict(about)
        self.levels: list[Level] = []
        self.limits: dict[str, dict[str, float]] = {}  # by engine: what its weights allow at 1
        self.left_out: dict[str, str] = {}

    def add(self, levels: Iterable[Level]) -> None:
        """Keep these, one after the other."""
        for level in levels:
            self.levels.append(level)
            print(f"  {level}", flush=True)
            self._save()

    def add_limit(self, engine: str, folder: Path) -> None:
        """Measure the GPU's memory, and keep what its bandwidth allows an engine with these weights at most."""
        self.limits[engine] = limit(folder, copy_bandwidth())
        self._save()

    def leave_out(self, what: str, reason: str) -> None:
        """Keep why something was not measured."""
        self.left_out[what] = reason
        print(f"  {what} left out: {reason}", flush=True)
        self._save()

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and concurrency."""
        found: dict[str, dict[str, float]] = {}
        for level in self.levels:
            found.setdefault(level.engine, {})[str(level.concurrency)] = level.tokens_per_second
        return found

    def facts(self) -> dict[str, Any]:
        """The same for facts.json."""
        return {"tokens_per_second": self.speeds()}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {
            "about": self.about, "settings": asdict(self.settings), "levels": [asdict(one) for one in self.levels],
            "bandwidth_limit": self.limits, "left_out": self.left_out,
        }  # fmt: skip

    def _save(self) -> None:
        if self.path:
            files.write_json(self.path, self.as_dict())

    def show(self, title: str = "Speed") -> None:
        """The table, and below it what it means."""
        rows = [_row(level) for level in self.levels]
        display.show_table(rows, title, display.aligned(rows) if rows else "nothing was measured")
        for engine, most in self.limits.items():
            print(f"{engine}, one at a time: at most {most['tokens_per_second']:,} tokens/s, by memory bandwidth.")
        for what, reason in self.left_out.items():
            print(f"Not measured: {what} ({reason}).")

    def plot(self, path: Path | None = None) -> None:
        """Tokens a second over the concurrency."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 3.5))
        for engine, speeds in self.speeds().items():
            axes.plot([int(many) for many in speeds], list(speeds.values()), "o-", label=engine)
        axes.set(xlabel="requests at a time", ylabel="tokens/s", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.tight_layout()
        display.show_figure(figure, path)


def _row(level: Level) -> dict[str, str]:
    def three(spread: client.Spread | None) -> str:
        return " / ".join(f"{value:,.1f}" for value in spread.values()) if spread else "–"

    return {
        "engine": level.engine, "at a time": str(level.concurrency), "tokens/s": f"{level.tokens_per_second:,.0f}",
        "first token ms": three(level.ttft_ms), "per token ms": three(level.tpot_ms),
        "answer ms": three(level.latency_ms), "errors": f"{level.errors} of {level.requests}",
    }  # fmt: skip


def _dtype(gpu: hardware.GPU | None) -> str:
    return hardware.DTYPES[hardware.precision(gpu).value]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@dataclass(frozen=True)
class Benchmark:
    """One model folder on this machine, and where its numbers go."""

    folder: Path
    results: Results
    gpu: hardware.GPU | None = None

    def run(self, names: Sequence[str], variants: Mapping[str, Path] | None = None) -> None:
        """Measure the named engines and, in vLLM, other forms of the model; what fails is kept, the others go on."""
        steps: dict[str, Callable[[], None]] = {
            "generate": self.generate, "vllm": partial(self.vllm, "vllm", self.folder),
            **{f"vllm {name}": partial(self.vllm, f"vllm {name}", folder) for name, folder in (variants or {}).items()},
            "transformers-serve": self.transformers,
        }  # fmt: skip
        run_steps({name: step for name, step in steps.items() if name.partition(" ")[0] in names}, self.results)

    def generate(self) -> None:
        """Plain `generate` one at a time and in a batch, on the first prompts that servers get; memory is freed."""
        import torch
        from transformers import AutoModelForCausalLM

        settings, device = self.results.settings, {"": 0 if self.gpu else "cpu"}
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=_dtype(self.gpu), device_map=device, trust_remote_code=False
        ).eval()

        for batch in BATCHES:
            prompts = settings.prompts(_tokenizer(self.folder), batch)[: max(2, batch)]
            batches = torch.tensor(prompts, device=model.device).split(batch)
            _generate(model, batches[0], client.WARM_UP_TOKENS)
            started = time.perf_counter()
            done = [request for ids in batches for request in _generate(model, ids, settings.answer_tokens)]
            self.results.add([summarize("generate", batch, done, time.perf_counter() - started)])

    def vllm(self, name: str, folder: Path) -> None:
        """vLLM with its defaults; only what this GPU wants and the prompts need is set."""
        if self.gpu:
            self.results.add_limit(name, folder)
            serving.free_gpu_memory()
        settings = self.results.settings
        flags = {flag: choice.value for flag, choice in serving.flags_for(self.gpu, folder).items()} | {
            "served-model-name": "bench", "max-num-seqs": max(settings.concurrency),
            "max-model-len": settings.prompt_tokens + settings.answer_tokens + SPARE_TOKENS,
        }  # fmt: skip
        with serving.Server(folder, hardware.engine(self.gpu).value, flags=flags) as server:
            self.measure(server, name)

    def transformers(self) -> None:
        """`transformers serve`, with its continuous batching where there is a GPU; fewer requests, as it is slow."""
        settings, batching = self.results.settings.few(32 if self.gpu else 8), self.gpu is not None
        flags = {"dtype": _dtype(self.gpu), "device": "cuda:0" if batching else "cpu", "continuous-batching": batching}
        with serving.Server(self.folder, "transformers", flags=flags) as server:
            self.measure(server, "transformers serve", settings)

    def measure(self, server: serving.Server, name: str, settings: Settings | None = None) -> None:
        """Measure a server that is up."""
        target, tokenizer = client.target_of(server), _tokenizer(Path(server.model))
        self.results.add(measure(target, name, settings or self.results.settings, tokenizer))


def _generate(model: Any, ids: Any, tokens: int) -> list[Request]:
    """One batch, timed, with exactly so many tokens for each prompt."""
    import torch

    began, pad = time.perf_counter(), model.generation_config.pad_token_id or 0
    fixed = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": pad}
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed).tolist()
    return [Request(None, time.perf_counter() - began, tokens)] * len(ids)


def run_steps(steps: Mapping[str, Callable[[], None]], results: Results) -> None:
    """One after the other; what fails is written down, and the others go on."""
    for name, step in steps.items():
        print(f"{name}:", flush=True)
        try:
            step()
        except Exception as problem:  # an engine may fail in any way; what was measured before it counts
            results.leave_out(name, str(problem) if isinstance(problem, CourseError) else repr(problem))
        serving.free_gpu_memory()  # also after a model that did not fit


def bench_model(
    folder: Path, results: Results, *, rivals: Sequence[str] = RIVALS, variants: Mapping[str, Path] | None = None
) -> None:
    """Measure a model folder: plain generate, vLLM, vLLM with other forms of the same model, `transformers serve`."""
    parse_rivals(",".join(rivals))
    hardware.share_processors()
    gpu = hardware.gpu()
    benchmark = Benchmark(Path(profiles.model_folder(folder)), results, gpu)
    results.about |= {"model": folder.name, "dtype": _dtype(gpu), "machine": gpu.name if gpu else "cpu"}
    own = "transformers-serve" if hardware.engine(gpu).value == "transformers" else "vllm"
    benchmark.run([*rivals, own], variants)


def levels_in(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise CourseError("bench.wrong_concurrency", text=text)
    return tuple(sorted({int(part) for part in parts}))


def answer(
    model: Path | None, url: str, name: str, settings: Settings, rivals: Sequence[str], out: Path | None
) -> Results:
    """The command line: a model folder with its rivals, or a running server, whose key is in VLLM_API_KEY."""
    if not (model or url):
        raise CourseError("bench.no_model_or_url")
    if out:
        files.make_folder(out, "the results")
    results = Results(out / "bench.json" if out else None, settings, {})
    if url:
        target = client.find_target(url, name, os.environ.get("VLLM_API_KEY") or None)
        engine, tokenizer = "vllm" if target.vllm else "server", _tokenizer(model) if model else None
        run_steps({engine: lambda: results.add(measure(target, engine, settings, tokenizer))}, results)
    elif model:
        bench_model(model, results, rivals=rivals)
    if out:
        results.plot(out / "bench.png")
    if results.left_out:
        results.show()
        reasons = "; ".join(f"{what}: {reason.splitlines()[0]}" for what, reason in results.left_out.items())
        raise CourseError("bench.not_measured", reasons=reasons)
    return results
