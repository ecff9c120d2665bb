"""How the processes of a training share its weights and rows: DDP, FSDP or DeepSpeed ZeRO, as the launcher chose."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ENGINES = ("ddp", "fsdp_qlora", "fsdp_lora", "zero2", "zero2_offload", "zero3")  # files in configs/accelerate
SHARDED = ("fsdp", "zero3")  # no process has a whole model


def engine() -> str:
    """What accelerate's launcher asked for: fsdp, zero1 to zero3; ddp for torchrun; empty for one plain process."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return f"zero{_deepspeed_plugin().zero_stage}"
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "fsdp"
    return "ddp" if "LOCAL_RANK" in os.environ else ""


@cache
def _deepspeed_plugin() -> Any:
    import torch
    from accelerate.utils import DeepSpeedPlugin

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return DeepSpeedPlugin()  # from the launcher's environment


def device_map(device: int | str, precision: str) -> dict[str, int | str] | None:
    """For `from_pretrained`: where the weights go. FSDP takes its shards from RAM, ZeRO-3 makes them while loading."""
    if device == "cpu" and engine() not in ("", "ddp"):
        _allow_cpu()
    if engine() == "zero3":
        plugin = _deepspeed_plugin()  # transformers sees a weak reference to it
        plugin.set_mixed_precision({"fp32": "no"}.get(precision, precision))
        plugin.set_deepspeed_weakref()
        return None
    if engine() == "fsdp" and device != "cpu":
        _quantize_on(device)
    return {"": "cpu" if engine() == "fsdp" else device}


def _quantize_on(device: int | str) -> None:
    """Let bitsandbytes quantize on the GPU what is loaded to RAM, one weight after the other: a CPU takes an hour."""
    from bitsandbytes.nn import Params4bit

    stock = Params4bit._quantize

    def quantize(self: Any, wanted: Any) -> Any:
        stock(self, device)
        self.data = self.data.to(wanted)
        self.quant_state.to(wanted)
        return self

    Params4bit._quantize = quantize  # type: ignore[method-assign]


def engine_name(method: str) -> str:
    """The engine as its file in configs/accelerate is called; one process counts as DDP."""
    if engine() == "zero2" and _deepspeed_plugin().offload_optimizer_device == "cpu":
        return "zero2_offload"
    return {"": "ddp", "fsdp": f"fsdp_{method}"}.get(engine(), engine())


def optimizer_for(name: str) -> str:
    """The optimizer of a profile; shards of weights need torch's own, whose states are divided among the processes."""
    return name if engine() in ("", "ddp") else "adamw_torch"


def _allow_cpu() -> None:
    """Let accelerate use FSDP and DeepSpeed without a GPU, as a lesson on a CPU does; it takes them for GPUs only."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **more: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **more)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
        elif self.distributed_type == DistributedType.MULTI_CPU and deepspeed_plugin is not None:
            self.deepspeed_plugins, self.distributed_type = deepspeed_plugin, DistributedType.DEEPSPEED
            deepspeed_plugin.set_mixed_precision(self._mixed_precision)
            deepspeed_plugin.select(_from_accelerator_state=True)
        PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init


class SharedSteps:
    """Mixed into a trainer of several processes: an epoch's last step has the rows it has with one process.

    accelerate would fill it up with rows from the epoch's beginning; here they are rows without a token to learn.
    """

    def add_empty_rows(self: Any) -> None:
        from datasets import concatenate_datasets

        self.rows, rows = len(self.train_dataset), self.train_dataset
        missing = -self.rows % (self.args.train_batch_size * self.args.world_size) if "labels" in rows.features else 0
        empty = rows.select([0] * missing).map(lambda row: row | {"labels": [-100] * len(row["input_ids"])})
        self.train_dataset = concatenate_datasets([rows, empty.cast(rows.features)]) if missing else rows

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        from torch.utils.data import RandomSampler

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


def reshard(model: Any) -> None:
    """Let FSDP give back the weights it gathered for a forward pass, so that every process sees its shards alone."""
    for part in model.modules() if engine() == "fsdp" else ():
        if hasattr(part, "reshard"):
            part.reshard()


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def adapter_weights(model: Any, file: Path) -> dict[str, Any]:
    """The weights in PEFT's file, by the names they have in the model."""
    from safetensors.torch import load_file

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
    import torch

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
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
