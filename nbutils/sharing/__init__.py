"""Giving a model away, only when asked to: to the Hub, ModelScope or Kaggle, or as one file to download.

pushing: the uploads; card: what stands on the model's page; packing: one file; contents: which files.
Not here: making exports (exporting).
"""

from __future__ import annotations

from nbutils.sharing.card import model_card
from nbutils.sharing.packing import SingleFile, download_hint, single_file
from nbutils.sharing.pushing import PLACES, Pushed, push

__all__ = ["PLACES", "Pushed", "SingleFile", "download_hint", "model_card", "push", "single_file"]
