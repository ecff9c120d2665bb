"""One example under the contract: where it breaks it, named by row and token, and what helps.

A server's prompt is the beginning of the training text; every token of each answer is trained up to and with its
stop token, and nothing else is (blanks around an answer do not count); the answer says all that the row says; no stop
token is cut off by max_length. Not here: the check of all rows and its report (contract).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nbutils.chat.answers import find_lost, has_thought
from nbutils.chat.fitting import last_place
from nbutils.chat.rendering import Example, Row, View, first_stop
from nbutils.chat.thinking import holds
from nbutils.errors import CourseError

RULE = "text that begins with the server's prompt, and trains each answer with its stop token and nothing else"


class Rules(NamedTuple):
    """What all examples are checked against: `other_holds` says that all of them keep the other thinking mode too."""

    view: View
    stops: set[int]
    max_length: int
    other_holds: bool


class Check:
    """One example under check."""

    def __init__(self, rules: Rules, example: Example, row: Row) -> None:
        self.view, self.stops, self.max_length, self.other_holds = rules
        self.example, self.row, self.ids, self.trained = example, row, example.ids, example.trained

    def ends(self) -> Iterator[int]:
        """The token each answer ends with; raises at the first breach."""
        if 1 not in self.trained:
            todo = 'use form="prompt_completion", or a template with {% generation %} around its answers'
            raise self._breach("not one of its tokens is trained", todo)
        starts = [self._start(at) for at in range(len(self.example.prompts))]
        self._refuse_trained(0, starts[0])
        for turn, start, end in zip(self.example.turns, starts, [*starts[1:], len(self.ids)], strict=True):
            yield self.ids[self._check_answer(turn, start, end)]
        self._refuse_cut()

    def _start(self, at: int) -> int:
        """Where an answer begins; everything before it must be what a server would be sent."""
        same, turn = self.example.shared[at], self.example.turns[at]
        if same == self.example.prompts[at]:
            return same
        prompt = self.view.prompt(self.row["messages"][:turn], self.row.get("tools"))
        server, training = (self._decode(ids[same : same + 8]) for ids in (prompt, self.ids))
        apart = '; train conversations with several answers as form="prompt_completion"'
        raise self._breach(
            f"from token {same + 1} on a server would be sent {server!r} where training saw {training!r}",
            self._way_to_agree(self.row["messages"][turn], server) + (apart if len(self.example.turns) > 1 else ""),
        )

    def _way_to_agree(self, answer: dict[str, Any], server: str) -> str:
        """What makes the server's prompt the beginning of the training text, as far as trying tells."""
        if self.other_holds and self.view.other_mode:
            (value,) = self.view.other_mode.values()
            return f"ask servers with enable_thinking={value}, and give thinking={value} to chat.fitting"
        thought = has_thought(answer)
        if holds(self.view, thought):
            return "start answers without a line break"
        if holds(self.view, not thought):
            return f"train only rows {'without' if thought else 'with'} thoughts, as servers of this model ask for them"
        if "<think>" in server:
            return "take another model: its servers begin answers with <think>, its template takes thoughts out of rows"
        return "leave the chat template as the model came with it, or take another model"

    def _check_answer(self, turn: int, start: int, end: int) -> int:
        """Everything up to the first stop token is trained, nothing after it; returns where it is."""
        stop = first_stop(self.ids, self.stops, start, end)
        if stop == end:
            raise self._no_stop(start, end)
        self._require_words(turn, self._decode(self.ids[start:stop]))
        for at in self._places(0, start, stop + 1):
            what = "the stop token" if at == stop else "a token of the answer"
            raise self._breach(f"{what} is not trained: {self._name(at)}", "let the mask cover the whole answer")
        self._refuse_trained(stop + 1, end)
        return stop

    def _require_words(self, turn: int, text: str) -> None:
        """All that an answer says stands before its stop token, or it is never learnt."""
        answer = self.row["messages"][turn]
        lost = find_lost(self.view.tokenizer, answer, text)
        if lost is None:
            return
        content = str(answer.get("content"))
        marks = (self._decode([stop]) for stop in sorted(self.stops))
        if mark := next((mark for mark in marks if mark in content), ""):
            raise self._breach(
                f"an answer contains {mark!r}, the text of a stop token: generation ends there",
                "take it out of the answer, or write it in another way",
            )
        todo = 'use form="prompt_completion"' if self._kept_apart(turn) else lost.todo
        raise self._breach(f"the chat template leaves out or changes {lost.what}", todo)

    def _kept_apart(self, turn: int) -> bool:
        """Whether an answer would be whole as an example of its own."""
        messages, apart = self.row["messages"][: turn + 1], View(self.view.tokenizer, "prompt_completion")
        ids, trained = apart.encode(messages, self.row.get("tools"))
        text = self._decode([token for token, mark in zip(ids, trained, strict=True) if mark])
        return self.view.form == "messages" and find_lost(apart.tokenizer, messages[-1], text) is None

    def _no_stop(self, start: int, end: int) -> CourseError:
        last = max(self._places(1, start, end), default=end - 1)
        wanted = ", ".join(repr(self._decode([stop])) for stop in sorted(self.stops)) or "nothing"
        return self._breach(
            f"the last trained token of an answer is {self._name(last)}, and generation stops only at {wanted}",
            "make the token that closes an answer in the chat template the eos_token of the tokenizer and of the "
            "generation config; instruct versions of a model come that way",
        )

    def _refuse_trained(self, start: int, end: int) -> None:
        for at in self._places(1, start, end):
            raise self._breach(
                f"a token outside the answers is trained: {self._name(at)}",
                "let the mask cover answers only, and give chat.fitting the stop_ids of this check",
            )

    def _refuse_cut(self) -> None:
        stop, tokens = last_place(self.view, self.example), len(self.ids)
        if 0 < self.max_length <= stop:
            raise self._breach(
                f"it has {tokens} tokens; at max_length {self.max_length} the last {tokens - self.max_length} are cut, "
                f"and with them the stop token ({self._name(stop)})",
                f"train the rows that chat.fitting keeps, raise train.max_length to {tokens}, or shorten the row",
            )

    def _places(self, value: int, start: int, end: int) -> Iterator[int]:
        """Where in a stretch the mask has this value, blanks left aside."""
        at = self.trained.find(value, start, end)
        while at >= 0:
            if not self.view.blank(self.ids[at]):
                yield at
            at = self.trained.find(value, at + 1, end)

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.view.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)  # a third of the time
        return str(fast.decode(list(ids), skip_special_tokens=False))

    def _name(self, at: int) -> str:
        text = self._decode([self.ids[at]])
        shown = "part of a character" if "\ufffd" in text else repr(text)
        return f"token {at + 1}, {shown}"

    def _breach(self, seen: str, todo: str) -> CourseError:
        return CourseError(f"Row {self.example.row}: {seen}.", RULE, todo)
