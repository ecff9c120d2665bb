"""The course as a site: `python .ci/website.py` writes build/site/html, which opens from the folder, without a network.

    python .ci/website.py                      executes the lessons that have not run with this content, then builds
    python .ci/website.py --executed FOLDER    executes nothing: FOLDER/en and FOLDER/zh hold runs, perhaps
                                            of a part of the lessons; --out names another folder than build/site

Each language is a build of Sphinx (docs/site/conf.py) from pages written here: every lesson with the outputs of a real
run of the tiny model, and every page of docs. A figure becomes a file with its description as text for who cannot see
it; paths of this machine and secrets are replaced; a link leads to the page of the site, or to the file in the
repository of pyproject.toml, or is plain text where that is still the placeholder. A link to nothing ends the build.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import sync

from nbutils import lesson
from nbutils.files import write_json
from nbutils.masking import mask_secrets

ROOT = sync.ROOT
LEARNED = re.compile(r"(?m)^\| `(\d\d_\w+)` \| (.+) \|$")  # the README's table of lessons
PICTURE = re.compile(r"(?m)^!\[([^]]+)\]\((\S+)\)$")
LINK = re.compile(r"(?s)```.*?```|`[^`\n]*`|(!?)\[((?:`[^`]*`|[^][`])*)\]\(([^()\s]+)\)")  # code is left alone
CARD = """<a class="card" href="lessons/{stem}.html">{picture}<strong>{title}</strong>
<span>{learned}</span><small>{facts}</small></a>"""
TEXTS = {
    "en": {
        "lessons": "Lessons",
        "pages": "Pages",
        "ran": "This page is a real run: {date}, commit {commit}, {cores} CPU cores, tiny model.",
        "not_run": "This lesson was not executed when this site was built.",
        "minutes": "{minutes} min with the tiny model",
        "exercises": "{count} exercises",
        "setup": "Setup: installs the course where it is missing",
        "injected": "What this run set",
        "colab": "Open in Colab",
        "figure": "Figure",
        "built": "Built from commit {commit}.",
    },
    "zh": {
        "lessons": "课程",
        "pages": "文档",
        "ran": "本页是一次真实运行的结果：{date}，提交 {commit}，{cores} 个 CPU 核，自带小模型。",
        "not_run": "生成这个网站时没有运行这一课。",
        "minutes": "用自带小模型运行 {minutes} 分钟",
        "exercises": "{count} 道练习",
        "setup": "安装单元格：缺少课程时安装",
        "injected": "这次运行的参数",
        "colab": "在 Colab 里打开",
        "figure": "图",
        "built": "由提交 {commit} 生成。",
    },
}


@dataclass(frozen=True)
class Edition:
    """The course in one language: where its sources are, and where its pages go below html/."""

    language: str
    folder: str  # of a language below notebooks, docs and html
    readme: str

    @property
    def texts(self) -> dict[str, str]:
        """What the site itself says."""
        return TEXTS[self.language]

    @property
    def lessons(self) -> list[Path]:
        """The notebooks, in the order of the course."""
        return sorted((ROOT / "notebooks" / self.folder).glob("[0-9][0-9]_*.ipynb"))

    @property
    def docs(self) -> list[Path]:
        """The pages, in the order in which the README names them."""
        folder = ROOT / "docs" / self.folder
        readme = (ROOT / self.readme).read_text(encoding="utf-8")
        return sorted(folder.glob("*.md"), key=lambda page: readme.find(f"/{page.name})") % len(readme))  # -1: last

    @property
    def pages(self) -> dict[Path, str]:
        """The page of the site for each file of the repository, without its ending."""
        lessons = {file: f"lessons/{file.stem}" for file in self.lessons}
        sources = {file.with_suffix(".py"): page for file, page in lessons.items()}
        docs = {file: f"docs/{file.stem}" for file in self.docs}
        return {ROOT / self.readme: "index"} | lessons | sources | docs


EDITIONS = (Edition("en", "", "README.md"), Edition("zh", "zh", "README.zh-CN.md"))


# --- the runs ---------------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    """What git says about this checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@cache
def commit() -> str:
    """The commit of this checkout; with a plus sign if files of it were changed since."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def content(edition: Edition) -> str:
    """A name for all that the outputs of a language depend on: its notebooks, the package, profiles and rows."""
    listed = git("ls-files", "-co", "--exclude-standard", "nbutils", "configs", "data_samples").splitlines()
    digest = hashlib.sha256()
    for file in [*edition.lessons, *(ROOT / name for name in listed)]:
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def execute(edition: Edition, folder: Path) -> Path:
    """The folder with the runs of a language; its lessons that have none are executed, one after the other."""
    home = folder / edition.language / content(edition)
    for earlier in set((folder / edition.language).glob("*")) - {home}:
        shutil.rmtree(earlier)
    runs: dict[str, list[str]] = {}
    for source in edition.lessons:
        if not executed_copy(source, home):
            runs.setdefault(run_name(source), []).extend(["--only", source.stem])
    environment = os.environ | {"NBUTILS_HOME": str(home), "NBUTILS_LANG": edition.language, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    for run, only in runs.items():
        command = [sys.executable, "-m", "nbutils", "run", "--profile", "tiny", "-p", "RUN_NAME", run, *only]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return home


def run_name(source: Path) -> str:
    """The run of a lesson; one outside 01 to 05 that keeps checkpoints trains something else, and has its own."""
    trains_something_else = source.stem not in lesson.COURSE and "RESUME" in lesson.declared_in(
        source.with_suffix(".py")
    )
    return source.stem if trains_something_else else "tiny"


def executed_copy(source: Path, home: Path) -> Path | None:
    """The executed notebook of a lesson among the runs of a folder."""
    return next(home.glob(f"*/notebooks/{source.name}"), None)


# --- a lesson ---------------------------------------------------------------------------------------------------------


@cache
def places(home: Path) -> dict[str, str]:
    """What names this machine, the longest first, and what stands for it on the site."""
    found = {
        str(home.resolve()): "~/finetune-course/runs",
        str(ROOT): "~/finetune-course",
        os.path.realpath(sys.prefix): "~/finetune-course/.venv",
        os.path.realpath(ROOT / ".venv"): "~/finetune-course/.venv",
        tempfile.gettempdir(): "/tmp",
        str(Path.home()): "~",
        socket.gethostname(): "machine",
    }
    return dict(sorted(found.items(), key=lambda place: -len(place[0])))


def public(value: Any, home: Path) -> Any:
    """An output without what names this machine and what looks like a secret."""
    if isinstance(value, list):
        return [public(part, home) for part in value]
    if isinstance(value, dict):
        return {key: public(part, home) for key, part in value.items()}
    if isinstance(value, str):
        for place, name in places(home).items():
            value = re.sub(rf"(?<![\w.-]){re.escape(place)}(?![\w.-])", name, value)
        return mask_secrets(value)
    return value


def figure(png: str, words: str, file: Path) -> str:
    """A figure written to a file, as the HTML that shows it on the page of a lesson."""
    data = base64.b64decode(png)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    width, height = struct.unpack(">II", data[16:24])
    alt = html.escape(words)
    return f'<img src="../figures/{file.name}" alt="{alt}" width="{width}" height="{height}" loading="lazy">'


def with_pictures(cell: dict[str, Any], name: str, figures: Path, title: str) -> None:
    """Put files in the place of a cell's pictures."""
    for number, output in enumerate(cell.get("outputs", [])):
        data = output.get("data", {})
        data.pop("application/vnd.jupyter.widget-view+json", None)
        if png := data.pop("image/png", ""):
            words = output["metadata"].get("image/png", {}).get("alt") or title
            data["text/html"] = figure(png, words, figures / f"{name}-{number}.png")


def lesson_page(edition: Edition, source: Path, home: Path, figures: Path) -> dict[str, Any]:
    """The notebook of a lesson as the site shows it."""
    texts = edition.texts
    executed = executed_copy(source, home)
    notebook: dict[str, Any] = json.loads((executed or source).read_text(encoding="utf-8"))
    folded = {"setup": texts["setup"], "language": texts["setup"], "injected-parameters": texts["injected"]}
    for number, cell in enumerate(notebook["cells"]):
        tags = cell["metadata"].setdefault("tags", [])
        for tag in set(folded) & set(tags):
            tags.append("hide-cell")
            cell["metadata"]["mystnb"] = {"code_prompt_show": folded[tag], "code_prompt_hide": folded[tag]}
        with_pictures(cell, f"{source.stem}-{number:02d}", figures, texts["figure"])
        if cell["cell_type"] == "markdown":
            cell["source"] = with_links("".join(cell["source"]), source, edition)
        else:
            cell["outputs"] = public(cell["outputs"], home)
    first = notebook["cells"][0]
    heading, _, rest = first["source"].partition("\n")
    first["source"] = f"{heading}\n\n{provenance(edition, source, notebook if executed else {})}\n{rest}"
    return notebook


def provenance(edition: Edition, source: Path, executed: dict[str, Any]) -> str:
    """The line that says where the outputs of a page are from, and opens the lesson elsewhere."""
    said = edition.texts["not_run"]
    if executed:
        date = executed["metadata"]["papermill"]["end_time"][:10]
        cores = psutil.cpu_count(logical=True)
        said = edition.texts["ran"].format(date=date, commit=commit(), cores=cores)
    address = sync.repository()
    if address.startswith(sync.GITHUB):
        page = address.replace(sync.GITHUB, "https://colab.research.google.com/github/")
        link = f"{page}/blob/{sync.BRANCH}/{source.relative_to(ROOT)}"
        said += f' <a href="{link}">{edition.texts["colab"]}</a>'
    return f'<p class="provenance">{said}</p>'


# --- links ------------------------------------------------------------------------------------------------------------


def with_links(text: str, file: Path, edition: Edition) -> str:
    """A text whose links lead to pages of the site, or to the repository."""

    def replace(link: re.Match[str]) -> str:
        whole, (picture, words, target) = link[0], link.groups()
        if target is None or re.match(r"#|\w+:", target):
            return whole
        return picture + leading(words, target, file, edition)

    return LINK.sub(replace, text)


def leading(words: str, target: str, file: Path, edition: Edition) -> str:
    """A link of a file in the repository, as it must be on its page."""
    path, mark, anchor = target.partition("#")
    there = (file.parent / path).resolve()
    if not there.exists():
        raise SystemExit(f"{file.relative_to(ROOT)} links to {target}, which does not exist")
    here = Path(edition.pages[file]).parent
    if there.suffix in (".png", ".svg"):
        return f"[{words}]({os.path.relpath(f'images/{there.name}', here)})"
    if page := edition.pages.get(there):
        suffix = ".ipynb" if page.startswith("lessons/") else ".md"
        return f"[{words}]({os.path.relpath(page + suffix, here)}{mark}{anchor})"
    for other in EDITIONS:
        if page := other.pages.get(there):
            link = os.path.relpath(Path(other.folder, f"{page}.html"), edition.folder / here)
            return f'<a href="{link}{mark}{anchor}">{words}</a>'
    if address := sync.repository():
        return f"[{words}]({address}/blob/{sync.BRANCH}/{there.relative_to(ROOT)}{mark}{anchor})"
    return words


# --- the site ---------------------------------------------------------------------------------------------------------


def landing(edition: Edition, notebooks: dict[str, dict[str, Any]], figures: Path) -> str:
    """The first page: the beginning of the README, a card for each lesson, and the pages."""
    readme = ROOT / edition.readme
    title, _, *intro = readme.read_text(encoding="utf-8").split("\n## ")[0].split("\n\n")
    learned = dict(LEARNED.findall(readme.read_text(encoding="utf-8")))
    cards = [card(edition, stem, notebook, learned.get(stem, ""), figures) for stem, notebook in notebooks.items()]
    listed = {
        "lessons": [f"lessons/{stem}" for stem in notebooks],
        "pages": [f"docs/{file.stem}" for file in edition.docs],
    }
    trees = []
    for name, pages in listed.items():
        lines = [f":caption: {edition.texts[name]}", ":hidden:", "", *pages]
        trees.append("\n".join(["```{toctree}", *lines, "```"]))
    page = [
        title,
        *intro,
        f"## {edition.texts['lessons']}",
        '<div class="cards">\n' + "\n".join(cards) + "\n</div>",
        *trees,
    ]
    return with_links("\n\n".join(page), readme, edition)


def card(edition: Edition, stem: str, notebook: dict[str, Any], learned: str, figures: Path) -> str:
    """A lesson on the first page: its first figure, its title, what one leaves with, and how much it is."""
    texts = edition.texts
    title = notebook["cells"][0]["source"].partition("\n")[0].removeprefix("# ")
    exercises = sum("exercise" in cell["metadata"]["tags"] for cell in notebook["cells"])
    facts = [texts["exercises"].format(count=exercises)] if exercises else []
    if seconds := notebook["metadata"].get("papermill", {}).get("duration"):
        facts.insert(0, texts["minutes"].format(minutes=max(round(seconds / 60), 1)))
    pictures = sorted(figures.glob(f"{stem}-*.png"))
    picture = f'<img src="figures/{pictures[0].name}" alt="" loading="lazy">' if pictures else ""
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", learned)
    return CARD.format(stem=stem, picture=picture, title=title, learned=words, facts=" · ".join(facts))


def write_sources(edition: Edition, home: Path, folder: Path) -> None:
    """All pages of a language, as Sphinx reads them."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs/images", folder / "images")
    (folder / "figures").mkdir()
    (folder / "docs").mkdir()
    (folder / "lessons").mkdir()
    notebooks = {}
    for source in edition.lessons:
        notebook = lesson_page(edition, source, home, folder / "figures")
        notebooks[source.stem] = notebook
        write_json(folder / "lessons" / source.name, notebook)
    for page in edition.docs:
        text = with_links(page.read_text(encoding="utf-8"), page, edition)
        (folder / "docs" / page.name).write_text(text, encoding="utf-8")
    (folder / "index.md").write_text(landing(edition, notebooks, folder / "figures"), encoding="utf-8")


def build(edition: Edition, source: Path, site: Path) -> None:
    """One language from its sources; a warning of Sphinx, as of a link into nothing, ends it."""
    built = edition.texts["built"].format(commit=commit())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-b", "html"]
    command += [
        "-c",
        str(ROOT / "docs/site"),
        "-d",
        f"{source}.doctrees",
        "-A",
        f"built={built}",
    ]
    environment = os.environ | {"SITE_LANGUAGE": edition.language}
    subprocess.run([*command, str(source), str(site / edition.folder)], env=environment, check=True)
    shutil.copytree(source / "figures", site / edition.folder / "figures", dirs_exist_ok=True)


def main(words: Sequence[str] | None = None) -> None:
    """Execute what is missing, and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/site")
    parser.add_argument("--executed", type=Path, help="lessons that were executed elsewhere")
    given = parser.parse_args(words)
    english, chinese = ({file.name for file in [*edition.lessons, *edition.docs]} for edition in EDITIONS)
    if english != chinese:
        raise SystemExit(f"Not in both languages, and the site leads from each to the other: {english ^ chinese}")
    site = given.out / "html"
    shutil.rmtree(site, ignore_errors=True)
    for edition in EDITIONS:
        home = given.executed / edition.language if given.executed else execute(edition, given.out / "executed")
        source = given.out / "source" / edition.language
        write_sources(edition, home, source)
        build(edition, source, site)
    print(f"{site / 'index.html'}")


if __name__ == "__main__":
    main()
