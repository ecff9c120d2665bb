"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no."""

from nbutils.evaluation.comparison import compare_models, open_evaluator, score_table, stored_answers
from nbutils.evaluation.evaluator import Evaluator, Size
from nbutils.evaluation.harness import Harness
from nbutils.evaluation.inference import Answer, Message
from nbutils.evaluation.placement import place_model

__all__ = [
    "Answer",
    "Evaluator",
    "Harness",
    "Message",
    "Size",
    "compare_models",
    "open_evaluator",
    "place_model",
    "score_table",
    "stored_answers",
]
