"""How the processes of a training share its weights and rows: DDP, FSDP or DeepSpeed ZeRO, as the launcher chose."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from nbutils.errors import CourseError, require_choice

STRATEGIES = {  # files in configs/accelerate, and the `method` in a profile that each is for; empty: any
    "ddp": "", "fsdp_qlora": "qlora", "fsdp_lora": "lora", "zero2": "", "zero2_offload": "", "zero3": "lora",
}  # fmt: skip
WHOLE = ("", "ddp")  # every process has the whole model and its optimizer, as one process alone
SHARDED = ("fsdp", "zero3")  # no process has a whole model


def strategy() -> str:
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


def require_method(name: str, method: str) -> None:
    """Refuse a strategy that has no file in configs/accelerate, or whose file is not for this method."""
    require_choice("ENGINE", name, STRATEGIES)
    needed = STRATEGIES[name]
    if needed in ("", method):
        return
    raise CourseError(
        "{engine} is for method {wanted}, and this profile has method {method}.",
        todo='Take another engine, or set SET = "method={wanted}, quantization.load_in_4bit={four_bits}".',
        engine=name,
        wanted=needed,
        method=method,
        four_bits="true" if needed == "qlora" else "false",
    )


def require_gathered_by_layer(name: str, model: str) -> None:
    """Refuse ZeRO-3 for a hybrid model: it gathers the weights of a layer that is called, and a convolution is not."""
    if name == "zero3":
        raise CourseError(
            "ZeRO-3 cannot train a hybrid model like {model}.",
            todo="Use FSDP: ENGINE = fsdp_lora or fsdp_qlora in lesson 06.",
            model=model,
        )


def device_map(device: int | str, dtype: str, method: str) -> dict[str, int | str] | None:
    """For `from_pretrained`: where the weights go. FSDP takes its shards from RAM, ZeRO-3 makes them while loading."""
    require_method(strategy_name(method), method)
    if device == "cpu" and strategy() not in WHOLE:
        _allow_cpu()
    if strategy() == "zero3":
        plugin = _deepspeed_plugin()  # transformers sees a weak reference to it
        plugin.set_mixed_precision({"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "no"))
        plugin.set_deepspeed_weakref()
        return None
    if strategy() != "fsdp":
        return {"": device}
    if device != "cpu":
        _quantize_on(device)
    return {"": "cpu"}


def _quantize_on(device: int | str) -> None:
    """Let bitsandbytes quantize on the GPU what is loaded to RAM, one weight after the other: a CPU takes an hour."""
    from bitsandbytes.nn import Params4bit

    stock = Params4bit._quantize

    def quantize(self: Any, target: Any) -> Any:
        stock(self, device)
        self.data = self.data.to(target)
        self.quant_state.to(target)
        return self

    Params4bit._quantize = quantize  # type: ignore[method-assign]


def strategy_name(method: str) -> str:
    """The strategy as its file in configs/accelerate is called; one process counts as DDP."""
    name = strategy() or "ddp"
    if name == "fsdp":
        return f"fsdp_{method}"
    if name == "zero2" and _deepspeed_plugin().offload_optimizer_device == "cpu":
        return "zero2_offload"
    return name


def _allow_cpu() -> None:
    """Let accelerate use FSDP and DeepSpeed without a GPU, as a lesson on a CPU does; it takes them for GPUs only."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        if self.distributed_type != DistributedType.MULTI_CPU:
            return
        if plugin := options.get("fsdp_plugin"):
            self.fsdp_plugin = plugin
            self.distributed_type = DistributedType.FSDP
        elif plugin := options.get("deepspeed_plugin"):
            self.deepspeed_plugins = plugin
            self.distributed_type = DistributedType.DEEPSPEED
            plugin.set_mixed_precision(self._mixed_precision)
            plugin.select(_from_accelerator_state=True)
        PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init
