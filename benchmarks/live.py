"""What the live numbers cost the training: seconds per step with and without them, and the time spent inside them.

    python benchmarks/live.py [PAIRS] [STEPS]

PAIRS of blocks (60), each of STEPS (5), on the tiny model: its steps are the shortest anyone trains, so that a share
of them is the largest. One process, one training: blocks with and without the numbers take turns (on off off on ...),
so that what else the machine does falls on both alike. Every step is logged in both kinds, and the numbers are drawn
as in a notebook, once a second, into an output that is kept; the way to a browser is not part of it.

`all_steps` is the median step with them over the median step without, in a pair of neighbours, and the median of all
pairs, with an interval drawn from them. On a busy machine that interval is wide; `share` is not: the processor seconds
of the training thread inside the callback over the seconds of the steps, which is all it can cost.
`lines` is the same for printed lines instead of a drawing.
Results: benchmarks/results/live_cpu.json, or live_cuda.json where there is a GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nbutils import chat, data, display, files, hardware, tracking

ROOT = Path(__file__).resolve().parent.parent
SEED = 42


@dataclass
class Block:
    """Some steps in a row."""

    on: bool
    steps: list[float] = field(default_factory=list)  # seconds each, the callbacks at their end included
    inside: list[float] = field(default_factory=list)  # processor seconds in the callback during each


class Output(display.LiveOutput):
    """Formats a page as IPython's message, as in a notebook, and keeps the last one."""

    message = b""

    def show(self, text: str, html: str = "") -> None:
        """Draw over."""
        page = {"text/html": html, "text/plain": text}
        self.message = json.dumps({"data": page, "metadata": {}, "transient": {"display_id": "1"}}).encode()


def stopwatch(logs: Path, length: int, drawn: bool) -> tuple[Any, list[Block]]:
    """A callback that passes what it hears on to the live numbers, in every other block, and the times of both."""
    from transformers import TrainerCallback

    blocks: list[Block] = []
    shown: Any = tracking.LiveNumbers(logs, logs)
    if drawn:
        shown.watched, shown.output = True, Output()

    @contextmanager
    def timed() -> Iterator[None]:
        began = time.thread_time()
        yield
        blocks[-1].inside[-1] += time.thread_time() - began

    class Stopwatch(TrainerCallback):
        """Forwards events, or does not."""

        began = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            shown.on_train_begin(state)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            if blocks:
                blocks[-1].steps.append(now - self.began)
            if state.global_step % length == 0:
                blocks.append(Block(on=len(blocks) % 4 in (1, 2)))
            blocks[-1].inside.append(0.0)
            self.began = now

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if blocks[-1].on:
                with timed():
                    shown.on_step_end(state, others.get("optimizer"))

        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if blocks[-1].on and "loss" in others["logs"]:
                with timed(), contextlib.redirect_stdout(io.StringIO()):
                    shown.on_log(state, others["logs"])

    return Stopwatch(), blocks


def trainer_of(scratch: Path, steps: int, callback: Any) -> Any:
    """A trainer of the tiny model, with packing and LoRA as in lesson 03, every step logged."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    data.prepare("", scratch / "data", rows=0)
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    rows = chat.training_dataset(chat.filter_by_length(tokenizer, data.load(scratch / "data")[0], 256))
    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        files.TINY_MODEL, dtype=torch.float32, device_map="cuda" if gpu else "cpu"
    )
    settings = SFTConfig(
        output_dir=str(scratch / "trainer"), max_steps=steps, save_strategy="no", logging_steps=1, max_length=256,
        packing=True, per_device_train_batch_size=2, learning_rate=2e-4, bf16=False,
        gradient_checkpointing=False, use_cpu=not gpu, report_to=[], seed=SEED, dataloader_pin_memory=False,
        logging_nan_inf_filter=False, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        model=model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=lora,
        callbacks=[callback],
    )  # fmt: skip


def measure(pairs: int, steps: int, drawn: bool) -> list[Block]:
    """The blocks of one training in pairs of neighbours, one with and one without; the first two are warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        callback, blocks = stopwatch(Path(folder) / "logs", steps, drawn)
        trainer = trainer_of(Path(folder), steps * (2 * pairs + 2) + 1, callback)
        trainer.train()
    return blocks[2 : 2 * pairs + 2]


def ratios(blocks: list[Block]) -> list[float]:
    """Of each pair of neighbours, the median step with the numbers over the median step without."""
    pairs = [sorted(pair, key=lambda block: block.on) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    return [statistics.median(on.steps) / statistics.median(off.steps) for off, on in pairs]


def with_interval(blocks: list[Block]) -> dict[str, float]:
    """The median ratio, and between which values 95 % of the medians lie that other draws of as many pairs give."""
    dice, found = random.Random(SEED), ratios(blocks)
    drawn = sorted(statistics.median(dice.choices(found, k=len(found))) for _ in range(2000))
    return {"ratio": round(statistics.median(found), 4), "from": round(drawn[50], 4), "to": round(drawn[-51], 4)}


def summary(blocks: list[Block]) -> dict[str, Any]:
    """Both measures of one training."""
    on = [block for block in blocks if block.on]
    inside = [seconds for block in on for seconds in block.inside]
    return {
        "blocks": len(blocks),
        "seconds_per_step": round(statistics.median(step for block in blocks for step in block.steps), 4),
        "all_steps": with_interval(blocks),
        "share": round(sum(inside) / sum(step for block in on for step in block.steps), 5),
        "microseconds_in_a_step": round(1e6 * statistics.median(inside), 1),
        "milliseconds_in_the_slowest": round(1e3 * max(inside), 2),
    }


def main(pairs: int, steps: int) -> None:
    """Measure, print and write down."""
    hardware.share_processors()
    result: dict[str, Any] = {"panel": summary(measure(pairs, steps, drawn=True))}
    result["lines"] = summary(measure(max(pairs // 3, 1), steps, drawn=False))
    gpu = hardware.gpu()
    packages = ("torch", "transformers", "trl")
    result |= {
        "steps_in_a_block": steps, "load_average": round(os.getloadavg()[1], 1), "date": time.strftime("%Y-%m-%d"),
        "machine": {"card": str(gpu or "none"), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in packages},
    }  # fmt: skip
    files.write_json(ROOT / f"benchmarks/results/live_{'cuda' if gpu else 'cpu'}.json", result)
    print(*(f"{name:18} {value}" for name, value in result.items()), sep="\n")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *[60, 5][len(given) :])
