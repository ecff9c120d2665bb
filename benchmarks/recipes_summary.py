"""What the trainings of `recipes.py` say: how much of the best improvement the course reaches, and how soon.

    python benchmarks/recipes_summary.py RESULT.json FILE.jsonl…

Puts the trainings into RESULT.json, in place of those that are there (its `about` and `sweep` stay), and says for each
set of rows, among the trainings in 4 bits: the share of the best improvement that `auto-4bit` has (the best: the lowest
point of any curve, sweep included), the best of the other recipes, and when the course passes its loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

LEFT_OUT = ("curve", "file", "limit", "save_steps", "validation_rows", "trained_tokens", "longest", "peak_gib")


def improvement(own: dict[str, Any], rivals: list[dict[str, Any]]) -> dict[str, Any]:
    """How far down the course comes, against the lowest point of all."""
    best = min(one["best"] for one in rivals)
    share = (own["base"] - own["loss"]) / (own["base"] - best)
    return {"base": own["base"], "auto": own["loss"], "best_of_all": best, "share_of_the_improvement": round(share, 3)}


def time_to_the_best(own: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """When the course's loss is below the end of the best other recipe."""
    best = min(others, key=lambda one: one["loss"])
    step, seconds, _ = next(point for point in own["curve"] if point[2] <= best["loss"])
    return {
        "best_recipe": best["way"], "its_loss": best["loss"], "its_seconds": best["seconds"],
        "cut_into_micro_batches_of": best["micro"], "course_reaches_it_after_seconds": seconds, "at_step": step,
    }  # fmt: skip


@click.command(help=__doc__)
@click.argument("result", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(result: Path, files: tuple[Path, ...]) -> None:
    kept = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found = [row | {"set": Path(row["file"]).stem} for row in map(json.loads, lines)]
    found.sort(key=lambda row: (row["set"], row["rows"], row["way"]))
    told: dict[str, list[dict[str, Any]]] = {"improvement": [], "time_to_the_best_recipe": []}
    for own in (row for row in found if row["way"] == "auto-4bit"):
        key = {"set": own["set"], "rows": own["rows"]}
        same = [row for row in found if key.items() <= row.items() and row["way"] != "auto"]
        swept = [row for row in kept.get("sweep", []) if key.items() <= row.items()]
        told["improvement"].append(key | improvement(own, [*same, *swept]))
        if others := [row for row in same if row["way"] != "auto-4bit"]:
            told["time_to_the_best_recipe"].append(key | time_to_the_best(own, others))
    recipes = [{name: value for name, value in row.items() if name not in LEFT_OUT} for row in found]
    whole = {"about": "", **kept, **told, "recipes": recipes}
    lists = (
        f' "{name}": '
        + (json.dumps(value) if isinstance(value, str) else "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]")
        for name, value in whole.items()
    )
    result.write_text("{\n" + ",\n".join(lists) + "\n}\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
