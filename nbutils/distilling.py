"""Rows that an OpenAI-style endpoint writes from documents: questions and answers about a span, or the answer to it.

An answer may cost money: each is appended to a journal as it comes, and what is there is never asked again, unless the
model, the instruction or the options change. Every row keeps its span, so that a reader can check it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from nbutils import platforms, serving
from nbutils.chat import Message
from nbutils.data.documents import Span
from nbutils.errors import CourseError, require_choice
from nbutils.evaluation.evaluator import digest
from nbutils.evaluation.scores import without_thinking
from nbutils.language import tr
from nbutils.masking import describe
from nbutils.record import Facts

if TYPE_CHECKING:
    from openai import OpenAI

KEY_VARIABLE = "OPENAI_API_KEY"
AT_ONCE = 8  # requests in flight: small accounts allow few
RETRIES = 5  # of a request that may yet succeed; the client waits as long as the endpoint asks for
TIMEOUT = 120.0  # seconds
OF_ONE_REQUEST = (400, 413, 422)  # statuses that say nothing about the next request: too long, or filtered
Way = Literal["questions", "answers"]


class Pair(BaseModel):
    """A question with its answer."""

    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class Entry(BaseModel):
    """What came of a span: its pairs, or why there are none."""

    key: str
    span: Span
    pairs: list[Pair] = []
    problem: str = ""
    tokens: int = 0  # read and written

    @property
    def rows(self) -> list[Facts]:
        """Its pairs as chat rows, each with its source."""
        rows = []
        for pair in self.pairs:
            turns = [{"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer}]
            rows.append({"messages": turns, "source": asdict(self.span)})
        return rows


PAIRS = TypeAdapter(list[Pair])


def connect(endpoint: str) -> OpenAI:
    """A client of an endpoint, with the key of the environment variable OPENAI_API_KEY.

    Example: client = distilling.connect("https://api.example.com/v1")
    """
    from openai import OpenAI

    address = urlsplit(endpoint)
    if not address.hostname or address.password:
        raise CourseError(
            "ENDPOINT is {endpoint!r}.",
            todo="Give its base URL, as in https://api.example.com/v1; the key belongs in the variable {variable}.",
            endpoint=endpoint,
            variable=KEY_VARIABLE,
        )
    key = platforms.secret(KEY_VARIABLE) or ("none" if address.hostname in ("localhost", "127.0.0.1") else "")
    if not key or not key.isascii():
        raise CourseError(
            "There is no key for {endpoint}, or it has characters that no key has, such as quotation marks.",
            todo="Set the environment variable {variable} before Jupyter starts; on Colab or Kaggle, store a secret.",
            endpoint=endpoint,
            variable=KEY_VARIABLE,
        )
    return OpenAI(base_url=endpoint, api_key=key, max_retries=RETRIES, timeout=TIMEOUT)


def refusal(error: Exception, url: str) -> CourseError:
    """The error for what would end every request to this endpoint alike."""
    key = tr("The key is wrong, has expired or is not for this model: set {variable} again.", variable=KEY_VARIABLE)
    todos = {
        401: key,
        402: tr("The account has no credit left."),
        403: key,
        404: tr("Check ENDPOINT, which mostly ends in /v1, and ENDPOINT_MODEL: one of them is not there."),
        429: tr("The limit of the account is reached: wait, or raise it there."),
    }
    status = getattr(error, "status_code", 0)
    todo = todos.get(status) or tr("Check ENDPOINT, which mostly ends in /v1, and the network; or try again later.")
    return CourseError(
        tr("{url} gives no answer: {error}", url=url, error=describe(error)[:400]),
        todo=tr("{todo} What was written is kept: run this cell again, and only the rest is asked.", todo=todo),
    )


@dataclass
class Writer:
    """Asks a model about spans, and keeps what it writes in a journal.

    Example:
        writer = Writer(journal, model="large", way="questions", instruction="Write ...", options={"max_tokens": 512})
        writer.write(client, spans)
    """

    journal: Path
    model: str
    way: Way
    instruction: str
    options: Mapping[str, Any]
    version: Any = None  # of a model whose name says too little
    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("WAY", self.way, get_args(Way))
        if self.journal.exists():
            for line in self.journal.read_text(encoding="utf-8").split("\n"):
                with suppress(ValidationError):  # a kill may have torn the last one
                    entry = Entry.model_validate_json(line)
                    self.entries[entry.key] = entry

    def messages(self, span: Span) -> list[Message]:
        """What is sent about a span."""
        asked = {"role": "user", "content": span.text}
        return [{"role": "system", "content": self.instruction}, asked] if self.instruction else [asked]

    def key(self, span: Span) -> str:
        """What decides the answer."""
        return digest([self.model, self.version, self.way, self.options, self.messages(span), asdict(span)])

    def written(self, spans: Sequence[Span]) -> list[Entry]:
        """What is written about these spans so far."""
        entries = [self.entries.get(self.key(span)) for span in spans]
        return [entry for entry in entries if entry]

    def missing(self, spans: Sequence[Span]) -> list[Span]:
        """The spans about which nothing is written."""
        return [span for span in spans if self.key(span) not in self.entries]

    def write(self, client: OpenAI, spans: Sequence[Span], name: str = "") -> None:
        """Ask about the missing spans, several at a time; an error of the endpoint ends it, and what came is kept.

        `name`: what this server calls the model.
        """
        lock = threading.Lock()
        with open(self.journal, "a", encoding="utf-8", newline="\n") as journal:
            journal.write("\n")  # a kill may have torn the last line

            def send(span: Span) -> None:
                entry = self.ask(client, span, name or self.model)
                with lock:
                    self.entries[entry.key] = entry
                    if entry.tokens or entry.pairs:  # what was refused has cost nothing, and is asked again
                        journal.write(entry.model_dump_json() + "\n")
                        journal.flush()

            serving.send_concurrently(send, self.missing(spans), str(client.base_url), AT_ONCE)

    def ask(self, client: OpenAI, span: Span, name: str) -> Entry:
        """What the model writes about one span."""
        from openai import APIStatusError, OpenAIError

        entry = Entry(key=self.key(span), span=span)
        messages: Any = self.messages(span)
        try:
            response: Any = client.chat.completions.create(model=name, messages=messages, **self.options)
            choice = response.choices[0]
        except (OpenAIError, AttributeError, TypeError, LookupError) as error:  # a web page has no choices
            if not isinstance(error, APIStatusError) or error.status_code not in OF_ONE_REQUEST:
                raise refusal(error, str(client.base_url)) from error
            entry.problem = tr("refused: {error}", error=describe(error))
            return entry
        entry.tokens = int(getattr(response.usage, "total_tokens", 0) or 0)
        text = without_thinking(serving.generated_text(choice.message))
        if choice.finish_reason == "length":
            entry.problem = tr("cut off: it had no tokens left")
        else:
            self._read(text, entry)
        return entry

    def _read(self, text: str, entry: Entry) -> None:
        """Take the pairs of an answer, or say why it has none."""
        try:
            if self.way == "answers":
                entry.pairs = [Pair(question=entry.span.text, answer=text)]
            else:  # whatever stands around the list: a fence, a remark, an object
                entry.pairs = PAIRS.validate_json(text[text.find("[") : text.rfind("]") + 1])
        except ValidationError:
            entry.problem = tr("not the answer that was asked for: {text!r}", text=text[:80])
