"""An engine's flags: as words of a command line, and checked against the installed version's own parser.

Not here: which flags (they stand in the lesson; what a card wants, in table). Reading the parser takes seconds, so what
it takes is kept beside the environment, for each version of the engine.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils import paths, platforms
from nbutils.errors import CourseError
from nbutils.serving.environment import ServingEnvironment

SCRIPT = Path(__file__).parent / "inside" / "course_options.py"
SECONDS = 300.0
Flags = Mapping[str, Any] | Sequence[str]
Options = dict[str, dict[str, Any]]
GONE = {  # flags of older versions and of texts about them: what does their work now
    "max-batch-size": "max-num-seqs (how many requests are answered together) and max-num-batched-tokens (how many"
    " tokens one step may hold): vLLM fills each step anew and has no fixed batch",
    "swap-space": "nothing: when the cache is full, vLLM V1 computes a request again instead of swapping it out;"
    " kv-offloading-size (GiB of RAM) keeps cache blocks in the machine's memory",
    "num-scheduler-steps": "nothing: V1 schedules ahead by itself",
    "preemption-mode": "nothing: V1 always recomputes",
    "use-v2-block-manager": "nothing: there is only one now",
    "disable-log-requests": "nothing: requests are logged only with enable-log-requests",
    "max-seq-len-to-capture": "nothing: cudagraph-capture-sizes decides",
}

DECIDED = {  # what a Server decides, as the key depends on it; a flag would come later and win
    "host": "Server(host=...), which also makes the key it needs",
    "port": "PORT, which is Server(port=...)",
    "uds": "Server(host=..., port=...): the course's clients speak TCP",
    "api-key": "Server(api_key=...) or the variable VLLM_API_KEY: a command line can be read by everybody here",
    "hf-token": "the variable HF_TOKEN: a command line can be read by everybody here",
    "model": "the first argument of Server",
    "middleware": "nothing: the guard that asks for the key stands there",
    "config": "each flag by its name: a file could set host, port and key unseen",
    "root-path": "nothing: clients find the server at server.url",
    "grpc": "nothing: no key guards it",
    "headless": "nothing: it would answer nobody",
    "ssl-keyfile": "a proxy in front of it: the course's clients speak plain HTTP on this machine",
    "lora-modules": "Server(adapters={name: folder})",
}


def flag_words(flags: Flags) -> list[str]:
    """Flags as words: True is a bare flag, False its `--no-` form, None leaves it out, a mapping is written as JSON."""
    if not isinstance(flags, Mapping):
        return [str(word) for word in flags]
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        values = [] if isinstance(value, bool) else value if isinstance(value, list | tuple) else [value]
        words += [
            f"--no-{name}" if value is False else f"--{name}",
            *(json.dumps(one) if isinstance(one, Mapping) else str(one) for one in values),
        ]
    return words


def refuse_decided(words: Sequence[str]) -> None:
    """Stop at a flag that would overrule what the Server decides, however it is spelt."""
    for word in filter(_is_flag, words):
        bare = re.split(r"[=.]", word.lstrip("-"))[0].replace("_", "-")
        group = next((name for name in DECIDED if word.startswith("--") and _means(bare, name)), "")
        if group:
            raise CourseError(
                f"flags has {bare}, which is not for flags to decide.", f"instead of it: {DECIDED[group]}",
                f"take {bare} out of the flags",
            )  # fmt: skip


def _means(bare: str, name: str) -> bool:
    """Whether a flag is this one, its beginning (parsers complete it), or of the same family (ssl-…, grpc-…)."""
    family = name.partition("-")[0] + "-" if name.startswith(("ssl", "grpc")) else "\n"
    return bool(bare) and (name.startswith(bare) or bare.startswith(family))


def value_of(words: Sequence[str], name: str) -> str | None:
    """The first value a flag has among these words; None if it is not there."""
    place = next(
        (place for place, word in enumerate(words) if word in (f"--{name}", f"--{name.replace('-', '_')}")), -1
    )
    spellings = (f"--{name}=", f"--{name.replace('-', '_')}=")
    joined = next((word.partition("=")[2] for word in words if word.startswith(spellings)), None)
    return words[place + 1] if 0 <= place < len(words) - 1 else joined


def options(environment: ServingEnvironment) -> Options | None:
    """What the installed engine's parser takes; None where it cannot be asked (its start will tell why)."""
    engine_key = _ask(environment, "key", 60.0)
    if engine_key is None:
        return None
    kept = _cache(environment, engine_key)
    try:
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        print("Reading which flags the installed engine takes (once for each version, some seconds).", flush=True)
    found = _ask(environment, "options", SECONDS)
    if found:
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths.write_json(kept, found)
    return found


def knows_patterns(environment: ServingEnvironment) -> bool:
    """Whether the installed vLLM heeds ranks and weights of single layers (0.26 does not); its start tells if not."""
    return _ask(environment, "patterns", 60.0) is not False


def check(words: Sequence[str], known: Options) -> None:
    """Stop at the first flag the parser would refuse; the error names what comes nearest, or what took its place."""
    place = 0
    while place < len(words):
        name, _, value = words[place].partition("=")
        end = next((at for at in range(place + 1, len(words)) if _is_flag(words[at])), len(words))
        values = [value] if "=" in words[place] else list(words[place + 1 : end])
        _check_one(name, values, known)
        place = end


def _check_one(name: str, values: list[str], known: Options) -> None:
    option = known.get(name) or known.get(name.replace("_", "-")) or known.get(name.partition(".")[0])
    if option is None:
        raise _unknown(name, known)
    if "." in name and name not in known:
        return  # one key of a flag that takes JSON
    count = {"none": values == [], "one": len(values) == 1}.get(option["values"], bool(values))
    if not count:
        wanted = {"none": "no value", "one": "one value"}.get(option["values"], "one value or more")
        raise _wrong(name, values, wanted)
    if option["choices"] and (other := [value for value in values if value not in option["choices"]]):
        raise _wrong(name, other, "one of " + ", ".join(option["choices"]))
    if option["type"] and not all(_is_number(value, option["type"]) for value in values):
        raise _wrong(name, values, {"int": "a whole number", "float": "a number"}[option["type"]])


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word, "float")


def _is_number(value: str, kind: str) -> bool:
    try:
        return bool(str((int if kind == "int" else float)(value)))
    except ValueError:
        return False


def _wrong(name: str, values: list[str], wanted: str) -> CourseError:
    told = " ".join(values) or "nothing"
    return CourseError(f"the flag {name} was given {told}.", f"{name} takes {wanted}", "mend it in the cell with flags")


def _unknown(name: str, known: Options) -> CourseError:
    """What to write instead of a flag the installed version does not have."""
    bare = name.lstrip("-").replace("_", "-")
    if bare in GONE:
        return CourseError(
            f"the flag {name} does not exist in the installed version.", f"what took its place: {GONE[bare]}",
            "take it out of the cell with flags, or write what took its place",
        )  # fmt: skip
    near = difflib.get_close_matches(f"--{bare}", known, n=3, cutoff=0.6)
    allowed = f"the nearest are {', '.join(near)}" if near else f"one of its {len(known)} flags; none is like this one"
    return CourseError(f"the installed version has no flag {name}.", allowed, "mend it in the cell with the flags")


def _ask(environment: ServingEnvironment, what: str, seconds: float) -> Any:
    """Run the script in the interpreter that serves; None if it fails."""
    command = [str(environment.python), str(SCRIPT), what, environment.engine]
    try:
        told = subprocess.run(
            command, env=environment.variables(), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        return json.loads(told.stdout.strip().splitlines()[-1]) if told.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def _cache(environment: ServingEnvironment, engine_key: str) -> Path:
    """Where the options of this version are kept: in the environment if it is ours, else in the scratch folder."""
    about = hashlib.sha256(f"{environment.python}|{environment.engine}|{engine_key}".encode()).hexdigest()[:16]
    folder = environment.folder or platforms.folders(platforms.detect()).scratch
    return folder / f"options-{about}.json"
