"""How rows go to the trainer: a whole conversation with its answers marked, or one example for each answer.

Not here: what a template can do (templates), rendering rows (rendering).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbutils.chat.answers import rows_think
from nbutils.chat.rendering import Row, View, common_length, probe
from nbutils.chat.templates import marking_template, probing
from nbutils.hardware import Choice

APART = "so each answer is an example of its own, after what a server would be sent"


def training_format(tokenizer: Any, rows: Sequence[Row] = (), thinking: bool | None = None) -> Choice:
    """`messages`, the whole conversation, where servers see the same; else `prompt_completion`, answer by answer."""
    template = marking_template(tokenizer)
    if template is None:
        why = "its template cannot mark answers and TRL has no training template for it"
        return Choice("prompt_completion", f"{why}, {APART}")
    with probing():
        problem = _problem(tokenizer, template, rows, thinking)
    if problem:
        return Choice("prompt_completion", f"{problem}, {APART}")
    marks = "its template marks" if template == tokenizer.get_chat_template() else "TRL's training template marks"
    return Choice("messages", f"{marks} the answers")


def _problem(tokenizer: Any, template: str, rows: Sequence[Row], thinking: bool | None) -> str:
    """Why whole conversations would not be what servers see; empty if they are. Rows that think are probed with."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        return "its template marks the answers without their stop token"
    view, kinds = View(tokenizer, "messages", thinking), {False, rows_think(rows)}
    if not all(_unmarked_before(view, thought) for thought in kinds):
        return "its training template marks what a server already writes"
    several = any(sum(m["role"] == "assistant" for m in row["messages"]) > 1 for row in rows)
    if several and not all(_keeps_earlier(view, thought) for thought in kinds):
        return "its template rewrites earlier answers"
    return ""


def _unmarked_before(view: View, thought: bool) -> bool:
    """Whether what a server writes before an answer carries no loss; Qwen3.5's begins the thinking."""
    talk = probe(1, thought)
    prompt, (ids, trained) = view.prompt(talk[:-1]), view.encode(talk)
    same = common_length(prompt, ids)
    return not any(mark and not view.blank(token) for token, mark in zip(ids[:same], trained, strict=False))


def _keeps_earlier(view: View, thought: bool) -> bool:
    """Whether a server is sent the text before a second answer, all of it trained; Qwen3 drops earlier thoughts."""
    talk = probe(2, thought)
    prompt, (ids, trained) = view.prompt(talk[:-1]), view.encode(talk)
    learnt = view.tokenizer.decode([token for token, mark in zip(ids, trained, strict=True) if mark])
    return common_length(prompt, ids) == len(prompt) and learnt.count("thought") == 2 * thought
