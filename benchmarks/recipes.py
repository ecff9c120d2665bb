"""Which recipe learns: the course's own choice, three widespread recipes and a grid, on the same rows of real data.

    python benchmarks/recipes.py MODEL OUT.jsonl FILE… [--grid] [--jobs 14]

MODEL is a folder with a real chat model; each FILE becomes train and held-out rows as in lesson 02. Every training is
on one GPU, in 4 bits except for `auto` with a model under a billion parameters, and is judged by the loss on the
answers' tokens of the same held-out rows. One line of JSON for each training, written as it ends. Without `--grid`:
the recipes one after the other, timed, the course's also on parts of the rows. `--grid` sweeps batch, learning rate,
epochs and the rest around it, `--jobs` side by side (their seconds are then no measure of speed). Unsloth is optional.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click

LONGEST = 2048
SHOWN = ("way", "bits", "rows", "batch", "learning_rate", "epochs", "steps", "seconds", "base", "loss", "best", "error")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OWN = ("auto", "auto-4bit", "course")  # what the course chooses; the same in 4 bits; a setting of the grid, in 4 bits
AUTOMATIC = ("auto", "auto-4bit")  # PROFILE=auto
COURSE = {"rank": 16, "alpha": 32, "scheduler": "cosine", "warmup": 0.05, "micro": 0, "packing": False}
# r / alpha / dropout, micro-batch x accumulation, rate, schedule, warm-up (steps or share), epochs, optimizer, decay
PEERS: dict[str, dict[str, Any]] = {
    "unsloth": {"rank": 16, "alpha": 16, "dropout": 0.0, "micro": 2, "batch": 8, "learning_rate": 2e-4, "epochs": 1,
                "scheduler": "linear", "warmup": 5, "optimizer": "adamw_8bit", "decay": 0.01},
    "llama-factory": {"rank": 8, "alpha": 16, "dropout": 0.0, "micro": 1, "batch": 8, "learning_rate": 1e-4,
                      "epochs": 3, "scheduler": "cosine", "warmup": 0.1, "optimizer": "adamw_torch", "decay": 0.0},
    "self-llm": {"rank": 8, "alpha": 32, "dropout": 0.1, "micro": 4, "batch": 16, "learning_rate": 1e-4, "epochs": 3,
                 "scheduler": "linear", "warmup": 0, "optimizer": "adamw_torch", "decay": 0.0},
}  # fmt: skip


def grid(auto: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings around the course's own."""
    for size, rate, epochs in product((0.5, 1, 2), (0.5, 1, 2), (2, 3, 5)):
        yield {
            "batch": max(1, int(auto["batch"] * size)), "epochs": epochs,
            "learning_rate": float(f"{auto['learning_rate'] * rate:.2g}"),
        }  # fmt: skip
    for more in ({"scheduler": "linear"}, {"scheduler": "constant_with_warmup"}, {"rank": 64, "alpha": 128}):
        yield auto | more


def automatic(rows: Rows, model_folder: Path) -> dict[str, Any]:
    """What `PROFILE=auto` chooses on this GPU for these rows."""
    from nbutils import models, profiles
    from nbutils.plan.recipe import apply, choose, rows_per_step

    shape, profile = models.find_shape(str(model_folder)), profiles.load("hopper_141gb")
    found = choose(profile, profiles.Rows.of(rows.train.lengths), shape)
    return {
        "bits": 16 if found["method"].value == "lora" else 4,
        "batch": rows_per_step(apply(profile, found).sft), "epochs": found["sft.num_train_epochs"].value,
        "learning_rate": found["sft.learning_rate"].value, "packing": found["sft.packing"].value,
        "save_steps": found["sft.save_steps"].value, "validation_rows": found["course.validation_rows"].value,
    }  # fmt: skip


class Rows:
    """One file as lesson 02 makes it, rendered for this model: what is trained, and what is held out."""

    def __init__(self, file: Path, limit: int, tokenizer: Any) -> None:
        from nbutils import chat, data

        with tempfile.TemporaryDirectory() as folder:
            data.prepare(str(file), Path(folder), rows=limit)
            train, held_back = data.load(Path(folder))
        self.train = chat.filter_by_length(tokenizer, train, LONGEST)
        self.held_back_rows = held_back
        self.held_back = chat.filter_by_length(tokenizer, held_back, LONGEST).examples

    def about(self) -> dict[str, Any]:
        lengths = [len(one.ids) for one in self.train.examples]
        return {
            "rows": len(lengths), "held_back": len(self.held_back),
            "mean_length": round(sum(lengths) / len(lengths), 1),
            "longest": max(lengths), "trained_tokens": sum(sum(one.trained) for one in self.train.examples),
        }  # fmt: skip


def held_out_loss(model: Any, examples: list[Any]) -> float:
    """Nats for each token of the answers."""
    import torch

    was_training, total, count = model.training, 0.0, 0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(examples), 8):
            some = examples[start : start + 8]
            wide = max(len(one.ids) for one in some)
            ids = torch.tensor([[*one.ids, *[0] * (wide - len(one.ids))] for one in some], device=model.device)
            mask = torch.tensor([[1] * len(one.ids) + [0] * (wide - len(one.ids)) for one in some], device=model.device)
            wanted = torch.tensor(
                [[*one.trained, *[0] * (wide - len(one.ids))] for one in some], device=model.device
            ).bool()
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            total += float(nats[wanted[:, 1:].flatten()].sum())
            count += int(wanted[:, 1:].sum())
    model.train(was_training)
    return total / count


def watch(model: Any, rows: Rows, judged: bool) -> Any:
    """A callback with the curve: step, seconds of training without the looking, held-out loss."""
    import torch
    from transformers import TrainerCallback

    class Curve(TrainerCallback):
        def __init__(self) -> None:
            self.points: list[tuple[int, float, float]] = []
            self.looked = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, last = state.global_step, state.max_steps
            if step < last and (not judged or (step > 12 and step % max(last // 12, 1))):
                return
            torch.cuda.synchronize()
            now = time.perf_counter()
            loss = held_out_loss(model, rows.held_back) if judged else float("nan")
            self.points.append((step, round(now - self.began - self.looked, 2), round(loss, 4)))
            self.looked += time.perf_counter() - now

    return Curve()


def quantized(bits: int = 4) -> Any:
    """The base as all three recipes have it, and the course where the model is not a small one."""
    from transformers import BitsAndBytesConfig

    if bits == 16:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16"
    )


def settings(job: dict[str, Any], folder: str, micro: int) -> dict[str, Any]:
    """The trainer settings of a job."""
    return {
        "output_dir": folder, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(job["batch"] // micro, 1), "num_train_epochs": job["epochs"],
        "learning_rate": job["learning_rate"], "lr_scheduler_type": job["scheduler"], "warmup_steps": job["warmup"],
        "optim": job.get("optimizer", "paged_adamw_8bit"), "weight_decay": job.get("decay", 0.0), "max_grad_norm": 1.0,
        "bf16": True, "seed": job.get("seed", 0), "logging_steps": 10, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "max_length": LONGEST, "packing": job.get("packing", False),
    }  # fmt: skip


def trainer_for(job: dict[str, Any], model_folder: Path, rows: Rows, folder: str) -> Any:
    """A trainer as the course, or as TRL without it, sets it up in 4 bits."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback
    from trl import SFTConfig, SFTTrainer

    from nbutils import chat, training
    from nbutils.training import model as attention

    ours = job["way"] in OWN
    how = {"attn_implementation": attention.attention("varlen")} if ours else {}
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, quantization_config=quantized(job.get("bits", 4)), dtype="bfloat16", device_map={"": 0}, **how
    )
    lora = LoraConfig(
        r=job["rank"], lora_alpha=job["alpha"], lora_dropout=job.get("dropout", 0.0), target_modules=LINEAR,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    args = settings(job, folder, job["micro"] or job["batch"])
    if ours:
        args |= {"padding_free": True, "gradient_checkpointing": False, "use_liger_kernel": True}
        args |= {} if job["packing"] else {"max_length": None}
    held_back = None
    if job["way"] in AUTOMATIC:  # it keeps its best step
        held_back = chat.validation_dataset(rows.train, rows.held_back_rows, job["validation_rows"])
        args |= {
            "eval_strategy": "steps",
            "eval_steps": job["save_steps"],
            "eval_on_start": True,
            "eval_packing": False,
        }
        args |= {"save_strategy": "steps", "save_steps": job["save_steps"], "load_best_model_at_end": True}
        args |= {"metric_for_best_model": "eval_loss", "save_total_limit": 2}
    else:
        args |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**args), train_dataset=chat.training_dataset(rows.train), eval_dataset=held_back,
        processing_class=AutoTokenizer.from_pretrained(model_folder), peft_config=lora,
    )  # fmt: skip
    if ours:
        training.patch_lora_kernels(trainer)
    if held_back is not None:
        training.use_token_mean(trainer)
        trainer.add_callback(EarlyStoppingCallback(3))
    return trainer


def unsloth_trainer(job: dict[str, Any], model_folder: Path, rows: Rows, folder: str) -> Any:
    """Unsloth as its own notebooks set it up."""
    from unsloth import FastLanguageModel  # isort: skip  (it must come before trl)
    from trl import SFTConfig, SFTTrainer

    from nbutils import chat

    model, tokenizer = FastLanguageModel.from_pretrained(str(model_folder), max_seq_length=LONGEST, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        model, r=job["rank"], lora_alpha=job["alpha"], lora_dropout=0, bias="none", target_modules=LINEAR,
        use_gradient_checkpointing="unsloth", random_state=0,
    )  # fmt: skip
    args = SFTConfig(**settings(job, folder, job["micro"]))
    return SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=chat.training_dataset(rows.train), args=args
    )


def train(job: dict[str, Any], model_folder: Path, rows: Rows, folder: str) -> dict[str, Any]:
    """One training and what it reached; Unsloth's patched model is judged afterwards, as a plain one."""
    import torch

    from nbutils.training.validation import load_best

    plain = job["way"] != "unsloth"
    trainer = (trainer_for if plain else unsloth_trainer)(job, model_folder, rows, folder)
    base = held_out_loss(trainer.model, rows.held_back) if plain else None
    curve = watch(trainer.model, rows, judged=plain)
    trainer.add_callback(curve)
    trainer.train()
    last, seconds, loss = curve.points[-1]
    if job["way"] in AUTOMATIC:
        load_best(trainer)
        loss = held_out_loss(trainer.model, rows.held_back)
    if not plain:
        trainer.save_model(folder)
    best = min(curve.points, key=lambda point: point[2])
    return job | {
        "steps": last, "seconds": seconds, "base": base and round(base, 4), "loss": round(loss, 4), "best": best[2],
        "best_step": best[0], "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "curve": curve.points,
    }  # fmt: skip


def judge(adapter: str, model_folder: Path, rows: Rows) -> float:
    """The loss of a saved adapter on the 4-bit base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder, quantization_config=quantized(), dtype="bfloat16", device_map={"": 0}
    )
    return held_out_loss(PeftModel.from_pretrained(model, adapter), rows.held_back)


def alone(job: dict[str, Any], model_folder: Path, rows: Rows, folder: str) -> dict[str, Any]:
    """A training in a process of its own: Unsloth changes the libraries of the process it is imported in."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(train, (job, model_folder, rows, folder))
    loss = round(judge(folder, model_folder, rows), 4)
    return found | {"loss": loss, "best": loss}


def work(jobs: Any, results: Any, model_folder: Path) -> None:
    """Take jobs until there are none."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ready: dict[Any, Any] = {}
    while (job := jobs.get()) is not None:
        key = (job["file"], job["limit"])
        try:
            if key not in ready:
                ready[key] = Rows(Path(job["file"]), job["limit"], tokenizer)
            if job["way"] in OWN:
                bits = {} if job["way"] == "auto" else {"bits": 4}
                job = COURSE | automatic(ready[key], model_folder) | bits | job
            with tempfile.TemporaryDirectory() as folder:
                run = alone if job["way"] == "unsloth" else train
                results.put(run(job, model_folder, ready[key], folder) | ready[key].about())
        except Exception as problem:
            results.put(job | {"error": f"{type(problem).__name__}: {problem}"[:600]})
        torch.cuda.empty_cache()


def planned(files: list[str], sweep: bool, model_folder: Path, ways: list[str], micro: int) -> list[dict[str, Any]]:
    """Every training: the recipes on whole files, the course's on parts too; or the grid around the course's."""
    parts = [(file, limit) for file in files for limit in (0, 50, 200) if not (limit and "identity" in file)]
    if not sweep:
        peers = {way: peer | ({"micro": micro} if micro else {}) for way, peer in PEERS.items()}
        recipes = [{"way": way, "file": file, "limit": 0} | peers.get(way, {}) for file in files for way in ways]
        own = [{"way": way, "file": file, "limit": part} for file, part in parts for way in ways if part and way in OWN]
        return recipes + own
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model_folder), []
    for file, limit in parts:
        auto = automatic(Rows(Path(file), limit, tokenizer), model_folder)
        found += [{"way": "course", "file": file, "limit": limit} | one for one in grid(auto)]
    random.Random(0).shuffle(found)  # where time runs out, something of everything is there
    return found


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True)
@click.option("--grid", "sweep", is_flag=True)
@click.option("--jobs", default=1, show_default=True)
@click.option("--ways", default="auto,auto-4bit,unsloth,self-llm,llama-factory", show_default=True)
@click.option("--micro", default=0, help="Cut the other recipes' steps so: the same loss, no longer their own time.")
@click.option("--minutes", default=60.0, help="Stop after so long, with what is there.", show_default=True)
def main(
    model: Path, out: Path, files: tuple[str, ...], sweep: bool, jobs: int, ways: str, micro: int, minutes: float
) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    end = time.monotonic() + minutes * 60
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    wanted = planned(list(files), sweep, model, ways.split(","), micro)
    for job in [*wanted, *[None] * jobs]:
        todo.put(job)
    workers = [context.Process(target=work, args=(todo, done, model)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    with open(out, "a", encoding="utf-8") as file:
        for number in range(len(wanted)):
            try:
                row = done.get(timeout=max(end - time.monotonic(), 0.1))
            except Exception:
                print(f"time is up after {number} of {len(wanted)}")
                break
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(number + 1, {key: row[key] for key in SHOWN if key in row}, flush=True)
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    main()
