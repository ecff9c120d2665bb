"""What a chat template can do: mark answers, close them with a stop token, render a plain talk at all.

Not here: rendering rows with it (rendering), choosing the form they are trained in (forms).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from nbutils.errors import CourseError


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


def find_stop_ids(tokenizer: Any, generation: Any = None) -> set[int]:
    """The tokens generation ends at: those of a generation config, or of the one in a model's folder or repository.

    Where it names none, servers end at the tokenizer's own.
    """
    if isinstance(generation, str | PathLike):
        generation = _generation_config(generation)
    ends = getattr(generation, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
    return {end for end in ends if end is not None}


def _generation_config(model: str | PathLike[str]) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # many base models have none
        return None


@contextmanager
def probing() -> Iterator[None]:
    """A plain talk that a template cannot render is told in the learner's words."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError) as problem:
        raise CourseError(
            f"The chat template of this model cannot render a plain question and answer: {problem}.",
            "a template that renders them with the tokens this tokenizer has",
            "take template and tokenizer as the model came with them, or take another model",
        ) from problem
