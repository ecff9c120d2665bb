"""All readings of one run, and the gaps between them: `evaluation/parity.json`, and beside it the likeliest tokens.

Lesson 04 measures what it has in memory, lesson 05 adds the server. Not here: what the gaps mean (judging).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.evaluation.exam import FOLDER
from nbutils.evaluation.keeping import digest
from nbutils.parity.fixed import Fixed
from nbutils.parity.gaps import Gap, gap
from nbutils.parity.reading import Reading, measure
from nbutils.paths import write_json

NAMES = ("base", "4bit", "full", "merged", "again", "vllm")  # again: merged, in other batches


class Readings:
    """Readings by name. `about` is what the merged model was made from (its stamp): readings of another are dropped.

    Without `fixed`, the set that lesson 04 kept is taken; `name` is the file's, for models outside the run.
    """

    def __init__(self, run: Path, fixed: Fixed | None = None, *, about: Any = None, name: str = "parity") -> None:
        self.file, self.folder = run / FOLDER / f"{name}.json", run / FOLDER / name
        kept = _read(self.file)
        if fixed is None and "fixed" not in kept:
            raise CourseError(
                f"no readings are kept in {self.file}.", "the fixed set of lesson 04",
                "run lesson 04, or make a set with parity.fixed_set",
            )  # fmt: skip
        self.fixed: Fixed = fixed or kept["fixed"]
        self.about = kept.get("about") if about is None else json.loads(json.dumps(about, default=str))
        same = kept.get("mark") == self._mark
        self.gaps = kept["gaps"] if same else {}
        self._held = {one: found for one in (kept["readings"] if same else {}) if (found := self._load(one, kept))}

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __getitem__(self, name: str) -> Reading:
        return self._held[name]

    def __setitem__(self, name: str, reading: Reading) -> None:
        """Compare a new reading with all that are here, and keep it."""
        if name not in NAMES:
            raise CourseError(f"a reading is called {name!r}.", ", ".join(NAMES), "choose one of these names")
        self._held[name] = reading
        for other in [one for one in self._held if one != name]:
            self.gaps[_key(name, other)] = gap(reading, self._held[other])
            self.gaps[_key(other, name)] = gap(self._held[other], reading)
        self._write(name)

    def read_merged(self, model: Any, *, answers: bool = True) -> None:
        """Measure the merged model, and once more in smaller batches: what differs then is the noise of this run."""
        self._held.pop("vllm", None)  # a server of before says nothing about this one
        self.gaps = {key: found for key, found in self.gaps.items() if "vllm" not in key}
        self["merged"] = measure(model, self.fixed, answers=answers)
        fewer = 1 if answers else max(1, len(self.fixed.texts) // 2)  # one that lies partly on disk: two runs, not 16
        self["again"] = measure(model, self.fixed, answers=False, batch_size=fewer)

    def read(self, name: str, tuned: Any, *, answers: bool = True) -> None:
        """Measure an adapter on a base; on the unquantised one (`full`) also the base, with the adapter off.

        What is kept of these very models and texts is not measured again.
        """
        if name in self and (name != "full" or "base" in self):
            return
        self[name] = measure(tuned, self.fixed, answers=answers)
        if name == "full":
            with tuned.disable_adapter():
                self["base"] = measure(tuned, self.fixed, answers=answers)

    def gap(self, reference: str, other: str) -> Gap | None:
        """How far `other` is from `reference`; None if one of them was not measured."""
        return self.gaps.get(_key(reference, other))

    @property
    def _mark(self) -> str:
        return digest([self.fixed.mark, self.about])

    def _write(self, name: str) -> None:
        """Keep one reading's likeliest tokens, then all numbers: a file without its line in the JSON counts nothing."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        short = self._held[name].shortened()
        assert short.tokens is not None
        tensors = {"tokens": short.tokens.int().contiguous(), "logs": short.logs.float().contiguous()}
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self._mark})
        write_json(self.file, {
            "mark": self._mark, "about": self.about, "positions": self.fixed.positions,
            "gaps": {key: asdict(one) for key, one in self.gaps.items()},
            "readings": {one: {"answers": held.answers} for one, held in self._held.items()},
            "fixed": asdict(self.fixed),
        })  # fmt: skip

    def _load(self, name: str, kept: dict[str, Any]) -> Reading | None:
        """A kept reading, if its file is there, whole, and of these very texts and models."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / f"{name}.safetensors", "pt") as file:
                if (file.metadata() or {}).get("mark") != self._mark:
                    return None
                tokens, logs = file.get_tensor("tokens").long(), file.get_tensor("logs")
        except (OSError, SafetensorError):
            return None
        return Reading(logs, tokens, kept["readings"][name])


def _key(reference: str, other: str) -> str:
    return f"{other} against {reference}"


def _read(file: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is missing or damaged."""
    try:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kept["gaps"] = {key: Gap(**one) for key, one in kept["gaps"].items()}
        kept["readings"] = {name: one["answers"] for name, one in kept["readings"].items()}
        kept["fixed"] = Fixed(**kept["fixed"])
        return kept if {"mark", "about"} <= set(kept) else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # or of another version of this course
        return {}
