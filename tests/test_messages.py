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
    """The values a text names."""
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name}


def calls(file: Path, *names: str) -> Iterator[ast.Call]:
    """The calls of these functions in a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
            yield node


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_each_text_gets_the_values_it_names(file: Path) -> None:
    for call in calls(file, "tr"):
        if isinstance(call.args[0], ast.Constant):
            given = {word.arg for word in call.keywords}
            assert given in (fields(call.args[0].value), {None}), f"{file.name}:{call.lineno}"
    for call in calls(file, "CourseError", "DownloadFailed", "StoppedByHand", "Unfinished"):
        assert "todo" in {word.arg for word in call.keywords}, f"{file.name}:{call.lineno} says nothing to do"


def checked(folder: Path) -> str:
    """What the check of the catalogue says of a copy of the repository."""
    return str(python(folder / ".ci/translations.py", "--check", home=folder, ok=None, cwd=folder).stdout)


@pytest.mark.slow
def test_the_catalogue_is_checked_for_missing_unused_fuzzy_and_stale_entries(tmp_path: Path) -> None:
    for name in (".ci/translations.py", ".ci/choosing.py", "tests/contracts.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("nbutils", "configs", "data_samples", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert checked(tmp_path) == "\n"
    po = tmp_path / f"{CATALOGUE}.po"
    text = po.read_text(encoding="utf-8")
    assert 'msgid "What to do now"' not in text
    known = '#: nbutils/watch.py\nmsgid "'
    po.write_text(
        text.replace(known, "#, fuzzy\n" + known, 1) + '\nmsgid "What to do now"\nmsgstr "现在怎么办"\n',
        encoding="utf-8",
    )
    (tmp_path / "nbutils/disk.py").open("a").write('\n\nprint(tr("a new text"))\n')
    said = checked(tmp_path)
    assert "nothing prints: 'What to do now'" in said
    assert "has no Chinese: 'a new text'" in said
    assert said.count("has no Chinese") == 2, "the new one and the fuzzy one"
    assert "nbutils.mo is out of date" in said


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_is_printed_in_english_alone(file: Path) -> None:
    def plain(node: ast.AST) -> Iterator[ast.AST]:
        """What is below a node, without what goes through `tr`."""
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tr"):
            yield node
            for child in ast.iter_child_nodes(node):
                yield from plain(child)

    for call in calls(file, "print", "Check", "echo", "CourseError", "DownloadFailed", "StoppedByHand", "Unfinished"):
        texts = [node.value for node in plain(call) if isinstance(node, ast.Constant) and type(node.value) is str]
        assert not [text for text in texts if re.search(r"[a-z]{2,} [a-z]{2,}", text)], f"{file.name}:{call.lineno}"


def test_the_language_is_nbutils_lang_or_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoken(**variables: str) -> str:
        for name in ("NBUTILS_LANG", *language.LOCALE):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return language.language()

    assert spoken() == spoken(LANG="en_US.UTF-8") == spoken(LANG="zh_CN.UTF-8", NBUTILS_LANG="en") == "en"
    assert spoken(LANG="zh_CN.UTF-8") == spoken(LC_ALL="zh_TW") == spoken(NBUTILS_LANG="zh", LANG="C") == "zh"
    assert spoken(LC_ALL="C.UTF-8", LANG="zh_CN.UTF-8") == "en", "LC_ALL goes before LANG"
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert tr("{count} of {total} words have no translation", count=1, total=2) == "1 of 2 words have no translation"
    assert str(CourseError("x", todo="y", allowed="z")) == "x\n  允许：z\n  怎么办：y"
    assert tr("") == ""


def test_texts_in_one_line_have_the_marks_of_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert language.joined(["12 OK", "1 WARN"]) == "12 OK，1 WARN" and language.joined("ab", ":") == "a：b"
    monkeypatch.setenv("NBUTILS_LANG", "en")
    assert language.joined(["12 OK", "1 WARN"], ";") == "12 OK; 1 WARN"


def test_what_steers_a_terminal_is_spelled_out_and_all_else_stays() -> None:
    plain = "中文 é 🎉\tcolumns\r\nlines\n" + ascii("\x1b")
    assert language.printable(plain) == plain
    wild = "".join(map(chr, [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xDC9B]))
    assert not steers(language.printable(wild))
    assert [mark for mark in language.printable(wild) if not mark.isprintable()] == ["\t", "\n"]
    for said in (tr("run {name}", name=ESCAPES), tr(ESCAPES), str(CourseError(ESCAPES, todo=ESCAPES))):
        assert not steers(said)
