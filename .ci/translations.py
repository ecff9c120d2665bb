"""The Chinese catalogue of the package's texts, kept with Babel: nbutils/locale/zh/LC_MESSAGES/nbutils.po and .mo.

    python .ci/translations.py            take new texts into the .po, drop unused ones, write the .mo
    python .ci/translations.py --check    exit 1 if a text has no translation, or anything would change

A new text appears in the .po with an empty `msgstr`: write the Chinese there, then run this again.
"""

from __future__ import annotations

import ast
import os
import re
import string
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, get_args

import click
from babel.messages import Catalog, Message
from babel.messages.extract import extract_from_dir, extract_from_file
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nbutils"
CHOOSING = ROOT / ".ci/choosing.py"  # it writes a page in both languages
PO = PACKAGE / "locale/zh/LC_MESSAGES/nbutils.po"
MO = PO.with_suffix(".mo")
KEYWORDS: dict[str, Any] = {"tr": None}  # its first argument
TRANSLATE = {
    "tr",
    "say",
    "right",
    "wrong",
    "CourseError",
    "DownloadFailed",
    "StoppedByHand",
    "Unfinished",
}  # what it is given
TEXTS = {"todo", "allowed"}  # of an error, beside the first


def extract_python(file: BinaryIO, *_: Any, **options: Any) -> Iterator[tuple[int, str, str, list[str]]]:
    """The texts that a module has translated: Babel's own extractor also takes the key of `tr(texts["why"])`."""
    for node in ast.walk(ast.parse(file.read())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in TRANSLATE:
            given = [*node.args[:1], *(word.value for word in node.keywords if word.arg in TEXTS)]
            for text in given:
                if isinstance(text, ast.Constant) and text.value:
                    yield node.lineno, "tr", text.value, []


def texts_in_code() -> dict[str, str]:
    """Every text that stands in a call of `tr`, in the code or in a template, with the file it stands in."""
    methods: Any = [("**.py", extract_python), ("templates/**", "jinja2.ext:babel_extract")]
    options = {"templates/**": {"encoding": "utf-8"}}
    found = extract_from_dir(PACKAGE, methods, options, KEYWORDS)
    texts = {str(text): f"nbutils/{Path(file).as_posix()}" for file, _, text, _, _ in found}
    page = extract_from_file(extract_python, CHOOSING, KEYWORDS)
    return {str(text): ".ci/choosing.py" for _, text, _, _ in page} | texts


def help_texts(command: click.Command) -> Iterator[str]:
    """What --help shows of a command, its options and those below it."""
    yield from filter(None, [command.help, *(getattr(option, "help", None) for option in command.params)])
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from help_texts(below)


def fact_names(facts: dict[str, Any]) -> Iterator[str]:
    """The names of facts as report.md shows them."""
    from nbutils import record

    for lesson in facts.values():
        for name, value in lesson.items():
            if name not in record.UNREAD:
                nested = value if isinstance(value, dict) and "verdict" not in value else {}
                yield from map(record.label, (name, *nested))


def texts_in_data() -> set[str]:
    """English texts that reach `tr` from elsewhere: from YAML files, or because facts.json has them in English."""
    from nbutils import (
        cli,
        config,
        diagnose,
        display,
        distributed,
        exercises,
        hardware,
        models,
        notices,
        parity,
        plan,
        platforms,
        profiles,
        served_model,
        watch,
    )
    from nbutils.data import build
    from nbutils.data import texts as data_texts
    from nbutils.evaluation import comparison, evaluator
    from nbutils.exporting import make
    from nbutils.files import read_json
    from nbutils.models import find_shape
    from nbutils.plan import gpus
    from nbutils.plan.memory import Recipe, parts
    from nbutils.serving import engine
    from nbutils.training import practice

    symptoms = [entry for part in diagnose.symptoms().values() for entry in part.values()]
    texts = {entry[name] for entry in symptoms for name in ("cause", "todo")}
    texts |= {*practice.RUNS}
    texts |= {text for question in exercises.quizzes().values() for text in question["told"].values()}
    for one in platforms.table().values():
        texts |= {one.limits, one.gpu_todo, one.hub_todo, one.keep_todo, *one.keep.values()}
    texts |= {text for name in config.names() for text in config.read(name).reasons.values()}
    texts |= {entry.reason for entry in models.not_trained().values()}
    texts |= {text for gpu in gpus.every() for text in (gpu.note, gpu.price_from)} | {*profiles.ORIGINS.values()}
    forecast = plan.of_options(gpus.find("T4"), {})
    texts |= {*forecast.parts, *forecast.disk_gib, *plan.fits_table(["T4"])[0]}
    for name, model in product(distributed.STRATEGIES, ("tiny", "Qwen2.5-72B")):
        method = distributed.STRATEGIES[name] or "qlora"
        texts |= {*parts(find_shape(model), Recipe(method=method, engine=name, cards=2))}
    texts -= {"", "GPU", "GiB", "tokens/s", "logits"}  # those are the same in Chinese
    texts |= {*get_args(data_texts.Kind), *data_texts.TODOS.values(), *build.LANGUAGES}
    texts |= {build.BUNDLED, "rows", *watch.STATES.values(), *notices.TITLES.values()}
    texts |= {"mean", "longest", "over", "what", "value", "why", "question", "expected", "before", "after"}
    texts |= {"student", "trainings"}
    texts |= {"symptom", "cause", "todo"}
    texts |= {"baseline", "prompt", "few-shot", "round-1", "round-2"}  # in lesson 10: models and trainings, columns
    texts |= {"file", "page", "start", "end", "text", "problem", "answer", "role"}
    texts |= {"row", "wanted", "answered"}
    texts |= {"loss", "validation", "peak", "cost", "time left"}  # the numbers of a training
    judged = comparison.TEXTS
    texts |= {text for case in judged["cases"].values() for text in case.values() if text}
    texts |= {judged["cut_off"], *judged["forgetting"], *judged["forgetting"].values()}
    texts |= {text for label, _, about in judged["scores"].values() for text in (label, about)} - {"ROUGE-L"}
    texts |= {*evaluator.THINKING_MODES.values(), "base", "merged", "tuned", "merged (lesson 04)"}
    texts |= {f"{dtype}, {comparison.IN_4_BITS}" for dtype in hardware.DTYPES}
    texts |= {*parity.NAMES.values(), parity.CHANGED, parity.PRICE, parity.SAME, parity.FAILS}
    texts |= {text for form in make.FORMATS.values() for text in (form.purpose, form.runs)}
    texts |= {words for _, words in make.VERDICTS} | {"BROKEN", make.NOT_COMPARED}
    texts.add(served_model.NOTHING_STORED)
    texts |= {row[name] for row in engine.TABLE["gpus"] for name in ("name", "reason")}
    texts |= {*engine.TABLE["model_flags"].values()}
    texts |= {text for text in engine.TABLE["reserved_flags"].values() if not text.startswith("Server(")}
    texts |= set(help_texts(cli.app)) | set(fact_names(read_json(ROOT / "tests/contracts.json")["facts"]["lessons"]))
    texts |= {name.replace("_", " ") for name in read_json(display.CURVES)} | {"Loss"}
    texts |= {"work", "scratch", "keep", "keep lasts", "model hub", "platform", "system", "memory", "time", "packages"}
    return texts | {"NBUTILS_PLATFORM is set", "nothing of a known platform is here"}


def texts() -> dict[str, str]:
    """Every text of the package, with the file it stands in."""
    return dict.fromkeys(texts_in_data(), "data") | texts_in_code()


def read() -> Catalog:
    """The catalogue as it stands in the .po."""
    with PO.open("rb") as file:
        return read_po(file)


def fields(text: str) -> set[str]:
    """The values a text names."""
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name}


def problem_of(english: str, message: Message | None) -> str:
    """What is wrong with the translation of a text, if anything."""
    if message is None or not message.string or message.fuzzy:
        return "has no Chinese"
    chinese = str(message.string)
    if fields(chinese) != fields(english):
        return "has other values in Chinese"
    if not re.search(r"[\u3000-\u9fff\uff00-\uffef]", chinese):
        return "is English in Chinese"
    return ""


def check() -> list[str]:
    """What a reader of Chinese would meet, texts that nothing prints any more, and a .mo that is not of this .po."""
    catalogue, wanted = read(), texts()
    problems = [f"{problem}: {text!r}" for text in wanted if (problem := problem_of(text, catalogue.get(text)))]
    known = {str(message.id): str(message.string) for message in catalogue if message.id}
    problems += [f"nothing prints: {text!r}" for text in known if text not in wanted]
    with MO.open("rb") as file:
        compiled = {str(message.id): str(message.string) for message in read_mo(file) if message.id}
    if compiled != {text: chinese for text, chinese in known.items() if chinese}:
        problems.append(f"{MO.name} is out of date: run `make sync`")
    return problems


def write() -> None:
    """Take new texts into the .po, drop those that nothing prints, and compile it."""
    known, fresh = read(), Catalog(locale="zh", project="nbutils", fuzzy=False)
    fresh.header_comment = "# The texts of nbutils in Chinese; .ci/translations.py keeps them."
    for text, place in sorted(texts().items(), key=lambda entry: (entry[1], entry[0])):
        translated = known.get(text)
        chinese = str(translated.string) if translated and not translated.fuzzy else ""
        fresh.add(text, chinese, locations=[(place, 1)]).flags.clear()  # Babel takes a % for a format of Python
    with PO.open("wb") as file:
        write_po(file, fresh, width=120, include_lineno=False)
    with MO.open("wb") as file:
        write_mo(file, fresh)


def main() -> int:
    """Write or check; the exit status says whether something is missing or out of date."""
    sys.path.insert(0, str(ROOT))
    os.environ["NBUTILS_LANG"] = "en"
    if "--check" not in sys.argv and check():
        write()
    problems = check()
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
