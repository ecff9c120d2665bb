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
from urllib.parse import parse_qsl, urlsplit

from nbutils import checkpoints, display, distributed, platforms
from nbutils.errors import CourseError, LessonFailed, StoppedByHand, Unfinished, require_choice
from nbutils.files import fs_root
from nbutils.language import print_whatever, tr
from nbutils.masking import mask_secrets, remember_secret
from nbutils.processes import LastingStream
from nbutils.record import RunFolder
from nbutils.tracking import trainings

NOTICE = "NBUTILS_NOTICE"
POWER_OFF = "NBUTILS_POWER_OFF"
ALLOWED = {NOTICE: ("0", "1"), POWER_OFF: ("0", "1", "always")}
URL = "NBUTILS_NOTICE_URL"
TOKEN = "AUTODL_TOKEN"
AUTODL_URL = "https://www.autodl.com/api/v1/wechat/message/send"
SECONDS = 40.0  # for both attempts together
PAUSE = 2.0  # between them
MOST_BYTES = 1900  # WeCom takes 2048 with the title
MOST_CHARACTERS = 600  # characters of an error or a result
LONG_CELL = 300.0  # seconds after which nobody is expected to sit and wait
GRACE = 180.0  # seconds in which a power-off can be cancelled
KEEP_ON = "keep_on"  # the file that cancels it
WATCH = "from nbutils import notices; notices.run_watcher()"  # the program of the watcher
Status = Literal["finished", "unfinished", "failed"]

NATIVE = {  # addresses as the apps show them, where apprise does not know them, and what it calls them
    r"https://open\.feishu\.cn/open-apis/bot/v2/hook/([\w-]+)/?": r"feishu://\1",
    r"https://oapi\.dingtalk\.com/robot/send\?access_token=(\w+)": r"dingtalk://\1",
}
TAKEN = {  # the answer to a message that was taken: these refuse with HTTP 200, and apprise looks at the status alone
    "feishu": r'"(code|StatusCode)"\s*:\s*0\b', "lark": r'"(code|StatusCode)"\s*:\s*0\b',
    "dingtalk": r'"errcode"\s*:\s*0\b', "wecombot": r'"errcode"\s*:\s*0\b',
}  # fmt: skip
# with a port up to 65535
WEB_ADDRESS = r"https?://[\w.-]+(:(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]))?([/?]\S*)?$"
ONLY_OURS = {"version": "", "attachments": "", "type": ""}  # fields of apprise's JSON that are left out


def require_settings() -> None:
    """Refuse other values of the variables; warn where no notice can be sent."""
    for name, allowed in ALLOWED.items():
        require_choice(name, os.environ.get(name) or "0", allowed)
    if _wants_notice():
        try:
            _service("", "")
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
    watcher: subprocess.Popen[str] | None = None  # where the environment asks for a notice or a power-off

    def watch(self) -> None:
        """Where the environment asks for it, start the process that tells of the end."""
        powers_off = os.environ.get(POWER_OFF) in ("1", "always")
        if not distributed.is_main() or not (_wants_notice() or powers_off):
            return
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if _wants_notice():  # Colab and Kaggle give a secret to the kernel alone
            for name in (URL, TOKEN):
                env[name] = platforms.secret(name) or ""
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
            self.watcher.kill()
            self.watcher.communicate()
            self.watcher = None

    def _write(self, **end: str) -> None:
        """Tell the watcher how things are."""
        if not self.watcher or not self.watcher.stdin:
            return
        now = {"lesson": self.lesson, "run": str(self.run.path) if self.run else ""}
        with suppress(BrokenPipeError):  # somebody killed it
            self.watcher.stdin.write(json.dumps(now | end) + "\n")
            self.watcher.stdin.flush()

    def set_lesson(self, lesson: str, run: RunFolder | None) -> None:
        """Note which lesson is under way, and its run once that is open."""
        self.lesson = lesson
        self.run = run
        self._write()

    def failed(self, problem: object) -> None:
        """Tell an error; an interruption by hand is none."""
        if isinstance(problem, StoppedByHand) or not isinstance(problem, Exception) or not distributed.is_main():
            return
        text = str(problem)
        if isinstance(problem, LessonFailed):
            text = problem.problem
        elif not isinstance(problem, CourseError):
            text = f"{type(problem).__name__}: {problem}"
        line = mask_secrets(text).strip().partition("\n")[0]
        if self.lesson not in line:
            line = f"{self.lesson}: {line}"
        self.ended("unfinished" if isinstance(problem, Unfinished) else "failed", line)

    def ended(self, status: Status, message: str) -> None:
        """Where the environment asks for it, have a notice sent and the machine powered off, and print what is done."""
        if not self.watcher:
            self.watch()
        if not self.watcher:
            return
        self._write(status=status, message=message)
        try:
            for line in self.watcher.stdout or ():
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            print(tr("Interrupted: nothing more is sent, and the machine stays on."), flush=True)
        self.dismiss()


def _wants_notice() -> bool:
    return os.environ.get(NOTICE) == "1"


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
    return _underway


def _before_cell(info: object) -> None:
    """Note when a cell begins."""
    _underway.cell_began = time.monotonic()


def _after_cell(result: Any) -> None:
    """Tell the error of a cell, if nobody watches or it came after minutes."""
    problem = result and (result.error_in_exec or result.error_before_exec)
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
    work.watch()
    try:
        yield work
    except Exception as problem:
        work.failed(problem)
        raise


def run_watcher() -> None:
    """The program of the watcher: read how the work goes until it ends or its process does, and tell of that."""
    print_whatever()
    sys.stdout = LastingStream(sys.stdout)  # the one who reads it may end meanwhile
    work = {"lesson": "", "run": ""}
    for line in sys.stdin:
        work = json.loads(line)
        if "status" in work:
            break
    run = RunFolder(Path(work["run"])) if work["run"] else None
    with suppress(CourseError):  # its own business is a notice
        platforms.prepare_network(platforms.detect(), probe=False)
    if "status" in work:
        tell(work["lesson"], run, work["status"], work["message"])  # type: ignore[arg-type]
    else:
        message = tr(
            "{lesson}: its process was killed. Often the machine's memory (RAM) was full.", lesson=work["lesson"]
        )
        tell(work["lesson"], run, "failed", message)
    sys.stdout.flush()
    os._exit(0)  # a server that does not end its answer is not waited for


def tell(lesson: str, run: RunFolder | None, status: Status, message: str) -> None:
    """Where the environment asks for it, send a notice, then power off."""
    message = message[:MOST_CHARACTERS]
    when = os.environ.get(POWER_OFF, "")
    off = when == "always" or (when == "1" and status != "failed")
    platform = platforms.detect()
    checkpoint, verified = _newest_checkpoint(run) if run else ("", None)
    folder = run.path if run else platforms.folders(platform).keep
    keep_on = folder / KEEP_ON
    stays_on = ""
    power = ""
    if off:
        safe = verified or (verified is None and status != "finished")  # failed before the first: no loss
        stays_on = _why_on(platform, safe, keep_on)
        power = stays_on or tr(
            "This machine is powered off in {seconds:.0f} s. To keep it on, create the file {file}.",
            seconds=GRACE,
            file=keep_on,
        )
    if _wants_notice():
        name = run.name if run else lesson
        todo = ""
        if status != "finished":
            todo = tr("Start the same again, once the cause is mended: what is kept is not repeated.")
        text = _lines(message, checkpoint, todo, power)
        try:
            print(tr("Notice sent to {service}.", service=send(_title(status, name), text, status, name)), flush=True)
        except CourseError as problem:
            print(f"[WARN] {problem.seen}", flush=True)
    if off:
        print(_lines(message, checkpoint, power), flush=True)
        if not stays_on:
            print(power_off(keep_on), flush=True)


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


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


def _title(status: Status, name: str) -> str:
    """The title of a notice."""
    if status == "finished":
        return tr("nbutils: run {name} has finished", name=name)
    if status == "unfinished":
        return tr("nbutils: run {name} has stopped before its end", name=name)
    return tr("nbutils: run {name} has failed", name=name)


def _why_on(platform: platforms.Platform, safe: bool, keep_on: Path) -> str:
    """Why a machine is not switched off; empty if it is."""
    if platform.name != "autodl":
        return tr(
            "Not powered off: this is {name}, and only AutoDL's machines are switched off this way.",
            name=platform.name,
        )
    if not safe:
        return tr("Not powered off, because the run is not safe yet. Look at it, then switch off by hand.")
    return _kept_on(keep_on)


def _kept_on(keep_on: Path) -> str:
    """What keeps a machine on: the file, which counts once, or another training on it; empty if nothing does."""
    if keep_on.exists():
        keep_on.unlink()
        return tr("Not powered off: the file {file} was there.", file=keep_on)
    folders = platforms.folders(platforms.detect())
    for run, training in trainings(folders.scratch, folders.keep).items():
        if (
            training.is_here and training.trains and training.pid != os.getppid()
        ):  # the parent of the watcher is the work that ended
            return tr("Not powered off: run {run} is training on this machine.", run=run)
    return ""


def power_off(keep_on: Path) -> str:
    """Switch an AutoDL machine off after a while, unless that is cancelled; says what was done."""
    try:
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not keep_on.exists():
            time.sleep(0.5)
        if kept := _kept_on(keep_on):
            return kept
        # without arguments: it would not be AutoDL's power-off
        subprocess.check_output([fs_root() / "usr/bin/shutdown"], stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError) as failed:
        problem = mask_secrets(f"{type(failed).__name__}: {failed}")
        return tr("Not powered off ({said}). Switch the machine off on AutoDL's page, it costs money.", said=problem)
    return tr("Powered off. What is on the data disk stays for 15 days; start the same again to go on.")


def _service(run: str, status: str) -> Any:
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
    token = "" if url else platforms.secret(TOKEN)
    if token:
        settings = _json_post(AUTODL_URL, message="content", name="finetune-course")
        plugin: Any = Apprise.instantiate(settings | {"headers": {"Authorization": token}}, asset)
        plugin.service_name = "AutoDL"
        plugin.taken = r'(?i)"success"'
        return plugin
    for part in re.split(r"[/?&=@:]", url):  # what an answer may repeat of it
        if len(part) >= 16:
            remember_secret(part)
    known = url
    for pattern, scheme in NATIVE.items():
        known = re.sub(f"^{pattern}$", scheme, known)
    plugin = Apprise.instantiate(known, asset)
    if plugin is None and re.match(WEB_ADDRESS, url):
        plugin = Apprise.instantiate(_json_post(url, message="text", run=run, status=status), asset)
        plugin.service_name = plugin.host
    if plugin is None:
        state = tr("no address of a service") if url else tr("not set")
        raise CourseError(
            tr("No notice can be sent: {url} is {state}.", url=URL, state=state),
            todo=tr(
                "Set {url} to the address of a robot (Feishu, DingTalk, WeCom, Slack), of a server of your own or of "
                "the library apprise, or {token} to the token of your AutoDL account, as a secret or an environment "
                "variable; then try it with python -m nbutils notice.",
                url=URL,
                token=TOKEN,
            ),
        )
    if plugin.secure_protocol == "feishu":
        plugin.notify_url = plugin.notify_url.rstrip("/")  # as Feishu itself writes it
    plugin.taken = TAKEN.get(str(plugin.secure_protocol), "")
    return plugin


def _json_post(url: str, **fields: str) -> dict[str, Any]:
    """What apprise needs to post JSON to a web address: the title, and these fields."""
    parts = urlsplit(url)
    return {
        "schema": "jsons" if parts.scheme == "https" else "json",
        "host": parts.hostname,
        "port": parts.port,
        "fullpath": parts.path or "/",
        "params": dict(parse_qsl(parts.query)),
        "payload": ONLY_OURS | fields,
    }


def send(title: str, text: str, status: str, run: str) -> str:
    """Send a notice, and say who took it; a CourseError says why nobody did, without the address's secrets."""
    from apprise import Apprise, NotifyFormat

    service = _service(run, status)
    text = mask_secrets(text).encode()[:MOST_BYTES].decode(errors="ignore")
    sender = Apprise()
    sender.add(service)
    results: list[Any] = []

    def deliver() -> None:
        results.append(sender.notify(text, mask_secrets(title), body_format=NotifyFormat.TEXT))

    delivery = threading.Thread(target=deliver, daemon=True)
    with _answers() as answers:
        delivery.start()
        delivery.join(SECONDS)
    name = str(service.service_name)
    problem = tr("no answer")
    for result in results:
        answer = answers[-1] if answers else ""
        if result and re.search(service.taken, answer):
            return name
        problem = "; ".join(entry.message for entry in result.logs()) or answer[:200]
    raise CourseError(
        tr("No notice sent to {service} ({problem}).", service=name, problem=mask_secrets(problem)),
        todo=tr(
            "Check the address in {url} (or the token in {token}) and the rules of the robot (one that demands a "
            "keyword gets nbutils), then try it with python -m nbutils notice.",
            url=URL,
            token=TOKEN,
        ),
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
