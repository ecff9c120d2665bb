"""The YAML files of `configs`: the keys of a profile, how a file is read, and every mistake in it at once, by name.

The blocks of a profile are keyword arguments of the libraries; `course` holds what none of them has. The comment beside
a value is the reason a learner is shown for it. There are no defaults: every key of the schema is required, so
that the YAML shows everything a run uses. Scalars are read as in YAML 1.2: `on` is text, `2e-4` a number.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from nbutils import files, former_names
from nbutils.errors import CourseError, require_choice
from nbutils.former_names import Settings
from nbutils.language import tr

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Length = Annotated[int, Field(ge=16)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Auto = Literal["auto"]
Overrides = Mapping[str, tuple[Any, str]]  # {dotted name: (value, reason)}
CLASSES = {  # whose keyword arguments a block holds: any of them may be added to those every profile has
    "lora": "peft.LoraConfig", "quantization": "transformers.BitsAndBytesConfig", "sft": "trl.SFTConfig",
    "vllm": "vllm serve",
}  # fmt: skip
ARGUMENTS: dict[str, Any] = files.read_yaml(Path(__file__).with_name("arguments.yaml"))
SET_ELSEWHERE = {name: decider for decider, names in ARGUMENTS["decided_by"].items() for name in names}
UNMERGEABLE: list[str] = ARGUMENTS["unmergeable"]
BASE_KEEPING_INITS: list[str] = ARGUMENTS["base_keeping_inits"]


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversions ("8" is not a number; 1 may stand for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Entry = TypeVar("Entry", bound=Strict)


class Arguments(Strict):
    """Keyword arguments, as in `LoraConfig(**profile.lora)`; more than those named here may be given."""

    model_config = ConfigDict(extra="allow")

    def keys(self) -> list[str]:
        """The names, for `**`."""
        return [name for name, _ in self]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Lora(Arguments):
    """The adapter: peft.LoraConfig."""

    r: Count
    lora_alpha: Count
    lora_dropout: Fraction
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)]
    use_rslora: bool


class Quantization(Arguments):
    """How the frozen base model is stored: transformers.BitsAndBytesConfig."""

    load_in_4bit: bool
    bnb_4bit_quant_type: Literal["nf4", "fp4"]
    bnb_4bit_use_double_quant: bool


class FromPretrained(Strict):
    """How a model is loaded: AutoModelForCausalLM.from_pretrained; `auto` asks the GPU."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "varlen"]


class SFT(Arguments):
    """The training: trl.SFTConfig."""

    max_length: Length
    per_device_train_batch_size: Auto | Count
    gradient_accumulation_steps: Auto | Count
    num_train_epochs: Auto | NotNegative
    max_steps: Annotated[int, Field(ge=-1)]
    learning_rate: Auto | Annotated[float, Field(gt=0, lt=1)]
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"]
    warmup_steps: NotNegative
    weight_decay: NotNegative
    max_grad_norm: Positive
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
    packing: Auto | bool
    gradient_checkpointing: Auto | bool
    activation_offloading: Auto | bool
    use_liger_kernel: Auto | bool
    save_steps: Auto | Count
    save_total_limit: Count
    logging_steps: Count
    load_best_model_at_end: bool


class Vllm(Arguments):
    """The server of lesson 05: flags of `vllm serve`, with underscores."""

    max_model_len: Length
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    max_num_seqs: Count


class Course(Strict):
    """What no library has a name for."""

    data: str
    rows: ZeroOrMore
    conversations_per_step: Auto | Count
    validation_rows: Auto | ZeroOrMore
    early_stopping_patience: ZeroOrMore
    evaluation_rows: ZeroOrMore
    evaluation_batch_size: Count
    max_new_tokens: Count


class Profile(Strict):
    """One profile: a whole run, from the model to the server."""

    about: Text
    model: Text
    method: Literal["auto", "qlora", "lora"]
    lora: Lora
    quantization: Quantization
    from_pretrained: FromPretrained
    sft: SFT
    vllm: Vllm
    course: Course

    @model_validator(mode="after")
    def check_pairs(self) -> Profile:
        """No two values that cannot go together."""
        sft = self.sft
        if self.method != "auto" and self.quantization.load_in_4bit != (self.method == "qlora"):
            raise ValueError(tr("method, quantization.load_in_4bit: qlora takes true, lora takes false; change both"))
        if sft.max_length > self.vllm.max_model_len:
            raise ValueError(
                tr("sft.max_length, vllm.max_model_len: the server would refuse the longest rows trained on")
            )
        if sft.activation_offloading is True and sft.gradient_checkpointing is False:
            raise ValueError(tr("sft.activation_offloading: it needs gradient_checkpointing; set that to true as well"))
        if sft.per_device_train_batch_size == "auto" and sft.gradient_accumulation_steps != "auto":
            raise ValueError(
                tr(
                    "sft.gradient_accumulation_steps: set per_device_train_batch_size too, or leave both auto and set "
                    "course.conversations_per_step"
                )
            )
        step = self.course.conversations_per_step
        if "auto" not in (step, sft.per_device_train_batch_size, sft.gradient_accumulation_steps):
            raise ValueError(
                tr(
                    "course.conversations_per_step: per_device_train_batch_size and gradient_accumulation_steps decide "
                    "how large a step is; leave it, or one of them, auto"
                )
            )
        return self


def _problem_with(name: str, value: Any) -> str:
    """Why a keyword argument that not every profile has cannot be taken; empty if it can."""
    block, _, argument = name.partition(".")
    owner = CLASSES[block]
    if name in SET_ELSEWHERE:
        return tr("the course sets it, by {other}", other=SET_ELSEWHERE[name])
    changes_base = argument == "init_lora_weights" and str(value).lower() not in BASE_KEEPING_INITS
    if changes_base or (argument in UNMERGEABLE and value):
        return tr("lesson 04 could not merge such an adapter")
    known = arguments_of(owner)
    if known and argument not in known:
        hint = _did_you_mean(name, [f"{block}.{other}" for other in known])
        return tr("no argument of {owner} that a profile takes", owner=owner) + hint
    return _wrong_value(owner, argument, value) if known and block != "vllm" else ""


def _wrong_value(owner: str, argument: str, value: Any) -> str:
    """Why a value is none of those that a class declares for an argument; empty if it is one, or none are declared."""
    declared = get_type_hints(resolve_name(owner)).get(argument, Any)
    try:
        TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as problem:
        return _unmet(problem.errors()[0])
    return ""


def _unmet(error: ErrorDetails) -> str:
    """What pydantic wanted, and what it found."""
    return tr("{wanted}, not {seen}", wanted=error["msg"], seen=reprlib.repr(error["input"]))


def arguments_of(owner: str) -> list[str]:
    """The keyword arguments of a class, by its dotted name; none where its library is not installed."""
    if owner == CLASSES["vllm"]:
        return [*Vllm.model_fields, *ARGUMENTS["vllm_serve"]]
    try:
        return list(inspect.signature(resolve_name(owner)).parameters)
    except ImportError:
        return []


def flat(tree: Mapping[str, Any]) -> Settings:
    """Nested mappings as {dotted name: value}; anything that is not a mapping is a value."""
    leaves: Settings = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= {f"{key}.{name}": leaf for name, leaf in flat(value).items()}
        else:
            leaves[str(key)] = value
    return leaves


def with_values(tree: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The tree, with these values in its blocks, by dotted name; nothing is checked."""
    for name, value in settings.items():
        block, _, key = name.rpartition(".")
        place = tree.get(block) if block else tree
        if not isinstance(place, dict):
            place = tree[block] = {}
        place[key] = value
    return tree


def shown(value: Any) -> str:
    """A value as the YAML writes it."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, ensure_ascii=False)


def keys(model: type[BaseModel] = Profile) -> list[str]:
    """Every dotted name of a profile, or of another model, in the order of the YAML."""
    names = []
    for name, field in model.model_fields.items():
        block = getattr(field.annotation, "model_fields", ())
        names += [f"{name}.{key}" for key in block] or [name]
    return names


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2, and without aliases."""

    def fetch_alias(self) -> None:  # a few lines of aliases unfold to gigabytes
        raise yaml.YAMLError(tr("it has an alias (*name): write the value itself"))


_SCALARS = {
    "null": "~|null|",
    "bool": "[tT]rue|TRUE|[fF]alse|FALSE",
    "int": r"[-+]?(?:0|[1-9]\d{0,17})",
    "float": r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), None)
_LINE = re.compile(r"^( *)(\w+):(?: *[^\s#].*?\s#\s*(.*\S))?", re.MULTILINE)  # indent, key, the comment beside a value


class Document(NamedTuple):
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
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        own_file = tr("the path of a .yaml file of your own")
        require_choice("PROFILE", name, [*names(), "auto", own_file])
        file = files.CONFIGS / f"{name}.yaml"
    tree, reasons = _read_yaml(file)
    if isinstance(tree, dict) and "train" in tree:  # a file of the version before
        settings = former_names.translated(flat(tree))
        tree = with_values({}, settings)
    profile = _validate(tree, Profile, str(file))
    return Document(profile, reasons, file.absolute())


def with_overrides(document: Document, overrides: Overrides) -> Document:
    """The profile with some values replaced, checked again as a whole."""
    changes = dict(overrides)
    if "sft.num_train_epochs" in changes:
        _, reason = changes["sft.num_train_epochs"]
        changes.setdefault("sft.max_steps", (-1, reason))  # steps would end the run first
    values = {name: value for name, (value, _) in changes.items()}
    reasons = {name: reason for name, (_, reason) in changes.items()}
    if values.get("quantization.load_in_4bit") and document.profile.method == "auto":
        values.setdefault("method", "qlora")  # whoever asks for 4 bits wants them
    tree = document.profile.model_dump()
    tree = with_values(tree, values)
    where = tr("{profile} with your settings", profile=document.file.stem)
    profile = _validate(tree, Profile, where)
    return Document(profile, document.reasons | reasons, document.file)


def read_table(name: str, model: type[Entry]) -> dict[str, Entry]:
    """A file of `configs` with one block for each entry, which is told its name."""
    file = files.CONFIGS / name
    tree, _ = _read_yaml(file)
    entries = {}
    for entry, block in tree.items():
        entries[entry] = _validate(block, model, f"{file}: {entry}").model_copy(update={"name": entry})
    return entries


def settings_in(text: str) -> Settings:
    """`sft.learning_rate=1e-4, lora.r=64` as {dotted name: value}, values read as a profile's; not yet checked."""
    settings: Settings = {}
    for part in re.split(r",(?![^\[]*\])(?![^{]*\})", text):
        if not part.strip():
            continue
        if part.count("=") != 1:
            raise CourseError(
                "SET has {part!r}.",
                todo='Write it like "sft.learning_rate=1e-4, lora.r=64".',
                part=part.strip(),
            )
        name, value = map(str.strip, part.split("="))
        try:
            settings[name] = yaml.load(value, _Loader)
        except Exception:  # as for a file below
            settings[name] = value  # no value of any key: the schema says so, by name and with all other mistakes
    return former_names.translated(settings)


def settings_text(settings: Settings) -> str:
    """The same as text again."""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


def _read_yaml(file: Path) -> tuple[Any, dict[str, str]]:
    """A YAML file as its tree, and the comment beside each dotted name."""
    try:
        return _parse(file.read_text(encoding="utf-8"))
    except Exception as problem:  # PyYAML has one of its own; impossible dates, endless digits and nesting have others
        raise CourseError(
            "{file}: {problem}.",
            todo="Correct {file}: YAML in UTF-8, groups indented by two spaces.",
            file=file,
            problem=" ".join(str(problem).split()),
        ) from None


@lru_cache(maxsize=64)
def _parse(text: str) -> tuple[Any, dict[str, str]]:
    reasons: dict[str, str] = {}
    block = ""
    for indent, name, comment in _LINE.findall(text):
        if not indent:
            block = name
        if comment:
            reasons[f"{block}.{name}" if indent else name] = comment
    return yaml.load(text, _Loader), reasons


def _validate(tree: Any, model: type[Entry], where: str) -> Entry:
    """The tree as a model, or all its mistakes at once by dotted name; pairs are checked once the rest is right."""
    problems = []
    try:
        entry = model.model_validate(tree)
    except ValidationError as error:
        problems += _problems(error, keys(model))
    if model is Profile and isinstance(tree, dict):
        problems += _strange_arguments(tree)
    if problems:
        listed = "".join(f"\n    - {problem}" for problem in problems)
        raise CourseError(
            "{where} has {count} problem(s):{problems}",
            todo="Correct what is listed above, then run this again.",
            where=where,
            count=len(problems),
            problems=listed,
        )
    return entry


def _problems(error: ValidationError, known: Sequence[str]) -> list[str]:
    """What pydantic found, a line for each name."""
    by_name: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        if kind == "value_error":  # of a pair, which is checked only where nothing else is wrong
            return [str(item["ctx"]["error"])]
        name = ".".join(map(str, item["loc"][:2])) or tr("the file")  # deeper are the types of a union
        if kind == "missing":
            text = tr("missing")
        elif kind == "extra_forbidden":
            text = tr("unknown key") + _did_you_mean(name, known)
        else:
            text = _unmet(item)
        by_name.setdefault(name, []).append(text)
    return [f"{name}: {tr(' or ').join(texts)}" for name, texts in by_name.items()]


def _strange_arguments(tree: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the arguments of a profile that not every one has."""
    in_every_profile = keys()
    for block in CLASSES:
        arguments = tree.get(block)
        if not isinstance(arguments, dict):
            continue
        for argument, value in arguments.items():
            name = f"{block}.{argument}"
            problem = "" if name in in_every_profile else _problem_with(name, value)
            if problem:
                yield f"{name}: {problem}"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at the name that was probably meant, in whatever block."""
    leaves = {key.rpartition(".")[2]: key for key in known}
    leaf = name.rpartition(".")[2]
    near = difflib.get_close_matches(leaf, leaves, n=1)
    if not near:
        return ""
    return tr(", did you mean {name}?", name=leaves[near[0]])
