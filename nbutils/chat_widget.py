"""A chat with a model on a server or in this process: widgets of ipywidgets 7.7 to 8, lines in a terminal."""

from __future__ import annotations

import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbutils import display, serving
from nbutils.language import joined, printable, say, tr
from nbutils.masking import describe

if TYPE_CHECKING:
    from openai import OpenAI, Stream

    from nbutils.chat import Renderer

DRAW_SECONDS = 0.05  # between two drawings of a growing answer; servers of notebooks drop what comes faster


class Conversation:
    """What was said with a model; `answers` asks it, in the way of a subclass."""

    def __init__(self, model: str, opening: Sequence[Any] = ()) -> None:
        self.model = model  # its name
        self.opening = opening
        self.history: list[dict[str, str]] = []
        self.stopped = False

    def stream(self, text: str) -> Iterator[str]:
        """The answer so far with the thoughts before it, again and again while it grows."""
        question = {"role": "user", "content": text}
        answer = ""
        self.stopped = False
        for thinking, answer in self.answers([*self.opening, *self.history, question]):
            yield serving.with_thoughts(thinking, answer)
            if self.stopped:
                break
        if answer:  # a question without an answer would confuse the next one
            self.history += [question, {"role": "assistant", "content": answer}]

    def answers(self, messages: Any) -> Iterator[tuple[str, str]]:
        """The thoughts and the answer so far, again and again while they grow."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the answer."""
        self.stopped = True


class Talk(Conversation):
    """A conversation with one model on a server; the settings are max_tokens, temperature, ..."""

    def __init__(self, client: OpenAI, model: str, opening: Sequence[Any] = (), **settings: Any) -> None:
        super().__init__(model, opening)
        self.client = client
        self.settings = {"model": model, "stream": True, **settings}
        self.answer_stream: Stream[Any] | None = None

    def answers(self, messages: Any) -> Iterator[tuple[str, str]]:
        """What the server sends."""
        thinking = ""
        answer = ""
        self.answer_stream = None
        try:
            with self.client.chat.completions.create(messages=messages, **self.settings) as self.answer_stream:
                for chunk in self.answer_stream:
                    for choice in chunk.choices:  # the last chunk has only the usage
                        thinking += serving.thoughts(choice.delta)
                        answer += choice.delta.content or ""
                    yield thinking, answer
        except Exception:
            if not self.stopped:  # else it is the connection that `stop` shut
                raise

    def stop(self) -> None:
        """End the answer, also while the server is silent: closing alone would not wake the thread that reads."""
        super().stop()
        if self.answer_stream:
            connection = self.answer_stream.response.extensions["network_stream"]
            with suppress(OSError):  # it has ended meanwhile
                connection.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class LocalTalk(Conversation):
    """A conversation with a model in this process, whose prompts are rendered as those it was trained on."""

    def __init__(self, model: Any, renderer: Renderer, name: str, max_new_tokens: int = 128) -> None:
        super().__init__(name)
        self.language_model = model.eval()
        self.renderer = renderer
        self.max_new_tokens = max_new_tokens

    def answers(self, messages: Any) -> Iterator[tuple[str, str]]:
        """Greedy decoding, token by token; lesson 05 does it by hand."""
        import torch

        cache = None
        ids = torch.tensor([self.renderer.prompt(messages)], device=self.language_model.device)
        written: list[int] = []
        for _ in range(self.max_new_tokens):
            with torch.inference_mode():
                output = self.language_model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(-1)
            if ids.item() in self.renderer.stops:
                break
            written.append(ids.item())
            yield "", self.renderer.tokenizer.decode(written, skip_special_tokens=True).strip()


def chat(talk: Conversation, example: str, live: bool = True) -> Box | None:
    """Print an example with the model's answer; below it, where somebody watches, a box to type in.

    Example: chat_widget.chat(chat_widget.Talk(client, "course"), "Where is order 2041?")
    """
    answers = list(talk.stream(example)) or [""]
    print(joined([tr("you"), example], ":"))
    print(joined([talk.model, printable(answers[-1])], ":"))
    talk.history.clear()
    if live and sys.stdout.isatty():
        converse(talk)
    if not live or not display.watched():
        return None
    from IPython import display as ipython

    box = Box(talk)
    ipython.display(box.whole)
    return box


def converse(talk: Conversation) -> None:
    """Chat in a terminal, until an empty line."""
    say("Chat with it. An empty line ends the chat.")
    with suppress(EOFError, KeyboardInterrupt):
        while question := input(joined([tr("you"), ""], ":")).strip():
            print(joined([talk.model, ""], ":"), end="")
            written = ""
            for answer in map(printable, talk.stream(question)):
                if answer.startswith(written) and not answer.endswith("\ufffd"):  # that is half a character
                    print(answer[len(written) :], end="", flush=True)
                    written = answer
            print()


class Box:
    """The widgets: what was said, a line to type in, and a button to stop. To start over, run the cell again."""

    def __init__(self, talk: Conversation) -> None:
        import ipywidgets as widgets

        self.talk = talk
        self.lines: list[tuple[str, str]] = []  # who said what
        self.dialogue = widgets.HTML()
        self.question = widgets.Text(
            placeholder=tr("Type a message and press Enter"),
            layout={"width": "80%"},
        )
        self.stop = widgets.Button(description=tr("Stop"), disabled=True)  # enabled while the model answers
        self.whole = widgets.VBox([self.dialogue, widgets.HBox([self.question, self.stop])])
        with warnings.catch_warnings():  # version 8 would rather watch `value`, which also changes when focus is lost
            warnings.simplefilter("ignore")
            self.question.on_submit(lambda _: self.ask(self.question.value))
        self.stop.on_click(lambda _: talk.stop())
        self._draw()

    def ask(self, text: str) -> None:
        """Ask the model; nothing happens while it answers."""
        if text.strip() and self.stop.disabled:
            self.question.value = ""
            self.stop.disabled = False
            threading.Thread(target=self._answer, args=(text.strip(),), daemon=True).start()

    def _answer(self, text: str) -> None:
        answer = ""
        self.lines += [("you", text), ("model", "…")]
        self._draw()
        try:
            for answer in self.talk.stream(text):
                self.lines[-1] = ("model", answer)
                if time.monotonic() - self.drawn > DRAW_SECONDS:
                    self._draw()
            if self.talk.stopped:
                answer += tr(" [stopped]")
            self.lines[-1] = ("model", answer)
        except Exception as problem:  # a thread has nobody to raise to: the box shows it
            self.lines[-1] = ("problem", f"{describe(problem)} {tr('Is the server still running?')}")
        self._draw()
        self.stop.disabled = True

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self.dialogue.value = display.render("chat.html", name=self.talk.model, lines=self.lines)
