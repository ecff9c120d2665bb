"""Training speed and memory of one LoRA step, all ways in one call, on random weights in the shape of a course model.

    python benchmarks/train.py FOLDER [--model Qwen2.5-7B] [--ways course-8x1 …] [--steps 6] [--out results.json]

FOLDER holds the weights (made when missing, 15 GB for the 7B). Ways that end with `-16` leave the base in 16 bits, the
others have it in 4. Every way trains the same rows: 6,000 of 24 to 2,048 tokens, as instruction data is distributed,
with LoRA of rank 16 on all linear layers unless the way says otherwise. Each runs in a process of its own; tokens are
real ones, not padding, and the first steps, in which kernels are compiled and tuned, are not timed. Needs a CUDA GPU;
the `unsloth` ways need Unsloth.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from nbutils.models import known_models

ROWS, LONGEST, SHORTEST = 6000, 2048, 24
WARM_UP = 5
MODEL = "Qwen2.5-7B"
LINEAR = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",  # of Gated DeltaNet layers
]  # fmt: skip
# way: (maker, micro-batch, accumulation, recomputation)
WAYS: dict[str, tuple[str, int, int, str]] = {
    "guide-1x16": ("guide", 1, 16, "off"),
    "padded-2x4": ("padded", 2, 4, "on"),
    "packed-2x4": ("packed", 2, 4, "on"),
    "unsloth-2x4": ("unsloth", 2, 4, "unsloth"),
    "course-2x4": ("course", 2, 4, "on"),
    "unsloth-8x1": ("unsloth", 8, 1, "unsloth"),
    "stock-8x1": ("stock", 8, 1, "on"),
    "course-8x1": ("course", 8, 1, "on"),
    "course-8x1-offload": ("course", 8, 1, "offload"),
    "course-2x4-off": ("course", 2, 4, "off"),
    "course-8x1-off": ("course", 8, 1, "off"),
    "unsloth-8x1-16": ("unsloth", 8, 1, "unsloth"),
    "stock-8x1-16": ("stock", 8, 1, "on"),
    "course-8x1-16": ("course", 8, 1, "on"),
    "course-8x1-offload-16": ("course", 8, 1, "offload"),
    "course-8x1-off-16": ("course", 8, 1, "off"),
    "unsloth-2x4-16": ("unsloth", 2, 4, "unsloth"),
    "course-2x4-16": ("course", 2, 4, "on"),
    "reference-8x1-16": ("reference", 8, 1, "on"),
}
bits = 4  # of the base; `measure` sets what the way says


def lengths() -> list[int]:
    """Row lengths like those of instruction data: many short, few long."""
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(5.16, 0.93, ROWS)
    return [int(one) for one in drawn.clip(SHORTEST, LONGEST)]


def rows() -> Any:
    """The rows, tokenised already: random words of the vocabulary."""
    import numpy as np
    from datasets import Dataset

    random = np.random.default_rng(1)
    return Dataset.from_dict({"input_ids": [random.integers(5, 2000, n).tolist() for n in lengths()]})


def four_bits(dtype: str = "bfloat16") -> Any:
    """The base in 4 bits as the course has it, its products in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def load(folder: Path, **settings: Any) -> Any:
    """The model in 4 bits, or as `settings` say."""
    from transformers import AutoModelForCausalLM

    quantization = four_bits() if bits == 4 else None
    given = {"quantization_config": quantization, "dtype": "bfloat16", "device_map": {"": 0}} | settings
    return AutoModelForCausalLM.from_pretrained(folder, **given)


def settings(micro: int, accumulation: int, recompute: str, steps: int, **more: Any) -> dict[str, Any]:
    """The trainer settings all ways share."""
    return {
        "output_dir": "trainer", "per_device_train_batch_size": micro, "bf16": True, "seed": 0,
        "gradient_accumulation_steps": accumulation, "max_steps": steps, "learning_rate": 2e-4, "max_grad_norm": 1.0,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "gradient_checkpointing": recompute in ("on", "offload"), "optim": "paged_adamw_8bit",
    } | more  # fmt: skip


def sft(folder: Path, args: dict[str, Any], lora: dict[str, Any] | None = None, **loading: Any) -> Any:
    """TRL's trainer on the rows."""
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    if args["gradient_checkpointing"]:
        args = args | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    config = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **(lora or {"target_modules": LINEAR}))
    return SFTTrainer(
        model=load(folder, **loading), args=SFTConfig(max_length=LONGEST, **args), train_dataset=rows(),
        processing_class=AutoTokenizer.from_pretrained(folder), peft_config=config,
    )  # fmt: skip


def guide(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """A guide's settings: bitsandbytes' defaults (fp4, products in float32), q and v only, one row at a time."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    model = load(folder, quantization_config=hf.BitsAndBytesConfig(load_in_4bit=True), dtype="auto")
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)
    args = settings(micro, accumulation, recompute, steps, bf16=False, fp16=True, optim="adamw_torch")
    collate = hf.DataCollatorForLanguageModeling(hf.AutoTokenizer.from_pretrained(folder), mlm=False)
    return hf.Trainer(model=model, args=hf.TrainingArguments(**args), train_dataset=rows(), data_collator=collate)


def padded(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """TRL with nf4 and bfloat16, every batch padded to its longest row."""
    return sft(folder, settings(micro, accumulation, recompute, steps))


def packed(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """The same, rows packed to the full length."""
    return sft(folder, settings(micro, accumulation, recompute, steps, packing=True))


def stock(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """The same, with Liger's kernels and torch's attention for packed rows: the course without its lean step."""
    from nbutils.training import model as attention

    args = settings(micro, accumulation, recompute, steps, packing=True, use_liger_kernel=True)
    trainer = sft(folder, args, attn_implementation=attention.attention("varlen"))
    trainer.data_collator = attention.with_boundaries(trainer.data_collator)
    return trainer


def course(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """What lesson 03 does on this GPU."""
    from nbutils import training
    from nbutils.training import model as attention

    ours = {"activation_offloading": recompute == "offload", "use_liger_kernel": True}
    args = settings(micro, accumulation, recompute, steps, packing=True, **ours)
    trainer = sft(folder, args, attn_implementation=attention.attention("varlen"))
    training.patch_lora_kernels(trainer)
    return trainer


def reference(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """The same with Gated DeltaNet layers computed by transformers' own code, as where the kernels cannot run."""
    from nbutils import hardware

    hardware.delta_rule_kernels = lambda gpu: hardware.Choice(False, hardware.reference_code("to compare"))
    return course(folder, micro, accumulation, recompute, steps)


def text_only(folder: Path) -> Path:
    """A folder of the text model alone, for a model that also sees: no peer then loads vision weights."""
    config = json.loads((folder / "config.json").read_text())
    text = folder / "text"
    if "text_config" not in config:
        return folder
    if not text.exists():
        text.mkdir()
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (text / path.name).symlink_to(path.resolve())
        text_config = config["text_config"]
        text_config["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
        text_config["architectures"] = ["Qwen3_5ForCausalLM"]
        text_config["dtype"] = "bfloat16"
        (text / "config.json").write_text(json.dumps(text_config))
    return text


def unsloth(folder: Path, micro: int, accumulation: int, recompute: str, steps: int) -> Any:
    """Unsloth as its own notebooks set it up, packed, with the kernels it brings for hybrid models."""
    os.environ.setdefault("UNSLOTH_FORCE_VENDORED_FLA", "1")
    text = text_only(folder)
    from unsloth import FastLanguageModel  # isort: skip  (it must come before trl)
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(text), max_seq_length=LONGEST, load_in_4bit=bits == 4, load_in_16bit=bits == 16
    )
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor: the rows are text
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=LINEAR,
        use_gradient_checkpointing="unsloth", random_state=0,
    )  # fmt: skip
    theirs: dict[str, Any] = {"packing": True, "optim": "adamw_8bit", "max_length": LONGEST}
    if text != folder:  # it packs hybrid models only where TRL does not compute the loss
        theirs["loss_type"] = "nll"
    args = settings(micro, accumulation, recompute, steps, **theirs)
    args.pop("gradient_checkpointing")
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows(), args=SFTConfig(**args))


class Meter:
    """Counts the tokens a trainer is given and the seconds it takes, from the end of the warm-up on."""

    def __init__(self, trainer: Any) -> None:
        self.step, self.tokens, self.began, self.ended = trainer.training_step, 0, 0.0, 0.0
        self.seconds: list[float] = []
        trainer.training_step = self.training_step
        trainer.add_callback(self.callback())

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        mask = inputs.get("attention_mask")
        self.tokens = self.tokens + (inputs["input_ids"].numel() if mask is None else mask.sum())
        return self.step(model, inputs, *rest, **more)

    def callback(self) -> Any:
        import torch
        from transformers import TrainerCallback

        meter = self

        class Clock(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                torch.cuda.synchronize()
                now = time.perf_counter()
                meter.seconds.append(now - meter.ended)
                meter.ended = now
                if state.global_step == WARM_UP:
                    torch.cuda.empty_cache()
                    print("\nREADY", flush=True)
                    sys.stdin.readline()  # until all ways are compiled: they are timed one soon after the other
                    torch.cuda.reset_peak_memory_stats()  # tuning kernels takes memory, too
                    meter.tokens, meter.began = 0, time.perf_counter()
                    meter.ended = meter.began

        return Clock()

    def tokens_per_second(self) -> float:
        return float(self.tokens) / (self.ended - self.began)


def measure(way: str, folder: Path, steps: int, profile: bool = False) -> dict[str, Any]:
    """Train in this process and say what it took."""
    import torch

    global bits
    bits = 16 if way.endswith("-16") else 4
    maker, micro, accumulation, recompute = WAYS[way]
    trainer = globals()[maker](folder, micro, accumulation, recompute, WARM_UP + steps)
    loaded = torch.cuda.memory_allocated()
    meter = Meter(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "way": way, "tokens_per_second": round(meter.tokens_per_second(), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3), "loaded_gib": round(loaded / 2**30, 3),
        "packed": bool(getattr(trainer.args, "packing", False)),
        "step_seconds": [round(one, 3) for one in meter.seconds[WARM_UP:]], "losses": [round(one, 3) for one in losses],
    }  # fmt: skip
    if profile:
        try:
            found["profile"] = profile_of(trainer)
        except Exception as problem:  # a peer's step may want what the trainer alone prepares
            found["profile"] = repr(problem)
    return found


def profile_of(trainer: Any) -> dict[str, Any]:
    """Where the card's time of one micro-batch goes, by kernel."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    batch = next(iter(trainer.get_train_dataloader()))
    trainer.step = None
    trainer.model.train()
    with record(activities=[ProfilerActivity.CUDA]) as log:
        began = time.perf_counter()
        type(trainer).training_step(trainer, trainer.model, dict(batch), torch.tensor(1000, device="cuda"))
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    kernels = sorted(log.key_averages(), key=lambda one: -one.self_device_time_total)
    busy = sum(one.self_device_time_total for one in kernels) / 1e6
    top = [(one.key[:90], one.count, round(one.self_device_time_total / 1e3, 2)) for one in kernels[:40]]
    return {"wall_s": round(wall, 3), "busy_s": round(busy, 3), "kernels_ms": top}


def measured_tflops() -> float:
    """What the GPU reaches in a large matrix product in bfloat16."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize()
    return 30 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


def surroundings(model: str = MODEL) -> dict[str, Any]:
    import torch

    names = (
        "torch",
        "triton",
        "transformers",
        "peft",
        "trl",
        "bitsandbytes",
        "liger-kernel",
        "flash-linear-attention",
        "unsloth",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    drawn = lengths()
    return {
        "date": date.today().isoformat(), "card": torch.cuda.get_device_name(0), "python": platform.python_version(),
        "versions": versions, "model": f"{model}, random weights", "rows": ROWS, "longest": LONGEST,
        "mean_length": round(sum(drawn) / len(drawn), 1),
    }  # fmt: skip


def table(results: list[dict[str, Any]], limit: float) -> str:
    """The ways with their ratios."""
    by_way = {one["way"]: one for one in results if "tokens_per_second" in one}
    guide = by_way.get("guide-1x16")
    lines = [
        f"{'way':20} {'tokens/s':>9} {'peak GiB':>9} {'x guide':>8} {'x Unsloth':>10} {'its GiB x':>10} {'of limit':>9}"
    ]
    for way, one in by_way.items():
        batch = "8x1" if "8x1" in way else "2x4"
        peer = by_way.get(f"unsloth-{batch}" + "-16" * way.endswith("-16"))
        speed, peak = one["tokens_per_second"], one["peak_gib"]
        lines.append(
            f"{way:20} {speed:9,.0f} {peak:9.2f} "
            + (f"{speed / guide['tokens_per_second']:8.1f} " if guide else f"{'':8} ")
            + (f"{speed / peer['tokens_per_second']:10.2f} {peak / peer['peak_gib']:10.2f} " if peer else f"{'':21} ")
            + f"{speed / limit:9.0%}"
        )
    return "\n".join(lines)


def start(way: str, folder: Path, steps: int, profile: bool) -> subprocess.Popen[str]:
    """A process that loads one way, in a folder of its own (Unsloth writes into the current one), and waits."""
    few = max(2, steps // 2) if way.startswith(("guide", "padded")) else steps
    words = [sys.executable, str(Path(__file__).resolve()), str(folder.resolve()), "--one", way, "--steps", str(few)]
    place = tempfile.mkdtemp(prefix=f"{way}-")
    return subprocess.Popen(
        words + ["--profile"] * profile, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def write(out: Path | None, found: dict[str, Any]) -> None:
    """Keep what is known so far: a lent machine may go at any time."""
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")


def until_ready(process: subprocess.Popen[str]) -> str:
    """Wait until a way is loaded (or has failed); what it said."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.strip() == "READY":
            break
    return said


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", default=MODEL, help="The course model whose shape it is.")
@click.option("--ways", multiple=True, type=click.Choice(list(WAYS)), help="Default: all of them.")
@click.option("--steps", default=6, help="Timed steps of each way, after the warm-up.")
@click.option("--profile", is_flag=True, help="Also where the card's time goes.")
@click.option("--one", type=click.Choice(list(WAYS)), help="Measure in this process and print one line of JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the results are written, as JSON.")
def main(
    folder: Path, model: str, ways: tuple[str, ...], steps: int, profile: bool, one: str | None, out: Path | None
) -> None:
    """Measure ways of training and print the table."""
    if one:
        print("\nRESULT " + json.dumps(measure(one, folder, steps, profile)))
        return
    if not (folder / "config.json").exists():
        maker = Path(__file__).with_name("random_model.py")
        subprocess.run([sys.executable, str(maker), model, str(folder)], check=True)
    text_only(folder)  # before several processes want it
    tflops = measured_tflops()
    about = surroundings(model) | {"tflops": round(tflops, 1)}
    results: list[dict[str, Any]] = []
    ready = []
    for way in ways or WAYS:
        process = start(way, folder, steps, profile)
        said = until_ready(process)  # before the next begins: kernels are tuned by timing them
        ready.append((way, process, said))
    for way, process, before in ready:
        said = before + process.communicate("go\n")[0]
        line = next((line for line in said.splitlines() if line.startswith("RESULT ")), None)
        results.append(json.loads(line[7:]) if line else {"way": way, "error": said[-3000:]})
        print(json.dumps({key: value for key, value in results[-1].items() if key != "profile"}), flush=True)
        write(out, about | {"ways": results})
    limit = tflops * 1e12 / (6 * known_models()[model].params)
    print(f"\n{tflops:.0f} TFLOP/s measured; 6 FLOP per parameter and token: at most {limit:,.0f} tokens/s\n")
    print(table(results, limit))
    write(out, about | {"limit_tokens_per_second": round(limit), "ways": results})


if __name__ == "__main__":
    main()
