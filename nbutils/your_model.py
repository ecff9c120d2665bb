"""A model of the learner's own, lesson 10: what it needs, the rows of each training, when what was done, the report."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nbutils import compare, data, display, record
from nbutils.chat import Row
from nbutils.data.build import BUNDLED
from nbutils.data.evidence import LEAST_ROWS
from nbutils.data.read import find_files
from nbutils.distilling import Entry
from nbutils.errors import CourseError
from nbutils.evaluation import result_table
from nbutils.evaluation.evaluator import Result, stored_once
from nbutils.files import SAMPLES, write_text
from nbutils.record import RunFolder

SAMPLE = SAMPLES / "your_model"
FOLDER = "your_model"  # below the run
LEAST_QUESTIONS = 3 + LEAST_ROWS  # those that are shown as examples, and what a verdict needs


def require_sources(task: str, questions: str, data: str, documents: str, endpoint: str, endpoint_model: str) -> None:
    """Refuse parameters that do not go together; all empty is the bundled task."""
    own = data or documents
    if not questions and (own or task):
        raise CourseError(
            "A task of your own is set, and QUESTIONS is empty: nothing would say how good your model is.",
            todo="Write 33 questions with their answers, as rows of lesson 02, and name the file in QUESTIONS.",
        )
    if questions and not own:
        raise CourseError(
            "QUESTIONS is set, and there is nothing to train on.",
            todo="Name rows of your own in DATA, or documents to make them from in DOCUMENTS.",
        )
    if documents and not (endpoint and endpoint_model):
        raise CourseError(
            "DOCUMENTS needs a model that writes rows from them, and ENDPOINT or ENDPOINT_MODEL is empty.",
            todo=(
                "Set them to the base URL and a model of a provider, and the variable OPENAI_API_KEY to your key; or "
                "serve a larger model with lesson 05 and KEEP_RUNNING, and name its URL and the model course."
            ),
        )


def require_teacher(run: RunFolder) -> None:
    """Refuse to let a model label the bundled messages that was trained on something else."""
    source = data.verify(run.data).source
    if source != BUNDLED:
        raise CourseError(
            "The model of run {run} was trained on {source}: it cannot label the bundled messages.",
            todo="Set QUESTIONS and DATA or DOCUMENTS for a task of your own, or PROFILE to tiny for the bundled one.",
            run=run.name,
            source=source,
        )


def read_questions(source: str) -> list[Row]:
    """The questions of a file with their answers, checked as rows are; one that cannot be used is refused."""
    rows: list[Any] = list(map(data.check_row, data.read_rows(source)))
    broken = [row for row in rows if isinstance(row, data.RowError)]
    data.show_problems(broken)
    different = {str(row.messages[:-1]) for row in rows if row not in broken}
    if len(different) < max(len(rows), LEAST_QUESTIONS):
        raise CourseError(
            "{source} has {count} questions; {broken} of them cannot be used, and {different} are sound and different.",
            allowed="33 are good, {least} the least, all of them sound, and none twice",
            todo="Write rows as lesson 02 reads them, with a question and an answer each.",
            source=source,
            count=len(rows),
            broken=len(broken),
            different=len(different),
            least=LEAST_QUESTIONS,
        )
    return [{"messages": row.messages} for row in rows]


def gather(folder: Path, sources: Sequence[str], written: Sequence[Entry]) -> Path:
    """The folder with copies of the learner's own files, and the rows that an endpoint has written."""
    own_files = [file.resolve() for source in sources if source for file in find_files(source)]
    if any(folder.resolve() in file.parents for file in own_files):
        raise CourseError(
            "{folder} is made anew, and a file of yours is in it.",
            todo="Move that file to a folder of your own, and name it in DATA.",
            folder=folder,
        )
    shutil.rmtree(folder, ignore_errors=True)
    data.write_rows(folder / "from_documents.jsonl", [row for entry in written for row in entry.rows])
    for number, file in enumerate(own_files, 1):
        shutil.copyfile(file, folder / f"{number}-{file.name}")
    return folder


def note_time(file: Path, decided_by: Any) -> str:
    """When this was done first: the time is stored, and stays as long as what decides it is the same."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return str(stored_once(file, {"decided_by": decided_by}, lambda: now))


def write_report(path: Path, rounds: Mapping[str, RunFolder], results: Mapping[str, Result], **told: Any) -> None:
    """The report to hand in, from what the runs have recorded and the lesson has `told`."""
    runs = {title: compare.load_run(run) for title, run in rounds.items()}
    page = display.render(
        "your_model.md",
        rounds=rounds,
        runs=runs,
        cards={title: data.verify(run.data) for title, run in rounds.items()},
        scores=result_table(results),
        versions=record.versions(),
        line=record.readable_value,
        **told,
    )
    write_text(path, page)
