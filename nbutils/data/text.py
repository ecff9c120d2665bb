"""What a text may hold: no control characters, no template markers, no text read in the wrong encoding.

Not here: roles and order (rows). Broken encoding is repaired where that is certain; private data is only named.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nbutils.data.mojibake import GBK_SIGNS, LOST, repair_mojibake, suspicious
from nbutils.data.private import find_private, mask, masked, may_hold_private
from nbutils.data.raw import Problem

__all__ = ["Examined", "examine", "mask", "plain"]

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
MARKERS = re.compile(
    r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:[se]op|unk|pad)>"
    r"|<(?:start|end)_of_turn>|\[/?AVAILABLE_TOOLS\]|^\s*<(?:s|bos)>|</s>\s*$|<eos>\s*$"
)
_MARKERS = re.compile(MARKERS.pattern.replace(r"^\s*", "").replace(r"\s*$", ""))  # for several texts in one
_ASCII_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_STRANGE = re.compile(
    f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xc2-\xf4\ud800-\udfff\ufffd锟{GBK_SIGNS}]"
)  # one pass for four
PRIVATE_TODO = "look whether the model may learn it; replace it by an invented one if not"


class Examined(NamedTuple):
    """A text after the checks: repaired where that was certain, with what stops it and what is worth a look."""

    text: str
    problems: list[Problem]
    warnings: list[Problem]


def plain(text: str) -> bool:
    """Whether nothing in the text needs a closer look: true for nearly every text, and quick to say."""
    if text.isascii():
        if not text.replace("\n", " ").isprintable() and _ASCII_CONTROL.search(text):
            return False
    elif _STRANGE.search(text) and (CONTROL.search(text) or LOST.search(text) or suspicious(text)):
        return False
    if ("<" in text or "[" in text) and _MARKERS.search(text):
        return False
    return not may_hold_private(text)


def examine(field: str, text: str, repair: bool = True) -> Examined:
    """Everything that can be said about the text of one field."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    mended = repair_mojibake(text)
    if mended != text and not repair:
        todo = "UTF-8 was read as another encoding: read the source as UTF-8, or let the check repair it"
        problems.append(Problem("mojibake", field, _difference(text, mended), todo))
    elif mended != text:
        warnings.append(Problem("mojibake", field, _difference(text, mended), "nothing: it was repaired"))
        text = mended
    if lost := LOST.search(text):
        todo = "the characters are lost: save the source again in the right encoding (GBK is not UTF-8)"
        problems.append(Problem("mojibake", field, f"{lost[0]} at {lost.start() + 1}", todo))
    if ("<" in text or "[" in text) and (found := MARKERS.search(text)):
        todo = "remove it: the chat template adds these markers itself"
        problems.append(Problem("template_marker", field, found[0].strip(), todo))
    if found := CONTROL.search(text):
        problems.append(_control(field, found))
    if may_hold_private(text):
        for kind, start, end in find_private(text):
            warnings.append(Problem(kind, field, masked(kind, text[start:end]), PRIVATE_TODO))
    return Examined(text, problems, warnings)


def _control(field: str, found: re.Match[str]) -> Problem:
    """An invisible character, or half of one: bytes that were no UTF-8 come as U+DC80 to U+DCFF."""
    place = f"U+{ord(found[0]):04X} at {found.start() + 1}"
    if "\udc80" <= found[0] <= "\udcff":
        place = f"the byte {ord(found[0]) - 0xDC00:#04x} at {found.start() + 1}"
        return Problem("encoding", field, place, "not UTF-8 and not GBK: save the file again as UTF-8")
    return Problem("control_character", field, place, "remove the invisible character")


def _difference(text: str, mended: str) -> str:
    """Where a text and its repaired form begin to differ, with what the repair made of it; masked before it is cut."""
    text, mended = mask(text), mask(mended)
    at = next((i for i, (a, b) in enumerate(zip(text, mended, strict=False)) if a != b), min(len(text), len(mended)))
    return f"{text[at : at + 12]!r} for {mended[at : at + 6]!r}"
