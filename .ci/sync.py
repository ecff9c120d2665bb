"""Derives what is derived: notebooks/*.ipynb from *.py, setup and language cells, badges, tables of docs.

    python .ci/sync.py            write it
    python .ci/sync.py --check    exit 1 if anything would change

One direction only: the .py file is the source. The result has no outputs, stable cell ids and stable bytes.
The address of the repository stands in pyproject.toml, and all else follows it; writing first takes it from git's
`origin`, where that is a page on the web. A check never asks git: it is the same in every clone.
The setup cell stands here once. It looks for the course's wheel among Kaggle's inputs before it asks the network; an
attached wheel is installed from its own folder alone (`make wheels` builds one), so that it works with the internet
off. On Colab it asks the notebook server which page of GitHub this notebook was opened from, for two seconds at most,
and installs that repository; elsewhere curl has no host and asks nobody. It never guesses: several wheels, no address,
a bare name or an option stop it. So does an address with a user, a password (`@` before the last `/`) or a query: pip
and git would print it.
A lesson in notebooks/zh has texts of its own, also in its code: prints, labels, comments. It is refused where it is not
the program of the English lesson: a string may differ only where the Chinese one holds Chinese.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jupytext

ROOT = Path(__file__).resolve().parent.parent
SETUP_CELL = re.compile(r'(?m)(^# %% tags=\["setup"\]\n)(?:[^\n]+\n)*')
SETUP = r"""
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = "ADDRESS"
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    COLAB = "curl -sm2 http://$COLAB_JUPYTER_IP:9000/api/sessions | head -c 9999 | tr -dc ' -~'"
    PAGE = r'"fileId=https%3A(//github\.com/(?![^"]*\.\.)[\w-]+/[\w.-]+)/blob/([\w./-]+)/notebooks/'
    OPENED = re.findall(PAGE, subprocess.getoutput(COLAB).replace("%2F", "/"))
    REPOSITORY = [f"https:{repository}/archive/{ref}.zip" for repository, ref in OPENED][:1]
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS or REPOSITORY or [OURS])
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    print("Installing the course from", SOURCE, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)
"""[1:]
OWN_WORDS = re.compile("(NAME|MAKER|MANNER): str = ")  # what a learner's assistant says: Chinese in Chinese lessons
CELL, HEADING = re.compile(r"(?m)^(?=# %%)"), re.compile(r"(?m)^# (#+) ")
CHINESE = re.compile("[\u3001-\u3017\u4e00-\u9fff\uff01-\uff5e]")  # a Chinese character or punctuation mark
QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
LANGUAGE = """
# %% [markdown]
# 先选定语言：课程打印的文字和报错都用中文。英文版是 `notebooks/` 里同名的 notebook。

# %% tags=["language"]
import os; os.environ["NBUTILS_LANG"] = "zh"

"""[1:]
GITHUB, BRANCH = "https://github.com/", "main"
BADGES = re.compile(r"(?s)(<!-- badges -->\n).*?(<!-- /badges -->)")
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}  # for Colab, and for JupyterLab
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def project(key: str) -> str:
    """A value of pyproject.toml, the one place where name, version and address stand."""
    found = re.search(rf'^{key} = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert found, f"pyproject.toml has no {key}"
    return found.group(1)


def web_address(remote: str) -> str:
    """The page of a git remote, without user, password and port; empty for what is not on the web."""
    short = re.fullmatch(r"(?:[^@/]*@)?([^@/:]+):([^/:].*)", remote)  # git@github.com:owner/name
    parts = urlsplit(f"ssh://{short[1]}/{short[2]}" if short else remote)
    host = (parts.hostname or "").removeprefix("ssh.")
    path = parts.path.strip("/").removesuffix(".git")
    on_the_web = parts.scheme in ("https", "ssh") and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z]+", host)
    if not on_the_web or not re.fullmatch(r"(?a)[\w-][\w.-]*(/[\w-][\w.-]*)+", path):
        return ""
    return f"https://{host}/{path}"


def adopt_origin() -> None:
    """Write the address of this clone's origin into pyproject.toml, if that is on the web."""
    git = ["git", "--git-dir", str(ROOT / ".git")]  # of this folder, not of one that it may lie in
    origin = subprocess.run([*git, "remote", "get-url", "origin"], capture_output=True, text=True).stdout.strip()
    known, page = project("Repository"), web_address(origin)
    if page and page != known:
        file = ROOT / "pyproject.toml"
        text = file.read_text(encoding="utf-8").replace(f'Repository = "{known}"', f'Repository = "{page}"')
        file.write_text(text, encoding="utf-8", newline="\n")
        print(f"pyproject.toml: this repository is {page}")


def repository() -> str:
    """The page of this repository; empty as long as it is the placeholder, which anybody could register."""
    known = project("Repository")
    if "YOUR-" in known:
        return ""
    page = web_address(known)
    assert page == known, "Repository in pyproject.toml must look like https://github.com/owner/name"  # no password
    return page


def sources(new: bool = False) -> list[Path]:
    """The notebook sources in git; with `new` also those that are not added yet. Copies of yours are left alone."""
    options = ["-co", "--exclude-standard"] if new else ["-c"]
    listed = subprocess.run(["git", "ls-files", *options, "notebooks"], cwd=ROOT, capture_output=True, text=True)
    found = [ROOT / name for name in listed.stdout.splitlines()] or list((ROOT / "notebooks").glob("*.py"))
    lessons = (file for file in found if file.parent.name == "notebooks" and file.exists())
    return sorted(file for file in lessons if re.fullmatch(r"\d\d_[a-z0-9_]+\.py", file.name))


def chinese(file: Path) -> Path:
    """The Chinese source of a lesson."""
    return file.parent / "zh" / file.name


def literal(node: ast.AST) -> str:
    """What a string, or an f-string beside its expressions, says."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [piece.value for piece in pieces if isinstance(piece, ast.Constant)]
    return "".join(text for text in texts if isinstance(text, str))


def expressions(node: ast.AST) -> list[Any]:
    """The expressions of an f-string, in an order that no translation changes; a string has none."""
    found = [part for part in getattr(node, "values", []) if isinstance(part, ast.FormattedValue)]
    return sorted(found, key=lambda part: QUOTED.sub("", ast.unparse(part.value)))


def parts(node: ast.AST) -> list[Any]:
    """The nodes and plain values a syntax node is made of; the length of a list stands before its items."""
    found: list[Any] = []
    for _, value in ast.iter_fields(node):
        found += [len(value), *value] if isinstance(value, list) else [value]
    return found


def difference(english: ast.AST, chinese: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """The first two nodes that make another program; None if only strings differ, each of them for a Chinese one.

    The expressions of an f-string may then stand in another order. A key or what is compared is no text.
    """
    if isinstance(english, ast.Subscript | ast.Compare) and ast.dump(english) != ast.dump(chinese):
        return english, chinese
    divide = parts
    if literal(english) and CHINESE.search(literal(chinese)):
        divide = expressions
    ours, theirs = divide(english), divide(chinese)
    kinds = [[type(part) if isinstance(part, ast.AST) else repr(part) for part in side] for side in (ours, theirs)]
    if type(english) is not type(chinese) or kinds[0] != kinds[1]:
        return english, chinese
    pairs = zip(ours, theirs, strict=True)
    found = (difference(*pair) for pair in pairs if isinstance(pair[0], ast.AST))
    return next(filter(None, found), None)


def frame(cell: str) -> list[str]:
    """What both editions of a cell share word for word: its tags, and its headings or its parameters."""
    first, _, rest = cell.partition("\n")
    if "parameters" in first:
        return [first, *(ast.unparse(node) for node in ast.parse(rest).body if not OWN_WORDS.match(ast.unparse(node)))]
    return [first, *HEADING.findall(rest)]


def line(cell: str, node: ast.AST) -> str:
    """The line of a cell that a node stands in; the whole cell if it has none."""
    number = getattr(node, "lineno", 0)
    return cell.splitlines()[number - 1].strip() if number else cell


def edition(english: str, file: Path) -> str:
    """A Chinese source with the cells that are not its own; refused where it is not the program of the English one."""
    head, *cells = CELL.split(with_setup(file.read_text(encoding="utf-8").replace(LANGUAGE, "")))
    for number, (there, here) in enumerate(zip_longest(CELL.split(english)[1:], cells, fillvalue=""), 1):
        if frame(there) != frame(here):
            raise SystemExit(f"{file}: cell {number} is {frame(here)}, the English one {frame(there)}: make them alike")
        if found := difference(ast.parse(there), ast.parse(here)):
            raise SystemExit(
                f"{file}: cell {number} is not the program of the English one.\n"
                f"  here:  {line(here, found[1])}\n  there: {line(there, found[0])}\n"
                "Write the same code; only a string that holds Chinese, and comments, may differ."
            )
    first, *others = cells
    return "".join([head, first.rstrip("\n"), "\n\n", LANGUAGE, *others])


def with_setup(source: str) -> str:
    """A notebook source with the setup cell, which installs from the repository's address."""
    page = repository()
    address = page and f"git+{page}"
    if page.startswith(GITHUB):
        address = f"{page}/archive/{BRANCH}.zip"  # needs no git
    cell = SETUP.replace("ADDRESS", address)
    return SETUP_CELL.sub(lambda found: found.group(1) + cell, source)


def notebook(stem: str, source: str) -> str:
    """The .ipynb text of a .py source."""
    derived = jupytext.reads(source, fmt="py:percent")
    cells = []
    for number, cell in enumerate(derived.cells):
        tags = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        entry = {"cell_type": cell.cell_type, "id": f"{stem.replace('_', '-')}-{number:02d}", "metadata": tags}
        if {"setup", "language"} & set(cell.metadata.get("tags", [])):
            tags |= FOLDED
        if cell.cell_type == "code":
            entry |= {"execution_count": None, "outputs": []}
        cells.append(entry | {"source": cell.source.splitlines(keepends=True)})
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def badges(zh: bool) -> str:
    """Open-in-Colab badges of each lesson; Colab opens what is on GitHub."""
    if not repository().startswith(GITHUB):
        if zh:
            return "（仓库放到 GitHub 上、运行 `make sync` 之后，这里会出现在 Colab 里打开各课的徽章。）\n"
        return "(Badges that open a lesson in Colab stand here once this is on GitHub and `make sync` has run.)\n"
    page = repository().replace(GITHUB, "https://colab.research.google.com/github/")
    picture = "https://colab.research.google.com/assets/colab-badge.svg"
    rows = ["| lesson | English | 中文 |", "|---|---|---|"]
    for file in sources():
        links = (f"{page}/blob/{BRANCH}/notebooks/{folder}{file.stem}.ipynb" for folder in ("", "zh/"))
        rows.append(
            " | ".join([f"| `{file.stem}`", *(f"[![Open In Colab]({picture})]({link})" for link in links)]) + " |"
        )
    return "\n".join(rows) + "\n"


def choosing() -> dict[Path, str]:
    """The tables of docs/choosing.md, from configs/."""
    sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]
    from choosing import page

    texts, before = {}, os.environ.get("NBUTILS_LANG", "")
    for language, folder in (("en", "docs"), ("zh", "docs/zh")):
        os.environ["NBUTILS_LANG"] = language
        texts[ROOT / folder / "choosing.md"] = page()
    os.environ["NBUTILS_LANG"] = before
    return texts


def wanted(new: bool = False) -> dict[Path, str]:
    """Every derived file and the text it must have."""
    files = {}
    for file in sources(new):
        source = with_setup(file.read_text(encoding="utf-8"))
        texts = {file: source}
        if (twin := chinese(file)).exists():
            texts[twin] = edition(source, twin)
        for path, text in texts.items():
            files |= {path: text, path.with_suffix(".ipynb"): notebook(path.stem, text)}
    for readme in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
        if not readme.exists():
            continue
        shown = badges("zh" in readme.name)
        files[readme] = BADGES.sub(rf"\g<1>{shown}\g<2>", readme.read_text(encoding="utf-8"))
    return files


def main() -> int:
    """Write or check; the exit status says whether something was out of date."""
    check = "--check" in sys.argv
    if not check:
        adopt_origin()
    texts = wanted(new=not check) | choosing()
    stale = [file for file, text in texts.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        if check:
            print(f"{file.relative_to(ROOT)} is out of date: run `make sync`")
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(texts[file], encoding="utf-8", newline="\n")
            print(f"wrote {file.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
