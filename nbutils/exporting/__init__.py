"""The merged model in other forms: smaller ones for vLLM, for llama.cpp, for a plain CPU; each compared with it.

formats: which there are; offering: which can be made here; planning, making: one export; checking: is it still the same
model; reference: what a server is compared with; environment, process: where the libraries live; inside: what runs
there.
Not here: merging (merging), giving a model away (sharing).
"""

from __future__ import annotations

from nbutils.exporting.checking import ParityLine, check, quick_set, read_merged, table
from nbutils.exporting.environment import ensure_environment
from nbutils.exporting.formats import FORMATS, Format, chosen
from nbutils.exporting.making import Export, export
from nbutils.exporting.offering import Offer, offer
from nbutils.exporting.reference import Price, Reference, reference

__all__ = [
    "FORMATS", "Export", "Format", "Offer", "ParityLine", "Price", "Reference", "check", "chosen", "ensure_environment",
    "export", "offer", "quick_set", "read_merged", "reference", "table",
]  # fmt: skip
