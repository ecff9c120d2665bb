"""docs/minimal.md: QLoRA in 40 lines, which really run and learn, and are the same program on the Chinese page."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT

MOST_LINES = 40
FEWER = {"= 80, 2e-3": "= 31, 2e-3", "max_new_tokens=200": "max_new_tokens=8"}  # steps, and tokens of an answer


def program(page: str) -> str:
    """The one block of a page."""
    [block] = re.findall(r"(?s)```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"))
    return str(block)


class WithoutStrings(ast.NodeTransformer):
    """A program whose strings are all the same."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def outline(code: str) -> str:
    """What a program does, whatever its strings and comments say."""
    return ast.dump(WithoutStrings().visit(ast.parse(code)))


def shortened(code: str, out: Path) -> str:
    """The program with fewer steps and shorter answers, which saves to another folder."""
    for before, after in (FEWER | {'"runs/minimal"': repr(str(out))}).items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


def test_the_minimal_program_is_short_and_needs_nothing_of_the_course() -> None:
    code = program("docs/minimal.md")
    assert len(re.findall(r"(?m)^[ \t]*[^\s#]", code)) <= MOST_LINES
    assert max(map(len, code.splitlines())) <= 120
    assert "nbutils" not in code


def test_the_chinese_page_has_the_same_program_with_its_own_comments() -> None:
    english, chinese = program("docs/minimal.md"), program("docs/zh/minimal.md")
    assert outline(chinese) == outline(english)
    comments = re.findall(r"# .*", chinese)
    assert len(comments) == len(re.findall(r"# .*", english))
    assert any(re.search("[\u4e00-\u9fff]", comment) for comment in comments)


@pytest.mark.slow
def test_the_minimal_program_learns_and_saves_a_model_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(ROOT)  # its paths are those of this repository
    random.seed(0)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(shortened(program("docs/minimal.md"), tmp_path), names)
    printed = capsys.readouterr().out
    before, *_, after = map(float, re.findall(r"held-out loss (\S+)", printed))
    assert before > 5
    assert after < before / 10
    assert "of 20 exactly right" in printed
    names["model"] = AutoModelForCausalLM.from_pretrained(tmp_path)
    question = names["rows"][0][:-1]
    assert '"intent": "order"' in names["answer"](question)
