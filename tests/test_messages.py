"""Every text has its Chinese, with the same values; nothing is printed in English alone."""

import ast
import re
import shutil
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ESCAPES, ROOT, python, steers

from nbutils import language
from nbutils.errors import CourseError
from nbutils.language import tr

PACKAGE = Path(language.__file__).parent
CATALOGUE = "nbutils/locale/zh/LC_MESSAGES/nbutils"


def fields(text: str) -> set[str]:
    """The values a text names, as `size` in "{size.width} of {folders[0]}"."""
    names = set()
    for _, field, _, _ in string.Formatter().parse(text):
        if field:
            value, *_ = re.split(r"[.\[]", field)
            names.add(value)
    return names


def calls(file: Path, *names: str) -> Iterator[ast.Call]:
    """The calls of these functions in a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called in names:
                yield node


ERRORS = ("CourseError", "DownloadFailed", "StoppedByHand", "Unfinished")


def texts_of(error: ast.Call) -> list[ast.expr]:
    """What an error is given to translate."""
    return [error.args[0], *(keyword.value for keyword in error.keywords if keyword.arg in ("todo", "allowed"))]


EVERY_MODULE = pytest.mark.parametrize(
    "file",
    sorted(PACKAGE.rglob("*.py")),
    ids=lambda file: str(file.relative_to(PACKAGE)),
)


@EVERY_MODULE
def test_each_text_gets_the_values_it_names(file: Path) -> None:
    for call in calls(file, "tr", "say", "right", "wrong"):
        text = call.args[0]
        keywords = {keyword.arg for keyword in call.keywords}
        handed_on = keywords == {None}  # **values, known only when it runs
        if isinstance(text, ast.Constant) and not handed_on:
            assert keywords == fields(text.value), f"{file.name}:{call.lineno}"


@EVERY_MODULE
def test_each_error_gets_the_values_that_its_texts_name(file: Path) -> None:
    for call in calls(file, *ERRORS):
        texts = texts_of(call)
        values = {keyword.arg for keyword in call.keywords} - {"todo", "allowed"}
        named = set[str]().union(*(fields(text.value) for text in texts if isinstance(text, ast.Constant)))
        assert values == named, f"{file.name}:{call.lineno}"
        if values:  # a text that is made elsewhere may have braces of its own
            assert all(isinstance(text, ast.Constant) for text in texts), f"{file.name}:{call.lineno}"


@EVERY_MODULE
def test_each_error_says_what_to_do(file: Path) -> None:
    for call in calls(file, *ERRORS):
        keywords = [keyword.arg for keyword in call.keywords]
        assert "todo" in keywords, f"{file.name}:{call.lineno} says nothing to do"


def check_catalogue(folder: Path) -> str:
    """What the check of the catalogue says of a copy of the repository."""
    return str(python(folder / ".ci/translations.py", "--check", home=folder, ok=None, cwd=folder).stdout)


@pytest.mark.slow
def test_the_catalogue_is_checked_for_missing_unused_fuzzy_and_stale_entries(tmp_path: Path) -> None:
    for name in (".ci/translations.py", ".ci/choosing.py", "tests/contracts.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("nbutils", "configs", "data_samples", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert check_catalogue(tmp_path) == "\n"

    catalogue = tmp_path / f"{CATALOGUE}.po"
    text = catalogue.read_text(encoding="utf-8")
    assert 'msgid "What to do now"' not in text
    entry = '#: nbutils/watch.py\nmsgid "'
    one_is_fuzzy = text.replace(entry, f"#, fuzzy\n{entry}", 1)
    unused = '\nmsgid "What to do now"\nmsgstr "现在怎么办"\n'
    catalogue.write_text(one_is_fuzzy + unused, encoding="utf-8")
    with (tmp_path / "nbutils/watch.py").open("a") as module:
        module.write('\n\nprint(tr("a new text"))\n')

    problems = check_catalogue(tmp_path)
    assert "nothing prints: 'What to do now'" in problems
    assert "has no Chinese: 'a new text'" in problems
    assert problems.count("has no Chinese") == 2, "the new one and the fuzzy one"
    assert "nbutils.mo is out of date" in problems


def untranslated(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, without what goes through `tr`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tr":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from untranslated(child)


@EVERY_MODULE
def test_nothing_is_printed_in_english_alone(file: Path) -> None:
    two_words = re.compile(r"[a-z]{2,} [a-z]{2,}")
    errors = list(calls(file, *ERRORS))
    translated = [text for error in errors for text in texts_of(error)]
    for call in (*calls(file, "print", "Check", "echo"), *errors):
        for node in untranslated(call):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in translated:
                assert not two_words.search(node.value), f"{file.name}:{call.lineno}"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "en"),
        ({"LANG": "en_US.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "zh_TW"}, "zh"),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),  # LC_ALL goes before LANG
        ({"NBUTILS_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"NBUTILS_LANG": "zh", "LANG": "C"}, "zh"),
    ],
    ids=str,
)
def test_the_language_is_nbutils_lang_or_the_locale(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NBUTILS_LANG", *language.LOCALE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language.language() == expected


def test_a_text_without_chinese_stays_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert tr("{count} of {total} words have no translation", count=1, total=2) == "1 of 2 words have no translation"
    assert tr("") == ""


def test_the_parts_of_an_error_have_chinese_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert str(CourseError("x", todo="y", allowed="z")) == "x\n  允许：z\n  怎么办：y"


def test_texts_in_one_line_have_the_marks_of_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert language.joined(["12 OK", "1 WARN"]) == "12 OK，1 WARN"
    assert language.joined("ab", ":") == "a：b"
    monkeypatch.setenv("NBUTILS_LANG", "en")
    assert language.joined(["12 OK", "1 WARN"], ";") == "12 OK; 1 WARN"


def test_what_steers_no_terminal_stays() -> None:
    text = "中文 é 🎉\tcolumns\r\nlines\n" + ascii("\x1b")
    assert language.printable(text) == text


def test_what_steers_a_terminal_is_spelled_out() -> None:
    controls = [*range(32), *range(127, 160)]
    directions = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    half_a_pair = 0xDC9B
    text = "".join(chr(code) for code in [*controls, *directions, half_a_pair])
    spelled_out = language.printable(text)
    assert not steers(spelled_out)
    assert [mark for mark in spelled_out if not mark.isprintable()] == ["\t", "\n"]


def test_messages_and_errors_do_not_steer_a_terminal() -> None:
    assert not steers(tr("run {name}", name=ESCAPES))
    assert not steers(tr(ESCAPES))
    assert not steers(str(CourseError(ESCAPES, todo=ESCAPES)))
