"""Reading an export: the fixed set of the parity report through the model that was written.

Not here: comparing it with the merged model (parity.gap, in checking).
"""

from __future__ import annotations

from typing import Any

SMALL = 4 * 2**30  # bytes of weights up to which a CPU computes in float32


def read(job: dict[str, Any]) -> dict[str, Any]:
    """What the exported model predicts and answers; the predictions go to a file of their own."""
    from safetensors.torch import save_file

    from nbutils import parity

    reading = parity.measure(_load(job), parity.Fixed(**job["fixed"]))
    save_file({"logs": reading.logs.contiguous()}, job["logs"])
    return {"answers": reading.answers}


def _load(job: dict[str, Any]) -> Any:
    """The model as its users load it; on a CPU in float32, so that only the weights' own loss is seen."""
    import torch
    from transformers import AutoModelForCausalLM

    card = torch.cuda.is_available() and job["format"] != "int8"
    exact = not card and job["bytes"] < SMALL
    settings: dict[str, Any] = {"gguf_file": job["file"]} if job["file"] else {}
    return AutoModelForCausalLM.from_pretrained(
        job["folder"],
        dtype=torch.float32 if exact else "auto",
        device_map="cuda:0" if card else "cpu",
        **settings,
        trust_remote_code=False,
    )
