"""The notebook contract as rules; static, no lesson is run. Each test name is the rule."""

import ast
import json
import re
import runpy
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from nbutils import lesson
from nbutils.masking import KEY as SECRET

SYNC = runpy.run_path(str(ROOT / ".ci/sync.py"))
QUICKSTART = "00_quickstart"
SOURCES = SYNC["sources"]()  # those in git; a copy of yours follows no rules
PLATFORM_PATH = re.compile(r"/content\b|/kaggle\b|/root/autodl|/mnt/workspace|/hy-tmp")
BLOCKING = {"input", "getpass", "notebook_login", "login", "wandb.login"}
HAN, HALF = "\u4e00-\u9fff", "!-)+-;=?A-Za-z"  # a Chinese character; half-width characters, without those of Markdown
BADLY_SET = re.compile(  # half-width without a space beside Chinese; a line break, which a browser shows as a space
    rf".*[{HAN}][{HALF}].*|.*[{HALF}][{HAN}].*|.*[{HAN}，。；：、]\n[^\n#-].*"
)
SHOWING = {
    "print",
    "set",
    "axvline",
    "barh",
    "show_table",
    "plot_losses",
    "show",
}  # calls whose strings a learner reads


class Notebook:
    """A lesson: its cells, their texts, its syntax tree."""

    def __init__(self, source: Path) -> None:
        self.source, self.stem = source, source.stem
        self.json = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))
        self.cells: list[dict[str, Any]] = self.json["cells"]
        self.code = ["".join(cell["source"]) for cell in self.cells if cell["cell_type"] == "code"]
        self.prose = ["".join(cell["source"]) for cell in self.cells if cell["cell_type"] == "markdown"]

    def tagged(self, tag: str) -> str:
        """The text of the one cell with that tag."""
        [text] = ["".join(cell["source"]) for cell in self.cells if tag in cell["metadata"].get("tags", [])]
        return text

    def promise(self, opening: str, closing: str) -> list[str]:
        """The bullets of the first text, which the closing text repeats."""
        [last] = [text for text in self.prose if closing in text]
        bullets, repeated = (re.findall(r"(?m)^- .*", text) for text in (self.prose[0], last))
        assert opening in self.prose[0] and bullets == repeated
        return bullets

    def nodes(self, kind: type[ast.AST]) -> list[Any]:
        """The syntax nodes of that kind."""
        tree = ast.walk(ast.parse(self.source.read_text(encoding="utf-8")))
        return [node for node in tree if isinstance(node, kind)]


@pytest.fixture(params=SOURCES, ids=lambda source: source.stem)
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(request.param)


def test_derived_files_are_in_step_with_their_sources() -> None:
    stale = [file.name for file, text in SYNC["wanted"]().items() if file.read_text(encoding="utf-8") != text]
    assert stale == [], f"{stale} out of date: run `make sync`"


def test_no_outputs_are_committed_and_cell_ids_are_stable(notebook: Notebook) -> None:
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells)
    stem = notebook.stem.replace("_", "-")
    assert [cell["id"] for cell in notebook.cells] == [f"{stem}-{n:02d}" for n in range(len(notebook.cells))]


def test_no_secret_and_no_platform_path_stands_in_a_notebook(notebook: Notebook) -> None:
    for text in notebook.code[1:] + notebook.prose:  # the setup cell comes before nbutils, which knows the platforms
        assert not SECRET.search(text)
        assert not PLATFORM_PATH.search(text), "absolute platform paths belong in nbutils.platforms"


def test_a_lesson_is_short(notebook: Notebook) -> None:
    most = 10 if notebook.stem == QUICKSTART else 22
    assert len(notebook.code) <= most


def test_an_exercise_can_be_answered_after_the_whole_lesson_has_run(notebook: Notebook) -> None:
    needed: set[str] = set()
    for cell in notebook.cells:
        nodes = list(ast.walk(ast.parse("".join(cell["source"])))) if cell["cell_type"] == "code" else []
        deleted = {ast.unparse(target) for node in nodes if isinstance(node, ast.Delete) for target in node.targets}
        assert not needed & deleted, "`run this cell again` would fail"
        if "exercise" in cell["metadata"].get("tags", []):
            needed |= {node.id for node in nodes if isinstance(node, ast.Name)}


def test_lesson_05_starts_its_server_in_its_first_third() -> None:
    [lesson_05] = [Notebook(source) for source in SOURCES if source.stem == "05_serve"]
    [start] = [number for number, text in enumerate(lesson_05.code, 1) if "server.start(" in text]
    assert start <= len(lesson_05.code) / 3


def test_one_setup_cell_a_learner_can_read(notebook: Notebook) -> None:
    setup = notebook.tagged("setup")
    assert setup == notebook.code[0] == Notebook(SOURCES[0]).tagged("setup")
    lines = re.sub('OURS = ".*"', 'OURS = ""', setup).splitlines()  # a fork's name may be long
    assert len(lines) <= 13 and max(map(len, lines)) <= 100
    assert "NBUTILS_SOURCE" in setup and "torch" not in setup


def test_one_parameters_cell_of_annotated_scalars(notebook: Notebook) -> None:
    body: list[Any] = ast.parse(notebook.tagged("parameters")).body
    assert all(isinstance(node, ast.AnnAssign) for node in body)
    assert all(isinstance(node.value, ast.Constant | ast.UnaryOp) for node in body)
    assert list(lesson.declared_in(notebook.source)) == [node.target.id for node in body] != []


def test_a_sentence_stands_before_every_code_cell_and_cells_are_short(notebook: Notebook) -> None:
    for before, cell in pairwise(notebook.cells):
        assert "markdown" in (before["cell_type"], cell["cell_type"]), f"no sentence before: {cell['source'][:2]}"
    sizes = [len(re.findall(r"(?m)^[ \t]*[^\s#]", text)) for text in notebook.code]
    assert max(sizes) <= 25 and statistics.median(sizes) <= 6


def test_code_defines_no_class_and_no_long_function_waits_for_nobody_and_is_not_dead(notebook: Notebook) -> None:
    assert notebook.nodes(ast.ClassDef) == []
    for node in notebook.nodes(ast.FunctionDef):
        assert node.end_lineno - node.lineno < 10, f"{node.name} belongs in nbutils"
    assert not {ast.unparse(node.func) for node in notebook.nodes(ast.Call)} & BLOCKING
    assert not {ast.unparse(node.test) for node in notebook.nodes(ast.If)} & {"False", "0"}
    assert not any(re.search(r"^\s*[!%].*&\s*$", text, re.M) for text in notebook.code), "a background command"


def test_it_opens_with_a_promise_closes_with_the_same_bullets_and_asks_the_learner(notebook: Notebook) -> None:
    assert re.search(r"(?s)^# .*(minute|second)", notebook.prose[0])
    assert len(notebook.promise("You will have", "You now have")) >= 3
    asks = notebook.stem != QUICKSTART  # which is there to be seen
    assert any("## Exercise" in text for text in notebook.prose) == asks
    assert any("## Question" in text for text in notebook.prose) == asks
    assert sum(f'nbutils.start("{notebook.stem}", globals())' in text for text in notebook.code) == 1
    assert "lesson.finish(" in notebook.code[-1]


def same_program(english: str, chinese: str) -> bool:
    """Whether the second differs from the first in nothing but Chinese strings and comments."""
    return SYNC["difference"](ast.parse(english), ast.parse(chinese)) is None


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ('print("yes")  # a comment', 'print("是")  # 注释'),
        ('print(f"{rows:,} rows of {file}")', 'print(f"{file} 有 {rows:,} 条样本")'),
        (
            "print(f\"[{'OK' if done else 'TODO'}] saw {n:.2f}\")",
            "print(f\"[{'OK' if done else '待做'}] 结果是 {n:.2f}\")",
        ),
        ('table = [{"what": name}]', 'table = [{"名称": name}]'),
        ('run("qlora", title="Loss")', 'run("qlora", title="损失")'),
    ],
)
def test_a_chinese_lesson_may_differ_in_chinese_strings_and_comments(english: str, chinese: str) -> None:
    assert same_program(english, chinese)


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ('print("yes")', 'print("yes", end="。")'),
        ('print("yes")', 'print("oui")'),
        ('print("yes")', 'print("是"); done()'),
        ('print("yes")', 'print(f"是 {name}")'),
        ('run(method="qlora")', 'run(method="lora")'),
        ('row["answer"]', 'row["回答"]'),
        ('done = method == "qlora"', 'done = method == "量化"'),
        ("steps = 3", "steps = 3.0"),
        ("steps = 3", 'steps = "三"'),
        ("rows[n:]", "rows[:n]"),
        ("print(a - b)", "print(b - a)"),
        ('print(f"{rows} rows")', 'print(f"{row} 条样本")'),
        ('print(f"{loss:.2f} loss")', 'print(f"损失 {loss:.3f}")'),
        ('print(f"{loss!r} loss")', 'print(f"损失 {loss}")'),
        ('print(f"{a} of {b}")', 'print(f"{b} 里有 {b}")'),
        ('print(f"{a} of {b}")', 'print(f"{b} of {a}")'),
        ("print(f\"{name or 'fast'} run\")", "print(f\"{name or 'slow'} 这次训练\")"),
    ],
)
def test_a_chinese_lesson_with_another_program_is_refused(english: str, chinese: str) -> None:
    assert not same_program(english, chinese)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ('PROFILE: str = "auto"', 'PROFILE: str = "自动"', "自动"),
        ("lesson.finish(report", "lesson.finish(None", "lesson.finish(report"),
        ("# ## 练习", "# # 练习", "make them alike"),
    ],
)
def test_sync_refuses_another_program_and_shows_where(before: str, after: str, shown: str, tmp_path: Path) -> None:
    [lesson_01] = [source for source in SOURCES if source.stem == "01_environment"]
    text = SYNC["chinese"](lesson_01).read_text(encoding="utf-8")
    (tmp_path / "01_environment.py").write_text(text.replace(before, after), encoding="utf-8")
    english = SYNC["with_setup"](lesson_01.read_text(encoding="utf-8"))
    with pytest.raises(SystemExit, match=r"01_environment\.py: cell \d+") as refused:
        SYNC["edition"](english, tmp_path / "01_environment.py")
    assert shown in str(refused.value)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_chinese_lesson_is_the_english_program_with_chinese_texts(source: Path) -> None:
    english, chinese = Notebook(source), Notebook(SYNC["chinese"](source))
    language, *code = chinese.code
    assert language == chinese.tagged("language")
    assert all(map(same_program, english.code, code)) and len(english.code) == len(code)
    assert chinese.tagged("setup") == english.tagged("setup")
    own_words = re.compile(r'(?m)^(NAME|MAKER|MANNER): str = ".*"$')  # of a learner's assistant
    assert own_words.sub("", chinese.tagged("parameters")) == own_words.sub("", english.tagged("parameters"))
    opening, _, *others = chinese.prose  # the second one is about the language
    ours, theirs = ([re.findall(r"(?m)^#+ ", text) for text in prose] for prose in ([opening, *others], english.prose))
    assert ours == theirs
    promise = chinese.promise("学完这一课，你会得到", "## 现在你有了")
    assert len(promise) == len(english.promise("You will have", "You now have"))
    assert re.search("分钟|秒", opening)
    assert any("## 练习：" in text for text in others) == (source.stem != QUICKSTART)
    for text in chinese.prose:
        assert re.search(f"[{HAN}]", text) and not PLATFORM_PATH.search(text)
        assert BADLY_SET.findall(re.sub(r"`[^`]+`", "x", text)) == []


def printed(node: ast.AST) -> str:
    """A string as it is printed: an expression stands as x in it, or as 中 if it says something Chinese."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(printed, node.values))
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "中" if re.search(f"[{HAN}]", ast.unparse(node)) else "x"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_chinese_lesson_prints_and_labels_in_chinese(source: Path) -> None:
    _, setup, *code = Notebook(SYNC["chinese"](source)).code  # the setup cell is the same in both editions
    assert "NBUTILS_SOURCE" in setup
    calls = [node for node in ast.walk(ast.parse("\n".join(code))) if isinstance(node, ast.Call)]
    shown = [call for call in calls if ast.unparse(call.func).split(".")[-1] in SHOWING]
    texts = [
        printed(node) for call in shown for node in ast.walk(call) if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    english = [text for text in texts if re.search("[A-Za-z]{2,} [a-z]{2,}", text) and not re.search(f"[{HAN}]", text)]
    assert english == []
    assert [text for text in texts if BADLY_SET.match(text)] == []
