"""What of a character counts when texts are compared: case, width, blanks and punctuation do not.

Numbers and symbols (`+ - * / % = < > # & | $ …`) do, and in their order: "4 - 2" is not "4 / 2". A hyphen inside a
word does not. Not here: what makes two rows one (alike), and how they are found (near).
"""

from __future__ import annotations

import functools
import re
import unicodedata

import numpy as np

MARK = "\x1e"  # a control character, which no checked row holds: it stands between texts
MARKS = [0x1D, 0x1E, 0x1F]
NUMERALS = "0123456789〇零一二两三四五六七八九十百千万亿"
NUMBER = re.compile(f"[{NUMERALS}]+")
SYMBOLS = "-*/%#&\\^"  # Unicode takes them for punctuation; mathematical signs and currencies count as well


def compared(text: str) -> np.ndarray:
    """Each UTF-16 unit of a text as it is compared, 0 where it does not count."""
    codes = _compared().take(np.frombuffer(text.encode("utf-16-le"), np.uint16))
    if "-" in text or "\uff0d" in text:
        _drop_hyphens(codes)
    return codes


def counts(codes: np.ndarray) -> np.ndarray:
    """Which units are numerals or symbols: texts that differ in one of them are not the same."""
    return _counts().take(codes)


def numbers_and_symbols(codes: np.ndarray) -> list[str]:
    """The numbers and symbols of a text in their order."""
    return _number_or_symbol().findall(_text(codes))


def plain(text: str) -> bytes:
    """The same bytes for all variants of a text in case, width, blanks and punctuation."""
    if text.isascii() and "-" not in text:
        kept = text.encode().translate(*_ascii())
    else:
        kept = _text(compared(text)).replace("\0", "").encode("utf-8", "surrogatepass")
    return kept if kept and kept[-1] > MARKS[-1] else text.encode()  # if it ends with punctuation alone, that counts


def numbers_of(text: str) -> bytes:
    """The numbers of a text, so that 3.5 is not 35."""
    return MARK.join(NUMBER.findall(_text(compared(text)))).encode()


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-16-le", "surrogatepass")


def _drop_hyphens(codes: np.ndarray) -> None:
    """Hyphens between two letters and two letters, as in `well-known`; that of `x - y` is a minus."""
    letters = _letters()
    places = np.flatnonzero(codes[2:-2] == ord("-")) + 2
    for step in (-2, -1, 1, 2):
        places = places[letters.take(codes[places + step])]
    codes[places] = 0


@functools.cache
def _compared() -> np.ndarray:
    found = np.array([_compared_as(chr(code)) for code in range(1 << 16)], np.uint16)
    found[MARKS] = MARKS
    return found


def _compared_as(character: str) -> int:
    simple = unicodedata.normalize("NFKC", character).lower()
    simple = simple if len(simple) == 1 and simple <= "\uffff" else character
    category = unicodedata.category(simple)  # Cs: half of a character beyond the table, such as an emoji
    return 0 if category[0] in "PZC" and category != "Cs" and simple not in SYMBOLS else ord(simple)


@functools.cache
def _ascii() -> tuple[bytes, bytes]:
    """What the ASCII characters are compared as, and those that do not count."""
    codes = bytes(_compared()[:128].astype(np.uint8))
    return codes + bytes(128), bytes(code for code in range(128) if not codes[code])


@functools.cache
def _counts() -> np.ndarray:
    return np.array([chr(code) in NUMERALS or _is_symbol(chr(code)) for code in range(1 << 16)], np.bool_)


@functools.cache
def _letters() -> np.ndarray:
    return np.array([unicodedata.category(chr(code))[0] == "L" for code in range(1 << 16)], np.bool_)


@functools.cache
def _number_or_symbol() -> re.Pattern[str]:
    symbols = "".join(chr(code) for code in range(1 << 16) if _is_symbol(chr(code)))
    return re.compile(f"[{NUMERALS}]+|[{re.escape(symbols)}]")


def _is_symbol(character: str) -> bool:
    return character in SYMBOLS or unicodedata.category(character) in ("Sm", "Sc")
