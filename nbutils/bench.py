"""How fast a model is served: the same load on vLLM, on `transformers serve` and on plain `generate`.

`vllm bench serve` measures vLLM and what takes its requests. It sends `repetition_penalty` and `ignore_eos`, and
`transformers serve` (5.19) answers 422 to a field it does not know, so a small client of ours measures that one. Every
level is kept in the file when it is done, and an engine that fails stops no other.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nbutils import display, environments, files, hardware, profiles, serving
from nbutils.errors import CourseError
from nbutils.language import joined, tr
from nbutils.merging.folder import read_header
from nbutils.serving.engine import PREFIX
from nbutils.serving.server import INSIDE, NO_KEY, reach_directly

RIVALS = ("generate", "transformers-serve")
BENCH_SERVE = INSIDE / "bench_serve.py"
WARM_UP_TOKENS, WARM_UP_SEED = 8, -1
USUAL_SPEED = 1000  # tokens/s: about what vLLM has with 8 requests at a time (tiny on 2 cores, a 7B on an H200)
SPARE_TOKENS = 64  # a prompt of `vllm bench serve` has some tokens more than asked for: random text, tokenized again
Level = dict[str, Any]  # one engine at one concurrency; times are percentiles in ms, None where there are none
Timing = tuple[float | None, float, str]  # of a request: seconds to its first token and to its last, what went wrong


@dataclass(frozen=True)
class Settings:
    """Levels of concurrency, tokens of a prompt and of an answer; each slot is filled `rounds` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4

    def few(self, most: int) -> Settings:
        """The same for a rival that is slow: levels up to `most`, and each slot filled once."""
        return replace(self, concurrency=tuple(n for n in self.concurrency if n <= most) or (1,), rounds=1)

    @property
    def requests(self) -> int:
        """How many requests an engine gets."""
        return sum(map(self.requests_at, self.concurrency))

    def requests_at(self, concurrency: int) -> int:
        """How many of them at this level."""
        return self.rounds * max(2, concurrency)

    def __str__(self) -> str:
        tokens = self.requests * self.answer_tokens
        amount = {"requests": self.requests, "tokens": tokens, "seconds": tokens / USUAL_SPEED, "speed": USUAL_SPEED}
        return tr(
            "  {requests:,} requests, {tokens:,} tokens to generate: {seconds:,.0f} s at {speed:,} a second", **amount
        )

    def prompts(self, tokenizer: Any, concurrency: int) -> list[list[int]]:
        """The prompts of one level, the same for every engine."""
        return make_prompts(tokenizer, self.prompt_tokens, self.requests_at(concurrency), seed=concurrency)


def summarize(engine: str, concurrency: int, requests: Sequence[Timing], tokens: int, seconds: float) -> Level:
    """The numbers of a level; a request that failed counts as an error and in nothing else."""
    import numpy as np

    def spread(times: Sequence[float]) -> dict[str, float] | None:
        return {f"p{n}": round(1000 * float(np.percentile(times, n)), 2) for n in (50, 90, 99)} if times else None

    good, errors = [one for one in requests if not one[2]], [error for _, _, error in requests if error]
    streamed = [(first, whole) for first, whole, _ in good if first is not None]
    each = [(whole - first) / (tokens - 1) for first, whole in streamed] if tokens > 1 else []
    return {
        "engine": engine, "concurrency": concurrency, "requests": len(requests), "errors": len(errors),
        "first_error": errors[0] if errors else "", "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens * len(good) / seconds, 1), "ttft_ms": spread([one for one, _ in streamed]),
        "tpot_ms": spread(each), "latency_ms": spread([whole for _, whole, _ in good]),
    }  # fmt: skip


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random words that are one token each: none share a beginning, so that no engine gains from its prefix cache."""
    rng = random.Random(seed)
    some = rng.sample(range(len(tokenizer)), min(4000, len(tokenizer)))
    words = [token for token in some if re.fullmatch(" [A-Za-z]+", tokenizer.decode([token]))]
    return [rng.choices(words or some, k=tokens) for _ in range(count)]


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there and its tokenizer, and what can measure it."""

    url: str
    name: str
    tokenizer: str
    environment: serving.ServingEnvironment
    api_key: str | None = field(default=None, repr=False)


def find_target(url: str, name: str = "", model: Path | None = None, api_key: str | None = None) -> tuple[Target, str]:
    """An OpenAI-compatible server that was started elsewhere, its first model unless one is named; and its engine."""
    from openai import OpenAI

    url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    reach_directly(urlsplit(url).hostname or "127.0.0.1")
    try:
        [first, *_] = OpenAI(base_url=url, api_key=api_key or NO_KEY, timeout=10.0, max_retries=0).models.list().data
    except Exception as problem:  # whatever answers there need not be an OpenAI-compatible server
        raise CourseError(
            tr("{url} did not answer like an OpenAI-compatible server ({problem}).", url=url, problem=repr(problem)),
            todo=tr("Start it first, correct --url, or set VLLM_API_KEY to the key it was started with."),
        ) from problem
    tokenizer = str(model or getattr(first, "root", None) or first.id)  # vLLM says where its model came from
    if Path(tokenizer).is_absolute() and not Path(tokenizer).is_dir():  # on the server's machine only
        raise CourseError(
            tr("The server's model is in {tokenizer}, and that folder is not on this machine.", tokenizer=tokenizer),
            todo=tr("Give a folder with the tokenizer of the served model with --model."),
        )
    return Target(url, name or first.id, tokenizer, serving.ensure_environment(), api_key), first.owned_by


def bench_serve_flags(target: Target, settings: Settings, concurrency: int) -> dict[str, Any]:
    """The flags of `vllm bench serve` for one level, those that lesson 09 has in view."""
    return {
        "backend": "openai", "base-url": target.url.removesuffix("/v1"), "model": target.name,
        "tokenizer": target.tokenizer, "dataset-name": "random", "random-input-len": settings.prompt_tokens,
        "random-output-len": settings.answer_tokens, "ignore-eos": True, "temperature": 0,
        "max-concurrency": concurrency, "num-prompts": settings.requests_at(concurrency), "num-warmups": concurrency,
        "percentile-metrics": "ttft,tpot,e2el", "metric-percentiles": "50,90,99",
    }  # fmt: skip


def bench_serve(
    environment: serving.ServingEnvironment, flags: Mapping[str, Any], api_key: str | None = None
) -> dict[str, Any]:
    """Run `vllm bench serve` in the serving environment; what it saves, with every single request."""
    extra = dict(environment.env_vars)
    if api_key:
        extra["OPENAI_API_KEY"] = api_key
    if Path(flags["tokenizer"]).is_dir():
        extra["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        saved = {"save-result": True, "save-detailed": True, "result-dir": folder, "result-filename": "result.json"}
        words = serving.to_words({**flags, **saved, "disable-tqdm": True})
        command = [str(environment.python), str(BENCH_SERVE), *words]
        variables = environments.variables(PREFIX, extra)
        ended = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ended.returncode:
            lines = "\n".join(ended.stderr.strip().splitlines()[-3:])
            raise CourseError(
                tr("`vllm bench serve` stopped: {lines}", lines=lines),
                todo=tr(
                    "Correct what is named above. If it is the tokenizer, give the folder of the served model "
                    "with --model."
                ),
            )
        return dict(files.read_json(Path(folder) / "result.json"))


def level_of(engine: str, result: Mapping[str, Any], tokens: int) -> Level:
    """A level from what `vllm bench serve` saved; for it an answer that is too short is no error, here it is one."""
    errors = []
    for error, count in zip(result["errors"], result["output_lens"], strict=True):
        if error:
            errors.append(error.strip().splitlines()[-1])
        elif count != tokens:
            errors.append(_wrong_length(count, tokens))

    def spread(metric: str) -> dict[str, float] | None:
        return {f"p{n}": round(result[f"p{n}_{metric}_ms"], 2) for n in (50, 90, 99)} if result["completed"] else None

    return {
        "engine": engine, "concurrency": result["max_concurrency"], "requests": len(result["errors"]),
        "errors": len(errors), "first_error": errors[0] if errors else "", "seconds": round(result["duration"], 3),
        "tokens_per_second": round(result["output_throughput"], 1), "ttft_ms": spread("ttft"),
        "tpot_ms": spread("tpot"), "latency_ms": spread("e2el"),
    }  # fmt: skip


def measure(target: Target, engine: str, settings: Settings) -> Iterator[Level]:
    """One level after the other; stops where not one request is answered."""
    level_at = _by_vllm if target.environment.engine != "transformers" else _by_openai
    for many in settings.concurrency:
        level = level_at(target, engine, settings, many)
        yield level
        if level["errors"] == level["requests"]:
            raise CourseError(
                tr(
                    "Not one of {requests} requests to {url} was answered: {error}",
                    requests=level["requests"],
                    url=target.url,
                    error=level["first_error"],
                ),
                todo=tr(
                    "Read the server's log. If it expects another key or another --name, give that, then measure again."
                ),
            )


def _by_vllm(target: Target, engine: str, settings: Settings, concurrency: int) -> Level:
    """Measured by `vllm bench serve`."""
    flags = bench_serve_flags(target, settings, concurrency)
    return level_of(engine, bench_serve(target.environment, flags, target.api_key), settings.answer_tokens)


def _by_openai(target: Target, engine: str, settings: Settings, concurrency: int) -> Level:
    """Measured with the `openai` client in threads, which is fast enough for `transformers serve`."""
    from openai import OpenAI

    tokenizer = _tokenizer(target.tokenizer)
    client = OpenAI(base_url=target.url, api_key=target.api_key or NO_KEY, timeout=300.0, max_retries=0)
    endless = json.dumps({"eos_token_id": -1, "pad_token_id": 0})  # no token is -1: every answer has its full length

    def request(prompt: list[int], tokens: int) -> Timing:
        options: Any = {"max_tokens": tokens, "temperature": 0.0, "extra_body": {"generation_config": endless}}
        sent, first, count = time.perf_counter(), None, 0
        try:
            text = tokenizer.decode(prompt)
            for piece in client.completions.create(model=target.name, prompt=text, stream=True, **options):
                if first is None and piece.choices and piece.choices[0].text:
                    first = time.perf_counter() - sent
                if piece.usage:
                    count = piece.usage.completion_tokens
            error = "" if count == tokens else _wrong_length(count, tokens)
        except Exception as problem:  # OpenAI's errors, and those of its HTTP library where a stream breaks off
            error = f"{type(problem).__name__}: {problem}"
        return first, time.perf_counter() - sent, error

    warm_up = make_prompts(tokenizer, settings.prompt_tokens, concurrency, seed=WARM_UP_SEED)
    prompts = settings.prompts(tokenizer, concurrency)
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        list(pool.map(partial(request, tokens=WARM_UP_TOKENS), warm_up))
        started = time.perf_counter()
        done = list(pool.map(partial(request, tokens=settings.answer_tokens), prompts))
        return summarize(engine, concurrency, done, settings.answer_tokens, time.perf_counter() - started)


def _wrong_length(count: int, tokens: int) -> str:
    return tr("{count} tokens returned, {tokens} requested", count=count, tokens=tokens)


def parse_rivals(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in RIVALS]:
        raise CourseError(
            tr("There are no rivals called {names}.", names=", ".join(unknown)),
            allowed=tr("{rivals}, separated by commas, or nothing", rivals=", ".join(RIVALS)),
            todo=tr("Correct the name, or leave it out."),
        )
    return names


@dataclass
class Benchmark:
    """Engines at several levels of concurrency; the file is written after each level, so that none is lost."""

    path: Path | None
    settings: Settings
    about: dict[str, Any]
    gpu: hardware.GPU | None = None
    levels: list[Level] = field(default_factory=list)
    bandwidth_limit: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine: what its weights allow at 1
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, levels: Iterable[Level]) -> None:
        """Keep these, one after the other."""
        for level in levels:
            self.levels.append(level)
            wrong = tr(", {errors} ERRORS ({first_error})", **level) if level["errors"] else ""
            speed = tr("  {engine}, {concurrency} at a time: {tokens_per_second:,.1f} tokens/s", **level)
            print(f"{speed}{wrong}", flush=True)
            self.save()

    def add_result(self, engine: str, result: Mapping[str, Any]) -> None:
        """Keep what `vllm bench serve` saved."""
        self.add([level_of(engine, result, self.settings.answer_tokens)])

    def add_limit(self, engine: str, folder: Path, device: str = "cuda", size: int = 2**30) -> None:
        """The most tokens a second for one stream, which reads all weights but an embedding: measured by copying."""
        import torch
        from torch.utils.benchmark import Timer

        source = torch.ones(size, dtype=torch.uint8, device=device)
        timer = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
        bandwidth = 2 * size / timer.timeit(10).mean
        found = {name: one.size for file in folder.glob("*.safetensors") for name, one in read_header(file).items()}
        weights = sum(found.values()) - ("lm_head.weight" in found) * found.get("model.embed_tokens.weight", 0)
        limit = {"weights_gb": weights / 1e9, "copy_gb_per_second": bandwidth / 1e9}
        self.bandwidth_limit[engine] = limit | {"tokens_per_second": round(bandwidth / weights, 1)}
        self.save()

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and concurrency."""
        found: dict[str, dict[str, float]] = {}
        for level in self.levels:
            found.setdefault(level["engine"], {})[str(level["concurrency"])] = level["tokens_per_second"]
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "gpu")}

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path:
            files.write_json(self.path, self.as_dict())

    def show(self, title: str = "") -> None:
        """The table, and below it what it means."""

        def three(spread: dict[str, float] | None) -> str:
            return " / ".join(f"{value:,.1f}" for value in spread.values()) if spread else "–"

        rows = [
            {tr("engine"): one["engine"], tr("at a time"): one["concurrency"]}
            | {"tokens/s": f"{one['tokens_per_second']:,.0f}", tr("first token ms"): three(one["ttft_ms"])}
            | {tr("per token ms"): three(one["tpot_ms"]), tr("answer ms"): three(one["latency_ms"])}
            | {tr("errors"): f"{one['errors']} / {one['requests']}"}
            for one in sorted(self.levels, key=lambda one: one["concurrency"])
        ]  # fmt: skip
        display.show_table(rows, title, display.aligned(rows) if rows else tr("nothing was measured"))
        if rows:
            print(tr("at a time: requests under way together. Three times in a cell are p50 / p90 / p99: half, 90 % and"
                     " 99 % of the requests took no longer. errors: failed / all."))  # fmt: skip
        for engine, most in self.bandwidth_limit.items():
            values = {"engine": engine, "speed": most["tokens_per_second"]}
            print(tr("{engine}, one at a time: at most {speed:,} tokens/s, by memory bandwidth.", **values))
        for what, reason in self.left_out.items():
            print(tr("Not measured: {what} ({reason}).", what=what, reason=reason))

    def plot(self, path: Path | None = None) -> None:
        """Tokens a second over the concurrency."""
        figure, axes = display.pyplot().subplots(figsize=(7, 3.5))
        for engine, speeds in self.speeds().items():
            axes.plot([int(many) for many in speeds], list(speeds.values()), "o-", label=engine)
        axes.set(xlabel=tr("requests at a time"), ylabel="tokens/s", xscale="log", yscale="log")
        axes.set_xticks(self.settings.concurrency, labels=map(str, self.settings.concurrency))
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.tight_layout()
        display.show_figure(figure, path)

    def run(self, folder: Path, names: Sequence[str], variants: Mapping[str, Path] | None = None) -> None:
        """Measure a model in the named engines, and its variants in vLLM; what fails is kept, the others go on."""
        steps: dict[str, Callable[[], None]] = {
            "generate": partial(self.generate, folder), "vllm": partial(self.vllm, "vllm", folder),
            **{f"vllm {name}": partial(self.vllm, f"vllm {name}", other) for name, other in (variants or {}).items()},
            "transformers-serve": partial(self.transformers, folder),
        }  # fmt: skip
        for name in [name for name in steps if name.partition(" ")[0] in names]:
            print(f"{name}:", flush=True)
            try:
                steps[name]()
            except Exception as problem:  # an engine may fail in any way; what was measured before it counts
                reason = str(problem) if isinstance(problem, CourseError) else repr(problem)
                self.left_out[name] = reason
                self.save()
                print(tr("  {name} left out: {reason}", name=name, reason=reason), flush=True)
            serving.free_gpu_memory()  # also after a model that did not fit

    def generate(self, folder: Path) -> None:
        """Plain `generate` in batches, on the first prompts that servers get; memory is freed."""
        import torch
        from transformers import AutoModelForCausalLM

        where: Any = {"dtype": _dtype(self.gpu), "device_map": {"": 0 if self.gpu else "cpu"}}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **where).eval()
        fixed = {"do_sample": False, "pad_token_id": model.generation_config.pad_token_id or 0}

        def timed(ids: Any, tokens: int) -> list[Timing]:
            began, length = time.perf_counter(), {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with torch.inference_mode():
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed, **length).tolist()
            return [(None, time.perf_counter() - began, "")] * len(ids)

        settings, tokenizer = self.settings.few(32), _tokenizer(folder)
        print(settings, flush=True)
        for batch in settings.concurrency:
            batches = torch.tensor(settings.prompts(tokenizer, batch), device=model.device).split(batch)
            timed(batches[0], WARM_UP_TOKENS)
            started = time.perf_counter()
            done = [one for ids in batches for one in timed(ids, settings.answer_tokens)]
            seconds = time.perf_counter() - started
            self.add([summarize("generate", batch, done, settings.answer_tokens, seconds)])

    def vllm(self, name: str, folder: Path) -> None:
        """vLLM with its defaults; only what this GPU wants and the prompts need is set."""
        if self.gpu:
            self.add_limit(name, folder)
            serving.free_gpu_memory()
        settings, engine = self.settings, hardware.engine(self.gpu).value
        flags = {flag: choice.value for flag, choice in serving.flags_for(self.gpu, folder).items()} | {
            "served-model-name": "bench", "max-num-seqs": max(settings.concurrency),
            "max-model-len": settings.prompt_tokens + settings.answer_tokens + SPARE_TOKENS,
        }  # fmt: skip
        with serving.Server(folder, engine, flags=flags) as server:
            self.measure(server, name)

    def transformers(self, folder: Path) -> None:
        """`transformers serve`, with its continuous batching where there is a GPU; fewer requests, as it is slow."""
        settings, batching = self.settings.few(32 if self.gpu else 8), self.gpu is not None
        flags = {"dtype": _dtype(self.gpu), "device": "cuda:0" if batching else "cpu", "continuous-batching": batching}
        with serving.Server(folder, "transformers", flags=flags) as server:
            self.measure(server, "transformers serve", settings)

    def measure(self, server: serving.Server, name: str, settings: Settings | None = None) -> None:
        """Measure a server that is up."""
        target = Target(server.url, server.model_name, server.model, server.environment, server.api_key)
        settings = settings or self.settings
        print(settings, flush=True)
        self.add(measure(target, name, settings))


def _dtype(gpu: hardware.GPU | None) -> str:
    return str(hardware.dtype(gpu).value)


def _tokenizer(folder: Path | str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def bench_model(
    folder: Path, benchmark: Benchmark, *, rivals: Sequence[str] = RIVALS, variants: Mapping[str, Path] | None = None
) -> None:
    """Measure a model folder: plain generate, vLLM, vLLM with other forms of the same model, `transformers serve`."""
    hardware.share_processors()
    benchmark.gpu = gpu = hardware.gpu()
    benchmark.about |= {"model": folder.name, "dtype": _dtype(gpu), "machine": gpu.name if gpu else "cpu"}
    print(tr("Each engine is started first, which can take minutes. In all some 4 minutes with the tiny model"
             " on 2 idle cores."), flush=True)  # fmt: skip
    own = "transformers-serve" if hardware.engine(gpu).value == "transformers" else "vllm"
    benchmark.run(Path(profiles.model_folder(folder)), [*rivals, own], variants)


def levels_in(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise CourseError(
            tr("--concurrency is {text!r}.", text=text),
            allowed=tr("positive whole numbers, separated by commas"),
            todo=tr("Write it like 1,8,32."),
        )
    return tuple(sorted({int(part) for part in parts}))


def answer(
    model: Path | None, url: str, name: str, settings: Settings, rivals: Sequence[str], out: Path | None
) -> Benchmark:
    """The command line: a model folder with its rivals, or a running server, whose key is in VLLM_API_KEY."""
    if not (model or url):
        raise CourseError(
            tr("Neither a model nor a server was named."),
            allowed=tr("--model FOLDER, or --url URL"),
            todo=tr("Give one of them."),
        )
    path = files.make_folder(out, tr("the results")) / "bench.json" if out else None
    benchmark = Benchmark(path, settings, {})
    if url:
        target, engine = find_target(url, name, model, os.environ.get("VLLM_API_KEY") or None)
        print(settings, flush=True)
        benchmark.add(measure(target, engine, settings))
    elif model:
        bench_model(model, benchmark, rivals=rivals)
    if out:
        benchmark.plot(out / "bench.png")
    if benchmark.left_out:
        benchmark.show()
        reasons = joined((f"{what}: {reason.splitlines()[0]}" for what, reason in benchmark.left_out.items()), ";")
        raise CourseError(
            tr("Not measured: {reasons}", reasons=reasons), todo=tr("Fix what is named above, then measure again.")
        )
    return benchmark
