"""The training step of two checkouts, a few steps of the one and a few of the other in turns.

    python benchmarks/versions.py FOLDER OTHER [--way course-2x4 --way course-8x1] [--turns 12] [--out results.json]

FOLDER holds the weights of benchmarks/train.py, OTHER is the checkout this one is compared with. Each has PAIRS
processes that train the same batches; while one trains, the others wait. A machine whose speed drifts slows down both
sides alike. Needs a CUDA GPU.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parents[1]
PAIRS, STEPS, WARM_UP = 2, 3, 3


def train(folder: Path, checkout: Path, way: str, turns: int) -> None:
    """Train in this process, STEPS steps for each line of the input; print the seconds of each turn."""
    import torch
    from transformers import TrainerCallback

    module = runpy.run_path(str(checkout / "benchmarks/train.py"))
    maker, *settings = module["WAYS"][way]
    trainer = module[maker](folder, *settings, WARM_UP + turns * STEPS)

    class Turns(TrainerCallback):
        began = (0.0, 0.0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done = state.global_step - WARM_UP
            if done < 0 or done % STEPS:
                return
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            print("TURN", json.dumps([round(wall, 4), round(cpu, 4)]), flush=True)
            sys.stdin.readline()
            self.began = time.perf_counter(), time.process_time()

    trainer.add_callback(Turns())
    trainer.train()


def start(folder: Path, checkout: Path, way: str, turns: int) -> subprocess.Popen[str]:
    """A process that trains with the code of a checkout."""
    words = [sys.executable, str(Path(__file__).resolve()), str(folder.resolve()), str(checkout), "--way", way]
    paths = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*words, "--turns", str(turns), "--child"], env=os.environ | {"PYTHONPATH": paths}, cwd=tempfile.mkdtemp(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def turn(process: subprocess.Popen[str]) -> list[float]:
    """Wait for the end of its turn; wall-clock and processor seconds."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("TURN "):
            return json.loads(line.removeprefix("TURN "))
    sys.exit(f"The training ended early:\n{said[-3000:]}")


def compare(way: str, sides: dict[str, list[subprocess.Popen[str]]], turns: int) -> dict[str, Any]:
    """Let the processes of both sides train in turns; how fast this side is beside the other one."""
    seconds: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number in range(turns):
        for pair in range(PAIRS):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for side in order:
                process = sides[side][pair]
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                seconds[side].append(turn(process))
    pairs = list(zip(seconds["other"], seconds["this"], strict=True))
    speeds = [other[0] / this[0] for other, this in pairs]
    processor = [other[1] / this[1] for other, this in pairs]
    low, middle, high = statistics.quantiles(speeds, n=4)
    return {
        "way": way,
        "steps a turn": STEPS,
        "seconds": seconds,
        "speed, this to other": {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]},
        "processor time, other to this": round(statistics.median(processor), 4),
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--way", "ways", multiple=True, default=["course-2x4"], help="A way of benchmarks/train.py; several too.")
@click.option("--turns", default=12, help="Of each process.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the results are written, as JSON.")
@click.option("--child", is_flag=True, hidden=True)
def main(folder: Path, other: Path, ways: tuple[str, ...], turns: int, out: Path | None, child: bool) -> None:
    """Compare this checkout with OTHER; all processes load their models together, then one way follows the other."""
    if child:
        return train(folder, other, ways[0], turns)
    checkouts = {"other": other.resolve(), "this": HERE}
    processes: dict[str, dict[str, list[subprocess.Popen[str]]]] = {}
    for way in ways:
        processes[way] = {
            side: [start(folder, checkout, way, turns) for _ in range(PAIRS)] for side, checkout in checkouts.items()
        }
    everyone = [process for sides in processes.values() for pair in sides.values() for process in pair]
    for process in everyone:
        turn(process)  # loaded and warm
    found: dict[str, Any] = {"date": date.today().isoformat(), "ways": []}
    for way, sides in processes.items():
        found["ways"].append(compare(way, sides, turns))
        print(json.dumps({name: value for name, value in found["ways"][-1].items() if name != "seconds"}), flush=True)
        if out:
            out.write_text(json.dumps(found) + "\n")
    for process in everyone:
        process.kill()


if __name__ == "__main__":
    main()
