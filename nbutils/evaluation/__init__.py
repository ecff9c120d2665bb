"""Did the tuning help? The same questions before and after, scores with intervals, and a verdict that can say no."""

from nbutils.evaluation.bits import base_losses
from nbutils.evaluation.comparison import (
    compare_models,
    compare_practice,
    open_evaluator,
    result_table,
    score_table,
    stored_answers,
)
from nbutils.evaluation.evaluator import Evaluator, Size
from nbutils.evaluation.harness import parse_tasks, run_tasks
from nbutils.evaluation.inference import Answer, answer_rows
from nbutils.evaluation.placement import place_model
