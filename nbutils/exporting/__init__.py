"""The merged model in other formats: smaller ones for vLLM, for llama.cpp, for a CPU; each compared with it."""

from nbutils.exporting.compare import ParityLine, check, check_exports, quick_set, read_merged, reference
from nbutils.exporting.make import FORMATS, Export, chosen, ensure_environment, export, offer, open_export

__all__ = [
    "FORMATS", "Export", "ParityLine", "check", "check_exports", "chosen", "ensure_environment", "export", "offer",
    "open_export", "quick_set", "read_merged", "reference",
]  # fmt: skip
