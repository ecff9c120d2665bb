"""Public benchmarks: tasks of lm-evaluation-harness, each model measured once in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import stored_once
from nbutils.files import make_folder, read_json, stamp
from nbutils.language import last_lines, split_words
from nbutils.masking import without_secrets

Metrics = dict[str, dict[str, Any]]  # by task and by name


def parse_tasks(text: str) -> list[str]:
    """The lm-eval tasks (names, or YAML files of your own) in a parameter such as "hellaswag, arc_easy"."""
    tasks = split_words(text)
    if tasks and find_spec("lm_eval") is None:
        raise CourseError(
            "LM_EVAL_TASKS is {tasks!r}, and lm-eval is not installed here.",
            todo='Run `pip install "lm-eval>=0.4.9"`, then run this lesson again.',
            tasks=text,
        )
    return tasks


def run_tasks(words: Sequence[str], model: Path | str, file: Path) -> Metrics:
    """What lm-eval measures with these words of its command, under its own names; once for a model, then from `file`.

    Example:
        words = ["--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "hellaswag"]
        print(run_tasks(words, folder, run / "evaluation/lm_eval/base.json"))
    """
    make_folder(file.parent)
    metrics: Metrics = stored_once(file, {"words": words, "model": stamp(Path(model))}, lambda: _measure(words))
    return metrics


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
                "lm-eval could not run `{command}`. Its last lines:\n{lines}",
                allowed=(
                    "names from `lm-eval ls tasks`, or paths of task files, whose data this machine can reach "
                    "(HF_HUB_OFFLINE forbids downloads)"
                ),
                todo="Correct LM_EVAL_TASKS or the network, or leave it empty.",
                command=" ".join(words),
                lines=last_lines(ended.stderr, 12),
            )
        metrics: Metrics = read_json(files[-1])["results"]
    return metrics
