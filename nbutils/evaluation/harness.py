"""A plug for lm-eval: public benchmarks by name, for those with network and time. Off unless tasks are named.

It runs as a process of its own, so that its packages never meet the lesson's model. Not here: our own exam.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.evaluation import keeping
from nbutils.masking import without_secrets

INSTALL = 'pip install "lm-eval>=0.4.9"'
LAST_LINES = 12


class Harness:
    """Named lm-eval tasks (or YAML files of your own) on several models; with no task, nothing happens at all."""

    def __init__(self, tasks: str, run: Path, dtype: str) -> None:
        self.tasks = [name.strip() for name in tasks.split(",") if name.strip()]
        self.folder, self.dtype = run / "evaluation" / "lm_eval", dtype
        self.results: dict[str, dict[str, dict[str, float]]] = {}
        if self.tasks and find_spec("lm_eval") is None:
            raise CourseError(
                f"LM_EVAL_TASKS is {tasks!r}, and lm-eval is not installed here.", "an empty LM_EVAL_TASKS, or lm-eval",
                f"{INSTALL}, then run this lesson again",
            )  # fmt: skip

    def run(self, name: str, model: Path | str, mark: Any) -> None:
        """Let one model sit the tasks; a result that is there already is read."""
        if not self.tasks:
            return
        if "," in str(model):  # lm-eval would read what follows as options of its own
            raise CourseError(f"{model} has a comma in its path.", "a path without one", "rename the folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        decided_by = {"model": mark, "dtype": self.dtype, "tasks": self.tasks}
        file = self.folder / f"{name}.json"
        self.results[name] = keeping.once(file, decided_by, lambda: self._measure(name, str(model)))

    def _measure(self, name: str, model: str) -> dict[str, dict[str, float]]:
        """One run of lm-eval, its own output kept beside the result."""
        print(f"lm-eval: {name} sits {', '.join(self.tasks)}", flush=True)
        output, log = self.folder / f"{name}-lm_eval", self.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
            f"pretrained={model},dtype={self.dtype}", "--tasks", ",".join(self.tasks), "--batch_size", "auto",
            "--device", _device(), "--output_path", str(output),
        ]  # fmt: skip
        before = set(output.rglob("results*.json"))
        with open(log, "w", encoding="utf-8") as out:
            ended = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=_variables()
            )
        made = sorted(set(output.rglob("results*.json")) - before)
        if ended.returncode or not made:
            raise self._failed(log)
        return read_results(made[-1])

    def _failed(self, log: Path) -> CourseError:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        offline = " and HF_HUB_OFFLINE=1 is set" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        return CourseError(
            f"lm-eval could not run {', '.join(self.tasks)}{offline}. Its last lines:\n" + "\n".join(lines),
            "names from `lm-eval ls tasks`, or paths of task files, whose data this machine can reach",
            f"mend LM_EVAL_TASKS or the network, or leave it empty; the whole log is {log}",
        )

    def __str__(self) -> str:
        if not self.results:
            return "no public benchmark was asked for (LM_EVAL_TASKS)"
        first = next(iter(self.results.values()))
        named = [(task, metric) for task in first for metric in first[task] if "stderr" not in metric]
        return "\n".join(f"{task:24} {metric:16} {self._of(task, metric)}" for task, metric in named)

    def _of(self, task: str, metric: str) -> str:
        return "  ".join(f"{name} {one[task][metric]:.3f}" for name, one in self.results.items())


def _variables() -> dict[str, str]:
    """What lm-eval may know: the hub's token, for tasks behind a form, and no other secret."""
    token = os.environ.get("HF_TOKEN")
    return without_secrets(os.environ) | ({"HF_TOKEN": token} if token else {})


def read_results(file: Path) -> dict[str, dict[str, float]]:
    """The numbers of each task: `acc` and `acc_stderr`, the filter named only where it is one."""
    told = json.loads(file.read_text(encoding="utf-8"))["results"]
    return {
        task: {
            key.removesuffix(",none"): float(value) for key, value in numbers.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, numbers in told.items()
    }  # fmt: skip


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
