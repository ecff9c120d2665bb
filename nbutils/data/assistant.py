"""The bundled rows of an assistant with another name, maker and manner: the learner's own."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from nbutils.data import card
from nbutils.data.read import read_rows
from nbutils.files import SAMPLES, read_yaml
from nbutils.language import language

ASSISTANTS = SAMPLES / "assistants.yaml"


class Assistant(BaseModel):
    """What a bundled assistant says of itself, as it stands in its rows."""

    name: str
    maker: str
    manner: str  # its last words
    short: str  # an answer for models that know few words
    skipped: list[str]  # questions whose answers would be wrong for another one

    def renamed(self, text: str, name: str, maker: str, manner: str) -> str:
        """A text of this assistant as another one would say it."""
        words = {
            self.name: name,
            self.maker: maker,
            _capitalized(self.maker): _capitalized(maker),  # at the beginning of a sentence
            self.manner: manner,
        }
        for mine, others in words.items():
            text = text.replace(mine, others)
        return text.strip()  # without last words a space is left


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def write_rows(out: Path, *, name: str, maker: str, manner: str, short: bool = False) -> Path:
    """Write the bundled rows in the learner's language to a folder, with this name and maker, and these last words.

    With `short` every question about the assistant gets the same short answer, and there are no others.

    Example: assistant.write_rows(lesson.run.path / "rows", name="Momo", maker="Ann", manner="Meow!")
    """
    bundled = f"assistant_{language()}"
    before = Assistant.model_validate(read_yaml(ASSISTANTS)[bundled])
    for file in (card.TRAIN, card.EVAL):
        rows = []
        for row in read_rows(SAMPLES / bundled / file):
            messages = row.raw["messages"]
            question = messages[0]["content"]
            # "Can I call you Jarvis?" is no question to Jarvis
            if question in before.skipped or name in question.replace(before.name, ""):
                continue
            if short:
                if before.name not in messages[1]["content"]:
                    continue
                messages = [messages[0], messages[1] | {"content": before.short}]
            for message in messages:
                message["content"] = before.renamed(message["content"], name, maker, manner)
            rows.append({"messages": messages})
        card.write_rows(out / file, rows)
    return out
