"""How many held-out questions a run's models answer with the assistant's new name, before and after the training.

    python benchmarks/assistant.py RUN_FOLDER NAME [--out results.json]

Reads what lesson 04 kept: the answers of base and merged model, and the facts. Questions whose wanted answer does not
hold the name do not count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; an answer may hold characters that Python takes for the end of a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path))
def main(run: Path, name: str, out: Path | None) -> None:
    lessons = json.loads((run / "facts.json").read_text(encoding="utf-8"))["lessons"]
    rows = read_lines(run / "data/eval.jsonl")
    asked = [number for number, row in enumerate(rows) if name in str(row["messages"][-1]["content"])]
    found = {"questions": len(asked)}
    for model in ("base", "merged"):
        _, *lines = read_lines(run / f"evaluation/answers-{model}.jsonl")
        answers = {one["row"]: one["text"] for one in lines}
        found[model] = sum(name in answers[number] for number in asked)
    trained, judged = lessons.get("03_qlora") or lessons["00_quickstart"], lessons["04_merge"]
    told = {
        key: trained[key] for key in ("steps", "best_step", "train_seconds", "tokens_per_second", "validation_loss")
    }
    told |= {"answered_with_the_name": found, "general": judged["evaluation"].get("general")}
    told |= {"lesson_04_seconds": judged["seconds"]}
    print(json.dumps(told, indent=1, ensure_ascii=False))
    if out:
        out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
