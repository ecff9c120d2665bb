"""What needs a CUDA GPU: `make test-gpu` on a machine that has one."""

import inspect
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from importlib.util import find_spec
from pathlib import Path

import merge_models as models
import pytest
import torch

from nbutils import files, hardware, merging, serving

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


def test_the_gpu_is_found_computes_and_has_its_precision() -> None:
    gpu = hardware.gpu()
    assert gpu is not None and gpu.memory_gib > 1 and hardware.working_operation(gpu).value is True
    assert hardware.dtype(gpu).value == ("bfloat16" if gpu.capability >= (8, 0) else "float16")


def test_gpu_memory_is_held_in_segments_that_grow() -> None:
    lines = (
        "from nbutils import hardware; hardware.leave_no_gaps(); import torch",
        "kept = torch.ones(2**24, device='cuda')",
        "print(*{segment['is_expandable'] for segment in torch.cuda.memory_snapshot()})",
    )
    clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=clean)
    assert ran.stdout.strip() == "True", ran.stderr


def test_four_bit_weights_are_on_the_gpu_and_smaller() -> None:
    from test_training import FOUR_BIT
    from transformers import AutoModelForCausalLM

    small = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, quantization_config=FOUR_BIT, device_map={"": 0})
    full = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32")
    weight = small.model.layers[0].mlp.up_proj.weight
    assert weight.is_cuda and weight.quant_state.quant_type == "nf4" and weight.quant_state.nested
    assert small.get_memory_footprint() < 0.5 * full.get_memory_footprint()


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_packed_logits_and_gradients_on_the_card_are_those_of_the_unpacked_rows(backend: str) -> None:
    from test_training import ROWS, packed
    from transformers import AutoModelForCausalLM, Qwen2Config

    from nbutils.training import model as attention

    if backend == "varlen" and hardware.attention(hardware.gpu()).value != "varlen":
        pytest.skip("this GPU has no kernel for packed rows")
    attention.attention("varlen")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=128, attn_implementation=backend,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    moved = {name: value.cuda() if torch.is_tensor(value) else value for name, value in packed(ROWS).items()}
    together = model(**moved, use_cache=False).logits[0]
    together.float().pow(2).sum().backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    alone = torch.cat([model(input_ids=torch.tensor([row]).cuda(), use_cache=False).logits[0] for row in ROWS])
    alone.float().pow(2).sum().backward()
    torch.testing.assert_close(together, alone, rtol=2e-2, atol=2e-2)
    for name, weight in model.named_parameters():
        worst = (grads[name] - weight.grad).abs().max() / weight.grad.abs().max().clamp(min=1e-6)
        assert worst < 0.05, (name, worst)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_packed_rows_of_a_hybrid_model_are_those_alone_on_the_card(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 64 are those for which some versions of Triton compile a wrong kernel on Hopper."""
    import test_hybrid
    from test_hybrid import batch_of, random_rows, step
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from nbutils.training import hybrid
    from nbutils.training import model as attention

    heads = {"head_dim": 256, "linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
    monkeypatch.setattr(test_hybrid, "SIZES", test_hybrid.SIZES | heads)
    lengths = (65, 1, 127, 64, 200)
    rows = random_rows(lengths)

    def results(batches: list[dict[str, torch.Tensor]], dtype: torch.dtype, ours: bool) -> dict[str, torch.Tensor]:
        """Logits and gradients on the card, by the course's layers or by those of transformers."""
        model = test_hybrid.hybrid_model().to("cuda", dtype)
        if ours:
            model.set_attn_implementation(attention.attention(hardware.attention(hardware.gpu()).value))
            print(hybrid.adapt_layers(model))
        on_card = []
        for batch in batches:
            on_card.append({name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()})
        logits, gradients = step(model, on_card)
        return gradients | {f"logits of row {number}": row for number, row in enumerate(logits.split(lengths))}

    alone = [batch_of([row]) for row in rows]
    packed = results([batch_of(rows)], torch.bfloat16, ours=True)
    delta_rules = vars(modeling_qwen3_5)
    for name in hybrid.DELTA_RULES:
        monkeypatch.setitem(delta_rules, name, inspect.unwrap(delta_rules[name]))
    single = results(alone, torch.bfloat16, ours=False)
    exact = results(alone, torch.float32, ours=False)
    assert packed.keys() == exact.keys()
    ratios = []
    for name, expected in exact.items():
        noise = hybrid._difference(single[name], expected)
        error = hybrid._difference(packed[name], expected)
        print(f"{name}: {error:.4f}, alone {noise:.4f}")
        ratios.append(error / max(noise, 0.005))
    assert statistics.mean(ratios) < 1.1  # as close to the truth as single rows
    assert max(ratios) < 2  # either is rounded in its own way


@pytest.mark.parametrize("recompute", [False, True])
def test_the_fused_step_with_liger_is_as_close_to_the_truth_as_peft(recompute: bool) -> None:
    from test_training import errors_in_16_bits

    errors = errors_in_16_bits("cuda", liger=True, recompute=recompute)
    assert 0 < errors["ours"] < 1.1 * errors["pefts"]


def test_the_loss_scale_of_float16_goes_on_after_an_out_of_memory(tmp_path: Path) -> None:
    import test_training

    settings = {"use_cpu": False, "fp16": True, "max_steps": 5, "max_grad_norm": 1.0}
    whole, disturbed = (test_training.build(tmp_path / name, **settings) for name in ("whole", "disturbed"))
    whole.train()
    test_training.run_out(disturbed, 6)
    test_training.oom.train_within_memory(disturbed, tmp_path, None)
    assert test_training.batch_of(disturbed) == (2, 4) and disturbed.state.global_step == 5
    scale = disturbed.accelerator.scaler.state_dict()
    assert scale == whole.accelerator.scaler.state_dict() and scale["scale"] > 0
    assert all(weight.dtype == torch.float32 for weight in disturbed.model.parameters() if weight.requires_grad)


def test_lessons_03_and_04_train_and_merge_on_the_card(tmp_path: Path) -> None:
    env = os.environ | {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, str(ROOT / "notebooks/04_merge.py"), "--PROFILE", "tiny"]
    ran = subprocess.run(script, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    facts = json.loads((tmp_path / "tiny/facts.json").read_text())
    assert facts["card"]["memory_gib"] > 1
    trained, merged = facts["lessons"]["03_qlora"], facts["lessons"]["04_merge"]
    assert trained["adapter_moved"] > 0 and trained["base_moved"] == 0
    assert merged["exact_match"]["base"] <= 0.2 and merged["exact_match"]["merged"] >= 0.8


def test_engines_on_the_card_train_as_one_plain_process_does(tmp_path: Path) -> None:
    cases = ["plain", "ddp_2", "fsdp_qlora_2", "plain_16", "fsdp_lora_2"]
    cases += ["zero2_2", "zero3_2"] if find_spec("deepspeed") else []
    words = [ROOT / "benchmarks/scale_out.py", tmp_path, tmp_path / "found.json", "--cases", ",".join(cases)]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())["cases"]
    print(ran.stdout)
    assert [*found] == cases and not any("failed" in case or case["base_moved"] for case in found.values())
    assert max(case.get("furthest_loss", 0) for case in found.values()) < 1e-2  # 16 bits, added in another order


def ordered(weight: torch.Tensor) -> torch.Tensor:
    """Bits of bfloat16 numbers as integers in the order of the numbers: neighbours differ by one."""
    bits = weight.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def test_a_merge_on_the_card_is_that_of_the_cpu_within_one_rounding(tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base")
    for case, wishes in {"plain": {}, "dora": {"use_dora": True}}.items():
        adapter = models.make_adapter(base, tmp_path / case, **wishes)
        for device in ("cpu", "cuda"):
            out = tmp_path / f"{case}-{device}"
            merging.merge_adapter(base, adapter, out, dtype="bfloat16", device=device)
        ours, cards = models.weights(tmp_path / f"{case}-cpu"), models.weights(tmp_path / f"{case}-cuda")
        assert max(int((ordered(ours[name]) - ordered(cards[name])).abs().max()) for name in ours) <= 1


def test_gpu_memory_that_nobody_holds_is_freed_and_the_rest_shown() -> None:
    held = torch.empty(3 * 2**28, dtype=torch.float32, device="cuda")  # 3 GiB
    free, _ = torch.cuda.mem_get_info()
    assert "MiB" in serving.free_gpu_memory() and held.is_cuda
    del held
    serving.free_gpu_memory()
    after, _ = torch.cuda.mem_get_info()
    assert after > free + 2.9 * 2**30


@pytest.mark.serve
def test_lesson_05_serves_the_merged_model_and_the_adapter_on_the_card(tmp_path: Path) -> None:
    env = os.environ | {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, str(ROOT / "notebooks/05_serve.py"), "--PROFILE", "tiny"]
    ran = subprocess.run(script, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    served = json.loads((tmp_path / "tiny/facts.json").read_text())["lessons"]["05_serve"]
    assert served["engine"] == "vllm" and served["exact_match"] >= 0.8
    assert served["identical_prompts"]["count"] == served["identical_prompts"]["total"]


def test_activations_are_offloaded_and_the_training_stays_the_same(tmp_path: Path) -> None:
    import test_training
    from trl.models.activation_offloading import OffloadActivations

    from nbutils.training.sharding import full_weights

    words = {"use_cpu": False, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    words |= {"gradient_checkpointing": True}
    whole, capped = (test_training.build(tmp_path / name, **words) for name in ("whole", "capped"))
    whole.train()
    test_training.run_out(capped, 4)
    test_training.oom.train_within_memory(capped, tmp_path, None)
    assert test_training.oom.settings_of(capped).activation_offloading
    assert isinstance(capped.maybe_activation_offload_context, OffloadActivations)
    assert capped.state.global_step == 4 and capped.diary.steps == whole.diary.steps
    torch.testing.assert_close(full_weights(capped.model), full_weights(whole.model), rtol=0, atol=1e-4)


def test_the_ladder_takes_two_rungs_on_the_card() -> None:
    ran = subprocess.run([sys.executable, ROOT / "benchmarks/gpu_ladder.py"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    seen = json.loads(ran.stdout.strip().splitlines()[-1])
    assert seen["rungs"] == [[1, 4, 2], [4, 2, 1]] and (seen["steps"], seen["batch"]) == (6, 8)
    assert seen["same_rows_and_rates"] and seen["peak_gib"] <= seen["caps_gib"][1]


def losses(run: Path, step: int) -> dict[int, float]:
    """step -> loss as the kept checkpoint of `step` remembers it."""
    with tarfile.open(run / f"checkpoints/checkpoint-{step}.tar") as tar:
        member = tar.extractfile(f"checkpoint-{step}/trainer_state.json")
        assert member is not None
        history = json.load(member)["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_a_training_killed_on_the_card_continues_where_it_was(tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "notebooks/03_qlora.py", "--PROFILE", "tiny", "--MAX_STEPS", "60"]
    words += ["--SAVE_STEPS", "10"]

    def start(home: str) -> subprocess.Popen:
        env = os.environ | {"NBUTILS_HOME": str(tmp_path / home), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen([str(word) for word in words], env=env, stdout=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    killed = start("killed")
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed/tiny/checkpoints/checkpoint-20.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert start("killed").wait() == 0
    facts = json.loads((tmp_path / "killed/tiny/facts.json").read_text())["lessons"]["03_qlora"]
    assert facts["resumed_from_step"] >= 20 and facts["steps"] == 60
    whole, continued = losses(tmp_path / "whole/tiny", 60), losses(tmp_path / "killed/tiny", 60)
    worst = max(abs(whole[step] - continued[step]) for step in whole)
    print(f"largest difference of a logged loss: {worst:.3g}")
    assert set(whole) == set(continued) and worst < 1e-2  # CUDA's sums are not always added in the same order
