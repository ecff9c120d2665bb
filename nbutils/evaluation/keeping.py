"""Answers kept on disk as they come, so that a lost session costs one batch: one file for each model that was asked.

A file is trusted only under the fingerprint of everything that decides its answers. Not here: generating (answers).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nbutils.evaluation.answers import Answer
from nbutils.paths import write_json, write_text

Prompts = dict[int, list[int]]
Ask = Callable[[Prompts], Iterable[tuple[int, Answer]]]


def digest(value: Any) -> str:
    """A short mark of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def resumed(file: Path, decided_by: dict[str, Any], prompts: list[list[int]], ask: Ask) -> list[Answer]:
    """All answers in order: those the file has already, and the missing ones from `ask`, written down as they come."""
    mark = digest(decided_by | {"prompts": prompts})
    found = _read(file, mark, prompts)
    missing = {number: prompt for number, prompt in enumerate(prompts) if number not in found}
    if found:
        print(f"{len(found)} of {len(prompts)} answers are in {file.name} already")
    if not missing:
        return [found[number] for number in range(len(prompts))]
    lines = [json.dumps({"fingerprint": mark, "decided_by": decided_by}, ensure_ascii=False, default=str)]
    lines += [_line(number, answer) for number, answer in sorted(found.items())]
    write_text(file, "\n".join(lines) + "\n")  # whole, so a line torn by a kill is gone
    with open(file, "a", encoding="utf-8", newline="\n") as out:
        for number, answer in ask(missing):
            found[number] = answer
            out.write(_line(number, answer) + "\n")
            out.flush()
        os.fsync(out.fileno())
    return [found[number] for number in range(len(prompts))]


def kept(file: Path, decided_by: dict[str, Any], prompts: list[list[int]]) -> dict[int, Answer]:
    """The answers the file has already; nothing is asked, and nothing written."""
    return _read(file, digest(decided_by | {"prompts": prompts}), prompts)


def _line(number: int, answer: Answer) -> str:
    kept = {"row": number, "token_ids": answer.token_ids, "text": answer.text, "stopped": answer.stopped}
    return json.dumps(kept | {"check": _check(answer)}, ensure_ascii=False)


def _check(answer: Answer) -> str:
    """A mark of the whole answer: what was changed on disk is noticed."""
    return digest([answer.prompt_ids, answer.token_ids, answer.text, answer.stopped])


def _read(file: Path, mark: str, prompts: list[list[int]]) -> dict[int, Answer]:
    """The answers in a file, if its first line bears the mark; a line that is torn or changed counts as missing."""
    try:  # split at \n alone: an answer may hold any other line end
        header, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        if json.loads(header)["fingerprint"] != mark:
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {}
    for line in lines:
        try:
            kept = json.loads(line)
            number = int(kept["row"])
            answer = Answer(prompts[number], kept["token_ids"], kept["text"], kept["stopped"])
            if kept["check"] == _check(answer):
                found[number] = answer
        except (ValueError, KeyError, TypeError, IndexError):
            continue
    return found


def once(file: Path, decided_by: dict[str, Any], make: Callable[[], Any]) -> Any:
    """A JSON value made once and read from its file afterwards, as long as what decides it stays the same."""
    mark = digest(decided_by)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["fingerprint"] == mark and kept["check"] == digest(kept["value"]):
            return kept["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = make()
    write_json(file, {"fingerprint": mark, "decided_by": decided_by, "check": digest(value), "value": value})
    return value
