"""Public benchmarks: tasks of lm-evaluation-harness, each model measured once in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, stored_once
from nbutils.files import read_json, stamp
from nbutils.language import tr
from nbutils.masking import without_secrets

Metrics = dict[str, dict[str, float]]  # by task and by name


class Harness:
    """Named lm-eval tasks (or YAML files of your own) on several models; with no task, nothing happens at all.

    Example:
        harness = Harness("hellaswag,arc_easy", run, "bfloat16")
        harness.run("base", folder, ["--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "hellaswag"])
    """

    def __init__(self, tasks: str, run: Path, dtype: str) -> None:
        self.tasks = [name.strip() for name in tasks.split(",") if name.strip()]
        self.folder = run / FOLDER / "lm_eval"
        self.dtype = dtype
        self.results: dict[str, Metrics] = {}
        if self.tasks and find_spec("lm_eval") is None:
            raise CourseError(
                tr("LM_EVAL_TASKS is {tasks!r}, and lm-eval is not installed here.", tasks=tasks),
                todo=tr('Run `pip install "lm-eval>=0.4.9"`, then run this lesson again.'),
            )

    def run(self, name: str, model: Path | str, words: Sequence[str]) -> None:
        """Measure one model with these words of lm-eval's command; a result that is there already is read."""
        if self.tasks:
            self.folder.mkdir(parents=True, exist_ok=True)
            decided_by = {"model": stamp(Path(model)) or name, "dtype": self.dtype, "tasks": self.tasks}
            self.results[name] = stored_once(self.folder / f"{name}.json", decided_by, partial(_measure, words))

    def __str__(self) -> str:
        lines = []
        for name, metrics in self.results.items():
            lines += [f"{name}, {task}: {values}" for task, values in metrics.items()]
        return "\n".join(lines) or tr("no public benchmark was asked for (LM_EVAL_TASKS)")


def _measure(words: Sequence[str]) -> Metrics:
    """One run of lm-eval in a process of its own, which may know the hub's token and no other secret."""
    env = without_secrets(os.environ)
    if "HF_TOKEN" in os.environ:
        env["HF_TOKEN"] = os.environ["HF_TOKEN"]
    with tempfile.TemporaryDirectory() as output:
        # without the word `run`: versions before 0.4.10 do not know it, later ones add it
        command = [sys.executable, "-m", "lm_eval", *words, "--output_path", output]
        ended = subprocess.run(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env, text=True)
        files = sorted(Path(output).rglob("results*.json"))
        if ended.returncode or not files:
            raise CourseError(
                tr(
                    "lm-eval could not run `{command}`. Its last lines:\n{lines}",
                    command=" ".join(words),
                    lines="\n".join(ended.stderr.strip().splitlines()[-12:]),
                ),
                allowed=tr(
                    "names from `lm-eval ls tasks`, or paths of task files, whose data this machine can reach "
                    "(HF_HUB_OFFLINE forbids downloads)"
                ),
                todo=tr("Correct LM_EVAL_TASKS or the network, or leave it empty."),
            )
        results = read_json(files[-1])["results"]
    return {
        task: {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, float)}
        for task, values in results.items()
    }
