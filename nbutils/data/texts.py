"""Texts: their encoding, what no text of a row may hold, private data, and how a text may be shown."""

from __future__ import annotations

import codecs
import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nbutils.files import read_yaml
from nbutils.language import tr
from nbutils.masking import KEY

CJK = re.compile(r"[\u3400-\u9fff]")  # a Chinese character
Kind = Literal[  # of a problem or a warning
    "ambiguous_columns", "control_character", "damaged_file", "duplicate", "email", "empty", "encoding", "id_number",
    "key", "leak", "long_line", "malformed_csv", "malformed_json", "missing_field", "mojibake", "near_duplicate",
    "near_leak", "no_assistant", "phone", "role_order", "template_marker", "unknown_columns", "unknown_role",
    "unsupported_field", "wrong_type",
]  # fmt: skip
TODOS: dict[Kind, str] = read_yaml(Path(__file__).with_name("todos.yaml"))
GBK = "GB18030"
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\xfe]")
_COMMON_PAIR = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")  # punctuation and the 3,755 most frequent characters
_LATIN = re.compile("[\xc2-\xf4][^\x00-\x7f]")  # every character of UTF-8 that was read as Latin-1 begins like this
SUSPICIOUS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd锟锛銆<\[]")
FORBIDDEN: dict[Kind, re.Pattern[str]] = {
    # what no repair brings back: replaced characters, and the Chinese comma and full stop of UTF-8 read as GBK
    "mojibake": re.compile("\ufffd|锟斤拷|锛[屼屽屾岀岃岄]|銆[備傚傛傜傝傞]"),
    "encoding": re.compile(r"[\udc80-\udcff]"),  # bytes that could not be decoded
    "control_character": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]"),
    "unsupported_field": re.compile(  # the placeholder of an image as first or last line, as in LLaVA's rows
        r"\A\s*<(image|video|audio)>\s*$|^[^\S\n]*<(image|video|audio)>\s*\Z", re.MULTILINE
    ),
    "template_marker": re.compile(
        r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:[se]op|unk|pad)>"
        r"|<(?:start|end)_of_turn>|\[/?AVAILABLE_TOOLS\]|^\s*<(?:s|bos)>|</s>\s*$|<eos>\s*$"
    ),
}
INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_GAP = r"[ .\-\xa0\u2002-\u200a\u2010-\u2015\u202f\u3000]"  # between groups of digits
PHONE = re.compile(
    rf"(?<![0-9])(?<![0-9]\.)(?:(?:(?:\+|00)?86{_GAP}?)?1[3-9][0-9]({_GAP}?)[0-9]{{4}}\1[0-9]{{4}}"
    rf"|(?:0(?:10|2[0-9]){_GAP}[2-8][0-9]{{7}}|0[3-9][0-9]{{2}}{_GAP}[2-8][0-9]{{6,7}}))(?![0-9])"
)
ID_NUMBER = re.compile(  # district, day of birth, serial; a mistyped one is as private, so the checksum does not count
    rf"(?<![0-9])[1-8][0-9]{{5}}{_GAP}?(?:19|20)[0-9]{{2}}{_GAP}?(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01]){_GAP}?"
    r"[0-9]{3}[0-9Xx](?![0-9])"
)
EMAIL = re.compile(r"(?<![\w.+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.ASCII)
_WIDE = str.maketrans("０１２３４５６７８９Ｘ＠－", "0123456789X@-")

# Cheap tests on the UTF-8 bytes of a text: few texts have as many digits in all, or as long a word, as private data.
_NOT_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
_DIGITS_OF_PHONE = 10
_IN_KEYS = f"{string.ascii_letters}{string.digits}_=.~+/:?&-".encode()
_AS_X = bytes.maketrans(_IN_KEYS, b"x" * len(_IN_KEYS))
_KEY_LENGTH = b"x" * 15


@dataclass
class Problem:
    """One thing wrong with a row, or worth a warning: its kind, a code; for people where, what was seen, what to do."""

    kind: Kind
    field: str
    seen: str
    todo: str = ""

    def __post_init__(self) -> None:
        self.field = shown(self.field)
        self.seen = shown(self.seen)
        self.todo = tr(TODOS.get(self.kind, ""))


class Private(NamedTuple):
    """Private data: where it stands in a text, and what is shown of it."""

    start: int
    stop: int
    kind: Kind
    masked: str


def encoding_of(head: bytes) -> str:
    """The encoding of a text that begins like this: UTF-8, unless a mark says UTF-16 or the bytes say GBK."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        codecs.utf_8_decode(head)  # its last character may be cut in two
    except UnicodeDecodeError:
        pairs = _PAIR.findall(head)
        common = [pair for pair in pairs if _COMMON_PAIR.match(pair)]
        if pairs and len(common) >= 0.6 * len(pairs):
            return GBK
    return "utf-8-sig"


def fix_encoding(text: str) -> str:
    """The text; UTF-8 that was read as Latin-1 or Windows-1252 is put right."""
    if text.isascii() or not _LATIN.search(text):
        return text
    import ftfy

    # runs inside of otherwise correct text are left alone: « café » looks broken byte by byte
    config = ftfy.TextFixerConfig(fix_c1_controls=False, decode_inconsistent_utf8=False)
    return ftfy.fix_encoding(text, config)


def find_problems(field: str, text: str) -> Iterator[Problem]:
    """What a model must not learn: lost characters, markers of chat templates, control characters."""
    if not SUSPICIOUS.search(text):  # four times as fast as the patterns
        return
    for kind, pattern in FORBIDDEN.items():
        match = pattern.search(text)
        if match:
            seen = tr("{what} at {place}", what=shown(match[0]), place=match.start() + 1)
            yield Problem(kind, field, seen)


def find_private(text: str) -> Iterator[Private]:
    """Each phone or identity number, e-mail address and key, in the order of the text."""
    if not text.isascii() and ("０" in text or "１" in text or "＠" in text):
        text = text.translate(_WIDE)  # the digits of Chinese keyboards; no place changes
    raw = text.encode("utf-8", "surrogatepass")
    patterns: dict[Kind, re.Pattern[str]] = {}
    if _KEY_LENGTH in raw.translate(_AS_X) or b"-----BEGIN" in raw:
        patterns["key"] = KEY
    if b"@" in raw:
        patterns["email"] = EMAIL
    if len(raw.translate(None, _NOT_DIGITS)) >= _DIGITS_OF_PHONE:
        patterns |= {"id_number": ID_NUMBER, "phone": PHONE}
    spans = []
    for kind, pattern in patterns.items():
        for match in pattern.finditer(text):
            spans.append(Private(*match.span(), kind, f"{match[0][:3]}****"))
    end = 0
    for span in sorted(spans):
        if span.start >= end:
            yield span
            end = span.stop


def mask(text: str) -> str:
    """The text with private data made unreadable: 138****, ann****, sk-****."""
    spans = list(find_private(text))
    for span in reversed(spans):  # from the end, so that no place changes
        text = text[: span.start] + span.masked + text[span.stop :]
    return text


def shown(text: str) -> str:
    """The text as it may stand on a screen: private data masked, control characters spelled out."""
    return mask(INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text))


def short(value: Any) -> str:
    """What was seen, with its type, on one short line, private data masked."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = tr("nested too deeply, or a number of too many digits")
    text = mask(text[:400])
    if len(text) > 40:
        text = f"{text[:37]}..."
    return f"{text} ({type(value).__name__})"
