"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no.

answers, keeping: asking; losses, scores, control: measuring; statistics, verdict, comparing: judging; drawing, report, harness.
Not here: network judges, or loading models (the lessons do that).
"""

from __future__ import annotations

from nbutils.evaluation.answers import Answer, Message, generate, prompt_ids, questions_of, stop_ids
from nbutils.evaluation.comparing import Outcome
from nbutils.evaluation.exam import Exam, Result
from nbutils.evaluation.drawing import plot
from nbutils.evaluation.report import write_report
from nbutils.evaluation.scores import before_after_table, exact_match

__all__ = [
    "Answer", "Exam", "Message", "Outcome", "Result", "before_after_table", "exact_match", "generate", "plot",
    "prompt_ids", "questions_of", "stop_ids", "write_report",
]  # fmt: skip
