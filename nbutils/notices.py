"""How the end of a lesson, or of a run of several, is told; and the power-off that may follow it.

`NBUTILS_NOTICE=1` sends a notice however the work ends: finished, stopped before its end, failed, killed.
`NBUTILS_POWER_OFF=1` switches an AutoDL machine off unless it failed, `always` after each of these ends, once the
newest checkpoint verifies. Ctrl-C and the stop button are not told: whoever uses them is there. Nor is an error in a
notebook that someone watches, unless its cell had run for minutes.

A process that is killed outright tells nobody. So a small one of its own, the watcher, reads from a pipe how the work
goes, and alone tells of its end; if the pipe ends before the work did, whoever wrote into it was killed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nbutils import checkpoints, display, distributed, platforms
from nbutils.errors import CourseError, StoppedByHand, Unfinished, require_choice
from nbutils.files import fs_root
from nbutils.language import print_whatever, say, tr
from nbutils.masking import describe, mask_secrets, remember_secret
from nbutils.processes import LastingStream
from nbutils.record import RunFolder
from nbutils.tracking import trainings

NOTICE = "NBUTILS_NOTICE"
POWER_OFF = "NBUTILS_POWER_OFF"
ALLOWED = {NOTICE: ("0", "1"), POWER_OFF: ("0", "1", "always")}
URL = "NBUTILS_NOTICE_URL"
SECONDS = 40.0  # for both attempts together
PAUSE = 2.0  # between them
MOST_BYTES = 1900  # WeCom takes 2048 with the title
MOST_CHARACTERS = 600  # characters of an error or a result
LONG_CELL = 300.0  # seconds after which nobody is expected to sit and wait
GRACE = 180.0  # seconds in which a power-off can be cancelled
KEEP_ON = "keep_on"  # the file that cancels it
WATCH = "from nbutils import notices; notices.run_watcher()"  # the program of the watcher
Status = Literal["finished", "unfinished", "failed"]
KINDS = {"finished": "success", "unfinished": "warning", "failed": "failure"}  # as apprise calls them
TITLES = {
    "finished": "nbutils: run {name} has finished",
    "unfinished": "nbutils: run {name} has stopped before its end",
    "failed": "nbutils: run {name} has failed",
}

NATIVE = {  # addresses as the apps show them, where apprise does not know them, and what it calls them
    r"https://open\.feishu\.cn/open-apis/bot/v2/hook/([\w-]+)/?": r"feishu://\1",
    r"https://oapi\.dingtalk\.com/robot/send\?access_token=(\w+)": r"dingtalk://\1",
}
TAKEN = {  # the answer to a message that was taken: these refuse with HTTP 200, and apprise looks at the status alone
    "feishu": r'"(code|StatusCode)"\s*:\s*0\b', "lark": r'"(code|StatusCode)"\s*:\s*0\b',
    "dingtalk": r'"errcode"\s*:\s*0\b', "wecombot": r'"errcode"\s*:\s*0\b',
}  # fmt: skip


def require_settings() -> None:
    """Refuse other values of the variables; warn where no notice can be sent."""
    for name, allowed in ALLOWED.items():
        require_choice(name, os.environ.get(name) or "0", allowed)
    if _asks_for(NOTICE):
        try:
            _service()
        except CourseError as problem:
            print(f"[WARN] {problem}")


def _asks_for(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


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
    run: str = ""  # the folder, once it is open
    cell_began: float = field(default_factory=time.monotonic)
    watcher: subprocess.Popen[str] | None = None  # where the environment asks for a notice or a power-off

    def watch(self) -> None:
        """Where the environment asks for it, start the process that tells of the end."""
        if not distributed.is_main() or not any(map(_asks_for, ALLOWED)):
            return
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if _asks_for(NOTICE):  # Colab and Kaggle give a secret to the kernel alone
            env[URL] = platforms.secret(URL) or ""
            env[platforms.SECRETS_STATE] = platforms.detect().name
        self.watcher = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WATCH],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,  # a kernel is killed with its whole group, and Ctrl-C goes to one
        )
        atexit.register(self.dismiss)
        self._write()

    def dismiss(self) -> None:
        """There is nothing to tell: the process ends by itself, or does something else."""
        if self.watcher:
            with suppress(BrokenPipeError), self.watcher:
                self.watcher.kill()
            self.watcher = None

    def _write(self, **end: str) -> None:
        """Tell the watcher how things are."""
        if self.watcher:
            line = json.dumps({"lesson": self.lesson, "run": self.run, **end})
            with suppress(BrokenPipeError):  # somebody killed it
                print(line, file=self.watcher.stdin, flush=True)

    def set_lesson(self, lesson: str, run: RunFolder) -> None:
        """Note which lesson is under way, and its run."""
        self.lesson = lesson
        self.run = str(run.path)
        self._write()

    def failed(self, problem: object) -> None:
        """Tell an error; an interruption by hand is none."""
        if isinstance(problem, StoppedByHand) or not isinstance(problem, Exception):
            return
        text = str(problem)
        if not isinstance(problem, CourseError):
            text = describe(problem)
        line = mask_secrets(text).strip().partition("\n")[0]
        self.ended("unfinished" if isinstance(problem, Unfinished) else "failed", line)

    def ended(self, status: Status, message: str) -> None:
        """Have the watcher send a notice and power the machine off, as the environment asks, and print what it does."""
        if not self.watcher:
            self.watch()  # it had told of an end, and the learner went on
        if not self.watcher:
            return
        self._write(status=status, message=message)
        try:
            for line in self.watcher.stdout or ():
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            say("Interrupted: nothing more is sent, and the machine stays on.")
        self.dismiss()


_underway = Work("")  # of this process


def _leave_to_parent() -> None:
    """A process that was forked is not the work: its end tells nothing, and it must not hold the pipe open."""
    if _underway.watcher and _underway.watcher.stdin:
        _underway.watcher.stdin.close()
        _underway.watcher = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_to_parent)


def begin(lesson: str) -> Work:
    """From now on a failing cell or script is told; a CourseError ends a plain script with its message alone."""
    work = _set_underway(lesson)
    if platforms.in_kernel():
        events = sys.modules["IPython"].get_ipython().events
        events.register("pre_run_cell", _before_cell)  # once, however often it is called
        events.register("post_run_cell", _after_cell)  # before the kernel answers: papermill still waits
    else:
        sys.excepthook = _after_script
    return work


def _set_underway(lesson: str) -> Work:
    global _underway
    _underway.dismiss()  # the lesson is started again in the same kernel
    _underway = Work(lesson)
    _underway.watch()
    return _underway


def _before_cell(info: object) -> None:
    """Note when a cell begins."""
    _underway.cell_began = time.monotonic()


def _after_cell(result: Any) -> None:
    """Tell the error of a cell, if nobody watches or it came after minutes."""
    problem = result.error_in_exec or result.error_before_exec
    seconds = time.monotonic() - _underway.cell_began
    if problem and not (display.watched() and seconds < LONG_CELL):
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
    work = _set_underway(lesson)
    try:
        yield work
    except Exception as problem:
        work.failed(problem)
        raise


def run_watcher() -> None:
    """The program of the watcher: read how the work goes until it ends or its process does, and tell of that."""
    print_whatever()
    sys.stdout = LastingStream(sys.stdout)  # the one who reads it may end meanwhile
    killed = tr("its process was killed. Often the machine's memory (RAM) was full.")
    work = {"lesson": "", "run": "", "status": "failed", "message": killed}
    for line in sys.stdin:
        told = json.loads(line)
        work |= told
        if "status" in told:  # the end, after which nothing more is said
            break
    with suppress(CourseError):  # its own business is a notice
        platforms.prepare_network(platforms.detect(), probe=False)
    run = RunFolder(Path(work["run"])) if work["run"] else None
    tell(work["lesson"], run, work["status"], work["message"])  # type: ignore[arg-type]
    sys.stdout.flush()
    os._exit(0)  # a server that does not end its answer is not waited for


def tell(lesson: str, run: RunFolder | None, status: Status, message: str) -> None:
    """Where the environment asks for it, send a notice, then power off."""
    checkpoint, verified = _newest_checkpoint(run) if run else ("", None)
    lines = [f"{lesson}: {message}"[:MOST_CHARACTERS], checkpoint]
    if status != "finished":
        lines.append(tr("Start the same again, once the cause is mended: what is kept is not repeated."))
    folder = run.path if run else platforms.folders().keep
    keep_on = folder / KEEP_ON
    when = os.environ.get(POWER_OFF)
    ends = when == "always" or (when == "1" and status != "failed")
    stays_on = ""
    if ends:
        safe = verified or (verified is None and status != "finished")  # failed before the first: no loss
        stays_on = _why_on(keep_on, safe)
        todo = tr(
            "This machine is powered off in {seconds:.0f} s. To keep it on, create the file {file}.",
            seconds=GRACE,
            file=keep_on,
        )
        lines.append(stays_on or todo)
        print(*filter(None, lines), sep="\n", flush=True)
    if _asks_for(NOTICE):
        title = tr(TITLES[status], name=run.name if run else lesson)
        try:
            service = send(title, "\n".join(filter(None, lines)), KINDS[status])
            say("Notice sent to {service}.", service=service)
        except CourseError as problem:
            print(f"[WARN] {problem.seen}", flush=True)
    if ends and not stays_on:
        print(power_off(keep_on), flush=True)


def _newest_checkpoint(run: RunFolder) -> tuple[str, bool | None]:
    """What to tell of the newest checkpoint of a run, and whether it verifies; None if there is none."""
    folder = run.checkpoints
    try:
        kept = checkpoints.look(folder)
        if not kept:
            return tr("No checkpoint is kept yet."), None
        problem = checkpoints.defect(kept[0])
    except OSError as failed:
        problem = str(failed)
    if problem:
        text = tr("The newest checkpoint in {folder} does not verify: {problem}.", folder=folder, problem=problem)
        return text, False
    return tr("Checkpoint {step} verifies, in {folder}.", step=kept[0].step, folder=folder), True


def _why_on(keep_on: Path, safe: bool = True) -> str:
    """Why a machine is not switched off: the file, which counts once, or another training on it; empty if it is."""
    platform = platforms.detect()
    if platform.name != "autodl":
        return tr(
            "Not powered off: this is {name}, and only AutoDL's machines are switched off this way.",
            name=platform.name,
        )
    if not safe:
        return tr("Not powered off, because the run is not safe yet. Look at it, then switch off by hand.")
    if keep_on.exists():
        keep_on.unlink()
        return tr("Not powered off: the file {file} was there.", file=keep_on)
    folders = platforms.folders(platform)
    for run, training in trainings(folders.scratch, folders.keep).items():
        is_ended = training.pid == os.getppid()  # the parent of the watcher is the work that ended
        if training.is_here and training.state == "training" and not is_ended:
            return tr("Not powered off: run {run} is training on this machine.", run=run)
    return ""


def power_off(keep_on: Path) -> str:
    """Switch an AutoDL machine off after a while, unless that is cancelled; says what was done."""
    try:
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not keep_on.exists():
            time.sleep(0.5)
        if reason := _why_on(keep_on):
            return reason
        # without arguments: it would not be AutoDL's power-off
        subprocess.check_output([fs_root() / "usr/bin/shutdown"], stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError) as failed:
        problem = describe(failed)
        return tr("Not powered off ({said}). Switch the machine off on AutoDL's page, it costs money.", said=problem)
    return tr("Powered off. What is on the data disk stays for 15 days; start the same again to go on.")


def _service() -> Any:
    """What sends notices, a plugin of apprise; a CourseError says what to set if no secret tells."""
    from apprise import Apprise, AppriseAsset

    logging.getLogger("apprise").propagate = False  # it names addresses
    asset = AppriseAsset(
        http_redirects=False,
        default_service_retry=1,
        default_service_wait=PAUSE,
        service_timeout=0,  # its thread would be waited for when Python ends, as long as a server drips its answer
    )
    url = platforms.secret(URL) or ""
    for part in re.split(r"[/?&=@:]", url):  # what an answer may repeat of it
        if len(part) >= 16:
            remember_secret(part)
    known = url
    for pattern, address in NATIVE.items():
        known = re.sub(f"^{pattern}$", address, known)
    plugin: Any = Apprise.instantiate(known, asset)
    if plugin is None and url.startswith("http"):  # a server of the learner's own: apprise has a "-" before parameters
        plugin = Apprise.instantiate("json" + re.sub(r"([?&])", r"\1-", url).removeprefix("http"), asset)
    if plugin is None:
        raise CourseError(
            "No notice can be sent: {url} is not the address of a service.",
            todo=(
                "Set {url} to the address of a robot (Feishu, DingTalk, WeCom, Slack), of a server of your own or of "
                "the library apprise, as a secret or an environment variable; then try it with python -m nbutils "
                "notice."
            ),
            url=URL,
        )
    if plugin.secure_protocol == "feishu":
        plugin.notify_url = plugin.notify_url.rstrip("/")  # as Feishu itself writes it
    return plugin


def send(title: str, text: str, kind: str = "info") -> str:
    """Send a notice, and say who took it; a CourseError says why nobody did, without the address's secrets."""
    from apprise import Apprise, NotifyFormat

    service = _service()
    text = mask_secrets(text).encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")
    sender = Apprise()
    sender.add(service)
    results: list[Any] = []

    def deliver() -> None:
        results.append(sender.notify(text, mask_secrets(title), kind, body_format=NotifyFormat.TEXT))

    delivery = threading.Thread(target=deliver, daemon=True)
    with _answers() as answers:
        delivery.start()
        delivery.join(SECONDS)
    name = str(service.host if service.secure_protocol == "jsons" else service.service_name)
    problem = tr("no answer")
    for result in results:
        answer = answers[-1] if answers else ""
        if result and re.search(TAKEN.get(str(service.secure_protocol), ""), answer):
            return name
        problem = "; ".join(entry.message for entry in result.logs()) or answer[:200]
    raise CourseError(
        "No notice sent to {service} ({problem}).",
        todo=(
            "Check the address in {url} and the rules of the robot (one that demands a keyword gets nbutils), then try "
            "it with python -m nbutils notice."
        ),
        service=name,
        problem=mask_secrets(problem),
        url=URL,
    )


@contextmanager
def _answers() -> Iterator[list[str]]:
    """What servers answer within this block."""
    from requests import Response, Session

    answers: list[str] = []
    send_request = Session.send

    def noting(session: Session, request: Any, **options: Any) -> Response:
        answer = send_request(session, request, **options)
        answers.append(answer.text)
        return answer

    Session.send = noting  # type: ignore[method-assign, assignment]
    try:
        yield answers
    finally:
        Session.send = send_request  # type: ignore[method-assign]
