"""plan: formulas recomputed against what was measured, GPUs, shapes, the fastest that fits, the command line."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support import ROOT, refused

from nbutils import display, distributed, files, models, plan, platforms, profiles
from nbutils.cli import app
from nbutils.config import flat
from nbutils.distributed import STRATEGIES
from nbutils.hardware import GPU
from nbutils.models import find_shape
from nbutils.plan import forecast, gpus, recipe, speed, table_recipe
from nbutils.plan.forecast import NEARLY_FASTEST, best_option, candidates
from nbutils.plan.memory import CONTEXT_GIB, MARGIN, Recipe, limit_gib, parts, peak_gib
from nbutils.plan.recipe import PACKED
from nbutils.plan.speed import tokens_per_second

Patch = pytest.MonkeyPatch
MEASURED = json.loads((ROOT / "benchmarks/results/plan_h200.json").read_text(encoding="utf-8"))["runs"]
SEVEN, SEVENTY = find_shape("Qwen2.5-7B"), find_shape("Qwen2.5-72B")
ADAPTERS = 28 * 16 * (2 * 7168 + 2 * (3584 + 512) + 3 * (3584 + 18944))  # weights, rank 16 on the 7B
ROWS = ("--rows", "1000", "--mean-length", "300")
T4 = GPU("Tesla T4", (7, 5), 14.6, 1)
RTX = GPU("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1)


def peak(**changes: object) -> float:
    return peak_gib(SEVEN, replace(Recipe(per_device_train_batch_size=2), **changes))


def rate(recipe: Recipe, gpu: str = "H200") -> float:
    return tokens_per_second(SEVEN, recipe, gpus.find(gpu)) or 0.0


def asked(*words: str) -> dict:
    ran = CliRunner().invoke(app, ["plan", "--json", *words])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


def test_the_forecast_is_as_close_to_every_measurement_as_promised() -> None:
    gpu, off = gpus.find("H200"), []
    assert {"0.5B", "1.5B", "7B", "14B"} <= {row["model"].partition("-")[2] for row in MEASURED}
    for row in MEASURED:
        recipe = Recipe(**{key: row[key] for key in Recipe.__dataclass_fields__ if key in row})
        ratio = peak_gib(find_shape(row["model"]), recipe) / row["measured_gib"]
        assert 0.97 <= ratio <= 1.06, (round(ratio, 3), row)
        speed = tokens_per_second(find_shape(row["model"]), recipe, gpu) / PACKED  # full rows
        off.append(abs(speed / row["tokens_per_second"] - 1))
    assert sum(share <= 0.2 for share in off) >= 34 and max(off) < 0.41


@pytest.mark.parametrize(
    "costly",
    [{"optim": "adamw_torch_fused"}, {"attn_implementation": "sdpa"}, {"use_liger_kernel": False}, {"spread": 500.0},
     {"bnb_4bit_use_double_quant": False}, {"dtype": "float32"}, {"lora_dropout": 0.05},
     {"gradient_checkpointing": False}, {"method": "lora"}, {"gradient_accumulation_steps": 4}],
    ids=str,
)  # fmt: skip
def test_what_costs_memory_is_counted(costly: dict[str, object]) -> None:
    assert peak(**costly) > peak() > peak(activation_offloading=True)
    sizes = {"per_device_train_batch_size": (1, 2, 4, 8), "length": (512, 1024, 2048), "r": (8, 16, 64, 320)}
    for name, values in sizes.items():
        for recompute, offload in forecast.RECOMPUTE_MODES.values():
            way = {"gradient_checkpointing": recompute, "activation_offloading": offload}
            peaks = [peak(**costly | way | {name: value}) for value in values]
            assert peaks == sorted(set(peaks)), name


def test_speed_knows_its_limits() -> None:
    rates = [rate(Recipe(per_device_train_batch_size=size)) for size in (1, 2, 4, 8)]
    assert rates == sorted(rates)
    assert rates[-1] < gpus.find("H200").tflops * 1e12 / (6 * SEVEN.linear_params), "faster than arithmetic allows"
    assert rate(Recipe(gradient_checkpointing=False)) > rates[0] >= rate(Recipe(activation_offloading=True))
    assert rates[0] < rate(Recipe(cards=2), "H200 x2") < 2 * rates[0]
    assert tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24)) is None
    assert tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24, tflops=100)) > 0


@pytest.mark.parametrize(
    ("name", "expected", "count"),
    [("4090", "RTX 4090", 1), ("NVIDIA GeForce RTX 4090", "RTX 4090", 1), ("t4 x2", "T4", 2), ("T4x2", "T4", 2),
     ("a100", "A100-40GB", 1), ("A100 80GB", "A100-80GB", 1), ("rtx pro 6000", "RTX PRO 6000", 1),
     ("3080", "RTX 3080", 1), ("3080 20G", "RTX 3080-20GB", 1), ("3080Ti", "RTX 3080 Ti", 1), ("A800", "A100-80GB", 1)],
)  # fmt: skip
def test_gpus_are_found_by_the_names_people_use(name: str, expected: str, count: int) -> None:
    assert (gpus.find(name).name, gpus.find(name).count) == (expected, count)
    with refused("is not in configs/gpus.yaml, so its memory is not", "--vram", "RTX 4090"):
        gpus.find("B300")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Tesla T4", "T4"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A10G", "A10"), (RTX.name, "RTX 4090"),
     (f"{RTX.name} D", "RTX 4090 D"), ("NVIDIA GeForce RTX 3080", "RTX 3080-20GB"), ("NVIDIA H800", "H100"),
     (f"{RTX.name} Laptop GPU", ""), ("Brand New 1", "")],
)  # fmt: skip
def test_torchs_names_are_understood_and_torchs_memory_is_kept(name: str, expected: str) -> None:
    facts = gpus.of_machine(GPU(name, (8, 9), 77.7, 2))
    assert (facts.name, facts.memory_gib, facts.count) == (expected or name, 77.7, 1)
    assert (facts.tflops is None) is (not expected), "nothing is guessed"


def test_prices_are_per_hour_and_for_all_gpus() -> None:
    for gpu in (None, T4, GPU("NVIDIA L4", (8, 9), 22.0, 1)):
        assert not any(gpus.hourly_price(gpu))
    assert gpus.hourly_price(replace(RTX, count=2)).yuan == pytest.approx(2 * gpus.find("4090").yuan)
    for gpu in gpus.every():
        assert (gpu.yuan is not None or gpu.dollars is not None) == (gpu.price_from != "unknown"), gpu.name


def config(folder: Path, **changes: object) -> str:
    whole = json.loads((files.TINY_MODEL / "config.json").read_text(encoding="utf-8")) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return str(folder)


def test_shapes_are_found_by_name_hub_id_and_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == find_shape("qwen2.5-7b") == SEVEN
    tiny = find_shape("tiny")
    assert (tiny.layers, tiny.hidden, tiny.head_dim, tiny.tied) == (6, 256, 64, True)
    assert find_shape(config(tmp_path / "mine")).model_copy(update={"name": "tiny"}) == tiny
    for name, model in models.known_models().items():
        assert model.name == name and model.params / 1e9 == pytest.approx(model.billions, rel=0.01), name
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused("is not known (not a course model,", "Qwen2.5-7B"):
        find_shape("some/model")


@pytest.mark.parametrize(
    "changes", [{"hidden_size": None}, {"num_hidden_layers": 10**300}, {"vocab_size": "many"}, {"num_experts": 64}]
)
def test_a_config_without_sizes_or_of_another_architecture_is_refused(tmp_path: Path, changes: dict) -> None:
    with refused("The shape of"):
        find_shape(config(tmp_path / "mine", **changes))
    (tmp_path / "mine/config.json").write_text("[1]")
    with refused("is missing or cannot be read"):
        find_shape(str(tmp_path / "mine"))


@pytest.mark.parametrize("name", ["T4", "T4 x2", "RTX 3090", "H200"])
@pytest.mark.parametrize("batch", [8, 64])
def test_the_fastest_fits_with_the_margin_and_keeps_the_batch(name: str, batch: int) -> None:
    gpu = gpus.find(name)
    options = candidates(Recipe(length=1024), batch, gpu)
    best = best_option(SEVEN, options, gpu)
    limit = gpu.memory_gib * (1 - MARGIN) - CONTEXT_GIB
    assert peak_gib(SEVEN, best) <= limit
    assert best.per_device_train_batch_size * best.gradient_accumulation_steps * gpu.count == batch
    fitting = [rate(option, name) for option in options if peak_gib(SEVEN, option) <= limit]
    assert rate(best, name) >= NEARLY_FASTEST * max(fitting)


def test_without_a_known_speed_recomputing_is_the_last_resort() -> None:
    mine = [gpus.find("mine", vram=size) for size in (200, 11)]
    roomy, tight = (best_option(SEVEN, candidates(Recipe(), 8, gpu), gpu) for gpu in mine)
    assert (roomy.per_device_train_batch_size, roomy.recompute) == (8, "off") and tight.gradient_checkpointing
    with refused("rows cannot be shared evenly by"):
        candidates(Recipe(), 8, gpus.find("H200 x3"))


@pytest.mark.parametrize("name", ["RTX 3080", "T4", "RTX 4090 D", "H20"])
def test_the_smallest_setting_needs_less_and_takes_longer_than_the_fastest(name: str) -> None:
    for model in models.known_models():
        tuning = plan.of_options(gpus.find(name), {"model": model, "rows": 10_000, "mean_length": 300})
        assert peak_gib(tuning.shape, tuning.smallest) <= tuning.peak_gib, model
        assert tokens_per_second(tuning.shape, tuning.smallest, tuning.gpu) <= tuning.tokens_per_second, model
        assert tuning.fits or tuning.recipe == tuning.smallest, "what does not fit is the smallest"
    fixed = plan.of_options(gpus.find(name), {"micro_batch": 2, "checkpointing": "on"}).recipe
    assert (fixed.per_device_train_batch_size, fixed.recompute) == (2, "on"), "what is given stays"


@pytest.mark.parametrize(("folder", "unknown"), [("docs", "price unknown"), ("docs/zh", "价格未知")])
def test_the_choosing_page_has_every_gpu_and_model_and_no_invented_price(folder: str, unknown: str) -> None:
    text = (ROOT / folder / "choosing.md").read_text(encoding="utf-8")  # `make lint` compares it with configs
    blocks = dict(re.findall(r"(?s)<summary><b>(.+?)</b>(?:: |：)(.+?)</details>", text))
    assert sorted(blocks) == sorted(gpu.name for gpu in gpus.every())
    for gpu in gpus.every():
        assert all(f"\n| {model} |" in blocks[gpu.name] for model in models.known_models()), gpu.name
        priced = re.search(r"[¥$]\d", blocks[gpu.name]) is not None
        assert priced == bool(gpu.yuan or gpu.dollars), gpu.name
        assert (unknown in blocks[gpu.name]) == (gpu.price_from == "unknown"), gpu.name
        assert set(gpu.platforms) <= set(platforms.table()), gpu.name
        assert all(f"| `{name}` |" in text for name in gpu.platforms), gpu.name
        assert not (gpu.yuan or gpu.dollars) or re.search(r"\d{4}-\d{2}", gpu.price_from), "a price has its date"
    assert all(f"\n| {model} |" in text.partition("<details>")[0] for model in models.known_models())


def test_the_page_follows_its_tables(monkeypatch: Patch) -> None:
    mine = gpus.GPUSpec(name="mine", memory_gib=24, tflops=100, bandwidth=900, capability=(8, 6), platforms=("runpod",))
    monkeypatch.setattr(
        gpus, "every", lambda: [mine.model_copy(update={"price_from": "RunPod, 2026-01", "dollars": 9.0})]
    )
    by_platform = runpy.run_path(str(ROOT / ".ci/choosing.py"))["_by_platform"]
    assert "| `runpod` | mine $9.00 |" in by_platform()
    monkeypatch.setattr(gpus, "every", lambda: [mine])
    assert "| `runpod` | mine |" in by_platform(), "a price that is not known is not shown"


def resolved(profile: str, model: str, gpu: GPU | None, **replaced: int) -> profiles.Resolved:
    overrides = {f"sft.{name}": (value, "test") for name, value in replaced.items()}
    here = {"platform": platforms.Platform("local", "test"), "online": lambda: True}
    return profiles.resolve(profile, model, gpu=gpu, overrides=lambda name: overrides, **here)


def test_lesson_03_is_stopped_where_memory_will_not_do_and_shows_what_adds_up() -> None:
    with refused("Qwen2.5-32B with ddp needs at least", "GiB on each T4, which allows"):
        plan.require(resolved("hopper_141gb", "Qwen2.5-32B", T4))
    rows = recipe.Rows(1000, 300, 300)
    tuning = plan.require(profiles.fit(resolved("t4_16gb", "Qwen2.5-7B", T4), rows))
    assert tuning.fits and tuning.hours is not None and "T4" in plan.describe(tuning)
    assert "no GPU" in plan.describe(plan.require(resolved("tiny", "", None)))
    assert "not known before its download" in plan.describe(plan.require(resolved("t4_16gb", "some/model", T4)))
    short = resolved("t4_16gb", "Qwen2.5-7B", T4, max_steps=100)  # the steps decide the hours
    tuning = plan.require(profiles.fit(short, recipe.Rows(10**6, 300, 300)))
    tokens = 100 * tuning.batch * short.profile.sft.max_length * PACKED
    assert tuning.hours * 3600 * tuning.tokens_per_second == pytest.approx(tokens, rel=1e-5)
    for gpu in (None, RTX):  # without one, that of a rented one
        tuning = plan.example(resolved("auto", "", gpu), rows=10_000, mean_length=300)
        assert all(name in plan.describe(tuning) for name in (*tuning.parts, "¥", "only the H200 was measured"))
        assert sum(tuning.parts.values()) == pytest.approx(tuning.peak_gib)


def test_the_rows_decide_the_step_and_the_cost_follows() -> None:
    few = asked("--gpu", "4090", "--rows", "84", "--mean-length", "109")
    assert (few["steps"], few["examples_per_step"], few["epochs"]) == (55, 8.0, 5.0)
    many = asked("--gpu", "H200", "--model", "Qwen2.5-7B", "--rows", "100000", "--mean-length", "265")
    assert (many["batch"], many["recipe"]["packing"], many["recipe"]["length"]) == (8, True, 4096)
    assert (few["learning_rate"], many["learning_rate"]) == (1.8e-4, 2.5e-4)
    dear = asked("--gpu", "4090", "--rows", "10000", "--mean-length", "264")
    assert dear["peak_vram_gib"] == pytest.approx(sum(dear["parts"].values()), abs=0.02)
    assert dear["cost"]["yuan"] == pytest.approx(dear["hours"] * gpus.find("4090").yuan, abs=0.02)


@pytest.mark.parametrize(("examples", "mean"), [(50, 100), (2000, 300), (1000, 700), (1000, 900), (50_000, 300)])
def test_one_two_and_four_processes_take_the_same_batch_and_others_one_they_can_share(examples: int, mean: int) -> None:
    profile, rows = profiles.load("ampere_24gb"), recipe.Rows(examples, mean, mean)
    sizes = {}
    for count in (1, 2, 3, 4, 6, 8):
        settled = recipe.apply(profile, recipe.choose(profile, rows, SEVEN, count))
        sizes[count] = recipe.rows_per_step(settled.sft, count)
    assert sizes[1] == sizes[2] == sizes[4] and not any(size % count for count, size in sizes.items())


def test_every_option_is_heard_and_wins_over_set_and_a_profile_can_be_named() -> None:
    words = "--micro-batch 4 --length 512 --checkpointing offload --rank 64 --method lora --gpus 2 --epochs 2"
    answer = asked("--model", "Qwen3-4B", "--gpu", "A6000", *words.split())
    expected = {"per_device_train_batch_size": 4, "length": 512, "activation_offloading": True, "r": 64}
    assert answer["recipe"]["method"] == "lora"
    assert expected.items() <= answer["recipe"].items() and (answer["gpus"], answer["batch"] % 8) == (2, 0)
    words = ("--gpu", "A6000", *ROWS)
    three = asked("--gpu", "4090", "--micro-batch", "3")["recipe"]
    assert three["per_device_train_batch_size"] == 2, "the largest that divides a step of 8 rows, as in a training"
    two = asked(*words, "--set", "lora.r=64, sft.per_device_train_batch_size=2")["recipe"]
    assert two["per_device_train_batch_size"] == 2
    assert asked(*words, "--set", "lora.r=64", "--rank", "8")["recipe"]["r"] == 8
    few, many = (asked(*words, "--set", f"sft.max_steps={steps}")["hours"] for steps in (10, 1000))
    assert few < many
    answer = asked("--profile", "paper_r64", "--gpu", "4090", *ROWS)
    assert answer["recipe"]["r"] == 64 and answer["recipe"]["lora_dropout"] and not answer["recipe"]["packing"]
    words = ("--profile", "lora_20k", "--gpu", "4090", "--mean-length", "300")  # its rows count
    assert asked(*words)["hours"] == asked(*words, "--rows", "20000")["hours"] > 0


def test_activations_may_be_offloaded_under_every_engine() -> None:
    words = ("--model", "Qwen2.5-7B", "--gpu", "4090", "--gpus", "2", "--set", "sft.activation_offloading=true")
    assert asked(*words, "--engine", "fsdp_qlora")["recipe"]["activation_offloading"] is True


def test_what_is_not_known_is_none_and_what_is_free_costs_nothing() -> None:
    words = ("--model", "Qwen2.5-7B", "--gpu", "B300", "--vram", "260", "--rows", "10", "--mean-length", "10")
    answer = asked(*words)
    assert answer["fits"] and (answer["tokens_per_second"], answer["hours"]) == (None, None)
    assert answer["cost"] == {"yuan": None, "dollars": None} and any("--tflops" in note for note in answer["notes"])
    assert asked(*words, "--capability", "7.5")["recipe"]["dtype"] == "float16"
    free = asked("--model", "Qwen2.5-0.5B", "--gpu", "T4")
    assert free["hours"] is free["steps"] is None and set(free["cost"].values()) == {0}
    assert free["recipe"]["method"] == "lora", "below a billion parameters 4 bits lose quality"


def test_without_a_gpu_the_table_of_all_is_shown(monkeypatch: Patch) -> None:
    monkeypatch.setattr("nbutils.hardware.driver_gpus", list)
    assert "--rows 5000" in CliRunner().invoke(app, ["plan"]).output, "how to learn the hours"
    names = [gpu.name for gpu in gpus.every()]
    assert names == [row["GPU"] for row in plan.fits_table(names)]
    every = asked()["fits"]
    assert [row["gpu"] for row in every] == names and all(row["fits"] for row in every), "auto takes what fits"
    assert [row["gpus"] for row in asked("--model", "Qwen3-8B", "--gpus", "2")["fits"]] == [2] * len(names)
    [row] = plan.fits_table(["4090"], rows=1000, mean_length=300)
    assert row["GPU"] == "RTX 4090" and row["time"].endswith(" min")
    monkeypatch.setattr("nbutils.hardware.driver_gpus", lambda: ["Tesla T4"])
    monkeypatch.setattr("nbutils.hardware.gpu", lambda: replace(T4, count=2))
    answer = asked("--model", "Qwen2.5-3B")
    assert (answer["gpu"], answer["gpus"], answer["recipe"]["dtype"]) == ("T4", 1, "float16")


def test_ddp_divides_nothing_and_shards_are_divided_by_the_cards() -> None:
    whole = parts(SEVENTY, Recipe(gradient_accumulation_steps=2))
    assert list(whole) == ["weights", "adapters", "optimizer", "activations", "logits", "workspace"]
    assert parts(SEVENTY, Recipe(gradient_accumulation_steps=2, cards=8)) == whole
    linear = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29568)
    others, head = 8192 * (2 * 152064 + 161), 152064 * 8192 * 2
    adapters = 80 * 16 * (2 * 16384 + 2 * 9216 + 3 * 37760)
    scales = linear * (1 / 64 + 4 / (64 * 256))
    sizes = parts(SEVENTY, Recipe(gradient_accumulation_steps=2, engine="fsdp_qlora", cards=4))
    expected = {
        "weights": (linear / 2 + others * 2) / 4 + scales, "gathered": 2 * head,  # two layers are smaller than the head
        "adapters": adapters * 4 / 4 + adapters * 4, "optimizer": adapters * 8 / 4,
    }  # fmt: skip
    assert {name: size * files.GIB for name, size in sizes.items()} == pytest.approx(
        expected | {name: whole[name] * files.GIB for name in ("activations", "logits", "workspace")}
    )
    sizes = parts(SEVENTY, Recipe("lora", engine="fsdp_lora", cards=4))
    assert sizes["gathered"] * files.GIB == pytest.approx(2 * (linear * 2 + adapters * 2) / 80 + head)
    sizes = parts(SEVENTY, Recipe("lora", engine="zero3", cards=8))
    assert sizes["weights"] * files.GIB == pytest.approx((linear + others) * 2 / 8)
    sizes = parts(SEVENTY, Recipe(engine="zero2", cards=8))
    assert sizes["optimizer"] * files.GIB == pytest.approx(adapters * 8 / 8)
    assert sizes["weights"] == pytest.approx(whole["weights"]) and sizes["bucket"] * files.GIB == pytest.approx(5e8 * 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_cards_need_no_more_memory_each(strategy: str) -> None:
    sizes = [peak_gib(SEVENTY, table_recipe(strategy, cards)) for cards in (2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert table_recipe(strategy, 2).shards == (sizes[-1] < sizes[0] / 2)


def test_72b_in_4_bits_fits_four_cards_of_24_gb_and_not_two() -> None:
    limit = limit_gib(gpus.find("4090"))
    assert peak_gib(SEVENTY, table_recipe("fsdp_qlora", 2)) > limit > peak_gib(SEVENTY, table_recipe("fsdp_qlora", 4))
    words = ("--model", "Qwen2.5-72B", "--gpu", "4090", "--gpus", "4", *ROWS)
    shared, ddp = asked(*words, "--engine", "fsdp_qlora"), asked(*words)
    assert (shared["fits"], ddp["fits"], shared["recipe"]["engine"]) == (True, False, "fsdp_qlora")
    assert asked(*words, "--engine", "ddp") == ddp


def test_the_engine_is_ddp_where_a_gpu_holds_the_model_and_else_shards_where_they_fit() -> None:
    def chosen(model: str, processes: int, method: str = "qlora") -> str:
        settled = resolved("ampere_24gb", model, RTX)
        as_written, profile = (
            either.model_copy(update={"method": method}) for either in (settled.as_written, settled.profile)
        )
        return plan.engine_for(replace(settled, as_written=as_written, profile=profile), processes).value

    assert [chosen("Qwen2.5-7B", 2), chosen("Qwen2.5-72B", 4)] == ["ddp", "fsdp_qlora"]
    assert [chosen("Qwen2.5-7B", 2, "lora"), chosen("Qwen2.5-14B", 2, "lora")] == ["ddp", "fsdp_lora"]
    with refused("Qwen2.5-72B with fsdp_qlora needs", "GiB on each RTX 4090, which allows"):
        chosen("Qwen2.5-72B", 2)
    fitting = [plan.fits_alone(resolved("ampere_24gb", model, RTX)) for model in ("Qwen2.5-7B", "Qwen2.5-72B")]
    assert fitting == [True, False]
    assert [chosen("Qwen2.5-7B", 3), chosen("Qwen2.5-72B", 6)] == ["ddp", "fsdp_qlora"]  # they share no batch of 8
    assert plan.engine_for(resolved("ampere_24gb", "Qwen2.5-72B", RTX), 2, "zero2").value == "zero2"
    for engine in ("fsdp_lora", "zero3"):
        with refused(f"{engine} is for", "for method lora, and this", "has method qlora."):
            plan.engine_for(resolved("ampere_24gb", "Qwen2.5-72B", RTX), 2, engine)
    with refused("ENGINE is 'fspd'."):
        plan.engine_for(resolved("tiny", "", None), 2, "fspd")
    assert plan.engine_for(resolved("tiny", "", None), 2).value == "ddp"
    assert "not known" in plan.engine_for(resolved("ampere_24gb", "some/model", RTX), 2).reason


def test_what_is_sent_in_a_step_follows_from_strategy_and_cards() -> None:
    def sent(strategy: str, cards: int, accumulation: int = 1) -> float:
        method = distributed.STRATEGIES[strategy] or "qlora"
        cut = Recipe(method, gradient_accumulation_steps=accumulation, engine=strategy, cards=cards)
        return speed.sent_bytes(SEVEN, cut)

    assert [sent(strategy, 1) for strategy in STRATEGIES] == [0] * len(STRATEGIES)
    assert sent("ddp", 4, 8) == sent("ddp", 4) == pytest.approx(2 * 3 / 4 * ADAPTERS * 4)
    assert sent("zero2", 4, 8) == sent("ddp", 4, 8)
    expected = 8 * 2 * SEVEN.params * 2 + 4 * ADAPTERS
    assert sent("fsdp_lora", 4, 8) == sent("zero3", 4, 8) == pytest.approx(3 / 4 * expected)
    assert sent("fsdp_qlora", 2) < sent("fsdp_lora", 2) / 2.5, "4 bits are sent as 4 bits"


def lesson_06(compared: object = None, **machine: object) -> dict:
    """What the cells of lesson 06 that reckon leave behind."""
    lesson = SimpleNamespace(gpu=None, model="Qwen2.5-7B", resolved=resolved("tiny", "", None))
    lesson.__dict__.update(machine)
    names = {"lesson": lesson, "compared": compared, "plan": plan, "display": display}
    source = (ROOT / "notebooks/06_scale_out.py").read_text(encoding="utf-8")
    for cell in source.split("# %%"):
        if any(word in cell for word in ("table_recipe", "plan.example", "sent_bytes", "seconds(")):
            exec(cell, names)
    return names


def a_comparison(engine: str = "ddp", batch: int = 4) -> SimpleNamespace:
    """One process and two, as lesson 03 measured them."""
    settings = flat(profiles.load("ampere_24gb").model_dump()) | {"method": "qlora", "from_pretrained.dtype": "bf16"}
    settings |= {"sft.per_device_train_batch_size": 1, "quantization.bnb_4bit_use_double_quant": True}
    alone = {"processes": 1, "engine": "", "steps": 20, "batch": 4, "train_seconds": 20.0, "tokens_per_second": 500.0}
    together = {"processes": 2, "engine": engine, "steps": 20, "batch": batch, "train_seconds": 12.0}
    return SimpleNamespace(alone=alone | {"settings": settings}, together=together | {"settings": settings})


def test_lesson_06_holds_its_arithmetic_against_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    lesson_06(a_comparison())  # 161 MB of gradients at 12 GB/s
    text = capsys.readouterr().out
    assert "each of 2 processes computes 0.500 s and sends 0.013 s" in text
    assert "0.513 s predicted, 0.600 s measured" in text
    lesson_06(a_comparison(batch=8))
    assert "computes 1.000 s" in capsys.readouterr().out
    lesson_06(a_comparison("fsdp_qlora"))
    sent = float(re.findall(r"sends ([\d.]+) s", capsys.readouterr().out)[0])
    assert sent == pytest.approx((2 * 5.44 + 0.04) / 12, abs=0.005), (
        "half the weights, twice in each of two micro-steps"
    )


def test_the_arithmetic_of_lesson_06_is_that_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    cells = lesson_06()
    shape, whole = cells["shape"], cells["recipe"]
    assert (shape.name, cells["forecast"].gpu.name) == ("Qwen2.5-7B", "RTX 4090"), "without a GPU a rented one"
    for strategy in ("ddp", "fsdp_qlora"):
        for cards, times in ((1, 1), (2, 1), (8, 4)):
            cut = replace(whole, engine=strategy, cards=cards, gradient_accumulation_steps=times)
            assert cells["sent_bytes"](strategy, cards, times) == pytest.approx(speed.sent_bytes(shape, cut))
    text = capsys.readouterr().out
    assert "20.0 (24 GB)" in text and "(none)" in text, "a 72B on four cards, and in 16 bits on one"
    assert re.search(r"\d GiB  weights\n +weights 37\.34 / 4\n +scales 1\.04 / 1\n", text)
    assert re.search(r"ddp\ncards .*\n1 .* 100% ", text) and re.search(r"25gbe +2\.5 +– +– +2 +2\b", text)
    computing, sending = cells["seconds"]("ddp", 64, 8 / 64, 360)
    assert computing == cells["shortest"] > sending, "starting kernels takes its time"
    compared = a_comparison()
    assert lesson_06(compared)["rate"] == cells["rate"], "a CPU says nothing of a rented GPU"
    measured = lesson_06(compared, gpu=RTX, resolved=resolved("ampere_24gb", "Qwen2.5-14B", RTX))
    assert (measured["rate"], measured["shape"].name) == (500.0, "Qwen2.5-14B")


@pytest.mark.parametrize(
    ("words", "status"),
    [("--tflops 100", 1), ("--model no/such --gpu T4", 1), ("--vram 11 --capability new", 2),
     ("--gpu T4x3 --profile paper_r64", 1), ("--gpu T4 --vram inf", 2)],
)  # fmt: skip
def test_mistakes_end_with_a_plain_message(words: str, status: int) -> None:
    ran = CliRunner().invoke(app, ["plan", *words.split()])
    assert ran.exit_code == status and "Traceback" not in ran.output
    assert status == 2 or ("[FAIL]" in ran.output and "To do:" in ran.output)
