"""The merged model in other formats: smaller ones for vLLM, for llama.cpp, for a CPU; each compared with it."""

from nbutils.exporting.make import (
    check_exports,
    ensure_environment,
    export,
    export_formats,
    offer,
    parse_formats,
    recipe_for,
)
