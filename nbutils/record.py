"""The folder of a run and its facts.json: versions, platform, GPU, profile, and the results of each lesson.

Secrets are masked before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BaseModel, Field, ValidationError

from nbutils import display, former_names
from nbutils.errors import CourseError
from nbutils.files import DISTRIBUTION, read_json, read_object, stamp, write_json, write_text
from nbutils.language import joined, tr
from nbutils.masking import KEY, MASK, mask_secrets
from nbutils.platforms import folders

PACKAGES = (
    DISTRIBUTION,
    "torch",
    "transformers",
    "peft",
    "trl",
    "bitsandbytes",
    "datasets",
    "accelerate",
    "liger-kernel",
    "safetensors",
    "papermill",
    "wandb",
)
UNREAD = ("settings", "fingerprint", "data_fingerprint", "form", "merge")  # facts for programs, not for the report
LABELS = {  # of facts whose names say too little
    "adapter_moved": "weight matrices changed, of those that are trained",
    "base_losses": "loss of the base model before the training",
    "base_moved": "weight matrices changed, of those that are frozen",
    "weights": "weight matrices of each precision",
    "trained_tokens": "tokens to learn from, in one epoch",
}
Facts = dict[str, Any]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Recorded(BaseModel, strict=True, extra="allow"):
    """A part of facts.json: the fields are those that are read again, with their types."""


class CheckedRows(Recorded):
    """What lesson 02 counted."""

    rows: Count = 0
    rejected: Count = 0


class TrainingFacts(Recorded):
    """What lesson 03 measured, as far as it decides something; None: not measured."""

    steps: Count = 0
    planned_steps: Count = 0
    examples: Count = 0
    rows_left_out: Count = 0
    skipped_steps: Count | None = None
    validation_loss: Facts | None = None
    oom_rungs: list[Any] | None = None
    settings: Facts = {}

    @property
    def ended(self) -> bool:
        """Whether the training reached its last step; also if there was none."""
        return self.steps >= self.planned_steps

    @property
    def diverged(self) -> bool:
        """Whether its validation loss ended it, which was no number any more: JSON has null for that."""
        losses = self.validation_loss or {}
        last_is_no_number = "last" in losses and losses["last"] is None
        return last_is_no_number and not self.ended


class Interval(Recorded, extra="ignore"):
    """A mean and its bounds; a mean that is not a number is None."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None


class Score(Recorded):
    """A score of base and merged model."""

    base: Interval = Interval()
    merged: Interval = Interval()


class GeneralKnowledge(Recorded):
    """What became of it, in a word."""

    verdict: str = ""


class Evaluation(Recorded):
    """What lesson 04 found."""

    verdict: str = ""
    scores: dict[str, Score] = {}
    general: GeneralKnowledge = GeneralKnowledge()


class Exercise(Recorded):
    """What became of an exercise; one that was solved stays solved."""

    right: bool = False
    tries: Count = 0


class RunFacts(Recorded):
    """The whole of facts.json; the last three are read from `lessons`."""

    model: str = ""
    profile: str = ""
    profile_source: str = ""
    by_auto: bool = False
    set: Facts = {}
    lessons: dict[str, Facts] = {}
    exercises: dict[str, dict[str, Exercise]] = {}  # by lesson and name
    checked: CheckedRows = Field(default=CheckedRows(), validation_alias=AliasPath("lessons", "02_data_prep"))
    trained: TrainingFacts = Field(
        default=TrainingFacts(),
        validation_alias=AliasChoices(AliasPath("lessons", "03_qlora"), AliasPath("lessons", "00_quickstart")),
    )
    evaluation: Evaluation = Field(
        default=Evaluation(), validation_alias=AliasPath("lessons", "04_merge", "evaluation")
    )

    def has_solved(self, lesson: str, exercise: str) -> bool:
        """Whether this run has solved an exercise."""
        noted = self.exercises.get(lesson, {}).get(exercise)
        return noted is not None and noted.right


class RunFolder:
    """The folder of one run, which its lessons share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.data = path / "data"  # train.jsonl, eval.jsonl, data_card.json
        self.checkpoints = path / "checkpoints"  # verified archives
        self.adapter = path / "adapter"
        self.former_adapter = path / "adapter.former"
        self.elsewhere = path / "merged.json"  # where the merged model is, if it did not fit here
        self.logs = path / "logs"  # TensorBoard and W&B
        self.notebooks = path / "notebooks"  # executed copies of headless runs
        self.facts = path / "facts.json"
        self.report = path / "report.md"  # the facts for people

    @property
    def recorded(self) -> RunFacts:
        """The facts so far, with the types of what is read again."""
        return RunFacts.model_validate(read_facts(self.facts))

    @property
    def merged(self) -> Path:
        """The merged model: here, or where lesson 04 found room for it on this machine."""
        place = read_object(self.elsewhere).get("folder")
        if place and Path(place).parent.is_dir():
            return Path(place)
        return self.path / "merged"

    def has(self, stem: str) -> bool:
        """Whether that lesson's result is here and complete; a merge of an earlier adapter does not count."""
        if stem == "02_data_prep":
            return (self.data / "data_card.json").exists()
        adapter = stamp(self.adapter)
        if stem == "03_qlora":
            return adapter is not None
        merged = stamp(self.merged)
        return merged is not None and merged.get("adapter") == adapter


def runs(keep: Path) -> dict[str, RunFolder]:
    """The runs in a folder by name, the newest first."""
    newest_first = sorted(keep.glob("*/facts.json"), key=lambda facts: facts.stat().st_mtime, reverse=True)
    return {facts.parent.name: RunFolder(facts.parent) for facts in newest_first}


def find_run(name: str) -> RunFolder:
    """A run by its name, or by the path of its folder."""
    keep = folders().keep
    known = runs(keep)
    run = known.get(name) or RunFolder(Path(name).expanduser())
    if not run.facts.is_file():
        raise CourseError(
            tr("There is no run {run!r} in {folder}.", run=name, folder=keep),
            allowed=", ".join(sorted(known)),
            todo="Name one of these or the path of a run folder, or set NBUTILS_HOME to the folder of your runs.",
        )
    return run


def versions() -> dict[str, str]:
    """Installed versions of the packages that a result depends on."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within this block, a value that is not of its kind is a CourseError that names this file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as problem:
        seen = str(problem)
        if isinstance(problem, ValidationError):
            first = problem.errors()[0]
            place = ".".join(map(str, first["loc"]))
            seen = f"{place}: {first['msg']}".lstrip(": ")
        raise CourseError(
            "{file} cannot be read: {problem}.",
            todo=(
                "Move {file} out of the run folder, then run the lesson again. If it is of a checkpoint, set "
                "RESUME to the step of an earlier one."
            ),
            file=path,
            problem=seen,
        ) from problem


def read_facts(path: Path) -> Facts:
    """The facts so far; empty if there are none, a CourseError if the file was not written by the course."""
    if not path.exists():
        return {}
    with reading(path):
        facts: Facts = read_json(path)
        RunFacts.model_validate(facts)
        trained = facts.get("lessons", {}).get("03_qlora", {})
        for place, name in ((facts, "set"), (trained, "settings")):
            if name in place:
                place[name] = former_names.translated(place[name])
    return facts


def note_beginning(path: Path, top: Facts, by_auto: bool) -> None:
    """Note what a run started with; whether `auto` chose all of it stays as it was."""
    _write(path, {"by_auto": by_auto, "lessons": {}} | read_facts(path) | top)


def complete(trained: Facts) -> bool:
    """Whether the facts of a lesson are of a training that reached its planned steps, or of none."""
    return bool(trained.get("steps", 0) >= trained.get("planned_steps", 0))


def outcome(verdict: str, general: str) -> str:
    """Whether the tuning helped, and what became of general knowledge, in a few words."""
    words = [tr(verdict)]
    if general:
        words.append(tr("general knowledge: {word}", word=tr(general)))
    return joined(words, ";")


def summary(run: RunFolder) -> str:
    """Where everything of a run is, and whether the tuning helped."""
    lines = [tr("results      {folder}: report.md, facts.json; what the lessons showed: notebooks", folder=run.path)]
    evaluation = run.recorded.evaluation
    own_model = run.path / "report_your_model.md"
    if own_model.exists():  # it says more than what lesson 04 said of its teacher
        lines.append(tr("your model   {page}", page=own_model))
    elif evaluation.verdict:
        verdict = outcome(evaluation.verdict, evaluation.general.verdict)
        page = run.path / "evaluation" / "report.html"
        lines.append(tr("the tuning   {verdict}; why: {page}", verdict=verdict, page=page))
    return "\n".join(lines)


def update(path: Path, top: Facts, lesson: str, facts: Facts, outdated: Sequence[str] = ()) -> Facts:
    """Merge `top` and one lesson's facts into the record, without `outdated` lessons; None keeps what was measured."""
    record = read_facts(path) | top
    lessons = record.setdefault("lessons", {})
    earlier = lessons.pop(lesson, {})
    for stem in outdated:
        lessons.pop(stem, None)
    lessons[lesson] = {}
    for name, value in facts.items():
        lessons[lesson][name] = earlier.get(name) if value is None else value
    return _write(path, record)


def note_exercise(path: Path, lesson: str, name: str, right: bool) -> None:
    """Note one more try of an exercise, and whether it is solved."""
    facts = read_facts(path)
    exercises = facts.setdefault("exercises", {})
    of_lesson = exercises.setdefault(lesson, {})
    before = of_lesson.get(name, {"right": False, "tries": 0})
    of_lesson[name] = {
        "right": right or before["right"],
        "tries": before["tries"] + 1,
    }
    _write(path, facts)


def _write(path: Path, record: Facts) -> Facts:
    plain = json.loads(json.dumps(record, default=str), parse_constant=lambda name: None)  # NaN is not JSON
    masked: Facts = _masked(plain)
    write_json(path, masked)
    return masked


def _masked(value: Any) -> Any:
    """A JSON value with all its texts masked; in the text of the JSON, escaped secrets would be missed."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, list):
        return list(map(_masked, value))
    if not isinstance(value, dict):
        return value
    masked = {}
    for name, inner in value.items():
        is_secret = isinstance(inner, str) and KEY.fullmatch(f"{name}: {inner}")
        masked[mask_secrets(name)] = MASK if is_secret else _masked(inner)
    return masked


def label(name: str) -> str:
    """The name of a fact for people, in English."""
    return LABELS.get(name) or name.replace("_", " ").replace("gib", "GiB")


def readable(entry: Facts) -> dict[str, str]:
    """Facts for people, each in a line; what is empty or for programs alone is left out."""
    texts = {}
    for name, value in entry.items():
        text = readable_value(value)
        if text and name not in UNREAD:
            texts[tr(label(name))] = text
    return texts


def write_report(path: Path, run: str, facts: Facts) -> None:
    """Write report.md, the facts of a run for people."""
    page = display.render("report.md", run=run, facts=facts, readable=readable, line=readable_value)
    write_text(path, page)


def readable_value(value: Any) -> str:
    """A fact in one line: its own summary or verdict if it has one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return tr("yes") if value else tr("no")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, list):
        return joined(map(readable_value, value), ";")
    if not isinstance(value, dict):
        return tr(str(value)).replace("|", "\\|").replace("\n", " ")
    short = value.get("summary") or value.get("verdict")
    if short:
        return f"{value.get('format', '')} {readable_value(short)}".strip()
    return joined(f"{name} {text}" for name, text in readable(value).items())
