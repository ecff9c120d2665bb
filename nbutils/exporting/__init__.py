"""The merged model in other formats: smaller ones for vLLM, for llama.cpp, for a CPU; each compared with it."""

from nbutils.exporting.compare import ParityLine, Price, Reference, check, quick_set, read_merged, reference, table
from nbutils.exporting.formats import FORMATS, Format, Offer, chosen, ensure_environment, offer
from nbutils.exporting.make import Export, export

__all__ = [
    "FORMATS", "Export", "Format", "Offer", "ParityLine", "Price", "Reference", "check", "chosen", "ensure_environment",
    "export", "offer", "quick_set", "read_merged", "reference", "table",
]  # fmt: skip
