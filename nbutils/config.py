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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nbutils import files
from nbutils.errors import CourseError
from nbutils.language import tr

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Overrides = Mapping[str, tuple[Any, str]]  # {dotted name: (value, reason)}


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
    batch: Auto | Count  # rows of an optimizer step on all GPUs: packed rows where rows are packed, else conversations
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
    shorten: bool = Field(default=False, exclude=True)  # in profiles of former versions; ignored
    save_steps: Auto | Count
    keep_checkpoints: Count
    logging_steps: Count
    validation_rows: Auto | ZeroOrMore
    keep_best: bool
    early_stopping: ZeroOrMore

    def accumulation_on(self, gpus: int = 1) -> int:
        """Micro-steps of an optimizer step on each of the GPUs, which share the batch."""
        return int(self.batch) // (int(self.micro_batch) * gpus)


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

    @model_validator(mode="after")
    def check_pairs(self) -> Profile:
        """No two values that cannot go together."""
        train, machine, unquantized = self.train, self.machine, self.quantization.type == "none"
        flash = machine.attention in ("flash_attention_2", "varlen")
        named = "auto" not in (train.batch, train.micro_batch)
        wrong = {
            tr("method, quantization.type: qlora takes nf4 or fp4, lora takes none; change both"):
                self.method != "auto" and (self.method == "lora") != unquantized,
            tr("train.epochs, train.max_steps: both are 0, set one of them"): train.epochs == train.max_steps == 0,
            tr("train.max_length, serve.max_model_len: the server would refuse the longest rows trained on"):
                train.max_length > self.serve.max_model_len,
            tr("machine.precision, machine.attention: FlashAttention needs 16 bits; for fp32 choose sdpa"):
                machine.precision == "fp32" and flash,
            tr("train.batch, train.micro_batch: choose a micro_batch that divides the batch, or auto"):
                named and int(train.batch) % int(train.micro_batch) != 0,
        }  # fmt: skip
        if found := [text for text, holds in wrong.items() if holds]:
            raise ValueError(*found)
        return self


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
    """Every dotted name a profile must have, in the order of the YAML."""
    listed: list[str] = []
    required = {name: info for name, info in model.model_fields.items() if info.is_required()}
    for name, info in required.items():
        group: Any = info.annotation
        nested = isinstance(group, type) and issubclass(group, BaseModel)
        listed += keys(group, f"{above}{name}.") if nested else [f"{above}{name}"]
    return listed


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without the surprises of YAML 1.1."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":bool", ":float"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBER = re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:[tT]rue|TRUE|[fF]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_LINE = re.compile(r"^( *)(\w+):(?:.*?\s#\s*(.*\S))?", re.MULTILINE)  # indent, key, the comment beside its value


@dataclass(frozen=True)
class Document:
    """A valid profile with the reason written beside each of its values."""

    profile: Profile
    reasons: dict[str, str]
    file: Path


def names() -> list[str]:
    """The profiles of the course: the files of `configs` that say what they are `about`."""
    return sorted(file.stem for file in files.CONFIGS.glob("*.yaml") if "\nabout:" in file.read_text(encoding="utf-8"))


def load(name: str) -> Profile:
    """The profile of that name, or of a YAML file of your own."""
    return read(name).profile


def read(name: str) -> Document:
    """The profile of that name with its reasons; all mistakes in it are reported at once."""
    file = Path(name).expanduser()
    if not (file.suffix in (".yaml", ".yml") and file.is_file()):
        if name not in names():
            hint = _did_you_mean(file.stem.lower(), names()) or "."
            raise CourseError("config.unknown_profile", name=name, names=", ".join(names()), hint=hint)
        file = files.CONFIGS / f"{name}.yaml"
    tree, reasons = _read_yaml(file)
    return Document(_valid({"": tree}, Profile, str(file))[""], reasons, file.absolute())


def with_overrides(document: Document, overrides: Overrides) -> Document:
    """The profile with some values replaced, checked again as a whole."""
    instead = {"model": tr("is not set this way: use MODEL"), "about": tr("is not set, it describes the profile")}
    known = [name for name in keys() if name not in instead]
    unknown = [name for name in overrides if name not in known]
    wrong = [f"{name}: {instead.get(name) or tr('unknown key') + _did_you_mean(name, known)}" for name in unknown]
    tree = document.profile.model_dump()
    for name, (value, _) in overrides.items():
        group, _, leaf = name.rpartition(".")
        if name in known:
            (tree[group] if group else tree)[leaf] = value
    if tree["method"] == "auto" and overrides.get("quantization.type", ("none",))[0] != "none":
        tree["method"] = "qlora"  # whoever names a quantization wants it
    steps = tree["train"]["max_steps"]
    if "train.epochs" in overrides and "train.max_steps" not in overrides and steps:
        wrong.append(
            tr(
                "train.epochs: train.max_steps is {steps} and ends the run first; set train.max_steps=0 too",
                steps=steps,
            )
        )
    reasons = {name: reason for name, (_, reason) in overrides.items()}
    given = ", ".join(dict.fromkeys(reasons.values()))
    where = tr("{profile} with {given}", profile=document.file.stem, given=given)
    return Document(_valid({"": tree}, Profile, where, wrong)[""], document.reasons | reasons, document.file)


def read_table(name: str, model: type[Entry]) -> dict[str, Entry]:
    """A file of `configs` with one block for each entry."""
    return _valid(_read_yaml(files.CONFIGS / name)[0], model, str(files.CONFIGS / name))


def settings_in(text: str) -> dict[str, Any]:
    """`train.learning_rate=1e-4, lora.rank=64` as {dotted name: value}, values read as a profile's; not yet checked."""
    found: dict[str, Any] = {}
    for part in filter(str.strip, re.split(r",(?![^\[]*\])", text)):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if part.count("=") != 1:
            raise CourseError("config.malformed_set", part=part.strip())
        try:
            found[name] = yaml.load(value, _Loader)
        except yaml.YAMLError:
            found[name] = value  # no value of any key: the schema says so, by name and with all other mistakes
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """The same as text again."""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


def _read_yaml(file: Path) -> tuple[Any, dict[str, str]]:
    """A YAML file as its tree, and the comment beside each dotted name."""
    try:
        return _parse(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        said = " ".join(str(problem).split())
        raise CourseError("config.not_yaml", file=file, problem=said) from None


@lru_cache(maxsize=64)
def _parse(text: str) -> tuple[Any, dict[str, str]]:
    reasons, group = dict[str, str](), ""
    for indent, name, comment in _LINE.findall(text):
        group = group if indent else name
        if comment:
            reasons[f"{group}.{name}" if indent else name] = comment
    return yaml.load(text, _Loader), reasons


def _valid(trees: Mapping[str, Any], model: type[Entry], where: str, wrong: Sequence[str] = ()) -> dict[str, Entry]:
    """The trees as models, or all their mistakes at once by dotted name; pairs are checked once the rest is right."""
    known, made, lines = keys(model), dict[str, Entry](), list(wrong)
    for key, tree in trees.items():
        found = dict[str, list[str]]()
        try:
            made[str(key)] = model.model_validate(tree)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                parts = [".".join(map(str, item["loc"][: depth + 1])) for depth in range(len(item["loc"]))]
                name = next((part for part in parts if part in known), parts[-1] if parts else tr("the file"))
                text = {"missing": tr("missing"), "extra_forbidden": tr("unknown key") + _did_you_mean(name, known)}
                wanted = tr("{wanted}, not {seen}", wanted=item["msg"], seen=reprlib.repr(item["input"]))
                said = text.get(item["type"]) or wanted
                if item["type"] == "value_error":
                    lines += map(str, item["ctx"]["error"].args)
                else:
                    found.setdefault(f"{key}.{name}".lstrip("."), []).append(said)
        lines += [f"{name}: {tr(' or ').join(texts)}" for name, texts in found.items()]
    if lines:
        listed = "".join(f"\n    - {line}" for line in lines)
        raise CourseError("config.problems", where=where, count=len(lines), problems=listed)
    return made


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at the name that was probably meant, in whatever group."""
    leaves = {key.rpartition(".")[2]: key for key in known}
    near = difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)
    return tr(", did you mean {name}?", name=leaves[near[0]]) if near else ""
