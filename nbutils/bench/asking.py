"""`python -m nbutils bench-serve`: one model, every engine, one file of results; also for benchmarks/serve.py.

Not here: the measuring itself (load, rivals). Every step is kept when it is done, and one that fails stops no other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nbutils import hardware, profiles, serving
from nbutils.bench import alone, limits
from nbutils.bench.board import Board
from nbutils.bench.finding import find_target
from nbutils.bench.load import Target, measure
from nbutils.bench.numbers import Level
from nbutils.bench.prompts import Settings, tokenizer_of
from nbutils.bench.rivals import RIVALS, chosen
from nbutils.errors import CourseError
from nbutils.paths import make_folder
from nbutils.serving.ports import DIRECT

MOST = 4096
SLACK = 16  # tokens of room beyond prompt and answer


class Clock:
    """How long there is; 0 means as long as it takes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.ends = time.monotonic() + seconds if seconds else float("inf")

    @property
    def left(self) -> float:
        """Seconds until the time is up."""
        return self.ends - time.monotonic()

    def taken(self, levels: Iterator[Level]) -> Iterator[Level]:
        """As many levels as there is time for; the last one begun is finished."""
        while self.left > 0 and (level := next(levels, None)):
            yield level


@dataclass(frozen=True)
class Bench:
    """One model folder on this machine, and the board its numbers go to."""

    folder: Path
    board: Board
    clock: Clock = field(default_factory=Clock)
    card: hardware.Card | None = None

    @property
    def dtype(self) -> str:
        """The precision every engine computes in."""
        return hardware.DTYPES[hardware.precision(self.card).value]

    def generate(self) -> None:
        """Plain generate, in a process of its own, whose memory is free again when it ends."""
        found = alone.measure(self.folder, self.dtype, self.board.settings)
        self.board.about |= {"copy_bytes_per_second": found.bandwidth} if found.bandwidth else {}
        self.board.add(found.levels)

    def vllm(self, name: str, folder: Path) -> None:
        """vLLM with its defaults; only what this card wants and the prompts need is set."""
        settings = self.board.settings
        flags = {flag: choice.value for flag, choice in serving.flags_for(self.card, folder).items()} | {
            "served-model-name": "bench", "max-num-seqs": max(settings.concurrency),
            "max-model-len": settings.prompt_tokens + settings.answer_tokens + SLACK,
        }  # fmt: skip
        if bandwidth := self.board.about.get("copy_bytes_per_second"):
            self.board.limit(name, limits.limit(folder, bandwidth))
        with serving.Server(folder, hardware.engine(self.card).value, flags=flags) as server:
            self.board.about["vllm"] = version_of(server)
            levels = measure(target_of(server), name, settings, tokenizer_of(folder))
            self.board.add(self.clock.taken(levels))

    def transformers(self) -> None:
        """`transformers serve`, with its continuous batching where there is a card; fewer requests, as it is slow."""
        settings = self.board.settings.few(32 if self.card else 8)
        device = "cuda:0" if self.card else "cpu"
        flags = {"dtype": self.dtype, "device": device, "continuous-batching": self.card is not None}
        with serving.Server(self.folder, "transformers", flags=flags) as server:
            levels = measure(target_of(server), "transformers serve", settings, tokenizer_of(self.folder))
            self.board.add(self.clock.taken(levels))

    def try_transformers(self) -> None:
        """The same, where a failure is only written down."""
        run_steps({"transformers serve": self.transformers}, self.board, self.clock)


def answer(
    model: Path | None, url: str, name: str, settings: Settings, rivals: Sequence[str], out: Path | None
) -> Board:
    """What the command line asks for: a model folder with its rivals, or a server that is running."""
    if not (model or url):
        raise CourseError("neither a model nor a server was named.", "--model FOLDER, or --url URL", "give one of them")
    if out:
        make_folder(out, "the results")
    board = Board(out / "bench.json" if out else None, settings, {})
    bench_url(url, name, model, board) if url else bench_model(Path(model or ""), board, wanted=rivals)
    if out:
        board.plot(out / "bench.png")
    require_measured(board)
    return board


def require_measured(board: Board) -> None:
    """Stop, after the table was shown, if something that was asked for was not measured."""
    missing = {level.engine: level.first_error for level in board.levels if level.dead} | board.left_out
    if not missing:
        return
    board.show()
    raise CourseError(
        "; ".join(f"{name} was not measured: {reason.splitlines()[0]}" for name, reason in missing.items()),
        "answers from every engine that was asked for", "read above what happened, mend it, then measure again",
    )  # fmt: skip


def levels_in(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal() or not 1 <= int(part) <= MOST]:
        raise CourseError(
            f"--concurrency has {', '.join(map(repr, wrong))}.", f"numbers from 1 to {MOST} with commas between",
            "write it like 1,8,32",
        )  # fmt: skip
    return tuple(sorted({int(part) for part in parts}))


def bench_url(url: str, name: str, model: Path | None, board: Board) -> Board:
    """Measure a server that is already running; an API key is taken from VLLM_API_KEY."""
    target = find_target(url, name, os.environ.get("VLLM_API_KEY") or None)
    name, tokenizer = "vllm" if target.vllm else "server", tokenizer_of(model)
    run_steps({name: lambda: board.add(measure(target, name, board.settings, tokenizer))}, board, Clock())
    return board


def bench_model(
    folder: Path,
    board: Board,
    *,
    wanted: Sequence[str] = RIVALS,
    variants: Mapping[str, Path] | None = None,
    seconds: float = 0.0,
) -> Board:
    """Measure a model folder: plain generate, vLLM, vLLM with other forms of the same model, `transformers serve`."""
    wanted = chosen(",".join(wanted))
    hardware.share_processors()
    clock, card = Clock(seconds), hardware.card()
    bench = Bench(Path(profiles.model_folder(folder)), board, clock, card)
    board.about |= {"model": bench.folder.name, "dtype": bench.dtype, "machine": card.name if card else "cpu"}
    board.about |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    board.about["load_before"] = round(os.getloadavg()[0], 1)  # of a busy machine only ratios mean something
    steps: dict[str, Callable[[], None]] = {"generate": bench.generate} if "generate" in wanted else {}
    if hardware.engine(card).value != "transformers":
        forms = {"vllm": bench.folder} | {f"vllm {name}": Path(place) for name, place in (variants or {}).items()}
        steps |= {name: partial(bench.vllm, name, place) for name, place in forms.items()}
    if "transformers-serve" in wanted or hardware.engine(card).value == "transformers":
        steps["transformers serve"] = bench.transformers
    run_steps(steps, board, clock)
    return board


def run_steps(steps: Mapping[str, Callable[[], None]], board: Board, clock: Clock) -> None:
    """One after the other; what fails or has no time left is written down, and the others go on."""
    for name, step in steps.items():
        if clock.left <= 0:
            board.leave_out(name, "the time was up")
            continue
        print(f"{name}:", flush=True)
        try:
            step()
        except Exception as problem:  # an engine may fail in any way; what was measured before it counts
            board.leave_out(name, str(problem) if isinstance(problem, CourseError) else repr(problem))


def target_of(server: serving.Server) -> Target:
    """A server of this course as a target."""
    vllm = server.environment.engine != "transformers"
    return Target(server.url, server.model_name, vllm, server.api_key, server.require)


def version_of(server: serving.Server) -> str:
    """Which vLLM answers."""
    with suppress(OSError, ValueError, KeyError), DIRECT.open(f"{server.root}/version", timeout=5.0) as told:
        return str(json.load(told)["version"])
    return "not told"
