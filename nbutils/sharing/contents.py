"""What of a model folder is given away: its files, links followed; nothing hidden, half-written, or of this machine.

staged: the folder as it is uploaded. Not here: the uploads (pushing), the archive (packing), the page (card).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbutils import paths
from nbutils.errors import CourseError
from nbutils.sharing.card import public_name

OWN = (paths.STAMP, "training.json", "export.json", "README.md")  # ours, or written anew; in an archive they may stay
LEFT_OUT = (".*", "*.partial", "__pycache__", "training_args.bin")  # the last is a pickle full of this machine's paths
FULL_PATH = re.compile(r"(?:(?:/[^/\n]+){2}|~[/\\]|file://|[A-Za-z]:[/\\]|\\\\)[^\n]*")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # tokens may look like paths and are none


def model_folder(given: str | Path) -> Path:
    """The folder by its full name, for "." has none; it must hold a model."""
    folder = Path(os.path.abspath(Path(given).expanduser()))
    if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        raise CourseError(
            f"{folder} is no model folder.", "a folder with config.json, or with a GGUF file",
            "give the merged folder of a run, or one of its exports",
        )  # fmt: skip
    return folder


def model_files(folder: Path) -> list[Path]:
    """Every file that is part of the model, in one order; a link counts as the file it leads to."""
    left_out = shutil.ignore_patterns(*LEFT_OUT)(str(folder), os.listdir(folder))
    found = []
    for name in sorted(set(os.listdir(folder)) - left_out):
        one = folder / name
        _require_file_behind(one)
        found += model_files(one) if one.is_dir() else [one]
    return found


def _require_file_behind(one: Path) -> None:
    """A link into nothing would leave a hole; one to a folder could take along what is no part of the model."""
    if one.is_symlink() and not one.is_file():
        raise CourseError(
            f"{one} is a link to {'a folder' if one.is_dir() else 'nothing'}.", "files, and links to files",
            "remove the link, or put in its place what it should lead to",
        )  # fmt: skip


def size_of(files: Iterable[Path]) -> int:
    """Bytes of the files, behind their links."""
    return sum(file.stat().st_size for file in files)


@contextmanager
def staged(folder: Path, files: Iterable[Path], card: str) -> Iterator[Path]:
    """The folder as it is uploaded: second names of its files, without what is only ours, with the card."""
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None  # Kaggle's inputs are read-only
    with tempfile.TemporaryDirectory(prefix=".push-", dir=beside) as place:
        stage = Path(place) / folder.name
        for file in files:
            if file.name not in OWN:
                target = stage / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                _second_name(Path(os.path.realpath(file)), target)
        (stage / "README.md").write_text(card, encoding="utf-8")
        for file in stage.rglob("*.json"):
            _without_paths(file)
        yield stage


def _second_name(source: Path, target: Path) -> None:
    """A second name for the file; from another disk a link, and a copy where there are no links."""
    for make in (os.link, os.symlink, shutil.copyfile):
        try:
            make(source, target)
            return
        except OSError as problem:
            failed = problem
    raise failed


def _without_paths(file: Path) -> None:
    """Settings remember the folders a model was made in: that is nobody's business."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise CourseError(
            f"{file.name} cannot be read ({type(problem).__name__}), so nobody knows what it would tell.",
            "JSON files that are whole", "make this model again, or remove the file if it is no part of it",
        ) from None  # fmt: skip
    public = _public(settings, _is_private if file.name not in VOCABULARIES else lambda value: False)
    if public != settings:
        file.unlink()  # it is a second name of the original, which stays as it is
        file.write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _public(value: Any, private: Callable[[Any], bool]) -> Any:
    """The same without private paths, at any depth; where a name says that a path may follow, short ones too."""
    if isinstance(value, list):
        return [_public(one, private) for one in value if not private(one)]
    if not isinstance(value, dict):
        return value
    return {
        key: _public(one, private)
        for key, one in value.items()
        if not private(key) and not private(one)
        and not (key.endswith("name_or_path") and isinstance(one, str) and public_name(one) != one)
    }  # fmt: skip


def _is_private(value: Any) -> bool:
    """Whether this is a path that only this machine has."""
    return isinstance(value, str) and bool(FULL_PATH.fullmatch(value))
