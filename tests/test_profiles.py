"""Profiles: every YAML of the course, every mistake by name, `auto`, fallbacks, overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nbutils import hardware, paths, profiles
from nbutils.errors import CourseError
from nbutils.hardware import Card
from nbutils.platforms import Platform
from nbutils.profiles import models, reading, recipe, schema

COURSE = {
    "tiny", "laptop", "t4_16gb", "ampere_24gb", "ampere_40gb", "hopper_80gb", "hopper_141gb",
    "lora_20k", "lora_50k", "lora_100k", "paper_r64", "pretrained_r320",
}  # fmt: skip
OTHER_FOLDERS = {"accelerate": "launcher files", "deepspeed": "engine files", "kaggle": "kernel metadata"}
KAGGLE = Platform("kaggle", "a test says so")
T4 = Card("Tesla T4", (7, 5), 14.7, 2)
P100 = Card("Tesla P100", (6, 0), 15.9, 1)
RTX = Card("RTX 4090", (8, 9), 23.6, 1)
H200 = Card("H200", (9, 0), 139.8, 1)


def never() -> bool:
    """An `online` that must not be asked."""
    raise AssertionError("the network was asked for nothing")


def no() -> bool:
    return False


def yes() -> bool:
    return True


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundled model, an empty hub cache, and a working folder of its own."""
    tiny = tmp_path / "tiny_base"
    tiny.mkdir()
    (tiny / "config.json").write_text("{}")
    monkeypatch.setattr(paths, "TINY_MODEL", tiny)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


Changes = dict[str, str]


def with_value(text: str, name: str, value: str) -> str:
    """A profile's text with the value of one dotted name replaced, its comment kept."""
    group, _, leaf = name.rpartition(".")
    begin = text.index(f"\n{group}:\n") if group else 0
    line = re.compile(rf"^({'  ' if group else ''}{leaf}: )\S.*?(?=  +#)", re.MULTILINE)
    found = line.search(text, begin + 1)
    assert found, name
    return f"{text[: found.start()]}{found.group(1)}{value}{text[found.end() :]}"


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., str]:
    """Writes a copy of the tiny profile with some values and words replaced, and returns its path."""

    def write(changes: Changes | None = None, words: Changes | None = None, extra: str = "") -> str:
        text = (paths.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
        for name, value in (changes or {}).items():
            text = with_value(text, name, value)
        for old, new in (words or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        file = tmp_path / "mine.yaml"
        file.write_text(text + extra, encoding="utf-8")
        return str(file)

    return write


def refused(name: str) -> str:
    with pytest.raises(CourseError) as caught:
        profiles.load(name)
    return str(caught.value)


# ---- the files


def course_yamls() -> list[Path]:
    """Every YAML below configs/ that is the course's own."""
    files = sorted(paths.CONFIGS.rglob("*.y*ml"))
    return [file for file in files if file.relative_to(paths.CONFIGS).parts[0] not in OTHER_FOLDERS]


def test_configs_hold_the_profiles_of_the_course_and_the_model_list() -> None:
    assert {file.stem for file in course_yamls()} - {"exports"} == COURSE | {"models", "cards", "serving"}
    assert set(profiles.names()) == COURSE


@pytest.mark.parametrize("name", sorted(COURSE))
def test_every_profile_loads_and_its_model_is_known(name: str) -> None:
    profile = profiles.load(name)
    assert profile.model in {"tiny", *profiles.known_models()}


@pytest.mark.parametrize("name", sorted(COURSE))
def test_every_value_line_has_a_reason_and_fits_the_page(name: str) -> None:
    document = reading.read(name)
    assert sorted(document.reasons) == sorted(schema.keys())
    assert all(len(line) <= 120 for line in document.file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("name", sorted(COURSE))
def test_every_header_says_needs_run_override(name: str) -> None:
    header = (paths.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\nabout:")[0]
    assert header.startswith(f"# {name}: ")
    assert all(f"\n# {word} " in header for word in ("Needs", "Run", "Override"))
    assert f"papermill notebooks/03_qlora.ipynb out.ipynb -p PROFILE {name}" in header


def test_the_data_experiments_differ_in_rows_only() -> None:
    trees = {rows: profiles.load(f"lora_{rows}k").model_dump() for rows in (20, 50, 100)}
    assert {rows: tree["data"].pop("rows") for rows, tree in trees.items()} == {20: 20_000, 50: 50_000, 100: 100_000}
    assert len({tree.pop("about") for tree in trees.values()}) == 3
    assert trees[20] == trees[50] == trees[100]
    assert trees[20]["method"] == "lora"


@pytest.mark.parametrize(("name", "rank"), [("paper_r64", 64), ("pretrained_r320", 320)])
def test_the_rank_experiments_keep_their_batch_and_steps(name: str, rank: int) -> None:
    profile = profiles.load(name)
    assert profile.lora.rank == rank
    assert profile.train.batch == 64
    assert (profile.data.rows, profile.train.epochs, profile.train.learning_rate) == (2500, 3.0, 3e-5)
    assert profile.train.save_steps == -(-profile.data.rows // 64)


def test_profiles_are_frozen() -> None:
    profile = profiles.load("tiny")
    with pytest.raises(ValueError, match="frozen"):
        profile.train.micro_batch = 9  # type: ignore[misc]


def test_reading_is_yaml_1_2(altered: Callable[..., str]) -> None:
    changes = {"machine.liger": "off", "train.learning_rate": "3E-4", "train.warmup_ratio": "0"}
    profile = profiles.load(altered(changes))
    assert (profile.machine.liger, profile.train.learning_rate, profile.train.warmup_ratio) == ("off", 3e-4, 0.0)


def test_a_list_of_modules_and_its_comment_are_read(altered: Callable[..., str]) -> None:
    document = reading.read(altered({"lora.target_modules": "[q_proj, 'v #proj']"}))
    assert document.profile.lora.target_modules == ["q_proj", "v #proj"]
    assert document.reasons["lora.target_modules"] == reading.read("tiny").reasons["lora.target_modules"]
    block = altered({"lora.target_modules": " # both\n    - q_proj\n    - v_proj"})
    assert reading.read(block).reasons["lora.target_modules"] == "both"


# ---- the mistakes


def test_all_mistakes_are_told_at_once_by_name(altered: Callable[..., str]) -> None:
    wrong = {
        "lora.rank": '"16"', "lora.alpha": "0", "lora.dropout": "true", "lora.target_modules": "[]",
        "train.max_length": "4096", "serve.max_model_len": "512", "quantization.type": "none",
        "machine.liger": "maybe", "serve.max_num_seqs": "8.5", "train.learning_rate": ".nan",
    }  # fmt: skip
    said = refused(altered(wrong, {"  micro_batch:": "  micro_btach:"}, extra="rank: 3\nquantisation: 4\n"))
    for line in (
        "train.micro_btach: unknown key, did you mean train.micro_batch?",
        "train.micro_batch: missing",
        "lora.rank: '16' should be a valid integer",
        "lora.alpha: 0 should be greater than or equal to 1",
        "lora.dropout: True should be a valid number",
        "lora.target_modules: [] should be 'all-linear' or List should have at least 1 item",
        "train.max_length: 4096 and serve.max_model_len: 512: ",
        "method: qlora and quantization.type: none: ",
        "quantization.type: none and quantization.double: true: ",
        "machine.liger: 'maybe' should be 'auto', 'on' or 'off'",
        "serve.max_num_seqs: 8.5 should be a valid integer",
        "train.learning_rate: nan should be 'auto' or nan should be a finite number",
        "\n    - rank: unknown key, did you mean lora.rank?",
        "\n    - quantisation: unknown key, did you mean quantization?",
    ):
        assert line in said
    assert "has 14 problems" in said


PAIRS = {
    "method: qlora and quantization.type: none": {"quantization.type": "none", "quantization.double": "false"},
    "method: lora and quantization.type: fp4": {"method": "lora", "quantization.type": "fp4"},
    "quantization.type: none and quantization.double: true": {"method": "lora", "quantization.type": "none"},
    "train.epochs: 0 and train.max_steps: 0": {"train.epochs": "0.0", "train.max_steps": "0"},
    "train.scheduler: constant and train.warmup_ratio: 0.1": {
        "train.scheduler": "constant", "train.warmup_ratio": "0.1",
    },
    "train.max_length: 513 and serve.max_model_len: 512": {
        "train.max_length": "513", "serve.max_model_len": "512",
    },
    "evaluation.max_new_tokens: 512 and serve.max_model_len: 512": {
        "evaluation.max_new_tokens": "512", "serve.max_model_len": "512",
    },
    "machine.precision: fp32 and machine.attention: flash_attention_2": {
        "machine.precision": "fp32", "machine.attention": "flash_attention_2",
    },
    "train.batch: 8 and train.micro_batch: 3": {"train.batch": "8", "train.micro_batch": "3"},
}  # fmt: skip


@pytest.mark.parametrize("named", PAIRS)
def test_each_impossible_pair_is_told_alone(named: str, altered: Callable[..., str]) -> None:
    said = refused(altered(PAIRS[named]))
    assert named in said
    assert "has 1 problem:" in said


def test_every_pair_rule_is_tested() -> None:
    assert len(PAIRS) == len(schema.RULES)


def test_pairs_are_checked_in_broken_groups_too(altered: Callable[..., str]) -> None:
    said = refused(altered({"train.max_steps": "0", "train.epochs": "0"}, {"  save_steps:": "  sav:"}))
    assert "train.epochs: 0 and train.max_steps: 0" in said
    assert "train.sav: unknown key" in said


def test_a_group_that_is_no_group(altered: Callable[..., str]) -> None:
    said = refused(altered(words={"data:\n": "data: 5\nmore:\n"}))
    assert "data: 5 should be a group of keys" in said
    assert "more: unknown key" in said


def test_keys_given_twice_are_told_with_their_lines(altered: Callable[..., str]) -> None:
    file = altered(words={"  alpha:": "  rank: 8\n  alpha:"})
    first = Path(file).read_text(encoding="utf-8").split("  rank:")[0].count("\n") + 1
    assert f"lora.rank: given twice, in lines {first} and {first + 1}" in refused(file)


def test_broken_yaml_names_file_and_line(altered: Callable[..., str]) -> None:
    file = altered({"train.packing": "yes: no"})
    line = Path(file).read_text(encoding="utf-8").split("  packing:")[0].count("\n") + 1
    assert f"mine.yaml, line {line}: mapping values are not allowed here" in refused(file)


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "just text\n"])
def test_a_file_without_keys_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text(content)
    assert "holds no keys" in refused("empty.yaml")


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gbk.yaml").write_bytes("about: 中文".encode("gbk"))
    assert "gbk.yaml: 'utf-8' codec can't decode" in refused("gbk.yaml")


@pytest.mark.parametrize("name", ["t4_16g", "T4_16GB", "t4_16gb.yaml"])
def test_an_unknown_profile_lists_the_known_ones(name: str) -> None:
    said = refused(name)
    assert "did you mean t4_16gb?" in said
    assert all(known in said for known in COURSE)


@pytest.mark.parametrize("name", ["models", "cards", "", "nowhere/mine.yaml"])
def test_what_is_no_profile_is_refused(name: str) -> None:
    assert "there is no profile" in refused(name)


# ---- the models


def test_billions_follow_from_the_shapes() -> None:
    known = profiles.known_models()
    assert len(known) == 14
    for name, model in known.items():
        attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
        layer = attention + 3 * model.hidden * model.intermediate
        weights = layer * model.layers + model.vocab * model.hidden * (1 if model.tied else 2)
        assert weights / 1e9 == pytest.approx(model.billions, rel=0.01), name


def test_every_known_model_has_a_comment() -> None:
    text = (paths.CONFIGS / "models.yaml").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if re.match(r"[A-Z].*:", line) and "  # " not in line] == []


def test_a_broken_model_list_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = yaml.safe_load((paths.CONFIGS / "models.yaml").read_text(encoding="utf-8"))
    tree["Qwen3-8B"]["layers"] = "many"
    del tree["Qwen3-4B"]["hub"]
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(paths, "CONFIGS", tmp_path)
    with pytest.raises(CourseError, match=r"(?s)Qwen3-4B\.hub: missing.*Qwen3-8B\.layers: 'many' should be"):
        profiles.known_models()


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "qwen2.5-7b", "Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"])
def test_short_names_and_hub_ids_mean_the_same(name: str) -> None:
    assert models.meant(name).value == "Qwen/Qwen2.5-7B-Instruct"


def test_folders_are_taken_as_they_are(machine: Path) -> None:
    folder = machine / "runs" / "merged"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in (str(folder), "runs/merged", "./runs/merged"):
        assert Path(models.meant(name).value).samefile(folder)
    resolved = profiles.resolve("t4_16gb", "runs/merged", card=T4, platform=KAGGLE, online=never)
    assert resolved.model == str(folder)
    assert "a folder of this machine; parameter MODEL" in resolved.choices["model"].reason


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "../model", "~/no-such-model", "a/b/c", "owner/"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(CourseError, match=f"missing model folder {re.escape(name)}"):
        models.meant(name)


def test_an_unknown_short_name_gets_a_hint() -> None:
    with pytest.raises(CourseError, match=r"(?s)unknown model 'Qwen2.5-9B'.*did you mean Qwen2.5"):
        models.meant("Qwen2.5-9B")


def test_a_folder_without_a_model_is_refused(machine: Path) -> None:
    (machine / "empty").mkdir()
    with pytest.raises(CourseError, match=r"has no config\.json"):
        models.meant("./empty")
    (machine / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(CourseError, match="It is an adapter: merge it first"):
        models.meant("./empty")


# ---- auto


@pytest.mark.parametrize(
    ("card", "name"),
    [
        (None, "tiny"),
        (T4, "t4_16gb"),
        (P100, "t4_16gb"),
        (Card("V100", (7, 0), 31.7, 1), "t4_16gb"),
        (Card("RTX 3060", (8, 6), 11.7, 1), "t4_16gb"),
        (RTX, "ampere_24gb"),
        (Card("A100 40GB", (8, 0), 39.4, 1), "ampere_40gb"),
        (Card("L40S", (8, 9), 44.4, 1), "ampere_40gb"),
        (Card("H100", (9, 0), 79.1, 1), "hopper_80gb"),
        (H200, "hopper_141gb"),
    ],
)
def test_auto_chooses_by_card_and_says_why(card: Card | None, name: str) -> None:
    resolved = profiles.resolve(card=card, platform=KAGGLE, online=yes)
    assert resolved.name == resolved.choices["profile"].value == resolved.source == name
    assert "kaggle" in resolved.choices["profile"].reason
    assert (card.name if card else "no card") in resolved.choices["profile"].reason


def test_auto_warns_of_a_card_older_than_torch_supports() -> None:
    for card, warned in ((P100, True), (T4, False)):
        reason = profiles.resolve(card=card, platform=KAGGLE, online=yes).choices["profile"].reason
        assert ("may lack its kernels" in reason) is warned


def test_without_a_card_nothing_is_asked_of_the_network(machine: Path) -> None:
    resolved = profiles.resolve(card=None, platform=KAGGLE, online=never)
    assert resolved.model == resolved.profile.model == str(machine / "tiny_base")


def test_auto_gives_the_bundled_model_its_own_profile() -> None:
    for model in ("tiny", str(paths.TINY_MODEL)):
        assert profiles.resolve("auto", model, card=H200, platform=KAGGLE, online=never).name == "tiny"
    named = profiles.resolve("hopper_141gb", "tiny", card=H200, platform=KAGGLE, online=never)
    assert (named.name, named.model) == ("hopper_141gb", str(paths.TINY_MODEL))


# ---- the network


def test_auto_falls_back_to_the_bundled_model(machine: Path) -> None:
    resolved = profiles.resolve("auto", "", card=T4, platform=KAGGLE, online=no)
    assert (resolved.name, resolved.model) == ("tiny", str(machine / "tiny_base"))
    reason = resolved.choices["profile"].reason
    wanted = models.meant(profiles.load("t4_16gb").model).value
    assert all(word in reason for word in ("t4_16gb", wanted, "not in the cache", "does not answer"))
    assert resolved.profile.machine.precision == "fp16"


@pytest.mark.parametrize(("profile", "model"), [("t4_16gb", ""), ("auto", "Qwen2.5-7B"), ("tiny", "some/model")])
def test_what_was_named_is_never_replaced(profile: str, model: str) -> None:
    with pytest.raises(CourseError, match=r'(?s)not in the local cache.*does not answer.*PROFILE="tiny"'):
        profiles.resolve(profile, model, card=T4, platform=KAGGLE, online=no)


SHARDED = {
    "config.json": "{}",
    models.INDEX: json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}),
}


def fill_cache(hub: Path, hub_id: str, files: dict[str, str]) -> None:
    """The layout of the hub's cache."""
    repo = hub / f"models--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for name, content in files.items():
        (repo / "snapshots" / "abc" / name).write_text(content)


def test_a_cached_model_needs_no_network(machine: Path) -> None:
    fill_cache(machine / "hub", "one/whole", SHARDED | {"model-1.safetensors": "", "model-2.safetensors": ""})
    fill_cache(machine / "hub", "one/file", {"config.json": "{}", "model.safetensors": ""})
    for hub_id in ("one/whole", "one/file"):
        resolved = profiles.resolve("auto", hub_id, card=T4, platform=KAGGLE, online=never)
        assert resolved.model == hub_id
        assert "from the cache" in resolved.choices["model"].reason


def test_half_a_download_does_not_count(machine: Path) -> None:
    fill_cache(machine / "hub", "one/half", SHARDED | {"model-1.safetensors": ""})
    fill_cache(machine / "hub", "one/bare", {"config.json": "{}"})
    for hub_id in ("one/half", "one/bare"):
        assert models.reachable(hub_id, no) == ""
        assert models.reachable(hub_id, yes) == "network"


# ---- the card


def test_auto_values_are_decided_by_the_card() -> None:
    for card, precision in ((None, "fp32"), (T4, "fp16"), (RTX, "bf16")):
        resolved = profiles.resolve("tiny", card=card, platform=KAGGLE, online=never)
        assert resolved.profile.machine.precision == resolved.choices["machine.precision"].value == precision
        assert resolved.choices["machine.precision"] == hardware.precision(card)
        assert resolved.profile.machine.attention == hardware.attention(card).value
        assert resolved.profile.machine.liger == ("on" if hardware.liger(card).value else "off")


def test_liger_and_a_fused_attention_are_taken_where_the_card_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    settled = profiles.resolve("tiny", card=RTX, platform=KAGGLE, online=never)
    assert settled.profile.machine.attention in ("varlen", "flash_attention_2")
    assert settled.profile.machine.liger == "on"
    assert tiny_with("machine.precision=fp32", RTX).profile.machine.attention == "sdpa"


@pytest.mark.parametrize(
    ("name", "value", "card", "said"),
    [
        ("machine.precision", "bf16", T4, "bf16 needs capability 8.0"),
        ("machine.precision", "bf16", None, "bf16 needs a card"),
        ("machine.precision", "fp16", None, "fp16 needs a card"),
        ("machine.attention", "flash_attention_2", None, "flash_attention_2 needs a card of capability 8.0"),
        ("machine.attention", "flash_attention_2", T4, "flash_attention_2 needs a card of capability 8.0"),
        ("machine.attention", "varlen", T4, "varlen needs a card of capability 8.0"),
        ("machine.liger", "on", None, "on needs a card"),
    ],
)
def test_what_the_card_cannot_do_is_refused_by_name(
    name: str, value: str, card: Card | None, said: str, altered: Callable[..., str]
) -> None:
    with pytest.raises(CourseError, match=re.escape(f"{name}: {said}")):
        profiles.resolve(altered({name: value}), card=card, platform=KAGGLE, online=never)


def test_named_values_the_card_has_are_kept_with_the_yamls_reason(altered: Callable[..., str]) -> None:
    file = altered({"machine.precision": "fp32", "machine.liger": "off"})
    resolved = profiles.resolve(file, card=RTX, platform=KAGGLE, online=never)
    assert (resolved.profile.machine.precision, resolved.profile.machine.liger) == ("fp32", "off")
    assert resolved.choices["machine.precision"].reason.endswith("[mine.yaml]")
    assert resolved.profile.machine.attention == "sdpa"


# ---- what comes out


def test_a_profile_of_ones_own_can_be_found_again(altered: Callable[..., str]) -> None:
    resolved = profiles.resolve(altered({"train.max_steps": "7"}), card=None, platform=KAGGLE, online=never)
    assert resolved.name == "mine"
    again = profiles.resolve(resolved.source, card=None, platform=KAGGLE, online=never)
    assert again.profile.train.max_steps == 7


def test_every_value_has_a_choice_with_its_reason() -> None:
    resolved = profiles.resolve("lora_20k", card=T4, platform=KAGGLE, online=yes)
    assert set(resolved.choices) == {"profile", *schema.keys()}
    assert all(choice.reason for choice in resolved.choices.values())
    values = schema.flat(resolved.profile.model_dump())
    assert {name: resolved.choices[name].value for name in values} == values
    assert resolved.choices["data.rows"].reason.endswith("[lora_20k.yaml]")


def test_a_value_without_a_comment_still_has_a_reason(altered: Callable[..., str]) -> None:
    text = Path(altered()).read_text(encoding="utf-8")
    Path("bare.yaml").write_text(re.sub(r"\s+#.*", "", text), encoding="utf-8")
    resolved = profiles.resolve("bare.yaml", card=None, platform=KAGGLE, online=never)
    assert resolved.choices["lora.rank"].reason == "set in bare.yaml"


@pytest.mark.parametrize("name", sorted(COURSE))
def test_the_table_shows_every_value_in_120_columns(name: str) -> None:
    resolved = profiles.resolve(name, card=H200, platform=KAGGLE, online=yes)
    lines = resolved.table().splitlines()
    assert max(map(len, lines)) <= 120
    shown = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert shown == [key for key in resolved.choices if key != "about"]
    assert len({line.index(line.split()[1]) for line in lines[1:] if not line.startswith(" ")}) == 1


def test_the_table_folds_a_long_folder(machine: Path) -> None:
    folder = machine / ("long-" * 20) / ("name-" * 20)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    table = profiles.resolve("tiny", str(folder), card=None, platform=KAGGLE, online=never).table()
    assert max(map(len, table.splitlines())) <= 120


# ---- overrides


def tiny_with(text: str, card: Card | None = None, profile: str = "tiny") -> profiles.Resolved:
    """The profile with SET."""
    wanted = {name: (value, "parameter SET") for name, value in reading.settings_in(text).items()}
    return profiles.resolve(profile, card=card, platform=KAGGLE, online=never, overrides=lambda name: wanted)


def test_overrides_replace_value_and_reason_and_nothing_else() -> None:
    before, after = tiny_with(""), tiny_with("train.max_steps=3, train.batch=64")
    assert after.profile.train.max_steps == 3 != before.profile.train.max_steps
    assert after.choices["train.max_steps"] == hardware.Choice(3, "parameter SET")
    assert "parameter SET" in next(line for line in after.table().splitlines() if line.startswith("train.max_steps"))
    assert after.profile.train.step_rows == 64
    changed = {name for name in before.choices if before.choices[name] != after.choices[name]}
    assert changed == {"train.max_steps", "train.batch"}
    assert (after.name, after.source, after.model) == (before.name, before.source, before.model)


def test_set_reads_values_as_a_profile_does() -> None:
    text = "train.learning_rate=2e-4,lora.target_modules=[q_proj, v_proj] , machine.liger = off, lora.use_rslora=true"
    values = {
        "train.learning_rate": 2e-4, "lora.target_modules": ["q_proj", "v_proj"], "machine.liger": "off",
        "lora.use_rslora": True,
    }  # fmt: skip
    assert reading.settings_in(text) == values and reading.settings_in(" ") == {}
    assert reading.settings_in(reading.settings_text(values)) == values
    resolved = tiny_with(text)
    assert resolved.profile.lora.target_modules == ["q_proj", "v_proj"] and resolved.profile.machine.liger == "off"
    with pytest.raises(CourseError, match="twice"):
        reading.settings_in("lora.rank=1, lora.rank=2")
    for text in ("nonsense", "lora.rank=64 train.epochs=2"):
        with pytest.raises(CourseError, match="comma"):
            reading.settings_in(text)


def test_overrides_are_checked_all_at_once() -> None:
    with pytest.raises(CourseError) as caught:
        tiny_with(
            "train.max_stps=3, train.micro_batch='8', quantization.type=none, model=x, about=y, learning_rte=1, "
            "train=2, lora.rank=, lora.target_modules=[a"
        )
    for line in (
        "tiny with parameter SET has 10 problems",
        "train.max_stps: unknown key, did you mean train.max_steps?",
        "train.micro_batch: '8' should be 'auto' or '8' should be a valid integer",
        "method: qlora and quantization.type: none",
        "model: is not set this way: use MODEL",
        "about: is not set",
        "learning_rte: unknown key, did you mean train.learning_rate?",
        "lora.rank: None should be a valid integer",
        "lora.target_modules: '[a' should",
    ):
        assert line in str(caught.value)
    assert "did you mean train?" not in str(caught.value)


def test_overrides_are_checked_against_the_card() -> None:
    with pytest.raises(CourseError, match=r"machine\.precision: bf16 needs capability 8\.0"):
        tiny_with("machine.precision=bf16", T4)


@pytest.mark.parametrize("text", ["method=lora", "lora.rnk=8", "machine.precision=bf16"])
def test_what_cannot_be_is_refused_before_any_download(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "reachable", lambda *_: "modelscope")
    monkeypatch.setattr(models, "from_modelscope", lambda *_: pytest.fail("downloading"))
    with pytest.raises(CourseError, match=text.partition("=")[0]):
        tiny_with(text, T4, "t4_16gb")


def test_values_left_to_the_plan_follow_from_what_was_set() -> None:
    short, long = (
        profiles.resolve(
            "ampere_24gb", card=RTX, platform=KAGGLE, online=yes,
            overrides=lambda name, length=length: {"train.max_length": (length, "a test")},
        ).profile.train
        for length in (512, 4096)
    )  # fmt: skip
    assert short.micro_batch > long.micro_batch


def test_any_folder_can_be_asked_whether_it_holds_a_model(tmp_path: Path) -> None:
    assert profiles.model_folder(paths.TINY_MODEL) == str(paths.TINY_MODEL)
    with pytest.raises(CourseError, match="is no model folder"):
        profiles.model_folder(tmp_path / "nope")


# ---- the plan


AUTO = ("train.micro_batch", "train.gradient_checkpointing")


@pytest.mark.parametrize("card", [T4, RTX, H200])
@pytest.mark.parametrize("name", sorted(COURSE - {"tiny", "laptop"}))
def test_nothing_is_left_to_auto_and_the_batch_is_the_profiles(name: str, card: Card) -> None:
    resolved = profiles.resolve(name, card=card, platform=KAGGLE, online=yes)
    values = schema.flat(resolved.profile.model_dump())
    assert "auto" not in {value for key, value in values.items() if key != "about"}
    train = resolved.profile.train
    assert train.micro_batch * train.accumulation == train.batch
    assert profiles.load(name).train.batch in ("auto", train.batch)
    assert all(resolved.choices[key].reason.startswith("plan: ") for key in AUTO)


def test_the_plan_says_how_much_of_the_card_it_uses_and_what_would_not_fit() -> None:
    resolved = profiles.resolve("t4_16gb", "Qwen2.5-14B", card=T4, platform=KAGGLE, online=yes)
    assert re.search(r"plan: [\d.]+ of 14\.7 GiB by forecast, the fastest that fits", resolved.choices[AUTO[0]].reason)
    assert "without recomputing would need" in resolved.choices[AUTO[1]].reason
    roomy = profiles.resolve("ampere_24gb", "Qwen2.5-0.5B", card=H200, platform=KAGGLE, online=yes)
    assert roomy.profile.train.gradient_checkpointing == "off"


def test_what_does_not_fit_is_said_and_not_hidden() -> None:
    resolved = profiles.resolve("hopper_141gb", card=T4, platform=KAGGLE, online=yes)
    assert all("DOES NOT FIT" in resolved.choices[key].reason for key in AUTO)
    assert "GiB are missing" in resolved.choices[AUTO[0]].reason


def test_a_model_nobody_knows_yet_gets_the_careful_values() -> None:
    resolved = profiles.resolve("ampere_24gb", "some/model", card=RTX, platform=KAGGLE, online=yes)
    assert (resolved.profile.train.micro_batch, resolved.profile.train.gradient_checkpointing) == (1, "on")
    assert "not known before its download" in resolved.choices[AUTO[0]].reason


def test_without_a_card_auto_is_small_and_does_not_recompute(altered: Callable[..., str]) -> None:
    for batch, rows in (("8", 2), ("3", 1)):
        file = altered({"train.batch": batch, AUTO[0]: "auto", AUTO[1]: "auto"})
        train = profiles.resolve(file, card=None, platform=KAGGLE, online=never).profile.train
        assert (train.micro_batch, train.gradient_checkpointing) == (rows, "off")


def test_without_a_card_the_optimizer_that_needs_one_is_replaced() -> None:
    resolved = profiles.resolve("paper_r64", "tiny", card=None, platform=KAGGLE, online=never)
    assert resolved.profile.train.optimizer == "adamw_torch_fused"
    assert resolved.choices["train.optimizer"].reason == "paged_adamw_8bit needs a card: AdamW in 32 bits instead"


def test_a_number_of_ones_own_is_kept(altered: Callable[..., str]) -> None:
    file = altered({"train.batch": "8", AUTO[0]: "4", AUTO[1]: "auto", "model": "Qwen2.5-7B"})
    resolved = profiles.resolve(file, card=RTX, platform=KAGGLE, online=yes)
    assert resolved.profile.train.micro_batch == 4
    assert resolved.choices[AUTO[0]].reason.endswith("[mine.yaml]")
    assert resolved.choices[AUTO[1]].reason.startswith("plan: ")


def test_launched_cards_share_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    train = profiles.resolve("ampere_24gb", card=H200, platform=KAGGLE, online=yes).profile.train
    assert (train.micro_batch, train.accumulation_on(8)) == (1, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert profiles.resolve("ampere_24gb", card=H200, platform=KAGGLE, online=yes).profile.train.batch == 9
    with pytest.raises(CourseError, match="a batch of 16 rows cannot be shared by 3 cards"):
        profiles.resolve("lora_20k", card=H200, platform=KAGGLE, online=yes)


# ---- the recipe


def fitted(name: str, lengths: list[int], card: Card | None = RTX, **changes: Any) -> profiles.Resolved:
    replaced = {key.replace("__", "."): (value, "a test") for key, value in changes.items()}
    resolved = profiles.resolve(name, card=card, platform=KAGGLE, online=yes, overrides=lambda _: replaced)
    return profiles.fit(resolved, profiles.Rows.of(lengths))


@pytest.mark.parametrize(("rows", "least", "most"), [(50, 30, 200), (84, 50, 200), (885, 100, 400), (5000, 100, 600)])
def test_everyday_data_gets_enough_steps(rows: int, least: int, most: int) -> None:
    resolved = fitted("ampere_24gb", [200] * rows)
    made = profiles.schedule(resolved.profile.train, resolved.rows)
    assert least <= made.steps <= most
    assert made.examples_per_step >= 8


def test_the_card_does_not_change_what_is_learnt() -> None:
    learnt = ("batch", "packing", "epochs", "learning_rate", "save_steps", "validation_rows")
    for lengths in ([120] * 84, [100, 700] * 400, [300] * 100_000):
        small, large = (fitted("ampere_24gb", lengths, card).profile.train for card in (RTX, H200))
        assert [getattr(small, key) for key in learnt] == [getattr(large, key) for key in learnt]


@pytest.mark.parametrize(("rows", "tokens", "packed"), [(1000, 1200, 1000), (3000, 1100, 3000), (1000, 800, 500)])
def test_rows_that_cannot_share_a_packed_row_are_counted_as_the_packer_does(
    rows: int, tokens: int, packed: int
) -> None:
    assert profiles.Rows.of([tokens] * rows).packed(2048) == packed


def test_large_data_keeps_the_large_step() -> None:
    train = fitted("ampere_24gb", [265] * 100_000).profile.train
    assert (train.batch, train.packing, train.epochs, train.save_steps) == (8, True, 1.0, 50)


def test_a_step_is_never_larger_than_the_largest_and_never_empty() -> None:
    for lengths in ([16], [2048] * 3, [2048] * 100_000, [5] * 1_000_000, [20] * 60):
        resolved = fitted("ampere_24gb", lengths)
        made = profiles.schedule(resolved.profile.train, resolved.rows)
        assert made.steps >= 1 and made.tokens_per_step <= 8 * 2048 * 1.05 and resolved.profile.train.step_rows >= 1


def test_the_learning_rate_falls_with_the_width_of_the_model() -> None:
    rates = [
        profiles.resolve(
            "ampere_24gb", f"Qwen2.5-{size}B", card=RTX, platform=KAGGLE, online=yes
        ).profile.train.learning_rate
        for size in ("0.5", "1.5", "7", "14")
    ]
    assert rates == sorted(rates, reverse=True) and 1e-4 < rates[-1] < rates[0] < 1e-3


def test_the_learning_rate_is_that_of_the_steps_a_named_batch_makes() -> None:
    own, small, large = (
        fitted("ampere_24gb", [200] * 885, **named).profile.train.learning_rate
        for named in ({}, {"train__batch": 4}, {"train__batch": 8, "train__packing": True})
    )
    assert small == pytest.approx(own / 2, rel=0.05) and large == own


@pytest.mark.parametrize(
    ("model", "method", "kind"),
    [("Qwen2.5-0.5B", "lora", "none"), ("Qwen2.5-7B", "qlora", "nf4"), ("me/new", "qlora", "nf4")],
)
def test_only_a_model_that_can_afford_it_is_quantised(model: str, method: str, kind: str) -> None:
    resolved = profiles.resolve("t4_16gb", model, card=T4, platform=KAGGLE, online=yes)
    assert (resolved.profile.method, resolved.profile.quantization.type) == (method, kind)
    assert resolved.choices["method"].value == method and resolved.choices["quantization.type"].value == kind


def test_a_method_that_is_named_is_kept() -> None:
    named = {"method": ("qlora", "a test")}
    small = profiles.resolve("t4_16gb", "Qwen2.5-0.5B", card=T4, platform=KAGGLE, online=yes, overrides=lambda _: named)
    assert small.profile.method == "qlora" and small.profile.quantization.type == "nf4"
    quantised = {"quantization.type": ("fp4", "a test")}
    small = profiles.resolve(
        "t4_16gb", "Qwen2.5-0.5B", card=T4, platform=KAGGLE, online=yes, overrides=lambda _: quantised
    )
    assert small.profile.method == "qlora" and small.profile.quantization.type == "fp4"
    sixteen = {"quantization.type": ("none", "a test"), "quantization.double": (False, "a test")}
    large = profiles.resolve(
        "ampere_40gb", "Qwen2.5-7B", card=RTX, platform=KAGGLE, online=yes, overrides=lambda _: sixteen
    )
    assert large.profile.method == "lora"


def test_what_a_profile_names_is_kept() -> None:
    train = fitted(
        "ampere_24gb", [200] * 885, train__batch=16, train__learning_rate=1e-4, train__epochs=1.0
    ).profile.train
    assert (train.batch, train.packing, train.learning_rate, train.epochs) == (16, False, 1e-4, 1.0)


def test_a_named_batch_that_leaves_too_few_steps_is_told_with_the_number_to_set() -> None:
    resolved = fitted("ampere_24gb", [200] * 885, train__batch=8, train__packing=True)
    told = recipe.few_steps(resolved.profile.train, resolved.given.train, resolved.rows)
    assert "train.batch=16, train.packing=false" in told
    fixed = fitted("ampere_24gb", [200] * 885, train__batch=16, train__packing=False)
    assert not recipe.few_steps(fixed.profile.train, fixed.given.train, fixed.rows)


def test_validation_takes_a_bounded_share_of_the_time() -> None:
    for rows in (200, 885, 5000, 100_000):
        resolved = fitted("ampere_24gb", [200] * rows)
        train, made = resolved.profile.train, profiles.schedule(resolved.profile.train, resolved.rows)
        times = -(-made.steps // train.save_steps) + 1
        assert recipe.FORWARD * times * train.validation_rows <= 0.05 * made.steps * made.examples_per_step


def test_accumulation_needs_a_settled_micro_batch_that_divides() -> None:
    with pytest.raises(CourseError, match="cannot be done by 1 x micro_batch auto"):
        profiles.load("ampere_24gb").train.accumulation  # noqa: B018
    with pytest.raises(CourseError, match="cannot be done by 3 x micro_batch 2"):
        profiles.load("tiny").train.accumulation_on(3)
