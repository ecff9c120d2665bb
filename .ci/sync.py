"""Derives what is derived: notebooks/*.ipynb from *.py, setup cells, the code of notebooks/zh, badges, tables of docs.

    python .ci/sync.py            write it
    python .ci/sync.py --check    exit 1 if anything would change

One direction only: the .py file is the source. The result has no outputs, stable cell ids and stable bytes.
The setup cell stands here once. It looks for the course's wheel among Kaggle's inputs before it asks the network; an
attached wheel is installed from its own folder alone (`make wheels` builds one), so that it works with the internet
off. It never guesses: several wheels, no address of one's own, a bare name or an option stop it. So does an address
with a user, a password (`@` before the last `/`) or a query: pip and git would print it.
A lesson in notebooks/zh has its own text cells; its code cells are those of the English lesson, after one that chooses
the language.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parent.parent
SETUP_CELL = re.compile(r'(?m)(^# %% tags=\["setup"\]\n)(?:[^\n]+\n)*')
SETUP = r"""
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = "ADDRESS"
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS) or OURS
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)
"""[1:]
CELL, HEADING = re.compile(r"(?m)^(?=# %%)"), re.compile(r"(?m)^# (#+) ")
LANGUAGE = """
# %% [markdown]
# 先选定语言：课程打印的文字和报错都用中文。想看英文，把 `zh` 改成 `en`。

# %% tags=["language"]
import os; os.environ["NBUTILS_LANG"] = "zh"

"""[1:]
BADGES = re.compile(r"(?s)(<!-- badges -->\n).*?(<!-- /badges -->)")
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


def is_text(cell: str) -> bool:
    """Whether a cell of a source is a text cell."""
    return cell.startswith("# %% [markdown]")


def with_code_of(english: str, file: Path) -> str:
    """A Chinese source with the code cells of the English one."""
    head, *cells = CELL.split(english)
    _, *own = CELL.split(file.read_text(encoding="utf-8").replace(LANGUAGE, ""))
    texts = list(filter(is_text, own))
    for number, (here, there) in enumerate(zip_longest(texts, filter(is_text, cells)), 1):
        if not here or not there or HEADING.findall(here) != HEADING.findall(there):
            raise SystemExit(f"{file}: text cell {number} has not the headings of the English one: {here} / {there}")
    first, *others = (texts.pop(0) if is_text(cell) else cell for cell in cells)
    return "".join([head, first.rstrip("\n"), "\n\n", LANGUAGE, *others])


def with_setup(source: str) -> str:
    """A notebook source with the setup cell, which installs from the repository's address."""
    address = f"git+{project('Repository')}@v{project('version')}"  # the placeholder could be registered by anybody
    cell = SETUP.replace("ADDRESS", "" if "YOUR-" in address else address)
    return SETUP_CELL.sub(lambda found: found.group(1) + cell, source)


def notebook(stem: str, source: str) -> str:
    """The .ipynb text of a .py source."""
    derived = jupytext.reads(source, fmt="py:percent")
    cells = []
    for number, cell in enumerate(derived.cells):
        tags = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        entry = {"cell_type": cell.cell_type, "id": f"{stem.replace('_', '-')}-{number:02d}", "metadata": tags}
        if cell.cell_type == "code":
            entry |= {"execution_count": None, "outputs": []}
        cells.append(entry | {"source": cell.source.splitlines(keepends=True)})
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def badges(zh: bool) -> str:
    """Open-in-Colab badges of each lesson; none that leads to the placeholder, which anybody could register."""
    if "YOUR-" in project("Repository"):
        if zh:
            return "（把你的 fork 地址写进 `pyproject.toml`，运行 `make sync`，这里就会出现徽章。）\n"
        return "(The badges stand here once `pyproject.toml` has the address of your fork and `make sync` has run.)\n"
    page = project("Repository").replace("https://github.com/", "https://colab.research.google.com/github/")
    picture = "https://colab.research.google.com/assets/colab-badge.svg"
    rows = ["| lesson | English | 中文 |", "|---|---|---|"]
    for file in sources():
        links = (f"{page}/blob/main/notebooks/{folder}{file.stem}.ipynb" for folder in ("", "zh/"))
        rows.append(
            " | ".join([f"| `{file.stem}`", *(f"[![Open In Colab]({picture})]({link})" for link in links)]) + " |"
        )
    return "\n".join(rows) + "\n"


def choosing() -> dict[Path, str]:
    """The tables of docs/choosing.md, from configs/."""
    sys.path.insert(0, str(ROOT))
    from nbutils.plan.choosing import page

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
            texts[twin] = with_code_of(source, twin)
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
