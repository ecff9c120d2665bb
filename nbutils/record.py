"""The folder of a run and its facts.json: versions, platform, GPU, profile, and the results of each lesson.

Secrets are masked before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from nbutils import former_names
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.files import DISTRIBUTION, read_json, read_object, stamp, write_json, write_text
from nbutils.hardware import GPU
from nbutils.language import joined, tr
from nbutils.masking import KEY, MASK, mask_secrets
from nbutils.platforms import Folders, Platform, detect, folders

PACKAGES = (
    DISTRIBUTION, "torch", "transformers", "peft", "trl", "bitsandbytes", "datasets", "accelerate", "liger-kernel",
    "safetensors", "papermill", "wandb",
)  # fmt: skip
UNREAD = ("settings", "fingerprint", "data_fingerprint", "form", "merge")  # facts for programs, not for the report
LABELS = {  # of facts whose names say too little
    "adapter_moved": "weight matrices changed in the adapter",
    "base_moved": "weight matrices changed in the base model",
    "weights": "weight matrices of each precision",
}
Facts = dict[str, Any]
TYPES = {"model": str, "profile": str} | dict.fromkeys(("lessons", "set", "platform", "versions", "reasons"), dict)


class RunFolder:
    """The folder of one run, which its lessons share."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.data = path / "data"  # train.jsonl, eval.jsonl, data_card.json
        self.checkpoints = path / "checkpoints"  # verified archives
        self.adapter, self.former_adapter = path / "adapter", path / "adapter.former"
        self.elsewhere = path / "merged.json"  # where the merged model is, if it did not fit here
        self.logs = path / "logs"  # TensorBoard and W&B
        self.notebooks = path / "notebooks"  # executed copies of headless runs
        self.facts = path / "facts.json"
        self.report = path / "report.md"  # the facts for people

    @property
    def merged(self) -> Path:
        """The merged model: here, or where lesson 04 found room for it on this machine."""
        place = read_object(self.elsewhere).get("folder")
        return Path(place) if place and Path(place).parent.is_dir() else self.path / "merged"

    @property
    def merge_is_outdated(self) -> bool:
        """Whether the merged model is of an earlier adapter."""
        return self.merged.is_dir() and not self.has("04_merge")

    def has(self, stem: str) -> bool:
        """Whether that lesson's result is here and complete; a merge of an earlier adapter does not count."""
        if stem == "02_data_prep":
            return (self.data / "data_card.json").exists()
        adapter, merged = stamp(self.adapter), stamp(self.merged)
        if stem == "03_qlora":
            return adapter is not None
        return merged is not None and merged.get("adapter") == adapter


def runs(keep: Path) -> dict[str, RunFolder]:
    """The runs in a folder by name."""
    return {facts.parent.name: RunFolder(facts.parent) for facts in sorted(keep.glob("*/facts.json"))}


def find(name: str) -> RunFolder:
    """A run by its name, or by the path of its folder."""
    known = runs(keep := folders(detect()).keep)
    run = known.get(name) or RunFolder(Path(name).expanduser())
    if not run.facts.is_file():
        raise CourseError(
            tr("There is no run {run!r} in {folder}.", run=name, folder=keep),
            allowed=tr("{known}; or the path of a run folder", known=", ".join(known) or tr("none yet")),
            todo=tr("Name one of these, or set NBUTILS_HOME to the folder of your runs."),
        )
    return run


class LessonLike(Protocol):
    """What the rooms use of a started lesson (`nbutils.lesson.Lesson`), so that none of them imports lessons."""

    stem: str
    platform: Platform
    folders: Folders
    gpu: GPU | None
    profile: Profile
    model: str
    model_name: str
    run: RunFolder
    scratch: Path
    started: float


def versions() -> dict[str, str]:
    """Installed versions of the packages that a result depends on."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within this block, a value that is not of its kind is a CourseError that names this file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as problem:
        raise CourseError(
            tr("{file} cannot be read: {problem}.", file=path, problem=problem),
            todo=tr(
                "Move {file} out of the run folder, then run the lesson again. If it is of a checkpoint, set "
                "RESUME to the step of an earlier one.",
                file=path,
            ),
        ) from problem


def read(path: Path) -> Facts:
    """The facts so far; empty if there are none, a CourseError if the file was not written by the course."""
    if not path.exists():
        return {}
    with reading(path):
        facts = read_json(path)
        fits = [type(facts.get(key, kind())) is kind for key, kind in TYPES.items()]
        fits += [isinstance(entry, dict) for entry in facts.get("lessons", {}).values()]
        if not all(fits):
            raise ValueError(tr("it does not hold the facts of lessons"))
        facts = _with_names_of_today(facts)
    return facts


def _with_names_of_today(facts: Facts) -> Facts:
    trained = facts.get("lessons", {}).get("03_qlora", {})
    complete(trained)  # its steps are numbers
    if "set" in facts:
        facts["set"] = former_names.translated(facts["set"])
    if trained.get("settings"):
        trained["settings"] = former_names.translated(trained["settings"])
    return dict(facts)


def begin(path: Path, top: Facts, by_auto: bool) -> None:
    """Note what a run started with; whether `auto` chose all of it stays as it was."""
    _write(path, {"by_auto": by_auto, "lessons": {}} | read(path) | top)


def complete(trained: Facts) -> bool:
    """Whether the facts of a lesson are of a training that reached its planned steps, or of none."""
    return bool(trained.get("steps", 0) >= trained.get("planned_steps", 0))


def outcome(evaluation: Facts) -> str:
    """Whether the tuning helped, and what became of general knowledge, in a few words."""
    words = [tr(evaluation["verdict"])]
    if "general" in evaluation:
        words.append(tr("general knowledge: {word}", word=tr(evaluation["general"]["verdict"])))
    return joined(words, ";")


def update(path: Path, top: Facts, lesson: str, facts: Facts, outdated: Sequence[str] = ()) -> Facts:
    """Merge `top` and one lesson's facts into the record, without `outdated` lessons; None keeps what was measured."""
    record = read(path) | top
    earlier = record.get("lessons", {}).get(lesson, {})
    entry = {name: earlier.get(name) if value is None else value for name, value in facts.items()}
    kept = {name: one for name, one in record.get("lessons", {}).items() if name not in outdated}
    record["lessons"] = kept | {lesson: entry}
    return _write(path, record)


def _write(path: Path, record: Facts) -> Facts:
    plain = json.loads(json.dumps(record, default=str), parse_constant=lambda name: None)  # NaN is not JSON
    masked: Facts = _masked(plain)
    write_json(path, masked)
    return masked


def _masked(value: Any) -> Any:
    """A JSON value with all its texts masked; in the text of the JSON, escaped secrets would be missed."""
    if isinstance(value, dict):
        secret = {name for name, inner in value.items() if isinstance(inner, str) and KEY.fullmatch(f"{name}: {inner}")}
        return {mask_secrets(name): MASK if name in secret else _masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return mask_secrets(value) if isinstance(value, str) else value


def label(name: str) -> str:
    """The name of a fact for people, in English."""
    return LABELS.get(name) or name.replace("_", " ").replace("gib", "GiB")


def readable(entry: Facts) -> dict[str, str]:
    """Facts for people, each in a line; what is empty or for programs alone is left out."""
    texts = {name: _line(value) for name, value in entry.items() if name not in UNREAD}
    return {tr(label(name)): text for name, text in texts.items() if text}


def write_report(path: Path, run: str, facts: Facts) -> None:
    """Write report.md, the facts of a run for people."""
    platform, gpu = facts.get("platform", {}), facts.get("card")
    lines = [
        tr("# Run {name}", name=run), "",
        tr("- machine: {name}, {gpu}", name=platform.get("name"), gpu=gpu["name"] if gpu else tr("CPU only")),
        tr("- profile: {profile}, model: {model}", profile=facts.get("profile"), model=facts.get("model")),
        tr("- versions: {versions}", versions=_line(facts.get("versions", {}))),
        "", tr("What each lesson measured. All numbers, for programs: [facts.json](facts.json)."),
    ]  # fmt: skip
    for stem, entry in sorted(facts.get("lessons", {}).items()):
        lines += ["", tr("## Lesson {lesson}", lesson=stem), "", tr("| what | measured |"), "|---|---|"]
        lines += [f"| {name} | {text} |" for name, text in readable(entry).items()]
    write_text(path, "\n".join(lines) + "\n")


def _line(value: Any) -> str:
    """A fact in one line: its own summary or verdict if it has one."""
    if isinstance(value, dict) and ("summary" in value or "verdict" in value):
        return f"{value.get('format', '')} {_line(value.get('summary') or value['verdict'])}".strip()
    if isinstance(value, dict):
        return joined(f"{name} {text}" for name, text in readable(value).items())
    if isinstance(value, list):
        return joined(map(_line, value), ";")
    if isinstance(value, bool) or value is None:
        return "" if value is None else tr("yes") if value else tr("no")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return tr(str(value)).replace("|", "\\|").replace("\n", " ")
