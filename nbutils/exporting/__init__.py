"""The merged model in other formats: smaller ones for vLLM, for llama.cpp, for a CPU; each compared with it."""

from nbutils.exporting.make import answer, check_exports, chosen, ensure_environment, export, offer, recipe_for

__all__ = ["answer", "check_exports", "chosen", "ensure_environment", "export", "offer", "recipe_for"]
