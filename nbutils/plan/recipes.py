"""How one trains, as far as memory and speed depend on it; from a profile, or from what a card can do.

Not here: which micro-batch fits (choosing), what a profile may say (profiles.schema).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbutils.hardware import BF16_FROM

if TYPE_CHECKING:
    from nbutils.plan.cards import CardFacts
    from nbutils.profiles import Profile, Rows

RARE = 4  # standard deviations: of some hundred micro-batches, hardly one is larger


@dataclass(frozen=True)
class Recipe:
    """One way to train: `checkpointing` is off, on or offload; `packing` fills rows of `length` with several examples."""

    method: str = "qlora"
    rank: int = 16
    precision: str = "bf16"
    attention: str = "varlen"
    liger: bool = True
    optimizer: str = "paged_adamw_8bit"
    length: int = 2048
    micro_batch: int = 1
    checkpointing: str = "on"
    double: bool = True
    packing: bool = True
    accumulation: int = 1
    dropout: bool = False
    spread: float = 0.0  # standard deviation of the lengths, where rows are not packed

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step, laid end to end: all alike where rows are packed, else of one that is rarely met."""
        return round(self.micro_batch * self.length + RARE * self.spread * self.micro_batch**0.5)

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.precision == "fp32" else 2


def for_card(card: CardFacts) -> dict[str, str | bool]:
    """Precision, attention and fused kernels by a card's capability, as lesson 03 would have them there."""
    if card.capability >= BF16_FROM:  # torch's varlen attention and Triton's kernels begin there too
        return {"precision": "bf16", "attention": "varlen", "liger": True}
    return {"precision": "fp16", "attention": "sdpa", "liger": False}


def from_profile(profile: Profile, card: CardFacts, rows: Rows | None = None) -> Recipe:
    """A settled profile's recipe on a card; what it leaves to the machine is decided by the card's capability."""
    train, machine, by_card = profile.train, profile.machine, for_card(card)
    single = rows if rows and not train.packing else None
    return Recipe(
        method=profile.method,
        rank=profile.lora.rank,
        precision=str(by_card["precision"]) if machine.precision == "auto" else machine.precision,
        attention=str(by_card["attention"]) if machine.attention == "auto" else machine.attention,
        liger=bool(by_card["liger"]) if machine.liger == "auto" else machine.liger == "on",
        optimizer=train.optimizer,
        length=round(single.mean) if single else train.max_length,
        spread=single.spread if single else 0.0,
        micro_batch=1 if train.micro_batch == "auto" else train.micro_batch,
        checkpointing="on" if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
        double=profile.quantization.double,
        packing=bool(train.packing),
        dropout=profile.lora.dropout > 0,
        accumulation=1 if train.micro_batch == "auto" else max(train.step_rows // (train.micro_batch * card.count), 1),
    )
