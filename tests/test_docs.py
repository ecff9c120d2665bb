"""The pages for people: links, commands and names are real, nothing is left out, Chinese and English say the same."""

import functools
import re
import runpy
import shlex
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


def spans(path: Path) -> list[str]:
    """What stands in backticks within the prose."""
    return re.findall(r"`([^`\n]+)`", without_blocks(path))


def blocks(path: Path) -> list[str]:
    """The code blocks without comments, which are translated."""
    found = BLOCK.findall(path.read_text(encoding="utf-8"))
    return [kind + re.sub(r"(^|[ \t]+)# .*$", "", text, flags=re.MULTILINE) for kind, text in found]


def in_english(texts: list[str]) -> list[str]:
    """Blocks or spans as on the English page: lessons one folder higher, no choice of language, output left out."""
    texts = [re.sub(r"^.*NBUTILS_LANG=zh.*\n", "", one, flags=re.MULTILINE) for one in texts]
    return ["text" if one.startswith("text") else one.replace("notebooks/zh/", "notebooks/") for one in texts]


def commands(path: Path) -> list[list[str]]:
    """The commands of a page as words, up to a pipe, a redirection or the next command."""
    lines = [line for text in blocks(path) if not text.startswith("text") for line in text.splitlines()]
    lines = [line for line in [*lines, *spans(path)] if re.search(r"nbutils |papermill |notebooks/\S+\.py", line)]
    ends = re.compile(r"^(?:[|&;]+|\d?>.*)$")
    found = []
    for line in lines:
        words = shlex.split(line.removeprefix("!"), comments=True)
        end = next((i for i, word in enumerate(words) if ends.match(word)), len(words))
        found.append(words[:end])
    return found


def parse(command: click.Command, words: list[str]) -> None:
    """Fail if click would refuse the words; folders and runs need not be there, and nothing is run."""
    with click.Context(command) as context:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
    if isinstance(command, click.Group):
        assert rest and rest[0] in command.commands, f"there is no command {rest[:1]} in {command.name}"
        return parse(command.commands[rest[0]], rest[1:])
    given = [name for name, value in values.items() if value and isinstance(value, (str, tuple))]  # click has an UNSET
    missing = [one.name for one in command.params if one.required and one.name not in given]
    assert not rest and not missing, f"{command.name}: missing {missing}, too much {rest}"


@functools.cache
def sources() -> str:
    """Everything in which a name of ours may stand."""
    files = [path for folder in ("nbutils", "notebooks", "configs") for path in (ROOT / folder).rglob("*")]
    named = [ROOT / "Makefile", *(path for path in files if path.suffix in (".py", ".yaml"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in named)


@functools.cache
def settings() -> dict[str, Any]:
    """The values of a profile by their dotted names, and the arguments that a learner is told to add."""
    return flat(load("tiny").model_dump()) | {"sft.report_to": None, "vllm.enable_prefix_caching": None}


def arguments(block: str) -> list[str]:
    """The keyword arguments of the class that a block of a profile is for."""
    return config.arguments_of(config.CLASSES[block]) if block in config.CLASSES else []


def covers(lessons: str, number: int) -> bool:
    """Whether a lesson is among those of a table, as "01 to 06, 08, 09"."""
    ranges = [re.findall(r"\d\d", part) for part in lessons.split(",")]
    return any(int(ends[0]) <= number <= int(ends[-1]) for ends in ranges if ends)


def targets() -> list[str]:
    """What `make` can be asked for."""
    [listed] = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"))
    return str(listed).split()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    targets = [one.partition("#")[0] for one in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))]
    local = {(page.parent / one).resolve() for one in targets if one and not one.startswith("http")}
    missing = [one for one in local if not one.exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_can_be_given(page: Path) -> None:
    for words in commands(page):
        if "nbutils" in words and (after := words[words.index("nbutils") + 1 :]):
            parse(cli.app, after)
        for word in words:
            if script := re.fullmatch(r"(notebooks/(?:zh/)?\d\d_\w+)\.(?:ipynb|py)", word):
                source = ROOT / f"{script[1]}.py"
                given = [words[i + 1] for i, one in enumerate(words) if one == "-p"]
                given += [one[2:] for one in words if re.fullmatch(r"--[A-Z_]+", one)]
                assert set(given) <= set(lesson.declared_in(source)), words


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_in_backticks_exist(page: Path) -> None:
    text = "\n".join([*spans(page), *blocks(page)])
    paths = {one.rstrip("./") for one in PATH.findall(text)}
    lost = [one for one in paths if not (ROOT / one).exists() and not (ROOT / f"notebooks/{one}.py").exists()]
    variables = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", text))
    unknown = [one for one in variables if one not in sources()]
    dotted = set(re.findall(rf"(?<![\w/])(?:{GROUPS})\.[a-z_]+(?![\w/(])", text))
    former = FORMER if page.name == "reference.md" else ()
    wrong = [one for one in dotted if one not in (*settings(), *former) and not one.endswith(FILES)]
    wrong = [one for one in wrong if one.partition(".")[2] not in arguments(one.partition(".")[0])]
    assert not lost + unknown + wrong


def test_every_former_name_is_in_the_reference() -> None:
    for page in ("docs/reference.md", "docs/zh/reference.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in FORMER:
            [row] = re.findall(rf"(?m)^\| `{re.escape(name)}` \| (.*) \|$", text)
            if new := former_names.RENAMED.get(name):
                assert row == f"`{new}`"


@pytest.mark.parametrize("page", CHINESE, ids=named)
def test_a_chinese_page_has_the_headings_and_code_of_the_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.name
    marks = [re.findall(r"^#+", without_blocks(one), re.MULTILINE) for one in (english, page)]
    assert marks[0] == marks[1]
    assert in_english(blocks(page)) == in_english(blocks(english))
    assert set(in_english(spans(page))) == set(in_english(spans(english)))


@pytest.mark.parametrize("page", CHINESE, ids=named)
def test_a_chinese_page_names_the_chinese_lessons(page: Path) -> None:
    lessons = re.findall(r"notebooks/(\d\d_\w+)", page.read_text(encoding="utf-8"))
    assert not [one for one in lessons if (ROOT / f"notebooks/zh/{one}.py").exists()]


@pytest.mark.parametrize("page", READMES, ids=named)
def test_a_readme_is_short_also_with_its_badges(page: Path) -> None:
    lines = BADGES.sub("", page.read_text(encoding="utf-8")).splitlines()
    badges = 4 + len(LESSONS)  # two marks, the head of the table, a row for each lesson
    assert len(lines) + badges <= 150
    assert max(map(len, lines)) <= 150


@pytest.mark.parametrize("page", READMES, ids=named)
def test_a_readme_leads_to_every_page_of_its_language_and_to_every_lesson(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    pages = CHINESE if page.name == "README.zh-CN.md" else ENGLISH
    assert [one.name for one in pages if f"({named(one)})" not in text] == []
    assert [one.stem for one in LESSONS if f"| `{one.stem}` |" not in BADGES.sub("", text)] == []


def test_the_picture_of_a_readme_is_small() -> None:
    for page in READMES:
        [picture] = re.findall(r"!\[[^]]+\]\((docs/images/[^)]+)\)", BADGES.sub("", page.read_text(encoding="utf-8")))
        assert (ROOT / picture).stat().st_size < 200_000


def test_the_reference_has_every_command() -> None:
    given = [" ".join(words) for words in commands(REFERENCE)]
    assert [name for name in every_command() if not any(f"nbutils {name}" in one for one in given)] == []


def test_the_reference_has_every_parameter_with_its_lessons() -> None:
    rows = re.findall(r"(?m)^\| (`[A-Z].*?) \| (.*?) \|", REFERENCE.read_text(encoding="utf-8"))
    for file in LESSONS:
        here = [names for names, lessons in rows if lessons == "all" or covers(lessons, int(file.stem[:2]))]
        assert [one for one in lesson.declared_in(file) if f"`{one}`" not in " ".join(here)] == [], file.stem


def test_the_reference_has_every_environment_variable() -> None:
    read = set(re.findall(r"\bNBUTILS_[A-Z_]+[A-Z]\b", sources())) - INTERNAL
    told = re.findall(r"\bNBUTILS_[A-Z_]+\b", REFERENCE.read_text(encoding="utf-8"))
    assert [one for one in sorted(read) if not any(name.startswith(one) for name in told)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_targets_of_make_exist(page: Path) -> None:
    text = "\n".join([*spans(page), *blocks(page)])
    assert set(re.findall(r"(?m)(?<![\w-])make ([a-z][a-z-]*)", text)) <= set(targets())


def test_contributing_has_every_target_of_make() -> None:
    assert [one for one in targets() if f"| `make {one}` |" not in CONTRIBUTING.read_text(encoding="utf-8")] == []


def test_the_questions_and_answers_name_every_check_of_diagnose() -> None:
    checks = {name for part in diagnose.symptoms().values() for name in part}
    assert checks <= set(spans(ROOT / "docs/faq.md"))


def test_every_page_is_there_in_both_languages() -> None:
    assert [one.name for one in ENGLISH] == [one.name for one in CHINESE] != []
