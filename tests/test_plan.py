"""plan: formulas recomputed against what was measured, GPUs, shapes, the fastest that fits, the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import refused

from nbutils import dashboard, models, paths, plan, platforms, profiles
from nbutils.cli import app
from nbutils.errors import CourseError
from nbutils.hardware import Card
from nbutils.plan import Recipe, estimate, forecast, gpus
from nbutils.plan.schedule import PACKED

MEASURED = json.loads(
    (Path(__file__).resolve().parent.parent / "benchmarks/results/plan_h200.json").read_text(encoding="utf-8")
)["runs"]
SEVEN = plan.find("Qwen2.5-7B")
T4 = Card("Tesla T4", (7, 5), 14.6, 1)


def peak(**changes: object) -> float:
    return estimate.peak_gib(SEVEN, replace(Recipe(micro_batch=2), **changes))


def rate(recipe: Recipe, gpu: str = "H200", count: int = 1) -> float:
    return estimate.tokens_per_second(SEVEN, recipe, gpus.find(gpu), count) or 0.0


def asked(*words: str) -> dict:
    ran = CliRunner().invoke(app, ["plan", "--json", *words])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


# ---- memory and speed


def test_the_forecast_is_within_6_percent_of_every_measured_peak_and_never_3_under() -> None:
    assert len(MEASURED) >= 8 and {"0.5B", "1.5B", "7B", "14B"} <= {one["model"].partition("-")[2] for one in MEASURED}
    for row in MEASURED:
        known = {key: row[key] for key in Recipe.__dataclass_fields__ if key in row}
        ratio = estimate.peak_gib(plan.find(row["model"]), Recipe(**known)) / row["measured_gib"]
        assert 0.97 <= ratio <= 1.06, (round(ratio, 3), row)


def test_the_forecast_of_speed_is_as_far_off_as_the_readme_says() -> None:
    gpu, off = gpus.find("H200"), []
    for row in MEASURED:
        known = {key: row[key] for key in Recipe.__dataclass_fields__ if key in row}
        speed = estimate.tokens_per_second(plan.find(row["model"]), Recipe(**known), gpu) / PACKED  # full rows
        off.append(abs(speed / row["tokens_per_second"] - 1))
    assert sum(one <= 0.2 for one in off) >= 34 and max(off) < 0.41


@pytest.mark.parametrize("way", ["off", "on", "offload"])
def test_more_rows_longer_rows_and_more_rank_need_more(way: str) -> None:
    for name, values in {"micro_batch": (1, 2, 4, 8), "length": (512, 1024, 2048), "rank": (8, 16, 64, 320)}.items():
        sizes = [peak(checkpointing=way, **{name: value}) for value in values]
        assert sizes == sorted(set(sizes)), name


def test_each_part_follows_from_its_cause() -> None:
    parts = estimate.parts(SEVEN, Recipe())
    assert list(parts) == ["weights", "adapters", "optimizer", "activations", "logits", "workspace"]
    four, sixteen = (estimate.weights(SEVEN, Recipe(method=method)) for method in ("qlora", "lora"))
    assert sixteen == 2 * SEVEN.params and estimate.weights(SEVEN, Recipe(double=False)) > four
    rest = 2 * (SEVEN.embedding_params + SEVEN.norm_params)
    assert four == pytest.approx(SEVEN.linear_params * 0.5159 + rest, rel=1e-4)
    small = estimate.parts(plan.find("Qwen2.5-0.5B"), Recipe(length=1024))
    assert small["logits"] > 0 == estimate.parts(SEVEN, Recipe(length=1024))["logits"]
    waiting = estimate.peak_gib(SEVEN, Recipe(accumulation=4)) - estimate.peak_gib(SEVEN, Recipe())
    assert waiting == pytest.approx(SEVEN.adapter_params(16) * 4 / 2**30), "gradients that are accumulated"
    for costly in (
        {"optimizer": "adamw_torch_fused"}, {"optimizer": "paged_adamw_32bit"}, {"attention": "sdpa"},
        {"liger": False}, {"spread": 500.0}, {"precision": "fp32"}, {"dropout": True}, {"checkpointing": "off"},
    ):  # fmt: skip
        assert peak(**costly) > peak() > peak(checkpointing="offload"), costly


def test_speed_knows_its_limits() -> None:
    rates = [rate(Recipe(micro_batch=size)) for size in (1, 2, 4, 8)]
    assert rates == sorted(rates)
    assert rates[-1] < gpus.find("H200").tflops * 1e12 / (6 * SEVEN.linear_params), "faster than arithmetic allows"
    assert rate(Recipe(checkpointing="off")) > rates[0] >= rate(Recipe(checkpointing="offload"))
    assert rates[0] < rate(Recipe(), count=2) < 2 * rates[0]
    loose = Recipe(packing=False, micro_batch=8)
    assert rates[-1] == pytest.approx(PACKED * rate(loose)) and rate(replace(loose, spread=900.0)) == rate(loose)
    assert estimate.tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24)) is None
    assert estimate.tokens_per_second(SEVEN, Recipe(), gpus.find("mine", vram=24, tflops=100)) > 0


# ---- GPUs


@pytest.mark.parametrize(
    ("name", "found", "count"),
    [
        ("4090", "RTX 4090", 1), ("NVIDIA GeForce RTX 4090", "RTX 4090", 1), ("t4 x2", "T4", 2), ("2xT4", "T4", 2),
        ("T4x2", "T4", 2), ("a100", "A100-40GB", 1), ("A100 80GB", "A100-80GB", 1), ("v100-32gb", "V100-32GB", 1),
        ("rtx pro 6000", "RTX PRO 6000", 1), ("RTX A6000", "A6000", 1), ("H100-80GB", "H100", 1),
    ],
)  # fmt: skip
def test_gpus_are_found_by_the_names_people_use(name: str, found: str, count: int) -> None:
    assert (gpus.find(name).name, gpus.find(name).count) == (found, count)


@pytest.mark.parametrize(
    ("card", "found"),
    [
        (Card("Tesla T4", (7, 5), 14.56, 2), "T4"),
        (Card("Tesla V100-SXM2-32GB", (7, 0), 31.7, 1), "V100-32GB"),
        (Card("NVIDIA A100-SXM4-80GB", (8, 0), 79.2, 1), "A100-80GB"),
        (Card("NVIDIA A10G", (8, 6), 22.1, 1), "A10"),
        (Card("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1), "RTX 4090"),
        (Card("NVIDIA GeForce RTX 4090 D", (8, 9), 23.6, 1), "RTX 4090 D"),
        (Card("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 15.7, 1), "NVIDIA GeForce RTX 4090 Laptop GPU"),
        (Card("Brand New 1", (8, 9), 44.4, 1), "Brand New 1"),
    ],
)
def test_torchs_names_are_understood_and_torchs_memory_is_kept(card: Card, found: str) -> None:
    facts = gpus.of_machine(card)
    assert (facts.name, facts.memory_gib, facts.count) == (found, card.memory_gib, 1)
    if found == card.name:  # not in the table: nothing is guessed
        assert (facts.tflops, facts.yuan) == (None, None) and card.name in facts.note


def test_prices_are_per_hour_and_for_all_gpus_and_say_where_they_are_from() -> None:
    for card in (None, T4, Card("NVIDIA L4", (8, 9), 22.0, 1)):
        assert gpus.hourly_price(card) is None
    price = gpus.hourly_price(Card("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 2))
    assert price.yuan == pytest.approx(2 * gpus.find("4090").yuan)
    for gpu in gpus.every():
        assert (gpu.yuan is not None or gpu.dollars is not None) == (gpu.price_from != "unknown"), gpu.name


def test_unknown_gpus_other_vendors_and_a_broken_table_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("plan.unknown_gpu", "--vram", "RTX 4090"):
        gpus.find("B300")
    for name in ("Ascend 910B", "AMD Instinct MI300X", "Radeon 7900"):
        with refused("plan.other_vendor"):
            gpus.find(name, vram=64, tflops=300)
    text = (paths.CONFIGS / "cards.yaml").read_text(encoding="utf-8")
    block = text[text.index("RTX 3090:") : text.index("RTX 4090:")]
    monkeypatch.setattr(paths, "CONFIGS", tmp_path)
    (tmp_path / "cards.yaml").write_text(text + block.replace("RTX 3090:", "3070:"), encoding="utf-8")
    assert gpus.find("3070").memory_gib == 23.6, "a name that YAML reads as a number"
    (tmp_path / "cards.yaml").write_text(text + block.replace("RTX 3090:", "X1:").replace("also: []", "also: [T4]"))
    with refused("config.problems", "X1.also: T4", count=1):
        gpus.find("T4")
    (tmp_path / "cards.yaml").write_text("T4:\n  memory_gib: much\n")
    with refused("config.problems", "T4.memory_gib: 'much'", "T4.tflops: missing"):
        gpus.listed()


# ---- shapes


def config(folder: Path, **changes: object) -> str:
    whole = json.loads((paths.TINY_MODEL / "config.json").read_text(encoding="utf-8")) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return str(folder)


def test_shapes_are_found_by_name_hub_id_and_folder(tmp_path: Path) -> None:
    assert plan.find("Qwen/Qwen2.5-7B-Instruct") == plan.find("qwen2.5-7b") == SEVEN
    tiny = plan.find("tiny")
    assert (tiny.layers, tiny.hidden, tiny.head_dim, tiny.tied) == (6, 256, 64, True)
    assert plan.find(config(tmp_path / "mine")).model_copy(update={"name": "tiny"}) == tiny
    new = ("num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size")
    old = {"num_layers": 6, "multi_query_group_num": 2, "ffn_hidden_size": 640, "padded_vocab_size": 3072}
    glm = plan.find(config(tmp_path / "glm", **(old | dict.fromkeys(new))))
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": json.loads((tmp_path / "mine/config.json").read_text())})
    )
    assert glm.params == plan.find(str(tmp_path)).params == tiny.params


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hidden_size": None, "intermediate_size": "many"}, "models.incomplete_config"),
        ({"num_hidden_layers": 10**300}, "models.incomplete_config"),
        ({"num_experts": 64}, "models.not_dense"),
        ({"kv_lora_rank": 5}, "models.not_dense"),
    ],
)
def test_a_config_without_sizes_or_of_another_architecture_is_refused(tmp_path: Path, changes: dict, code: str) -> None:
    with refused(code, *[key for key, value in changes.items() if key in ("hidden_size", "num_experts")]):
        plan.find(config(tmp_path / "mine", **changes))


@pytest.mark.parametrize("text", ["{", "null", "[1]", "NaN", '{"text_config": null}', '{"text_config": "x"}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(text)
    with refused("models.unreadable_config"):
        plan.find(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused("models.unknown_shape", "Qwen2.5-7B"):
        plan.find("some/model")


# ---- what fits


@pytest.mark.parametrize("gpu", ["T4", "T4 x2", "RTX 3090", "H200"])
@pytest.mark.parametrize("batch", [8, 64])
def test_the_fastest_fits_with_the_margin_and_keeps_the_batch(gpu: str, batch: int) -> None:
    card = gpus.find(gpu)
    start = Recipe(**estimate.for_card(card), length=1024)
    found = forecast.options(SEVEN, start, batch, card)
    best = forecast.best_option(found, card)
    limit = card.memory_gib * (1 - forecast.MARGIN) - forecast.CONTEXT_GIB
    assert best.peak_gib <= limit
    assert best.recipe.micro_batch * best.recipe.accumulation * card.count == batch
    fitting = [one.tokens_per_second for one in found if one.peak_gib <= limit]
    assert best.tokens_per_second >= forecast.NEARLY * max(fitting)


def test_without_a_known_speed_recomputing_is_the_last_resort() -> None:
    mine = [gpus.find("mine", vram=size) for size in (200, 11)]
    roomy, tight = (forecast.best_option(forecast.options(SEVEN, Recipe(), 8, gpu), gpu).recipe for gpu in mine)
    assert (roomy.micro_batch, roomy.checkpointing) == (8, "off") and tight.checkpointing != "off"
    with pytest.raises(CourseError):  # a batch that GPUs cannot share
        forecast.options(SEVEN, Recipe(), 8, gpus.find("H200 x3"))


def test_every_gpu_profile_is_tried_on_every_gpu() -> None:
    rows = plan.which_fits()
    assert {row["card"] for row in rows} == set(gpus.listed()) and len(rows) == 5 * len(gpus.listed())
    assert all(row["fits"] for row in rows if row["auto"]), "auto chooses a profile that does not fit"
    assert not next(row for row in rows if row["card"] == "T4" and row["profile"] == "hopper_141gb")["fits"]
    table = plan.fits_table()
    assert [row["card"] for row in table] == list(gpus.listed())
    assert max(map(len, dashboard.aligned(table).splitlines())) <= 140


def resolved(profile: str, model: str, card: Card | None, **replaced: int) -> profiles.Resolved:
    overrides = {f"train.{name}": (value, "test") for name, value in replaced.items()}
    local = platforms.Platform("local", "test")
    return profiles.resolve(
        profile, model, card=card, platform=local, online=lambda: True, overrides=lambda name: overrides
    )


def test_lesson_03_is_stopped_where_memory_will_not_do() -> None:
    with refused("plan.does_not_fit", "model Qwen", gpu="T4"):
        plan.require(resolved("hopper_141gb", "Qwen2.5-32B", T4))
    made = plan.require(resolved("t4_16gb", "Qwen2.5-7B", T4), rows=1000, mean_length=300)
    assert made.fits and made.hours is not None and "T4" in plan.describe(made)
    assert "no card" in plan.describe(plan.require(resolved("tiny", "", None)))
    assert "not known before its download" in plan.describe(plan.require(resolved("t4_16gb", "some/model", T4)))


def test_a_number_of_steps_decides_the_hours() -> None:
    short, long = (resolved("t4_16gb", "Qwen2.5-7B", T4, max_steps=steps) for steps in (100, 200))
    hours = [plan.require(one, rows=10**6, mean_length=300).hours for one in (short, long)]
    assert hours[1] == pytest.approx(2 * hours[0])
    train, speed = short.profile.train, plan.require(short).tokens_per_second
    assert hours[0] * 3600 * speed == pytest.approx(100 * train.batch * train.max_length * PACKED)


def test_a_forecast_shows_its_parts_and_the_formula_adds_up() -> None:
    for card in (None, Card("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 1)):  # without one, that of a rented one
        made = plan.example(resolved("auto", "", card), rows=10_000, mean_length=300)
        assert all(name in plan.describe(made) for name in (*made.parts, "¥", "only the H200 was measured"))
        sizes = [float(line.split()[1]) for line in plan.explain(plan.find(made.model), made).splitlines()]
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.04)


# ---- the command line


def test_the_rows_decide_the_step_and_the_cost_follows() -> None:
    few = asked("--gpu", "4090", "--rows", "84", "--mean-length", "109")
    assert (few["steps"], few["examples_per_step"], few["epochs"]) == (55, 8.0, 5.0)
    many = asked("--gpu", "H200", "--model", "Qwen2.5-7B", "--rows", "100000", "--mean-length", "265")
    assert (many["batch"], many["recipe"]["packing"], many["recipe"]["length"]) == (8, True, 4096)
    assert (few["learning_rate"], many["learning_rate"]) == (1.8e-4, 2.5e-4)
    assert asked("--gpu", "4090")["steps"] is None
    dear = asked("--gpu", "4090", "--rows", "10000", "--mean-length", "264")
    assert dear["peak_vram_gib"] == pytest.approx(sum(dear["parts"].values()), abs=0.02)
    assert dear["cost"]["yuan"] == pytest.approx(dear["hours"] * gpus.find("4090").yuan, abs=0.02)


def test_every_option_is_heard_and_wins_over_set() -> None:
    words = "--micro-batch 4 --length 512 --checkpointing offload --rank 64 --method lora --gpus 2 --epochs 2"
    answer = asked("--model", "Qwen3-4B", "--gpu", "A6000", *words.split())
    expected = {"micro_batch": 4, "length": 512, "checkpointing": "offload", "rank": 64, "method": "lora"}
    assert expected.items() <= answer["recipe"].items() and (answer["gpus"], answer["batch"] % 8) == (2, 0)
    words = ("--gpu", "A6000", "--rows", "1000", "--mean-length", "300")
    answer = asked(*words, "--set", "lora.rank=64, train.micro_batch=2, train.max_length=512, serve.max_model_len=1024")
    assert {"rank": 64, "micro_batch": 2, "length": 512}.items() <= answer["recipe"].items()
    assert asked(*words, "--set", "lora.rank=64", "--rank", "8")["recipe"]["rank"] == 8
    few, many = (asked(*words, "--set", f"train.max_steps={steps}")["hours"] for steps in (10, 1000))
    assert few < many


def test_a_profile_can_be_named_and_its_rows_count() -> None:
    answer = asked("--profile", "paper_r64", "--gpu", "4090", "--rows", "1000", "--mean-length", "300")
    assert answer["recipe"]["rank"] == 64 and answer["recipe"]["dropout"] and not answer["recipe"]["packing"]
    assert answer["batch"] == profiles.load("paper_r64").train.batch
    words = ("--profile", "lora_20k", "--gpu", "4090", "--mean-length", "300")
    assert asked(*words)["hours"] == asked(*words, "--rows", "20000")["hours"] > 0


def test_memory_alone_gives_memory_alone_and_what_is_free_costs_nothing() -> None:
    words = ("--model", "Qwen2.5-7B", "--gpu", "B300", "--vram", "260", "--rows", "10", "--mean-length", "10")
    answer = asked(*words)
    assert answer["fits"] and (answer["tokens_per_second"], answer["hours"]) == (None, None)
    assert answer["cost"] == {"yuan": None, "dollars": None} and any("--tflops" in note for note in answer["notes"])
    assert asked(*words, "--tflops", "2000")["tokens_per_second"] > 0
    assert asked(*words, "--capability", "7.5")["recipe"]["precision"] == "fp16"
    free = asked("--model", "Qwen2.5-7B", "--gpu", "T4")
    assert free["hours"] is None and set(free["cost"].values()) == {0}
    assert not any("cost unknown" in note for note in free["notes"])


def test_notes_say_what_was_chosen_and_left_out() -> None:
    small, large = (asked("--model", f"Qwen2.5-{size}B", "--gpu", "T4") for size in ("0.5", "3"))
    assert small["recipe"]["method"] == "lora" and any("billion parameters" in note for note in small["notes"])
    assert large["recipe"]["method"] == "qlora" and not any("billion parameters" in note for note in large["notes"])
    words = ("--model", "Qwen2.5-7B", "--gpu", "4090", "--rows", "100", "--epochs", "1")
    assert asked(*words, "--mean-length", "3000")["hours"] == asked(*words, "--mean-length", "2048")["hours"]
    assert (
        "of 3,000: raise train.max_length" in CliRunner().invoke(app, ["plan", *words, "--mean-length", "3000"]).output
    )


def test_without_a_gpu_the_table_of_all_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.hardware.driver_gpus", list)
    assert len(asked()["fits"]) == 5 * len(gpus.listed())
    every = asked("--model", "Qwen3-8B", "--gpus", "2", "--rows", "1000", "--mean-length", "300")["fits"]
    assert [one["gpu"] for one in every] == list(gpus.listed())
    assert all(one["hours"] > 0 and one["gpus"] == 2 for one in every)
    monkeypatch.setattr("nbutils.plan.asking._this_machine", lambda: Card("Tesla T4", (7, 5), 14.56, 2))
    answer = asked("--model", "Qwen2.5-3B")
    assert (answer["gpu"], answer["gpus"], answer["recipe"]["precision"]) == ("T4", 1, "fp16")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--gpu 4090 --micro-batch 3", 1), ("--tflops 100", 1), ("--gpu B300", 1), ("--model no/such --gpu T4", 1),
        ("--vram 11 --capability new", 1), ("--gpu 3xT4 --profile lora_20k", 1), ("--gpu T4 --vram inf", 2),
        ("--gpu T4 --tflops nan", 2), ("--gpu T4 --rows 9 --epochs -1", 2), ("--gpu T4 --mean-length 1e400", 2),
    ],
)  # fmt: skip
def test_mistakes_end_with_a_plain_message(words: str, status: int) -> None:
    ran = CliRunner().invoke(app, ["plan", *words.split()])
    assert ran.exit_code == status and "Traceback" not in ran.output
    assert status == 2 or ("[FAIL]" in ran.output and "To do:" in ran.output)


def test_the_list_of_models_gives_the_shapes() -> None:
    assert len(models.known_models()) == 14
    for name, model in models.known_models().items():
        assert model.name == name and model.params / 1e9 == pytest.approx(model.billions, rel=0.01), name
