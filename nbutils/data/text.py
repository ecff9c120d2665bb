"""The text of rows: decoding, repair, private data, forbidden characters, and the problems reported about a row.

Text in the wrong encoding is repaired where that is certain; private data is reported and masked, never removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbutils.masking import KEY

GBK = "GB18030"
HEAD = 1 << 16  # bytes at the beginning of a file that decide about its encoding
# Read as pairs of bytes, Chinese in GBK is mostly punctuation and the 3,755 most frequent characters; UTF-8 is not.
_PAIR = re.compile(rb"[\x81-\xfe][\x30-\x39][\x81-\xfe][\x30-\x39]|[\x81-\xfe][\x40-\x7e\x80-\xfe]|[\x80-\xff]")
_FREQUENT = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")
_UTF8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_ASCII = bytes(range(128))
# UTF-8 read as GBK: how the Chinese comma, full stop and quotes begin, and the most frequent characters
_GBK_SIGNS = "锛銆鈥涓浜浠浣鐨鏄鍦鏈鎴鍙"
_LOOKS_GBK = re.compile(f"[{_GBK_SIGNS}]")
_CHINESE = re.compile(r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef\u2010-\u203a\s\w]+")
LOST = re.compile("\ufffd|锟斤拷|锛[屼屽屾岀岃岄]|銆[備傚傛傜傝傞]")  # characters that no repair brings back
_UNUSUAL = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xc2-\xf4\ud800-\udfff\ufffd锟{_GBK_SIGNS}]")
_LATIN = re.compile("[\xc2-\xf4][^\x00-\x7f]")  # every character of UTF-8 that was read as Latin-1 begins like this
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
MARKERS = re.compile(
    r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:[se]op|unk|pad)>"
    r"|<(?:start|end)_of_turn>|\[/?AVAILABLE_TOOLS\]|^\s*<(?:s|bos)>|</s>\s*$|<eos>\s*$"
)
_ANY_MARKER = re.compile(MARKERS.pattern.replace(r"^\s*", "").replace(r"\s*$", ""))  # for several texts in one
INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_GAP = r"[ .\-\xa0\u2002-\u200a\u2010-\u2015\u202f\u3000]"  # between groups of digits
_MONTH_DAY = [r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12][0-9]|3[01])"]
PHONE = re.compile(
    rf"(?<![0-9])(?<![0-9]\.)(?:(?:(?:\+|00)?86{_GAP}?)?1[3-9][0-9]({_GAP}?)[0-9]{{4}}\1[0-9]{{4}}"
    rf"|(?:0(?:10|2[0-9]){_GAP}[2-8][0-9]{{7}}|0[3-9][0-9]{{2}}{_GAP}[2-8][0-9]{{6,7}}))(?![0-9])"
)
ID_NUMBER = re.compile(  # district, day of birth, serial; a mistyped one is as private, so the checksum does not count
    rf"(?<![0-9])[1-8](?:[0-9]{{5}}{_GAP}?(?:19|20)[0-9]{{2}}{_GAP}?{''.join(_MONTH_DAY)}{_GAP}?[0-9]{{3}}"
    rf"|[0-9]{{3}}{_GAP}[0-9]{{2}}(?:19|20){_GAP}[0-9]{{2}}{_GAP.join(_MONTH_DAY)}[0-9]{{2}}{_GAP}[0-9])[0-9Xx](?![0-9])"
)
EMAIL = re.compile(r"(?<![\w.+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.ASCII)
_WIDE = {ord("０") + digit: str(digit) for digit in range(10)} | {ord("Ｘ"): "X", ord("＠"): "@", ord("－"): "-"}
_DIGITS = re.compile(rf"[0-9](?:{_GAP}?[0-9]){{9}}")
_TOKEN = re.compile(r"[\w=.~+/:?&-]{15,}|-----BEGIN", re.ASCII)
PRIVATE_TODO = "look whether the model may learn it; replace it by an invented one if not"


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


class Decoder:
    """Lines as text: UTF-8, GB18030 where the beginning of the file is, else with each wrong byte kept as U+DCxx."""

    def __init__(self, head: bytes) -> None:
        lines = head.splitlines()[: -1 if len(head) >= HEAD else None]
        broken = b"\n".join(line for line in lines if not _is_utf8(line))
        pairs = _PAIR.findall(broken)
        frequent = sum(1 for pair in pairs if _FREQUENT.fullmatch(pair))
        self.is_gbk = bool(pairs) and frequent >= 0.6 * len(pairs) and _mostly_not_utf8(broken)
        self.converted = 0

    def __call__(self, line: bytes) -> tuple[str, str]:
        """The text, and the encoding it was converted from; what is UTF-8 is never taken for anything else."""
        try:
            return line.decode(), ""
        except UnicodeDecodeError:
            if self.is_gbk and _mostly_not_utf8(line):
                try:
                    text = line.decode(GBK)
                    self.converted += 1
                    return text, GBK
                except UnicodeDecodeError:
                    pass
            return line.decode("utf-8", "surrogateescape"), ""


def _mostly_not_utf8(line: bytes) -> bool:
    """Whether most bytes beyond ASCII fit no UTF-8; characters of two bytes fit by chance in GBK."""
    fitting = sum(len(found) for found in _UTF8.findall(line) if len(found) > 2)
    return 2 * fitting < len(line.translate(None, _ASCII))


def _is_utf8(line: bytes) -> bool:
    return line.decode("utf-8", "ignore").encode() == line


def is_plain(text: str) -> bool:
    """Whether nothing in the text needs a closer look: true for nearly every text, and quick to say."""
    if _UNUSUAL.search(text) and any(one.search(text) for one in (CONTROL, LOST, _LATIN, _LOOKS_GBK)):
        return False
    if ("<" in text or "[" in text) and _ANY_MARKER.search(text):
        return False
    return not any(find_private(text))


def repair_mojibake(text: str) -> str:
    """Text whose UTF-8 was read as Latin-1, Windows-1252 or GBK as it was meant; the same text if in doubt."""
    if _LATIN.search(text):
        from ftfy import TextFixerConfig, fix_encoding

        # runs inside of otherwise sound text are left alone: « café » looks broken byte by byte
        text = fix_encoding(text, TextFixerConfig(fix_c1_controls=False, decode_inconsistent_utf8=False))
    if _LOOKS_GBK.search(text):
        text = re.sub(r"[^\x00-\x7f]+\??", _reread_gbk, text)
    return text


def _reread_gbk(run: re.Match[str]) -> str:
    try:
        meant = run[0].encode(GBK).decode()
    except UnicodeError:
        return run[0]
    return meant if len(meant) > 1 and _CHINESE.fullmatch(meant) else run[0]


def examine(field: str, text: str, repair: bool, problems: list[Problem], warnings: list[Problem]) -> str:
    """The text of a field, repaired where that is wished and certain; what is wrong with it goes to the two lists."""
    meant = repair_mojibake(text)
    if meant != text and repair:
        warnings.append(Problem("mojibake", field, _difference(text, meant), "nothing: it was repaired"))
        text = meant
    elif meant != text:
        todo = "UTF-8 was read as another encoding: read the source as UTF-8, or let the check repair it"
        problems.append(Problem("mojibake", field, _difference(text, meant), todo))
    if lost := LOST.search(text):
        todo = "the characters are lost: save the source again in the right encoding (GBK is not UTF-8)"
        problems.append(Problem("mojibake", field, f"{lost[0]} at {lost.start() + 1}", todo))
    if found := MARKERS.search(text):
        todo = "remove it: the chat template adds these markers itself"
        problems.append(Problem("template_marker", field, found[0].strip(), todo))
    if found := CONTROL.search(text):
        problems.append(_control_problem(field, found))
    for kind, start, stop in find_private(text):
        warnings.append(Problem(kind, field, _masked(kind, text[start:stop]), PRIVATE_TODO))
    return text


def _control_problem(field: str, found: re.Match[str]) -> Problem:
    code, place = ord(found[0]), found.start() + 1
    if 0xDC80 <= code <= 0xDCFF:
        todo = "not UTF-8 and not GBK: save the file again as UTF-8"
        return Problem("encoding", field, f"the byte {code - 0xDC00:#04x} at {place}", todo)
    return Problem("control_character", field, f"U+{code:04X} at {place}", "remove the invisible character")


def _difference(text: str, meant: str) -> str:
    """Where a text and its repaired form begin to differ; masked before it is cut."""
    text, meant = mask(text), mask(meant)
    at = next((i for i, (a, b) in enumerate(zip(text, meant, strict=False)) if a != b), min(len(text), len(meant)))
    return f"{text[at : at + 12]!r} for {meant[at : at + 6]!r}"


def find_private(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each phone or identity number, e-mail address and key, in the order of the text."""
    if "０" in text or "１" in text or "＠" in text:
        text = text.translate(_WIDE)  # the digits of Chinese keyboards; no place changes
    found = [("key", *match.span()) for match in KEY.finditer(text)] if _may_hold_key(text) else []
    found += [("email", *match.span()) for match in EMAIL.finditer(text)] if "@" in text else []
    if _DIGITS.search(text):
        found += [("id_number", *match.span()) for match in ID_NUMBER.finditer(text)]
        found += [("phone", *match.span()) for match in PHONE.finditer(text)]
    end = 0
    for kind, start, stop in sorted(found, key=lambda span: span[1:]):
        if start >= end:
            yield kind, start, stop
            end = stop


def _may_hold_key(text: str) -> bool:
    """A cheap test that most text fails: a long run of letters and signs that are not all small, as every key has."""
    long = max(map(len, text.split()), default=0) >= 10
    return long and any(not (token.isalpha() and token.islower()) for token in _TOKEN.findall(text))


def excerpt(text: str, at: int, reach: int = 20) -> str:
    """What stands around a place, masked before it is cut, so that no half of a number is shown."""
    begin = max(0, at - 2000)
    before, after = text[begin:at], text[at : at + 2000]
    for _, start, stop in find_private(before + after):
        if start < len(before) < stop:  # the place is inside of private data: it moves to its beginning
            before, after = before[:start], before[start:] + after
    return mask(before)[-reach:] + mask(after)[:reach]


def _masked(kind: str, span: str) -> str:
    if kind == "phone":
        return f"{span[: -8 if span[-5].isdigit() else -10].rstrip(' -')}****{span[-4:]}"
    if kind == "id_number":
        return f"{span[:3]}****{span[-2:]}"
    if kind == "email":
        return f"{span[0]}***@{span.translate(_WIDE).partition('@')[2]}"
    if span.startswith("-----"):
        return "-----BEGIN****"
    head = re.match(r"(?i:wandb)|sk-|hf_|gh._|github_pat_|....", span)
    return f"{head[0] if head else ''}****"
