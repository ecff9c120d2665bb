"""Pre-trains the tiny hybrid base `data_samples/tiny_hybrid` by the way of lesson 07, and saves it as Qwen3.5 is.

python .ci/tiny_hybrid.py FOLDER [--steps 3500] [--batch 256] [--seconds 180] [--text texts.jsonl.gz]

The model is a small Qwen3.5: six Gated DeltaNet layers and two of softmax attention, a vision part that stays random,
the tokens of the tiny base. A row is 256 tokens of running text, nothing is packed. On a GPU flash-linear-attention
computes the delta rule if it is installed; its gradients are compared with those of transformers' own code first,
because with some versions of Triton they are wrong on Hopper. `--reference` takes transformers' code in any case.

With `--taught` the model begins with what fits of the tiny base (embeddings, norms, the busiest part of each MLP, the
maps of softmax attention), and the tiny base is its teacher: its probabilities and its states after each layer are what
is learned. So a CPU does in an hour what takes a GPU three minutes from scratch.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import inspect
import itertools
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import corpus
import numpy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Tokenizer,
    set_seed,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from nbutils import files

SEED = 0
TEXT_SEED = 1  # as for the tiny base
LENGTH = 256
HELD_OUT = 64  # rows
WARMUP_STEPS = 100
MOST_SKIPPED = 100  # steps without an update
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]  # after the tiny base's own
TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,  # every fourth has softmax attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # as Qwen3.5's; with 64 some versions of Triton compile a wrong kernel for Hopper
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],  # of the 8 frequencies of a head: time, height, width of a picture
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 16,
}
PICTURES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
PROCESSORS: dict[str, dict[str, Any]] = {  # a picture is at most 64 tokens, so that it fits into a prompt
    "preprocessor_config.json": PICTURES
    | {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 4096, "longest_edge": 65536}},
    "video_preprocessor_config.json": PICTURES
    | {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 131072}},
}
VOCAB = 3136  # the tokens, and room up to a multiple of 64, as in Qwen's models
TAUGHT_BY = {0: 0, 1: 1, 3: 2, 4: 3, 5: 4, 7: 5}  # layers, and those of the tiny base that teach them
OF_TEXT = 0.3  # share of the text's own loss where there is a teacher
MICRO_BATCH = {"cuda": 256, "cpu": 4}  # rows at a time
SAME = 0.05  # largest distance of gradients, as a share of their size: 16 bits stay below, wrong kernels do not
PACKAGES = ("torch", "transformers", "safetensors", "triton", "flash-linear-attention", "tilelang")


def main() -> None:
    given = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    tokenizer = make_tokenizer()
    train, held_out = make_rows(tokenizer, given.text, given.texts)

    set_seed(SEED)
    config = make_config(tokenizer)
    whole = Qwen3_5ForConditionalGeneration(config)
    text = Qwen3_5ForCausalLM(config.text_config)  # the same modules, without the vision part
    text.model = whole.model.language_model
    text.lm_head = whole.lm_head
    teacher = None
    if given.taught:
        teacher = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32").eval()
        take_weights(text, teacher, held_out[:16].long())
        teacher.to(device)
    whole.to(device)
    print(f"{text.num_parameters():,} parameters of the text model on {device}", flush=True)

    kernels = choose_kernels(text, train, device, given)
    seconds, losses = pretrain(text, teacher, train, given, device)
    save(whole, tokenizer, given.folder)
    held_out_loss = check(given.folder, held_out, device)
    facts = {
        "settings": {
            "STEPS": losses[-1][0] + 1,
            "BATCH": given.batch,
            "LENGTH": LENGTH,
            "TEXTS": given.texts,
            "SEED": SEED,
            "kernels": kernels,
            "teacher": "tiny_base" if given.taught else None,
        },
        "date": f"{date.today()}",
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "versions": versions(),
        "seconds": round(seconds, 1),
        "held_out_loss": round(held_out_loss, 4),
        "losses": losses,
    }
    if given.note:
        facts = {"note": given.note, **facts}
    (given.folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in given.folder.iterdir()) / 1e6
    print(f"{given.folder}: {size:.1f} MB, loss on held-out rows {held_out_loss:.4f}, {seconds:.0f} s of training")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch", type=int, default=256, help="rows of a step")
    parser.add_argument("--micro-batch", type=int, default=0, help="rows at a time; 0: 256 on a GPU, 4 on a CPU")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="the rate falls to 0 by then")
    parser.add_argument("--texts", type=int, default=600_000, help="how many texts are generated")
    parser.add_argument("--text", type=Path, help="texts that .ci/corpus.py wrote, instead of generating them")
    parser.add_argument("--reference", action="store_true", help="transformers' own code for the delta rule")
    parser.add_argument("--any-triton", action="store_true", help="try fla's backward pass with every Triton")
    parser.add_argument("--taught", action="store_true", help="begin with weights of tiny_base, and learn from it")
    parser.add_argument("--note", default="", help="a line for training.json")
    return parser.parse_args()


def make_tokenizer() -> Any:
    """The tokenizer of the tiny base with the tokens of a vision model behind its own."""
    base = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    learned = json.loads(base.backend_tokenizer.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", *VISION_TOKENS],
        chat_template=base.chat_template,
        model_max_length=TEXT["max_position_embeddings"],
    )
    assert tokenizer.get_vocab().items() >= base.get_vocab().items()
    return tokenizer


def make_config(tokenizer: Any) -> Qwen3_5Config:
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen3_5Config(
        text_config=TEXT | ends | {"vocab_size": VOCAB},
        vision_config=VISION,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )


def texts(file: Path | None, count: int) -> Iterator[str]:
    """The text of lesson 07, from a file or generated: the same text for the same count."""
    if file is None:
        yield from corpus.pretraining_texts(count, TEXT_SEED)
        return
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, count):
            yield json.loads(line)["text"]


def make_rows(tokenizer: Any, file: Path | None, count: int) -> tuple[Tensor, Tensor]:
    """The text laid end to end and cut into rows: those to train on, and those held out."""
    started = time.monotonic()
    parts = []
    source = texts(file, count)
    while batch := list(itertools.islice(source, 10_000)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            parts.append(numpy.array([*ids, tokenizer.pad_token_id], numpy.int16))
    tokens = numpy.concatenate(parts)
    whole_rows = len(tokens) // LENGTH
    rows = torch.from_numpy(tokens[: whole_rows * LENGTH].reshape(whole_rows, LENGTH))
    numbers = torch.arange(HELD_OUT) * whole_rows // HELD_OUT  # from everywhere in the text
    is_held_out = torch.zeros(whole_rows, dtype=torch.bool)
    is_held_out[numbers] = True
    took = time.monotonic() - started
    print(f"{len(tokens):,} tokens, {whole_rows:,} rows of {LENGTH}, {took:.0f} s", flush=True)
    return rows[~is_held_out], rows[is_held_out]


@torch.no_grad()
def take_weights(text: Any, teacher: Any, rows: Tensor) -> None:
    """Begin with what fits of the teacher; a layer that has no teacher's begins as one that changes nothing."""
    busy, sizes = activity(teacher, rows)
    known = teacher.get_input_embeddings().weight
    embeddings = text.get_input_embeddings().weight
    embeddings[: len(known)] = known
    embeddings[len(known) :] = known.mean(dim=0)
    text.model.norm.weight.copy_(teacher.model.norm.weight - 1)  # Qwen3.5 adds 1 to the weights of its norms
    for number, layer in enumerate(text.model.layers):
        if number not in TAUGHT_BY:
            layer.mlp.down_proj.weight.zero_()
            layer.linear_attn.out_proj.weight.zero_()
            continue
        source = teacher.model.layers[TAUGHT_BY[number]]
        layer.input_layernorm.weight.copy_(source.input_layernorm.weight - 1)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight - 1)
        kept = busy[TAUGHT_BY[number]].topk(TEXT["intermediate_size"]).indices.sort().values
        layer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight[kept])
        layer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight[kept])
        layer.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight[:, kept])
        if hasattr(layer, "self_attn"):
            take_attention(layer.self_attn, source.self_attn, *sizes[TAUGHT_BY[number]])


def take_attention(attention: Any, source: Any, query_size: Tensor, key_size: Tensor) -> None:
    """The maps of softmax attention; the gate, which the teacher has not, is half open."""
    heads, size, width = TEXT["num_attention_heads"], TEXT["head_dim"], TEXT["hidden_size"]
    queries_and_gates = attention.q_proj.weight.view(heads, 2, size, width)
    queries_and_gates[:, 0] = source.q_proj.weight.view(heads, size, width)
    queries_and_gates[:, 1] = 0
    attention.k_proj.weight.copy_(source.k_proj.weight)
    attention.v_proj.weight.copy_(source.v_proj.weight)
    attention.o_proj.weight.copy_(2 * source.o_proj.weight)
    attention.q_norm.weight.fill_(query_size - 1)
    attention.k_norm.weight.fill_(key_size - 1)


def activity(teacher: Any, rows: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """How much each part of an MLP adds on these rows, and the size of queries and keys, layer by layer."""
    seen: dict[str, Tensor] = {}

    def watch(name: str, module: Any) -> Any:
        def note(_: Any, inputs: Any, out: Tensor) -> None:
            seen[name] = inputs[0] if name.endswith("down") else out

        return module.register_forward_hook(note)

    hooks = []
    for number, layer in enumerate(teacher.model.layers):
        hooks.append(watch(f"{number} down", layer.mlp.down_proj))
        hooks.append(watch(f"{number} query", layer.self_attn.q_proj))
        hooks.append(watch(f"{number} key", layer.self_attn.k_proj))
    teacher(input_ids=rows)
    for hook in hooks:
        hook.remove()
    busy = []
    sizes = []
    for number, layer in enumerate(teacher.model.layers):
        busy.append(seen[f"{number} down"].abs().mean(dim=(0, 1)) * layer.mlp.down_proj.weight.norm(dim=0))
        query, key = (
            seen[f"{number} {name}"].unflatten(-1, (-1, TEXT["head_dim"])).square().mean(dim=-1).sqrt().mean()
            for name in ("query", "key")
        )
        sizes.append((query, key))
    return busy, sizes


def autocast(device: str) -> Any:
    """16 bits where the matrix products are faster with them."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda" or torch.cpu._is_amx_tile_supported())


def loss_of(model: Any, rows: Tensor, device: str) -> Tensor:
    ids = rows.to(device, torch.int64)
    with autocast(device):
        logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def taught_loss(model: Any, teacher: Any, rows: Tensor, device: str, closeness: float) -> tuple[Tensor, Tensor]:
    """How far probabilities and states are from the teacher's, with the loss of the text; and that loss alone."""
    ids = rows.to(device, torch.int64)
    with autocast(device):
        with torch.no_grad():
            shown = teacher(input_ids=ids, output_hidden_states=True, use_cache=False)
        made = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    expected = shown.logits.float().log_softmax(dim=-1).flatten(0, 1)
    logits = made.logits.float()
    found = logits.log_softmax(dim=-1)[..., : expected.shape[-1]].flatten(0, 1)
    of_text = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss = kl_div(found, expected, log_target=True, reduction="batchmean") + OF_TEXT * of_text
    for number, source in TAUGHT_BY.items():
        if number + 1 < TEXT["num_hidden_layers"]:  # the last states are those after the norm
            states = shown.hidden_states[source + 1].float()
            distance = (made.hidden_states[number + 1].float() - states).square().mean()
            loss = loss + closeness * distance / states.var()
    return loss, of_text.detach()


def gradients(model: Any, rows: Tensor, device: str) -> Tensor:
    model.zero_grad()
    loss_of(model, rows, device).backward()
    found = [weight.grad.flatten().float() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def choose_kernels(model: Any, rows: Tensor, device: str, given: argparse.Namespace) -> str:
    """flash-linear-attention where it is installed and right, transformers' own code elsewhere."""
    fast = modeling_qwen3_5.torch_chunk_gated_delta_rule
    reference = inspect.unwrap(fast)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = reference
    if given.reference or device == "cpu" or importlib.util.find_spec("fla") is None:
        print("delta rule: transformers' own code", flush=True)
        return "transformers"
    if given.any_triton:
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    expected = gradients(model, rows[:8], device)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = fast
    print("delta rule: flash-linear-attention; its kernels are compiled and tuned, which takes minutes", flush=True)
    try:
        found = gradients(model, rows[:8], device)
    except Exception as problem:  # of several kinds, as the version of fla has it
        sys.exit(
            f"flash-linear-attention refuses: {problem}\n"
            "To do: install tilelang or Triton 3.7.1, or try --any-triton, which compares its gradients, or take "
            "--reference."
        )
    distance = ((found - expected).norm() / expected.norm()).item()
    print(f"gradients: {distance:.4f} of their size from those of transformers' own code", flush=True)
    if not distance < SAME:
        sys.exit("flash-linear-attention computes wrong gradients here. To do: take --reference, or another Triton.")
    return "flash-linear-attention"


def pretrain(model: Any, teacher: Any, rows: Tensor, given: argparse.Namespace, device: str) -> tuple[float, list[Any]]:
    """Train as lesson 07 does; the seconds it took, and the loss of some steps."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.learning_rate, betas=(0.9, 0.95), fused=True)
    size = min(given.micro_batch or MICRO_BATCH[device], given.batch)
    rows = rows.to(device)
    numbers = shuffled(len(rows), given.batch)
    model.train()
    loss_of(model, rows[:size], device).backward()  # what is compiled and tuned now is not timed
    model.zero_grad()

    warmup = min(WARMUP_STEPS, max(1, given.steps // 10))
    every = max(1, given.steps // 100)
    losses: list[Any] = []
    skipped = 0
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # what ends a machine's time; what was learned so far is saved
        signal.signal(number, lambda received, frame: stops.append(received))
    started = time.monotonic()
    for step in range(given.steps):
        seconds = time.monotonic() - started
        progress = max(step / given.steps, seconds / given.seconds)
        is_last = step == given.steps - 1 or progress >= 1 or bool(stops)
        rate = given.learning_rate * min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * min(progress, 1))) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=device)
        batch = rows[next(numbers)]
        for part in batch.split(size):
            if teacher is None:
                part_loss = loss_of(model, part, device)
                of_text = part_loss.detach()
            else:
                part_loss, of_text = taught_loss(model, teacher, part, device, closeness=max(0.0, 1 - progress))
            share = len(part) / len(batch)
            (share * part_loss).backward()
            loss += share * of_text
        size_of_gradients = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if size_of_gradients.isfinite():  # now and then they are not, in the 16 bits of some CPUs
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
        if step % every == 0 or is_last:
            losses.append([step, round(loss.item(), 4)])
            print(f"step {step:5} of {given.steps}: loss {losses[-1][1]:.4f}, {seconds:.0f} s", flush=True)
        if skipped > MOST_SKIPPED:
            sys.exit("The gradients are no numbers any more. To do: a lower --learning-rate.")
        if is_last:
            break
    return time.monotonic() - started, losses


def shuffled(count: int, batch: int) -> Iterator[Tensor]:
    """Numbers of rows, batch by batch, every row once before any comes again."""
    generator = torch.Generator().manual_seed(SEED)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:batch]
        left = left[batch:]


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Weights in bfloat16, tokenizer, and the processor files of a vision model."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, processor in PROCESSORS.items():
        (folder / name).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")


def check(folder: Path, held_out: Tensor, device: str) -> float:
    """The loss on held-out rows of what was saved, loaded as the lessons load it; every weight must be found."""
    _, report = Qwen3_5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not any(report.values()), report
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == make_tokenizer().get_vocab()
    model.eval().to(device)
    with torch.no_grad():
        losses = [loss_of(model, part, device).item() for part in held_out.split(8)]
    return sum(losses) / len(losses)


def versions() -> dict[str, str]:
    """The version of every package that matters and is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
