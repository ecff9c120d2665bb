"""Under which licence data comes, as the front matter of its README says: of a hub dataset, or of a folder.

Not here: the download of the rows (hub). A licence that is not stated is not guessed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from nbutils.data import hub
from nbutils.platforms import network

UNSTATED = "unstated"
FRONT_MATTER = re.compile(r"\ufeff?---\s*\n(.*?)\n---", re.DOTALL)


def licence_of(source: str) -> str:
    """The licence of a source, or `unstated`."""
    readme = _readme(source)
    if readme is None or not readme.is_file():
        return UNSTATED
    front = FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace"))
    try:
        fields = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        fields = None
    return _stated(fields) if isinstance(fields, dict) else UNSTATED


def _stated(fields: dict[str, Any]) -> str:
    """`license` may be a name, a list of them, or `other` with its own name beside it."""
    value = fields.get("license") or fields.get("licence")
    names = value if isinstance(value, list) else [value]
    named = fields.get("license_name")
    stated = ", ".join(str(name) for name in names if name)
    return f"{stated} ({named})" if stated and named else stated or UNSTATED


def _readme(source: str) -> Path | None:
    """The README of a folder of rows; for a name on the hub, the one of the dataset if it can be had."""
    path = Path(source).expanduser()
    if path.exists():
        return path / "README.md" if path.is_dir() else None
    name = hub.HUB_NAME.fullmatch(source)
    if not name:
        return None
    from huggingface_hub import hf_hub_download

    try:
        offline = not network.hub_online()
        endpoint = os.environ.get("HF_ENDPOINT") or None
        readme = hf_hub_download(
            name["repo"], "README.md", repo_type="dataset", endpoint=endpoint, local_files_only=offline
        )
        return Path(readme)
    except Exception:  # without it the rows are as good; the client's errors are of several libraries
        return None
