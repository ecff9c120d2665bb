"""A chat with a served model: widgets of ipywidgets 7.7 to 8, printed dialogue elsewhere."""

from __future__ import annotations

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

    def __init__(self, client: OpenAI, model: str, opening: Sequence[Any] = (), **settings: Any) -> None:
        self.model = model
        self.client = client
        self.opening = opening
        self.settings = settings
        self.history: list[dict[str, str]] = []

    def stream(self, text: str) -> Iterator[str]:
        """The answer so far, again and again while it grows."""
        question = {"role": "user", "content": text}
        messages: Any = [*self.opening, *self.history, question]
        chunks: Any = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            stream=True,
            **self.settings,
        )
        answer = ""
        for chunk in chunks:
            for choice in chunk.choices:  # the last chunk has only the usage
                answer += choice.delta.content or ""
            yield answer
        self.history += [question, {"role": "assistant", "content": answer}]


def chat(talk: Talk, example: str, live: bool = True) -> Any:
    """Print an example with the model's answer; below it, where somebody watches, a box to type in.

    Example: chat_widget.chat(chat_widget.Talk(client, "course"), "Where is order 2041?")
    """
    answers = list(talk.stream(example)) or [""]
    print(f"{tr('you')}: {example}")
    print(f"{talk.model}: {printable(answers[-1])}")
    talk.history.clear()
    if not live or not display.watched():
        return None
    from IPython import display as ipython

    box = chat_box(talk)
    ipython.display(box)
    return box


def chat_box(talk: Talk) -> Any:
    """The widgets: what was said, and below it a line to type in. To start over, run the cell again."""
    import ipywidgets as widgets

    dialogue = widgets.HTML()
    question = widgets.Text(
        placeholder=tr("Type a message and press Enter"),
        layout={"width": "80%"},
    )
    lines: list[tuple[str, str]] = []  # who said what

    def draw() -> float:
        dialogue.value = display.render("chat.html", name=talk.model, lines=lines)
        return time.monotonic()

    def ask(_: object) -> None:
        text = question.value.strip()
        if not text:
            return
        question.value = ""
        lines.extend([("you", text), ("model", "…")])
        drawn = draw()
        try:
            for answer in talk.stream(text):
                lines[-1] = ("model", answer)
                if time.monotonic() - drawn > DRAW_SECONDS:
                    drawn = draw()
        except Exception as problem:  # of a widget it would go to a log: the box shows it
            lines[-1] = ("problem", f"{type(problem).__name__}: {problem} {tr('Is the server still running?')}")
        draw()

    with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
        warnings.simplefilter("ignore")
        question.on_submit(ask)
    draw()
    return widgets.VBox([dialogue, question])
