"""The YAML files of `configs`: the keys of a profile, how a file is read, and every mistake in it at once, by name.

The comment beside a value is the reason a learner is shown for it. There are no defaults: every key is required, so
that the YAML shows everything a run uses. Scalars are read as in YAML 1.2: `on` is text, `2e-4` a number.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nbutils import paths
from nbutils.errors import CourseError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Overrides = Mapping[str, tuple[Any, str]]  # {dotted name: (value, reason)}
NOT_SETTABLE = {"model": "is not set this way: use MODEL", "about": "is not set, it describes the profile"}


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversions ("8" is not a number; 1 may stand for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Entry = TypeVar("Entry", bound=Strict)


class Lora(Strict):
    """The adapter."""

    rank: Count
    alpha: Count
    dropout: Fraction
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)]
    use_rslora: bool


class Quantization(Strict):
    """How the frozen base model is stored."""

    type: Literal["nf4", "fp4", "none"]
    double: bool


class Train(Strict):
    """The training run."""

    max_length: Annotated[int, Field(ge=16)]
    batch: Auto | Count
    micro_batch: Auto | Count
    epochs: Auto | Annotated[float, Field(ge=0)]
    max_steps: ZeroOrMore
    learning_rate: Auto | Annotated[float, Field(gt=0, lt=1)]
    scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"]
    warmup_ratio: Fraction
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: Annotated[float, Field(gt=0)]
    optimizer: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
    packing: Auto | bool
    gradient_checkpointing: Literal["auto", "off", "on", "offload"]
    shorten: bool
    save_steps: Auto | Count
    keep_checkpoints: Count
    logging_steps: Count
    validation_rows: Auto | ZeroOrMore
    keep_best: bool
    early_stopping: ZeroOrMore

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step on all GPUs: packed rows where rows are packed, else conversations."""
        if self.batch == "auto":
            raise CourseError("config.batch_not_settled")
        return self.batch

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimizer step on one GPU."""
        return self.accumulation_on(1)

    def accumulation_on(self, gpus: int) -> int:
        """Micro-steps of an optimizer step on each of several GPUs, which share the batch."""
        if self.micro_batch == "auto" or self.step_rows % (self.micro_batch * gpus):
            raise CourseError("config.batch_not_divisible", batch=self.batch, gpus=gpus, micro_batch=self.micro_batch)
        return self.step_rows // (self.micro_batch * gpus)


class Machine(Strict):
    """What depends on the GPU; `auto` asks it."""

    precision: Literal["auto", "bf16", "fp16", "fp32"]
    attention: Literal["auto", "sdpa", "flash_attention_2", "varlen"]
    liger: Literal["auto", "on", "off"]


class Data(Strict):
    """Which data is used where none is named, and how much of it."""

    source: str
    rows: ZeroOrMore


class Evaluation(Strict):
    """The comparison before and after."""

    batch_size: Count
    max_new_tokens: Count
    rows: ZeroOrMore


class Serve(Strict):
    """The server of lesson 05."""

    max_model_len: Annotated[int, Field(ge=16)]
    gpu_memory: Annotated[float, Field(gt=0, le=1)]
    max_num_seqs: Count


class Profile(Strict):
    """One profile: a whole run, from the model to the server."""

    about: Text
    model: Text
    method: Literal["auto", "qlora", "lora"]
    lora: Lora
    quantization: Quantization
    train: Train
    machine: Machine
    data: Data
    evaluation: Evaluation
    serve: Serve


# Two keys, whether their values cannot go together, and what to say then.
PAIRS: tuple[tuple[str, str, Any, str], ...] = (
    ("method", "quantization.type", lambda method, kind: method == "qlora" and kind == "none",
     "qlora trains on a quantized base: set quantization.type=nf4, or method=lora"),
    ("method", "quantization.type", lambda method, kind: method == "lora" and kind != "none",
     "lora keeps its base as it is: set quantization.type=none and quantization.double=false, or method=qlora"),
    ("quantization.type", "quantization.double", lambda kind, double: kind == "none" and double,
     "there are no quantization constants to quantize again: set quantization.double=false"),
    ("train.epochs", "train.max_steps", lambda epochs, steps: epochs == 0 and steps == 0,
     "nothing would be trained: set one of them"),
    ("train.scheduler", "train.warmup_ratio", lambda scheduler, ratio: scheduler == "constant" and ratio > 0,
     "constant ignores its warm-up: choose constant_with_warmup, or warmup_ratio 0"),
    ("train.max_length", "serve.max_model_len", lambda trained, served: trained > served,
     "the server would refuse texts as long as those trained on: raise max_model_len"),
    ("evaluation.max_new_tokens", "serve.max_model_len", lambda answer, served: answer >= served,
     "the answer alone fills the server's context: lower max_new_tokens"),
    ("machine.precision", "machine.attention",
     lambda precision, attention: precision == "fp32" and attention in ("flash_attention_2", "varlen"),
     "FlashAttention computes in 16 bits only: choose sdpa"),
    ("train.batch", "train.micro_batch", lambda batch, micro: "auto" not in (batch, micro) and batch % micro != 0,
     "a step is made of whole micro-steps: choose a micro_batch that divides the batch, or auto"),
)  # fmt: skip


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Nested mappings as {dotted name: value}; anything that is not a mapping is a value."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return leaves


def shown(value: Any) -> str:
    """A value as the YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return '""'
    return ", ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


def keys(model: type[BaseModel] = Profile, above: str = "") -> list[str]:
    """Every dotted name a profile has, in the order of the YAML."""
    listed: list[str] = []
    for name, info in model.model_fields.items():
        group: Any = info.annotation
        nested = isinstance(group, type) and issubclass(group, BaseModel)
        listed += keys(group, f"{above}{name}.") if nested else [f"{above}{name}"]
    return listed


# ---- files


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without the surprises of YAML 1.1."""


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_BOOL, _FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBER = r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan)$"
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT, re.compile(_NUMBER), list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """A valid profile with the reason written beside each of its values, and of those that were replaced since."""

    profile: Profile
    reasons: dict[str, str]
    file: Path
    replaced: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """The profiles of the course: the files of `configs` that say what they are `about`."""
    return sorted(file.stem for file in paths.CONFIGS.glob("*.yaml") if "\nabout:" in file.read_text(encoding="utf-8"))


def load(name: str) -> Profile:
    """The profile of that name, or of a YAML file of your own."""
    return read(name).profile


def read(name: str) -> Document:
    """The profile of that name with its reasons; all mistakes in it are reported at once."""
    file = Path(name).expanduser()
    if not (file.suffix in (".yaml", ".yml") and file.is_file()):
        if name not in names():
            near = difflib.get_close_matches(file.stem.lower(), names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise CourseError("config.unknown_profile", name=name, names=", ".join(names()), hint=hint)
        file = paths.CONFIGS / f"{name}.yaml"
    tree, reasons, duplicates = _read_yaml(file)
    refuse([*duplicates, *problems(tree)], str(file))
    return Document(Profile.model_validate(tree), reasons, file.absolute())


def with_overrides(document: Document, overrides: Overrides) -> Document:
    """The profile with some values replaced, checked again as a whole."""
    known = [name for name in keys() if name not in NOT_SETTABLE]
    unknown = [name for name in overrides if name not in known]
    wrong = [f"{name}: {NOT_SETTABLE.get(name) or f'unknown key{did_you_mean(name, known)}'}" for name in unknown]
    tree = document.profile.model_dump()
    for name, (value, _) in overrides.items():
        group, _, leaf = name.rpartition(".")
        if name in known:
            (tree[group] if group else tree)[leaf] = value
    if tree["method"] == "auto" and overrides.get("quantization.type", ("none",))[0] != "none":
        tree["method"] = "qlora"  # whoever names a quantization wants it
    steps = tree["train"]["max_steps"]
    if "train.epochs" in overrides and "train.max_steps" not in overrides and steps:
        wrong.append(f"train.epochs: train.max_steps is {steps} and ends the run first; set train.max_steps=0 too")
    reasons = {name: reason for name, (_, reason) in overrides.items()}
    refuse([*wrong, *problems(tree)], f"{document.file.stem} with {' and '.join(dict.fromkeys(reasons.values()))}")
    return replace(document, profile=Profile.model_validate(tree), replaced=reasons)


def read_table(name: str, model: type[Entry]) -> dict[str, Entry]:
    """A file of `configs` with one block for each entry."""
    tree, _, wrong = _read_yaml(paths.CONFIGS / name)
    wrong = wrong + [f"{key}.{where}: {text}" for key in tree for where, text in _mistakes(tree[key], model).items()]
    refuse(wrong, str(paths.CONFIGS / name), name)
    return {str(key): model.model_validate(entry) for key, entry in tree.items()}


def settings_in(text: str) -> dict[str, Any]:
    """`train.learning_rate=1e-4, lora.rank=64` as {dotted name: value}, values read as a profile's; not yet checked."""
    found: dict[str, Any] = {}
    for part in filter(str.strip, re.split(r",(?![^\[]*\])", text)):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if part.count("=") != 1:
            raise CourseError("config.malformed_set", part=part.strip())
        if name in found:
            raise CourseError("config.duplicate_set", name=name)
        try:
            found[name] = yaml.load(value, _Loader)
        except yaml.YAMLError:
            found[name] = value  # no value of any key: the schema says so, by name and with all other mistakes
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """The same as text again."""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


def _read_yaml(file: Path) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """A YAML file as its tree, the comment beside each dotted name, and the keys that were given twice."""
    try:
        tree, reasons, duplicates = _parse(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        said = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise CourseError("config.not_yaml", place=place, problem=said) from None
    if not isinstance(tree, dict):
        raise CourseError("config.no_keys", file=file, configs=paths.CONFIGS)
    return tree, reasons, duplicates


@lru_cache(maxsize=64)
def _parse(text: str) -> tuple[Any, dict[str, str], list[str]]:
    loader = _Loader(text)
    node = loader.get_single_node()
    tree = loader.construct_document(node) if node else None
    reasons: dict[str, str] = {}
    duplicates: list[str] = []
    if isinstance(node, yaml.MappingNode):
        _walk(node, text.splitlines(), "", reasons, duplicates)
    return tree, reasons, duplicates


def _walk(
    node: yaml.MappingNode, lines: Sequence[str], above: str, reasons: dict[str, str], duplicates: list[str]
) -> None:
    """Collect the comment beside each value and the keys given twice."""
    first: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{above}{key.value}", key.start_mark.line
        if name in first:
            duplicates.append(f"{name}: given twice, in lines {first[name]} and {line + 1}")
        first.setdefault(name, line + 1)
        if isinstance(value, yaml.MappingNode):
            _walk(value, lines, f"{name}.", reasons, duplicates)
            continue
        ends_here = value.end_mark.line == line
        rest = lines[line][value.end_mark.column if ends_here else key.end_mark.column :]
        if comment := re.search(r"(?:^|\s)#\s*(.*\S)", rest):
            reasons[name] = comment.group(1)


# ---- mistakes


def refuse(found: Sequence[str], where: str, example: str = "tiny.yaml") -> None:
    """Stop with all problems at once, if there are any."""
    if found:
        listed = "".join(f"\n    - {line}" for line in found)
        raise CourseError("config.problems", where=where, count=len(found), problems=listed, example=example)


def problems(tree: dict[str, Any]) -> list[str]:
    """Every mistake of a profile, by dotted name: unknown and missing keys, types, ranges, impossible pairs."""
    wrong, values = _mistakes(tree, Profile), flat(tree)
    known = {key: value for key, value in values.items() if key not in wrong}
    pairs = [
        f"{one}: {shown(known[one])} and {other}: {shown(known[other])}: {advice}"
        for one, other, impossible, advice in PAIRS
        if one in known and other in known and impossible(known[one], known[other])
    ]
    return [*(f"{name}: {text}" for name, text in wrong.items()), *pairs]


def _mistakes(tree: Any, model: type[Strict]) -> dict[str, str]:
    """What pydantic holds against a tree, as {dotted name: text}."""
    known, found = keys(model), dict[str, list[str]]()
    try:
        model.model_validate(tree)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            parts = [".".join(map(str, item["loc"][: depth + 1])) for depth in range(len(item["loc"]))]
            name = next((part for part in parts if part in known), parts[-1] if parts else "the file")
            found.setdefault(name, []).append(_explain(name, item, known))
    return {name: " or ".join(texts) for name, texts in found.items()}


def _explain(name: str, item: Any, known: Sequence[str]) -> str:
    if item["type"] == "extra_forbidden":
        return f"unknown key{did_you_mean(name, known)}"
    if item["type"] == "missing":
        return "missing"
    if item["type"] == "model_type":
        return f"{reprlib.repr(item['input'])} should be a group of keys"
    text = item["msg"].removeprefix("Input ")
    return f"{reprlib.repr(item['input'])} {text}" if text.startswith("should") else text


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at the key that was probably meant: the same word in another group, or a similar one in this group."""
    group, _, leaf = name.rpartition(".")
    groups = {key.rpartition(".")[0] for key in known} - {""}
    everywhere = {key.rpartition(".")[2]: key for key in known}
    here = [key for key in [*known, *groups] if key != name and key.rpartition(".")[0] == group]
    near = [everywhere[leaf]] if leaf in everywhere else difflib.get_close_matches(name, here, n=1)
    near = near or [everywhere[one] for one in difflib.get_close_matches(leaf, everywhere, n=1)]
    return f", did you mean {near[0]}?" if near else ""
