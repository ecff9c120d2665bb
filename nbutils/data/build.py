"""The data folder of a run: made once from its source, reused afterwards, never replaced by another without a word."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from nbutils import display, distributed, models, plan, platforms
from nbutils.data import evidence
from nbutils.data.dedupe import digests, find_repeated, row_text
from nbutils.data.read import LONGEST_LINE, TEXT, bundled, find_files, format_of, read_rows, too_long
from nbutils.data.rows import ChatRow, Kind, Problem, Row, RowError, check_row, find_private, parse_mapping, shown
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, GIB, SAMPLES, held, remove_left, write_json
from nbutils.language import joined, tr
from nbutils.platforms.network import hub_online

CARD, TRAIN, EVAL, REJECTED = "data_card.json", "train.jsonl", "eval.jsonl", "rejected.jsonl"
EVAL_NAMES = ("eval", "test", "valid", "validation", "dev")
REPEATED: tuple[Kind, ...] = ("duplicate", "leak", "near_duplicate", "near_leak")
BUNDLED, OWN_LICENCE, UNSTATED = "the bundled sample", "CC0-1.0, written for this course", "unstated"
EVAL_FRACTION, NEAR = 0.1, 0.8
UNPACKED = 6  # compressed and parquet files grow about sixfold
ACCEPTED, BUILDING = "accepted.jsonl", ".building-"
SHOWN, WARNED = 3, 2  # rejected rows, and warnings, of each kind that are kept to be shown
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
LANGUAGES = ("zh", "en", "other")
# Tokens of a row without a tokenizer, from its bytes as JSON: 0.94 to 1.02 times Qwen2.5's for the bundled rows, 1.11
# to 1.19 times for three sets people train on (benchmarks/row_length.py).
BYTES_PER_TOKEN, TEMPLATE_TOKENS = 4, 12
CJK = re.compile(r"[\u3400-\u9fff]")
NO_LETTERS = bytes(code for code in range(256) if not (code < 128 and chr(code).isalpha()))
NOT_ASCII = bytes(range(128, 256))


class DataCard(BaseModel):
    """rows = accepted + rejected, accepted = train + eval + unused; each rejected row counts under its first reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    eval_source: str
    source_sha256: str
    eval_fraction: float
    limit: int
    licence: str
    columns: str = ""
    near: float | None = None  # None: written before near duplicates were looked for, and text was repaired
    repair: bool | None = None
    rows: int
    accepted: int
    rejected: int
    train: int
    eval: int
    unused: int
    lent: int = 0
    duplicates: int
    trimmed: int
    reasons: dict[str, int]
    warnings: dict[str, int] = {}
    examples: list[str] = []
    problems: list[dict[str, Any]] = []
    languages: dict[str, int]
    characters: dict[str, int]
    fingerprint: str

    def __str__(self) -> str:
        rows = tr("{rows} = {accepted} accepted + {rejected} rejected", **vars(self))
        splits = tr("{train} train, {eval} eval, {unused} unused", **vars(self))
        lent = tr(" (one training row was moved to eval, which would be empty otherwise)") if self.lent else ""
        lines = {
            tr("source"): tr(self.source), tr("licence"): tr(self.licence),
            tr("rows"): rows, tr("splits"): f"{splits}{lent}",
            tr("rejected"): counts_text(self.reasons), tr("warnings"): counts_text(self.warnings),
            tr("languages"): counts_text(self.languages), tr("characters"): counts_text(self.characters),
            tr("fingerprint"): self.fingerprint,
        }  # fmt: skip
        table = [f"{display.pad(name, 12)} {text}" for name, text in lines.items()]
        return "\n".join(table + wrapped(evidence.remarks(self.eval)))

    def facts(self) -> dict[str, Any]:
        """What goes into the facts.json of a lesson."""
        return self.model_dump(include={"rows", "accepted", "rejected", "train", "eval", "fingerprint", "warnings"})


def wrapped(texts: Iterable[str]) -> list[str]:
    """The lines of texts on a screen."""
    return [line for text in texts for line in display.wrap(text)]


def counts_text(counts: dict[str, int]) -> str:
    """Counts on one line."""
    return joined(f"{tr(name)} {count}" for name, count in counts.items()) or tr("none")


def hash_files(*groups: Sequence[Path], end: bytes = b"") -> tuple[str, list[int]]:
    """sha256 over the content of files as they are on disk, in order, and the lines of each; names do not count."""
    digest, lines = hashlib.sha256(), []
    for group in groups:
        for path in group:
            lines.append(0)
            with open(path, "rb") as file:
                while piece := file.read(CHUNK):
                    digest.update(piece)
                    lines[-1] += piece.count(b"\n")
            digest.update(b"\0")
        digest.update(end)
    return digest.hexdigest(), lines


def verify(out: Path) -> DataCard:
    """The card, once the files beside it are found to be the ones it describes."""
    if not (out / CARD).exists():
        raise CourseError(
            tr("There is no {path}: the data is not prepared.", path=out / CARD), todo=tr("Run lesson 02.")
        )
    try:
        card = DataCard.model_validate_json((out / CARD).read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as problem:
        raise CourseError(
            tr(
                "The files in {out} are not the ones its card describes: {what}.",
                out=out,
                what=f"{CARD}: {str(problem).splitlines()[0]}",
            ),
            todo=tr(
                "Run lesson 02 with a new RUN_NAME. If nothing was trained in this run yet, you can also "
                "remove the folder {out} and run lesson 02 again.",
                out=out,
            ),
        ) from problem
    if missing := [name for name in (TRAIN, EVAL) if not (out / name).exists()]:
        raise CourseError(
            tr(
                "The files in {out} are not the ones its card describes: {what}.",
                out=out,
                what=tr("{names} is gone", names=", ".join(missing)),
            ),
            todo=tr(
                "Run lesson 02 with a new RUN_NAME. If nothing was trained in this run yet, you can also "
                "remove the folder {out} and run lesson 02 again.",
                out=out,
            ),
        )
    found, rows = hash_files([out / TRAIN, out / EVAL])
    if (found, rows) != (card.fingerprint, [card.train, card.eval]):
        counts = {"found": found[:12], "train": rows[0], "eval": rows[1]}
        what = tr("fingerprint {found}, {train} train and {eval} eval rows", **counts)
        raise CourseError(
            tr("The files in {out} are not the ones its card describes: {what}.", out=out, what=what),
            todo=tr(
                "Run lesson 02 with a new RUN_NAME. If nothing was trained in this run yet, you can also "
                "remove the folder {out} and run lesson 02 again.",
                out=out,
            ),
        )
    return card


def load(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The verified train and eval rows."""
    verify(out)
    return stored_rows(out / TRAIN), stored_rows(out / EVAL)


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file the course wrote."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


def row_to_show(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row without private data, if there is one among the first hundred; else the first."""
    return next((row for row in rows[:100] if not any(find_private(str(row)))), rows[0])


def show(row: Row | RowError, columns: str = "") -> None:
    """Print a row turn by turn, private data masked; what is wrong with it, if it cannot be used."""
    checked = check_row(row, columns)
    if isinstance(checked, RowError):
        print(*map(describe, entries(checked)), sep="\n")
    else:
        print(*(f"{turn['role']:>9}: {shown(turn['content'])[:300]}" for turn in checked.messages), "", sep="\n")


def show_problems(errors: Iterable[RowError]) -> None:
    """A table of problems: where, which field, what is wrong, what was seen, what to do."""
    found = [entry for error in errors for entry in entries(error)]
    columns = {tr("line"): "line", tr("field"): "field", tr("problem"): "kind", tr("seen"): "seen", tr("to do"): "todo"}
    rows = [{title: entry[name] for title, name in columns.items()} for entry in map(spoken, found)]
    display.show_table(rows, text="\n".join(map(describe, found)))


def show_rejected(card: DataCard, folder: Path) -> None:
    """Print the first rejected rows of each reason, and where all of them are."""
    lines = rejected_lines(card.problems, card.reasons, str(folder / REJECTED))
    print(*lines or [tr("no row was rejected")], sep="\n")


def rejected_lines(problems: Sequence[dict[str, Any]], reasons: dict[str, int], place: str) -> list[str]:
    """The first rejected rows of each reason, each with its first problem; how many more; where all of them are."""
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for problem in problems:
        first.setdefault((problem["file"], problem["line"]), problem)
    lines = []
    for kind, count in reasons.items():
        shown_rows = [problem for problem in first.values() if problem["kind"] == kind]
        lines += [f"  {describe(problem)}" for problem in shown_rows]
        if count > len(shown_rows):
            lines.append("  " + tr("and {count} more: {kind}", count=count - len(shown_rows), kind=tr(kind)))
    if reasons:
        count = sum(reasons.values())
        lines.append(tr("All {count} rejected rows, each with every problem: {place}", count=count, place=place))
    return lines


def entries(error: RowError) -> list[dict[str, Any]]:
    """The problems of a row, each with its place, as programs get them."""
    return [{"file": error.file, "line": error.line, **vars(problem)} for problem in error.problems]


def describe(entry: dict[str, Any]) -> str:
    """One problem for people: where, what, and below it what to do."""
    return tr("{file} line {line}, {field}: {kind}, saw {seen}\n      -> {todo}", **spoken(entry))


def spoken(entry: dict[str, Any]) -> dict[str, Any]:
    """A problem with its kind in the language of the course."""
    return entry | {"kind": tr(entry["kind"])}


def report_text(data: dict[str, Any]) -> str:
    """What `data check` found, for people: a short table, the first problems, what to do next."""
    tables = {name: data[name] for name in ("files", "reasons", "warnings", "languages", "lengths")}
    if data["lengths"] and not data["lengths"]["max_length"]:  # nothing else is known without a limit
        tables["lengths"] = {name: data["lengths"][name] for name in ("rows", "mean", "longest")}
    place = data["rejected_file"] or tr("--rejected FILE writes them")
    return "\n".join([
        f"{display.pad(tr('rows'), 10)} " + tr("{rows} = {accepted} accepted + {rejected} rejected", **data),
        *(f"{display.pad(tr(name), 10)} {counts_text(counts)}" for name, counts in tables.items() if counts),
        *rejected_lines(data["problems"], data["reasons"], place),
        *(f"  {text}" for text in data["examples"]), "", *wrapped(data["remarks"]), *data["next"],
    ])  # fmt: skip


@distributed.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", rows: int = 0, columns: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one; without a source from `default` or the sample."""
    mapping = _mapping(columns)
    if (out / CARD).exists():
        return _reuse(out, source, eval_source, rows, mapping)
    named = source or default
    files = find_sources([named] if named else [], eval_source)
    settings = {
        "source": named or BUNDLED, "eval_source": eval_source, "columns": mapping, "limit": rows,
        "licence": OWN_LICENCE if not named or bundled(named) else UNSTATED,
    }  # fmt: skip
    with _building(out, settings, *files) as build:
        if (out / CARD).exists():  # another process was faster
            return _reuse(out, source, eval_source, rows, mapping)
        return build.publish(out)


def check(
    sources: Sequence[str], *, columns: str = "", near: float | None = None, repair: bool = True, model: str = "",
    max_length: int = 0, out: Path | None = None, rejected: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`data check`: the same pass; bad rows never stop it, and only `out` and `rejected` are written."""
    near = NEAR if near is None else near
    if max_length and not model:
        raise CourseError(
            tr("--max-length counts tokens, and no model is named."),
            todo=tr("Add --model NAME, for example --model tiny."),
        )
    if near and not 0.5 <= near <= 1:
        raise CourseError(
            tr("--near is {near}.", near=near),
            allowed=tr("0 (do not look for near duplicates), or 0.5 to 1"),
            todo=tr("Leave --near out (0.8), or set it to 0 to turn the search off."),
        )
    for place in filter(None, (out, rejected)):
        if os.path.lexists(place) and (place == rejected or not place.is_dir() or any(place.iterdir())):
            raise CourseError(
                tr("{path} is there already.", path=place),
                allowed=tr("a new or empty folder for --out, a new file for --rejected"),
                todo=tr("Choose another name; nothing was written."),
            )
    settings = {"source": ", ".join(sources), "columns": _mapping(columns), "near": near, "repair": repair}
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as scratch:  # no part of the report
        tokenizer = None
        if model:
            from transformers import AutoTokenizer

            name, offline = models.meant(model, platforms.folders(platforms.detect()).inputs).value, not hub_online()
            try:
                tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
            except (OSError, ValueError) as problem:
                reason = str(problem).partition("\n")[0]
                raise CourseError(
                    tr("There is no tokenizer for --model {model}: {reason}", model=name, reason=reason),
                    allowed=tr("tiny, a model of the course, a folder with a model, or a hub id"),
                    todo=tr("Correct --model, or connect this machine to the hub."),
                ) from problem
        with _building(out or Path(scratch), settings, *find_sources(sources, "")) as build:
            lengths = _token_lengths(build.folder, tokenizer, max_length) if tokenizer and build.keys else None
            mean = lengths["mean"] if lengths else build.estimated_length()
            if rejected:
                rejected.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(build.folder / REJECTED, rejected)
            with contextlib.suppress(CourseError):  # too few rows: only the rejected ones are written
                if out:
                    build.publish(out, strict=False)
    unknown = [error.raw for error in build.first_errors if error.problems[0].kind == "unknown_columns"]
    todo = tr("To train on the accepted rows: this file as DATA (-p DATA FILE).")
    if not build.keys:
        todo = tr("No row can be used.")
    if out:
        few = "" if (out / CARD).exists() else tr(" (too few rows can be used)")
        todo = tr("Written to {out}: {names}{few}.", out=out, names=", ".join(sorted(os.listdir(out))), few=few)
    written = rejected or (out / REJECTED if out else None)
    following = [todo]
    if build.keys:
        command = plan.command(max(build.train, 1), mean)
        line = tr("Memory, time and cost of a training on them: {command}", command=command)
        if not model:
            line += tr("  # the length is an estimate; --model NAME counts the tokens")
        following.append(line)
    return {
        **build.facts(), "files": dict(build.files), "examples": build.first_warnings, "lengths": lengths,
        "problems": [entry for error in build.first_errors for entry in entries(error)],
        "columns": [shown(name) for name in unknown[0]] if unknown else [],
        "remarks": evidence.remarks(build.eval) if build.keys else [],
        "rejected_file": str(written or ""), "next": following,
    }  # fmt: skip


def _mapping(columns: str) -> str:
    return ", ".join(f"{part}={'+'.join(names)}" for part, names in parse_mapping(columns).items())


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: those named so, or files and folders called `eval`, `test` or `valid`."""
    files = list(dict.fromkeys(file for source in sources for file in find_files(source))) or [SAMPLES / TRAIN]
    if eval_source:
        held_out = find_files(eval_source)
        if {file.resolve() for file in files} <= {file.resolve() for file in held_out}:
            raise CourseError(
                tr("EVAL_DATA {source!r} is the same data as DATA.", source=eval_source),
                allowed=tr("rows that are not trained on: a score on training rows says nothing about new ones"),
                todo=tr("Leave EVAL_DATA empty to hold out about a tenth of DATA, or name another file."),
            )
        return files, held_out
    if not sources:
        return files, [SAMPLES / EVAL]
    shared, held_out = os.path.commonpath([file.absolute().parent for file in files]), []
    for file in files:  # test.jsonl.gz, test-00000-of-00001.parquet, test/0.csv, the my_set-test.arrow of a hub dataset
        *folders, name = file.absolute().relative_to(shared).parts
        name = re.sub(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$", "", name.lower().partition(".")[0])
        name = name.rpartition("-")[2] if format_of(file) == ".arrow" else name
        if not {name, *map(str.lower, folders)}.isdisjoint(EVAL_NAMES):
            held_out.append(file)
    return ([file for file in files if file not in held_out], held_out) if len(held_out) < len(files) else (files, [])


def _reuse(out: Path, source: str, eval_source: str, rows: int, mapping: str) -> DataCard:
    """The finished data, if it is of this source: by content, or by name when the file has gone with its machine."""
    card = verify(out)
    same = eval_source in ("", card.eval_source)
    if source:
        eval_source = eval_source or card.eval_source
        gone = any(name and not Path(name).expanduser().exists() for name in (source, eval_source))
        same = gone and (source, eval_source) == (card.source, card.eval_source)
        same = same or hash_files(*find_sources([source], eval_source), end=b"\1")[0] == card.source_sha256
    if not same or card.limit != rows or mapping not in ("", card.columns):
        raise CourseError(
            tr(
                "{out} already holds data made from other input: {source}, limit {limit}, columns {columns!r}.",
                out=out,
                source=tr(card.source),
                limit=card.limit,
                columns=card.columns,
            ),
            todo=tr(
                "Run lesson 02 with a new RUN_NAME. If nothing was trained in this run yet, you can also "
                "remove the folder {out} and run lesson 02 again.",
                out=out,
            ),
        )
    print(tr("The data of this run is ready (from {source}): nothing is repeated.", source=tr(card.source)))
    return card


@contextlib.contextmanager
def _building(out: Path, settings: dict[str, Any], train: list[Path], held_out: list[Path]) -> Iterator[Build]:
    """A finished build in a folder below `out` that is gone afterwards, whatever happens."""
    sizes = [file.stat().st_size * (1 if file.suffix in TEXT else UNPACKED) for file in train + held_out]
    require_disk(out, 3 * sum(sizes) / GIB, tr("preparing the data"))
    out.mkdir(parents=True, exist_ok=True)
    remove_left(out, f"{BUILDING}*")
    with tempfile.TemporaryDirectory(dir=out, prefix=BUILDING) as folder, held(Path(folder)):
        build = Build(Path(folder), settings | {"source_sha256": hash_files(train, held_out, end=b"\1")[0]})
        build.run(train, held_out)
        yield build


class Build:
    """One pass over the rows of a source into a temporary folder; about 300 bytes of each row stay in memory."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        defaults = {"eval_source": "", "eval_fraction": EVAL_FRACTION, "limit": 0, "licence": UNSTATED}
        self.settings: dict[str, Any] = {**defaults, "near": NEAR, "repair": True, **settings}
        self.folder, self.templated = folder, 0
        self.names: list[str] = []  # of the files
        self.files: Counter[str] = Counter()  # rows of each
        self.reasons: Counter[str] = Counter()  # each rejected row under its first problem
        self.first_errors: list[RowError] = []
        self.warned: Counter[str] = Counter()
        self.first_warnings: list[str] = []
        self.kinds: dict[int, set[str]] = {}  # warnings, and "trimmed", of the rows that have any
        self.seen: dict[int, int] = {}  # digest of every row used -> its number
        self.eval_prompts: dict[int, int] = {}
        self.file, self.line, self.offsets = array("I"), array("Q"), array("Q", [0])  # of each row used, as these:
        self.keys, self.held_out, self.measures = array("Q"), array("B"), array("B")

    def run(self, train: list[Path], held_out: list[Path]) -> None:
        """Read everything into the folder; afterwards the three files there are as they will be published."""
        self.split_here = not held_out
        often = Counter(file.name for file in train + held_out)
        pause = 1 if sys.stderr.isatty() else 15
        progress = tqdm(desc=tr("Checking rows"), unit=tr(" rows"), mininterval=pause, delay=5)
        with open(self.folder / REJECTED, "xb") as self.rejected:
            with open(self.folder / ACCEPTED, "xb", CHUNK) as self.accepted, progress:
                for file, side in [*((file, 1) for file in held_out), *((file, 0) for file in train)]:
                    self.names.append(file.name if often[file.name] == 1 else str(file))
                    self.files[self.names[-1]] += 0
                    for row in read_rows(file):
                        self._add(check_row(row, self.settings["columns"], self.settings["repair"]), side)
                        progress.update()
            self._write_splits(self._without_near_duplicates())

    def _add(self, row: ChatRow | RowError, side: int) -> None:
        self.files[self.names[-1]] += 1
        if isinstance(row, RowError):
            self._reject(row.line, row.raw, row.problems)
            return
        stored = {"messages": row.messages, "tools": row.tools} if row.tools else {"messages": row.messages}
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        if len(line) > LONGEST_LINE:  # of a json document or a csv file, whose rows were not measured before
            self._reject(row.line, None, (too_long(),))
            return
        key, prompt = digests(row, numbers=not self.split_here)
        if self.split_here:
            side = int(prompt / 2**64 < self.settings["eval_fraction"])
        if not side and prompt in self.eval_prompts:
            seen = tr("asks what {place} asks", place=self._place(self.eval_prompts[prompt]))
            todo = tr("train on questions eval does not ask")
            self._reject(row.line, stored, (Problem("leak", tr("the row"), seen, todo),))
        elif key in self.seen:
            seen, todo = tr("the same as {place}", place=self._place(self.seen[key])), tr("nothing: one copy is kept")
            self._reject(row.line, stored, (Problem("duplicate", tr("the row"), seen, todo),))
        else:
            if side and not self.split_here:
                self.eval_prompts[prompt] = len(self.keys)
            self._accept(row, line, key, side)

    def _accept(self, row: ChatRow, line: bytes, key: int, side: int) -> None:
        for warning in row.warnings:
            self.warned[warning.kind] += 1
            if self.warned[warning.kind] <= WARNED:
                entry = spoken({"file": self.names[-1], "line": row.line, **vars(warning)})
                self.first_warnings.append(tr("{file} line {line}, {field}: {kind} {seen}", **entry).rstrip())
        if row.warnings or row.trimmed:
            kinds: set[str] = {warning.kind for warning in row.warnings}
            self.kinds[len(self.keys)] = kinds | {"trimmed"} if row.trimmed else kinds
        self.accepted.write(line)
        self.seen[key] = len(self.keys)
        self.file.append(len(self.names) - 1)
        self.line.append(row.line)
        self.keys.append(key)
        self.held_out.append(side)
        self.offsets.append(self.offsets[-1] + len(line))
        asked = " ".join([message["content"] for message in row.messages if message["role"] == "user"])
        raw = asked.encode()
        latin, chinese = len(raw.translate(None, NO_LETTERS)), 0
        if not asked.isascii() and CJK.search(asked):  # a Chinese character weighs as much as three Latin letters
            chinese = 3 * (len(asked) - len(raw.translate(None, NOT_ASCII)))
        length = bisect_left(BINS, sum([len(message["content"]) for message in row.messages]))
        self.measures.append(3 * length + (chinese < latin if chinese or latin else LANGUAGES.index("other")))

    def _reject(self, line: int, raw: Any, problems: tuple[Problem, ...], file: str = "") -> None:
        kind = problems[0].kind
        kept = raw if kind == "unknown_columns" else None  # its columns are shown; the others' rows would fill memory
        error = RowError(file or self.names[-1], line, kept, problems)
        self.reasons[kind] += 1
        if self.reasons[kind] <= SHOWN:
            self.first_errors.append(error)
        entry = {"file": error.file, "line": line, "problems": list(map(vars, problems)), "row": raw}
        try:
            text = json.dumps(entry, ensure_ascii=False, default=str, allow_nan=False)
        except (ValueError, RecursionError):  # too deep, a number of thousands of digits, NaN
            text = json.dumps(entry | {"row": None}, ensure_ascii=False)
        # characters UTF-8 cannot hold only occur in rejected rows; as \uXXXX they are still JSON
        self.rejected.write(f"{text}\n".encode("utf-8", "backslashreplace"))

    def _place(self, number: int) -> str:
        return tr("{file} line {line}", file=self.names[self.file[number]], line=self.line[number])

    def _without_near_duplicates(self) -> np.ndarray:
        """Which rows stay. Held-out rows come first, so that of two alike the training row goes."""
        stays = np.ones(len(self.keys), np.bool_)
        if not self.settings["near"] or not len(stays):
            return stays
        order = np.argsort(1 - np.frombuffer(self.held_out, np.int8), kind="stable")
        with open(self.folder / ACCEPTED, "rb") as accepted:

            def read(number: int) -> dict[str, Any]:
                accepted.seek(self.offsets[number])
                return json.loads(accepted.readline())

            texts = (row_text(**orjson.loads(line)) for line in accepted)
            repeated, self.templated = find_repeated(
                self.settings["near"], texts, order, lambda number: row_text(**read(number))
            )
            for number, kept in sorted(repeated.items()):
                stays[number] = False
                self.kinds.pop(number, None)
                leak = not self.split_here and self.held_out[kept] > self.held_out[number]
                seen, todo = tr("nearly the same as {place}", place=self._place(kept)), tr("nothing: one copy is kept")
                problem = Problem("near_leak" if leak else "near_duplicate", tr("the row"), seen, todo)
                self._reject(self.line[number], read(number), (problem,), self.names[self.file[number]])
        return stays

    def _write_splits(self, stays: np.ndarray) -> None:
        """Keep the given number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        keys, held_out = np.frombuffer(self.keys, np.uint64), np.frombuffer(self.held_out, np.bool_).copy()
        self.tally = np.bincount(np.frombuffer(self.measures, np.uint8)[stays], minlength=len(BIN_NAMES) * 3)
        train = np.flatnonzero(stays & ~held_out)
        train = train[np.argsort(keys[train], kind="stable")]
        self.lent = int(self.split_here and len(train) > 1 and not (stays & held_out).any())
        held_out[train[: self.lent]] = True
        stays[train[self.lent + (self.settings["limit"] or len(train)) :]] = False
        self.train, self.eval = int((stays & ~held_out).sum()), int((stays & held_out).sum())
        paths = [self.folder / name for name in (ACCEPTED, TRAIN, EVAL)]
        with open(paths[0], "rb") as rows, open(paths[1], "xb", CHUNK) as first, open(paths[2], "xb", CHUNK) as second:
            for line, used, side in zip(rows, stays.tolist(), held_out.tolist(), strict=True):
                if used:
                    (second if side else first).write(line)

    def estimated_length(self) -> float:
        """Mean tokens of a row, without a tokenizer."""
        sizes = [(self.folder / name).stat().st_size for name in (TRAIN, EVAL)]
        return sum(sizes) / max(self.train + self.eval, 1) / BYTES_PER_TOKEN + TEMPLATE_TOKENS

    def facts(self) -> dict[str, Any]:
        """The counts, as a card and `data check --json` show them."""
        warnings = Counter(kind for kinds in self.kinds.values() for kind in kinds)
        trimmed = warnings.pop("trimmed", 0)
        warnings |= Counter(templated=self.templated)
        rows, rejected, tally = self.files.total(), self.reasons.total(), self.tally.reshape(-1, 3)
        languages = Counter(dict(zip(LANGUAGES, tally.sum(axis=0).tolist(), strict=True)))
        used = np.flatnonzero(lengths := tally.sum(axis=1))
        return {
            "rows": rows, "accepted": rows - rejected, "rejected": rejected, "trimmed": trimmed,
            "duplicates": sum(self.reasons[kind] for kind in REPEATED), "reasons": dict(self.reasons.most_common()),
            "warnings": dict(warnings.most_common()), "languages": dict((+languages).most_common()),
            "characters": {BIN_NAMES[n]: int(lengths[n]) for n in range(used[0], used[-1] + 1)} if len(used) else {},
        }  # fmt: skip

    def publish(self, out: Path, strict: bool = True) -> DataCard:
        """Rejected rows first, card last: a folder with a card is a finished one."""
        found, (train, held_out) = hash_files([self.folder / TRAIN, self.folder / EVAL])  # what is on disk
        facts = self.facts()
        broken = strict and 2 * (facts["rejected"] - facts["duplicates"]) > facts["rows"]
        usable = train and held_out and not broken
        for name in (REJECTED, EVAL, TRAIN) if usable else (REJECTED,):
            with open(self.folder / name, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self.folder / name, out / name)
        if not usable:
            errors = [error for error in self.first_errors if error.problems[0].kind not in REPEATED]
            first = "".join(f"\n  {describe(entries(error)[0])}" for error in (errors or self.first_errors)[:5])
            source = self.settings["source"]
            few = train + held_out if self.split_here else train
            if few <= self.split_here and not broken:
                raise CourseError(
                    tr("DATA ({source}) has only {few} usable row(s).{first}", source=source, few=few, first=first),
                    allowed=tr(
                        "at least 2 usable rows: one to train on and one to hold out (beside EVAL_DATA 1 is enough)"
                    ),
                    todo=tr(
                        "Add rows, fix those that {out}/rejected.jsonl lists with their reasons, or name another "
                        "file with DATA.",
                        out=out,
                    ),
                )
            if not held_out and not self.split_here:
                raise CourseError(
                    tr(
                        "EVAL_DATA ({held}) has no usable rows.{first}",
                        held=self.settings["eval_source"] or self.names[0],
                        first=first,
                    ),
                    todo=tr(
                        "Fix its rows (see {out}/rejected.jsonl), name another file with EVAL_DATA, or leave it out: "
                        "about a tenth of DATA is held out then.",
                        out=out,
                    ),
                )
            raise CourseError(
                tr(
                    "{rejected} of {rows} rows of {source} cannot be used; {train} are left for training, {eval} "
                    "for evaluation.{first}",
                    rejected=facts["rejected"],
                    rows=facts["rows"],
                    source=source,
                    train=train,
                    eval=held_out,
                    first=first,
                ),
                allowed=tr("at least half of the rows usable, and at least one row to train on and one to hold out"),
                todo=tr(
                    "Fix the rows (all of them with their reasons are in {out}/rejected.jsonl), or name the "
                    "columns with COLUMNS.",
                    out=out,
                ),
            )
        card = DataCard(
            **self.settings, **facts, train=train, eval=held_out, unused=facts["accepted"] - train - held_out,
            lent=self.lent, examples=self.first_warnings, fingerprint=found,
            problems=[entries(error)[0] for error in self.first_errors],
        )  # fmt: skip
        write_json(out / CARD, card.model_dump())
        return card


def _token_lengths(folder: Path, tokenizer: Any, max_length: int) -> dict[str, int]:
    """Tokens of every accepted row: how many are over the limit, what would be cut, how many stop tokens go with it."""
    from nbutils.chat import filter_by_length

    rows = stored_rows(folder / TRAIN) + stored_rows(folder / EVAL)
    filtered = filter_by_length(tokenizer, rows, 0)
    over = [example for example in filtered.examples if 0 < max_length < len(example.ids)]
    return {
        "max_length": max_length, "rows": len(rows), "mean": round(sum(filtered.lengths) / len(rows)),
        "longest": filtered.longest,
        "over": len({example.row for example in over}),
        "tokens_cut": sum(len(example.ids) - max_length for example in over),
        "stop_lost": len({example.row for example in over if example.trained.rfind(1) >= max_length}),
    }  # fmt: skip
