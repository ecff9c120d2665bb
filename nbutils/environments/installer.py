"""Installing packages with uv, or with pip where uv cannot be had.

Also a script for `make`, which runs it before anything is installed: `python installer.py PACKAGES` installs them for
the Python it runs in. So it imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

UV_NAMES = {  # pip's settings -> the variables uv reads; uv itself ignores pip's files and variables
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_OFFLINE",
    "cert": "SSL_CERT_FILE",
}


@lru_cache(maxsize=1)
def find_uv() -> str | None:
    """The uv program, installed by pip if it is missing; None if it cannot be had."""
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    if not beside.exists() and not shutil.which("uv"):
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"]
        subprocess.run(command, capture_output=True)
    return str(beside) if beside.exists() else shutil.which("uv")


def new_environment(folder: Path) -> list[str]:
    """The command that makes an empty environment."""
    uv = find_uv()
    make = [uv, "venv", "--allow-existing", "--python", sys.executable] if uv else []
    return [*(make or [sys.executable, "-m", "venv", "--without-pip"]), str(folder)]


def change(python: Path | str, action: str, *words: str) -> list[str]:
    """The command that installs packages for an interpreter (`action` "install"), or uninstalls them."""
    if uv := find_uv():
        return [uv, "pip", action, "--python", str(python), *words]
    confirmed = ["-y"] if action == "uninstall" else []
    return [sys.executable, "-m", "pip", "--python", str(python), action, *confirmed, *words]


def uv_variables() -> dict[str, str]:
    """pip's settings under uv's names, so that mirrors and wheel folders serve both; uv's own variables win.

    Without a GPU driver, and with no other source configured, torch comes from its CPU index.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as for pip
    for name, value in _pip_settings().items():
        if name in UV_NAMES:
            found[UV_NAMES[name]] = ("," if name == "find-links" else " ").join(value.split())
    if not {"UV_FIND_LINKS", "UV_INDEX"} & {*found, *os.environ} and not shutil.which("nvidia-smi"):
        found["UV_TORCH_BACKEND"] = "cpu"
    return {name: os.environ.get(name, value) for name, value in found.items()}


def _pip_settings() -> dict[str, str]:
    """What pip's files and variables say; the variables come last and win."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    lines = re.findall(r"^(global|install|:env:)\.([\w-]+)=('.*'|\".*\")$", listed, re.MULTILINE)
    order = ("global", "install", ":env:")
    return {name: str(ast.literal_eval(value)) for _, name, value in sorted(lines, key=lambda one: order.index(one[0]))}


if __name__ == "__main__":
    done = subprocess.run(change(sys.executable, "install", *sys.argv[1:]), env=os.environ | uv_variables())
    sys.exit(done.returncode)
