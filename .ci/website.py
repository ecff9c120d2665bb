"""The course as a site: `python .ci/website.py` writes build/site/html, which opens from the folder, without a network.

    python .ci/website.py                      executes the lessons that have not run with this content, then builds
    python .ci/website.py --executed FOLDER    executes nothing: FOLDER/en and FOLDER/zh hold runs, perhaps of a part
                                               of the lessons; --out names another folder than build/site

Each language is a build of Sphinx (docs/site) from pages written here: every lesson with the outputs of a real run of
the tiny model, and every page of docs. A figure becomes a file with the words that describe it; paths of this machine
and secrets are replaced; a link leads to the page of the site, or to the file in the repository of pyproject.toml, or
is plain text where that is still the placeholder. A link to nothing ends the build.
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
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
import psutil
import sync
import yaml

from nbutils.files import write_json
from nbutils.masking import mask_secrets

ROOT = sync.ROOT
PARTS = ROOT / "docs/site"
TEXTS = yaml.safe_load((PARTS / "texts.yaml").read_text(encoding="utf-8"))
TRAINS_OTHERS = ("00_quickstart", "07_from_scratch")
FOLDED = {"setup", "language", "injected-parameters"}
LEARNED = re.compile(r"(?m)^\| `(\d\d_\w+)` \| (.+) \|$")  # the README's table of lessons
LINK = re.compile(r"(?s)```.*?```|`[^`\n]*`|(!?)\[((?:`[^`]*`|[^][`])*)\]\(([^()\s]+)\)")  # code is left alone
Notebook = dict[str, Any]


@dataclass(frozen=True)
class Edition:
    """The course in one language: where its sources are, and where its pages go below html/."""

    language: str
    folder: str  # of a language below notebooks, docs and html
    readme: Path

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
        pages = (ROOT / "docs" / self.folder).glob("*.md")
        readme = self.readme.read_text(encoding="utf-8")
        return sorted(pages, key=lambda page: readme.find(f"/{page.name})") % len(readme))  # those it does not: last

    @cached_property
    def pages(self) -> dict[Path, str]:
        """The page of the site for each file of the repository, without its ending."""
        lessons = {file: f"lessons/{file.stem}" for file in self.lessons}
        sources = {file.with_suffix(".py"): page for file, page in lessons.items()}
        return {self.readme: "index"} | lessons | sources | {file: f"docs/{file.stem}" for file in self.docs}


EDITIONS = (Edition("en", "", ROOT / "README.md"), Edition("zh", "zh", ROOT / "README.zh-CN.md"))


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
    home = folder / content(edition)
    for earlier in set(folder.glob("*")) - {home}:
        shutil.rmtree(earlier)
    runs: dict[str, list[str]] = {}
    for source in edition.lessons:
        if not executed_copy(source, home):
            runs.setdefault(run_name(source), []).extend(["--only", source.stem])
    environment = os.environ | {"NBUTILS_HOME": str(home), "NBUTILS_LANG": edition.language, "CUDA_VISIBLE_DEVICES": ""}
    for run, only in runs.items():
        command = [sys.executable, "-m", "nbutils", "run", "--profile", "tiny", "-p", "RUN_NAME", run, *only]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        (home / "commit").write_text(commit(), encoding="utf-8")
    return home


def run_name(source: Path) -> str:
    """The run of a lesson; one that trains something else than the course does has its own."""
    return source.stem if source.stem in TRAINS_OTHERS else "tiny"


def executed_copy(source: Path, home: Path) -> Path | None:
    """The executed notebook of a lesson among the runs of a folder."""
    return next(home.glob(f"*/notebooks/{source.name}"), None)


# --- a lesson ---------------------------------------------------------------------------------------------------------


@cache
def private_names(home: Path) -> dict[str, str]:
    """What names this machine, the longest first, and what stands for it on the site."""
    course = "~/finetune-course"
    names = {str(home): f"{course}/runs", str(home.resolve()): f"{course}/runs", str(ROOT): course}
    names |= {os.path.realpath(folder): f"{course}/.venv" for folder in (sys.prefix, ROOT / ".venv")}
    names |= {tempfile.gettempdir(): "/tmp", str(Path.home()): "~", socket.gethostname(): "machine"}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def public(value: Any, home: Path) -> Any:
    """An output without what names this machine and what looks like a secret."""
    if isinstance(value, list):
        return [public(part, home) for part in value]
    if isinstance(value, dict):
        return {key: public(part, home) for key, part in value.items()}
    if isinstance(value, str):
        for name, neutral in private_names(home).items():
            value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", neutral, value)
        return mask_secrets(value)
    return value


def figure(png: str, words: str, file: Path) -> str:
    """A figure written to a file, as the HTML that shows it on the page of a lesson."""
    data = base64.b64decode(png)
    file.write_bytes(data)
    width, height = struct.unpack(">II", data[16:24])
    place = f'src="../figures/{file.name}" width="{width}" height="{height}" loading="lazy"'
    return f'<img {place} alt="{html.escape(words)}">'


def lesson_page(edition: Edition, source: Path, home: Path, figures: Path) -> Notebook:
    """The notebook of a lesson as the site shows it."""
    texts, executed = edition.texts, executed_copy(source, home)
    notebook: Notebook = json.loads((executed or source).read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            cell["source"] = with_links("".join(cell["source"]), source, edition)
            continue
        tags = cell["metadata"].setdefault("tags", [])
        for tag in FOLDED.intersection(tags):
            tags.append("hide-cell")
            cell["metadata"]["mystnb"] = {"code_prompt_show": texts[tag], "code_prompt_hide": texts[tag]}
        for place, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if png := data.pop("image/png", ""):
                words = output["metadata"].get("image/png", {}).get("alt") or texts["figure"]
                data["text/html"] = figure(png, words, figures / f"{source.stem}-{number:02d}-{place}.png")
        cell["outputs"] = public(cell["outputs"], home)
    said = provenance(edition, source, home, notebook) if executed else texts["not_run"]
    first = notebook["cells"][0]
    heading, _, rest = first["source"].partition("\n")
    first["source"] = f'{heading}\n\n<p class="provenance">{said}{colab(edition, source)}</p>\n{rest}'
    return notebook


def provenance(edition: Edition, source: Path, home: Path, executed: Notebook) -> str:
    """Where the outputs of a lesson are from."""
    kept = home / "commit"
    ran_at = kept.read_text(encoding="utf-8") if kept.exists() else commit()
    date = executed["metadata"]["papermill"]["end_time"][:10]
    return edition.texts["ran"].format(date=date, commit=ran_at, cores=psutil.cpu_count())


def colab(edition: Edition, source: Path) -> str:
    """A link that opens a lesson in Colab, which knows what is on GitHub."""
    address = sync.repository()
    if not address.startswith(sync.GITHUB):
        return ""
    page = address.replace(sync.GITHUB, "https://colab.research.google.com/github/")
    return f' <a href="{page}/blob/{sync.BRANCH}/{source.relative_to(ROOT)}">{edition.texts["colab"]}</a>'


# --- links ------------------------------------------------------------------------------------------------------------


def with_links(text: str, file: Path, edition: Edition) -> str:
    """A text whose links lead to pages of the site, or to the repository."""

    def replace(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if target is None or re.match(r"#|\w+:", target):
            return link[0]
        return picture + leading(words, target, file, edition)

    return LINK.sub(replace, text)


def leading(words: str, target: str, file: Path, edition: Edition) -> str:
    """A link of a file in the repository, as it must be on its page."""
    path, mark, anchor = target.partition("#")
    there = (file.parent / path).resolve()
    if not there.exists():
        raise SystemExit(f"{file.relative_to(ROOT)} links to {target}, which does not exist")
    here = Path(edition.pages[file]).parent
    if there.suffix == ".png":
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


def landing(edition: Edition, notebooks: dict[str, Notebook], figures: Path) -> str:
    """The first page: the beginning of the README, a card for each lesson, and the pages."""
    readme = edition.readme.read_text(encoding="utf-8")
    title, _, *paragraphs = readme.split("\n## ")[0].split("\n\n")  # without the line that leads to the other README
    introduction = with_links("\n\n".join([title, *paragraphs]), edition.readme, edition)
    learned = dict(LEARNED.findall(readme))
    cards = [card(edition, stem, notebook, figures) for stem, notebook in notebooks.items()]
    for entry in cards:
        entry["learned"] = re.sub(r"`([^`]+)`", r"<code>\1</code>", learned.get(entry["stem"], ""))
    template = jinja2.Template((PARTS / "landing.md").read_text(encoding="utf-8"), trim_blocks=True)
    return template.render(introduction=introduction, texts=edition.texts, cards=cards, docs=edition.docs)


def card(edition: Edition, stem: str, notebook: Notebook, figures: Path) -> dict[str, Any]:
    """What the first page shows of a lesson: its first figure, its title, and how much it is."""
    title = notebook["cells"][0]["source"].partition("\n")[0].removeprefix("# ")
    pictures = sorted(file.name for file in figures.glob(f"{stem}-*.png"))
    facts = []
    if seconds := notebook["metadata"].get("papermill", {}).get("duration"):
        facts.append(edition.texts["minutes"].format(minutes=max(round(seconds / 60), 1)))
    if count := sum("exercise" in cell["metadata"].get("tags", []) for cell in notebook["cells"]):
        facts.append(edition.texts["exercises"].format(count=count))
    return {"stem": stem, "title": title, "picture": next(iter(pictures), ""), "facts": facts}


def write_pages(edition: Edition, home: Path, folder: Path) -> None:
    """All pages of a language, as Sphinx reads them."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs/images", folder / "images")
    for name in ("figures", "docs", "lessons"):
        (folder / name).mkdir()
    notebooks = {}
    for source in edition.lessons:
        notebooks[source.stem] = lesson_page(edition, source, home, folder / "figures")
        write_json(folder / "lessons" / source.name, notebooks[source.stem])
    for page in edition.docs:
        text = with_links(page.read_text(encoding="utf-8"), page, edition)
        (folder / "docs" / page.name).write_text(text, encoding="utf-8")
    (folder / "index.md").write_text(landing(edition, notebooks, folder / "figures"), encoding="utf-8")


def build(edition: Edition, source: Path, site: Path) -> None:
    """One language from its pages; a warning of Sphinx, as of a link into nothing, ends it."""
    built = edition.texts["built"].format(commit=commit())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-A", f"built={built}"]
    command += ["-c", str(PARTS), "-d", f"{source}.doctrees", str(source), str(site / edition.folder)]
    subprocess.run(command, env=os.environ | {"SITE_LANGUAGE": edition.language}, check=True)
    shutil.rmtree(site / "jupyter_execute", ignore_errors=True)  # notebooks that MyST-NB leaves there
    shutil.copytree(source / "figures", site / edition.folder / "figures", dirs_exist_ok=True)


def main() -> None:
    """Execute what is missing, and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/site")
    parser.add_argument("--executed", type=Path, help="runs that were made elsewhere")
    given = parser.parse_args()
    english, chinese = ({file.name for file in [*edition.lessons, *edition.docs]} for edition in EDITIONS)
    if english != chinese:
        raise SystemExit(f"Not in both languages, and the site leads from each to the other: {english ^ chinese}")
    site = given.out.resolve() / "html"
    shutil.rmtree(site, ignore_errors=True)
    for edition in EDITIONS:
        executed = given.out.resolve() / "executed" / edition.language
        home = given.executed / edition.language if given.executed else execute(edition, executed)
        source = site.with_name("source") / edition.language
        write_pages(edition, home, source)
        build(edition, source, site)
    print(site / "index.html")


if __name__ == "__main__":
    main()
