"""lm-eval: public benchmarks by name, for those with network and time. Off unless tasks are named.

It runs as a process of its own, so that its packages never meet the lesson's model.
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
from nbutils.evaluation.exam import FOLDER, stored_once
from nbutils.masking import without_secrets


class Harness:
    """Named lm-eval tasks (or YAML files of your own) on several models; with no task, nothing happens at all."""

    def __init__(self, tasks: str, run: Path, dtype: str) -> None:
        self.tasks = [name.strip() for name in tasks.split(",") if name.strip()]
        self.folder, self.dtype = run / FOLDER / "lm_eval", dtype
        self.results: dict[str, dict[str, dict[str, float]]] = {}
        if self.tasks and find_spec("lm_eval") is None:
            raise CourseError("evaluation.no_lm_eval", tasks=tasks)

    def run(self, name: str, model: Path | str, mark: Any) -> None:
        """Measure one model, whose fingerprint is `mark`; a result that is there already is read."""
        if not self.tasks:
            return
        if "," in str(model):  # lm-eval would read what follows as options of its own
            raise CourseError("evaluation.comma_in_path", model=model)
        self.folder.mkdir(parents=True, exist_ok=True)
        decided_by = {"model": mark, "dtype": self.dtype, "tasks": self.tasks}
        file = self.folder / f"{name}.json"
        self.results[name] = stored_once(file, decided_by, lambda: self._measure(name, str(model)))

    def _measure(self, name: str, model: str) -> dict[str, dict[str, float]]:
        """One run of lm-eval, its own output kept beside the result. It may know the hub's token, no other secret."""
        import torch

        print(f"lm-eval: {', '.join(self.tasks)} on {name}", flush=True)
        output, log = self.folder / f"{name}-lm_eval", self.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
            f"pretrained={model},dtype={self.dtype}", "--tasks", ",".join(self.tasks), "--batch_size", "auto",
            "--device", "cuda:0" if torch.cuda.is_available() else "cpu", "--output_path", str(output),
        ]  # fmt: skip
        token = os.environ.get("HF_TOKEN")
        env = without_secrets(os.environ) | ({"HF_TOKEN": token} if token else {})
        before = set(output.rglob("results*.json"))
        with open(log, "w", encoding="utf-8") as out:
            ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        made = sorted(set(output.rglob("results*.json")) - before)
        if ended.returncode or not made:
            lines = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:])
            raise CourseError("evaluation.lm_eval_failed", tasks=", ".join(self.tasks), lines=lines, log=log)
        results = json.loads(made[-1].read_text(encoding="utf-8"))["results"]
        return {task: _numbers(found) for task, found in results.items()}

    def __str__(self) -> str:
        if not self.results:
            return "no public benchmark was asked for (LM_EVAL_TASKS)"
        lines = []
        for task, found in next(iter(self.results.values())).items():
            for metric in (name for name in found if "stderr" not in name):
                values = "  ".join(f"{name} {one[task][metric]:.3f}" for name, one in self.results.items())
                lines.append(f"{task:24} {metric:16} {values}")
        return "\n".join(lines)


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    """The metrics of a task: `acc` and `acc_stderr`, the filter named only where it is one."""
    metrics = {key.removesuffix(",none"): value for key, value in found.items() if "," in key}
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
