"""A million rows through `data.prepare`, beside `datasets.load_dataset("json")` and one `map` on the same file.

    python benchmarks/data.py [--rows 1000000] [--folder DIR]     DIR needs about 6 GB per million rows for a while

prepare reads, checks, repairs, looks for private data, duplicates and near duplicates, splits, writes and fingerprints;
the other reads and counts characters. Each runs in a process of its own. Target: at least a third of the speed, less
than 1 GB above an interpreter that imported the room. Result: results/data.json; nothing else is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nbutils import files

RESULT = Path(__file__).parent / "results/data.json"
POOL = 4_000_000  # characters that the rows are cut from


def write_rows(path: Path, rows: int) -> None:
    """Half Chinese, half English, 700 characters on average; in a hundred rows two repeat others and one is broken."""
    chance = random.Random(1)
    chinese = "".join(chance.choices([chr(code) for code in range(0x4E00, 0x5E00)] + ["，", "。"] * 200, k=POOL))
    letters = ["".join(chance.choices("etaoinshrdlucmfw", k=chance.randint(2, 9))) for _ in range(5000)]
    english = " ".join(chance.choices(letters, k=POOL // 6))
    lately: list[dict[str, str]] = []
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for number in range(rows):
            pool, scale = (chinese, 1) if number % 2 else (english, 3)
            row = {"instruction": cut(chance, pool, 120 * scale), "input": "", "output": cut(chance, pool, 240 * scale)}
            kind = number % 100 if number > 1000 else 0
            row = odd(kind, row, chance.choice(lately)) if kind in (97, 98, 99) else row
            lately = [*lately[-999:], row] if kind == 50 or number < 1000 else lately
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def cut(chance: random.Random, pool: str, mean: int) -> str:
    """A piece of the pool, of about this length."""
    start = chance.randrange(len(pool) - 4 * mean)
    return pool[start : start + chance.randint(mean // 2, 3 * mean // 2)].strip()


def odd(kind: int, row: dict[str, str], earlier: dict[str, str]) -> dict[str, str]:
    """A copy of an earlier row, nearly one, or a row with an empty answer."""
    if kind == 97:
        return earlier
    if kind == 98:
        return earlier | {"output": earlier["output"].upper() + "!"}
    return row | {"output": ""}


def work(name: str, file: str, folder: str) -> None:
    """One of the three processes: says how long it took and how much memory it held."""
    from nbutils import data

    if name == "datasets":
        from datasets import load_dataset
    began, card = time.perf_counter(), None
    if name == "datasets":
        rows = load_dataset("json", data_files=file, split="train", cache_dir=folder)
        rows.map(lambda row: {"characters": len(row["output"])})
    elif name == "prepare":
        card = data.prepare(file, Path(folder) / "data")
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {"accepted": card.accepted, "reasons": card.reasons} if card else {}
    print("RESULT", json.dumps({"seconds": round(seconds, 1), "peak_mib": round(peak), **facts}))


def measure(name: str, file: Path) -> dict[str, Any]:
    """Run one process in a folder that goes with it."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, __file__, "--work", name, str(file), folder]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.rpartition("RESULT")[2])


def main(rows: int, parent: str | None) -> None:
    """The same file for all three, one after the other."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, rows)
        size, load = file.stat().st_size, os.getloadavg()[0]
        bare, datasets, prepare = (measure(name, file) for name in ("bare", "datasets", "prepare"))
    for found in (datasets, prepare):
        found["microseconds_per_row"] = round(found["seconds"] / rows * 1e6, 1)
        found["rows_per_second"] = round(rows / found["seconds"])
        found["above_interpreter_mib"] = found["peak_mib"] - bare["peak_mib"]
    ratio = round(datasets["seconds"] / prepare["seconds"], 2)
    reached = ratio >= 1 / 3 and prepare["above_interpreter_mib"] < 1024
    result = {
        "rows": rows, "megabytes": round(size / 1e6), "interpreter_mib": bare["peak_mib"], "datasets": datasets,
        "prepare": prepare, "speed_of_prepare_over_datasets": ratio,
        "target": "a third of the speed, less than 1 GiB above the interpreter", "reached": reached,
        "load_before": round(load, 1), "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("datasets", "numpy", "orjson")},
    }  # fmt: skip
    files.write_json(RESULT, result)
    print(*(f"{name:32} {value}" for name, value in result.items()), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where the file is written for a while; default: the system's temporary one")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    work(*chosen.work) if chosen.work else main(chosen.rows, chosen.folder)
