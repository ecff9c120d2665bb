"""A training of shards: the trainer's steps are those of one process, and so are its checkpoints.

A checkpoint has the files of a training with one process, whatever engine wrote it: whole adapter weights, and the
optimizer's states of whole weights. So any engine continues it, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import RandomSampler

from nbutils import files
from nbutils.distributed import barrier, local_rank, rank, strategy, world_size
from nbutils.errors import CourseError

MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch's AdamW
GROUPS = 2  # of weights in the trainer's optimizer, with and without decay; DeepSpeed leaves out the empty one
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
ADAPTER = "adapter_model.safetensors"
StateDict = dict[str, Any]  # torch's word: of a model, an optimizer, a scheduler, or of one weight in an optimizer


def adapt_to_strategy(trainer: Any) -> None:
    """Let the trainer take the steps of one process and leave its checkpoints, and keep its adapter in float32."""
    if not strategy() or isinstance(trainer, SharedSteps):
        return
    if strategy() != "ddp" and not hasattr(trainer, "_prepare_for_training"):
        raise CourseError(
            "This version of transformers writes no checkpoints that any engine continues.",
            todo="Install 5.6 or newer (pip install -U transformers), or use DDP (torchrun).",
        )
    mix_in(trainer, SharedSteps if strategy() == "ddp" else WholeCheckpoints)
    trainer.add_empty_rows()
    if strategy() == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's would gather and add up float32 adapters in 16 bits; autocast chooses as it does without FSDP
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        name_units(trainer.model)


def name_units(model: Any) -> None:
    """Let FSDP's units be the layers that are there: the text model of one that also sees names vision layers too."""
    present = {type(part).__name__ for part in model.modules()}
    model._no_split_modules = sorted(present.intersection(model._no_split_modules))


def mix_in(trainer: Any, mixin: type) -> None:
    """Put the methods of another class before those of this trainer's own, once."""
    stock = type(trainer)
    if not isinstance(trainer, mixin):
        trainer.__class__ = type(stock.__name__, (mixin, stock), {})


class SharedSteps:
    """Mixed into a trainer of several processes: an epoch's last step has the rows it has with one process.

    accelerate would fill it up with rows from the epoch's beginning; here they are rows without a token to learn.
    """

    def add_empty_rows(self: Any) -> None:
        rows = self.train_dataset
        self.rows = len(rows)
        args = self.args
        missing = -self.rows % (args.train_batch_size * args.world_size)
        if missing:
            first = rows[0]
            empty = first | {"labels": [-100] * len(first["input_ids"])}
            filling = Dataset.from_list([empty] * missing, features=rows.features)
            self.train_dataset = concatenate_datasets([rows, filling])

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
        self.sampler = sampler
        self.rows = rows

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
        folder = Path(output_dir)
        if strategy() == "fsdp":  # a copy: the optimizer goes on with its own
            state = tree_map_only(DTensor, lambda moment: moment.full_tensor().cpu(), self.optimizer.state_dict())
        else:
            state = _zero_state(self)
        if self.args.should_save:
            torch.save(state, folder / OPTIMIZER)
            schedule = self.lr_scheduler.state_dict()
            torch.save(_of_groups(schedule, GROUPS), folder / SCHEDULER)

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)  # type: ignore[misc]
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            load_weights(self.model, adapter_weights(self.model, folder))
            states = torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu")
            load_states = _load_fsdp_state if strategy() == "fsdp" else _load_zero_state
            load_states(self, states)
            schedule = torch.load(folder / SCHEDULER, weights_only=True)
            groups = len(self.optimizer.param_groups)
            self.lr_scheduler.load_state_dict(_of_groups(schedule, groups))
            self._load_scaler(resume_from_checkpoint)
        return prepared


def reshard(model: Any) -> None:
    """Let FSDP give back the weights it gathered for a forward pass, so that every process sees its shards alone."""
    if strategy() != "fsdp":
        return
    for part in model.modules():
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


def _trained(model: Any) -> StateDict:
    """The weights that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def adapter_weights(model: Any, checkpoint: Path) -> StateDict:
    """The weights in PEFT's file, by the names they have in the model."""
    stored = load_file(checkpoint / ADAPTER)
    return {name: stored[name.replace(".default.", ".")] for name in _trained(model)}


def _is_deepspeeds(weight: Any) -> bool:
    """Whether DeepSpeed keeps this weight: its shards (ds_id), or its original in 32 bits."""
    return hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping")


def _has_original(weight: Any) -> bool:
    """Whether DeepSpeed trains an original of this weight in 32 bits; ZeRO-3 has none before the training."""
    return not hasattr(weight, "ds_id") or hasattr(weight, "_z3_optimizer")


def full_weights(model: Any) -> StateDict:
    """CPU copies of the trained weights, put together from the shards of all processes; all must call it."""
    reshard(model)
    return {name: _whole(weight).detach().to("cpu", copy=True) for name, weight in _trained(model).items()}


def _whole(weight: Any) -> Any:
    """A weight put together from its shards."""
    if hasattr(weight, "full_tensor"):
        return weight.full_tensor()
    if not _is_deepspeeds(weight):
        return weight
    import deepspeed

    if _has_original(weight):
        return deepspeed.utils.safe_get_full_fp32_param(weight)
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.data.clone()


def load_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Load such copies."""
    for name, weight in _trained(model).items():
        if not _is_deepspeeds(weight):
            weight.data.copy_(shard(weights[name], weight))
            continue
        import deepspeed

        if _has_original(weight):
            original = weights[name].to(weight.device, torch.float32)
            deepspeed.utils.safe_set_full_fp32_param(weight, original)
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")):
            weight.data.copy_(weights[name])


def shard(value: Any, weight: Any) -> Any:
    """A whole tensor as this process holds the weight it belongs to."""
    if not hasattr(weight, "full_tensor") or value.shape != weight.shape:
        return value
    value = value.to(weight.device)
    return distribute_tensor(value, weight.device_mesh, weight.placements)


def _zero_state(trainer: Any) -> StateDict:
    """The state dict of DeepSpeed's optimizer, of whole weights."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = trainer.model_wrapped.optimizer.optimizer
    group = inner.param_groups[0]
    step = group.get("step")
    for moments in inner.state.values():
        step = moments.get("step", step)
    states = {}
    for number, weight in enumerate(_trained(trainer.model).values()):
        state = {"step": torch.tensor(float(step))}
        for key in MOMENTS:
            state[key] = safe_get_full_optimizer_state(weight, key).cpu()
        states[number] = state
    groups = [group | {"params": list(states)}, group | {"params": []}]  # the second is without decay
    return {"state": states, "param_groups": groups}


def _load_fsdp_state(trainer: Any, stored: StateDict) -> None:
    weights = list(_trained(trainer.model).values())
    for number, state in stored["state"].items():
        weight = weights[number]
        for key in MOMENTS:
            state[key] = shard(state[key], weight)
    trainer.optimizer.load_state_dict(stored)


def _load_zero_state(trainer: Any, stored: StateDict) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state

    zero = trainer.model_wrapped.optimizer
    inner = zero.optimizer
    step = stored["state"][0]["step"]
    is_torchs = type(inner).__module__.startswith("torch")  # DeepSpeed's own counts with an int
    flat = zero.fp32_partitioned_groups_flat if strategy() == "zero3" else zero.single_partition_of_fp32_groups
    for part in flat:  # else they would be made by the first step
        inner.state[part] = {key: torch.zeros_like(part) for key in MOMENTS}
        inner.state[part]["step"] = step.clone() if is_torchs else int(step)
    for group in inner.param_groups:  # the learning rate of this step
        group.update(stored["param_groups"][0] | {"params": group["params"]})
    if strategy() != "zero3":
        zero._lazy_init_hp_params_optimizer_state()
    for number, weight in enumerate(_trained(trainer.model).values()):
        state = stored["state"][number]
        for key in MOMENTS:
            moment = state[key].to(weight.device)
            safe_set_full_optimizer_state(weight, moment, key)


def _of_groups(schedule: StateDict, count: int) -> StateDict:
    """A scheduler's state for so many groups of weights, which all have the same learning rate."""
    changed = dict(schedule)
    for key, value in schedule.items():
        if isinstance(value, list):
            changed[key] = (value * count)[:count]
    return changed


def convert_optimizer_file(checkpoint: Path, optimizer: str) -> None:
    """Rewrite the optimizer's states of an unpacked checkpoint where another kind of AdamW is to continue it."""
    if local_rank() == 0:
        path = checkpoint / OPTIMIZER
        stored = torch.load(path, weights_only=True, map_location="cpu")
        states = stored["state"]
        wants_bnb = "8bit" in optimizer or "paged" in optimizer
        is_bnb = any("exp_avg" not in state for state in states.values())
        if states and is_bnb != wants_bnb:
            convert = _as_bnb if wants_bnb else _as_torch
            converted = {number: convert(state) for number, state in states.items()}
            with files.replacement(path) as file:  # another machine may read it now, on a disk that both share
                torch.save(stored | {"state": converted}, file)
    barrier()


def _as_bnb(state: StateDict) -> StateDict:
    """The moments of one weight under the names of bitsandbytes, which trains on with float32, too."""
    return {
        "step": int(state["step"]),
        "state1": state["exp_avg"],
        "state2": state["exp_avg_sq"],
    }


def _as_torch(state: StateDict) -> StateDict:
    """The moments of one weight in float32, under torch's names."""
    flat = dict(state)
    for value in state.values():
        if isinstance(value, dict):  # bitsandbytes keeps them one level deeper for FSDP
            flat |= value
    return {
        "step": torch.tensor(float(flat["step"])),
        "exp_avg": _in_32_bits(flat, "1"),
        "exp_avg_sq": _in_32_bits(flat, "2"),
    }


def _in_32_bits(state: StateDict, number: str) -> Any:
    """The first or second moment of bitsandbytes; small ones it keeps in 32 bits."""
    values = state[f"state{number}"]
    if f"qmap{number}" not in state:
        return values
    from bitsandbytes.functional import dequantize_blockwise

    scales = state[f"absmax{number}"]
    return dequantize_blockwise(values, absmax=scales, code=state[f"qmap{number}"], blocksize=256)
