"""One job in the export environment: a process of its own that ends with this kernel, a line now and then.

Not here: what the job does (inside). The course's own package is handed over by path, so the environment holds
nothing of it, and nothing of this kernel's packages reaches the job.
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbutils import environments, processes
from nbutils.errors import CourseError
from nbutils.exporting import environment
from nbutils.masking import mask_secrets
from nbutils.paths import PACKAGE

START = """
import importlib.util, sys
package, job = sys.argv[1:]
spec = importlib.util.spec_from_file_location("nbutils", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["nbutils"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from nbutils.exporting.inside import main
main(job)
"""
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
CALM = {"OMP_WAIT_POLICY": "passive"}  # idle threads sleep instead of spin, as everywhere (hardware.share_processors)


def run(need: str, job: Mapping[str, Any], title: str, progress: bool = True) -> dict[str, Any]:
    """Do a job in the interpreter that has the module `need`; what it answers."""
    python = environment.interpreter(need)
    with tempfile.TemporaryDirectory(prefix="nbutils-export-") as place:
        file, log, answer = (Path(place) / name for name in ("job.json", "log.txt", "answer.json"))
        file.write_text(json.dumps({**job, "answer": str(answer)}, default=str), encoding="utf-8")
        command = [str(python), "-c", START, str(PACKAGE), str(file)]
        env = environments.variables(environment.PREFIX, QUIET | CALM)
        status = processes.run(command, env, log, lambda seconds: _tell(title, seconds, log) if progress else None)
        if status != 0 or not answer.exists():
            raise failed(title, status, log.read_text(encoding="utf-8", errors="replace"))
        return dict(json.loads(answer.read_text(encoding="utf-8")))


def _tell(title: str, seconds: float, log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace")
    print(f"  {title}: {seconds:.0f} s, {mask_secrets((lines(text) or ['begun'])[-1])[:90]}", flush=True)


def lines(text: str) -> list[str]:
    """The lines of a log that say something; every state of a bar is one."""
    found = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in found if line]


def failed(title: str, status: int, text: str) -> CourseError:
    """A job that failed, in plain words."""
    tail = "\n".join(lines(text)[-8:])
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL) or re.search(
        r"OutOfMemory|out of memory|Cannot allocate memory|MemoryError", text
    ):
        return CourseError(
            f"{title}: the memory of this machine did not suffice.", "memory for the model, or for one file of it",
            "stop other notebooks and servers; fp8, w4a16 and the gguf formats need the least",
        )  # fmt: skip
    if "pre-tokenizer was not recognized" in text:
        return CourseError(
            f"{title}: the converter does not know how this model's tokenizer cuts text.",
            "a model with the tokenizer of a known family (Qwen, Llama, GLM, …)", "export to another format",
        )  # fmt: skip
    if re.search(r"Model \S+ is not supported", text):
        return CourseError(
            f"{title}: the converter does not know this kind of model.", "the architectures of llama.cpp",
            "export to another format",
        )  # fmt: skip
    return CourseError(
        f"{title} failed in the export environment:\n{tail}", "a job that ends well",
        "read the last lines; another format may do",
    )  # fmt: skip
