"""A script for the interpreter that serves: which options does this version of the engine take? Prints JSON.

It runs where nbutils is not installed, so it imports nothing of it. `key` tells which version this is, and `patterns`
whether adapters may have ranks of single layers, in a moment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from typing import Any


def key(engine: str) -> str:
    """What changes when the engine does."""
    name = "transformers" if engine == "transformers" else "vllm"
    found = importlib.util.find_spec(name)
    assert found and found.origin
    place = found.origin
    for distribution in (engine, name):
        try:
            return f"{importlib.metadata.version(distribution)}-{int(os.stat(place).st_mtime)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{place}-{int(os.stat(place).st_mtime)}"


def patterns(engine: str) -> bool:
    """Whether this vLLM reads an adapter's `rank_pattern` and `alpha_pattern`; nothing is imported for it."""
    found = importlib.util.find_spec("vllm")
    assert found and found.origin and engine != "transformers"
    with open(os.path.join(os.path.dirname(found.origin), "lora", "peft_helper.py"), encoding="utf-8") as reader:
        return "rank_pattern" in reader.read()


def vllm_parser() -> Any:
    """The parser of the API server, wherever this version keeps it."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    return make_arg_parser(FlexibleArgumentParser())


def vllm_options() -> dict[str, Any]:
    """Option -> how many values it takes, which, and of which type."""
    return {
        option: {
            "values": "none" if action.nargs == 0 else "many" if action.nargs in ("+", "*") else "one",
            "choices": [str(choice) for choice in action.choices] if action.choices else None,
            "type": action.type.__name__ if action.type in (int, float) else None,
        }
        for action in vllm_parser()._actions
        for option in action.option_strings
    }


def transformers_options() -> dict[str, Any]:
    """The same of `transformers serve`."""
    from transformers.cli import transformers

    group: Any = transformers.app
    if not hasattr(group, "commands"):  # versions differ in whether it is typer's or click's
        import typer

        group = typer.main.get_command(group)
    return {
        option: {
            "values": "none" if getattr(parameter, "is_flag", False) else "one",
            "choices": [str(choice) for choice in getattr(parameter.type, "choices", None) or []] or None,
            "type": {"integer": "int", "float": "float"}.get(parameter.type.name),
        }
        for parameter in group.commands["serve"].params
        for option in [*parameter.opts, *parameter.secondary_opts]
        if option.startswith("-")
    }


if __name__ == "__main__":
    asked, engine_name = sys.argv[1:]
    listed = vllm_options if engine_name != "transformers" else transformers_options
    short = {"key": key, "patterns": patterns}
    print(json.dumps(short[asked](engine_name) if asked in short else listed()))
