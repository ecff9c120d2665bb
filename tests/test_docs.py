"""The pages for people: links, commands and names are real, nothing is left out, Chinese and English say the same."""

import functools
import re
import runpy
import shlex
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import click
import pytest
from support import ROOT
from test_contracts import commands as every_command

from nbutils import cli, config, diagnose, former_names, lesson
from nbutils.config import flat, load

ENGLISH = sorted((ROOT / "docs").glob("*.md"))
CHINESE = sorted((ROOT / "docs/zh").glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
REFERENCE, CONTRIBUTING = ROOT / "docs/reference.md", ROOT / "CONTRIBUTING.md"
PAGES = [*ENGLISH, *CHINESE, *READMES, CONTRIBUTING, ROOT / "configs/kaggle/README.md"]
LESSONS = runpy.run_path(str(ROOT / ".ci/sync.py"))["sources"]()
BADGES = re.compile(r"(?s)<!-- badges -->.*?<!-- /badges -->")
INTERNAL = {"NBUTILS_FS_ROOT", "NBUTILS_MIRROR_FOUND", "NBUTILS_SECRETS_SILENT"}  # for tests and child processes
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(
    r"(?<![\w/])(?:(?:configs|data_samples|docs|notebooks|nbutils|benchmarks)/[\w./-]+|\d\d_[a-z]+(?:_[a-z]+)*)"
)
FILES = (".jsonl", ".log", ".py", ".yaml")
GROUPS = "lora|quantization|from_pretrained|sft|vllm|course|train|machine|evaluation|serve"
FORMER = former_names.FORMER


def named(path: Path) -> str:
    """A page as a test is called after it."""
    return str(path.relative_to(ROOT))


def without_blocks(path: Path) -> str:
    """The prose of a page."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def without_badges(path: Path) -> str:
    """A README as its authors write it."""
    return BADGES.sub("", path.read_text(encoding="utf-8"))


def spans(path: Path) -> list[str]:
    """What stands in backticks within the prose."""
    return re.findall(r"`([^`\n]+)`", without_blocks(path))


def blocks(path: Path) -> list[str]:
    """The code blocks without comments, which are translated."""
    comment = re.compile(r"(^|[ \t]+)# .*$", re.MULTILINE)
    found = BLOCK.findall(path.read_text(encoding="utf-8"))
    return [kind + comment.sub("", text) for kind, text in found]


def code(path: Path) -> str:
    """All that a page shows as code, in its prose and in blocks."""
    return "\n".join([*spans(path), *blocks(path)])


def in_english(text: str) -> str:
    """A block or span as on the English page: lessons one folder higher, no choice of language, output left out."""
    text = re.sub(r"^.*NBUTILS_LANG=zh.*\n", "", text, flags=re.MULTILINE)
    if text.startswith("text"):
        return "text"
    return text.replace("notebooks/zh/", "notebooks/")


def commands(path: Path) -> list[list[str]]:
    """The commands of a page as words, up to a pipe, a redirection or the next command."""
    lines = spans(path)
    for block in blocks(path):
        if not block.startswith("text"):  # which shows output
            lines += block.splitlines()
    ours = [line for line in lines if re.search(r"nbutils |papermill |notebooks/\S+\.py", line)]
    return [list(takewhile(belongs_to_command, shlex.split(line.removeprefix("!"), comments=True))) for line in ours]


def belongs_to_command(word: str) -> bool:
    """Whether a word is none that ends a command: a pipe, a redirection, `&&` or `;`."""
    return re.fullmatch(r"[|&;]+|\d?>.*", word) is None


def parse(command: click.Command, words: list[str]) -> None:
    """Fail if click would refuse the words; folders and runs need not be there, and nothing is run."""
    with click.Context(command) as context:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
    if isinstance(command, click.Group):
        assert rest, f"{command.name} needs a command"
        name, *others = rest
        assert name in command.commands, f"there is no command {name} in {command.name}"
        parse(command.commands[name], others)
        return
    assert not rest, f"{command.name}: {rest} is too much"
    for parameter in command.params:
        if parameter.required:
            value = values.get(parameter.name)
            is_given = isinstance(value, (str, tuple)) and bool(value)  # click marks what is not given with an object
            assert is_given, f"{command.name}: {parameter.name} is missing"


@functools.cache
def sources() -> str:
    """Everything in which a name of ours may stand."""
    files = [ROOT / "Makefile"]
    for folder in ("nbutils", "notebooks", "configs"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@functools.cache
def settings() -> dict[str, Any]:
    """The values of a profile by their dotted names, and the arguments that a learner is told to add."""
    return flat(load("tiny").model_dump()) | {"sft.report_to": None, "vllm.enable_prefix_caching": None}


def is_setting(name: str) -> bool:
    """Whether a dotted name is a value of a profile, or an argument of the class that its block is for."""
    if name in settings():
        return True
    block, _, argument = name.partition(".")
    return block in config.CLASSES and argument in config.arguments_of(config.CLASSES[block])


def covers(lessons: str, number: int) -> bool:
    """Whether a lesson is among those of a table, as "all" or "01 to 06, 08, 09"."""
    if lessons == "all":
        return True
    for part in lessons.split(","):
        ends = [int(end) for end in re.findall(r"\d\d", part)]
        if ends and ends[0] <= number <= ends[-1]:
            return True
    return False


def targets() -> list[str]:
    """What `make` can be asked for."""
    [listed] = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"))
    return str(listed).split()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        target, _, _ = link.partition("#")
        if not target.startswith("http"):
            assert (page.parent / target).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_can_be_given(page: Path) -> None:
    for words in commands(page):
        if "nbutils" in words:
            start = words.index("nbutils") + 1
            if words[start:]:
                parse(cli.app, words[start:])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_lessons_have_the_parameters_they_are_given(page: Path) -> None:
    for words in commands(page):
        after_p = {name for option, name in pairwise(words) if option == "-p"}
        as_options = {word.removeprefix("--") for word in words if re.fullmatch(r"--[A-Z_]+", word)}
        for word in words:
            notebook = re.fullmatch(r"(notebooks/(?:zh/)?\d\d_\w+)\.(?:ipynb|py)", word)
            if notebook:
                declared = set(lesson.declared_in(ROOT / f"{notebook[1]}.py"))
                assert after_p | as_options <= declared, words


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_in_code_exist(page: Path) -> None:
    for match in PATH.findall(code(page)):
        path = match.rstrip("./")
        lesson_file = ROOT / f"notebooks/{path}.py"
        assert (ROOT / path).exists() or lesson_file.exists(), path


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_variables_in_code_exist(page: Path) -> None:
    for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", code(page)):
        assert name in sources()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_settings_in_code_exist(page: Path) -> None:
    dotted = re.findall(rf"(?<![\w/])(?:{GROUPS})\.[a-z_]+(?![\w/(])", code(page))
    names = {name for name in dotted if not name.endswith(FILES)}
    if page.name == "reference.md":
        names -= set(FORMER)
    unknown = [name for name in names if not is_setting(name)]
    assert unknown == []


@pytest.mark.parametrize("page", ["docs/reference.md", "docs/zh/reference.md"])
def test_every_former_name_is_in_the_reference(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in FORMER:
        [row] = re.findall(rf"(?m)^\| `{re.escape(name)}` \| (.*) \|$", text)
        if new := former_names.RENAMED.get(name):
            assert row == f"`{new}`"


@pytest.mark.parametrize("page", CHINESE, ids=named)
def test_a_chinese_page_has_the_headings_of_the_english_one(page: Path) -> None:
    def levels(path: Path) -> list[str]:
        return re.findall(r"^#+", without_blocks(path), re.MULTILINE)

    assert levels(page) == levels(ROOT / "docs" / page.name)


@pytest.mark.parametrize("page", CHINESE, ids=named)
def test_a_chinese_page_has_the_code_of_the_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.name
    assert list(map(in_english, blocks(page))) == list(map(in_english, blocks(english)))
    assert set(map(in_english, spans(page))) == set(map(in_english, spans(english)))


@pytest.mark.parametrize("page", CHINESE, ids=named)
def test_a_chinese_page_names_the_chinese_lessons(page: Path) -> None:
    for name in re.findall(r"notebooks/(\d\d_\w+)", page.read_text(encoding="utf-8")):
        assert not (ROOT / f"notebooks/zh/{name}.py").exists(), name


@pytest.mark.parametrize("page", READMES, ids=named)
def test_a_readme_is_short_also_with_its_badges(page: Path) -> None:
    lines = without_badges(page).splitlines()
    badges = 4 + len(LESSONS)  # two marks, the head of the table, a row for each lesson
    assert len(lines) + badges <= 150
    assert max(map(len, lines)) <= 150


@pytest.mark.parametrize(
    ("readme", "pages"),
    [("README.md", ENGLISH), ("README.zh-CN.md", CHINESE)],
    ids=["English", "Chinese"],
)
def test_a_readme_leads_to_every_page_of_its_language(readme: str, pages: list[Path]) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    for page in pages:
        assert f"({named(page)})" in text


@pytest.mark.parametrize("page", READMES, ids=named)
def test_a_readme_has_a_row_for_every_lesson(page: Path) -> None:
    text = without_badges(page)
    for file in LESSONS:
        assert f"| `{file.stem}` |" in text


@pytest.mark.parametrize("page", READMES, ids=named)
def test_the_picture_of_a_readme_is_small(page: Path) -> None:
    [picture] = re.findall(r"!\[[^]]+\]\((docs/images/[^)]+)\)", without_badges(page))
    assert (ROOT / picture).stat().st_size < 200_000


def test_the_reference_has_every_command() -> None:
    shown = "\n".join(" ".join(words) for words in commands(REFERENCE))
    for name in every_command():
        assert f"nbutils {name}" in shown


@pytest.mark.parametrize("file", LESSONS, ids=lambda file: file.stem)
def test_the_reference_has_every_parameter_with_its_lessons(file: Path) -> None:
    rows = re.findall(r"(?m)^\| (`[A-Z].*?) \| (.*?) \|", REFERENCE.read_text(encoding="utf-8"))
    number = int(file.stem[:2])
    names = " ".join(names for names, lessons in rows if covers(lessons, number))
    for parameter in lesson.declared_in(file):
        assert f"`{parameter}`" in names


def test_the_reference_has_every_environment_variable() -> None:
    read = set(re.findall(r"\bNBUTILS_[A-Z_]+[A-Z]\b", sources()))
    text = REFERENCE.read_text(encoding="utf-8")
    for variable in read - INTERNAL:
        assert re.search(rf"\b{variable}", text), variable


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_targets_of_make_exist(page: Path) -> None:
    shown = set(re.findall(r"(?m)(?<![\w-])make ([a-z][a-z-]*)", code(page)))
    assert shown <= set(targets())


def test_contributing_has_every_target_of_make() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for target in targets():
        assert f"| `make {target}` |" in text


def test_the_questions_and_answers_name_every_check_of_diagnose() -> None:
    checks = {name for part in diagnose.symptoms().values() for name in part}
    assert checks <= set(spans(ROOT / "docs/faq.md"))


def test_every_page_is_there_in_both_languages() -> None:
    english = [page.name for page in ENGLISH]
    assert english
    assert [page.name for page in CHINESE] == english
