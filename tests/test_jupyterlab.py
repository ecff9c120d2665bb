"""Lessons in a real JupyterLab in a real browser: the live box changes, the chat box answers in pieces and stops.

Before a release only: `pip install jupyterlab` and a Chromium (`.ci/browser`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support import ROOT, wait_for
from test_site import browser, chromium  # noqa: F401  # fixtures

from nbutils.serving.server import free_port

pytestmark = [pytest.mark.long, pytest.mark.notebook, pytest.mark.serve, pytest.mark.timeout(1200)]
ALL_CELLS = {"windowingMode": "none"}  # else those out of view leave the page
PROMPTS = ".jp-CodeCell .jp-InputArea-prompt"
LIVE = """() => {  // what the box of a training has shown, each text once
  window.shown = new Set();
  setInterval(() => {
    for (const box of document.querySelectorAll(".jp-OutputArea-output"))
      if (box.querySelector("polyline")) window.shown.add(box.innerText);
  }, 200);
}"""
STOP_WHILE_IT_GROWS = """() => {  // the texts of the chat; Stop is pressed at the third
  window.said = [];
  const box = [...document.querySelectorAll(".widget-html-content")].at(-1);
  const stop = [...document.querySelectorAll(".widget-button")].at(-1);
  new MutationObserver(() => {
    window.said.push(box.innerText);
    if (window.stopAt === window.said.length) stop.click();
  }).observe(box, {childList: true, subtree: true, characterData: true});
}"""


class Lab:
    """A JupyterLab, and a page of the browser that looks at it."""

    def __init__(self, address: str, token: str, folder: Path, page: Any) -> None:
        self.address = address
        self.token = token
        self.folder = folder
        self.page = page

    def run_all(self, stem: str, **parameters: object) -> None:
        """Open a copy of a lesson with these parameters and choose Run All Cells."""
        notebook = (ROOT / f"notebooks/{stem}.ipynb").read_text(encoding="utf-8")
        for name, value in parameters.items():
            line = json.dumps(f"{name}: {type(value).__name__} = {json.dumps(value) if value is not True else True}")[
                1:-1
            ]
            notebook, count = re.subn(rf"{name}: \w+ = [^\n]*?(?=\\n|\"[,\n])", lambda _: line, notebook)  # noqa: B023
            assert count == 1
        (self.folder / f"{stem}.ipynb").write_text(notebook, encoding="utf-8")
        self.page.goto(f"{self.address}/lab/tree/{stem}.ipynb?reset&token={self.token}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=90_000)
        self.page.evaluate(LIVE)
        wait_for(self._kernel_is_idle)
        self.page.wait_for_timeout(2000)  # the page hears of it later than this test
        self.page.click(".lm-MenuBar-item:has-text('Run')")
        self.page.click(".lm-Menu-item:has-text('Run All Cells') >> nth=0")

    def _kernel_is_idle(self) -> bool:
        """Whether the page is connected to a kernel that waits: before, it answers Run All with a dialog."""
        asked = requests.get(f"{self.address}/api/kernels", params={"token": self.token}, timeout=10)
        return any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in asked.json())

    def wait_until_done(self, seconds: int) -> None:
        """Wait until every cell of code has a number, and none of them ended with an error."""
        done = f"[...document.querySelectorAll('{PROMPTS}')].every((prompt) => /\\d/.test(prompt.textContent))"
        failed = ".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']"
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(done):
            assert self.page.locator(failed).count() == 0, self.page.locator(failed).first.inner_text()[-2000:]
            assert time.monotonic() < deadline, self.page.locator(PROMPTS).all_inner_texts()
            time.sleep(1)
        assert self.page.locator(failed).count() == 0, self.page.locator(failed).first.inner_text()[-2000:]


@pytest.fixture
def lab(browser: Any, course_run: Path, tmp_path: Path) -> Iterator[Lab]:  # noqa: F811
    """A JupyterLab whose lessons find the course run."""
    pytest.importorskip("jupyterlab", reason="pip install jupyterlab")
    shutil.copytree(course_run, tmp_path / "runs/tiny")
    settings = tmp_path / "settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(ALL_CELLS))
    port, token, folder = free_port(0), secrets.token_hex(8), tmp_path / "lessons"
    folder.mkdir()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    command += [f"--LabApp.user_settings_dir={tmp_path / 'settings'}"]
    environment = os.environ | {"NBUTILS_HOME": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "lab.log"
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        wait_for(lambda: "is running at" in log.read_text())
        page = browser.new_page(viewport={"width": 1300, "height": 1200})
        yield Lab(f"http://127.0.0.1:{port}", token, folder, page)
        page.close()
        server.terminate()


def require_live_box(page: Any, last: int) -> None:
    """The box of a training of so many steps has shown several of them."""
    shown = page.evaluate("[...window.shown]")
    steps = {found[1] for text in shown if (found := re.search(rf"(\d+) of {last}\b", text))}
    assert len(steps) > 3, shown


def require_chat(page: Any, *questions: str) -> None:
    """The last box of the page answers each question in pieces, and Stop stops the last of these answers."""
    question = page.locator(".widget-text input").last
    page.evaluate(STOP_WHILE_IT_GROWS)
    for text in questions:
        last = text == questions[-1]
        page.evaluate(f"() => {{ window.said.length = 0; window.stopAt = {3 * last}; }}")
        question.fill(text)
        question.press("Enter")
        page.wait_for_function("window.said.length > 2")
        page.wait_for_selector(".widget-button:disabled", timeout=60_000)
        said = page.evaluate("window.said")
        answers = [whole.rpartition(text)[2].strip() for whole in said]
        assert len(set(answers)) > 2, answers
        assert answers[-1].endswith("[stopped]") == last, answers


def test_the_live_box_of_a_training_changes_and_no_cell_fails(lab: Lab) -> None:
    lab.run_all("03_qlora", PROFILE="tiny", RUN_NAME="in_the_lab", MAX_STEPS=60)
    lab.wait_until_done(600)
    require_live_box(lab.page, 60)


def test_the_chat_answers_in_pieces_and_stops(lab: Lab) -> None:
    lab.run_all("05_serve", PROFILE="tiny", KEEP_RUNNING=True)
    lab.wait_until_done(600)
    require_chat(lab.page, "Where is my order of 12 pens?", "Please send 3 books to Wuhan.")


def test_the_quickstart_trains_and_chats(lab: Lab) -> None:
    """Its manner is long, so that there is something to stop: the tiny model says little else."""
    lab.run_all("00_quickstart", PROFILE="tiny", MANNER="Onward! " * 10)
    lab.wait_until_done(600)
    require_live_box(lab.page, 150)
    require_chat(lab.page, "Who are you?", "What is your name?")
