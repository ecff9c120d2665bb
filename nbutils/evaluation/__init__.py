"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no."""

from nbutils.evaluation.comparison import compare_models, open_evaluator, place_model, score_table, stored_answers
from nbutils.evaluation.evaluator import Evaluator, Harness, Size, before_after_table, exact_match
from nbutils.evaluation.inference import Answer, Message, generate

__all__ = [
    "Answer", "Evaluator", "Harness", "Message", "Size", "before_after_table", "compare_models", "exact_match",
    "generate", "open_evaluator", "place_model", "score_table", "stored_answers",
]  # fmt: skip
