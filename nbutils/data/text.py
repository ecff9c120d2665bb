"""The text of rows: encodings, forbidden characters, private data, and the problems reported about a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbutils.masking import KEY

GBK = "GB18030"
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\xfe]")
_COMMON_PAIR = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")  # punctuation and the 3,755 most frequent characters
# what no repair brings back: replaced characters, and the Chinese comma and full stop of UTF-8 read as GBK
LOST = re.compile("\ufffd|锟斤拷|锛[屼屽屾岀岃岄]|銆[備傚傛傜傝傞]")
_LATIN = re.compile("[\xc2-\xf4][^\x00-\x7f]")  # every character of UTF-8 that was read as Latin-1 begins like this
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
MARKERS = re.compile(
    r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:[se]op|unk|pad)>"
    r"|<(?:start|end)_of_turn>|\[/?AVAILABLE_TOOLS\]|^\s*<(?:s|bos)>|</s>\s*$|<eos>\s*$"
)
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
_WIDE = {ord("０") + digit: str(digit) for digit in range(10)} | {ord("Ｘ"): "X", ord("＠"): "@", ord("－"): "-"}

# Cheap tests on the UTF-8 bytes of a text: few texts have as many digits in all, or as long a word, as private data.
_NOT_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
_IN_KEYS = bytes(120 if chr(code).isalnum() or code in b"_=.~+/:?&-" else 32 for code in range(128)) + b" " * 128
_KEY_LENGTH = b"x" * 15


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a row, or worth a warning: its kind, the field, what was seen there, what to do."""

    kind: str
    field: str
    seen: str
    todo: str

    def __post_init__(self) -> None:
        for name in ("field", "seen", "todo"):
            object.__setattr__(self, name, shown(getattr(self, name)))


class Problems(list[Problem]):
    """What is wrong with a row."""

    def add(self, *problem: str) -> None:
        """One more: kind, field, what was seen, what to do."""
        self.append(Problem(*problem))


class Row(NamedTuple):
    """A row as the file has it; `encoding` is named where its text had to be converted."""

    file: str
    line: int
    raw: Any
    encoding: str = ""


class RowError(NamedTuple):
    """A row that cannot be used, with every reason found."""

    file: str
    line: int
    raw: Any
    problems: tuple[Problem, ...]


def is_gbk(head: bytes) -> bool:
    """Whether a text that begins like this is Chinese in GBK: no UTF-8, and most pairs of bytes frequent characters."""
    try:
        head[: head.rfind(b"\n") + 1 or None].decode()
        return False
    except UnicodeDecodeError:
        pairs = _PAIR.findall(head)
        return sum(1 for pair in pairs if _COMMON_PAIR.match(pair)) >= 0.6 * len(pairs) > 0


def decode(line: bytes, gbk: bool) -> tuple[str, str]:
    """The text, and the encoding it was converted from; bytes that fit none become U+DCxx, which no row may hold."""
    try:
        return line.decode(), ""
    except UnicodeDecodeError:
        return line.decode(GBK if gbk else "utf-8", "surrogateescape"), GBK if gbk else ""


def mask(text: str) -> str:
    """The text with private data made unreadable: 138****5678, a***@b.cn, sk-****."""
    parts, end = [], 0
    for kind, start, stop in find_private(text):
        parts += [text[end:start], _masked(kind, text[start:stop])]
        end = stop
    return "".join([*parts, text[end:]])


def shown(text: str) -> str:
    """The text as it may stand on a screen: private data masked, control characters spelled out."""
    return mask(INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text))


def short(value: Any) -> str:
    """What was seen, with its type, on one short line, private data masked."""
    try:
        text = json.dumps(value[:400] if isinstance(value, str) else value, ensure_ascii=False, default=str)[:400]
    except (ValueError, RecursionError):
        text = "nested too deeply, or a number of too many digits"
    text = mask(text)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def excerpt(text: str, at: int, width: int = 20) -> str:
    """What stands around a place, private data starred out before it is cut."""
    begin = max(0, at - 2000)
    part = text[begin : at + 2000]
    for _, start, stop in find_private(part):
        part = part[:start] + "*" * (stop - start) + part[stop:]
    return part[max(0, at - begin - width) : at - begin + width]


def examine(field: str, text: str, repair: bool, problems: Problems, warnings: Problems) -> str:
    """The text of a field, repaired where that is wanted and certain; what is wrong with it goes to the two lists."""
    fixed = repair_mojibake(text)
    if fixed != text:
        seen = f"{mask(text)[:20]!r} for {mask(fixed)[:20]!r}"
        todo = "nothing: it was repaired" if repair else "UTF-8 was read as another encoding: read the source as UTF-8"
        (warnings if repair else problems).add("mojibake", field, seen, todo)
        text = fixed if repair else text
    if not text.isascii() and (lost := LOST.search(text)):
        todo = "the characters are lost: save the source again in the right encoding (GBK is not UTF-8)"
        problems.add("mojibake", field, f"{lost[0]} at {lost.start() + 1}", todo)
    if ("<" in text or "[" in text) and (found := MARKERS.search(text)):
        todo = "remove it: the chat template adds these markers itself"
        problems.add("template_marker", field, found[0].strip(), todo)
    if found := CONTROL.search(text):
        byte = 0xDC80 <= ord(found[0]) <= 0xDCFF  # one that `decode` could not read
        todo = "not UTF-8 and not GBK: save the file again as UTF-8" if byte else "remove the invisible character"
        seen = f"{found[0]!a} at {found.start() + 1}"
        problems.add("encoding" if byte else "control_character", field, seen, todo)
    for kind, start, stop in find_private(text):
        warnings.add(kind, field, _masked(kind, text[start:stop]), "decide whether the model may learn it")
    return text


def repair_mojibake(text: str) -> str:
    """Text whose UTF-8 was read as Latin-1 or Windows-1252 as it was meant; the same text if in doubt."""
    if text.isascii() or not _LATIN.search(text):
        return text
    from ftfy import TextFixerConfig, fix_encoding

    # runs inside of otherwise correct text are left alone: « café » looks broken byte by byte
    return fix_encoding(text, TextFixerConfig(fix_c1_controls=False, decode_inconsistent_utf8=False))


def find_private(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each phone or identity number, e-mail address and key, in the order of the text."""
    if not text.isascii() and ("０" in text or "１" in text or "＠" in text):
        text = text.translate(_WIDE)  # the digits of Chinese keyboards; no place changes
    raw = text.encode("utf-8", "surrogatepass")
    found = []
    if _KEY_LENGTH in raw.translate(_IN_KEYS) or b"-----BEGIN" in raw:
        found += [("key", *match.span()) for match in KEY.finditer(text)]
    if b"@" in raw:
        found += [("email", *match.span()) for match in EMAIL.finditer(text)]
    if len(raw.translate(None, _NOT_DIGITS)) >= 10:
        found += [("id_number", *match.span()) for match in ID_NUMBER.finditer(text)]
        found += [("phone", *match.span()) for match in PHONE.finditer(text)]
    end = 0
    for kind, start, stop in sorted(found, key=lambda span: span[1:]):
        if start >= end:
            yield kind, start, stop
            end = stop


def _masked(kind: str, span: str) -> str:
    if kind == "phone":
        return f"{span[: -8 if span[-5].isdigit() else -10].rstrip(' -')}****{span[-4:]}"
    if kind == "id_number":
        return f"{span[:3]}****{span[-2:]}"
    if kind == "email":
        return f"{span[0]}***@{span.translate(_WIDE).partition('@')[2]}"
    head = re.match(r"(?i:wandb)|sk-|hf_|gh._|github_pat_|-----BEGIN|....", span)
    return f"{head[0] if head else ''}****"
