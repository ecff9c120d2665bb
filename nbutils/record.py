"""facts.json: what a run was and what came out: versions, platform, card, profile, the numbers of each lesson.

Not here: secrets. A value that looks like one is refused, not written.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nbutils import DISTRIBUTION
from nbutils.errors import CourseError
from nbutils.masking import KEY, MASK, mask_secrets
from nbutils.paths import read_json, write_json, write_text

PACKAGES = (
    DISTRIBUTION, "torch", "transformers", "peft", "trl", "bitsandbytes", "datasets", "accelerate", "liger-kernel",
    "safetensors", "papermill", "wandb",
)  # fmt: skip
TYPES = dict.fromkeys(("lessons", "set", "platform", "versions"), dict) | dict.fromkeys(("model", "profile"), str)
MANY = 20  # values of a fact that are not listed in a report


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read(path: Path) -> dict[str, Any]:
    """The facts so far; an empty record if there are none, an error if the file is not one of the course's."""
    if not path.exists():
        return {}
    try:
        record = read_json(path)
        whole = isinstance(record, dict) and all(type(record.get(one, kind())) is kind for one, kind in TYPES.items())
        if whole and all(isinstance(entry, dict) for entry in record.get("lessons", {}).values()):
            return dict(record)
        problem = "it does not hold the facts of lessons"
    except ValueError as broken:
        problem = f"not valid JSON, {broken}"
    raise CourseError(f"{path} cannot be read: {problem}.", "a facts.json written by the course", "move that file away")


def begin(path: Path, top: dict[str, Any], by_auto: bool) -> None:
    """Note with what a run began, before anything can go wrong; whether `auto` chose it all stays as it was."""
    facts = read(path)
    _write(path, {"by_auto": by_auto, "lessons": {}} | facts | top)


def complete(trained: dict[str, Any]) -> bool:
    """Whether the facts of lesson 03 tell of a training that got as far as it was meant to."""
    return bool(trained.get("steps", 0) >= trained.get("planned_steps", 0))


def update(path: Path, top: dict[str, Any], lesson: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Merge `top` and one lesson's facts into the record; None leaves what an earlier run measured."""
    record = read(path) | top
    earlier = record.get("lessons", {}).get(lesson, {})
    entry = {name: earlier.get(name) if value is None else value for name, value in facts.items()}
    record["lessons"] = record.get("lessons", {}) | {lesson: entry}
    return _write(path, record)


def _write(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(record, default=str), parse_constant=lambda name: None)  # NaN is not JSON
    record = _masked(plain)
    write_json(path, record)
    return record


def _masked(value: Any) -> Any:
    """A JSON value with every text in it masked; on the text of the JSON, escaped secrets would slip through."""
    if isinstance(value, dict):
        texts = {name: f"{name}: {inner}" for name, inner in value.items() if isinstance(inner, str)}
        pairs = {name: MASK if KEY.fullmatch(texts.get(name, "")) else inner for name, inner in value.items()}
        return {mask_secrets(name): _masked(inner) for name, inner in pairs.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return mask_secrets(value) if isinstance(value, str) else value


def summary(entry: dict[str, Any]) -> str:
    """The facts of one lesson in a line."""
    return ", ".join(f"{name} {_plain(value)}" for name, value in entry.items() if value is not None)


def write_report(path: Path, run: str, facts: dict[str, Any]) -> None:
    """report.md: the record of a run for people, made anew from the facts each time a lesson ends."""
    platform, card = facts.get("platform", {}), facts.get("card")
    lines = [
        f"# Run {run}", "",
        f"- machine: {platform.get('name')}, {card['name'] if card else 'CPU only'}",
        f"- profile: {facts.get('profile')}, model: {facts.get('model')}",
        "- versions: " + ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items()),
        "",
    ]  # fmt: skip
    for stem, entry in sorted(facts.get("lessons", {}).items()):
        lines += [f"## {stem}", "", "| fact | value |", "|---|---|"]
        told = {name: value["summary"] for name, value in entry.items() if _has_summary(value)}
        lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in entry.items() if name not in told] + [""]
        for name, summary in told.items():
            lines += [f"### {name}", "", *(f"- {_plain(line)}" for line in summary), ""]
    write_text(path, "\n".join(lines))


def _has_summary(value: Any) -> bool:
    """Whether a fact brings lines of its own for people."""
    return isinstance(value, dict) and isinstance(value.get("summary"), list)


def _plain(value: Any) -> str:
    if _has_summary(value):
        return "; ".join(map(_plain, value["summary"]))
    if isinstance(value, dict):  # what is nested deeper stays in facts.json: a line is no place for it
        flat = {name: inner for name, inner in value.items() if not isinstance(inner, dict | list)}
        if len(flat) > MANY:
            return f"{len(flat)} values"
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in (flat or value).items())
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")
