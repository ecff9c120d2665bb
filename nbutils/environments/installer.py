"""Installing packages with uv, which gets pip's settings.

Also a script for `make`, which runs it before anything is installed: `python installer.py PACKAGES` installs them for
the Python it runs in. So it imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

UV_NAMES = {  # pip's settings -> the variables uv reads; uv itself ignores pip's files and variables
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_OFFLINE",
    "cert": "SSL_CERT_FILE",
}


def uv() -> list[str]:
    """How uv is called; pip installs it if it is missing."""
    if program := shutil.which("uv"):
        return [program]
    if importlib.util.find_spec("uv") is None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"]
        subprocess.run(command, check=True)
    return [sys.executable, "-m", "uv"]


def new_environment(folder: Path) -> list[str]:
    """The command that makes an empty environment."""
    return [*uv(), "venv", "--allow-existing", "--python", sys.executable, str(folder)]


def uv_pip(python: Path | str, action: str, *words: str) -> list[str]:
    """The command that installs packages for an interpreter (`action` "install"), or uninstalls them."""
    return [*uv(), "pip", action, "--python", str(python), *words]


def uv_variables() -> dict[str, str]:
    """pip's settings under uv's names, so that mirrors and wheel folders serve both; uv's own variables win.

    Without a GPU driver, and with no other source configured, torch comes from its CPU index.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as for pip
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    for line in reversed(listed.splitlines()):  # "global.index-url='https://...'"; variables come first, and win
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2]
        if name in UV_NAMES:  # a setting of several lines is a list
            words = str(ast.literal_eval(value)).split()
            separator = "," if name == "find-links" else " "
            variables[UV_NAMES[name]] = separator.join(words)
    own_source = {"UV_FIND_LINKS", "UV_INDEX"} & {*variables, *os.environ}
    if not own_source and not shutil.which("nvidia-smi"):
        variables["UV_TORCH_BACKEND"] = "cpu"
    return {name: os.environ.get(name, value) for name, value in variables.items()}


if __name__ == "__main__":
    command = uv_pip(sys.executable, "install", *sys.argv[1:])
    sys.exit(subprocess.run(command, env=os.environ | uv_variables()).returncode)
