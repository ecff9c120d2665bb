"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no."""

from __future__ import annotations

from nbutils.evaluation.exam import Exam, Result, general_rows, questions_of
from nbutils.evaluation.harness import Harness
from nbutils.evaluation.inference import Answer, Message, generate, reach
from nbutils.evaluation.metrics import exact_match
from nbutils.evaluation.report import Outcome, about, before_after_table, plot, score_table, write_report

__all__ = [
    "Answer", "Exam", "Harness", "Message", "Outcome", "Result", "about", "before_after_table",
    "exact_match", "general_rows", "generate", "plot", "questions_of", "reach", "score_table",
    "write_report",
]  # fmt: skip
