"""A chat with a served model: widgets of ipywidgets 7.7 to 8, printed dialogue elsewhere."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nbutils import display
from nbutils.language import printable, tr

if TYPE_CHECKING:
    from openai import OpenAI

DRAW_SECONDS = 0.05  # between two drawings of a growing answer; servers of notebooks drop what comes faster


class Talk:
    """A conversation with one model on a server; the settings are max_tokens, temperature, ..."""

    def __init__(self, name: str, client: OpenAI, model: str, *, opening: Sequence[Any] = (), **settings: Any) -> None:
        self.name = name
        self.client = client
        self.opening = opening
        self.settings = {"model": model, "stream": True, **settings}
        self.history: list[dict[str, str]] = []

    def stream(self, text: str, stop: threading.Event | None = None) -> Iterator[str]:
        """The answer so far, again and again while it grows; `stop` ends it with the next piece."""
        question = {"role": "user", "content": text}
        messages: Any = [*self.opening, *self.history, question]
        answer = ""
        with self.client.chat.completions.create(messages=messages, **self.settings) as stream:
            for chunk in stream:
                if stop and stop.is_set():
                    break  # the stream is closed, and the server stops too
                for choice in chunk.choices:  # the last chunk has only the usage
                    answer += choice.delta.content or ""
                yield answer
        if answer:  # a question without an answer would confuse the next one
            self.history += [question, {"role": "assistant", "content": answer}]


def chat(talk: Talk, examples: Sequence[str], live: bool = True) -> Box | None:
    """Print the examples with the model's answers; below them, where somebody watches, a box to type in.

    Example: chat_widget.chat(chat_widget.Talk("model", client, "course"), ["Where is order 2041?"])
    """
    width = max(display.width(tr("you")), display.width(talk.name))
    for question in examples:
        answers = list(talk.stream(question)) or [""]
        print(f"{display.pad(tr('you'), width)}  {question}")
        print(f"{display.pad(talk.name, width)}  {printable(answers[-1])}")
    talk.history.clear()
    if not live or not display.watched():
        return None
    from IPython import display as ipython

    box = Box(talk)
    ipython.display(box.whole)
    return box


class Box:
    """The widgets: what was said, a line to type in, and a button to stop. To start over, run the cell again."""

    def __init__(self, talk: Talk) -> None:
        import ipywidgets as widgets

        self.talk = talk
        self.stopped = threading.Event()
        self.answering = False
        self.lines: list[tuple[str, str]] = []  # who said what
        self.dialogue = widgets.HTML()
        self.question = widgets.Text(
            placeholder=tr("Type a message and press Enter"),
            layout=widgets.Layout(flex="1 1 auto", width="auto"),
        )
        self.stop = widgets.Button(description=tr("Stop"), disabled=True, layout=widgets.Layout(width="84px"))
        self.whole = widgets.VBox(
            [self.dialogue, widgets.HBox([self.question, self.stop])],
            layout=widgets.Layout(max_width="980px"),
        )
        with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
            warnings.simplefilter("ignore")
            self.question.on_submit(lambda _: self.ask(self.question.value))
        self.stop.on_click(lambda _: self.stopped.set())
        self._draw()

    def ask(self, text: str) -> None:
        """Ask the model; nothing happens while it answers."""
        if self.answering or not text.strip():
            return
        self.question.value = ""
        self.stop.disabled = False
        self.answering = True
        self.stopped.clear()
        threading.Thread(target=self._answer, args=(text.strip(),), daemon=True).start()

    def _answer(self, text: str) -> None:
        name = self.talk.name
        answer = ""
        self.lines += [("you", text), (name, "…")]
        self._draw()
        try:
            for answer in self.talk.stream(text, self.stopped):
                self.lines[-1] = (name, answer)
                if time.monotonic() - self.drawn > DRAW_SECONDS:
                    self._draw()
            if self.stopped.is_set():
                answer += tr(" [stopped]")
            self.lines[-1] = (name, answer)
        except Exception as problem:  # a thread has nobody to raise to: the box shows it
            self.lines[-1] = ("problem", f"{type(problem).__name__}: {problem} {tr('Is the server still running?')}")
        self._draw()
        self.stop.disabled = True
        self.answering = False

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self.dialogue.value = display.render("chat.html", name=self.talk.name, lines=self.lines)
