"""The keys of a profile, their types and ranges, and the pairs of values that cannot go together.

Not here: defaults. Every key is required, so that the YAML shows everything a run uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nbutils.errors import CourseError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversions ("8" is not a number; 1 may stand for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
        """Rows of an optimiser step on all cards: packed rows where rows are packed, else conversations."""
        if self.batch == "auto":
            raise CourseError(
                "train.batch is auto, which needs rows to choose from.", "a profile settled for its rows",
                "use the profile as profiles.resolve gives it",
            )  # fmt: skip
        return self.batch

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimiser step on one card."""
        return self.accumulation_on(1)

    def accumulation_on(self, cards: int) -> int:
        """Micro-steps of an optimiser step on each of several cards, which share the batch."""
        if self.micro_batch == "auto" or self.step_rows % (self.micro_batch * cards):
            raise CourseError(
                f"train.batch {self.batch} cannot be done by {cards} x micro_batch {self.micro_batch}.",
                "a micro_batch that is settled, and divides the batch together with the number of cards",
                "use the profile as profiles.resolve gives it, or change train.batch",
            )
        return self.step_rows // (self.micro_batch * cards)


class Machine(Strict):
    """What depends on the card; `auto` asks it."""

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


@dataclass(frozen=True)
class Rule:
    """Keys whose values cannot go together, and what to say when they do."""

    keys: tuple[str, ...]
    broken: Callable[..., bool]
    advice: str


RULES = (
    Rule(
        ("method", "quantization.type"),
        lambda method, kind: method == "qlora" and kind == "none",
        "qlora trains on a quantised base: set quantization.type=nf4, or method=lora",
    ),
    Rule(
        ("method", "quantization.type"),
        lambda method, kind: method == "lora" and kind != "none",
        "lora keeps its base as it is: set quantization.type=none and quantization.double=false, or method=qlora",
    ),
    Rule(
        ("quantization.type", "quantization.double"),
        lambda kind, double: kind == "none" and double,
        "there are no quantisation constants to quantise again: set quantization.double=false",
    ),
    Rule(
        ("train.epochs", "train.max_steps"),
        lambda epochs, steps: epochs == 0 and steps == 0,
        "nothing would be trained: set one of them",
    ),
    Rule(
        ("train.scheduler", "train.warmup_ratio"),
        lambda scheduler, ratio: scheduler == "constant" and ratio > 0,
        "constant ignores its warm-up: choose constant_with_warmup, or warmup_ratio 0",
    ),
    Rule(
        ("train.max_length", "serve.max_model_len"),
        lambda trained, served: trained > served,
        "the server would refuse texts as long as those trained on: raise max_model_len",
    ),
    Rule(
        ("evaluation.max_new_tokens", "serve.max_model_len"),
        lambda answer, served: answer >= served,
        "the answer alone fills the server's context: lower max_new_tokens",
    ),
    Rule(
        ("machine.precision", "machine.attention"),
        lambda precision, attention: precision == "fp32" and attention in ("flash_attention_2", "varlen"),
        "FlashAttention computes in 16 bits only: choose sdpa",
    ),
    Rule(
        ("train.batch", "train.micro_batch"),
        lambda batch, micro_batch: "auto" not in (batch, micro_batch) and batch % micro_batch != 0,
        "a step is made of whole micro-steps: choose a micro_batch that divides the batch, or auto",
    ),
)


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Nested mappings as {dotted name: value}; anything that is not a mapping is a value."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
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
    for name, field in model.model_fields.items():
        group = field.annotation
        nested = isinstance(group, type) and issubclass(group, BaseModel)
        listed += keys(group, f"{above}{name}.") if nested else [f"{above}{name}"]  # type: ignore[arg-type]
    return listed
