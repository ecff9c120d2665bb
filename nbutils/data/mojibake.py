"""Text that was written as UTF-8 and read as something else: found with certainty, and read again.

Not here: files (reading converts those). Rather miss a broken word than touch a sound one: « café » and „Spaß“ look
broken byte by byte, so a run of characters is read again only if no sound text would hold it.
"""

from __future__ import annotations

import re

# The characters bytes 0x80 to 0xFF turn into when read as Windows-1252 or Latin-1; Python's cp1252 lacks five of them.
_WINDOWS = {byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0xA0)}
_BYTE = {char: byte for byte, char in _WINDOWS.items()} | {chr(byte): byte for byte in range(0x80, 0x100)}
_REST = "".join(re.escape(char) for char, byte in _BYTE.items() if byte < 0xC0)
_ONE = f"(?:[\xc2-\xdf][{_REST}]|[\xe0-\xef][{_REST}]{{2}}|[\xf0-\xf4][{_REST}]{{3}})"
_CJK = f"[\xe3-\xe9\xef][{_REST}][{_REST} ]"  # a no-break space is often stored as a plain one
_RUN = re.compile(f"(?:{_CJK}){{2,}}|{_ONE}+")
_LOOK = re.compile(f"[\xc2-\xf4][{_REST}]")
_CJK_RUN = re.compile(f"(?:{_CJK}){{2,}}")
_ODD = re.compile("[\x80-\x9f¤¥¦§¨¬\xad¯±´µ¶¸¼¾ˆ˜]|(?<!×)½")  # never after a letter in a language with accents
_SIGNS = re.compile("\xe2(?:[€‚†‡ˆ‰˜œ]|„[¢ƒ])|\xf0Ÿ")  # how dashes, curly quotes, arrows, ticks and emoji begin
_SURE = re.compile("[ÐÑ].[ÐÑ]|[\xe0-\xf4]")
_SPACED = re.compile("Â[£©®°±·µ§¡¿¼½¾²³\xa0«»]")
# UTF-8 read as GBK: how the Chinese comma, full stop and quotes begin, and the most frequent characters
GBK_SIGNS = "锛銆鈥涓浜浠浣鐨鏄鍦鏈鎴鍙"
_LOOK_GBK = re.compile(f"[{GBK_SIGNS}]")
_RUN_GBK = re.compile(r"[^\x00-\x7f]+\??")
_AFTER_COMMA, _AFTER_STOP = "屼屽屾岀岃岄", "備傚傛傜傝傞"
_QUOTED = ("``", '""', "''", "“”", "‘’", "「」", "『』", "«»")  # one sign between them: a text about broken text
LOST = re.compile(f"\ufffd|锟斤拷|锛[{_AFTER_COMMA}]|銆[{_AFTER_STOP}]")  # what no reading brings back
_SOUND = re.compile(r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef\u2010-\u203a\s\w]+")


def suspicious(text: str) -> bool:
    """Whether a closer look is worth it."""
    return _LOOK.search(text) is not None or _LOOK_GBK.search(text) is not None


def repair_mojibake(text: str) -> str:
    """The text as it was meant, or the very same text when there is any doubt."""
    for _ in range(3):  # broken twice happens: each time through a wrong door adds a layer
        mended = _reread(text) if _LOOK.search(text) else text
        mended = _reread_gbk(mended) if _LOOK_GBK.search(mended) else mended
        if mended == text:
            break
        text = mended
    return text


def _reread(text: str) -> str:
    """All of the text as UTF-8 if a part of it is plainly broken; where not all of it is, only such parts."""
    if not any(_certain(run) for run in _RUN.finditer(text)):
        return text
    if whole := _as_utf8(text):
        return whole
    return _RUN.sub(lambda run: _as_utf8(run[0]) if _certain(run) or run[0][0] in "ÂÃ" else run[0], text)


def _as_utf8(text: str) -> str:
    """The text whose bytes these characters once were; empty if they are not the bytes of any."""
    try:
        return bytes(ord(char) if char < "\x80" else _BYTE[char] for char in text).decode()
    except (KeyError, UnicodeDecodeError):
        spaced = text.replace(" ", "\xa0")
        return _as_utf8(spaced) if _CJK_RUN.fullmatch(text) and spaced != text else ""


def _certain(run: re.Match[str]) -> bool:
    """Whether no sound text would hold these characters between these neighbours."""
    broken, meant = run[0], _as_utf8(run[0])
    before, after = run.string[max(0, run.start() - 1) : run.start()], run.string[run.end() : run.end() + 1]
    if not meant or (len(meant) == 1 and before + after in _QUOTED):
        return False
    odd = _ODD.search(broken) is not None
    if " " in broken:
        return odd and _SOUND.fullmatch(meant) is not None
    if odd and (len(meant) > 1 or meant > "\u2000"):
        return True
    if _SIGNS.match(broken) or len(set(meant)) > 2 or (len(meant) > 1 and _SURE.match(broken)):
        return True
    return len(meant) == 1 and _in_word(broken, before, after)


def _in_word(broken: str, before: str, after: str) -> bool:
    """Whether two characters stand where one accented letter or sign should: next to small letters or numbers."""
    left, right = "a" <= before <= "z", "a" <= after <= "z"
    if _SPACED.fullmatch(broken):
        return left or before.isdigit() or (broken[1] not in "\xa0«»" and not before.isupper())
    return (left or right) if broken[0] == "Ã" else (left and right and broken[0] in "ÄÅÐÑ")


def _reread_gbk(text: str) -> str:
    """Chinese that was read as GBK although it was UTF-8 (浣犲ソ for 你好), if all of a run can be read so."""

    def reread(run: re.Match[str]) -> str:
        try:
            meant = run[0].encode("gb18030").decode()
        except UnicodeError:
            return run[0]
        return meant if len(meant) > 1 and _SOUND.fullmatch(meant) else run[0]

    return _RUN_GBK.sub(reread, text)
