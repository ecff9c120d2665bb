"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no."""

from nbutils.evaluation.evaluator import Evaluator, Harness, Result, general_rows, questions_of
from nbutils.evaluation.inference import Answer, Message, generate
from nbutils.evaluation.metrics import exact_match
from nbutils.evaluation.models import Placement, compare_models, open_evaluator, place_model, stored_answers
from nbutils.evaluation.report import Comparison, before_after_table, score_table, write_report

__all__ = [
    "Answer", "Comparison", "Evaluator", "Harness", "Message", "Placement", "Result",
    "before_after_table", "compare_models", "exact_match", "general_rows", "generate", "open_evaluator",
    "place_model", "questions_of", "score_table", "stored_answers", "write_report",
]  # fmt: skip
