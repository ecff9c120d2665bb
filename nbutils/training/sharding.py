"""A training of shards: the trainer's steps are those of one process, and so are its checkpoints.

A checkpoint has the files of a training with one process, whatever engine wrote it: whole adapter weights, and the
optimizer's states of whole weights. So any engine continues it, with any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import RandomSampler

from nbutils.distributed import barrier, local_rank, rank, strategy, world_size
from nbutils.errors import CourseError
from nbutils.language import tr

MOMENTS = {"exp_avg": "state1", "exp_avg_sq": "state2"}  # of torch's AdamW, and of bitsandbytes'
GROUPS = 2  # of weights in the trainer's optimizer, with and without decay; DeepSpeed leaves out the empty one
OPTIMIZER, SCHEDULER, ADAPTER = "optimizer.pt", "scheduler.pt", "adapter_model.safetensors"


def use_engine(trainer: Any) -> None:
    """Let the trainer take the steps of one process and leave its checkpoints, and keep its adapter in float32."""
    kind = {"": None, "ddp": SharedSteps}.get(strategy(), WholeCheckpoints)
    if kind is None or isinstance(trainer, SharedSteps):
        return
    if kind is WholeCheckpoints and not hasattr(trainer, "_prepare_for_training"):
        raise CourseError(
            tr(
                "With transformers {version} there are no checkpoints that any engine continues.",
                version=transformers.__version__,
            ),
            allowed=tr("transformers 5.6 or newer for FSDP and DeepSpeed; DDP works with older ones"),
            todo=tr("Run `pip install -U transformers`, or use DDP (torchrun)."),
        )
    trainer.__class__ = type(type(trainer).__name__, (kind, type(trainer)), {})
    trainer.add_empty_rows()
    if strategy() == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's would gather and add up float32 adapters in 16 bits; autocast chooses as it does without FSDP
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()


class SharedSteps:
    """Mixed into a trainer of several processes: an epoch's last step has the rows it has with one process.

    accelerate would fill it up with rows from the epoch's beginning; here they are rows without a token to learn.
    """

    def add_empty_rows(self: Any) -> None:
        self.rows, rows = len(self.train_dataset), self.train_dataset
        missing = -self.rows % (self.args.train_batch_size * self.args.world_size) if "labels" in rows.features else 0
        empty = [rows[0] | {"labels": [-100] * len(rows[0]["input_ids"])}] * missing
        if empty:
            self.train_dataset = concatenate_datasets([rows, Dataset.from_list(empty, features=rows.features)])

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        return RandomSampler(range(self.rows))  # its order is that of one process

    def get_train_dataloader(self: Any) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        batches.sampler = _WithEmptyRows(batches.sampler, len(self.train_dataset))
        return loader


class _WithEmptyRows:
    """A sampler, and after it the rows it does not know."""

    def __init__(self, sampler: Any, rows: int) -> None:
        self.sampler, self.rows = sampler, rows

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from range(len(self.sampler), self.rows)

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class WholeCheckpoints(SharedSteps):
    """Mixed into a trainer of shards: its checkpoints have the files and the content of a training with one process."""

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = full_weights(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        state = _optimizer_state(self)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(_of_groups(self.lr_scheduler.state_dict(), GROUPS), Path(output_dir) / SCHEDULER)

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        made = super()._prepare_for_training(max_steps, train_dataloader, None)  # type: ignore[misc]
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            load_weights(self.model, adapter_weights(self.model, folder / ADAPTER))
            _load_optimizer_state(self, torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"))
            schedule = torch.load(folder / SCHEDULER, weights_only=True)
            self.lr_scheduler.load_state_dict(_of_groups(schedule, len(self.optimizer.param_groups)))
            self._load_scaler(resume_from_checkpoint)
        return made


def reshard(model: Any) -> None:
    """Let FSDP give back the weights it gathered for a forward pass, so that every process sees its shards alone."""
    for part in model.modules() if strategy() == "fsdp" else ():
        if hasattr(part, "reshard"):
            part.reshard()


def local_shard(weight: Any) -> Any:
    """What this process keeps of a weight; FSDP has a tied output head gathered, as the loss never calls that layer."""
    if hasattr(weight, "ds_tensor"):
        return weight.ds_tensor
    if hasattr(weight, "to_local"):
        return weight.to_local()
    if strategy() != "fsdp":
        return weight
    shards = weight.chunk(world_size())
    return shards[rank()] if rank() < len(shards) else weight[:0]


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def adapter_weights(model: Any, file: Path) -> dict[str, Any]:
    """The weights in PEFT's file, by the names they have in the model."""
    stored = load_file(file)
    return {name: stored[name.replace(".default.", ".")] for name, _ in _trained(model)}


def full_weights(model: Any) -> dict[str, Any]:
    """CPU copies of the trained weights, put together from the shards of all processes; all must call it."""

    def whole(weight: Any) -> Any:
        if hasattr(weight, "full_tensor"):
            return weight.full_tensor()
        if not hasattr(weight, "ds_id") and not hasattr(weight, "_hp_mapping"):
            return weight
        import deepspeed

        if hasattr(weight, "ds_id") and not hasattr(weight, "_z3_optimizer"):  # not trained yet
            with deepspeed.zero.GatheredParameters([weight]):
                return weight.data.clone()
        return deepspeed.utils.safe_get_full_fp32_param(weight)  # 16 bits are trained, this is their original

    reshard(model)
    return {name: whole(weight).detach().to("cpu", copy=True) for name, weight in _trained(model)}


def load_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Load such copies."""
    for name, weight in _trained(model):
        if hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping"):
            import deepspeed

            if not hasattr(weight, "ds_id") or hasattr(weight, "_z3_optimizer"):
                deepspeed.utils.safe_set_full_fp32_param(weight, weights[name].to(weight.device, torch.float32))
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")):
                weight.data.copy_(weights[name])
        else:
            weight.data.copy_(shard(weights[name], weight))


def shard(value: Any, weight: Any) -> Any:
    """A whole tensor as this process holds the weight it belongs to."""
    if not hasattr(weight, "full_tensor") or value.shape != weight.shape:
        return value
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)


def _optimizer_state(trainer: Any) -> dict[str, Any]:
    """The optimizer's state dict, of whole weights."""
    if strategy() == "fsdp":
        found = trainer.optimizer.state_dict()
        states = {
            number: {key: one.full_tensor().cpu() if hasattr(one, "full_tensor") else one for key, one in state.items()}
            for number, state in found["state"].items()
        }
        return {"state": states, "param_groups": found["param_groups"]}
    from deepspeed.utils import safe_get_full_optimizer_state

    weights = [weight for _, weight in _trained(trainer.model)]
    inner = trainer.model_wrapped.optimizer.optimizer
    step = next((state["step"] for state in inner.state.values() if "step" in state), inner.param_groups[0].get("step"))
    states = {
        number: {key: safe_get_full_optimizer_state(weight, key).cpu() for key in MOMENTS} | {"step": _tensor(step)}
        for number, weight in enumerate(weights)
    }
    members = [[*states], *[[]] * (GROUPS - 1)]
    return {"state": states, "param_groups": [inner.param_groups[0] | {"params": numbers} for numbers in members]}


def _load_optimizer_state(trainer: Any, stored: dict[str, Any]) -> None:
    weights = [weight for _, weight in _trained(trainer.model)]
    if strategy() == "fsdp":
        states = {
            number: {key: shard(one, weights[number]) if key in MOMENTS else one for key, one in state.items()}
            for number, state in stored["state"].items()
        }
        trainer.optimizer.load_state_dict(stored | {"state": states})
        return
    from deepspeed.utils import safe_set_full_optimizer_state

    zero, step = trainer.model_wrapped.optimizer, next(iter(stored["state"].values()))["step"]
    in_torch = type(zero.optimizer).__module__.startswith("torch")  # DeepSpeed's own counts with an int
    flat = zero.fp32_partitioned_groups_flat if strategy() == "zero3" else zero.single_partition_of_fp32_groups
    for part in flat:  # else they would be made by the first step
        zero.optimizer.state[part] = {key: torch.zeros_like(part) for key in MOMENTS}
        zero.optimizer.state[part]["step"] = step.clone() if in_torch else int(step)
    for group in zero.optimizer.param_groups:  # the learning rate of this step
        group |= {key: value for key, value in stored["param_groups"][0].items() if key != "params"}
    if strategy() != "zero3":
        zero._lazy_init_hp_params_optimizer_state()
    for number, weight in enumerate(weights):
        for key in MOMENTS:
            safe_set_full_optimizer_state(weight, stored["state"][number][key].to(weight.device), key)


def _of_groups(schedule: dict[str, Any], count: int) -> dict[str, Any]:
    """A scheduler's state for so many groups of weights, which all have the same learning rate."""
    return {key: (value * count)[:count] if isinstance(value, list) else value for key, value in schedule.items()}


def _tensor(step: Any) -> Any:
    return torch.as_tensor(float(step), dtype=torch.float32)


def convert_optimizer_file(checkpoint: Path, optimizer: str) -> None:
    """Rewrite the optimizer's states of an unpacked checkpoint where another kind of AdamW is to continue it."""
    path, ours = checkpoint / OPTIMIZER, "bnb" if "8bit" in optimizer or "paged" in optimizer else "torch"
    stored = torch.load(path, weights_only=True, map_location="cpu", mmap=True)  # most often only looked at
    first: dict[str, Any] = next(iter(stored["state"].values()), {})
    if first and ("exp_avg" in first) == (ours == "bnb") and local_rank() == 0:
        states = {number: _converted(state, ours) for number, state in stored["state"].items()}
        torch.save(stored | {"state": states}, path.with_suffix(".converted"))
        os.replace(path.with_suffix(".converted"), path)
    barrier()


def _converted(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """One weight's moments in float32, under the names of this kind; bitsandbytes trains on with those, too."""
    if kind == "bnb":
        return {"step": int(state["step"])} | {ours: state[name] for name, ours in MOMENTS.items()}
    from bitsandbytes.functional import dequantize_blockwise

    flat = {key: one for part in state.values() if isinstance(part, dict) for key, one in part.items()} | state
    found = {"step": _tensor(flat["step"])}
    for name, theirs in MOMENTS.items():
        values, number = flat[theirs], theirs[-1]
        if f"qmap{number}" in flat:  # in 8 bits
            code, scales = flat[f"qmap{number}"], flat[f"absmax{number}"]
            values = dequantize_blockwise(values, absmax=scales, code=code, blocksize=256)
        found[name] = values
    return found
