"""The catalogue of messages and the code that uses it agree: no unknown code, no unused entry, no missing value."""

import ast
import re
import string
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import yaml
from support import ESCAPES, steers

from nbutils import cli, compare, config, diagnose, display, hardware, language, plan, platforms, record, served_model
from nbutils.data import build, read, rows
from nbutils.errors import CourseError
from nbutils.evaluation import comparison, evaluator
from nbutils.exporting import make
from nbutils.files import read_json
from nbutils.language import tr
from nbutils.models import find_shape
from nbutils.plan import gpus
from nbutils.plan.engines import table_recipe
from nbutils.plan.forecast import terms
from nbutils.serving import engine, server

PACKAGE = Path(language.__file__).parent
CONTRACTS = Path(__file__).with_name("contracts.json")
CATALOGUE = {
    f"{file.stem}.{name}": entry
    for file in sorted((language.MESSAGES / "en").glob("*.yaml"))
    for name, entry in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).items()
}


def raised() -> dict[str, list[tuple[str, set[str | None]]]]:
    """Every code in the source, with where it is raised and the names of its values (None among them: **values)."""
    found: dict[str, list[tuple[str, set[str | None]]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "CourseError":
                values = {word.arg for word in node.keywords}
                found.setdefault(ast.literal_eval(node.args[0]), []).append((f"{file.name}:{node.lineno}", values))
    return found


RAISED = raised()


@pytest.mark.parametrize("code", sorted(RAISED))
def test_each_code_has_texts_for_its_values(code: str) -> None:
    assert code in CATALOGUE, f"{RAISED[code]} raises {code}, which no file of messages/en has"
    entry = CATALOGUE[code]
    assert set(entry) == {"seen", "allowed", "todo"} and all(entry.values()), code
    for part in ("seen", "todo"):  # sentences; what a field holds is the caller's
        assert re.match(r"[^a-z]|(pip|vLLM|lm-eval) ", entry[part]) and entry[part][-1] in ".?}", (code, part)
    assert not re.match(r"[A-Z][a-z]+ ", entry["allowed"]) and entry["allowed"][-1] != ".", code
    fields = [name for part in entry.values() for _, name, _, _ in string.Formatter().parse(part) if name]
    wanted = {name.split(".")[0].split("[")[0] for name in fields}
    for place, given in RAISED[code]:
        assert None in given or given == wanted, f"{place} gives {given}, the text wants {wanted}"
    assert sorted(set(CATALOGUE) - set(RAISED)) == [], "entries that nothing raises"


# --- Chinese: the same errors, and every printed text


def chinese(part: str) -> dict[str, Any]:
    """The Chinese errors by code, or the printed texts by the English ones."""
    rooms = {
        file.stem: language.messages("zh", file.stem) for file in sorted((language.MESSAGES / "zh").glob("*.yaml"))
    }
    if part == "texts":
        pairs = {(english, text) for room in rooms.values() for english, text in room.get("texts", {}).items()}
        twice = [english for english, times in Counter(english for english, _ in pairs).items() if times > 1]
        assert twice == [], "one text, several translations"
        return dict(pairs)
    return {f"{room}.{name}": text for room, texts in rooms.items() for name, text in texts.items() if name != "texts"}


def fields(text: str) -> set[str]:
    """The values a text names."""
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name}


def translated() -> dict[str, str]:
    """Every text in the source that is given to `tr`, with the module it stands in."""
    found: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tr" and isinstance(node.args[0], ast.Constant):
                found[node.args[0].value] = file.name
                assert {word.arg for word in node.keywords} in (fields(node.args[0].value), {None}), node.args[0].value
    return found


def help_texts(command: click.Command) -> Iterator[str]:
    """What --help shows of a command, its options and those below it."""
    yield from filter(None, [command.help, *(getattr(option, "help", None) for option in command.params)])
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        yield from help_texts(below)


def fact_names(facts: dict[str, Any]) -> Iterator[str]:
    """The names of facts as report.md shows them."""
    for lesson in facts.values():
        for name, value in lesson.items():
            if name not in record.UNREAD:
                nested = value if isinstance(value, dict) and "verdict" not in value else {}
                yield from map(record.label, (name, *nested))


def stored_texts() -> set[str]:
    """English texts that reach `tr` from elsewhere: from YAML files, or because facts.json has them in English."""
    symptoms = [entry for part in diagnose.symptoms().values() for entry in part.values()]
    texts = {entry[name] for entry in symptoms for name in ("cause", "todo")}
    for one in platforms.table().values():
        texts |= {one.limits, one.gpu_todo, one.hub_todo, one.keep_todo, *one.keep.values()}
    texts |= {text for name in config.names() for text in config.read(name).reasons.values()}
    texts |= {text for gpu in gpus.every() for text in (gpu.note, gpu.price_from)}
    made = plan.of_options(gpus.find("T4"), {})
    texts |= {*made["parts"], *made["disk_gib"], *plan.fits_table(["T4"])[0]}
    for name, model in product(plan.ENGINES, ("tiny", "Qwen2.5-72B")):
        made = terms(find_shape(model), table_recipe(name, 2))
        texts |= {*made, *(one.name for summands in made.values() for one in summands)}
    texts -= {"", "GPU", "GiB", "tokens/s", "logits"}  # those are the same in Chinese
    templates = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*") if file.suffix in (".html", ".md")]
    texts |= {text for page in templates for text in re.findall(r'\btr\("([^"]+)"', page)}
    texts |= {*get_args(rows.Kind), rows.NAME_COLUMNS, rows.AS_TEXT, rows.ORDER, read.CSV_TODO, *build.LANGUAGES}
    texts |= {build.BUNDLED, build.OWN_LICENCE, build.UNSTATED, "files", "reasons", "lengths"}
    texts |= {"mean", "longest", "over", "tokens_cut", "stop_lost"}
    judged = comparison.TEXTS
    texts |= {text for case in judged["cases"].values() for text in case.values() if text}
    texts |= {judged["few_rows"], judged["cut_off"], judged["slightly_worse"]}
    texts |= {*judged["forgetting"], *judged["forgetting"].values()}
    texts |= {text for label, _, about in judged["scores"].values() for text in (label, about)} - {"ROUGE-L"}
    texts |= {*evaluator.THINKING_MODES.values(), "base", "merged", "tuned", "merged (lesson 04)"}
    texts |= {f"{dtype}, {comparison.IN_4_BITS}" for dtype in hardware.DTYPES}
    texts |= {text for form in make.FORMATS.values() for text in (form.purpose, form.runs)}
    texts |= {words for _, words in make.VERDICTS} | {"BROKEN", make.NOT_COMPARED, *compare.MEASURES}
    texts |= {*server.PHASES.values(), server.IMPORTING, served_model.NOTHING_STORED, served_model.ROUNDING}
    texts |= {row[name] for row in engine.TABLE["gpus"] for name in ("name", "reason")}
    texts |= {build["reason"] for build in engine.TABLE["builds"]} | {
        text for text in engine.TABLE["reserved_flags"].values() if not text.startswith("Server(")
    }
    texts |= set(help_texts(cli.app)) | set(fact_names(read_json(CONTRACTS)["facts"]["lessons"]))
    texts |= {name.replace("_", " ") for name in read_json(display.CURVES)} | {"Loss"}
    return texts | {"NBUTILS_PLATFORM is set", "nothing of a known platform is here"}


def test_every_error_is_there_in_chinese_with_the_same_values() -> None:
    errors = chinese("errors")
    assert sorted(errors) == sorted(CATALOGUE)
    for code, entry in errors.items():
        assert set(entry) == {"seen", "allowed", "todo"}, code
        for part, text in entry.items():
            assert fields(text) == fields(CATALOGUE[code][part]), (code, part)


def test_every_printed_text_is_there_in_chinese_with_the_same_values() -> None:
    texts, wanted = chinese("texts"), {*translated(), *stored_texts()}
    assert sorted(wanted - set(texts)) == [], "texts without a Chinese one"
    assert sorted(set(texts) - wanted) == [], "Chinese texts that nothing prints"
    for english, text in texts.items():
        assert re.search(r"[\u4e00-\u9fff]", text), text
        assert fields(text) == fields(english), text


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_is_printed_in_english_alone(file: Path) -> None:
    def plain(node: ast.AST) -> Iterator[ast.AST]:
        """What is below a node, without what goes through `tr`."""
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("tr", "CourseError")):
            yield node
            for child in ast.iter_child_nodes(node):
                yield from plain(child)

    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in ("print", "Check", "echo"):
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
    assert "允许" in str(CourseError("platforms.unknown", name="x", names="y"))


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
    for said in (tr("run {name}", name=ESCAPES), tr(ESCAPES), str(CourseError("watch.no_run", run="", folder=ESCAPES))):
        assert not steers(said)
