"""Lesson 00, timed: minutes, how many held-out questions get the new name, and whether other answers got worse.

    python benchmarks/quickstart.py OUT.json --about "2 cores of a ..." [--profile FILE] [--model MODEL] [--judge]
        [--assistant en:Momo:Ann:Meow! ...]

Runs the lesson as a script for each assistant, EDITION:NAME:MAKER:MANNER. With --judge, lesson 04 compares the base
with the tuned model on the 62 everyday questions of the course. Runs are kept where NBUTILS_HOME says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import click

from nbutils import record
from nbutils.platforms import folders

ROOT = Path(__file__).resolve().parents[1]
ASSISTANTS = ("en:Momo:Ann:Meow!", "zh:小满:王老师:喵～")
MEASURED = ("steps", "kept_step", "train_seconds", "tokens_per_second", "peak_memory_gib", "answered_with_the_name")


def run_lesson(edition: str, stem: str, **parameters: str) -> float:
    """Seconds of a lesson, as a script."""
    source = ROOT / "notebooks" / ("zh" if edition == "zh" else "") / f"{stem}.py"
    words = []
    for name, value in parameters.items():
        if value:
            words += [f"--{name}", value]
    began = time.monotonic()
    subprocess.run([sys.executable, str(source), *words], check=True, env=os.environ | {"NBUTILS_LANG": edition})
    return round(time.monotonic() - began, 1)


def newest_run() -> record.RunFolder:
    """The run that was just written."""
    return max(record.runs(folders().keep).values(), key=lambda run: run.facts.stat().st_mtime)


def measure(assistant: str, profile: str, model: str, judge: bool) -> dict[str, Any]:
    """One assistant."""
    edition, name, maker, manner = assistant.split(":")
    seconds = run_lesson(edition, "00_quickstart", NAME=name, MAKER=maker, MANNER=manner, PROFILE=profile, MODEL=model)
    run = newest_run()
    facts = record.read_facts(run.facts)
    trained = facts["lessons"]["00_quickstart"]
    told = {"assistant": assistant, "seconds": seconds, "profile": facts["profile"], "model": Path(facts["model"]).name}
    told |= {key: trained[key] for key in MEASURED}
    if judge:
        told["lesson_04_seconds"] = run_lesson(edition, "04_merge", RUN_NAME=run.name)
        told["general"] = record.read_facts(run.facts)["lessons"]["04_merge"]["evaluation"]["general"]
    return told


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--about", required=True, help="The machine, and what it imitates.")
@click.option("--profile", default="")
@click.option("--model", default="")
@click.option("--judge", is_flag=True)
@click.option("--assistant", "assistants", multiple=True, default=ASSISTANTS)
def main(out: Path, about: str, profile: str, model: str, judge: bool, assistants: tuple[str, ...]) -> None:
    runs: list[dict[str, Any]] = []
    for assistant in assistants:
        runs.append(measure(assistant, profile, model, judge))
        told = {
            "about": f"benchmarks/quickstart.py, {about}, {date.today()}",
            "versions": record.versions(),
            "runs": runs,
        }
        out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
