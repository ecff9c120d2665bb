"""The model's page: what it was made from and how it is loaded, from the files of its folder alone.

Not here: anything about this machine; no path, no name of a person, no data stands on it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nbutils import masking, paths
from nbutils.exporting.formats import FORMATS

PATH = re.compile(r"^([/~\\.]|[A-Za-z]:[\\/])")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(folder: Path, name: str) -> str:
    """A README.md for this model; a base that was a folder is named by its last part only."""
    about = paths.stamp(folder) or {}
    config = _settings(folder / "config.json")
    base = public_name(str(about.get("base", "")))
    form = str(about.get("format", config.get("dtype", config.get("torch_dtype", ""))))
    head = {"library_name": "gguf" if form.startswith("gguf") else "transformers", "pipeline_tag": "text-generation"}
    if HUB_ID.fullmatch(base):
        head["base_model"] = base
    lines = ["---", *(f"{key}: {value}" for key, value in head.items()), "tags:", "- lora", "- merged", "---", ""]
    lines += [f"# {public_name(name)}", "", "Fine-tuned with LoRA; the adapter is merged into the weights.", ""]
    facts = {"base model": base, "form": _form(form), "made by": str(about.get("method", ""))}
    lines += [f"- {key}: {value}" for key, value in facts.items() if value]
    return masking.mask_secrets("\n".join([*lines, "", "```", _loading(form, public_name(name)), "```", ""]))


def public_name(name: str) -> str:
    """A Hub id as it is; of a folder of this machine only its name."""
    return Path(name).name if PATH.search(name) or name.count("/") > 1 else name


def _form(form: str) -> str:
    return f"{form}: {FORMATS[form].purpose}" if form in FORMATS else form


def _loading(form: str, name: str) -> str:
    line = FORMATS[form].load if form in FORMATS else "vllm serve {path}"
    return line.format(path=name)


def _settings(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
