"""A script for an environment's own interpreter: which of its packages are not as pip left them.

By the size of every file of every package (55,000 in about half a second); by its checksum too when `deep` is asked.
It imports nothing but the standard library, and nothing of what it checks.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import sys
import sysconfig
from typing import Any


def canonical(name: str) -> str:
    """A package's name as all its spellings share it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, tuple[str, str]]:
    """Name -> version and the folder with pip's notes; a name that begins with ~ is what a killed pip left."""
    found = {}
    for place in {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}:
        for entry in os.listdir(place):
            if named := re.fullmatch(r"([^~-][^-]*)-([^-]+)\.dist-info", entry):
                found[canonical(named[1])] = (named[2], os.path.join(place, entry))
    return found


def claims(notes: str) -> list[tuple[str, str, int]] | None:
    """The files of a package with checksum and size; what Python compiles it may write again. None without a record."""
    try:
        with open(os.path.join(notes, "RECORD"), encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == 3 and row[2] and not row[0].endswith(".pyc")]
    except (OSError, ValueError):
        return None
    return [(os.path.normpath(os.path.join(notes, "..", name)), digest, int(size)) for name, digest, size in rows]


def bad_files(found: dict[str, tuple[str, str]], deep: bool) -> dict[str, list[str]]:
    """Of each package the files that are gone or changed; one that two packages bring may be as either left it."""
    claimed = {name: claims(notes) for name, (_, notes) in found.items()}
    wanted: dict[str, set[tuple[str, int]]] = {}
    for rows in claimed.values():
        for path, digest, size in rows or ():
            wanted.setdefault(path, set()).add((digest, size))
    bad = {path for path, forms in wanted.items() if not any(whole(path, *form, deep) for form in forms)}
    return {
        name: ["RECORD"] if rows is None else [path for path, _, _ in rows if path in bad]
        for name, rows in claimed.items()
    }


def whole(path: str, digest: str, size: int, deep: bool) -> bool:
    """Whether a file is as it was installed."""
    try:
        return os.stat(path).st_size == size and (not deep or not digest or checksum(path, digest) == digest)
    except OSError:
        return False


def checksum(path: str, like: str) -> str:
    """A file's checksum as pip notes it, by the algorithm of `like`."""
    kind = like.partition("=")[0]
    with open(path, "rb") as file:
        told = hashlib.new(kind)
        while piece := file.read(1 << 20):
            told.update(piece)
    return f"{kind}={base64.urlsafe_b64encode(told.digest()).rstrip(b'=').decode()}"


def faults(pins: list[tuple[str, str]], known: dict[str, str], deep: bool) -> list[tuple[str, str]]:
    """What is wrong, and what pip would have to install to mend it; `known` was there when it was built."""
    found, told = installed(), []
    for name, version in {**known, **dict(pins)}.items():
        there = found.get(canonical(name), ("", ""))[0]
        if not there:
            told.append((f"{name} is gone", f"{name}=={version}"))
        elif name in dict(pins) and there.partition("+")[0] != version.partition("+")[0]:
            told.append((f"{name} is {there} instead of {version}", f"{name}=={version}"))
    for name, bad in sorted(bad_files(found, deep).items()):
        if bad:
            one = os.path.basename(bad[0])
            told.append((f"{name}: {len(bad)} of its files gone or damaged ({one})", f"{name}=={found[name][0]}"))
    return told


def main(asked: dict[str, Any]) -> None:
    """Print what is wrong, and what is there."""
    there = {name: version for name, (version, _) in sorted(installed().items())}
    print(json.dumps({"faults": faults(asked["pins"], asked["known"], asked["deep"]), "packages": there}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
