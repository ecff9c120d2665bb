"""plan: formulas recomputed against what was measured, GPUs, shapes, the fastest that fits, the command line."""

import json
import re
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import ROOT, refused
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5VisionModel

from nbutils import exercises, files, models, plan, platforms, profiles
from nbutils.cli import app
from nbutils.config import flat
from nbutils.distributed import STRATEGIES
from nbutils.hardware import GPU
from nbutils.models import find_shape
from nbutils.plan import forecast, gpus, recipe, speed
from nbutils.plan.forecast import NEARLY_FASTEST, best_option, candidates
from nbutils.plan.memory import CONTEXT_GIB, MARGIN, Recipe, limit_gib, parts, peak_gib
from nbutils.plan.recipe import PACKED
from nbutils.plan.speed import tokens_per_second

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]
MEASURED = json.loads((ROOT / "benchmarks/results/plan_h200.json").read_text(encoding="utf-8"))["runs"]
MEASURED_HYBRIDS = json.loads((ROOT / "benchmarks/results/plan_hybrid_h200.json").read_text(encoding="utf-8"))["runs"]
SEVEN = find_shape("Qwen2.5-7B")
SEVENTY = find_shape("Qwen2.5-72B")
ADAPTERS = 28 * 16 * (2 * 7168 + 2 * (3584 + 512) + 3 * (3584 + 18944))  # weights, rank 16 on the 7B
ROWS = ("--rows", "1000", "--mean-length", "300")
T4 = GPU("Tesla T4", (7, 5), 14.6, 1)
RTX = GPU("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1)


def peak(**changes: object) -> float:
    """The GiB that a training of the 7B needs."""
    base = Recipe(per_device_train_batch_size=2)
    return peak_gib(SEVEN, replace(base, **changes))


def rate(recipe: Recipe, gpu: str = "H200") -> float:
    """The tokens a second in a training of the 7B."""
    return tokens_per_second(SEVEN, recipe, gpus.find(gpu)) or 0.0


def planned(*words: str) -> dict:
    """What `nbutils plan --json` answers."""
    ran = CliRunner().invoke(app, ["plan", "--json", *words])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


def resolved(profile: str, model: str, gpu: GPU | None, **replaced: int) -> profiles.Resolved:
    """A profile for a model on a GPU; `replaced`: values of its block sft."""
    overrides = {f"sft.{name}": (value, "test") for name, value in replaced.items()}
    return profiles.resolve(
        profile,
        model,
        gpu=gpu,
        overrides=lambda name: overrides,
        platform=platforms.Platform("local", "test"),
        online=lambda: True,
    )


def test_the_forecast_is_as_close_to_every_measurement_as_promised() -> None:
    sizes = {run["model"].partition("-")[2] for run in MEASURED}
    assert {"0.5B", "1.5B", "7B", "14B"} <= sizes
    deviations = []
    for run in MEASURED:
        shape = find_shape(run["model"])
        options = {name: run[name] for name in Recipe.__dataclass_fields__ if name in run}
        measured = Recipe(**options)
        memory_ratio = peak_gib(shape, measured) / run["measured_gib"]
        assert 0.97 <= memory_ratio <= 1.06, (round(memory_ratio, 3), run)
        full_rows = tokens_per_second(shape, measured, gpus.find("H200")) / PACKED
        deviations.append(abs(full_rows / run["tokens_per_second"] - 1))
    close = [deviation for deviation in deviations if deviation <= 0.2]
    assert len(close) >= 34
    assert max(deviations) < 0.41


def test_the_forecast_of_hybrid_models_is_as_close_as_promised() -> None:
    assert {run["model"] for run in MEASURED_HYBRIDS} == {"Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-9B"}
    assert len(MEASURED_HYBRIDS) >= 8
    for run in MEASURED_HYBRIDS:
        options = {name: run[name] for name in Recipe.__dataclass_fields__ if name in run}
        ratio = peak_gib(find_shape(run["model"]), Recipe(**options)) / run["measured_gib"]
        assert 0.98 <= ratio <= 1.04, (round(ratio, 3), run)


@pytest.mark.parametrize(
    ("file", "way", "options"),
    [
        ("train_hybrid_h200", "course-8x1-16", {"method": "lora"}),
        ("train_hybrid_h200", "course-8x1", {"method": "qlora"}),
        ("train_hybrid_h200", "course-8x1-offload-16", {"method": "lora", "activation_offloading": True}),
        ("train_hybrid_h200", "course-8x1-off-16", {"method": "lora", "gradient_checkpointing": False}),
        ("train_hybrid_small_h200", "course-8x1-16", {"method": "lora"}),
    ],
)
def test_the_speed_of_hybrid_models_is_as_measured(file: str, way: str, options: dict[str, object]) -> None:
    results = files.read_json(ROOT / f"benchmarks/results/{file}.json")
    measured = {result["way"]: result["tokens_per_second"] for result in results["ways"]}
    shape = find_shape(results["model"].partition(",")[0])
    forecast = tokens_per_second(shape, Recipe(per_device_train_batch_size=8, **options), gpus.find("H200"))
    assert forecast == pytest.approx(measured[way], rel=0.05)


COSTLY: list[dict[str, object]] = [
    {"optim": "adamw_torch_fused"},
    {"attn_implementation": "sdpa"},
    {"use_liger_kernel": False},
    {"spread": 500.0},
    {"bnb_4bit_use_double_quant": False},
    {"dtype": "float32"},
    {"lora_dropout": 0.05},
    {"gradient_checkpointing": False},
    {"method": "lora"},
    {"gradient_accumulation_steps": 4},
]


@pytest.mark.parametrize("costly", COSTLY, ids=str)
def test_what_costs_memory_is_counted(costly: dict[str, object]) -> None:
    assert peak(**costly) > peak()


def test_offloading_activations_saves_memory() -> None:
    assert peak(activation_offloading=True) < peak()


@pytest.mark.parametrize("costly", COSTLY, ids=str)
@pytest.mark.parametrize("recompute", forecast.RECOMPUTE_MODES)
@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("per_device_train_batch_size", [1, 2, 4, 8]),
        ("length", [512, 1024, 2048]),
        ("r", [8, 16, 64, 320]),
    ],
)
def test_more_rows_longer_rows_and_a_higher_rank_need_more_memory(
    costly: dict[str, object], recompute: str, setting: str, values: list[int]
) -> None:
    checkpointing, offloading = forecast.RECOMPUTE_MODES[recompute]
    recipe = costly | {"gradient_checkpointing": checkpointing, "activation_offloading": offloading}
    peaks = [peak(**recipe | {setting: value}) for value in values]
    for smaller, larger in pairwise(peaks):
        assert smaller < larger


def test_larger_batches_are_faster_up_to_what_arithmetic_allows() -> None:
    rates = [rate(Recipe(per_device_train_batch_size=size)) for size in (1, 2, 4, 8)]
    assert rates == sorted(rates)
    arithmetic_limit = gpus.find("H200").tflops * 1e12 / (6 * SEVEN.linear_params)
    assert rates[-1] < arithmetic_limit


def test_recomputing_and_offloading_take_time_and_two_cards_are_less_than_twice_as_fast() -> None:
    recomputing = rate(Recipe())
    assert rate(Recipe(gradient_checkpointing=False)) > recomputing
    assert rate(Recipe(activation_offloading=True)) <= recomputing
    assert recomputing < rate(Recipe(cards=2), "H200 x2") < 2 * recomputing


def test_the_speed_of_a_gpu_is_known_once_its_tflops_are() -> None:
    assert tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24)) is None
    assert tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24, tflops=100)) > 0


@pytest.mark.parametrize(
    ("name", "expected", "count"),
    [("4090", "RTX 4090", 1), ("NVIDIA GeForce RTX 4090", "RTX 4090", 1), ("t4 x2", "T4", 2), ("T4x2", "T4", 2),
     ("a100", "A100-40GB", 1), ("A100 80GB", "A100-80GB", 1), ("rtx pro 6000", "RTX PRO 6000", 1),
     ("3080", "RTX 3080", 1), ("3080 20G", "RTX 3080-20GB", 1), ("3080Ti", "RTX 3080 Ti", 1), ("A800", "A100-80GB", 1)],
)  # fmt: skip
def test_gpus_are_found_by_the_names_people_use(name: str, expected: str, count: int) -> None:
    gpu = gpus.find(name)
    assert gpu.name == expected
    assert gpu.count == count


def test_an_unknown_gpu_is_refused_with_what_to_give_instead() -> None:
    with refused("is not in configs/gpus.yaml, so its memory is not", "--vram", "RTX 4090"):
        gpus.find("B300")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Tesla T4", "T4"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A10G", "A10"), (RTX.name, "RTX 4090"),
     (f"{RTX.name} D", "RTX 4090 D"), ("NVIDIA GeForce RTX 3080", "RTX 3080-20GB"), ("NVIDIA H800", "H100"),
     (f"{RTX.name} Laptop GPU", ""), ("Brand New 1", "")],
)  # fmt: skip
def test_torchs_names_are_understood_and_torchs_memory_is_kept(name: str, expected: str) -> None:
    gpu = gpus.of_machine(GPU(name, (8, 9), 77.7, 2))
    assert gpu.memory_gib == 77.7
    assert gpu.count == 1
    if expected:
        assert gpu.name == expected
        assert gpu.tflops is not None
    else:  # nothing is guessed
        assert gpu.name == name
        assert gpu.tflops is None


@pytest.mark.parametrize("gpu", [None, T4, GPU("NVIDIA L4", (8, 9), 22.0, 1)], ids=str)
def test_a_price_that_is_not_known_is_not_invented(gpu: GPU | None) -> None:
    assert not any(gpus.hourly_price(gpu))


def test_prices_are_for_all_gpus_of_a_machine() -> None:
    two = gpus.hourly_price(replace(RTX, count=2))
    assert two.yuan == pytest.approx(2 * gpus.find("4090").yuan)


@pytest.mark.parametrize("gpu", gpus.every(), ids=lambda gpu: gpu.name)
def test_every_price_says_where_and_when_it_was_seen(gpu: gpus.GPUSpec) -> None:
    if gpu.yuan is None and gpu.dollars is None:
        assert gpu.price_from == "unknown"
    else:
        assert gpu.price_from != "unknown"
    if gpu.yuan or gpu.dollars:
        assert re.search(r"\d{4}-\d{2}", gpu.price_from)


def model_folder(folder: Path, **changes: object) -> str:
    """A folder with the config.json of the tiny model; what is changed to None is left out."""
    config = json.loads((files.TINY_MODEL / "config.json").read_text(encoding="utf-8"))
    config |= changes
    config = {name: value for name, value in config.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_shapes_are_found_by_name_hub_id_and_folder(tmp_path: Path) -> None:
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == SEVEN
    assert find_shape("qwen2.5-7b") == SEVEN
    tiny = find_shape("tiny")
    assert tiny.layers == 6
    assert tiny.hidden == 256
    assert tiny.head_dim == 64
    assert tiny.tied
    from_folder = find_shape(model_folder(tmp_path / "mine"))
    assert from_folder.model_copy(update={"name": "tiny"}) == tiny


def test_a_model_that_is_neither_known_nor_downloaded_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused("is not known (not a course model,", "Qwen2.5-7B"):
        find_shape("some/model")


@pytest.mark.parametrize("name", models.known_models())
def test_the_size_of_a_model_is_the_one_its_shape_has(name: str) -> None:
    model = models.known_models()[name]
    assert model.name == name
    assert model.stored_params / 1e9 == pytest.approx(model.billions, rel=0.01)


HYBRID = {  # Qwen3.5-9B in small
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 3072,
    "tie_word_embeddings": True,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16}


def test_layers_of_a_kind_for_too_few_layers_give_no_shape() -> None:
    config = text_config(find_shape("Qwen3.5-4B")) | {"layer_types": ["full_attention"]}
    with pytest.raises(ValueError, match="layer_types"):
        models.shape_in("mine", config)


def test_only_the_speeds_of_other_gpus_are_said_to_be_unmeasured() -> None:
    notes = {name: plan.of_options(gpus.find(name), {}).notes for name in ("H200", "T4")}
    assert not any("H200" in note for note in notes["H200"])
    assert any("H200" in note for note in notes["T4"])


def test_rows_that_lesson_03_would_leave_out_are_told() -> None:
    def says_so(**options: int) -> bool:
        return any("leaves out" in note for note in plan.of_options(gpus.find("T4"), {"rows": 500} | options).notes)

    assert says_so(mean_length=3500)
    assert says_so(mean_length=3500, length=2048)
    assert not says_so(mean_length=3500, length=4096)
    assert not says_so(mean_length=1024), "as long as the profile allows"
    assert not says_so()


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_no_dtype_gives_an_old_gpu_the_kernels_of_hybrid_models(dtype: str) -> None:
    options = {"model": "Qwen3.5-4B", "given": f"from_pretrained.dtype={dtype}"}
    forecast = plan.of_options(gpus.find("T4"), options)
    assert forecast.tokens_per_second is None
    assert forecast.columns()["tokens/s"] == "without kernels"


def test_several_gpus_cost_their_price_each() -> None:
    text = plan.describe(plan.of_options(gpus.find("RTX 4090"), {"gpus": 4}))
    assert str(gpus.find("RTX 4090").price.times(4)) in text


def text_config(shape: models.Shape) -> dict[str, Any]:
    """The part of a config.json that a hybrid shape was read from."""
    linear = shape.linear_attention
    assert linear
    sizes = linear.model_dump(exclude={"layers"})
    return {f"linear_{name}": value for name, value in sizes.items()} | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }


@pytest.mark.parametrize(
    "text",
    [HYBRID, HYBRID | {"tie_word_embeddings": False}, text_config(find_shape("Qwen3.5-9B"))],
    ids=["tied", "untied", "9B"],
)
def test_a_hybrid_shape_has_the_parameters_that_transformers_builds(text: dict, tmp_path: Path) -> None:
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=text["tie_word_embeddings"])
    config.save_pretrained(tmp_path)  # as the hub has it: the text model's sizes are below text_config

    shape = find_shape(str(tmp_path))

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.params == model.num_parameters()
    assert shape.softmax_layers == config.text_config.layer_types.count("full_attention")
    quantized = [part for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"]
    assert shape.linear_params == sum(part.weight.numel() for part in quantized)


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.6-27B"])
def test_what_a_checkpoint_has_beside_the_text_model_is_counted(name: str) -> None:
    shape = find_shape(name)
    towers = {"Qwen3.5-0.8B": (12, 768, 12, 3072), "Qwen3.6-27B": (27, 1152, 16, 4304)}
    depth, hidden, heads, intermediate = towers[name]
    config = Qwen3_5VisionConfig(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=intermediate,
        out_hidden_size=shape.hidden,
        num_position_embeddings=2304,
        patch_size=16,
    )
    one_layer = Qwen3_5TextConfig(**text_config(shape) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    with torch.device("meta"):
        vision = Qwen3_5VisionModel(config)
        layer = Qwen3_5DecoderLayer(one_layer, 0)
    stored = [*vision.parameters(), *layer.parameters()]
    mapped = 2 * shape.hidden**2 + 3 * shape.hidden  # of mtp: a map from two states to one, and norms
    assert shape.other_params == sum(weight.numel() for weight in stored) + mapped


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"num_hidden_layers": 10**300},
        {"vocab_size": "many"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_without_sizes_or_of_another_architecture_is_refused(tmp_path: Path, changes: dict) -> None:
    folder = model_folder(tmp_path / "mine", **changes)
    with refused("The shape of"):
        find_shape(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 64},
        {"text_config": {"num_experts": 64, "hidden_size": 2048, "num_hidden_layers": 40}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": HYBRID | {"model_type": "qwen3_next"}},
    ],
    ids=["experts", "experts that see", "fp8", "unknown hybrid"],
)
def test_a_config_of_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, changes: dict) -> None:
    with refused("cannot be trained by this course", "Set MODEL to "):
        find_shape(model_folder(tmp_path / "mine", **changes))


@pytest.mark.parametrize("model_type", ["lfm2", "falcon_h1", "bamba", "nemotron_h", "olmo_hybrid", "recurrent_gemma"])
def test_layers_that_the_course_does_not_know_are_refused(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    dense = {name: value for name, value in config.items() if "expert" not in name}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with refused("cannot be trained by this course", "Set MODEL to "):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "gemma3"])
def test_gemma_shares_its_embedding_where_the_config_does_not_say(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    sizes = config.get("text_config", config)
    config.pop("tie_word_embeddings", None)
    sizes.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(str(tmp_path)).tied
    assert not find_shape(model_folder(tmp_path, tie_word_embeddings=None)).tied


@pytest.mark.parametrize("gpu", ["T4", "V100"])
def test_a_hybrid_model_on_a_gpu_without_its_kernels_gets_no_times(gpu: str) -> None:
    """In the lessons it is trained there in float32, by transformers' own code, whose speed nobody has measured."""
    facts, text = plan.answer(gpu=gpu, model="Qwen3.5-0.8B", rows=1000, mean_length=300)
    assert facts["recipe"]["dtype"] == "float32"
    assert facts["tokens_per_second"] is facts["hours"] is None
    assert "Qwen3-4B-Instruct-2507" in text
    lesson = plan.require(profiles.fit(resolved("t4_16gb", "Qwen3.5-0.8B", T4), profiles.Rows(1000, 300, 300)))
    assert lesson.recipe.dtype == "float32"
    assert lesson.tokens_per_second is None


def test_without_kernels_a_hybrid_model_keeps_more_for_its_backward_pass() -> None:
    shape = find_shape("Qwen3.5-4B")
    recipe = Recipe(dtype="bfloat16", gradient_checkpointing=False)
    with_kernels = parts(shape, recipe)["activations"]
    without = parts(shape, replace(recipe, dtype="float32"))["activations"]
    assert without > 2.5 * with_kernels, "twice for float32 alone"


def test_zero3_is_not_planned_for_a_hybrid_model() -> None:
    with refused("ZeRO-3 cannot train a hybrid model like Qwen3.5-9B", "fsdp"):
        plan.answer(gpu="RTX 4090 x2", model="Qwen3.5-9B", engine="zero3")
    assert plan.answer(gpu="RTX 4090 x2", model="Qwen3-8B", engine="zero3")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Qwen3.5-35B-A3B", "Qwen3.5-27B"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3.5-9B"),
        ("LiquidAI/LFM2-1.2B", "Qwen3-1.7B"),
        ("unsloth/gpt-oss-20b", "Qwen3-14B"),
        ("Qwen/Qwen3.5-9B-FP8", "Qwen3.5-9B"),
        ("someone/anything-GPTQ-Int4", "the one without"),
    ],
)
def test_the_plan_names_the_nearest_model_to_one_that_cannot_be_trained(name: str, instead: str) -> None:
    with refused("cannot be trained by this course", f"Set MODEL to {instead}"):
        plan.answer(gpu="H200", model=name)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with refused("is missing or cannot be read"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("name", ["T4", "T4 x2", "RTX 3090", "H200"])
@pytest.mark.parametrize("batch", [8, 64])
def test_the_fastest_fits_with_the_margin_and_keeps_the_batch(name: str, batch: int) -> None:
    gpu = gpus.find(name)
    limit = gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB
    options = candidates(Recipe(length=1024), batch, gpu)

    best = best_option(SEVEN, options, gpu)

    assert peak_gib(SEVEN, best) <= limit
    rows_each = best.per_device_train_batch_size * best.gradient_accumulation_steps
    assert rows_each * gpu.count == batch
    fitting = [option for option in options if peak_gib(SEVEN, option) <= limit]
    fastest = max(rate(option, name) for option in fitting)
    assert rate(best, name) >= NEARLY_FASTEST * fastest


def test_without_a_known_speed_recomputing_is_the_last_resort() -> None:
    def best_with(vram: int) -> Recipe:
        gpu = gpus.find("mine", vram=vram)
        return best_option(SEVEN, candidates(Recipe(), 8, gpu), gpu)

    roomy = best_with(vram=200)
    assert roomy.per_device_train_batch_size == 8
    assert roomy.recompute == "off"
    assert best_with(vram=11).gradient_checkpointing


def test_a_batch_that_the_cards_cannot_share_is_refused() -> None:
    with refused("rows cannot be shared evenly by"):
        candidates(Recipe(), 8, gpus.find("H200 x3"))


@pytest.mark.parametrize("name", ["RTX 3080", "T4", "RTX 4090 D", "H20"])
def test_the_smallest_setting_needs_less_and_takes_longer_than_the_fastest(name: str) -> None:
    gpu = gpus.find(name)
    for model in models.known_models():
        tuning = plan.of_options(gpu, {"model": model, "rows": 10_000, "mean_length": 300})
        smallest = tuning.smallest
        assert peak_gib(tuning.shape, smallest) <= tuning.peak_gib, model
        slowest = tokens_per_second(tuning.shape, smallest, tuning.gpu) or 0.0  # not known without kernels
        assert slowest <= (tuning.tokens_per_second or 0.0), model
        if not tuning.fits:
            assert tuning.recipe == smallest, model


@pytest.mark.parametrize("name", ["RTX 3080", "T4", "RTX 4090 D", "H20"])
def test_a_batch_and_a_checkpointing_that_are_given_stay(name: str) -> None:
    tuning = plan.of_options(gpus.find(name), {"micro_batch": 2, "checkpointing": "on"})
    assert tuning.recipe.per_device_train_batch_size == 2
    assert tuning.recipe.recompute == "on"


def choosing_page(folder: str) -> str:
    """The page that `make lint` compares with configs."""
    return (ROOT / folder / "choosing.md").read_text(encoding="utf-8")


def blocks_of_gpus(page: str) -> dict[str, str]:
    """The block to unfold of each GPU, by the name of the GPU."""
    return dict(re.findall(r"(?s)<summary><b>(.+?)</b>(?:: |：)(.+?)</details>", page))


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_choosing_page_has_every_gpu_with_every_model(folder: str) -> None:
    page = choosing_page(folder)
    blocks = blocks_of_gpus(page)
    assert sorted(blocks) == sorted(gpu.name for gpu in gpus.every())
    overview = page.partition("<details>")[0]
    for model in models.known_models():
        row = f"\n| {model} |"
        assert row in overview
        for gpu, block in blocks.items():
            assert row in block, gpu


@pytest.mark.parametrize(("folder", "unknown"), [("docs", "price unknown"), ("docs/zh", "价格未知")])
def test_the_choosing_page_has_no_invented_price(folder: str, unknown: str) -> None:
    blocks = blocks_of_gpus(choosing_page(folder))
    for gpu in gpus.every():
        shows_price = bool(re.search(r"[¥$]\d", blocks[gpu.name]))
        has_price = bool(gpu.yuan or gpu.dollars)
        assert shows_price == has_price, gpu.name
        says_unknown = unknown in blocks[gpu.name]
        is_unknown = gpu.price_from == "unknown"
        assert says_unknown == is_unknown, gpu.name


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_choosing_page_has_every_platform_of_a_gpu(folder: str) -> None:
    page = choosing_page(folder)
    for gpu in gpus.every():
        for platform in gpu.platforms:
            assert platform in platforms.table(), gpu.name
            assert f"| `{platform}` |" in page, gpu.name


def test_the_page_shows_a_price_only_where_one_is_known(monkeypatch: Patch) -> None:
    table_by_platform = runpy.run_path(str(ROOT / ".ci/choosing.py"))["_by_platform"]
    free = gpus.GPUSpec(name="mine", memory_gib=24, tflops=100, bandwidth=900, capability=(8, 6), platforms=("runpod",))
    priced = free.model_copy(update={"price_from": "RunPod, 2026-01", "dollars": 9.0})
    monkeypatch.setattr(gpus, "every", lambda: [priced])
    assert "| `runpod` | mine $9.00 |" in table_by_platform()
    monkeypatch.setattr(gpus, "every", lambda: [free])
    assert "| `runpod` | mine |" in table_by_platform()


def test_lesson_03_is_stopped_where_memory_will_not_do() -> None:
    with refused("Qwen2.5-32B with ddp needs at least", "GiB on each T4, which allows"):
        plan.require(resolved("hopper_141gb", "Qwen2.5-32B", T4))


def test_lesson_03_shows_the_plan_of_what_fits() -> None:
    rows = recipe.Rows(1000, 300, 300)
    tuning = plan.require(profiles.fit(resolved("t4_16gb", "Qwen2.5-7B", T4), rows))
    assert tuning.fits
    assert tuning.hours is not None
    assert "T4" in plan.describe(tuning)


def test_a_plan_without_a_gpu_or_of_a_model_not_yet_downloaded_says_so() -> None:
    without_gpu = plan.require(resolved("tiny", "", None))
    assert "no GPU" in plan.describe(without_gpu)
    unknown_model = plan.require(resolved("t4_16gb", "some/model", T4))
    assert "not known before its download" in plan.describe(unknown_model)


def test_a_limit_of_steps_decides_the_hours() -> None:
    limited = resolved("t4_16gb", "Qwen2.5-7B", T4, max_steps=100)
    tuning = plan.require(profiles.fit(limited, recipe.Rows(10**6, 300, 300)))
    tokens_planned = tuning.hours * 3600 * tuning.tokens_per_second
    tokens_in_steps = 100 * tuning.batch * limited.profile.sft.max_length * PACKED
    assert tokens_planned == pytest.approx(tokens_in_steps, rel=1e-5)


@pytest.mark.parametrize("gpu", [None, RTX], ids=["a rented GPU", "RTX 4090"])
def test_the_example_shows_what_adds_up_its_price_and_how_far_to_trust_it(gpu: GPU | None) -> None:
    tuning = plan.example(resolved("auto", "", gpu), rows=10_000, mean_length=300)
    text = plan.describe(tuning)
    for part in tuning.parts:
        assert part in text
    assert "¥" in text
    assert "only the H200 was measured" in text
    assert sum(tuning.parts.values()) == pytest.approx(tuning.peak_gib)


def test_few_rows_get_many_small_steps() -> None:
    answer = planned("--gpu", "4090", "--model", "Qwen2.5-7B", "--rows", "84", "--mean-length", "109")
    assert answer["steps"] == 55
    assert answer["examples_per_step"] == 8.0
    assert answer["epochs"] == 5.0
    assert answer["learning_rate"] == 1.8e-4


def test_many_rows_are_packed_into_long_ones() -> None:
    answer = planned("--gpu", "H200", "--model", "Qwen2.5-7B", "--rows", "100000", "--mean-length", "265")
    assert answer["batch"] == 8
    assert answer["recipe"]["packing"] is True
    assert answer["recipe"]["length"] == 4096
    assert answer["learning_rate"] == 2.5e-4


def test_memory_and_cost_follow_from_their_parts() -> None:
    answer = planned("--gpu", "4090", "--rows", "10000", "--mean-length", "264")
    assert answer["peak_vram_gib"] == pytest.approx(sum(answer["parts"].values()), abs=0.02)
    assert answer["cost"]["yuan"] == pytest.approx(answer["hours"] * gpus.find("4090").yuan, abs=0.02)


@pytest.mark.parametrize(("examples", "mean"), [(50, 100), (2000, 300), (1000, 700), (1000, 900), (50_000, 300)])
def test_one_two_and_four_processes_take_the_same_batch_and_others_one_they_can_share(examples: int, mean: int) -> None:
    profile = profiles.load("ampere_24gb")
    rows = recipe.Rows(examples, mean, mean)

    def rows_per_step(processes: int) -> int:
        choices = recipe.choose(profile, rows, SEVEN, processes)
        settled = recipe.apply(profile, choices)
        return recipe.rows_per_step(settled.sft, processes)

    assert rows_per_step(1) == rows_per_step(2) == rows_per_step(4)
    for processes in (1, 2, 3, 4, 6, 8):
        assert rows_per_step(processes) % processes == 0


def test_every_option_is_heard() -> None:
    words = "--micro-batch 4 --length 512 --checkpointing offload --rank 64 --method lora --gpus 2 --epochs 2"
    answer = planned("--model", "Qwen3-4B", "--gpu", "A6000", *words.split())
    planned_recipe = answer["recipe"]
    assert planned_recipe["per_device_train_batch_size"] == 4
    assert planned_recipe["length"] == 512
    assert planned_recipe["activation_offloading"] is True
    assert planned_recipe["r"] == 64
    assert planned_recipe["method"] == "lora"
    assert answer["gpus"] == 2
    assert answer["batch"] % 8 == 0, "4 rows on each of 2 GPUs"


def test_a_micro_batch_becomes_the_largest_that_divides_a_step_as_in_a_training() -> None:
    answer = planned("--gpu", "4090", "--micro-batch", "3")
    assert answer["recipe"]["per_device_train_batch_size"] == 2, "of a step of 8 rows"


def test_set_is_heard_and_an_option_wins_over_it() -> None:
    words = ("--gpu", "A6000", *ROWS)
    both_set = planned(*words, "--set", "lora.r=64, sft.per_device_train_batch_size=2")["recipe"]
    assert both_set["per_device_train_batch_size"] == 2
    assert planned(*words, "--set", "lora.r=64", "--rank", "8")["recipe"]["r"] == 8
    few_steps = planned(*words, "--set", "sft.max_steps=10")
    many_steps = planned(*words, "--set", "sft.max_steps=1000")
    assert few_steps["hours"] < many_steps["hours"]


def test_a_profile_can_be_named() -> None:
    of_profile = planned("--profile", "paper_r64", "--gpu", "4090", *ROWS)["recipe"]
    assert of_profile["r"] == 64
    assert of_profile["lora_dropout"]
    assert not of_profile["packing"]


def test_the_rows_that_a_profile_names_count() -> None:
    words = ("--profile", "lora_20k", "--gpu", "4090", "--mean-length", "300")
    hours = planned(*words)["hours"]
    assert hours > 0
    assert hours == planned(*words, "--rows", "20000")["hours"]


def test_activations_may_be_offloaded_under_every_engine() -> None:
    words = ("--model", "Qwen2.5-7B", "--gpu", "4090", "--gpus", "2", "--set", "sft.activation_offloading=true")
    assert planned(*words, "--engine", "fsdp_qlora")["recipe"]["activation_offloading"] is True


UNKNOWN_GPU = ("--model", "Qwen2.5-7B", "--gpu", "B300", "--vram", "260", "--rows", "10", "--mean-length", "10")


def test_what_is_not_known_of_a_gpu_is_none() -> None:
    answer = planned(*UNKNOWN_GPU)
    assert answer["fits"]
    assert answer["tokens_per_second"] is None
    assert answer["hours"] is None
    assert answer["cost"] == {"yuan": None, "dollars": None}
    assert any("--tflops" in note for note in answer["notes"])


def test_the_capability_of_a_gpu_decides_the_dtype() -> None:
    assert planned(*UNKNOWN_GPU, "--capability", "7.5")["recipe"]["dtype"] == "float16"


def test_what_is_free_costs_nothing_also_where_the_hours_are_not_known() -> None:
    answer = planned("--model", "Qwen2.5-0.5B", "--gpu", "T4")
    assert answer["hours"] is None
    assert answer["steps"] is None
    assert set(answer["cost"].values()) == {0}
    assert answer["recipe"]["method"] == "lora", "below a billion parameters 4 bits lose quality"


def test_without_a_gpu_the_table_of_all_is_shown(monkeypatch: Patch) -> None:
    monkeypatch.setattr("nbutils.hardware.driver_gpus", list)
    names = [gpu.name for gpu in gpus.every()]
    assert "--rows 5000" in CliRunner().invoke(app, ["plan"]).output, "how to learn the hours"
    shown = [row["GPU"] for row in plan.fits_table(names)]
    assert shown == names
    rows = planned()["fits"]
    assert [row["gpu"] for row in rows] == names
    assert all(row["fits"] for row in rows), "auto takes what fits"
    pairs = planned("--model", "Qwen3-8B", "--gpus", "2")["fits"]
    assert [row["gpus"] for row in pairs] == [2] * len(names)


def test_with_rows_the_table_has_the_time() -> None:
    [row] = plan.fits_table(["4090"], rows=1000, mean_length=300)
    assert row["GPU"] == "RTX 4090"
    assert row["time"].endswith(" min")


def test_the_plan_is_for_one_gpu_of_this_machine(monkeypatch: Patch) -> None:
    monkeypatch.setattr("nbutils.hardware.driver_gpus", lambda: ["Tesla T4"])
    monkeypatch.setattr("nbutils.hardware.gpu", lambda: replace(T4, count=2))
    answer = planned("--model", "Qwen2.5-3B")
    assert answer["gpu"] == "T4"
    assert answer["gpus"] == 1
    assert answer["recipe"]["dtype"] == "float16"


# The weights of the 72B, from its config.json: 80 layers, hidden 8192, intermediate 29568, vocabulary 152064.
LINEAR_72B = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29568)
OTHERS_72B = 8192 * (2 * 152064 + 161)
ADAPTERS_72B = 80 * 16 * (2 * 16384 + 2 * 9216 + 3 * 37760)  # of rank 16
HEAD_72B = 152064 * 8192 * 2  # bytes


def bytes_on_a_card(recipe: Recipe) -> dict[str, float]:
    """What a training of the 72B puts on each card, in bytes."""
    return {name: size * files.GIB for name, size in parts(SEVENTY, recipe).items()}


def test_ddp_divides_nothing() -> None:
    alone = parts(SEVENTY, Recipe(gradient_accumulation_steps=2))
    assert list(alone) == ["weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspace"]
    assert parts(SEVENTY, Recipe(gradient_accumulation_steps=2, cards=8)) == alone


def test_fsdp_qlora_divides_weights_adapters_and_optimizer_by_the_cards() -> None:
    alone = bytes_on_a_card(Recipe(gradient_accumulation_steps=2))
    scales = LINEAR_72B * (1 / 64 + 4 / (64 * 256))
    sharded = bytes_on_a_card(Recipe(gradient_accumulation_steps=2, engine="fsdp_qlora", cards=4))
    expected = {
        "weights": (LINEAR_72B / 2 + OTHERS_72B * 2) / 4 + scales,
        "gathered": 2 * HEAD_72B,  # two layers are smaller than the head
        "adapters": ADAPTERS_72B * 4 / 4,
        "gradients": ADAPTERS_72B * 4,
        "optimizer": ADAPTERS_72B * 8 / 4,
        "activations": alone["activations"],
        "logits": alone["logits"],
        "workspace": alone["workspace"],
    }
    assert sharded == pytest.approx(expected)


def test_fsdp_lora_gathers_two_layers_and_the_head() -> None:
    sizes = bytes_on_a_card(Recipe("lora", engine="fsdp_lora", cards=4))
    a_layer = (LINEAR_72B * 2 + ADAPTERS_72B * 2) / 80
    assert sizes["gathered"] == pytest.approx(2 * a_layer + HEAD_72B)


def test_zero3_divides_the_weights_by_the_cards() -> None:
    sizes = bytes_on_a_card(Recipe("lora", engine="zero3", cards=8))
    assert sizes["weights"] == pytest.approx((LINEAR_72B + OTHERS_72B) * 2 / 8)


def test_zero2_divides_the_optimizer_alone_and_has_a_bucket() -> None:
    sizes = bytes_on_a_card(Recipe(engine="zero2", cards=8))
    assert sizes["optimizer"] == pytest.approx(ADAPTERS_72B * 8 / 8)
    assert sizes["weights"] == pytest.approx(bytes_on_a_card(Recipe())["weights"])
    assert sizes["bucket"] == pytest.approx(5e8 * 2)


def on_cards(cards: int, strategy: str) -> Recipe:
    """One row of 2,048 tokens at a time, eight in a step of all cards, with the base that the strategy is for."""
    method = STRATEGIES[strategy] or "qlora"
    return Recipe(method=method, engine=strategy, cards=cards, gradient_accumulation_steps=max(1, 8 // cards))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_cards_need_no_more_memory_each(strategy: str) -> None:
    sizes = [peak_gib(SEVENTY, on_cards(cards, strategy)) for cards in (2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    on_two, *_, on_sixteen = sizes
    less_than_half = on_sixteen < on_two / 2
    assert on_cards(2, strategy).shards == less_than_half


def test_72b_in_4_bits_fits_four_cards_of_24_gb_and_not_two() -> None:
    limit = limit_gib(gpus.find("4090"))
    assert peak_gib(SEVENTY, on_cards(2, "fsdp_qlora")) > limit
    assert peak_gib(SEVENTY, on_cards(4, "fsdp_qlora")) < limit


def test_72b_on_four_cards_fits_with_shards_and_not_with_ddp_which_is_the_default() -> None:
    words = ("--model", "Qwen2.5-72B", "--gpu", "4090", "--gpus", "4", *ROWS)
    sharded = planned(*words, "--engine", "fsdp_qlora")
    assert sharded["fits"] is True
    assert sharded["recipe"]["engine"] == "fsdp_qlora"
    ddp = planned(*words, "--engine", "ddp")
    assert ddp["fits"] is False
    assert planned(*words) == ddp


def engine_chosen(model: str, processes: int, method: str = "qlora") -> str:
    """The engine of a training on cards of 24 GB."""
    settled = resolved("ampere_24gb", model, RTX)
    with_method = replace(
        settled,
        as_written=settled.as_written.model_copy(update={"method": method}),
        profile=settled.profile.model_copy(update={"method": method}),
    )
    return plan.engine_for(with_method, processes).value


@pytest.mark.parametrize(
    ("model", "processes", "method", "engine"),
    [
        ("Qwen2.5-7B", 2, "qlora", "ddp"),
        ("Qwen2.5-72B", 4, "qlora", "fsdp_qlora"),
        ("Qwen2.5-7B", 2, "lora", "ddp"),
        ("Qwen2.5-14B", 2, "lora", "fsdp_lora"),
        # as many processes as cannot share a batch of 8
        ("Qwen2.5-7B", 3, "qlora", "ddp"),
        ("Qwen2.5-72B", 6, "qlora", "fsdp_qlora"),
    ],
)
def test_the_engine_is_ddp_where_a_gpu_holds_the_model_and_else_shards(
    model: str, processes: int, method: str, engine: str
) -> None:
    assert engine_chosen(model, processes, method) == engine


def test_a_model_that_does_not_fit_even_in_shards_is_refused() -> None:
    with refused("Qwen2.5-72B with fsdp_qlora needs", "GiB on each RTX 4090, which allows"):
        engine_chosen("Qwen2.5-72B", 2)


def test_only_a_model_that_one_gpu_holds_fits_alone() -> None:
    assert plan.fits_alone(resolved("ampere_24gb", "Qwen2.5-7B", RTX))
    assert not plan.fits_alone(resolved("ampere_24gb", "Qwen2.5-72B", RTX))


def test_an_engine_that_is_named_is_taken() -> None:
    assert plan.engine_for(resolved("ampere_24gb", "Qwen2.5-72B", RTX), 2, "zero2").value == "zero2"


@pytest.mark.parametrize("engine", ["fsdp_lora", "zero3"])
def test_an_engine_for_another_method_is_refused(engine: str) -> None:
    with refused(f"{engine} is for", "for method lora, and this", "has method qlora."):
        plan.engine_for(resolved("ampere_24gb", "Qwen2.5-72B", RTX), 2, engine)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with refused("ENGINE is 'fspd'."):
        plan.engine_for(resolved("tiny", "", None), 2, "fspd")


def test_the_engine_is_ddp_without_a_gpu_and_its_reason_says_if_the_model_is_not_known() -> None:
    assert plan.engine_for(resolved("tiny", "", None), 2).value == "ddp"
    unknown_model = resolved("ampere_24gb", "some/model", RTX)
    assert "not known" in plan.engine_for(unknown_model, 2).reason


def bytes_sent(strategy: str, cards: int, accumulation: int = 1) -> float:
    """What each card sends in a step of a training of the 7B."""
    method = STRATEGIES[strategy] or "qlora"
    shared = Recipe(method, gradient_accumulation_steps=accumulation, engine=strategy, cards=cards)
    return speed.sent_bytes(SEVEN, shared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_card_sends_nothing(strategy: str) -> None:
    assert bytes_sent(strategy, 1) == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_gradients_are_sent_once_a_step(strategy: str) -> None:
    gradients = ADAPTERS * 4
    assert bytes_sent(strategy, 4, accumulation=8) == pytest.approx(2 * 3 / 4 * gradients)


def test_without_accumulation_ddp_sends_as_much() -> None:
    assert bytes_sent("ddp", 4) == bytes_sent("ddp", 4, accumulation=8)


@pytest.mark.parametrize("strategy", ["fsdp_lora", "zero3"])
def test_weights_are_sent_twice_in_each_of_the_micro_steps(strategy: str) -> None:
    weights = 8 * 2 * SEVEN.params * 2
    gradients = 4 * ADAPTERS
    assert bytes_sent(strategy, 4, accumulation=8) == pytest.approx(3 / 4 * (weights + gradients))


def test_4_bits_are_sent_as_4_bits() -> None:
    assert bytes_sent("fsdp_qlora", 2) < bytes_sent("fsdp_lora", 2) / 2.5


CALCULATING = re.compile(r"figures\.bars|plan\.example|speed\.sent_bytes|efficiency\[|figures\.dots")


def lesson_06(compared: object = None, **machine: object) -> dict:
    """The names that the calculating cells of lesson 06 leave behind."""
    facts = {"gpu": None, "model": "Qwen2.5-7B", "resolved": resolved("tiny", "", None), "check": lambda *_: None}
    lesson = SimpleNamespace(**facts | machine)
    names = {"lesson": lesson, "compared": compared, "plan": plan, "exercises": exercises}
    source = (ROOT / "notebooks/06_scale_out.py").read_text(encoding="utf-8")
    for cell in source.split("# %%"):
        if CALCULATING.search(cell):
            exec(f"#{cell}", names)
    return names


def a_comparison(engine: str = "ddp", batch: int = 4) -> SimpleNamespace:
    """One process and two, as lesson 03 measured them."""
    settings = flat(profiles.load("ampere_24gb").model_dump())
    settings["method"] = "qlora"
    settings["from_pretrained.dtype"] = "bf16"
    settings["sft.per_device_train_batch_size"] = 1
    settings["quantization.bnb_4bit_use_double_quant"] = True
    alone = {
        "processes": 1,
        "engine": "",
        "steps": 20,
        "batch": 4,
        "train_seconds": 20.0,
        "tokens_per_second": 500.0,
        "settings": settings,
    }
    together = {
        "processes": 2,
        "engine": engine,
        "steps": 20,
        "batch": batch,
        "train_seconds": 12.0,
        "settings": settings,
    }
    return SimpleNamespace(alone=alone, together=together)


def test_lesson_06_predicts_the_step_of_the_comparison(capsys: Output) -> None:
    lesson_06(a_comparison())  # 161 MB of gradients at 12 GB/s
    text = capsys.readouterr().out
    assert "each of 2 processes computes 0.500 s and sends 0.013 s" in text
    assert "0.513 s predicted, 0.600 s measured" in text


def test_lesson_06_computes_twice_as_long_for_a_batch_twice_as_large(capsys: Output) -> None:
    lesson_06(a_comparison(batch=8))
    assert "computes 1.000 s" in capsys.readouterr().out


def test_lesson_06_sends_half_the_weights_twice_in_each_of_two_micro_steps(capsys: Output) -> None:
    lesson_06(a_comparison("fsdp_qlora"))
    [seconds, *_] = re.findall(r"sends ([\d.]+) s", capsys.readouterr().out)
    assert float(seconds) == pytest.approx((2 * 5.44 + 0.04) / 12, abs=0.005)


def test_without_a_gpu_lesson_06_calculates_for_a_rented_one() -> None:
    names = lesson_06()
    assert names["shape"].name == "Qwen3.5-9B"
    assert names["forecast"].gpu.name == "RTX 4090"
    assert lesson_06(a_comparison())["rate"] == names["rate"], "a CPU says nothing of a rented GPU"


def test_with_a_gpu_lesson_06_takes_what_was_measured_on_it() -> None:
    names = lesson_06(a_comparison(), gpu=RTX, resolved=resolved("ampere_24gb", "Qwen2.5-14B", RTX))
    assert names["rate"] == 500.0
    assert names["shape"].name == "Qwen2.5-14B"


def test_the_exercise_of_lesson_06_counts_the_bytes_sent_as_the_plan_does() -> None:
    adapter = SEVEN.adapter_params(16)
    assert exercises.sent_bytes(bytes_sent("ddp", 8), adapter, 8).right
    assert not exercises.sent_bytes(bytes_sent("ddp", 4), adapter, 8).right


def test_lesson_06_shows_speed_by_cards_and_an_exercise_that_can_be_answered(capsys: Output) -> None:
    names = lesson_06()
    text = capsys.readouterr().out
    assert re.search(r"ddp\nGPUs .*\n1 .* 0\.00 s", text)
    held = names["held"]
    assert (
        sum(held["FSDP, each of 4"].values()) < limit_gib(gpus.find("RTX 4090")) < sum(held["DDP, each of 4"].values())
    )
    efficiency = names["efficiency"]
    assert min(efficiency["ddp"].values()) > 0.9
    assert efficiency["fsdp_qlora"][4] > 0.5 > efficiency["fsdp_qlora"][8], "8 is the answer in the solution"
    assert names["speeds"]["fsdp_qlora"][16] < names["speeds"]["fsdp_qlora"][8], "and 16 are slower"


TABLE_ROW = re.compile(
    r"\| (Qwen2\.5-\w+) \| (?:(\d+) x )?(\d+) \| ([\d.]+) \(.*\) \| ([\d.]+) \(.*\) \| ([\d.]+) \(.*\) \|"
)


@pytest.mark.parametrize("page", ["docs/clusters.md", "docs/zh/clusters.md"])
def test_the_page_says_what_the_plan_says_of_many_cards(page: str) -> None:
    rows = TABLE_ROW.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(rows) == 15
    for model, machines, each, *peaks in rows:
        cards = int(machines or 1) * int(each)
        for engine, peak in zip(("ddp", "fsdp_qlora", "fsdp_lora"), peaks, strict=True):
            method = STRATEGIES[engine] or "qlora"
            recipe = Recipe(method, engine=engine, cards=cards, gradient_accumulation_steps=max(1, 8 // cards))
            assert peak_gib(find_shape(model), recipe) == pytest.approx(float(peak), abs=0.06)


@pytest.mark.parametrize(
    "words",
    ["--tflops 100", "--model no/such --gpu T4", "--gpu T4x3 --profile paper_r64"],
)
def test_what_cannot_be_planned_ends_with_what_to_do(words: str) -> None:
    ran = CliRunner().invoke(app, ["plan", *words.split()])
    assert ran.exit_code == 1
    assert "[FAIL]" in ran.output
    assert "To do:" in ran.output
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("words", ["--vram 11 --capability new", "--gpu T4 --vram inf"])
def test_values_that_cannot_be_meant_are_refused_as_usage(words: str) -> None:
    ran = CliRunner().invoke(app, ["plan", *words.split()])
    assert ran.exit_code == 2
    assert "Traceback" not in ran.output
