"""A chat with one model, or with several side by side: a box of widgets in a notebook, printed dialogue elsewhere.

Answers are streamed by threads, so that the kernel is free to hear the stop button. Only what ipywidgets 7.7 (Colab)
and 8 both have is used. Not here: servers (serving), and what a lesson asks.
"""

from __future__ import annotations

import html
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any

from nbutils import dashboard

if TYPE_CHECKING:
    from openai import OpenAI

Message = dict[str, Any]
BEAT = 0.05  # seconds between two drawings of a growing answer
PATIENCE = 0.5  # seconds for a stream to close; after that it closes when the server speaks again
HEIGHT = 380  # pixels of a column before it scrolls


class Talk:
    """A conversation with one model on a server; it remembers what was said, and forgets the oldest when it must."""

    def __init__(
        self, name: str, client: OpenAI, model: str, *, opening: Sequence[Message] = (), **settings: Any
    ) -> None:
        self.name, self.client, self.model = name, client, model
        self.opening, self.settings = list(opening), settings  # settings: max_tokens, temperature, ...
        self.said: list[Message] = []
        self.forgotten = 0

    def stream(self, text: str, stop: threading.Event | None = None) -> Iterator[str]:
        """The answer so far, again and again while it grows; `stop` ends it and hangs up."""
        before, answer = self.said, ""
        asked: list[Message] = [*before, {"role": "user", "content": text}]
        try:
            for piece in overheard(lambda: self._open(asked), stop or threading.Event()):
                answer += (piece.choices[0].delta.content or "") if piece.choices else ""
                yield answer
        finally:
            if answer and self.said is before:  # a question without an answer would confuse the next one
                self.forgotten += (len(before) + 1 - len(asked)) // 2
                self.said = [*asked, {"role": "assistant", "content": answer}]

    def _open(self, asked: list[Message]) -> Any:
        """Ask; while the server finds it too long, `asked` loses its oldest question and answer."""
        from openai import BadRequestError

        while True:
            try:
                messages: Any = [*self.opening, *asked]
                return self.client.chat.completions.create(
                    model=self.model, messages=messages, stream=True, **self.settings
                )
            except BadRequestError:
                if len(asked) < 3:
                    raise
                del asked[:2]

    def forget(self) -> None:
        """Begin anew."""
        self.said, self.forgotten = [], 0


def overheard(start: Callable[[], Any], stop: threading.Event) -> Iterator[Any]:
    """What a server streams, read by a thread: `stop` is heard at once, even while the server is silent."""
    heard, opened, left = SimpleQueue[Any](), list[Any](), threading.Event()

    def read() -> None:
        end: Exception | None = None
        try:
            with start() as pieces:  # leaving the block closes the stream, and the server frees the place
                opened.append(pieces)
                for piece in pieces:
                    if left.is_set():
                        break
                    heard.put(piece)
        except Exception as problem:  # told to whoever listens
            end = problem
        heard.put(end)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not stop.is_set():
            with suppress(Empty):
                piece = heard.get(timeout=BEAT)
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    return
                yield piece
    finally:
        left.set()
        hang_up(opened, reader)


def hang_up(opened: Sequence[Any], reader: threading.Thread) -> None:
    """End a stream whose reader may be waiting for the next piece; closing it from here would not wake the reader."""
    if reader.is_alive():
        with suppress(Exception):  # no stream yet, a stream that is over, or one without a socket
            opened[0].response.extensions["network_stream"].get_extra_info("socket").shutdown(SHUT_RDWR)
        reader.join(PATIENCE)


def chat(talks: Sequence[Talk], examples: Sequence[str], live: bool = True) -> Box | None:
    """Print the examples with every model's answer; below them, where somebody watches, a box to type in."""
    print_dialogue(talks, examples)
    for talk in talks:
        talk.forget()
    if not live or not dashboard.watched():
        return None
    try:
        from IPython.display import display

        box = Box(talks)
    except ImportError:
        print("There is no chat box: it needs ipywidgets.")
        return None
    display(box.whole)
    return box


def print_dialogue(talks: Sequence[Talk], questions: Sequence[str]) -> None:
    """Question by question, each model's answer below it."""
    width = max(map(len, ["you", *(talk.name for talk in talks)]))
    for question in questions:
        print(f"{'you':{width}}  {question}")
        for talk in talks:
            grown = list(talk.stream(question))
            print(f"{talk.name:{width}}  {grown[-1] if grown else ''}")


class Box:
    """The widgets: a column per model, a line to type in, and buttons to send, to stop and to begin anew."""

    def __init__(self, talks: Sequence[Talk]) -> None:
        import ipywidgets as widgets

        self.talks, self.stopped, self.lock = list(talks), threading.Event(), threading.Lock()
        self.growing, self.running = 0, list[threading.Thread]()
        self.shown: dict[str, list[tuple[str, str]]] = {talk.name: [] for talk in talks}
        share = widgets.Layout(width=f"{100 // len(self.talks)}%")
        self.columns = [widgets.HTML(value=page(talk.name, []), layout=share) for talk in self.talks]
        self.question = widgets.Text(
            placeholder="Type a message and press Enter", layout=widgets.Layout(flex="1 1 auto", width="auto")
        )
        narrow = widgets.Layout(width="84px")
        self.send = widgets.Button(description="Send", button_style="primary", layout=narrow)
        self.stop = widgets.Button(description="Stop", disabled=True, layout=narrow)
        self.anew = widgets.Button(description="New chat", layout=narrow)
        line = widgets.HBox([self.question, self.send, self.stop, self.anew])
        self.whole = widgets.VBox([widgets.HBox(self.columns), line], layout=widgets.Layout(max_width="980px"))
        self._listen()

    def _listen(self) -> None:
        with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
            warnings.simplefilter("ignore")
            self.question.on_submit(lambda _: self.ask(self.question.value))
        self.send.on_click(lambda _: self.ask(self.question.value))
        self.stop.on_click(lambda _: self.stopped.set())
        self.anew.on_click(lambda _: self.begin_anew())

    @property
    def busy(self) -> bool:
        """Whether an answer is still growing."""
        return self.growing > 0

    def ask(self, text: str) -> None:
        """Put the same question to every model; nothing happens while they answer."""
        if self.busy or not text.strip():
            return
        self.question.value = ""
        self.stopped = threading.Event()  # of these answers only: others may still be ending
        self._grow(len(self.talks), self.stopped)
        self.running = [
            threading.Thread(target=self._answer, args=(place, text.strip(), self.stopped), daemon=True)
            for place in range(len(self.talks))
        ]
        for thread in self.running:
            thread.start()

    def begin_anew(self) -> None:
        """Forget everything that was said; answers that are still growing end by themselves, and nobody sees them."""
        self.stopped.set()
        with self.lock:
            self.stopped, self.growing = threading.Event(), 0
        self._grow(0, self.stopped)
        for talk, column in zip(self.talks, self.columns, strict=True):
            talk.forget()
            self.shown[talk.name] = []
            column.value = page(talk.name, [])

    def _answer(self, place: int, text: str, stopped: threading.Event) -> None:
        """Let one column grow; the last one to end switches the buttons back."""
        talk, drawn, answer = self.talks[place], 0.0, ""
        lines = self.shown[talk.name]
        lines += [("you", text), (talk.name, "…")]
        self._draw(place, lines)
        try:
            for answer in talk.stream(text, stopped):
                lines[-1] = (talk.name, answer)
                if time.monotonic() - drawn > BEAT:
                    self._draw(place, lines)
                    drawn = time.monotonic()
            lines[-1] = (talk.name, answer + (" [stopped]" if stopped.is_set() else ""))
        except Exception as problem:  # a thread has nobody to raise to: the column tells it
            lines[-1] = ("problem", plain(problem))
        self._draw(place, lines)
        self._grow(-1, stopped)

    def _draw(self, place: int, lines: list[tuple[str, str]]) -> None:
        """Show a column, unless a new chat has begun since."""
        talk = self.talks[place]
        if self.shown[talk.name] is lines:
            self.columns[place].value = page(talk.name, lines, talk.forgotten)

    def _grow(self, change: int, turn: threading.Event) -> None:
        """So many more, or fewer, answers are growing; the buttons follow. A turn that was left does not count."""
        with self.lock:
            if turn is self.stopped:
                self.growing += change
                self.send.disabled, self.stop.disabled = self.busy, not self.busy


def page(name: str, lines: Sequence[tuple[str, str]], forgotten: int = 0) -> str:
    """A column: its model's name and what was said, the newest in view."""
    said = "".join(_bubble(who, text) for who, text in lines) or "<div style='opacity:.5'>Nothing said yet.</div>"
    if forgotten:
        said = f"<div style='opacity:.5'>The first {forgotten} of what was said no longer fit in.</div>{said}"
    scroll = f"display:flex;flex-direction:column-reverse;overflow-y:auto;min-height:120px;max-height:{HEIGHT}px"
    title = "font-weight:bold;border-bottom:1px solid rgba(128,128,128,.35);padding:2px"
    return (
        "<div style='margin:0 6px;font-family:sans-serif;font-size:13px;line-height:1.5'>"
        f"<div style='{title}'>{html.escape(name)}</div>"
        f"<div style='{scroll}'><div style='padding:6px 2px'>{said}</div></div></div>"
    )


def _bubble(who: str, text: str) -> str:
    """One thing said: questions stand right, answers left, problems in the colour of alarm."""
    side = "margin:4px 0 4px 18%" if who == "you" else "margin:4px 18% 4px 0"
    mark = {"you": f"border-right:3px solid {dashboard.ACCENT}", "problem": f"border-left:3px solid {dashboard.ALARM}"}
    style = f"{side};padding:5px 9px;border-radius:4px;background:rgba(128,128,128,.12);{mark.get(who, '')}"
    return f"<div style='{style};white-space:pre-wrap;overflow-wrap:anywhere'>{html.escape(text)}</div>"


def plain(problem: Exception) -> str:
    """What went wrong, and what to do."""
    from openai import APIConnectionError, AuthenticationError, BadRequestError

    if isinstance(problem, APIConnectionError):
        return "The server does not answer. Is it still running? Start it again, then send this once more."
    if isinstance(problem, AuthenticationError):
        return "The server asks for its key: make the client with server.client()."
    if isinstance(problem, BadRequestError):
        return f"The server does not take this: {problem.message} Try a shorter message or a new chat."
    return f"{type(problem).__name__}: {problem}"
