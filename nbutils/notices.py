"""How the end of a lesson, or of a run of several, is told; and the power-off that may follow it.

`NBUTILS_NOTICE=1` sends a notice however the work ends: finished, stopped before its end, failed. `NBUTILS_POWER_OFF=1`
switches an AutoDL machine off unless it failed, `always` after each of these ends, once the newest checkpoint verifies.
Ctrl-C and the stop button are not told: whoever uses them is there. Nor is an error in a notebook that someone watches,
unless its cell had run for minutes. A process that is killed outright cannot tell; of its kernels `nbutils run` does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import tenacity

from nbutils import checkpoints, display, distributed, platforms
from nbutils.errors import CourseError
from nbutils.files import fs_root
from nbutils.language import tr
from nbutils.masking import mask_secrets, remember_secret
from nbutils.record import RunFolder
from nbutils.tracking import trainings

NOTICE, POWER_OFF = "NBUTILS_NOTICE", "NBUTILS_POWER_OFF"
ALLOWED = {NOTICE: ("0", "1"), POWER_OFF: ("0", "1", "always")}
URL, TOKEN, AUTODL_URL = "NBUTILS_NOTICE_URL", "AUTODL_TOKEN", "https://www.autodl.com/api/v1/wechat/message/send"
SECONDS, PAUSE = 10.0, 2.0  # for an answer, and before the second and last attempt
MOST_BYTES, MOST_SAID = 1900, 600  # WeCom takes 2048 bytes with the title; characters of an error or a result
LONG_CELL = 300.0  # seconds after which nobody is expected to sit and wait
GRACE, KEEP_ON = 180.0, "keep_on"  # seconds in which a power-off can be cancelled; the file that cancels it
STOPPED = ("course.stopped", "course.unfinished", "distributed.terminated")
Status = Literal["finished", "unfinished", "failed"]


class Service(NamedTuple):
    """What a service is sent, and how its answer looks when it took the message: most refuse with HTTP 200."""

    payload: Callable[[dict[str, str]], dict[str, Any]]
    taken: str  # a regular expression


def _whole(message: dict[str, str]) -> str:
    """Title and text, for a service that takes one text."""
    return f"{message['title']}\n{message['text']}"


_FEISHU = Service(lambda one: {"msg_type": "text", "content": {"text": _whole(one)}}, r'"(code|StatusCode)"\s*:\s*0\b')
_ERRCODE = Service(lambda one: {"msgtype": "text", "text": {"content": _whole(one)}}, r'"errcode"\s*:\s*0\b')
SERVICES = {
    "open.feishu.cn": _FEISHU, "open.larksuite.com": _FEISHU,
    "oapi.dingtalk.com": _ERRCODE, "qyapi.weixin.qq.com": _ERRCODE,
    "hooks.slack.com": Service(lambda one: {"text": _whole(one)}, r"^ok"),
}  # fmt: skip
AUTODL = Service(
    lambda one: {"title": one["title"], "name": "finetune-course", "content": one["text"]}, r'(?i)"success"'
)
OTHER = Service(dict, "")  # any answer of a server that reports no error


def require_settings() -> None:
    """Refuse other values of the variables; say where a notice will go."""
    for name, allowed in ALLOWED.items():
        if (value := os.environ.get(name) or "0") not in allowed:
            raise CourseError("notices.value", name=name, value=value, allowed=", ".join(allowed))
    if os.environ.get(NOTICE) != "1":
        return
    try:
        host = urlsplit(_address()).hostname
        print(tr("notice    goes to {host}, however this ends (if a kernel is killed: by `nbutils run`)", host=host))
    except CourseError as problem:
        print(f"[WARN] {problem}")


@contextmanager
def deferred() -> Iterator[None]:
    """Lessons within this block neither notify nor power off: they are a part of something larger, which does."""
    variables = {name: os.environ.pop(name) for name in ALLOWED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(variables)


@dataclass
class Work:
    """A lesson, or a run of several, that is under way."""

    lesson: str
    run: RunFolder | None = None  # once it is open
    cell_began: float = field(default_factory=time.monotonic)

    def opened(self, run: RunFolder) -> None:
        """Its run is known now. A file of an earlier night that keeps the machine on is told while someone is there."""
        self.run, keep_on = run, run.path / KEEP_ON
        if os.environ.get(POWER_OFF, "0") not in ("", "0") and keep_on.exists():
            print(tr("[WARN] {file} is there: the machine will not be powered off. Delete it.", file=keep_on))

    def failed(self, problem: object) -> None:
        """Tell an error; an interruption by hand is none."""
        code, values = (problem.code, problem.values) if isinstance(problem, CourseError) else ("", {})
        by_hand = code == "training.interrupted" or values.get("signal") == "SIGINT"
        if by_hand or not isinstance(problem, Exception) or not distributed.is_main():
            return
        said = str(problem) if code else f"{type(problem).__name__}: {problem}"
        said = values["problem"] if code == "course.lesson_failed" else said
        first = mask_secrets(said).strip().partition("\n")[0]
        first = first if self.lesson in first else f"{self.lesson}: {first}"
        self.ended("unfinished" if code in STOPPED else "failed", first)

    def ended(self, status: Status, said: str) -> None:
        """Where the environment asks for it, send a notice, then power off."""
        notice, when = (os.environ.get(name) or "0" for name in ALLOWED)
        off = when == "always" or (when == "1" and status != "failed")
        if notice == "0" and not off:
            return
        platform, name = platforms.detect(), self.run.name if self.run else self.lesson
        kept, verified = _newest_checkpoint(self.run) if self.run else ("", None)
        safe = bool(verified) if status == "finished" else verified is not False  # failed before the first: no loss
        keep_on = (self.run.path if self.run else platforms.folders(platform).keep) / KEEP_ON
        stays = _stays_on(platform, safe, keep_on) if off else ""
        if not off:
            power = _billed(platform)
        elif stays:
            power = stays
        else:
            power = tr(
                "This machine is powered off in {seconds:.0f} s. To keep it on, interrupt this (Ctrl-C, the stop"
                " button) or create the file {file}.", seconds=GRACE, file=keep_on,
            )  # fmt: skip
        if notice == "1":
            title, todo = _title_and_todo(status, name)
            text = "\n".join(filter(None, (said[:MOST_SAID], kept, todo, power)))
            try:
                print(tr("Notice sent to {host}.", host=send(title, text, status, name)), flush=True)
            except CourseError as problem:
                print(f"[WARN] {problem.seen}", flush=True)
        if off:
            print(*filter(None, (said, kept, power)), sep="\n", flush=True)
            if not stays:
                print(power_off(keep_on), flush=True)


_underway = Work("")  # of this process


def begin(lesson: str) -> Work:
    """From now on a failing cell or script is told; a CourseError ends a plain script with its message alone."""
    global _underway
    _underway = Work(lesson)
    if platforms.in_kernel():
        events = sys.modules["IPython"].get_ipython().events
        events.register("pre_run_cell", _before_cell)  # once, however often it is called
        events.register("post_run_cell", _after_cell)  # before the kernel answers: papermill still waits
    else:
        sys.excepthook = _after_script
    return _underway


def _before_cell(info: object) -> None:
    """Note when a cell begins."""
    _underway.cell_began = time.monotonic()


def _after_cell(result: Any) -> None:
    """Tell the error of a cell, if nobody watches or it came after minutes."""
    problem = result and (result.error_in_exec or result.error_before_exec)
    if problem and not (display.watched() and time.monotonic() - _underway.cell_began < LONG_CELL):
        _underway.failed(problem)


def _after_script(kind: type[BaseException], problem: BaseException, trace: Any) -> None:
    """Show the error that ends a script, and tell it."""
    if isinstance(problem, CourseError):
        print(f"\n[FAIL] {problem}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, problem, trace)
    _underway.failed(problem)


@contextmanager
def telling(lesson: str) -> Iterator[Work]:
    """Within this block an error is told before it goes on."""
    work = Work(lesson)
    try:
        yield work
    except Exception as problem:
        work.failed(problem)
        raise


def _newest_checkpoint(run: RunFolder) -> tuple[str, bool | None]:
    """What to tell of the newest checkpoint of a run, and whether it verifies; None if there is none."""
    folder = run.checkpoints
    try:
        found, remarks = checkpoints.look(folder)
        if not found and not remarks:
            return tr("No checkpoint is kept yet."), None
        problem = checkpoints.defect(found[0]) if found else remarks[0]
    except OSError as failed:
        problem = failed.strerror or type(failed).__name__
    if problem:
        told = {"folder": folder, "problem": problem}
        return tr("The newest checkpoint in {folder} does not verify: {problem}.", **told), False
    return tr("Checkpoint {step} verifies, in {folder}.", step=found[0].step, folder=folder), True


def _title_and_todo(status: Status, name: str) -> tuple[str, str]:
    """The title of a notice, and what is to be done."""
    if status == "finished":
        return tr("nbutils: run {name} has finished", name=name), ""
    if status == "unfinished":
        todo = tr("Start the same again, unchanged: it continues.")
        return tr("nbutils: run {name} has stopped before its end", name=name), todo
    todo = tr("Fix the cause, then start the same again: what is kept is not repeated.")
    return tr("nbutils: run {name} has failed", name=name), todo


def _stays_on(platform: platforms.Platform, safe: bool, keep_on: Path) -> str:
    """Why a machine is not switched off; empty if it is."""
    if (name := platform.name) != "autodl":
        return tr("Not powered off: this is {name}, and only AutoDL's machines are switched off this way.", name=name)
    if not safe:
        return tr("Not powered off, because the run is not safe yet. Look at it, then switch off by hand.")
    return _kept_on(keep_on)


def _kept_on(keep_on: Path) -> str:
    """What keeps a machine on: the file, or another training on it; empty if nothing does."""
    if keep_on.exists():
        return tr("Not powered off: {file} is there. Delete it before the next run.", file=keep_on)
    folders = platforms.folders(platforms.detect())
    others = trainings(folders.scratch, folders.keep)
    others.pop(keep_on.parent.name, None)
    busy = next((name for name, one in others.items() if one.trains_here), "")
    return tr("Not powered off: run {run} is training on this machine.", run=busy) if busy else ""


def _billed(platform: platforms.Platform) -> str:
    """What to tell of a machine that nobody asked to switch off."""
    return tr("The machine stays on, and costs money.") if platform.name == "autodl" else ""


def power_off(keep_on: Path) -> str:
    """Switch an AutoDL machine off after a while, unless that is cancelled; says what was done."""
    try:
        end = time.monotonic() + GRACE
        while (left := end - time.monotonic()) > 0 and not keep_on.exists():
            time.sleep(min(left, 1.0))
        if kept := _kept_on(keep_on):
            return kept
        # without arguments: it would not be AutoDL's power-off
        subprocess.check_output([fs_root() / "usr/bin/shutdown"], stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError, KeyboardInterrupt) as failed:
        said = mask_secrets(f"{type(failed).__name__}: {failed}")
        return tr("Not powered off ({said}). Switch the machine off on AutoDL's page, it costs money.", said=said)
    return tr("Powered off. What is on the data disk stays for 15 days; start the same again to go on.")


def _address() -> str:
    """Where notices go; a CourseError says what to set if no secret tells."""
    url = platforms.secret(URL) or ""
    if not url and platforms.secret(TOKEN):
        return AUTODL_URL
    found = re.match(r"https?://[\w.-]+(?::\d+)?([/?]\S*)?$", url)
    if not found:
        state = tr("not a web address") if url else tr("not set")
        raise CourseError("notices.no_address", url=URL, state=state, token=TOKEN)
    for part in re.split(r"[/?&=]", found[1] or ""):  # what an answer may repeat of it
        if len(part) >= 16:
            remember_secret(part)
    return url


def send(title: str, text: str, status: str, run: str) -> str:
    """Send a notice, and say which host took it; a CourseError says why none did, without the address's secrets."""
    url = _address()
    host = urlsplit(url).hostname or ""
    text = mask_secrets(text).encode()[:MOST_BYTES].decode(errors="ignore")
    message = {"title": mask_secrets(title), "text": text, "run": run, "status": status}
    headers = {"Content-Type": "application/json", "User-Agent": "nbutils"}
    service = SERVICES.get(host, OTHER)
    if url == AUTODL_URL:
        headers["Authorization"], service = platforms.secret(TOKEN) or "", AUTODL
    try:
        answer = _post(urllib.request.Request(url, json.dumps(service.payload(message)).encode(), headers))
    except (OSError, ValueError, HTTPException) as problem:
        about = f"HTTP {problem.code}" if isinstance(problem, urllib.error.HTTPError) else ""
        about = about or mask_secrets(str(getattr(problem, "reason", "") or type(problem).__name__))
        raise CourseError("notices.not_sent", host=host, problem=about, url=URL, token=TOKEN) from problem
    if not re.search(service.taken, answer):
        said = tr("its answer: {answer}", answer=repr(mask_secrets(answer)[:200]))
        raise CourseError("notices.not_sent", host=host, problem=said, url=URL, token=TOKEN)
    return host


def _may_pass(problem: BaseException) -> bool:
    """Whether a second attempt may succeed: the server did not answer, or failed itself."""
    return isinstance(problem, (OSError, HTTPException)) and getattr(problem, "code", 500) >= 500


@tenacity.retry(
    stop=tenacity.stop_after_attempt(2), wait=lambda _: PAUSE, reraise=True,
    retry=tenacity.retry_if_exception(_may_pass),
)  # fmt: skip
def _post(request: urllib.request.Request) -> str:
    """The answer to a request that carries a secret; a server that fails is asked twice."""
    opener = urllib.request.build_opener(platforms.NoRedirects)  # urlopen would keep the proxies of its first call
    with opener.open(request, timeout=SECONDS) as answer:
        text, end = b"", time.monotonic() + SECONDS  # the timeout alone begins anew with each byte
        while time.monotonic() < end and len(text) < 65536 and (piece := answer.read1(65536)):
            text += piece
        return text.decode("utf-8", "replace")
