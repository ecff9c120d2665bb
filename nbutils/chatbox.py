"""A chat with one model, or with several side by side: widgets in a notebook, printed dialogue elsewhere.

Answers are streamed by threads, so that the kernel is free to hear the stop button. Only what both ipywidgets 7.7
(Colab) and 8 have is used.
"""

from __future__ import annotations

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
POLL_SECONDS = 0.05  # how often the stop button is looked at, and a growing answer drawn
CLOSE_SECONDS = 0.5  # for a stream to close; after that it closes when the server sends something


class Talk:
    """A conversation with one model on a server; when it gets too long for the server, it drops its oldest turns."""

    def __init__(
        self, name: str, client: OpenAI, model: str, *, opening: Sequence[Message] = (), **settings: Any
    ) -> None:
        self.name, self.client, self.model = name, client, model
        self.opening, self.settings = list(opening), settings  # settings: max_tokens, temperature, ...
        self.said: list[Message] = []
        self.forgotten = 0

    def stream(self, text: str, stop: threading.Event | None = None) -> Iterator[str]:
        """The answer so far, again and again while it grows; `stop` ends it and closes the connection."""
        before, answer = self.said, ""
        messages: list[Message] = [*before, {"role": "user", "content": text}]
        try:
            for chunk in _stream_until(stop or threading.Event(), lambda: self._create(messages)):
                answer += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                yield answer
        finally:
            if answer and self.said is before:  # a question without an answer would confuse the next one
                self.forgotten += (len(before) + 1 - len(messages)) // 2
                self.said = [*messages, {"role": "assistant", "content": answer}]

    def _create(self, messages: list[Message]) -> Any:
        """Ask; while the server finds it too long, `messages` loses its oldest question and answer."""
        from openai import BadRequestError

        while True:
            sent: Any = [*self.opening, *messages]
            try:
                return self.client.chat.completions.create(
                    model=self.model, messages=sent, stream=True, **self.settings
                )
            except BadRequestError:
                if len(messages) < 3:
                    raise
                del messages[:2]

    def forget(self) -> None:
        """Start a new conversation."""
        self.said, self.forgotten = [], 0


def _stream_until(stop: threading.Event, create: Callable[[], Any]) -> Iterator[Any]:
    """What a server streams, read by a thread: `stop` is heard at once, even while the server is silent."""
    chunks, opened, left = SimpleQueue[Any](), list[Any](), threading.Event()

    def read() -> None:
        end: Exception | None = None
        try:
            with create() as stream:  # leaving the block closes the stream, and the server frees its slot
                opened.append(stream)
                for chunk in stream:
                    if left.is_set():
                        break
                    chunks.put(chunk)
        except Exception as problem:  # raised below
            end = problem
        chunks.put(end)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not stop.is_set():
            with suppress(Empty):
                chunk = chunks.get(timeout=POLL_SECONDS)
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is None:
                    return
                yield chunk
    finally:
        left.set()
        if reader.is_alive():  # it waits for the next chunk; closing the stream from here would not wake it
            with suppress(Exception):  # no stream yet, a stream that is over, or one without a socket
                opened[0].response.extensions["network_stream"].get_extra_info("socket").shutdown(SHUT_RDWR)
            reader.join(CLOSE_SECONDS)


def chat(talks: Sequence[Talk], examples: Sequence[str], live: bool = True) -> Box | None:
    """Print the examples with every model's answer; below them, where somebody watches, a box to type in."""
    width = max(map(len, ["you", *(talk.name for talk in talks)]))
    for question in examples:
        print(f"{'you':{width}}  {question}")
        for talk in talks:
            *_, answer = "", *talk.stream(question)
            print(f"{talk.name:{width}}  {answer}")
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


class Box:
    """The widgets: a column per model, a line to type in, and buttons to send, to stop and to start again."""

    def __init__(self, talks: Sequence[Talk]) -> None:
        import ipywidgets as widgets

        self.talks, self.stopped = list(talks), threading.Event()
        self.turn: threading.Thread | None = None
        self.lines: list[list[tuple[str, str]]] = [[] for _ in talks]  # who said what, in each column
        column, narrow = widgets.Layout(width=f"{100 // len(self.talks)}%"), widgets.Layout(width="84px")
        self.columns = [widgets.HTML(layout=column) for _ in talks]
        wide = widgets.Layout(flex="1 1 auto", width="auto")
        self.question = widgets.Text(placeholder="Type a message and press Enter", layout=wide)
        self.send = widgets.Button(description="Send", button_style="primary", layout=narrow)
        self.stop = widgets.Button(description="Stop", layout=narrow)
        self.anew = widgets.Button(description="New chat", layout=narrow)
        line = widgets.HBox([self.question, self.send, self.stop, self.anew])
        self.whole = widgets.VBox([widgets.HBox(self.columns), line], layout=widgets.Layout(max_width="980px"))
        with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
            warnings.simplefilter("ignore")
            self.question.on_submit(lambda _: self.ask(self.question.value))
        self.send.on_click(lambda _: self.ask(self.question.value))
        self.stop.on_click(lambda _: self.stopped.set())
        self.anew.on_click(lambda _: self.begin_anew())
        self.begin_anew()

    @property
    def busy(self) -> bool:
        """Whether an answer is still growing."""
        return self.turn is not None

    def ask(self, text: str) -> None:
        """Ask every model the same; nothing happens while they answer."""
        if self.busy or not text.strip():
            return
        self.question.value, self.stopped = "", threading.Event()
        self.turn = threading.Thread(target=self._take_turn, args=(text.strip(), self.stopped), daemon=True)
        self._update_buttons()
        self.turn.start()

    def begin_anew(self) -> None:
        """Forget everything; answers that are still growing end by themselves, and nobody sees them."""
        self.stopped.set()
        self.turn = None
        for place, talk in enumerate(self.talks):
            talk.forget()
            self.lines[place] = []
            self._draw(place, self.lines[place])
        self._update_buttons()

    def _take_turn(self, text: str, stopped: threading.Event) -> None:
        """Let all columns grow side by side; then the buttons are switched back, unless a new chat has begun."""
        places = range(len(self.talks))
        answers = [threading.Thread(target=self._answer, args=(at, text, stopped), daemon=True) for at in places]
        for thread in answers:
            thread.start()
        for thread in answers:
            thread.join()
        if self.turn is threading.current_thread():
            self.turn = None
            self._update_buttons()

    def _answer(self, place: int, text: str, stopped: threading.Event) -> None:
        talk, lines, drawn, answer = self.talks[place], self.lines[place], 0.0, ""
        lines += [("you", text), (talk.name, "…")]
        self._draw(place, lines)
        try:
            for answer in talk.stream(text, stopped):
                lines[-1] = (talk.name, answer)
                if time.monotonic() - drawn > POLL_SECONDS:
                    self._draw(place, lines)
                    drawn = time.monotonic()
            lines[-1] = (talk.name, answer + (" [stopped]" if stopped.is_set() else ""))
        except Exception as problem:  # a thread has nobody to raise to: the column shows it
            lines[-1] = ("problem", _explain(problem))
        self._draw(place, lines)

    def _draw(self, place: int, lines: list[tuple[str, str]]) -> None:
        """Show a column, unless a new chat has begun since."""
        if self.lines[place] is lines:
            talk = self.talks[place]
            page = dashboard.render_html("chat.html", name=talk.name, lines=lines, forgotten=talk.forgotten)
            self.columns[place].value = page

    def _update_buttons(self) -> None:
        self.send.disabled, self.stop.disabled = self.busy, not self.busy


def _explain(problem: Exception) -> str:
    """What went wrong, and what to do."""
    from openai import APIConnectionError, BadRequestError

    if isinstance(problem, APIConnectionError):
        return "The server does not answer. Is it still running? Start it again, then send this once more."
    if isinstance(problem, BadRequestError):
        return f"The server does not take this: {problem.message} Try a shorter message or a new chat."
    return f"{type(problem).__name__}: {problem}"
