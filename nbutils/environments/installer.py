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
    if beside.exists():
        return str(beside)
    return shutil.which("uv")


def new_environment(folder: Path) -> list[str]:
    """The command that makes an empty environment."""
    if uv := find_uv():
        return [uv, "venv", "--allow-existing", "--python", sys.executable, str(folder)]
    return [sys.executable, "-m", "venv", "--without-pip", str(folder)]


def change(python: Path | str, action: str, *words: str) -> list[str]:
    """The command that installs packages for an interpreter (`action` "install"), or uninstalls them."""
    if uv := find_uv():
        return [uv, "pip", action, "--python", str(python), *words]
    command = [sys.executable, "-m", "pip", "--python", str(python), action]
    if action == "uninstall":
        command.append("-y")
    return [*command, *words]


def uv_variables() -> dict[str, str]:
    """pip's settings under uv's names, so that mirrors and wheel folders serve both; uv's own variables win.

    Without a GPU driver, and with no other source configured, torch comes from its CPU index.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as for pip
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    for place in ("global", "install", ":env:"):  # the last one wins
        settings = re.findall(rf"^{place}\.([\w-]+)=('.*'|\".*\")$", listed, re.MULTILINE)
        for name, value in settings:
            if name in UV_NAMES:  # a setting of several lines is a list
                words = str(ast.literal_eval(value)).split()
                separator = "," if name == "find-links" else " "
                variables[UV_NAMES[name]] = separator.join(words)
    known = {*variables, *os.environ}
    own_source = "UV_FIND_LINKS" in known or "UV_INDEX" in known
    if not own_source and not shutil.which("nvidia-smi"):
        variables["UV_TORCH_BACKEND"] = "cpu"
    return {name: os.environ.get(name, value) for name, value in variables.items()}


if __name__ == "__main__":
    done = subprocess.run(change(sys.executable, "install", *sys.argv[1:]), env=os.environ | uv_variables())
    sys.exit(done.returncode)
