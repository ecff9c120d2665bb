"""A chat with one model, or with several side by side: widgets of ipywidgets 7.7 to 8, printed dialogue elsewhere."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nbutils import display
from nbutils.language import printable, tr

if TYPE_CHECKING:
    from openai import OpenAI

POLL_SECONDS = 0.05  # how often a growing answer is looked at; servers of notebooks drop what comes faster
CLOSE_SECONDS = 0.5  # for a stream to close; after that it closes when the server sends something


class Talk:
    """A conversation with one model on a server; the settings are max_tokens, temperature, ..."""

    def __init__(self, name: str, client: OpenAI, model: str, *, opening: Sequence[Any] = (), **settings: Any) -> None:
        self.name, self.client, self.model = name, client, model
        self.opening, self.settings, self.said = list(opening), settings, list[dict[str, Any]]()

    def stream(self, text: str, stop: threading.Event | None = None) -> Iterator[str]:
        """The answer so far, again and again while it grows; `stop` ends it at once, even if the server is silent."""
        messages: Any = [*self.opening, *self.said, {"role": "user", "content": text}]
        stop, pieces, problems = stop or threading.Event(), list[str](), list[Exception]()
        options = self.settings | {"model": self.model, "messages": messages, "stream": True}

        def read() -> None:  # in a thread: nothing else can leave a read that waits for a silent server
            try:
                with self.client.chat.completions.create(**options) as stream:  # closed at the end: the server stops
                    for chunk in stream:
                        if stop.is_set():
                            break
                        pieces.append((chunk.choices[0].delta.content or "") if chunk.choices else "")
            except Exception as problem:  # raised below
                problems.append(problem)

        reader, answer, ended = threading.Thread(target=read, daemon=True), "", False
        reader.start()
        while not ended:
            reader.join(POLL_SECONDS)
            ended = stop.is_set() or not reader.is_alive()
            if answer != (answer := "".join(pieces)):
                yield answer
        reader.join(CLOSE_SECONDS)
        if problems:
            raise problems[0]
        if answer:  # a question without an answer would confuse the next one
            self.said += [messages[-1], {"role": "assistant", "content": answer}]


def chat(talks: Sequence[Talk], examples: Sequence[str], live: bool = True) -> Box | None:
    """Print the examples with every model's answer; below them, where somebody watches, a box to type in."""
    width = max(map(display.width, [tr("you"), *(talk.name for talk in talks)]))
    for question in examples:
        print(f"{display.pad(tr('you'), width)}  {question}")
        for talk in talks:
            *_, answer = "", *talk.stream(question)
            print(f"{display.pad(talk.name, width)}  {printable(answer)}")
    for talk in talks:
        talk.said = []
    if not live or not display.watched():
        return None
    from IPython import display as ipython

    box = Box(talks)
    ipython.display(box.whole)
    return box


class Box:
    """The widgets: a column per model, a line to type in, and a button to stop. To start over, run the cell again."""

    def __init__(self, talks: Sequence[Talk]) -> None:
        import ipywidgets as widgets

        self.talks, self.stopped, self.answering = list(talks), threading.Event(), False
        self.lines: list[list[tuple[str, str]]] = [[] for _ in talks]  # who said what, in each column
        self.columns = [widgets.HTML(layout=widgets.Layout(width=f"{100 // len(self.talks)}%")) for _ in talks]
        wide = widgets.Layout(flex="1 1 auto", width="auto")
        self.question = widgets.Text(placeholder=tr("Type a message and press Enter"), layout=wide)
        self.stop = widgets.Button(description=tr("Stop"), disabled=True, layout=widgets.Layout(width="84px"))
        line = widgets.HBox([self.question, self.stop])
        self.whole = widgets.VBox([widgets.HBox(self.columns), line], layout=widgets.Layout(max_width="980px"))
        with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
            warnings.simplefilter("ignore")
            self.question.on_submit(lambda _: self.ask(self.question.value))
        self.stop.on_click(lambda _: self.stopped.set())
        for place in range(len(self.talks)):
            self._draw(place)

    def ask(self, text: str) -> None:
        """Ask every model the same; nothing happens while they answer."""
        if self.answering or not text.strip():
            return
        self.question.value, self.stop.disabled, self.answering = "", False, True
        self.stopped.clear()

        def answer_all() -> None:
            with ThreadPoolExecutor(len(self.talks)) as pool:
                list(pool.map(self._answer, range(len(self.talks)), [text.strip()] * len(self.talks)))
            self.stop.disabled, self.answering = True, False

        threading.Thread(target=answer_all, daemon=True).start()

    def _answer(self, place: int, text: str) -> None:
        talk, lines, answer = self.talks[place], self.lines[place], ""
        lines += [("you", text), (talk.name, "…")]
        self._draw(place)
        try:
            for answer in talk.stream(text, self.stopped):
                lines[-1] = (talk.name, answer)
                self._draw(place)
            lines[-1] = (talk.name, answer + (tr(" [stopped]") if self.stopped.is_set() else ""))
        except Exception as problem:  # a thread has nobody to raise to: the column shows it
            lines[-1] = ("problem", f"{type(problem).__name__}: {problem} {tr('Is the server still running?')}")
        self._draw(place)

    def _draw(self, place: int) -> None:
        page = display.render_html("chat.html", name=self.talks[place].name, lines=self.lines[place])
        self.columns[place].value = page
