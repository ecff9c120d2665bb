"""Is it still the same model? The same texts through every form of it, and how far their predictions are apart."""

from nbutils.evaluation import Placement, place_model
from nbutils.parity.predictions import Fixed, Gap, Predictions, PredictionStore, fixed_set, gap, measure, measure_server
from nbutils.parity.proof import Proof, add_adapter, prove, require_tokenizer
from nbutils.parity.verdict import Report

__all__ = [
    "Fixed", "Gap", "Placement", "PredictionStore", "Predictions", "Proof", "Report", "add_adapter", "fixed_set", "gap",
    "measure", "measure_server", "place_model", "prove", "require_tokenizer",
]  # fmt: skip
