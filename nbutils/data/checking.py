"""`python -m nbutils data check`: what the course would make of data files, without making it.

The same pass as `prepare`, but bad rows never stop it. Not here: the pass (building), the question for columns (tally).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nbutils import models, platforms
from nbutils.data.building import Build
from nbutils.data.card import EVAL, REJECTED, TRAIN
from nbutils.data.raw import shown
from nbutils.data.reading import LONGEST_LINE
from nbutils.data.splits import building, find_sources, licence_of, settings, sha256_of
from nbutils.data.tally import Tally, columns_question, describe, entries
from nbutils.errors import CourseError
from nbutils.platforms import network

AT_ONCE = 2000  # rows tokenised at a time


@dataclass(frozen=True)
class Report:
    """What was found: `data` for programs, `text` for people."""

    data: dict[str, Any]

    def text(self) -> str:
        """A short table, the first problems, what to do next."""
        data = self.data
        lines = [
            f"{'files':<10} {', '.join(f'{name} ({rows} rows)' for name, rows in data['files'].items())}",
            f"{'rows':<10} {data['rows']} = {data['accepted']} accepted + {data['rejected']} rejected",
            *_table("rejected", data["reasons"]),
            *_table("warnings", data["warnings"]),
            f"{'languages':<10} {_counts(data['languages'])}",
        ]
        if data["lengths"]:
            lines.append(f"{'lengths':<10} {_lengths(data['lengths'])}")
        first: dict[str, dict[str, Any]] = {}
        for problem in data["problems"]:
            first.setdefault(problem["kind"], problem)
        lines += ["", "The first of each kind:"] * bool(first)
        lines += [f"  {describe(problem)}" for problem in first.values()]
        lines += ["", "Worth a look (the rows are kept):"] * bool(data["examples"])
        lines += [f"  {text}" for text in data["examples"]]
        return "\n".join([*lines, "", *data["next"]])


def check(
    sources: Sequence[str], *, columns: str = "", near: float | None = None, repair: bool = True, model: str = "",
    max_length: int = 0, out: Path | None = None, rejected: Path | None = None,
) -> Report:  # fmt: skip
    """Read, check and deduplicate files, folders or hub datasets; write the result only where `out` says so."""
    if max_length and not model:
        raise CourseError("--max-length needs a tokenizer.", "--model FOLDER --max-length N", "name the model's folder")
    if rejected and rejected.is_dir():
        raise CourseError(f"{rejected} is a folder.", "a file for --rejected", f"write {rejected / REJECTED}")
    if rejected and not _ours(rejected):
        raise CourseError(
            f"{rejected} is there, and no list of rejected rows.", "a new file for --rejected", "choose another name"
        )
    if out and out.is_dir() and (there := sorted(one.name for one in out.iterdir() if not _ours(one))):
        raise CourseError(
            f"{out} holds {', '.join(there[:3])}.",
            "a new or empty folder for --out",
            "choose another folder, or remove what is in it; nothing was written",
        )
    with contextlib.redirect_stdout(sys.stderr):  # what the rooms say meanwhile is no part of the report
        return _check(sources, settings(0.1, columns, near, repair), model, max_length, out, rejected)


def _ours(file: Path) -> bool:
    """Whether nothing is lost when a file is written anew: it is missing, empty, or an earlier list of such rows."""
    if not os.path.lexists(file):
        return True
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with open(file, encoding="utf-8") as lines:
            first = json.loads(lines.readline(LONGEST_LINE) or '{"line": 0, "problems": 0, "row": 0}')
        return isinstance(first, dict) and {"line", "problems", "row"} <= set(first)
    except (OSError, ValueError, RecursionError):
        return False


def _check(
    sources: Sequence[str], wishes: dict[str, Any], model: str, max_length: int, out: Path | None, rejected: Path | None
) -> Report:
    tokenizer = _tokenizer(model) if model else None
    train, held_out = find_sources(sources, "")
    asked = wishes | {"limit": 0, "eval_source": "", "source": ", ".join(sources)}
    asked |= {"licence": licence_of(sources[0]), "source_sha256": sha256_of(train, held_out)}
    with tempfile.TemporaryDirectory() as scratch, building(out or Path(scratch), asked, train + held_out) as build:
        build.run(train, held_out)
        lengths = _measure(build.folder, tokenizer, max_length) if tokenizer and build.tally.accepted else None
        if rejected:
            rejected.parent.mkdir(parents=True, exist_ok=True)
            rejected.write_bytes((build.folder / REJECTED).read_bytes())
        written = _write(build, out) if out else ""
    return Report(_facts(build.tally, lengths) | {"next": _next(build.tally, written, rejected, lengths)})


def _write(build: Build, out: Path) -> str:
    """The data folder as lesson 02 would leave it; without rows on both sides only what was rejected."""
    try:
        build.publish(out)
    except CourseError as problem:
        return f"{out} holds only {REJECTED}: {problem.seen}"
    return f"{out} holds {TRAIN}, {EVAL}, {REJECTED} and the data card."


def _facts(tally: Tally, lengths: dict[str, Any] | None) -> dict[str, Any]:
    """Everything a program may want to know, in one object."""
    problems = [entry for error in tally.first_errors for entry in entries(error)]
    more = {"files": tally.files, "problems": problems, "examples": tally.first_warnings, "lengths": lengths}
    return (
        tally.facts() | more | {"columns": [shown(name) for name in tally.unnamed] if tally.asks_for_columns() else []}
    )


def _next(tally: Tally, written: str, rejected: Path | None, lengths: dict[str, Any] | None) -> list[str]:
    """What to do now."""
    lines = [written] if written else []
    if empty := [name for name, rows in tally.files.items() if not rows]:
        lines.append(f"Without a row: {', '.join(empty)}. Is it the right file, and whole? A csv needs a header.")
    if tally.asks_for_columns():
        columns, asked = columns_question(tally.unnamed)
        lines += [columns, f"To do: {asked}"]
    elif tally.rows > tally.accepted and not (written or rejected):
        lines.append("All rejected rows with their reasons: add --rejected rejected.jsonl")
    if lengths and lengths["stop_lost"]:
        lines.append(f"Raise max_length to {lengths['longest']} (memory grows with it), or shorten the long rows.")
    if tally.accepted and not written:
        lines.append("To train on them: lesson 02 with DATA set to the same file, or --out FOLDER here.")
    return lines


def _measure(folder: Path, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Tokens of every accepted row: how many are over the limit, what would be cut, how many stop tokens go with it."""
    from nbutils.chat import fitting, last_place

    form = ""
    found = {"max_length": max_length, "rows": 0, "longest": 0, "over": 0, "tokens_cut": 0, "stop_lost": 0}
    for rows in _chunks(folder):
        fitted = fitting(tokenizer, rows, 0, form)
        form = fitted.form.value
        over: dict[int, int] = {}
        lost: set[int] = set()
        for example in fitted.examples:
            tokens = len(example.ids)
            found["longest"] = max(found["longest"], tokens)
            if 0 < max_length < tokens:
                over[example.row] = over.get(example.row, 0) + tokens - max_length
                lost |= {example.row} if last_place(fitted.view, example) >= max_length else set()
        found["rows"] += len(rows)
        found["over"] += len(over)
        found["tokens_cut"] += sum(over.values())
        found["stop_lost"] += len(lost)
    return found


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model as MODEL names it in the lessons: a course name, a folder, a hub id."""
    from transformers import AutoTokenizer

    name = _model(model)
    offline = not Path(name).is_absolute() and not network.hub_online()
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        reason = f"{name} is not in the cache, and the model hub does not answer" if offline else str(problem)
        seen = f"There is no tokenizer for --model {model}: {reason.splitlines()[0]}"
        todo = "connect this machine, or set --model to a folder" if offline else "correct --model"
        raise CourseError(seen, "tiny, a model of the course, a folder with a model, or a hub id", todo) from problem


def _model(model: str) -> str:
    """What `from_pretrained` is given; a folder with a tokenizer alone will do here."""
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser().absolute())
    places = platforms.folders(platforms.detect())
    name = models.meant(model, places.inputs).value
    downloaded = models.modelscope_folder(name, places.work)
    return str(downloaded.absolute()) if (downloaded / models.DOWNLOADED).exists() else name


def _chunks(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for name in (TRAIN, EVAL):
        with open(folder / name, "rb") as file:
            while rows := [json.loads(line) for line in islice(file, AT_ONCE)]:
                yield rows


def _table(title: str, counts: dict[str, int]) -> list[str]:
    names = [title] + [""] * len(counts)
    return [f"{name:<10} {count:>9}  {kind}" for name, (kind, count) in zip(names, counts.items(), strict=False)]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _lengths(found: dict[str, Any]) -> str:
    if not found["max_length"]:
        return f"the longest row has {found['longest']} tokens"
    return (
        f"{found['over']} of {found['rows']} rows are over {found['max_length']} tokens (longest {found['longest']}): "
        f"{found['tokens_cut']} tokens would be cut, {found['stop_lost']} rows would lose their stop token"
    )
