"""A chat with one model, or with several side by side: a box of widgets in a notebook, printed dialogue elsewhere.

Answers are streamed by threads, so that the kernel is free to hear the stop button. Only what ipywidgets 7.7 (Colab)
and 8 both have is used. Not here: servers (serving), and what a lesson asks.
"""

from __future__ import annotations

import html
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nbutils import dashboard

if TYPE_CHECKING:
    from openai import OpenAI

Message = dict[str, Any]
BEAT = 0.05  # seconds between two drawings of a growing answer
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
        stop, answer = stop or threading.Event(), ""
        self.said.append({"role": "user", "content": text})
        try:
            with self._open() as pieces:
                for piece in pieces:
                    if stop.is_set():  # leaving the block closes the stream, and the server frees the place
                        break
                    answer += (piece.choices[0].delta.content or "") if piece.choices else ""
                    yield answer
        finally:
            self.said += [{"role": "assistant", "content": answer}] if answer else []
            if not answer:
                self.said.pop()  # a question without an answer would confuse the next one

    def _open(self) -> Any:
        """Ask; while the server finds it too long, without the oldest question and answer."""
        from openai import BadRequestError

        kept, dropped = self.said, 0
        while True:
            try:
                messages: Any = [*self.opening, *kept]
                pieces = self.client.chat.completions.create(
                    model=self.model, messages=messages, stream=True, **self.settings
                )
                break
            except BadRequestError:
                if len(kept) < 3:
                    raise
                kept, dropped = kept[2:], dropped + 1
        self.said, self.forgotten = kept, self.forgotten + dropped
        return pieces

    def forget(self) -> None:
        """Begin anew."""
        self.said, self.forgotten = [], 0


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
        self.stopped.clear()
        self._grow(len(self.talks))
        self.running = [
            threading.Thread(target=self._answer, args=(place, text.strip()), daemon=True)
            for place in range(len(self.talks))
        ]
        for thread in self.running:
            thread.start()

    def begin_anew(self) -> None:
        """Forget everything that was said."""
        self.stopped.set()
        for thread in self.running:
            thread.join(10)
        for talk, column in zip(self.talks, self.columns, strict=True):
            talk.forget()
            self.shown[talk.name] = []
            column.value = page(talk.name, [])

    def _answer(self, place: int, text: str) -> None:
        """Let one column grow; the last one to end switches the buttons back."""
        talk, column, drawn, answer = self.talks[place], self.columns[place], 0.0, ""
        lines = self.shown[talk.name]
        lines += [("you", text), (talk.name, "")]
        column.value = page(talk.name, [*lines[:-1], (talk.name, "…")])
        try:
            for answer in talk.stream(text, self.stopped):
                lines[-1] = (talk.name, answer)
                if time.monotonic() - drawn > BEAT:
                    column.value, drawn = page(talk.name, lines), time.monotonic()
            lines[-1] = (talk.name, answer + (" [stopped]" if self.stopped.is_set() else ""))
        except Exception as problem:  # a thread has nobody to raise to: the column tells it
            lines[-1] = ("problem", plain(problem))
        column.value = page(talk.name, lines, talk.forgotten)
        self._grow(-1)

    def _grow(self, change: int) -> None:
        """So many more, or fewer, answers are growing; the buttons follow."""
        with self.lock:
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
