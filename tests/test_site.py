"""The site, opened from its folder in a real browser: nothing broken, nothing from elsewhere, fit for every reader.

The gate builds it from the course run and one Chinese lesson; `make site-test` looks at build/site, where all lessons
ran. What looks at a page is tried on broken pages, too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support import ROOT, python

from nbutils import lesson

sys.path.insert(0, str(ROOT / ".ci"))
import website

pytestmark = [pytest.mark.notebook, pytest.mark.serve, pytest.mark.timeout(1800)]
BUILT = os.environ.get("COURSE_SITE", "")  # the html folder of a site that is there
PHONE = {"width": 390, "height": 800}
TABLET = {"width": 1080, "height": 800}
LAPTOP = {"width": 1320, "height": 800}
DESKTOP = {"width": 1920, "height": 1000}
LOADED = """async () => {
  for (const image of document.images) {
    image.loading = "eager";
    await image.decode().catch(() => {});
  }
}"""
BROKEN_IMAGES = "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
UNDESCRIBED = """[...document.querySelectorAll(".cell_output img")]
  .filter((image) => image.alt.length < 12).map((image) => image.src)"""
UNFOLDED = """[...document.querySelectorAll("details[open], .tag_setup pre, .tag_language pre")]
  .filter((part) => part.open || part.checkVisibility()).map((part) => part.textContent.slice(0, 60))"""
SIDEWAYS = """document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("body *")]
  .filter((part) => part.getBoundingClientRect().right > innerWidth + 1).map((part) => part.outerHTML.slice(0, 90))"""
LINKS = """[...document.querySelectorAll("a[href]")].filter((link) => link.getAttribute("href") !== "#")
  .map((link) => link.href)"""
OUTPUTS = """[...document.querySelectorAll(".cell_output")]
  .flatMap((box) => [box.innerHTML]).join("\\n")"""
FEW_TOKENS = """() => {  // of each kind and highlighted block one: axe looks at every element
  for (const block of document.querySelectorAll(".highlight pre")) {
    const known = new Set();
    for (const token of block.querySelectorAll("span[class]")) {
      if (known.has(token.className)) token.replaceWith(...token.childNodes);
      known.add(token.className);
    }
  }
}"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
DIFFERENT = """(characters) => {
  const pictures = [...characters].map((character) => {
    const canvas = document.createElement("canvas");
    const pen = canvas.getContext("2d");
    pen.font = `40px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillText(character, 20, 60);
    return canvas.toDataURL();
  });
  return new Set(pictures).size === pictures.length;
}"""
Findings = dict[str, list[str]]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium on this machine; without one these tests cannot look, which is a failure in CI."""
    missing = (
        "no browser: pip install -e '.[site]'; apt-get install chromium, or playwright install --with-deps chromium"
    )
    with suppress(ImportError):
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            own = playwright.chromium.executable_path
        path = shutil.which("chromium") or shutil.which("google-chrome") or own
        if Path(path).exists():
            return path
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A Chromium without a window; it ends with this file, as its event loop is in the way of others."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


if BUILT:

    @pytest.fixture(scope="session")
    def course_run() -> None:
        """None is needed."""


@pytest.fixture(scope="module")
def site(chromium: str, course_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    if BUILT:
        return Path(BUILT).resolve()
    folder = tmp_path_factory.mktemp("site")
    runs = folder / "runs"
    runs.mkdir()
    (runs / "en").symlink_to(course_run.parent)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NBUTILS_LANG", "zh")
        python("-m", "nbutils", "run", "--profile", "tiny", "--only", "02", home=runs / "zh")
    python(ROOT / ".ci/website.py", "--executed", runs, "--out", folder, home=runs, timeout=600)
    return folder / "html"


def test_lessons_that_train_different_rows_have_runs_of_their_own() -> None:
    trained = {website.run_name(ROOT / f"notebooks/{stem}.ipynb") for stem in (*lesson.TRAINING, "07_from_scratch")}
    assert len(trained) == 3


def axe_findings(page: Any, **rules: Any) -> list[str]:
    """What axe-core calls serious or critical on a page, with where it is."""
    from axe_playwright_python.sync_playwright import Axe

    lines = []
    options = {"resultTypes": ["violations"], "preload": False, **rules}  # preload asks for the style sheets once more
    for violation in Axe().run(page, options=options).response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            lines += [f"{violation['id']}: {node['html'][:200]}" for node in violation["nodes"]]
    return lines


def dead_links(links: list[str]) -> list[str]:
    """Those that lead to no file, or to no place in it; what is on the web is not asked."""
    dead = []
    for link in links:
        parts = urlsplit(link)
        file = Path(unquote(parts.path))
        if parts.scheme != "file":
            continue
        if not file.is_file() or (parts.fragment and unquote(parts.fragment) not in places(file)):
            dead.append(link)
    return dead


def places(file: Path, known: dict[Path, set[str]] = {}) -> set[str]:  # noqa: B006  # a cache
    """The places of a page to which a link can lead."""
    if file not in known:
        known[file] = set(re.findall(r'\sid="([^"]+)"', file.read_text(encoding="utf-8")))
    return known[file]


def leaks(outputs: str) -> list[str]:
    """The folders of the machine that built the site, in what its lessons printed."""
    own = {str(ROOT), os.path.realpath(sys.prefix), str(Path.home()), f"{tempfile.gettempdir()}/pytest-of"}
    return [folder for folder in own if re.search(rf"{re.escape(folder)}(?![\w.])", outputs)]


def look(browser: Any, file: Path, dark: bool = True) -> Findings:
    """Open a page on screens of four sizes, in light and dark, and say what is wrong with it."""
    findings: Findings = {"console": [], "requests": [], "axe in dark": []}
    page = browser.new_page(viewport=DESKTOP)
    page.on("console", lambda message: findings["console"].append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: findings["console"].append(str(error)))
    page.on("requestfailed", lambda asked: findings["requests"].append(asked.url))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or findings["requests"].append(asked.url))
    page.goto(file.as_uri())
    page.evaluate(LOADED)
    findings["images"] = page.evaluate(BROKEN_IMAGES)
    findings["descriptions"] = page.evaluate(UNDESCRIBED)
    findings["folds"] = page.evaluate(UNFOLDED)
    findings["links"] = dead_links(page.evaluate(LINKS))
    findings["leaks"] = leaks(page.evaluate(OUTPUTS))
    page.evaluate(FEW_TOKENS)
    findings["axe in light"] = axe_findings(page)
    if dark:
        page.emulate_media(color_scheme="dark")
        findings["axe in dark"] = axe_findings(page, runOnly=["color-contrast"])
    findings["sideways"] = []
    for size in (LAPTOP, TABLET, PHONE):
        page.set_viewport_size(size)
        page.evaluate(DRAWN)
        findings["sideways"] += page.evaluate(SIDEWAYS)
    findings["axe on a phone"] = axe_findings(page, rules={"color-contrast": {"enabled": False}})
    page.close()
    return findings


# --- the looking itself -----------------------------------------------------------------------------------------------

SOUND = '<!doctype html><html lang="en"><title>A page</title><meta name="viewport" content="width=device-width">'
DOT = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
BROKEN = {
    "console": "<script>undefinedName()</script>",
    "requests": '<script src="https://example.invalid/x.js"></script>',
    "images": '<img alt="a figure that is missing" src="nowhere.png">',
    "descriptions": f'<div class="cell_output"><img alt="Figure" src="{DOT}"></div>',
    "folds": "<details open><summary>Solution</summary>42</details>",
    "links": '<h2 id="here">Here</h2><a href="#there">there</a>',
    "leaks": f'<div class="cell_output">saved to {ROOT}/runs</div>',
    "axe in light": '<p style="color: #bbb">hardly to be read</p>',
    "axe in dark": "<style>@media (prefers-color-scheme: dark) { p { color: #bbb } }</style><p>hardly to be read</p>",
    "sideways": '<div style="width: 900px">wide</div>',
    "axe on a phone": '<style>@media (min-width: 500px) { img { display: none } }</style><img src="x.png">',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_seen(kind: str, browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(SOUND + BROKEN[kind], encoding="utf-8")
    assert look(browser, tmp_path / "page.html")[kind]


def test_a_sound_page_has_no_findings(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f'{SOUND}<h1 id="top">A</h1><a href="#top">up</a>', encoding="utf-8")
    assert not any(look(browser, tmp_path / "page.html").values())


def test_characters_without_a_font_are_seen(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    assert page.evaluate(DIFFERENT, "ab")
    assert not page.evaluate(DIFFERENT, "\U0010fff0\U0010fff1"), "two empty boxes"


# --- the builder ------------------------------------------------------------------------------------------------------


def test_a_link_leads_to_the_page_the_other_language_or_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    english, chinese = website.EDITIONS
    lesson_03, faq = ROOT / "notebooks/03_qlora.ipynb", ROOT / "docs/zh/faq.md"
    text = "[word](../docs/glossary.md#lora), `[code](nowhere.md)`, [rows](../data_samples)"
    monkeypatch.setattr(website.sync, "repository", lambda: "")
    assert website.with_links(text, lesson_03, english) == text.replace("[rows](../data_samples)", "rows")
    monkeypatch.setattr(website.sync, "repository", lambda: "https://github.com/me/course")
    assert "[rows](https://github.com/me/course/blob/main/data_samples)" in website.with_links(text, lesson_03, english)
    opened = "https://colab.research.google.com/github/me/course/blob/main/notebooks/03_qlora.ipynb"
    assert f'<a href="{opened}">' in website.colab(english, lesson_03)
    assert website.leading("en", "../faq.md#a", faq, chinese) == '<a href="../../docs/faq.html#a">en</a>'
    with pytest.raises(SystemExit, match=r"03_qlora.ipynb links to nowhere.md"):
        website.leading("w", "nowhere.md", lesson_03, english)


def test_outputs_name_no_folder_of_the_builder_and_no_secret(tmp_path: Path) -> None:
    key = "hf_" + "abcdefghij" * 3
    said = [{"text": [f"{tmp_path}/tiny, {ROOT}/configs, {Path.home()}/x, {ROOT}more, {key}"]}]
    [shown] = website.public(said, tmp_path)[0]["text"]
    assert shown.startswith("~/finetune-course/runs/tiny, ~/finetune-course/configs, ~/x, ")
    assert key not in shown


def test_a_lesson_runs_again_only_if_something_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edition = website.EDITIONS[0]
    asked: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        asked.append(command)
        name = command[command.index("RUN_NAME") + 1]
        stems = [command[place + 1] for place, word in enumerate(command) if word == "--only"]
        for stem in stems:
            copy = Path(env["NBUTILS_HOME"], name, "notebooks", f"{stem}.ipynb")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()

    monkeypatch.setattr(website, "content", lambda edition: "one")
    monkeypatch.setattr(website, "commit", lambda: "0123456789")
    monkeypatch.setattr(website.subprocess, "run", run)
    home = website.execute(edition, tmp_path)
    executed = {file.stem for file in home.glob("*/notebooks/*")}
    assert executed == {file.stem for file in edition.lessons}
    assert (home / "07_from_scratch/notebooks/07_from_scratch.ipynb").exists(), (
        "its checkpoints are of another training"
    )
    asked.clear()
    website.execute(edition, tmp_path)
    assert asked == []
    monkeypatch.setattr(website, "content", lambda edition: "other")
    website.execute(edition, tmp_path)
    assert asked and not home.exists()


# --- the site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looks(site: Path, browser: Any) -> dict[str, Findings]:
    """What is wrong with each page; in the gate only those with outputs are looked at in dark, which takes seconds."""
    by_page = {}
    for file in sorted(site.rglob("*.html")):
        by_page[str(file.relative_to(site))] = look(browser, file, dark=bool(BUILT) or file.parent.name == "lessons")
    return by_page


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    for edition in website.EDITIONS:
        pages = {f"{page}.html" for page in edition.pages.values()} | {"search.html"}
        there = {str(file.relative_to(site / edition.folder)) for file in (site / edition.folder).rglob("*.html")}
        assert pages <= there


def test_no_file_names_the_folder_it_was_built_in(site: Path) -> None:
    folder = re.compile(rf"{re.escape(str(ROOT))}(?![\w.-])|{re.escape(str(site.parent))}".encode())
    files = [file for file in site.rglob("*") if file.is_file()]
    assert len(files) > 100
    assert [file for file in files if folder.search(file.read_bytes())] == []


@pytest.mark.parametrize("kind", BROKEN)
def test_no_page_has(kind: str, looks: dict[str, Findings]) -> None:
    assert {page: findings[kind] for page, findings in looks.items() if findings[kind]} == {}


@pytest.mark.parametrize("edition", website.EDITIONS, ids=lambda edition: edition.language)
def test_a_page_speaks_its_language_and_leads_to_the_other(edition: Any, site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / edition.folder / "lessons/03_qlora.html").as_uri())
    chinese = edition.language == "zh"
    text = page.inner_text("article")
    assert page.get_attribute("html", "lang") == ("zh-CN" if chinese else "en")
    assert (len(re.findall("[\u4e00-\u9fff]", text)) > 300) == chinese
    if chinese:
        assert page.evaluate(DIFFERENT, "微调训练"), "no font with Chinese characters"
    page.click("article > .language")
    other = next(language for language in website.EDITIONS if language is not edition)
    assert page.url == (site / other.folder / "lessons/03_qlora.html").as_uri()


@pytest.mark.parametrize("edition", website.EDITIONS, ids=lambda edition: edition.language)
def test_the_lessons_stand_in_their_order_with_their_solutions_and_outputs(
    edition: Any, site: Path, browser: Any
) -> None:
    page = browser.new_page()
    page.goto((site / edition.folder / "index.html").as_uri())
    stems = [file.stem for file in edition.lessons]
    for place in (".card", ".sidebar-tree:first-of-type a, .sidebar-tree a"):
        links = page.eval_on_selector_all(place, "links => links.map(link => link.href)")
        shown = [Path(urlsplit(link).path).stem for link in links if "/lessons/" in link]
        assert shown == stems
    page.goto((site / edition.folder / "lessons/02_data_prep.html").as_uri())
    assert page.locator(".tag_setup").count() == 1
    assert page.locator("article details pre").count() > 3
    assert page.locator(".cell_output img").count() > 0
    assert re.search(r"20\d\d-\d\d-\d\d.*[0-9a-f]{10}.*CPU", page.inner_text(".provenance"))


@pytest.mark.parametrize(
    ("folder", "words", "page"),
    [("", "validation loss", "lessons/03_qlora.html"), ("zh", "验证损失", "lessons/03_qlora.html"),
     ("zh", "秩", "lessons/03_qlora.html"), ("zh", "checkpoint", "lessons/03_qlora.html")],
)  # fmt: skip
def test_a_search_finds(folder: str, words: str, page: str, site: Path, browser: Any) -> None:
    opened = browser.new_page()
    opened.goto((site / folder / "index.html").as_uri())
    opened.fill(".sidebar-search", words)
    opened.press(".sidebar-search", "Enter")
    opened.wait_for_selector("#search-results li a")
    links = opened.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
    assert (site / folder / page).as_uri() in {link.partition("#")[0].partition("?")[0] for link in links}
    assert dead_links(links) == []


@pytest.mark.parametrize(("folder", "words"), [("", "zyzzyva"), ("zh", "鸑鷟")])
def test_a_search_for_what_is_not_there_finds_nothing(folder: str, words: str, site: Path, browser: Any) -> None:
    opened = browser.new_page()
    opened.goto(f"{(site / folder / 'search.html').as_uri()}?q={words}")
    opened.wait_for_function("document.querySelector('.search-summary')?.textContent.length > 9")
    assert opened.locator("#search-results li").count() == 0
