"""training, attention, tracking: PEFT's numbers, packed rows kept apart, runs that resume and survive an OOM."""

import copy
import dataclasses
import errno
import fcntl
import gc
import json
import logging
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import wandb
from datasets import Dataset, concatenate_datasets
from filelock import FileLock, Timeout
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import ROOT, refused, wait_for
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    TrainerCallback,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nbutils import checkpoints, evaluation, files, hardware, lesson, platforms, processes, profiles, tracking
from nbutils.plan import gpus
from nbutils.training import model as lora
from nbutils.training import oom, practice, resume, run, validation
from nbutils.training.oom import StepSettings
from nbutils.training.sharding import full_weights

FINGERPRINT: dict[str, Any] = {"seed": 1}
RTX_4090 = hardware.GPU("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread for so small a model; the garbage collector, called often here, spares what is there already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def lesson_in(folder: Path, inputs: Path | None = None, earlier: tuple[Path, ...] = ()) -> Any:
    """The folders and the profile of a lesson; checkpoints may also lie in `inputs` and in `earlier` folders."""
    run = lesson.RunFolder(folder / "runs/demo")
    run.path.mkdir(parents=True, exist_ok=True)
    scratch = folder / "scratch"
    folders = platforms.Folders(folder, scratch, folder / "runs", inputs, earlier)
    local = platforms.Platform("local", "")
    resolved = profiles.resolve("tiny", gpu=None, platform=local, online=lambda: False)
    return SimpleNamespace(run=run, folders=folders, scratch=scratch / "demo", profile=resolved.profile)


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def adapted(base: nn.Module, **settings: Any) -> Any:
    """A model with an adapter whose B is not zero, which would hide mistakes in A."""
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    return model.train()


def random_model(family: str = "qwen2") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))


def one_step(model: Any, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of the adapter."""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.zero_grad()
    torch.manual_seed(2)  # for dropout
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 100, (2, 17), generator=generator).to(model.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            grads[name] = weight.grad.clone()
    return out.logits.detach(), grads


def tiny(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32", **options)


class ClampedMLP(Qwen2MLP):
    """An MLP that computes something the kernels do not know."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).clamp(-0.01, 0.01)


class EightBitLinear(nn.Linear):
    """A linear layer with a quantization the kernels do not know."""


def model_with(what: str) -> Any:
    """A model of another family, in 4 bits, or with something the kernels do not know."""
    if what == "4 bit":
        return tiny(quantization_config=FOUR_BIT, device_map={"": "cpu"})
    if what == "glm4":
        return random_model("glm4")
    base = random_model()
    mlps = [layer.mlp for layer in base.model.layers]
    if what == "unknown MLP":
        for mlp in mlps:
            mlp.__class__ = ClampedMLP
    elif what == "hook on the MLP":
        for mlp in mlps:
            mlp.register_forward_hook(lambda module, inputs, out: out * out)
    elif what == "unknown quantization":
        mlps[0].up_proj.__class__ = EightBitLinear
    return base


@pytest.mark.parametrize("first", ["answers", "validation"])
def test_four_bit_weights_stay_as_training_reads_them(first: str) -> None:
    model = model_with("4 bit")
    packs_for_answers = "support_avx512bf16_for_cpu"
    layers = [layer for layer in model.modules() if hasattr(layer, packs_for_answers)]
    assert layers
    for layer in layers:
        setattr(layer, packs_for_answers, True)  # as on a CPU where bitsandbytes packs them for answers
    before = [layer.weight.data.clone() for layer in layers]

    if first == "answers":
        tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
        question = {"role": "user", "content": "1"}
        answer = {"role": "assistant", "content": "2"}
        evaluation.answer_rows(model, tokenizer, [{"messages": [question, answer]}], max_new_tokens=2)
    else:
        lora.patch_model(adapted(model), fused=False)
        with torch.inference_mode():
            model.eval()(torch.tensor([[5, 6, 7]]))

    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight.data, weight)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("what", "layers"),
    [
        ("qwen2", 21),
        ("dropout", 21),
        ("glm4", 18),  # gate and up are one matrix
        ("unknown MLP", 21),
        ("unknown quantization", 20),
        ("hook on the MLP", 21),
        ("4 bit", 42),  # the bundled model has 6 layers, the others 3
    ],
)
def test_outputs_and_gradients_are_pefts(what: str, layers: int, recompute: bool) -> None:
    dropout = 0.3 if what == "dropout" else 0.0
    model = adapted(model_with(what), lora_dropout=dropout)
    logits, grads = one_step(model, recompute)

    assert lora.patch_model(model, fused=False) == layers
    assert lora.patch_model(model, fused=False) == layers, "patching twice is patching once"
    fused_logits, fused_grads = one_step(model, recompute)

    torch.testing.assert_close(fused_logits, logits, rtol=1e-4, atol=1e-4)
    assert grads
    assert set(fused_grads) == set(grads)
    for name, grad in grads.items():
        error = (fused_grads[name] - grad).abs().max()
        assert error < 1e-4 * grad.abs().max(), name


def distance(grads: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The Euclidean distance of all gradients from the true ones."""
    squares = [(grads[name] - truth[name]).square().sum().item() for name in truth]
    return math.sqrt(sum(squares))


def errors_in_16_bits(device: str, liger: bool, recompute: bool) -> dict[str, float]:
    """How far PEFT's gradients and ours are from those in 32 bits; the base in bfloat16, as in lesson 03."""
    base = random_model().to(torch.bfloat16).float()
    model = adapted(base).to(device)
    _, truth = one_step(model, recompute=False)
    for name, weight in model.named_parameters():
        if "lora" not in name:
            weight.data = weight.data.to(torch.bfloat16)

    with torch.autocast(device, torch.bfloat16):
        _, pefts = one_step(model, recompute)
        lora.patch_model(model, liger)
        _, ours = one_step(model, recompute)

    assert set(ours) == set(truth)
    assert {grad.dtype for grad in ours.values()} == {torch.float32}
    return {"ours": distance(ours, truth), "pefts": distance(pefts, truth)}


def test_16_bits_are_as_exact_as_pefts() -> None:
    errors = errors_in_16_bits("cpu", liger=False, recompute=False)
    assert 0 < errors["ours"] < 1.1 * errors["pefts"]


def test_a_recomputed_layer_skips_its_last_product(monkeypatch: Any) -> None:
    model = adapted(random_model())
    lora.patch_model(model, fused=False)
    product = lora._product
    in_backward_pass: list[bool] = []

    def noted_product(*operands: Any) -> Any:
        in_backward_pass.append(torch._C._current_graph_task_id() != -1)
        return product(*operands)

    monkeypatch.setattr(lora, "_product", noted_product)
    one_step(model, recompute=True)
    assert in_backward_pass.count(False) == 21  # 7 in each of 3 layers
    assert in_backward_pass.count(True) == 18  # computed again, but for the last one of each layer

    glm4_layer = type(random_model("glm4").model.layers[0])
    assert glm4_layer.__name__ not in lora.ENDS_WITH_MLP, "a norm follows its MLP"


def test_evaluation_other_adapters_and_variants_are_pefts_own() -> None:
    dora = adapted(random_model(), use_dora=True)
    assert lora.patch_model(dora, fused=False) == 0

    model = adapted(random_model())
    ids = torch.arange(2, 12)[None]

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad(), model.eval().disable_adapter():
            base = model.train()(input_ids=ids).logits
        tuned = model.eval()(input_ids=ids).logits.detach()
        return [base, tuned]

    before = outputs()
    lora.patch_model(model, fused=False)
    torch.testing.assert_close(outputs(), before)

    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    model.train()(input_ids=ids)
    merged = model.merge_and_unload()
    merged.train()(input_ids=ids)


def test_checksums_see_one_changed_weight_and_two_swapped_ones() -> None:
    layer = nn.Linear(40, 40)
    layer.bias.requires_grad_(False)
    before = lora.weight_checksums(layer)
    assert before == {"weight": (True, ANY), "bias": (False, ANY)}  # whether it is trained, and its checksum
    assert lora.weight_checksums(copy.deepcopy(layer)) == before

    with torch.no_grad():
        layer.weight[3, 3] += 1e-3
        layer.bias[[0, 1]] = layer.bias[[1, 0]]
    after = lora.weight_checksums(layer)
    assert after["weight"] != before["weight"]
    assert after["bias"] != before["bias"]


ROWS = [[5, 6, 7, 8, 9], [20, 21, 22], [30, 31, 32, 33], [40, 41]]


def test_the_base_is_counted_as_nf4() -> None:
    model = model_with("4 bit").requires_grad_(False)
    kinds = lora.weight_kinds(model)
    assert kinds["nf4, double"] == 7 * model.config.num_hidden_layers


def test_weights_that_are_trained_are_cast_to_float32_and_the_frozen_stay() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    frozen, trained = layers
    frozen.requires_grad_(False)
    lora.repair_precision(layers)
    assert lora.weight_kinds(layers) == {"bfloat16": 2}, "of the frozen weights"
    assert {weight.dtype for weight in trained.parameters()} == {torch.float32}


def test_a_base_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    lora.require_unquantized(str(files.TINY_MODEL))
    config = json.loads((files.TINY_MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(f"config.json of {tmp_path!s} says that"):
        lora.require_unquantized(str(tmp_path))


def base_copy(folder: Path, **changes: Any) -> str:
    """The bundled model with some values of its config.json replaced."""
    shutil.copytree(files.TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"num_hidden_layers": 8, "layer_types": None}, "model.layers.6.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 4, "layer_types": None}, "model.layers.4.input_layernorm.weight is stored, and has no"),
        ({"hidden_size": 128}, "model.embed_tokens.weight is stored as [3072, 256], not [3072, 128]"),
        ({"model_type": "llama"}, "model.layers.0.self_attn.k_proj.bias is stored, and has no place"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
    ids=["fewer layers", "more layers", "width", "family", "untied"],
)
def test_weights_of_another_model_than_the_config_describes_are_refused(
    changes: dict[str, Any], seen: str, tmp_path: Path
) -> None:
    folder = base_copy(tmp_path / "base", **changes)
    with refused(f"The safetensors files of {folder} do not fit its config.json: {seen}"):
        lora.require_own_weights(folder)


@pytest.mark.parametrize("kind", ["qwen3_vl", "of_tomorrow"])
def test_a_model_without_a_text_model_that_transformers_knows_is_refused(kind: str, tmp_path: Path) -> None:
    folder = base_copy(tmp_path / "base", model_type=kind)
    with refused(f"does not load {folder} as a text model", "configs/models.yaml"):
        lora.require_own_weights(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = base_copy(tmp_path / "base")
    (tmp_path / "base/model.safetensors").unlink()
    with refused(f"does not load {folder} as a text model", "model.safetensors"):
        lora.require_own_weights(folder)


@pytest.mark.parametrize("kept", ["half of it", "a pointer of git-lfs"])
def test_damaged_weights_are_refused(kept: str, tmp_path: Path) -> None:
    folder = base_copy(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    file.write_bytes(file.read_bytes()[:100_000] if kept == "half of it" else pointer)
    with refused(f"does not load {folder} as a text model", "download or copy it again"):
        lora.require_own_weights(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"num_attention_heads": 0},
        {"hidden_size": -64},
        {"hidden_act": "nope"},
        {"dtype": "float99"},
    ],
)
def test_sizes_without_sense_are_refused_with_what_is_wrong(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = base_copy(tmp_path / "base", **changes)
    with refused(f"does not load {folder} as a text model") as caught:
        lora.require_own_weights(folder)
    assert not caught.value.seen.endswith(":")


def test_a_whole_checkpoint_fits_its_config_also_one_that_sees(tmp_path: Path) -> None:
    lora.require_own_weights(base_copy(tmp_path / "tied"))
    text = hybrid_config(layers=4)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"out_hidden_size": 64}, tie_word_embeddings=True)
    model = Qwen3_5ForConditionalGeneration(config)
    folder = tmp_path / "sees"
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in weights)
    weights["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(2)  # as in Qwen3.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lora.require_own_weights(str(folder))

    del weights["model.language_model.layers.3.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with refused("model.layers.3.self_attn.q_proj.weight is missing"):
        lora.require_own_weights(str(folder))


def hybrid_config(layers: int) -> dict[str, Any]:
    """The text part of the config of a very small Qwen3.5."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 3072,
        "tie_word_embeddings": True,
    }


def packed_row(examples: list[list[int]]) -> dict[str, Any]:
    """Some examples as one row."""
    tokens = [*chain.from_iterable(examples)]
    lengths = [len(example) for example in examples]
    return {"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}


def packed(examples: list[list[int]]) -> dict[str, Any]:
    """Two packed rows, flattened by TRL's collator as the trainer's are."""
    middle = len(examples) // 2
    rows = [packed_row(examples[:middle]), packed_row(examples[middle:])]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = lora.with_boundaries(collate)(rows)
    batch.pop("labels")
    return batch


def varlen_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    """Torch's varlen kernel as its documentation describes it, in slow steps: it has no CPU form of its own."""
    queries_of_a_key = query.shape[1] // key.shape[1]  # heads
    looks_back = options["window_size"][0]  # negative: to the first token
    out = torch.zeros_like(query)
    for start, end in pairwise(edges.tolist()):
        queries = query[start:end].transpose(0, 1)
        keys = key[start:end].transpose(0, 1).repeat_interleave(queries_of_a_key, dim=0)
        values = value[start:end].transpose(0, 1).repeat_interleave(queries_of_a_key, dim=0)
        positions = torch.arange(end - start)
        distances = positions[:, None] - positions
        hidden = distances < 0
        if looks_back >= 0:
            hidden |= distances > looks_back
        scores = queries @ keys.transpose(1, 2) * options["scale"]
        attention = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[start:end] = (attention @ values).transpose(0, 1)
    return out


BOUNDARIES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@pytest.mark.parametrize(
    ("backend", "with_boundaries"), [("sdpa", True), ("eager", True), ("varlen", True), ("varlen", False)]
)
def test_packed_rows_have_the_logits_of_single_rows(
    backend: str, with_boundaries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_kernel)
    name = lora.attention(backend)
    model = tiny(attn_implementation=name).eval()
    assert model.config._attn_implementation == name

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        dropped = set() if with_boundaries else BOUNDARIES
        inputs = {key: batch[key] for key in batch.keys() - dropped}
        with torch.inference_mode():
            return model(**inputs, use_cache=False).logits[0]

    together = logits(packed(ROWS))
    single = [logits({"input_ids": torch.tensor([row])}) for row in ROWS]
    torch.testing.assert_close(together, torch.cat(single), rtol=1e-4, atol=1e-5)

    other_first = [50, 51, 52, 53, 54]
    changed = logits(packed([other_first, *ROWS[1:]]))
    differences = (together - changed).abs().amax(dim=-1)
    assert (differences[:5] > 1e-6).all()
    assert (differences[5:] <= 1e-6).all(), "no other row sees the first"


def test_padded_batches_use_torchs_ordinary_attention() -> None:
    varlen = tiny(attn_implementation=lora.attention("varlen")).eval()
    sdpa = tiny(attn_implementation="sdpa").eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (ids != 0).long()

    with torch.inference_mode():
        logits = varlen(input_ids=ids, attention_mask=mask).logits
        expected = sdpa(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])

    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(varlen.generate(ids, **options), sdpa.generate(ids, **options))


@pytest.mark.parametrize(
    "option",
    [{"dropout": 0.1}, {"s_aux": torch.zeros(4)}, {"softcap": 50.0}],
    ids=["dropout", "sinks", "softcap"],
)
def test_what_the_kernel_lacks_is_refused(option: dict[str, Any]) -> None:
    query = torch.zeros(1, 4, 3, 8)
    with refused("attention has dropout, sinks or softcap"):
        lora._attend(nn.Module(), query, query, query, None, **option)


TRACKERS = ("WANDB_MODE", "WANDB_SILENT", "WANDB_CONSOLE", "WANDB_API_KEY", "TENSORBOARD_LOGGING_DIR")


@pytest.fixture
def no_trackers(monkeypatch: Any) -> None:
    """No variable of a tracker is set, and what the code sets is undone afterwards."""
    for name in TRACKERS:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def report_to(scratch: Path, chosen: str | list[str] | None = None) -> list[str]:
    """The trackers of a profile that names these, or none."""
    sft: Any = SimpleNamespace()
    if chosen is not None:
        sft.report_to = chosen
    return tracking.report_to(sft, scratch)


@pytest.mark.usefixtures("no_trackers")
def test_a_profile_names_any_tracker_of_transformers(tmp_path: Path, capsys: Any) -> None:
    assert report_to(tmp_path, "none") == []
    assert report_to(tmp_path, []) == []
    assert capsys.readouterr().out == ""
    assert report_to(tmp_path, "tensorboard") == ["tensorboard"]
    assert wandb.run is None
    assert "wandb" not in capsys.readouterr().out
    assert report_to(tmp_path, ["tensorboard", "comet_ml"]) == ["tensorboard", "comet_ml"]


@pytest.mark.usefixtures("no_trackers")
@pytest.mark.slow
def test_wandb_is_offline_in_the_run_folder(tmp_path: Path, capsys: Any) -> None:
    assert report_to(tmp_path) == ["tensorboard", "wandb"]
    tracking.end_trackers(tmp_path / "kept")  # the logs are copied there
    assert list((tmp_path / "logs/wandb").glob("offline-*"))
    assert f"wandb sync {tmp_path}/kept/wandb/offline-*\n" in capsys.readouterr().out
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "logs/tensorboard")


@pytest.mark.slow
def test_a_wandb_that_cannot_start_its_program_costs_no_training(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from wandb.sdk.lib.service import service_process\n"
        "service_process.get_core_path = lambda: sys.argv[1]\n"
        "from nbutils import tracking\n"
        "print(tracking.report_to(SimpleNamespace(), Path(sys.argv[2])))\n"
    )
    (tmp_path / "wandb-core").write_text("a file that nobody may execute")
    command = [sys.executable, "-c", script, str(tmp_path / "wandb-core"), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}  # nor a running service
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "['tensorboard']" in done.stdout, done.stderr
    assert "W&B is not used" in done.stdout


GOOD_KEY = "k" * 40


WRONG_KEY = "w" * 40


@pytest.mark.usefixtures("no_trackers")
@pytest.mark.parametrize(
    ("mode", "key", "tried"),
    [
        ("offline", GOOD_KEY, ["offline"]),
        ("online", WRONG_KEY, ["online", "offline"]),
        ("online", GOOD_KEY, ["online"]),
    ],
)
def test_wandb_is_online_with_a_key_that_is_never_shown(
    mode: str, key: str, tried: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    modes: list[str] = []

    def init(mode: str, **_: object) -> None:
        modes.append(mode)
        key = os.environ["WANDB_API_KEY"]
        if mode == "online" and key == WRONG_KEY:
            raise RuntimeError(f"key {key} is not valid")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_API_KEY", key)
    report_to(tmp_path)
    assert modes == tried
    assert key not in capsys.readouterr().out


def test_tensorboard_is_opened_as_the_platform_allows(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    logs = tmp_path / "scratch/logs/tensorboard"
    panel = tmp_path / "root/tf-logs"
    assert "--logdir" in tracking.how_to_open(logs, "demo", "autodl"), "an image without the panel"

    panel.mkdir(parents=True)
    (panel / "demo").symlink_to(tmp_path / "earlier")
    for _ in range(2):  # the cell runs again
        assert "demo" in tracking.how_to_open(logs, "demo", "autodl")
        assert (panel / "demo").readlink() == logs

    (panel / "mine").mkdir()  # not a link: somebody's own folder
    assert "--logdir" in tracking.how_to_open(logs, "mine", "autodl")
    assert not (panel / "mine").is_symlink()

    assert f"%tensorboard --logdir {logs}" in tracking.how_to_open(logs, "demo", "colab")
    assert "ssh -L 6006:127.0.0.1:6006" in tracking.how_to_open(logs, "demo", "runpod")


def test_swanlab_is_used_where_it_is_chosen_and_never_costs_the_training(tmp_path: Path, monkeypatch: Any) -> None:
    modes: list[str] = []
    valid_keys: list[str] = []

    def init(mode: str, **_: object) -> None:
        modes.append(mode)
        if mode == "online" and GOOD_KEY not in valid_keys:
            raise RuntimeError(f"key {GOOD_KEY} is not valid")

    fake = SimpleNamespace(init=init, has_run=lambda: False)
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.setattr(tracking.install, "unsatisfied", lambda required: [])
    for name in ("API_KEY", "MODE", "INTERACTIVE", "TERMINAL_PROXY_TYPE"):
        monkeypatch.setenv(f"SWANLAB_{name}", "x")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(f"SWANLAB_{name}")

    def begin() -> str:
        """What is said of SwanLab as the training begins."""
        return tracking._begin_swanlab(tmp_path, "demo")

    assert begin() == "", "nobody chose it"
    assert modes == []

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert "offline" in begin()
    assert modes == ["offline"]
    monkeypatch.delenv("SWANLAB_MODE")

    modes.clear()
    monkeypatch.setenv("SWANLAB_API_KEY", GOOD_KEY)
    message = begin()
    assert modes == ["online", "offline"]
    assert "RuntimeError" in message
    assert GOOD_KEY not in message

    valid_keys.append(GOOD_KEY)
    assert begin() == "swanlab online"

    monkeypatch.setenv("SWANLAB_MODE", "disabled")
    assert begin() == ""
    monkeypatch.delenv("SWANLAB_MODE")
    monkeypatch.setattr(tracking.install, "unsatisfied", list)
    assert begin() == "", "it is not installed"


def keep_one(store: Path, step: int, content: str = "") -> None:
    folder = store.parent / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "x").write_text(content or str(step))
    store.mkdir(exist_ok=True)
    checkpoints.pack(folder, store, FINGERPRINT)
    shutil.rmtree(folder)


def resumed_at(lesson: Any, how: str = "auto") -> int:
    return checkpoints.step_of(resume.resume_point(lesson.run, lesson.folders, FINGERPRINT, how))


def test_the_newest_of_run_folder_and_earlier_folders_is_resumed(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path, earlier=(tmp_path / "old",))
    assert resumed_at(lesson) == 0

    keep_one(tmp_path / "old/demo/checkpoints", 5)
    assert resumed_at(lesson) == 5
    assert (lesson.run.checkpoints / "checkpoint-5.tar").exists()

    keep_one(lesson.run.checkpoints, 7)
    unproven = lesson.scratch / "trainer/checkpoint-99"  # left by a killed run
    unproven.mkdir(parents=True)
    assert resumed_at(lesson) == 7
    assert not unproven.exists()

    oom_changes = lesson.run.path / resume.OOM_FILE
    oom_changes.write_text("{}")
    assert resumed_at(lesson, "never") == 0
    assert resumed_at(lesson) == 0
    assert not oom_changes.exists()


def test_a_chosen_checkpoint_is_resumed_and_later_ones_are_set_aside(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path, inputs=tmp_path / "input")
    keep_one(tmp_path / "input/qlora/runs/demo/checkpoints", 60)
    for step in (6, 8, 10):
        keep_one(lesson.run.checkpoints, step)
    with refused("to one of: 6, 8, 10, 60;"):
        resumed_at(lesson, "7")
    with refused("The checkpoints in this run are of another training"):
        resume.resume_point(lesson.run, lesson.folders, {"other": 1}, "8")

    assert resumed_at(lesson, "8") == 8
    aside = {path.name for path in lesson.run.checkpoints.glob("*.aside")}
    assert aside == {"checkpoint-10.tar.aside", "checkpoint-10.json.aside"}

    shutil.rmtree(lesson.scratch)  # a new machine
    assert resumed_at(lesson) == 8
    keep_one(lesson.run.checkpoints, 10, "of the new branch")
    newest = resume.resume_point(lesson.run, lesson.folders, FINGERPRINT, "auto")
    assert newest is not None
    assert (newest / "x").read_text() == "of the new branch"


def test_a_run_continues_from_the_attached_read_only_output_of_the_last(tmp_path: Path) -> None:
    attached = tmp_path / "input/notebooks/me/qlora/runs/demo/checkpoints"
    keep_one(attached, 20)
    keep_one(attached, 40)
    (attached / "checkpoint-40.tar").write_bytes(b"incomplete")
    for path in (*attached.iterdir(), attached):
        path.chmod(0o555)
    lesson = lesson_in(tmp_path, inputs=tmp_path / "input")
    assert resumed_at(lesson) == 20
    assert (lesson.run.checkpoints / "checkpoint-20.json").exists()  # so that the chain can go on from here
    assert resumed_at(lesson, "never") == 0
    assert (attached / "checkpoint-20.tar").exists()


def test_a_second_training_in_the_same_run_is_refused(tmp_path: Path) -> None:
    lesson = lesson_in(tmp_path)
    assert resumed_at(lesson) == 0
    assert resumed_at(lesson) == 0, "the same kernel may start again"
    other = FileLock(lesson.scratch / "training.lock", timeout=0)
    with pytest.raises(Timeout):
        other.acquire()
    resume.unlock_run(lesson.scratch)
    with other, refused("training in demo right now."):
        resumed_at(lesson)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_disk_without_locks_is_warned_of_once_and_still_has_one_training(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    lesson = lesson_in(tmp_path)
    assert resumed_at(lesson) == 0
    assert resumed_at(lesson) == 0
    assert capsys.readouterr().out.count("[WARN]") == 1
    monkeypatch.setattr(resume, "_LOCKS", {})  # as another process sees it
    with refused("training in demo right now."):
        resumed_at(lesson)


def test_the_fingerprint_of_a_model_is_its_content_and_not_its_place(tmp_path: Path) -> None:
    def fingerprint(folder: str, changed_at: int = 0) -> dict[str, str]:
        """Of a model whose weights are all 0, but for one matrix of many that begins at this byte."""
        content = bytearray(3 * files.CHUNK)
        matrix = b"\x01" * (len(content) // 40)
        content[changed_at : changed_at + len(matrix)] = matrix
        place = tmp_path / folder / "m"
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text("{}")
        (place / "model.safetensors").write_bytes(content)
        return resume.model_fingerprint(str(place), str(place))

    here = fingerprint("here")
    assert here["name"] == "m"
    assert fingerprint("elsewhere") == here
    contents = set()
    for quarter in range(11):
        changed = fingerprint("here", changed_at=quarter * files.CHUNK // 4)
        contents.add(changed["content"])
    assert len(contents) == 11, "each matrix counts"


def test_the_fingerprint_of_the_bundled_model_stays_the_same() -> None:
    contracts = json.loads(Path(__file__).with_name("contracts.json").read_text())
    frozen = contracts["checkpoint"]["fingerprint"]["model"]
    assert resume.model_fingerprint(str(files.TINY_MODEL), "tiny") == frozen


@pytest.mark.parametrize(
    ("step", "max_steps", "left"),
    [
        (20, 20, 0),
        (20, 25, 5),
        (20, 10, 0),
        (7, -1, 2),  # 9 steps: 1.5 passes over 21 rows, 4 of them a step
    ],
)
def test_what_is_left_to_train_is_counted(tmp_path: Path, step: int, max_steps: int, left: int) -> None:
    state = {"global_step": step, "log_history": []}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    args = SimpleNamespace(
        max_steps=max_steps,
        num_train_epochs=1.5,
        train_batch_size=2,
        gradient_accumulation_steps=2,
        world_size=1,
    )
    trainer = SimpleNamespace(args=args, train_dataset=range(21))
    assert validation.steps_left(trainer, tmp_path, patience=3) == left


def test_checkpoints_that_do_not_fit_stop_the_training_before_it_begins(tmp_path: Path) -> None:
    huge = SimpleNamespace(num_parameters=lambda **_: 2**50)
    args = SimpleNamespace(output_dir=".", save_total_limit=1)
    trainer = SimpleNamespace(model=huge, args=args, eval_dataset=None)
    with refused("Not enough disk space in"):
        course_callback(tmp_path).prepare(trainer)


@dataclass
class Session:
    """A session in which a training begins."""

    platform: str
    hours_used: int  # of the session before
    max_hours: float
    step_seconds: int
    sync_seconds: int  # to copy a checkpoint


def train_until_end(session: Session, monkeypatch: Any) -> tuple[float, str]:
    """The hours after which the training ends, and why; it is given up after 100 hours."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setenv("NBUTILS_PLATFORM", session.platform)
    monkeypatch.setattr(platforms, "session_seconds", lambda platform: session.hours_used * 3600.0)
    monkeypatch.setattr(run, "monotonic", lambda: clock.seconds)
    budget = run.TimeBudget(session.max_hours, started=0.0)
    reason = ""
    while not reason and clock.seconds < 100 * 3600:
        clock.seconds += session.step_seconds
        reason = budget.step_ended(session.sync_seconds)
    return clock.seconds / 3600, reason


@pytest.mark.parametrize(
    ("session", "least", "most"),  # hours
    [
        pytest.param(
            Session("colab", hours_used=2, max_hours=0.0, step_seconds=30, sync_seconds=600),
            9.6,
            10 - 950 / 3600,
            id="of Colab's 12 hours, with time to save and sync",
        ),
        pytest.param(
            Session("colab", hours_used=11, max_hours=2.0, step_seconds=10, sync_seconds=0),
            1.7,
            2 - 300 / 3600,
            id="MAX_HOURS counts from the lesson",
        ),
        pytest.param(
            Session("local", hours_used=0, max_hours=1.0, step_seconds=300, sync_seconds=0),
            0.6,
            1 - 600 / 3600,
            id="a slow step ends it earlier",
        ),
    ],
)
def test_a_run_ends_in_time(session: Session, least: float, most: float, monkeypatch: Any) -> None:
    hours, reason = train_until_end(session, monkeypatch)
    assert least <= hours <= most
    assert "MAX_HOURS" in reason


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(
            Session("local", hours_used=0, max_hours=0.0, step_seconds=600, sync_seconds=0),
            id="nobody counts",
        ),
        pytest.param(
            Session("colab", hours_used=13, max_hours=0.0, step_seconds=600, sync_seconds=0),
            id="a machine older than its limit has another one",
        ),
    ],
)
def test_a_run_without_a_known_limit_goes_on(session: Session, monkeypatch: Any) -> None:
    hours, reason = train_until_end(session, monkeypatch)
    assert hours >= 100
    assert reason == ""


@pytest.mark.parametrize(("number", "again"), processes.AT_ONCE.items())
def test_a_signal_saves_and_ends_a_training_and_a_second_one_acts_at_once(
    number: int, again: Any, tmp_path: Path
) -> None:
    before = signal.signal(number, signal.default_int_handler)  # SIGINT may be ignored here
    callback = course_callback(tmp_path)
    state = SimpleNamespace(global_step=3, max_steps=9)
    control = SimpleNamespace(should_training_stop=False)
    with pytest.raises(KeyboardInterrupt), processes.first_signals(callback.budget.ask_to_end):
        os.kill(os.getpid(), number)
        callback.end_in_time(state, control)
        assert control.should_save
        assert control.should_training_stop
        assert signal.getsignal(number) == again
        raise KeyboardInterrupt
    after = signal.signal(number, before)
    terminal_is_gone = again == signal.SIG_IGN
    expected = signal.SIG_IGN if terminal_is_gone else signal.default_int_handler  # it stays gone
    assert after == expected


HANGUP = """
import os, signal, sys, time
from pathlib import Path
from nbutils.processes import first_signals
signals = []
with first_signals(signals.append):
    Path("ready").touch()
    while not signals:
        time.sleep(0.01)
    for _ in range(3):
        print("still here", flush=True)
        os.kill(os.getpid(), signal.SIGHUP)
print("after", flush=True)
Path("saved").write_text(str(signals))
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_training_as_sigterm_does_and_nohup_stays_nohup(tmp_path: Path, ignored: bool) -> None:
    master, terminal = pty.openpty()

    def take_terminal() -> None:
        """Make it the terminal of the new process; whoever was started by nohup ignores that it is closed."""
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-c", HANGUP],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=take_terminal,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    wait_for((tmp_path / "ready").exists, 20)

    os.close(master)
    ended_by = signal.SIGHUP
    if ignored:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        ended_by = signal.SIGTERM
    process.wait(20)
    assert process.returncode == 0
    assert (tmp_path / "saved").read_text() == str([int(ended_by)])


def test_a_training_without_any_output_goes_on(tmp_path: Path) -> None:
    code = "from nbutils.processes import first_signals\nwith first_signals(print): print('nobody reads this')"
    command = ["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, code]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0


def run_live(steps: int, seconds: float, monkeypatch: Any) -> tuple[Any, Any]:
    """Tells `LiveNumbers` what a real trainer would, one log a step; the callback and the trainer's state."""
    nowhere = Path("/nonexistent")  # nothing can be written there, and nothing ends because of it
    state = SimpleNamespace(global_step=0, max_steps=steps, log_history=[{"step": 0, "eval_loss": 3.0}])
    monkeypatch.setattr(tracking, "monotonic", lambda: seconds * state.global_step)
    live = tracking.LiveNumbers(nowhere, nowhere)
    live.on_train_begin(state)
    live.note("checkpoint 1 is kept")
    for step in range(1, steps + 1):
        state.global_step = step
        live.on_step_end(state, SimpleNamespace(step_was_skipped=step == 1))
        state.log_history.append({"step": step, "loss": 2.0, "num_tokens": 100.0 * step})
        live.on_log(state, state.log_history[-1])
    live.on_train_end(state, "finished")
    return live, state


@pytest.mark.parametrize(
    ("steps", "seconds", "fewest", "most"),
    [(1000, 0.01, 4, 7), (3600, 1.0, 46, 66)],
    ids=["10 seconds", "an hour"],
)
def test_lines_are_few_and_say_everything(
    steps: int, seconds: float, fewest: int, most: int, capsys: Any, monkeypatch: Any
) -> None:
    run_live(steps, seconds, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert fewest <= len(lines) <= most
    assert lines[0].startswith(f"training · steps 1 to {steps:,}")
    words = r"step 1 of .* · loss 2.000 · validation 3.000 \(step 0\) · tokens/s [\d,]+ · peak .* GiB · time left .*"
    assert re.fullmatch(words, lines[2])
    assert lines[-1].startswith(f"trained {steps:,} of {steps:,} steps in ")


def test_in_a_notebook_one_panel_is_drawn_over(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    drawn: list[Any] = []
    handle = SimpleNamespace(update=lambda page, raw: drawn.append(page))
    monkeypatch.setattr("nbutils.display.watched", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: handle)
    run_live(1000, 0.01, monkeypatch)
    assert 10 <= len(drawn) <= 15
    assert capsys.readouterr().out == ""
    last = drawn[-1]
    assert last["text/plain"].startswith("trained")
    for word in ("<svg", "checkpoint 1 is kept", "tokens/s"):
        assert word in last["text/html"]


def result_of(trainer: Any, callback: Any, seconds: float = 1.0, first_step: int = 0) -> Any:
    """The result of a training whose last session began at this step and took so long."""
    callback.session_seconds = seconds
    callback.first_step = first_step
    return run.TrainingResult(trainer, callback, kept_step=0, changed=(2, 0), peak_gib=1.0, checksums={}, gathered={})


@pytest.mark.parametrize(
    ("platform", "gpu", "cost"),  # of half an hour
    [
        ("autodl", RTX_4090, {"¥": 1.0}),
        ("runpod", RTX_4090, {"$": 0.2}),
        ("local", RTX_4090, {"¥": 1.0, "$": 0.2}),
        ("kaggle", RTX_4090, None),
        ("local", None, None),
    ],
)
def test_what_was_measured(tmp_path: Path, monkeypatch: Any, platform: str, gpu: Any, cost: Any) -> None:
    price = gpus.Price(2.0, 0.4) if gpu else gpus.Price(None, None)
    monkeypatch.setattr(gpus, "hourly_price", lambda gpu: price)
    monkeypatch.setattr(hardware, "gpu", lambda: gpu)
    monkeypatch.setenv("NBUTILS_PLATFORM", platform)
    live, state = run_live(2, 900, monkeypatch)
    args = SimpleNamespace(world_size=2, train_batch_size=3, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(state=state, args=args)
    callback = course_callback(tmp_path, trainer=trainer)
    callback.live = live

    facts = result_of(trainer, callback, seconds=1800.0, first_step=1).facts()
    assert facts.get("cost") == cost
    assert facts["skipped_steps"] == 1
    assert facts["batch"] == 24
    assert facts["tokens_per_second"] == 0.1

    nothing_trained = result_of(trainer, callback, seconds=99.0, first_step=2).facts()
    assert nothing_trained["steps"] == 2
    for name in ("tokens_per_second", "train_seconds", "cost"):
        assert nothing_trained[name] is None, name


OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB"
FIRST = 1000  # the first token of row n is FIRST + n, so that a batch tells which rows it has
STEPS = 7  # 21 rows: 3 steps a pass with 8 rows each, the last of a pass with 5


def rows(sizes: tuple[int, ...] = (10, 8), count: int = 21) -> Dataset:
    """Packed rows of examples of these sizes, all different."""
    packed_rows = []
    for number in range(count):
        others = [(number * 31 + place * place) % 900 + 10 for place in range(sum(sizes) - 1)]
        tokens = [FIRST + number, *others]
        packed_rows.append({"input_ids": tokens, "labels": tokens, "seq_lengths": [*sizes]})
    return Dataset.from_list(packed_rows)


class Diary(TrainerCallback):
    """The rows, learning rate and weights of each finished step, and the steps that were saved."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.steps: dict[int, tuple[list[int], float]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.saved: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen = []

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        assert state.global_step not in self.steps, "no step is done twice"
        self.steps[state.global_step] = ([*self.seen], parts["lr_scheduler"].get_last_lr()[0])
        self.weights[state.global_step] = full_weights(parts["model"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved.append(state.global_step)


def build(folder: Path, held_out: Any = None, **settings: Any) -> Any:
    """A real trainer on the first layer of the tiny model, with a diary; it evaluates held-out rows when it saves."""
    defaults: dict[str, Any] = {
        "max_length": 256, "packing": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 2e-3, "lr_scheduler_type": "cosine", "gradient_checkpointing": False,
        "use_cpu": True, "bf16": False, "dataloader_pin_memory": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 3, "save_steps": 100, "save_total_limit": 1, "seed": 1, "data_seed": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    if held_out is not None:
        defaults |= {
            "eval_strategy": "steps",
            "eval_steps": settings["save_steps"],
            "eval_on_start": True,
            "metric_for_best_model": "eval_loss",
            "load_best_model_at_end": True,
        }
    torch.manual_seed(0)
    trainer: Any = SFTTrainer(
        model=tiny(num_hidden_layers=1),
        processing_class=AutoTokenizer.from_pretrained(files.TINY_MODEL),
        args=SFTConfig(output_dir=str(folder / "trainer"), **defaults | settings),
        train_dataset=rows(),
        eval_dataset=held_out,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    lora.patch_lora_kernels(trainer)
    validation.use_token_mean(trainer)
    trainer.diary = Diary()
    trainer.add_callback(trainer.diary)
    compute_loss = trainer.compute_loss

    def noted_loss(model: Any, inputs: Any, **words: Any) -> Any:
        for token in inputs["input_ids"].flatten().tolist():
            if FIRST <= token < FIRST + 900:
                trainer.diary.seen.append(token - FIRST)
        return compute_loss(model, inputs, **words)

    trainer.compute_loss = noted_loss
    return trainer


def course_callback(folder: Path, sync: Any = None, trainer: Any = None, patience: int = 0) -> Any:
    """Lesson 03's callback as `prepare` leaves it."""
    lesson = lesson_in(folder)
    callback: Any = run.CourseCallback(None, lesson.profile, run=lesson.run, folders=lesson.folders, started=0.0)
    no_sync = SimpleNamespace(messages=list, take=lambda folder: None, seconds=1.0)
    callback.sync = sync or no_sync
    callback.fingerprint = {"data": "d"}
    callback.kinds = {}
    callback.trainer = trainer
    callback.patience = patience
    return callback


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The training nothing happens to; its checkpoints of steps 3 and 6 are kept."""
    trainer = build(tmp_path_factory.mktemp("whole"), save_steps=3, save_total_limit=2)
    trainer.train()
    rows_of_steps = [len(seen) for seen, _ in trainer.diary.steps.values()]
    assert rows_of_steps == [8, 8, 5, 8, 8, 5, 8]
    return trainer


def assert_same(trainer: Any, whole: Any, since: int = 0) -> None:
    """The same steps, rows in the same order, rates and weights."""
    assert trainer.state.max_steps == whole.state.max_steps
    assert trainer.state.global_step == whole.state.max_steps
    expected = {step: diary for step, diary in whole.diary.steps.items() if step > since}
    assert trainer.diary.steps == expected
    torch.testing.assert_close(full_weights(trainer.model), full_weights(whole.model), rtol=0, atol=1e-6)


def validated(
    folder: Path, losses: Any = (), monkeypatch: Any = None, count: int = 5, patience: int = 0, **settings: Any
) -> Any:
    """A real trainer that saves and validates every second step; `losses` replaces what it would measure."""
    held_out = rows(count=count) if count else None
    trainer = build(folder, held_out, **{"save_steps": 2, "save_total_limit": 3} | settings)
    callback = course_callback(folder, trainer=trainer, patience=patience)
    trainer.add_callback(callback)
    if patience:
        trainer.add_callback(EarlyStoppingCallback(patience))
    if monkeypatch:
        script = iter(losses)
        monkeypatch.setattr(validation, "token_mean_loss", lambda *_: next(script))
    return trainer, callback


def steps_of(trainer: Any) -> list[int]:
    return [step for step, _ in tracking.validation_history(trainer.state.log_history)]


def example_loss(model: nn.Module, tokens: list[int], labels: list[int]) -> float:
    """The sum of the losses of an example's tokens, each predicted from those before it."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    losses = functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
    return float(losses.detach())


def test_the_loss_is_the_mean_over_all_trained_tokens_whatever_the_batches(tmp_path: Path) -> None:
    plain = rows(sizes=(9, 7), count=5)
    labels = []
    for number, row in enumerate(plain):
        prompt = 3 + number  # tokens that are not trained
        labels.append([-100] * prompt + row["labels"][prompt:])
    held_out = plain.remove_columns("labels").add_column("labels", labels)
    trainer = build(tmp_path, per_device_train_batch_size=1, max_length=16)
    trainer.model.eval()

    total = 0.0
    for row in held_out:
        tokens = row["input_ids"]
        labels = row["labels"]
        total += example_loss(trainer.model, tokens[:9], labels[:9])  # the two examples of a row do not see each other
        total += example_loss(trainer.model, tokens[9:], labels[9:])
    trained = sum(label != -100 for row in held_out for label in row["labels"])
    mean = pytest.approx(total / trained, rel=1e-4)

    assert validation.token_mean_loss(trainer, held_out) == mean
    assert trainer.model.training is False
    trainer.args.per_device_train_batch_size = 3
    assert validation.token_mean_loss(trainer, held_out) == mean


def test_a_validation_takes_as_many_forward_passes_as_micro_batches_of_its_tokens_would(tmp_path: Path) -> None:
    trainer = build(tmp_path, packing=False, per_device_train_batch_size=4)
    compute_loss = trainer.compute_loss
    passes: list[int] = []  # the tokens of each

    def counted_loss(model: Any, inputs: Any, **words: Any) -> Any:
        passes.append(inputs["input_ids"].numel())
        return compute_loss(model, inputs, **words)

    trainer.compute_loss = counted_loss
    long_row = rows(sizes=(240,), count=1)
    short_rows = rows(sizes=(10,), count=30)
    validation.token_mean_loss(trainer, concatenate_datasets([long_row, short_rows]))
    assert passes == [240, 60, 60, 60, 60, 60]  # 540 tokens, 4 rows of 17.4 are a micro-batch


@pytest.mark.slow
def test_validation_at_start_saves_and_end_changes_nothing(tmp_path: Path, whole: Any) -> None:
    trainer, _ = validated(tmp_path, load_best_model_at_end=False)
    trainer.train()
    assert steps_of(trainer) == [0, 2, 4, 6, STEPS]
    assert validation.load_best(trainer) == STEPS
    assert_same(trainer, whole)

    log = trainer.state.log_history
    not_finite = {"step": 8, "loss": math.nan}
    tracking.write_history([*log, not_finite], tmp_path / "history.json")
    written = json.loads((tmp_path / "history.json").read_text())
    assert len(written) == len(tracking.loss_history(log)) + len(steps_of(trainer))


@pytest.mark.slow
def test_the_best_step_is_restored_also_by_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = validated(tmp_path, (5.0, 3.0, 4.0), monkeypatch, max_steps=4)
    first.train()
    resumed, callback = validated(tmp_path, (4.5, 4.6), monkeypatch, max_steps=7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer/checkpoint-4"))
    assert (tmp_path / "trainer/checkpoint-2").exists(), "the trainer keeps the best one"

    finished, _ = validated(tmp_path, (), monkeypatch, max_steps=4)
    run._load_finished(finished, tmp_path / "trainer/checkpoint-7")
    torch.testing.assert_close(full_weights(finished.model), resumed.diary.weights[7], rtol=0, atol=0)

    for trainer in (first, resumed, finished):
        assert validation.load_best(trainer) == 2
        torch.testing.assert_close(full_weights(trainer.model), first.diary.weights[2], rtol=0, atol=0)
    facts = result_of(resumed, callback, first_step=4).facts()
    assert facts["validation_loss"] == {"first": 5.0, "best": 3.0, "last": 4.6}
    assert facts["best_step"] == 2


@pytest.mark.slow
def test_it_ends_early_when_the_loss_rises(tmp_path: Path, monkeypatch: Any) -> None:
    trainer, callback = validated(tmp_path, (5.0, 3.0, 3.1, 3.2), monkeypatch, patience=2, max_steps=20)
    trainer.train()
    assert trainer.state.global_step == 6
    assert result_of(trainer, callback).facts()["planned_steps"] == 6
    assert validation.load_best(trainer) == 2
    assert validation.steps_left(trainer, tmp_path / "trainer/checkpoint-6", patience=2) == 0


@pytest.mark.slow
def test_it_ends_at_once_when_the_loss_is_not_finite(tmp_path: Path, monkeypatch: Any) -> None:
    trainer, callback = validated(tmp_path, (5.0, 4.0, math.nan), monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 4
    assert not (tmp_path / "trainer/checkpoint-4").exists()
    assert validation.load_best(trainer) == 2
    losses = result_of(trainer, callback).facts()["validation_loss"]
    assert math.isnan(losses["last"])


@pytest.mark.slow
def test_a_model_whose_loss_is_no_number_before_the_first_step_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    trainer, _ = validated(tmp_path, (math.nan,), monkeypatch)
    with refused("The loss of the model is nan before the first step", "float32"):
        trainer.train()
    assert trainer.state.global_step == 0


class Stop(TrainerCallback):
    """Saves and ends after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = True
            control.should_training_stop = True


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lesson whose data is ready to train on."""
    lesson = lesson_in(tmp_path)
    files.write_json(lesson.run.data / "data_card.json", {"fingerprint": "d"})
    monkeypatch.setattr(run.chat, "check_trainer", lambda *_: "")
    monkeypatch.setattr(run.tracking, "end_trackers", lambda logs: None)
    return lesson


def test_a_stop_is_not_validated(tmp_path: Path) -> None:
    trainer, _ = validated(tmp_path)
    trainer.add_callback(Stop(3))
    trainer.train()
    assert steps_of(trainer) == [0, 2]
    assert validation.load_best(trainer) == 2


def test_no_rows_are_no_validation(tmp_path: Path) -> None:
    trainer, callback = validated(tmp_path, count=0, max_steps=2)
    trainer.train()
    assert validation.load_best(trainer) == 2
    assert result_of(trainer, callback).facts()["best_step"] is None


def start(lesson: Any, steps: int, every: int = 2, held_out: int = 3, **settings: Any) -> Any:
    """Trainer and callback of lesson 03, ready to train; they save and validate every second step."""
    settings = {"save_steps": every, "max_steps": steps, "logging_steps": 1} | settings
    trainer = build(lesson.scratch, rows(count=held_out), **settings)
    dataset: Any = SimpleNamespace(trained_tokens=5)
    callback = run.CourseCallback(dataset, lesson.profile, run=lesson.run, folders=lesson.folders, started=0.0)
    trainer.add_callback(callback)
    assert callback.prepare(trainer)
    return trainer, callback


def train(lesson: Any, steps: int, **settings: Any) -> Any:
    """The result of lesson 03 with so many steps."""
    trainer, callback = start(lesson, steps, **settings)
    return run.train(trainer, callback)


def states(lesson: Any) -> set[str]:
    """The states that the two progress files of a run show."""
    places = (lesson.scratch, lesson.run.path)
    return {files.read_json(place / "logs/progress.json")["state"] for place in places}


def interrupt_at(callback: Any, step: int) -> None:
    """Press Ctrl-C during this step."""
    step_ended = callback.budget.step_ended

    def press_stop(sync_seconds: float) -> Any:
        if callback.trainer.state.global_step == step:
            signal.raise_signal(signal.SIGINT)
        return step_ended(sync_seconds)

    callback.budget.step_ended = press_stop
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    try:
        with refused(f"at step {step} of "):
            run.train(callback.trainer, callback)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_training_is_resumed_waits_for_its_disk_and_is_loaded_once_finished(demo: Any, monkeypatch: Any) -> None:
    trainer, callback = start(demo, 3)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(checkpoints.CheckpointSync, "finish", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.train(trainer, callback)
    assert states(demo) == {"failed"}

    first = run.train(trainer, callback)  # the disk is back, and the cell runs again
    assert first.facts()["steps"] == 3
    assert first.callback.first_step == 0
    adapter_changes, base_changes = first.changed
    assert adapter_changes > 0
    assert base_changes == 0

    resumed = train(demo, 5)
    assert resumed.facts()["steps"] == 5
    assert resumed.callback.first_step == 3
    assert [step for step, _ in resumed.history["validation"]] == [0, 2, 3, 4, 5]

    finished = train(demo, 5)
    assert finished.facts()["train_seconds"] is None
    assert finished.history == resumed.history
    assert str(resumed.kept_step) in str(finished)
    assert (demo.run.logs / "history.json").exists()

    saved: list[Any] = []
    tokenizer = SimpleNamespace(save_pretrained=saved.append)
    monkeypatch.setattr(resumed.trainer, "_save", lambda folder, state_dict: saved.append(folder))
    run.save_adapter(resumed, tokenizer)
    run.save_adapter(finished, tokenizer)
    assert len(saved) == 2, "one adapter and one tokenizer: the weights are the same"
    assert files.stamp(demo.run.adapter)["steps"] == resumed.kept_step

    _, callback = start(demo, 9)
    interrupt_at(callback, 7)
    assert states(demo) == {"stopped"}
    assert not demo.run.adapter.exists()
    assert files.stamp(demo.run.former_adapter), "it is of a shorter training"

    longer = train(demo, 9)
    assert longer.facts()["steps"] == 9
    assert longer.callback.first_step == 7
    assert states(demo) == {"finished"}

    trained = [weight for weight in longer.trainer.model.parameters() if weight.requires_grad]
    trained[0].data.add_(1)  # as by a cell that makes a new adapter
    with refused("The weights of the adapter are no longer those"):
        run.save_adapter(longer, None)


@pytest.mark.slow
def test_a_resumed_run_saves_and_logs_as_the_arguments_of_today_say(demo: Any, caplog: Any) -> None:
    train(demo, 4, every=4, logging_steps=4)
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    resumed = train(demo, 9, every=4, save_steps=3, logging_steps=5)
    transformers.removeHandler(caplog.handler)
    assert resumed.trainer.diary.saved == [6, 9]
    assert [step for step, _ in resumed.history["train"]] == [4, 5, 6, 9]
    assert "trainer_state.json" not in caplog.text, "it would say that the old ones count"


@pytest.mark.slow
def test_a_resumed_run_counts_the_time_of_all_sessions(demo: Any) -> None:
    trainer, callback = start(demo, 9, every=4)
    interrupt_at(callback, 3)
    [last_loss] = [entry for entry in trainer.state.log_history if entry.get("step") == 3 and "loss" in entry]
    first_seconds = last_loss["train_seconds"]
    assert first_seconds > 0

    trainer, callback = start(demo, 9, every=4)
    callback.live.price = {"¥": 3600.0}  # an hour: 1 a second
    resumed = run.train(trainer, callback)
    second_seconds = resumed.callback.session_seconds
    kept = checkpoints.look(demo.run.checkpoints)
    assert kept[0].validation_rows == demo.profile.course.validation_rows
    assert kept[0].validation_rows > 0
    assert [step for step, _ in resumed.history["validation"]] == [0, 4, 8, 9], "as if it had not been stopped"

    facts = resumed.facts()
    assert facts["train_seconds"] == pytest.approx(first_seconds + second_seconds, abs=0.11)
    assert facts["cost"] == {"¥": pytest.approx(facts["train_seconds"], abs=0.01)}
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    of_second_session = pytest.approx(tokens[-1] / second_seconds, abs=0.1)  # the trainer counts them anew
    assert facts["tokens_per_second"] == of_second_session


DAMAGED = {
    "no json": "{", "a list": "[]", "empty": "{}", "no log": '{"log_history": "x"}',
    "no entries": '{"log_history": [1]}', "no step": '{"log_history": [{"loss": 1.0}]}',
    "no number": '{"log_history": [{"step": 1, "loss": "x"}]}',
    "depth": '{"log_history": ' + "[" * 100_000 + "]" * 100_000 + "}",
}  # fmt: skip


def test_a_damaged_state_of_the_trainer_is_told_with_its_file(demo: Any) -> None:
    train(demo, 4)
    trainer, callback = start(demo, 6)
    newest = resume.resume_point(demo.run, demo.folders, callback.fingerprint, "auto")
    state_file = newest / checkpoints.STATE
    state = json.loads(state_file.read_text())
    for damaged in DAMAGED.values():
        state_file.write_text(damaged)
        shutil.rmtree(demo.run.checkpoints)
        demo.run.checkpoints.mkdir()
        checkpoints.pack(newest, demo.run.checkpoints, callback.fingerprint)
        with refused("cannot be read", checkpoints.STATE, "RESUME"):
            run.train(trainer, callback)

    for wrong_step in ("x", math.nan, [1], 99):
        state["global_step"] = wrong_step
        state_file.write_text(json.dumps(state))
        resume.bring_best(newest, demo.run.checkpoints, callback.fingerprint, [])
        corrected = json.loads(state_file.read_text())
        assert corrected["global_step"] == 4, "its folder says so"


@pytest.mark.slow
def test_losses_on_other_rows_do_not_compare_and_are_refused(demo: Any) -> None:
    train(demo, 4, held_out=5)
    with refused("validated on 5 rows, and would be on 3", "course.validation_rows=5"):
        train(demo, 7, held_out=3)


@pytest.mark.slow
def test_stops_do_not_bring_the_early_end_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {0: 5.0, 2: 3.0, 4: 3.2, 6: 3.4}
    monkeypatch.setattr(validation, "token_mean_loss", lambda trainer, rows: losses[trainer.state.global_step])
    checkpoint = None
    for stop, ends_early in ((3, False), (5, False), (99, True)):
        trainer, callback = validated(tmp_path, patience=2, max_steps=20)
        trainer.add_callback(Stop(stop))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert validation.load_best(trainer) == 2
        assert validation.stopped_early(trainer.state, callback.patience) is ends_early
        checkpoint = str(tmp_path / f"trainer/checkpoint-{trainer.state.global_step}")
    assert trainer.state.global_step == 6
    assert steps_of(trainer) == [*losses]


def test_the_best_step_survives_the_machine_or_is_told_to_be_gone(demo: Any, monkeypatch: Any, capsys: Any) -> None:
    losses = iter((5.0, 3.0, 4.0))
    monkeypatch.setattr(validation, "token_mean_loss", lambda *_: next(losses))
    train(demo, 4)
    shutil.rmtree(demo.scratch)  # the machine is gone
    _, callback = start(demo, 6)
    newest = resume.resume_point(demo.run, demo.folders, callback.fingerprint, "auto")
    resume.unlock_run(demo.scratch)
    assert newest is not None
    assert newest.name == "checkpoint-4"
    best = newest.parent / "checkpoint-2"
    assert best.is_dir()

    shutil.rmtree(best)
    resume.bring_best(newest, demo.run.checkpoints, callback.fingerprint, [])
    state = json.loads((newest / "trainer_state.json").read_text())
    for name in ("best_global_step", "best_metric", "best_model_checkpoint"):
        assert state[name] is None, name
    assert "the best so far, is gone" in capsys.readouterr().out


def test_early_stopping_may_begin_with_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = validated(tmp_path, (5.0, 4.0, 3.0), monkeypatch, max_steps=4)
    first.train()
    resumed, _ = validated(tmp_path, (3.1, 3.2), monkeypatch, max_steps=8, patience=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer/checkpoint-4"))
    assert resumed.state.global_step == 8
    assert (tmp_path / "trainer/checkpoint-8/trainer_state.json").exists()


def raise_oom_in(owner: Any, name: str, after: bool = False, when: Any = lambda: True, calls: Any = (1,)) -> list[int]:
    """Let a method run out of memory at these calls (counted from 1 while `when` holds), before or `after` its work.

    The list that is returned gets the number of each of these calls.
    """
    method = getattr(owner, name)
    numbers = count(1)
    raised: list[int] = []

    def failing(*args: Any, **named: Any) -> Any:
        number = next(numbers) if when() else None
        result = None
        if after or number not in calls:
            result = method(*args, **named)
        if number in calls:
            raised.append(number)
            raise torch.OutOfMemoryError(OOM)
        return result

    setattr(owner, name, failing)
    return raised


def run_out(trainer: Any, *calls: int) -> None:
    """Raise after these backward passes (counted from 1, over all attempts): their gradients are left behind."""
    raise_oom_in(trainer.accelerator, "backward", after=True, calls=calls)


def batch_of(trainer: Any) -> tuple[int, int]:
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("calls", "batch", "changes"),  # the batch it ends with; (step, micro-batch before) of each change
    [
        ([1], (2, 4), [(1, 4)]),
        ([7, 8], (1, 8), [(4, 4), (4, 2)]),
        ([6, 15], (1, 8), [(3, 4), (5, 2)]),
    ],
    ids=["first pass", "twice in a step", "in two steps"],
)
@pytest.mark.slow
def test_a_training_goes_on_from_its_last_step(
    tmp_path: Path, whole: Any, calls: list[int], batch: tuple[int, int], changes: list[tuple[int, int]]
) -> None:
    trainer = build(tmp_path, save_steps=3)
    lesson = lesson_in(tmp_path)
    taken: list[str] = []
    sync: Any = SimpleNamespace(messages=list, take=lambda folder: taken.append(folder.name), seconds=1.0)
    trainer.add_callback(course_callback(tmp_path, sync, trainer))
    run_out(trainer, *calls)
    oom.train_within_memory(trainer, lesson.run.path, None)

    assert_same(trainer, whole)
    assert batch_of(trainer) == batch
    assert trainer._train_batch_size == batch[0]
    noted = []
    for change in oom.oom_changes(lesson.run.path):
        noted.append((change["step"], change["from"]["per_device_train_batch_size"]))
    assert noted == changes
    assert taken == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    with refused("This trainer has trained before, and would mix two"):
        run.train(trainer, course_callback(tmp_path))


def assert_finished(trainer: Any, whole: Any, batch: tuple[int, int], since: int = 0) -> None:
    """It is the training nothing happened to, with its last checkpoint and this batch."""
    assert_same(trainer, whole, since)
    assert batch_of(trainer) == batch
    assert (Path(trainer.args.output_dir) / f"checkpoint-{STEPS}").exists()


def test_no_step_is_lost_if_the_first_update_runs_out(tmp_path: Path, monkeypatch: Any, whole: Any) -> None:
    trainer = build(tmp_path, save_steps=3)
    monkeypatch.setattr(torch.optim.AdamW, "step", torch.optim.AdamW.step)  # restored afterwards
    raised = raise_oom_in(torch.optim.AdamW, "step", after=True)
    oom.train_within_memory(trainer, tmp_path, None)
    assert raised
    assert_finished(trainer, whole, batch=(2, 4))


def test_no_step_is_lost_if_saving_runs_out(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path, save_steps=3)
    raised = raise_oom_in(trainer, "_save_optimizer_and_scheduler")
    oom.train_within_memory(trainer, tmp_path, None)
    assert raised
    assert_finished(trainer, whole, batch=(2, 4))


def test_no_step_is_lost_if_validation_runs_out(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path, rows(count=5), save_steps=3, load_best_model_at_end=False)
    raised = raise_oom_in(trainer, "evaluate", when=lambda: trainer.state.global_step == 3)
    oom.train_within_memory(trainer, tmp_path, None)
    assert raised
    assert_finished(trainer, whole, batch=(2, 4))


def test_no_step_is_lost_if_loading_a_checkpoint_runs_out(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path, save_steps=3)
    raised = raise_oom_in(trainer, "_load_from_checkpoint")
    oom.train_within_memory(trainer, tmp_path, Path(whole.args.output_dir) / "checkpoint-6")
    assert raised
    assert_finished(trainer, whole, batch=(2, 4), since=6)


def test_no_step_is_lost_if_the_last_step_runs_out(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path, save_steps=3)
    callback = TrainerCallback()
    raised = raise_oom_in(callback, "on_step_end", when=lambda: trainer.state.global_step == STEPS)
    trainer.add_callback(callback)
    oom.train_within_memory(trainer, tmp_path, None)
    assert raised
    assert_finished(trainer, whole, batch=(4, 2))


@pytest.mark.slow
def test_gradient_checkpointing_is_turned_on_and_then_nothing_is_left(tmp_path: Path, whole: Any) -> None:
    trainer = build(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    run_out(trainer, 12)
    oom.train_within_memory(trainer, tmp_path, None)
    assert trainer.model.base_model.model.model.layers[0].gradient_checkpointing
    assert_same(trainer, whole)

    trainer = build(tmp_path / "again", per_device_train_batch_size=1)
    run_out(trainer, *range(6, 100))
    with refused("Out of memory at step 3 with"):
        oom.train_within_memory(trainer, tmp_path, None)


def test_a_later_update_that_broke_off_ends_the_training(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    callback = TrainerCallback()
    raise_oom_in(callback, "on_optimizer_step", when=lambda: trainer.state.global_step == 3)
    trainer.add_callback(callback)
    with refused("Out of memory at step 4 with"):
        oom.train_within_memory(trainer, tmp_path, None)


def test_other_errors_and_running_out_in_one_of_several_processes_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(tmp_path)

    def other_error(*_: Any, **__: Any) -> None:
        raise ValueError("CUDA out of memory")

    trainer.compute_loss = other_error
    with pytest.raises(ValueError, match="CUDA"):
        oom.train_within_memory(trainer, tmp_path, None)
    assert batch_of(trainer) == (4, 2)
    assert oom.oom_changes(tmp_path) == []

    raise_oom_in(trainer, "train")
    monkeypatch.setenv("LOCAL_RANK", "0")  # one of several processes
    with refused("Out of memory at step 1 with"):
        oom.train_within_memory(trainer, tmp_path, None)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (RuntimeError(OOM), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("out of memory"), False),
    ],
    ids=["PyTorch's", "CUDA's", "cuBLAS's", "by type", "another error of CUDA", "of the machine"],
)
def test_what_counts_as_out_of_memory(problem: Exception, expected: bool) -> None:
    assert hardware.out_of_memory(problem) is expected


def smaller_settings(settings: StepSettings, offload: bool) -> list[StepSettings]:
    """All smaller settings, in the order in which they are tried."""
    tried = []
    smaller = settings.smaller(offload)
    while smaller is not None:
        tried.append(smaller)
        smaller = smaller.smaller(offload)
    return tried


def test_settings_get_smaller_in_order_and_the_batch_stays() -> None:
    start = StepSettings(6, 2, gradient_checkpointing=False, activation_offloading=False)
    assert smaller_settings(start, offload=True) == [
        StepSettings(3, 4, gradient_checkpointing=False, activation_offloading=False),
        StepSettings(1, 12, gradient_checkpointing=False, activation_offloading=False),
        StepSettings(1, 12, gradient_checkpointing=True, activation_offloading=False),
        StepSettings(1, 12, gradient_checkpointing=True, activation_offloading=True),
    ]


def test_a_micro_batch_that_is_prime_becomes_a_single_row() -> None:
    start = StepSettings(5, 1, gradient_checkpointing=True, activation_offloading=False)
    assert smaller_settings(start, offload=True) == [
        StepSettings(1, 5, gradient_checkpointing=True, activation_offloading=False),
        StepSettings(1, 5, gradient_checkpointing=True, activation_offloading=True),
    ]


def test_without_offloading_a_recomputed_single_row_is_the_smallest() -> None:
    start = StepSettings(1, 8, gradient_checkpointing=True, activation_offloading=False)
    assert smaller_settings(start, offload=False) == []


@pytest.mark.slow
def test_the_loss_scale_of_float16_goes_on(tmp_path: Path) -> None:
    class Overflow(TrainerCallback):
        """The gradients of the first step are too large for the loss scale."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 0:
                trained = [weight for weight in model.parameters() if weight.requires_grad]
                trained[0].grad.fill_(math.inf)

    def build_with_scale(folder: Path) -> Any:
        trainer = build(folder, max_grad_norm=0.0, learning_rate=1e-3, optim="adamw_torch")
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        trainer.add_callback(Overflow())
        return trainer

    undisturbed = build_with_scale(tmp_path / "undisturbed")
    undisturbed.train()
    trainer = build_with_scale(tmp_path / "disturbed")
    run_out(trainer, 6)
    oom.train_within_memory(trainer, tmp_path, None)

    scale = undisturbed.accelerator.scaler.state_dict()
    assert scale["scale"] == 1024 / 2 * 2**3  # halved by the overflow, doubled after every 2 of the other 6 steps
    assert trainer.accelerator.scaler.state_dict() == scale
    assert batch_of(trainer) == (2, 4)
    assert_same(trainer, undisturbed)


def test_a_practice_run_is_trained_once_and_its_shuffled_rows_answer_other_questions(tmp_path: Path) -> None:
    wrong = practice.rows_of(practice.Practice(shuffled=True))
    right = practice.rows_of(practice.Practice())
    assert [row["messages"][0] for row in wrong] == [row["messages"][0] for row in right]
    assert sorted(str(row["messages"][1]) for row in wrong) == sorted(str(row["messages"][1]) for row in right)
    moved = sum(mine != theirs for mine, theirs in zip(wrong, right, strict=True))
    assert moved > 0.9 * len(right)

    short = practice.Practice(rows=4, steps=2, batch_size=2)
    first = practice.train(short, tmp_path / "run/practice/short")
    assert [step for step, _ in first.history["validation"]] == [0, 1, 2]
    assert first.best[0] == 2
    written = (first.adapter / "adapter_model.safetensors").stat().st_mtime_ns
    again = practice.train(short, tmp_path / "run/practice/short")
    assert (again.adapter / "adapter_model.safetensors").stat().st_mtime_ns == written
    longer = practice.train(dataclasses.replace(short, steps=3), tmp_path / "run/practice/short")
    assert longer.history["validation"][-1][0] == 3
