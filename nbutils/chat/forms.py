"""How rows go to the trainer: a whole conversation with its answers marked, or one example for each answer.

Not here: rendering them (rendering).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbutils.errors import CourseError
from nbutils.hardware import Choice

FORMS = ("messages", "prompt_completion")
APART = "so each answer is an example of its own, after what a server would be sent"


def training_format(tokenizer: Any, rows: Iterable[dict[str, Any]] = (), thinking: bool | None = None) -> Choice:
    """`messages`, the whole conversation, where servers see the same; else `prompt_completion`, answer by answer."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    template = marking_template(tokenizer)
    if template is None:
        why = "its template cannot mark answers and TRL has no training template for it"
        return Choice("prompt_completion", f"{why}, {APART}")
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        return Choice("prompt_completion", f"its template marks the answers without their stop token, {APART}")
    if not _as_served(tokenizer, 1, thinking):
        return Choice("prompt_completion", f"its training template marks what a server already writes, {APART}")
    several = any(sum(m["role"] == "assistant" for m in row["messages"]) > 1 for row in rows)
    if several and not _as_served(tokenizer, 2, thinking):
        return Choice("prompt_completion", f"its template rewrites earlier answers, {APART}")
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


def missing_stop(tokenizer: Any) -> str:
    """The stop token to add where the template leaves the last answer open (GLM-4), else nothing."""
    talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"}]
    closing = tokenizer.apply_chat_template(talk, tokenize=False).rpartition("the answer")[2]
    return "" if any(token in closing for token in tokenizer.get_added_vocab()) else str(tokenizer.eos_token or "")


def _as_served(tokenizer: Any, answers: int, thinking: bool | None) -> bool:
    """Whether a server is sent the text before a second answer, or what it is sent before the first carries no loss.

    Qwen3 drops the thinking of earlier answers; with Qwen3.5 the server writes the beginning of the thinking.
    """
    from nbutils.chat.rendering import View, common_length

    view = View(tokenizer, "messages", thinking)
    talk = [{"role": role, "content": role} for role in ("user", "assistant") * answers]
    prompt, (ids, trained) = view.prompt(talk[:-1]), view.encode(talk)
    same = common_length(prompt, ids)
    if answers > 1:
        return same == len(prompt)
    return not any(mark and not view.blank(token) for token, mark in zip(ids[:same], trained, strict=False))
