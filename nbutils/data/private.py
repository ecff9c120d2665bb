"""Private data in text: phone and identity numbers, e-mail addresses, keys; found, and masked where it is shown.

Not here: taking it out of the rows. That is for the learner to decide; the course warns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nbutils.masking import KEY

_GAP = r"[ .\-\xa0\u2002-\u200a\u2010-\u2015\u202f\u3000]"  # between groups of digits: spaces, dashes, a point
_DAY = r"(?:0[1-9]|[12][0-9]|3[01])"
_MONTH = r"(?:0[1-9]|1[0-2])"
PHONE = re.compile(
    rf"(?<![0-9])(?<![0-9]\.)(?:(?:(?:\+|00)?86{_GAP}?)?1[3-9][0-9]({_GAP}?)[0-9]{{4}}\1[0-9]{{4}}"
    rf"|(?:0(?:10|2[0-9]){_GAP}[2-8][0-9]{{7}}|0[3-9][0-9]{{2}}{_GAP}[2-8][0-9]{{6,7}}))(?![0-9])"
)
ID_NUMBER = re.compile(  # province, district, day of birth, serial; mistyped ones are as private: no checksum
    rf"(?<![0-9])[1-8](?:[0-9]{{5}}{_GAP}?(?:19|20)[0-9]{{2}}{_GAP}?{_MONTH}{_DAY}{_GAP}?[0-9]{{3}}"
    rf"|[0-9]{{3}}{_GAP}[0-9]{{2}}(?:19|20){_GAP}[0-9]{{2}}{_MONTH}{_GAP}{_DAY}[0-9]{{2}}{_GAP}[0-9])[0-9Xx](?![0-9])"
)
EMAIL = re.compile(r"(?<![\w.+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.ASCII)
# Most text holds none of it. These tests are cheap: a regex is fast when it begins with fixed letters.
_MOBILE = re.compile(rf"1[3-9][0-9]{_GAP}?[0-9]{{4}}{_GAP}?[0-9]{{4}}")
_LANDLINE = re.compile(rf"0[1-9][0-9]{{1,2}}{_GAP}[2-8][0-9]{{6}}")
_BORN_19, _BORN_20 = (re.compile(rf"{age}(?:{_GAP}?[0-9]){{9}}{_GAP}?[0-9Xx]") for age in ("19", "20"))
_WIDE = {ord("０") + digit: str(digit) for digit in range(10)} | {ord("Ｘ"): "X", ord("＠"): "@", ord("－"): "-"}
_SK, _GITHUB = re.compile(r"sk-[\w-]{20}"), re.compile(r"gh[pousr]_[A-Za-z0-9]{20}")
_MS = re.compile(r"ms-[0-9a-f]{8}-")


def may_hold_private(text: str) -> bool:
    """Whether it is worth a closer look."""
    text = narrow(text)
    return bool("@" in text or _may_hold_number(text) or _may_hold_key(text))


def narrow(text: str) -> str:
    """The text with the digits of Chinese keyboards as plain ones; nothing moves."""
    return text.translate(_WIDE) if "１" in text or "０" in text or "＠" in text else text


def _may_hold_number(text: str) -> bool:
    return bool(_MOBILE.search(text) or _BORN_19.search(text) or _BORN_20.search(text) or _LANDLINE.search(text))


def _may_hold_key(text: str) -> bool:
    if ("_" in text and any(part in text for part in ("hf_", "github_pat_", "KGAT_"))) or _GITHUB.search(text):
        return True
    if "-" in text and ("PRIVATE KEY" in text or "glpat-" in text or _SK.search(text) or _MS.search(text)):
        return True
    if "A" in text and any(part in text for part in ("AKI", "ASIA", "AKLT", "LTAI", "AIza", "WANDB", "Auth")):
        return True
    if "=" in text and any(part in text for part in ("token=", "key=", "secret=", "password=")):
        return True
    return any(
        part in text for part in ("wandb", "Bearer ", "Basic ", "xox", "eyJ", "aggle_key", "AGGLE_KEY", 'key"', "key'")
    )


def find_private(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each span, in the order of the text."""
    text = narrow(text)
    found = [("key", *match.span()) for match in KEY.finditer(text)] if _may_hold_key(text) else []
    found += [("email", *match.span()) for match in EMAIL.finditer(text)] if "@" in text else []
    found += [("id_number", *match.span()) for match in ID_NUMBER.finditer(text)]
    found += [("phone", *match.span()) for match in PHONE.finditer(text)]
    end = 0
    for kind, start, stop in sorted(found, key=lambda span: span[1:]):
        if start >= end:
            yield kind, start, stop
            end = stop


def mask(text: str) -> str:
    """The text with every private span made unreadable: 138****5678, a***@b.cn, sk-****."""
    if not may_hold_private(text):
        return text
    parts, end = [], 0
    for kind, start, stop in find_private(text):
        parts += [text[end:start], masked(kind, text[start:stop])]
        end = stop
    return "".join([*parts, text[end:]])


def excerpt(text: str, at: int, reach: int = 20) -> str:
    """What stands around a place, masked before it is cut, so that no half of a number is shown."""
    begin = max(0, at - 2000)
    text, at = text[begin : at + 2000], at - begin
    place = at
    for kind, start, stop in find_private(text):
        if start < at:
            place -= min(stop, at) - start - (len(masked(kind, text[start:stop])) if stop <= at else 0)
    return mask(text)[max(0, place - reach) : place + reach]


def masked(kind: str, span: str) -> str:
    """One private span, as much of it as may be shown."""
    if kind == "phone":
        return f"{span[: -8 if span[-5].isdigit() else -10].rstrip(' -')}****{span[-4:]}"
    if kind == "id_number":
        return f"{span[:3]}****{span[-2:]}"
    if kind == "email":
        return f"{span[0]}***@{narrow(span).partition('@')[2]}"
    if span.startswith("-----"):
        return "-----BEGIN****"
    head = re.match(r"(?i:wandb)|sk-|hf_|gh._|github_pat_|....", span)
    return f"{head[0] if head else ''}****"
