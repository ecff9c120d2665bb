"""Bytes as text: UTF-8 where it is, GB18030 where a line plainly is, else each byte kept so that its row can be named.

Not here: text that was already read wrongly when the file was written (mojibake).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

GBK = "GB18030"
HEAD = 1 << 16
_PAIR = re.compile(rb"[\x81-\xfe][\x30-\x39][\x81-\xfe][\x30-\x39]|[\x81-\xfe][\x40-\x7e\x80-\xfe]|[\x80-\xff]")
_COMMON = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")  # punctuation and the 3,755 most frequent characters
_UTF8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_COLUMNS = [name.encode("gb18030") for name in ("问题", "答案", "回答", "输出", "問題", "輸出")]
_ASCII = bytes(range(128))
_SAFE = re.compile(rb"[\x00-\x2f][^\x00-\x2f]*\Z")  # such bytes are never a part of another character


def is_gbk(line: bytes, likely: bool = False) -> bool:
    """Whether bytes that are not UTF-8 are Chinese in GBK: most pairs are frequent characters, few fit UTF-8.

    UTF-8 with a broken byte is not: its bytes, taken in pairs, begin with 0xE4 to 0xE9 or stay below 0xB0. Where GBK is
    `likely`, rare characters may stand in it, and what fits as two bytes does not count: those are frequent in GBK.
    """
    pairs = [] if likely else _PAIR.findall(line)
    common = sum(1 for pair in pairs if _COMMON.fullmatch(pair))
    fitting = sum(len(found) for found in _UTF8.findall(line) if len(found) > 2 or not likely)
    return common >= 0.7 * len(pairs) and 2 * fitting < len(line.translate(None, _ASCII))


class Decoder:
    """Text of lines; `converted` counts those that were GBK, which makes it likelier for the next ones."""

    encoding = GBK

    def __init__(self, head: bytes = b"") -> None:
        self.converted = 0
        lines = head.splitlines()[: -1 if len(head) >= HEAD else None]
        self.likely = any(not _is_utf8(line) and (is_gbk(line) or _names(line)) for line in lines[:1000])

    def __call__(self, line: bytes) -> tuple[str, str]:
        """The text, and the encoding it was converted from; what is UTF-8 is never taken for anything else."""
        try:
            return line.decode(), ""
        except UnicodeDecodeError:
            return self._convert(line) if is_gbk(line, self.likely) else (line.decode("utf-8", "surrogateescape"), "")

    def _convert(self, line: bytes) -> tuple[str, str]:
        try:
            text = line.decode("gb18030")
        except UnicodeDecodeError:
            return line.decode("utf-8", "surrogateescape"), ""
        self.converted, self.likely = self.converted + 1, True
        return text, GBK


def _names(line: bytes) -> bool:
    """Whether a column bears its name in GBK, which tells traditional Chinese too."""
    return is_gbk(line, likely=True) and any(name in line for name in _COLUMNS)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def lines_of(file: BinaryIO, decoder: Decoder, longest: int) -> Iterator[str]:
    """The lines of a byte stream as text; a longer one comes in pieces that end between characters."""
    rest = b""
    while line := file.readline(longest):
        line, rest = rest + line, b""
        if len(line) >= longest and not line.endswith(b"\n") and (cut := _SAFE.search(line, len(line) - 4096)):
            line, rest = line[: cut.start() + 1], line[cut.start() + 1 :]
        yield decoder(line)[0]
    if rest:
        yield decoder(rest)[0]


def head_of(file: BinaryIO) -> bytes:
    """The beginning of a file without the byte order mark of UTF-8, over which it steps."""
    if file.peek(3)[:3] == codecs.BOM_UTF8:  # type: ignore[attr-defined]
        file.read(3)
    return bytes(file.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]


def is_utf16(head: bytes) -> bool:
    """Whether a file begins with a byte order mark of UTF-16."""
    return head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
