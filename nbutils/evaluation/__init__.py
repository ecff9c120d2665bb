"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no.

rows, answers, keeping, exam: asking; losses, scores, control: measuring; statistics, evidence, verdict, flags,
forgetting, comparing: judging; drawing, report: showing; harness: public benchmarks.
Not here: network judges, or loading models (the lessons do that).
"""

from __future__ import annotations

from nbutils.evaluation.answers import Answer, Message, generate, reach
from nbutils.evaluation.comparing import Outcome, score_table
from nbutils.evaluation.drawing import plot
from nbutils.evaluation.exam import Exam, Result
from nbutils.evaluation.harness import Harness
from nbutils.evaluation.report import about, write_report
from nbutils.evaluation.rows import general_rows, questions_of
from nbutils.evaluation.scores import before_after_table, exact_match

__all__ = [
    "Answer", "Exam", "Harness", "Message", "Outcome", "Result", "about", "before_after_table",
    "exact_match", "general_rows", "generate", "plot", "questions_of", "reach", "score_table",
    "write_report",
]  # fmt: skip
