"""Is an export still the same model? Its reading beside the merged one's, and what the difference costs, in words.

Not here: the fixed set, readings and their gap, which are the parity report's (parity).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import hardware, paths
from nbutils.errors import CourseError
from nbutils.exporting import process
from nbutils.exporting.making import Export

if TYPE_CHECKING:
    from nbutils.parity import Fixed, Gap, Reading

# Nats per token up to which the words hold; beyond the last the export is broken, not coarse.
WORDS = ((0.001, "next to the same"), (0.02, "hardly differs"), (0.15, "differs a little"), (1.0, "clearly differs"))
BROKEN, UNREAD = "BROKEN", "not compared: too large to be read here"
PROMPTS, MEASURED, LONGEST = 8, 16, 256  # of a set made without a run


@dataclass(frozen=True)
class ParityLine:
    """One export beside the merged model it was made from; without a gap it could not be compared here."""

    export: Export
    gap: Gap | None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.gap is None:
            return UNREAD
        mean = self.gap.mean
        return next((words for limit, words in WORDS if mean <= limit), BROKEN)

    @property
    def row(self) -> dict[str, str]:
        """For a table."""
        export = self.export
        return {
            "format": export.name, "size": f"{export.bytes / 1e6:,.1f} MB", "of merged": f"{export.ratio:.2f}",
            **(self.gap.columns if self.gap else {}), "verdict": self.verdict, "made by": export.method,
        }  # fmt: skip

    @property
    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        export = self.export
        told = {"format": export.name, "bytes": export.bytes, "ratio": export.ratio, "seconds": export.seconds}
        return told | {"method": export.method, "verdict": self.verdict} | (asdict(self.gap) if self.gap else {})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.row.items())


def check(export: Export, fixed: Fixed, reference: Reading | None = None, *, progress: bool = True) -> ParityLine:
    """Read an export through the fixed set and compare it with the merged model, which is read too if need be.

    transformers makes small weights wide again before it computes: where the merged model does not fit, no export does.
    """
    from nbutils import parity

    if not readable(export):
        print(
            f"[WARN] {export.name} is not compared here: read by transformers it is as wide as the merged model, and "
            f"{export.merged_bytes / paths.GIB:.1f} GiB do not fit. vLLM keeps it small: lesson 05 compares "
            f"what vLLM serves, with FOLDER = {export.folder}"
        )
        return ParityLine(export, None)
    before = reference or read_merged(export, fixed, progress)
    return ParityLine(export, parity.gap(before, read(export, fixed, progress)))


def readable(export: Export) -> bool:
    """Whether an export, made wide again, fits into card or memory."""
    return fits_here(export.merged_bytes / paths.GIB, hardware.card())


def fits_here(gib: float, card: hardware.Card | None) -> bool:
    """Whether transformers can hold weights of this size on this machine, as it is now."""
    from nbutils import parity

    try:
        return parity.room_for(gib, card, Path(tempfile.gettempdir())).fits
    except CourseError:  # they do not fit, nor on the disk to be read piece by piece, which is not asked for here
        return False


def read_merged(export: Export, fixed: Fixed, progress: bool = True) -> Reading:
    """The merged model read in the same way, once for all its exports."""
    size = export.merged_bytes
    return read(Export("merged", export.merged, export.merged, size, size, 0.0, "merged"), fixed, progress)


def read(export: Export, fixed: Fixed, progress: bool = True) -> Reading:
    """What an exported model predicts and answers, read in the export environment as its users would load it."""
    from safetensors.torch import load_file

    from nbutils import parity

    with tempfile.TemporaryDirectory(prefix="nbutils-reading-") as place:
        logs = Path(place) / "logs.safetensors"
        job = {
            "do": "read", "format": export.name, "folder": str(export.folder.absolute()), "logs": str(logs),
            "file": export.file.name if export.file else "", "bytes": export.bytes, "fixed": asdict(fixed),
        }  # fmt: skip
        answer = process.run("transformers", job, f"reading {export.name}", progress)
        return parity.Reading(load_file(logs)["logs"], answers=answer["answers"])


def table(lines: Sequence[ParityLine]) -> list[dict[str, str]]:
    """The rows of several exports, for dashboard.show_table."""
    return [line.row for line in lines]


def quick_set(folder: Path, rows: Sequence[dict[str, Any]]) -> Fixed:
    """A fixed set from a few rows, for a model that has no run: prompts, and the first tokens of their answers."""
    from transformers import AutoTokenizer

    from nbutils import parity
    from nbutils.chat import find_stop_ids

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts, texts, measured = [], [], []
    for row in rows[:PROMPTS]:
        answer = row["messages"][-1]["content"]
        asked = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"][-LONGEST:]
        said = tokenizer(answer, add_special_tokens=False)["input_ids"][:MEASURED]
        prompts.append(prompt)
        texts.append(prompt + said)
        measured.append(len(said))
    stops = sorted(find_stop_ids(tokenizer, folder))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return parity.Fixed(texts, measured, prompts, stops, pad)
