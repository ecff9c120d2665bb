"""What carrying checkpoints home costs the training: seconds per step with sync on and off, to a disk of 50 MB/s.

    python benchmarks/sync.py [PAIRS] [STEPS] [RANK]

PAIRS of blocks (8), each of STEPS (50) after a checkpoint; an adapter of RANK 16, the lesson's, makes one of 5 MB, and
one of rank 128 makes 40 MB.

Trains the tiny model with lesson 03's stack. One process, one training: blocks with and without a carrier take turns
(on off off on ...), so that what else the machine does falls on both alike. Saving is part of both; in the blocks with
sync the carrier also packs, copies, reads back and prunes. A checkpoint every few seconds is more than anyone saves:
`carrier_at_work` says in how many of the steps with sync it was busy, and `steps_at_work` counts only those.

The slow disk is an ext4 on a loop device that the kernel holds at 50 MB/s (needs root and the blkio cgroup); without
them every write sleeps as long as it would take. A ratio is the median step with sync over the median step without, its
interval is drawn from the blocks. On a busy machine that interval is wide; `carrier_cpu_share` is not: the processor
seconds of the carrier over the seconds of the steps with sync, all it can cost if none of it runs beside the training.
Results: benchmarks/results/sync_rank<RANK>.json.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from nbutils import chat, checkpoints, data, files, hardware
from nbutils import checkpoints as archive
from nbutils.training import model as weights

ROOT = Path(__file__).resolve().parent.parent
BYTES_PER_SECOND = 50 * 10**6
SEED = 42
THROTTLES = [Path(f"/sys/fs/cgroup/blkio/blkio.throttle.{way}_bps_device") for way in ("write", "read")]


@contextmanager
def slow_disk(folder: Path) -> Iterator[tuple[Path, str]]:
    """A folder on a disk of 50 MB/s, and how it was slowed down."""
    mount = folder / "slow"
    mount.mkdir()
    try:
        device = _mount_loop(folder / "slow.img", mount)
    except (OSError, subprocess.CalledProcessError):
        archive.open = _sleeping_open(mount)  # type: ignore[attr-defined]
        yield mount, "a sleep after every write"
        return
    numbers = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
    try:
        _throttle(numbers, BYTES_PER_SECOND)
        yield mount, "ext4 on a loop device, blkio throttle on reads and writes"
    finally:
        _throttle(numbers, 0)
        subprocess.run(["umount", mount], check=True)
        subprocess.run(["losetup", "-d", device], check=True)


def _mount_loop(image: Path, mount: Path) -> str:
    if not all(os.access(place, os.W_OK) for place in THROTTLES):
        raise PermissionError("no blkio cgroup to write to")
    with open(image, "wb") as file:
        file.truncate(2**30)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    device = subprocess.check_output(["losetup", "-f", "--show", image], text=True).strip()
    subprocess.run(["mount", device, mount], check=True)
    return device


def _throttle(device: str, rate: int) -> None:
    for place in THROTTLES:
        place.write_text(f"{device} {rate}")


def _sleeping_open(below: Path) -> Callable[..., Any]:
    """An `open` whose files below a folder sleep after every write."""

    def sleeping_open(place: Any, mode: str = "r", **options: Any) -> Any:
        file = open(place, mode, **options)  # noqa: SIM115

        def write(piece: Any) -> int:
            time.sleep(len(piece) / BYTES_PER_SECOND)
            return file.write(piece)

        return _Sleeping(file, write) if "w" in mode and below in Path(place).parents else file

    return sleeping_open


class _Sleeping:
    """A file with another way of writing."""

    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self.file, self.write = file, write

    def __enter__(self) -> _Sleeping:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@dataclass
class Block:
    """The steps after one checkpoint."""

    sync: bool
    steps: list[float] = field(default_factory=list)  # seconds each
    at_work: list[bool] = field(default_factory=list)  # whether the carrier was, for each step
    cpu: float = 0.0  # seconds of all threads, saving included
    take: float = 0.0  # seconds the training thread spent on handing the checkpoint over
    carrier: float = 0.0  # processor seconds of the carrier's thread


def processor_seconds(thread: threading.Thread) -> float:
    """What a thread of this process has used so far."""
    return next(one.user_time + one.system_time for one in psutil.Process().threads() if one.id == thread.native_id)


def stopwatch(way_home: checkpoints.CheckpointSync) -> tuple[Any, list[Block]]:
    """A callback that hands every other checkpoint to the carrier, and the times it takes."""
    from transformers import TrainerCallback

    blocks: list[Block] = []

    class Stopwatch(TrainerCallback):
        """One block from a save to the next."""

        cpu = carrier = 0.0

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            while way_home.waiting is not None:  # else a block without sync would pay for the one before
                time.sleep(0.01)
            if blocks:
                blocks[-1].cpu = time.process_time() - self.cpu
                blocks[-1].carrier = processor_seconds(way_home._thread) - self.carrier
            self.carrier = processor_seconds(way_home._thread)
            self.cpu, began = time.process_time(), time.perf_counter()
            blocks.append(Block(sync=len(blocks) % 4 in (1, 2)))
            if blocks[-1].sync:
                way_home.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")
                blocks[-1].take = time.perf_counter() - began

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.busy, self.began = way_home.waiting is not None, time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if blocks:
                blocks[-1].steps.append(time.perf_counter() - self.began)
                blocks[-1].at_work.append(self.busy)
            way_home.messages()

    return Stopwatch(), blocks


def trainer_of(scratch: Path, steps: int, save_steps: int, rank: int, callback: Any) -> Any:
    """Lesson 03's trainer on the tiny model."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    data.prepare("", scratch / "data", rows=0)
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    rows = chat.training_dataset(chat.filter_by_length(tokenizer, data.load(scratch / "data")[0], 256))
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        files.TINY_MODEL,
        quantization_config=four_bit,
        dtype=torch.float32,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
    )
    settings = SFTConfig(
        output_dir=str(scratch / "trainer"), max_steps=steps, save_steps=save_steps, save_total_limit=1,
        logging_steps=10**6, max_length=256, packing=True, per_device_train_batch_size=2,
        learning_rate=2e-4, bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(),
        report_to=[], disable_tqdm=True, seed=SEED, optim="adamw_torch_fused", dataloader_pin_memory=False,
    )  # fmt: skip
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=lora,
        callbacks=[callback],
    )  # fmt: skip
    weights.repair_precision(model)
    return trainer


def measure(scratch: Path, keep: Path, pairs: int, steps: int, rank: int) -> tuple[list[Block], float]:
    """The blocks of one training, the warm-up left out, and the MiB of a checkpoint."""
    fingerprint = dict(benchmark="sync")
    logs = (scratch / "logs", keep / "logs")
    way_home = checkpoints.CheckpointSync(scratch / "sealed", keep / "checkpoints", fingerprint, logs, lambda: None)
    callback, blocks = stopwatch(way_home)
    trainer_of(scratch, steps * (2 * pairs + 2), steps, rank, callback).train()
    kept = way_home.finish()
    assert kept
    return blocks[1:-1], kept.size / 2**20


def ratio(blocks: list[Block], only_at_work: bool = False) -> float:
    """The median step with sync over the median step without."""
    chosen: dict[bool, list[float]] = {True: [], False: []}
    for block in blocks:
        timed = zip(block.steps, block.at_work, strict=True)
        chosen[block.sync] += [step for step, busy in timed if busy or not (block.sync and only_at_work)]
    return statistics.median(chosen[True]) / statistics.median(chosen[False])


def with_interval(blocks: list[Block], only_at_work: bool = False) -> dict[str, float]:
    """The ratio, and between which values 95 % of the ratios lie that other draws of as many blocks give."""
    dice, kinds = random.Random(SEED), [[block for block in blocks if block.sync is sync] for sync in (True, False)]
    draws = ([one for kind in kinds for one in dice.choices(kind, k=len(kind))] for _ in range(2000))
    drawn = sorted(ratio(draw, only_at_work) for draw in draws)
    return {"ratio": round(ratio(blocks, only_at_work), 4), "from": round(drawn[50], 4), "to": round(drawn[-51], 4)}


def summary(blocks: list[Block]) -> dict[str, Any]:
    """Seconds per step with and without sync, their ratio, and how sure that is."""
    on, off = ([block for block in blocks if block.sync is sync] for sync in (True, False))
    medians = [statistics.median(step for block in kind for step in block.steps) for kind in (on, off)]
    return {
        "blocks": len(blocks),
        "seconds_per_step_on": round(medians[0], 4),
        "seconds_per_step_off": round(medians[1], 4),
        "all_steps": with_interval(blocks),
        "steps_at_work": with_interval(blocks, only_at_work=True),
        "carrier_at_work": round(statistics.mean(busy for block in on for busy in block.at_work), 3),
        "cpu_ratio": round(statistics.median(b.cpu for b in on) / statistics.median(b.cpu for b in off), 4),
        "carrier_cpu_seconds": round(statistics.median(block.carrier for block in on), 3),
        "carrier_cpu_share": round(sum(b.carrier for b in on) / sum(step for b in on for step in b.steps), 4),
        "take_milliseconds": round(1000 * max(block.take for block in on), 2),
    }


def main(pairs: int, steps: int, rank: int) -> None:
    """Measure, print and write down."""
    hardware.share_processors()
    with tempfile.TemporaryDirectory() as folder, slow_disk(Path(folder)) as (keep, throttled_by):
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        blocks, mib = measure(scratch, keep, pairs, steps, rank)
    packages = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    machine = {
        "card": str(hardware.gpu() or "none"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    about = {
        "checkpoint_mib": round(mib, 1), "steps_between": steps, "throttled_by": throttled_by,
        "load_average": round(os.getloadavg()[1], 1), "machine": machine,
        "versions": {name: version(name) for name in packages},
    }  # fmt: skip
    result = summary(blocks) | about
    files.write_json(ROOT / f"benchmarks/results/sync_rank{rank}.json", result)
    print(*(f"{name:22} {value}" for name, value in result.items()), sep="\n")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *[8, 50, 16][len(given) :])
