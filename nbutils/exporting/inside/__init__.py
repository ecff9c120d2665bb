"""What runs in the export environment, started by `process`: a job comes as JSON, an answer goes back as JSON.

Not here: anything that this kernel runs; heavy libraries are loaded by the job that needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbutils.exporting.inside import compressing, converting, reading

JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compress": compressing.compress,
    "calibrate": compressing.calibrate,
    "int8": compressing.int8,
    "gguf": converting.convert,
    "read": reading.read,
}


def main(file: str) -> None:
    """Do the job in this file and write its answer, last."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    answer = JOBS[job["do"]](job)
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
