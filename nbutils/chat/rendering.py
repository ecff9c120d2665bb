"""A chat row as the trainer sees it: text, tokens, and which of them carry the loss; and as a server sees its prompt.

Not here: judging it (contract). TRL's own training templates are used wherever a tokenizer's template lacks the marks.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.platforms import in_kernel

Messages = list[dict[str, str]]
FORMS = ("messages", "prompt_completion")
STYLE = "background:#c8f0d0;color:#0b3d1a;border-radius:2px"


@dataclass(frozen=True)
class RenderedRow:
    """One row: `trained[i]` says whether token i carries the loss. The tokens joined are the text."""

    text: str
    tokens: list[str]
    ids: list[int]
    trained: list[bool]

    def runs(self) -> list[tuple[str, bool]]:
        """The text in stretches that are all trained or all not."""
        joined: list[tuple[str, bool]] = []
        for token, trained in zip(self.tokens, self.trained, strict=True):
            before = joined.pop()[0] if joined and joined[-1][1] == trained else ""
            joined.append((before + token, trained))
        return joined

    def __str__(self) -> str:
        return "".join(f"[{text}]" if trained else text for text, trained in self.runs())

    def html(self) -> str:
        """The same with colour instead of brackets."""
        spans = [
            f'<span style="{STYLE}">{html.escape(text)}</span>' if trained else html.escape(text)
            for text, trained in self.runs()
        ]
        return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'


def training_format(tokenizer: Any, rows: Iterable[dict[str, Any]] = ()) -> Choice:
    """How rows go to the trainer: whole conversations, or the last answer apart from its prompt."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    template = marking_template(tokenizer)
    if template is None:
        return Choice("prompt_completion", "its template cannot mark answers and TRL has no training template for it")
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        return Choice("prompt_completion", "its template marks the answers without their stop token")
    several = any(sum(m["role"] == "assistant" for m in row["messages"]) > 1 for row in rows)
    if several and not _keeps_history(tokenizer):
        return Choice("prompt_completion", "its template rewrites earlier answers, so only the last one is trained")
    marks = "its template marks" if template == tokenizer.get_chat_template() else "TRL's training template marks"
    return Choice("messages", f"{marks} the answers")


def marking_template(tokenizer: Any) -> str | None:
    """The template that marks answers: the tokenizer's own, TRL's for it, or none."""
    from jinja2 import TemplateError
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template:
        raise CourseError(
            f"The tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template.",
            "a tokenizer with a chat template",
            "take the instruct version of the model, or set tokenizer.chat_template",
        )
    own: str = tokenizer.get_chat_template()
    if has_generation_markers(own):
        return own
    try:
        return get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):
        return None


def _keeps_history(tokenizer: Any) -> bool:
    """Whether a server's prompt for a second answer begins the training text (Qwen3 drops earlier thinking)."""
    view = View(tokenizer, "messages")
    talk = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    prompt = view.prompt(talk[:3])
    return view.encode(talk)[0][: len(prompt)] == prompt


def to_prompt_completion(row: dict[str, Any], stop: str = "") -> dict[str, Messages]:
    """The last answer apart from what comes before it; `stop` closes an answer that the template leaves open."""
    *prompt, answer = row["messages"]
    return {"prompt": prompt, "completion": [answer | {"content": answer["content"] + stop}]}


def missing_stop(tokenizer: Any) -> str:
    """The stop token to add where the template leaves the last answer open (GLM-4), else nothing."""
    talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"}]
    closing = tokenizer.apply_chat_template(talk, tokenize=False).rpartition("the answer")[2]
    return "" if any(token in closing for token in tokenizer.get_added_vocab()) else str(tokenizer.eos_token or "")


def training_rows(tokenizer: Any, rows: Iterable[dict[str, Any]], form: str = "") -> list[dict[str, Messages]]:
    """The rows as SFTTrainer takes them: `messages` with assistant_only_loss, or `prompt` and `completion`."""
    rows = list(rows)
    view = View(tokenizer, form or training_format(tokenizer, rows).value)
    if view.form == "messages":
        return [{"messages": row["messages"]} for row in rows]
    return [to_prompt_completion(row, view.stop) for row in rows]


class View:
    """How one tokenizer renders rows: for training, and as a server would."""

    def __init__(self, tokenizer: Any, form: str) -> None:
        if form not in FORMS:
            raise CourseError(f"form is {form!r}.", ", ".join(FORMS), "leave it empty to have it chosen")
        self.tokenizer, self.form = tokenizer, form
        self.template = marking_template(tokenizer) if form == "messages" else None
        self.stop = missing_stop(tokenizer) if form == "prompt_completion" else ""

    def rendered(self, messages: Messages) -> Messages:
        """The messages as they are handed to the template for training."""
        row = to_prompt_completion({"messages": messages}, self.stop)
        return row["prompt"] + row["completion"]

    def encode(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Token ids and the loss mask, made as TRL makes them."""
        marked = self.form == "messages"
        out = self.tokenizer.apply_chat_template(
            self.rendered(messages),
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=marked,
        )
        ids = list(out["input_ids"])
        if marked:
            return ids, [bool(bit) for bit in out["assistant_masks"]]
        begin = common_length(self.prompt(messages[:-1]), ids)
        return ids, [at >= begin for at in range(len(ids))]

    def prompt(self, messages: Messages) -> list[int]:
        """What a server tokenises before it answers."""
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def show(self, messages: Messages) -> RenderedRow:
        """The row with the text of each token; a character made of several tokens stands at its first."""
        text = self.tokenizer.apply_chat_template(self.rendered(messages), chat_template=self.template, tokenize=False)
        spans = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        ends = [0, *(end for _, end in spans)]
        tokens = [text[before:end] for before, end in itertools.pairwise(ends)]
        return RenderedRow(text, tokens, *self.encode(messages))


def common_length(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences share from the start."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def inspect_row(tokenizer: Any, messages: Messages, form: str = "") -> RenderedRow:
    """Render one conversation exactly as the trainer will."""
    return View(tokenizer, form or training_format(tokenizer, [{"messages": messages}]).value).show(messages)


def show_row(tokenizer: Any, messages: Messages, form: str = "") -> None:
    """Show one conversation with its trained tokens in colour; in [brackets] where no notebook is attached."""
    row = inspect_row(tokenizer, messages, form)
    attached = in_kernel()
    print(f"{sum(row.trained)} of {len(row.ids)} tokens are trained, {'in colour' if attached else 'in [brackets]'}:")
    if not attached:
        print(row)
        return
    from IPython.display import display

    display({"text/html": row.html(), "text/plain": str(row)}, raw=True)
