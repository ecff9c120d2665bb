"""The arithmetic of a merge, on any rows of a weight: exactly PEFT's operations in PEFT's order, in float32.

Computing some rows gives the same bits as computing all, so a weight need never be whole in memory.
Not here: reading settings (plan), files (shards), and the 4-bit form of a base (dequantized).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbutils.merging.shards import Stored

if TYPE_CHECKING:
    import torch

# weight so far, the base's weight, first row, last row -> the weight with this change
Apply = Callable[["torch.Tensor", "torch.Tensor", int, int], "torch.Tensor"]


@dataclass(frozen=True)
class Product:
    """scale · up · down is added; `turned`: the weight lies transposed (embeddings). With a magnitude it is DoRA."""

    up: Stored
    down: Stored
    scale: float
    turned: bool = False
    magnitude: Stored | None = None

    @property
    def whole(self) -> bool:
        """Whether it needs all rows at once: DoRA's norm of a transposed weight runs along them."""
        return self.turned and self.magnitude is not None

    def load(self, device: str) -> Apply:
        """Read the factors; the function that applies them."""
        up, down = (place.tensor().float().to(device) for place in (self.up, self.down))
        scale = self.scale
        if math.frexp(scale)[0] == 0.5:  # a power of two moves no digit: scaled once, the same bits for less work
            up, scale = up * scale, 1.0
        magnitude = self.magnitude.tensor().float().to(device) if self.magnitude else None

        def apply(weight: torch.Tensor, base: torch.Tensor, first: int, last: int) -> torch.Tensor:
            delta = (up @ down[:, first:last]).T if self.turned else up[first:last] @ down
            delta = delta if scale == 1.0 else delta.mul_(scale)
            if magnitude is None:
                return weight.add_(delta)
            return _dora(weight, base, delta, magnitude if self.turned else magnitude[first:last], self.turned)

        return apply


def _dora(
    weight: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor, turned: bool
) -> torch.Tensor:
    """Weight decomposition: every output direction gets the trained length."""
    import torch

    norm = torch.linalg.norm(base.T + delta.T if turned else base + delta, dim=1)
    factor = (magnitude / norm).view(1, -1) if turned else (magnitude / norm).view(-1, 1)
    return factor * (weight + delta)


@dataclass(frozen=True)
class Shift:
    """scale · values is added: the bias of an adapter."""

    values: Stored
    scale: float
    whole: bool = False

    def load(self, device: str) -> Apply:
        """Read the values; the function that adds them."""
        values = self.values.tensor().float().to(device)
        return lambda weight, base, first, last: weight.add_(values[first:last] * self.scale)


@dataclass(frozen=True)
class Rows:
    """Some rows are replaced: tokens that were trained by themselves."""

    values: Stored
    indices: tuple[int, ...]
    whole: bool = False

    def fits(self, rows: int) -> bool:
        """Whether there is a row for each token, in a weight of so many rows."""
        return len(self.indices) == self.values.rows and all(0 <= index < rows for index in self.indices)

    def load(self, device: str) -> Apply:
        """Read the rows; the function that puts them in."""
        values = self.values.tensor().float().to(device)

        def apply(weight: torch.Tensor, base: torch.Tensor, first: int, last: int) -> torch.Tensor:
            for place, row in enumerate(self.indices):
                if first <= row < last:
                    weight[row - first] = values[place]
            return weight

        return apply


Change = Product | Shift | Rows


@dataclass(frozen=True)
class Recipe:
    """How one weight of the merged model is made: what it starts from, what is added, through which 4-bit form."""

    source: Stored
    changes: tuple[Change, ...] = ()
    four_bit: bool = False
    replaced: bool = False

    @property
    def whole(self) -> bool:
        """Whether all rows are needed at once."""
        return self.four_bit or any(change.whole for change in self.changes)

    @property
    def by_rows(self) -> bool:
        """Whether a row means something: where nothing is added, each number is copied or cast by itself."""
        return bool(self.changes) or self.four_bit

    @property
    def changed(self) -> bool:
        """Whether the weight is another than the base's."""
        return bool(self.changes) or self.replaced
