"""Plain generate in a process of its own: its memory is free when it ends, and it ends with the process that asked.

Not here: generate itself (rivals). Question and answer are files in a folder that is removed afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nbutils import paths, processes
from nbutils.bench import limits, rivals
from nbutils.bench.numbers import Level
from nbutils.bench.prompts import Settings, tokenizer_of
from nbutils.errors import CourseError
from nbutils.masking import without_secrets
from nbutils.serving import logs

CODE = "import sys; from nbutils.bench import alone; alone.work(alone.Path(sys.argv[1]))"
ASKED, FOUND, LOG = "asked.json", "found.json", "generate.log"


@dataclass(frozen=True)
class Found:
    """The levels of plain generate, and the card's bandwidth in bytes a second (0 without one)."""

    bandwidth: float
    levels: list[Level]


def measure(folder: Path, dtype: str, settings: Settings) -> Found:
    """Let another process load the model and measure it."""
    with TemporaryDirectory(prefix="nbutils-generate-") as made:
        place = Path(made)
        paths.write_json(
            place / ASKED, {"folder": str(folder.absolute()), "dtype": dtype, "settings": asdict(settings)}
        )
        env = without_secrets(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        status = processes.run([sys.executable, "-c", CODE, made], env, place / LOG)
        if status:
            told = logs.errors(place / LOG) or [logs.tail(place / LOG)]
            raise CourseError(
                f"plain generate ended with status {status}: {' '.join(told)}",
                "a model that transformers loads on this machine", "leave it out with --rivals, or mend what is told",
            )  # fmt: skip
        found = json.loads((place / FOUND).read_text(encoding="utf-8"))
    return Found(found["bandwidth"], [Level(**level) for level in found["levels"]])


def work(place: Path) -> None:
    """What the other process does."""
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.loads((place / ASKED).read_text(encoding="utf-8"))
    settings = Settings(**asked["settings"])
    cuda = torch.cuda.is_available()
    bandwidth = limits.copy_bandwidth() if cuda else 0.0
    model = AutoModelForCausalLM.from_pretrained(
        asked["folder"], dtype=asked["dtype"], device_map={"": 0 if cuda else "cpu"}, trust_remote_code=False
    ).eval()
    levels = [asdict(level) for level in rivals.static(model, settings, tokenizer_of(Path(asked["folder"])))]
    paths.write_json(place / FOUND, {"bandwidth": bandwidth, "levels": levels})
