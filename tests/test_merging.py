"""nbutils.merging: the bits of PEFT's merge, refusals before anything is written, and never half a model."""

import errno
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import merge_models as models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support import refused

from nbutils import cli, disk, files, merging, record
from nbutils.config import UNMERGEABLE
from nbutils.errors import CourseError
from nbutils.merging import folder as folders
from nbutils.merging import merge as merge_module

Pair = tuple[Path, Path]
Bases = Callable[..., Path]
ADAPTER = folders.ADAPTER_WEIGHTS


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Bases by their settings, each made once; tests only read them."""
    return functools.cache(lambda **settings: models.make_base(tmp_path_factory.mktemp("made") / "base", **settings))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of several files and an adapter for it, made once; tests that change them copy them."""
    folder = tmp_path_factory.mktemp("merge")
    models.make_base(folder / "base", shards="60KB")
    models.make_adapter(folder / "base", folder / "adapter")
    return folder


@pytest.fixture
def pair(home: Path, tmp_path: Path) -> Pair:
    """Copies that may be changed."""
    return shutil.copytree(home / "base", tmp_path / "base"), shutil.copytree(home / "adapter", tmp_path / "adapter")


def merge(base: str | Path, adapter: Any, out: Path, **settings: Any) -> merge_module.MergeReport:
    return merging.merge_adapter(base, adapter, out, **settings)


def check(base: str | Path, adapter: Path) -> None:
    merging.check(base, adapter, onto="full", method="qlora")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rewrite(file: Path, how: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """A safetensors file with each tensor changed, or left out where None is returned."""
    changed = {name: how(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file, {"format": "pt"})


def assert_same_bits(ours: Path | dict[str, torch.Tensor], theirs: Path | dict[str, torch.Tensor]) -> None:
    """Two models, each a folder or a state dict."""
    left = models.weights(ours) if isinstance(ours, Path) else ours
    right = models.weights(theirs) if isinstance(theirs, Path) else theirs
    assert set(left) == set(right)
    for name, weight in left.items():
        assert weight.dtype == right[name].dtype, name
        assert torch.equal(weight, right[name]), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "power-of-two scale": {"lora_alpha": 8}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"], "bias": "all"},
    "output layer": {"target_modules": ["lm_head", "v_proj"], "dtype": "bfloat16"},
    "another architecture": {},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_merge_has_the_bits_of_peft(case: str, base_of: Bases, tmp_path: Path, monkeypatch: Any) -> None:
    """Also from small blocks, where one row would be left over (161 = 5 x 32 + 1) and be rounded differently."""
    base = base_of(kind="glm4", shards="60KB") if case == "another architecture" else base_of()
    adapter = models.make_adapter(base, tmp_path / "adapter", **CASES[case])
    report = merge(base, adapter, tmp_path / "bfloat16")
    assert report.merged and not report.untied
    assert_same_bits(tmp_path / "bfloat16", models.merged_by_peft(base, adapter, dtype="bfloat16"))
    names = [{file.name for file in folder.glob("model*")} for folder in (base, tmp_path / "bfloat16")]
    assert names[0] == names[1] and (len(names[0]) > 1) == (case == "another architecture")
    monkeypatch.setattr(folders, "BLOCK", 64)
    assert len(folders.open_base(base).weights["lm_head.weight"].blocks()) > 2
    merge(base, adapter, tmp_path / "float32", dtype="float32")
    assert_same_bits(tmp_path / "float32", models.merged_by_peft(base, adapter))


@pytest.mark.parametrize("settings", [
    {}, {"target_modules": ["lm_head", "q_proj"]}, {"modules_to_save": ["embed_tokens"]},
])  # fmt: skip
def test_tied_embeddings_are_untied_if_the_adapter_changed_one(settings: Any, base_of: Bases, tmp_path: Path) -> None:
    """PEFT adds to the one shared matrix and makes another model; untied first, it gives our bits."""
    base, untied = base_of(tied=True), bool(settings)
    adapter = models.make_adapter(base, tmp_path / "adapter", **settings)
    assert merge(base, adapter, tmp_path / "out").untied == untied
    apart = models.untied_copy(base, tmp_path / "untied") if untied else base
    theirs = models.merged_by_peft(apart, adapter, dtype="bfloat16")
    if not untied:
        assert torch.equal(theirs.pop("lm_head.weight"), theirs["model.embed_tokens.weight"])
    assert_same_bits(tmp_path / "out", theirs)
    merge(base, adapter, tmp_path / "exact", dtype="float32")
    trained = models.logits(models.with_adapter(base, adapter))
    assert (models.logits(models.load(tmp_path / "exact")) - trained).abs().max() < 1e-4


@pytest.mark.parametrize(
    "settings", [{"bnb_4bit_quant_type": "nf4"}, {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}]
)
def test_the_dequantized_base_is_what_bitsandbytes_trains_on(settings: Any, base_of: Bases, tmp_path: Path) -> None:
    base = base_of(tied=True)
    adapter = models.make_adapter(base, tmp_path / "adapter")
    seen = models.in_4_bits(base, tmp_path / "seen", **settings)
    merge(base, adapter, tmp_path / "out", onto="dequantized", quantization=settings)
    theirs = models.merged_by_peft(seen, adapter, dtype="bfloat16")
    assert_same_bits(tmp_path / "out", {name: weight for name, weight in theirs.items() if name != "lm_head.weight"})
    assert "rows of 12 of 26 weights" in merging.prove(base, adapter, tmp_path / "out", onto="dequantized")
    assert not merge(base, adapter, tmp_path / "out").reused  # onto the full base it is another model


@pytest.fixture(scope="module")
def seeing_of(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Models that also see by their settings, each made once; tests only read them."""
    made = tmp_path_factory.mktemp
    return functools.cache(lambda **settings: models.make_seeing_base(made("seeing") / "base", **settings))


def in_text_model(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint that the text model loads, by its names, all in 16 bits."""
    stored = {name: weight for name, weight in models.weights(folder).items() if "mtp" not in name}
    text = {name: weight for name, weight in stored.items() if "visual" not in name}
    return {name.replace("language_model.", ""): weight.bfloat16() for name, weight in text.items()}


SEEING_CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "dora": {"use_dora": True}, "saved": {"modules_to_save": ["lm_head", "norm"], "bias": "all"},
    "output layer": {"target_modules": ["lm_head", "in_proj_a"]}, "embedding": {"modules_to_save": ["embed_tokens"]},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", SEEING_CASES)
def test_of_a_model_that_also_sees_only_the_text_model_changes(
    case: str, tied: bool, seeing_of: Bases, tmp_path: Path
) -> None:
    base = seeing_of(tied=tied)
    adapter = models.make_adapter(base, tmp_path / "adapter", **SEEING_CASES[case])
    report = merge(base, adapter, tmp_path / "out", dtype="bfloat16")
    assert report.merged and report.untied == (tied and case not in ("plain", "dora"))
    apart = models.untied_copy(base, tmp_path / "untied") if report.untied else base
    theirs = models.merged_by_peft(apart, adapter, dtype="bfloat16")
    if tied and not report.untied:
        del theirs["lm_head.weight"]
    assert_same_bits(in_text_model(tmp_path / "out"), theirs)
    before, after = models.weights(base), models.weights(tmp_path / "out")
    assert after.keys() == before.keys() | ({"lm_head.weight"} if report.untied else set())
    beside = [name for name in before if "visual" in name or "mtp" in name]
    assert {before[name].dtype for name in beside} == {torch.bfloat16, torch.float32}
    assert_same_bits({name: after[name] for name in beside}, {name: before[name] for name in beside})
    assert all(after[name].dtype == before[name].dtype for name in before)  # float32 stays float32
    assert "all as written" in merging.prove(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_model_that_also_sees_is_loaded_as_what_it_was(tied: bool, seeing_of: Bases, tmp_path: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    base, out = seeing_of(tied=tied, max_shard_size="200KB"), tmp_path / "out"
    settings = {"modules_to_save": ["lm_head"]} if tied else {}
    adapter = models.make_adapter(base, tmp_path / "adapter", **settings)
    merge(base, adapter, out, dtype="float32")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"] and config["dtype"] == "float32"
    assert len(list(out.glob("*.safetensors"))) > 1
    for name in (*models.PROCESSOR_FILES, "chat_template.jinja"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    before, after = models.weights(base), models.weights(out)
    vision = [name for name in before if "visual" in name]
    assert_same_bits({name: after[name] for name in vision}, {name: before[name] for name in vision})
    text = models.load(out)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(out, dtype="float32")
    assert type(text).__name__ == "Qwen3_5ForCausalLM"
    assert torch.equal(models.logits(text), models.logits(whole))
    assert (models.logits(text) - models.logits(models.with_adapter(base, adapter))).abs().max() < 1e-4


def test_of_a_model_that_also_sees_the_text_model_is_dequantized(seeing_of: Bases, tmp_path: Path) -> None:
    base = seeing_of(tied=True)
    adapter = models.make_adapter(base, tmp_path / "adapter")
    seen = models.in_4_bits(base, tmp_path / "seen", bnb_4bit_quant_type="nf4")
    merge(base, adapter, tmp_path / "out", onto="dequantized")
    theirs = models.merged_by_peft(seen, adapter, dtype="bfloat16")
    del theirs["lm_head.weight"]
    assert_same_bits(in_text_model(tmp_path / "out"), theirs)
    merging.prove(base, adapter, tmp_path / "out", onto="dequantized")


def test_weights_of_a_model_that_also_sees_are_read_by_their_names_in_the_text_model(seeing_of: Bases) -> None:
    base = seeing_of()
    stored = models.weights(base)["model.language_model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(merging.read_weight(base, "model.layers.3.self_attn.q_proj.weight"), stored.float())


def test_an_adapter_for_the_whole_of_a_model_that_also_sees_is_merged(seeing_of: Bases, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3_5ForConditionalGeneration

    base = seeing_of()
    torch.manual_seed(1)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(base, dtype="float32")
    tuned = get_peft_model(whole, LoraConfig(r=4, target_modules=["q_proj", "qkv"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    assert merge(base, tmp_path / "adapter", tmp_path / "out", dtype="float32").merged == 2
    theirs = tuned.merge_and_unload().state_dict()
    ours = models.weights(tmp_path / "out")
    for name in ("language_model.layers.3.self_attn.q_proj", "visual.blocks.0.attn.qkv"):
        expected = theirs[f"model.{name}.weight"]
        assert torch.equal(ours[f"model.{name}.weight"], expected.to(ours[f"model.{name}.weight"].dtype))


def test_an_adapter_of_another_model_does_not_fit_one_that_also_sees(
    home: Path, seeing_of: Bases, tmp_path: Path
) -> None:
    adapter = models.make_adapter(home / "base", tmp_path / "adapter")
    with refused("fits no weight of the base"):
        merge(seeing_of(), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", ["1GB", "200KB"])
def test_a_model_is_cast_with_all_its_weights(shards: str, seeing_of: Bases, tmp_path: Path) -> None:
    base, out = seeing_of(max_shard_size=shards), files.make_folder(tmp_path / "out")
    merging.cast_model(base, out, "float16")
    expected = {name: weight.half() for name, weight in models.weights(base).items()}
    assert_same_bits(out, expected)
    assert models.load(out, "auto").dtype == torch.float16
    assert [file.name for file in sorted(out.glob("model*"))] == [file.name for file in sorted(base.glob("model*"))]
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def assert_indexed(folder: Path) -> None:
    """The index of a model folder names every weight with its file, and the size of all."""
    index = json.loads((folder / folders.INDEX).read_text())
    stored = folders.open_base(folder).weights
    assert index["weight_map"] == {name: tensor.file.name for name, tensor in stored.items()}
    assert index["metadata"]["total_size"] == sum(tensor.size for tensor in stored.values())


@pytest.mark.parametrize(("dtype", "settings"), [("float32", {}), ("bfloat16", {"modules_to_save": ["lm_head"]})])
def test_the_index_of_a_merged_model_is_its_own(dtype: str, settings: Any, base_of: Bases, tmp_path: Path) -> None:
    base = base_of(tied=True, shards="60KB")
    adapter = models.make_adapter(base, tmp_path / "adapter", **settings)
    report = merge(base, adapter, tmp_path / "out", dtype=dtype)
    assert report.untied == bool(settings)
    assert ("lm_head.weight" in models.weights(tmp_path / "out")) == bool(settings)
    assert_indexed(tmp_path / "out")
    merging.prove(base, adapter, tmp_path / "out")
    shutil.copy(base / folders.INDEX, tmp_path / "out")
    if settings:
        with refused("lm_head.weight in "):
            merging.prove(base, adapter, tmp_path / "out")


def test_the_index_of_a_cast_model_is_its_own(base_of: Bases, tmp_path: Path) -> None:
    merging.cast_model(base_of(tied=True, shards="60KB"), tmp_path, "float32")
    assert_indexed(tmp_path)


TUNED = "model.layers.1.self_attn.v_proj.weight"
COPIED = "model.norm.weight"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_proof_finds_any_weight_that_differs(dtype: str, base_of: Bases, tmp_path: Path) -> None:
    """What answers hardly show in 16 bits: one matrix without its update, or with a tenth of it missing."""
    base = base_of(kind="qwen3")
    adapter = models.make_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "out", dtype=dtype)
    assert "all as written" in merging.prove(base, adapter, tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    right = load_file(file)

    def assert_found(name: str, wrong: dict[str, torch.Tensor]) -> None:
        save_file(wrong, file, {"format": "pt"})
        with refused(f"{name} in "):
            merging.prove(base, adapter, tmp_path / "out")

    before = models.weights(base)[TUNED]
    assert_found(TUNED, right | {TUNED: before.to(right[TUNED].dtype)})
    update = right[TUNED].float() - before.float()
    tenth_missing = before.float() + 0.9 * update
    assert_found(TUNED, right | {TUNED: tenth_missing.to(right[TUNED].dtype)})
    assert_found(COPIED, right | {COPIED: right[COPIED] * 1.5})
    assert_found(COPIED, {name: weight for name, weight in right.items() if name != COPIED})


LAYER = "model.layers.0.self_attn.q_proj"
SHARD = "model-00001-of-00003.safetensors"
HEADER = b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'
FALSE_HEADER = len(HEADER).to_bytes(8, "little") + HEADER + bytes(64)  # 9 numbers in 4 bytes


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (SHARD, FALSE_HEADER, "missing or damaged"),
        (SHARD, b"\xff" * 64, "missing or damaged"),
        ("config.json", b"[1]", "is missing or cannot be read"),
    ],
    ids=["false header", "no header", "no object"],
)
def test_a_damaged_base_is_refused(name: str, content: bytes, problem: str, pair: Pair) -> None:
    base, adapter = pair
    (base / name).write_bytes(content)
    with refused(problem):
        check(base, adapter)


def test_a_truncated_base_is_refused(pair: Pair) -> None:
    base, adapter = pair
    shard = base / SHARD
    shard.write_bytes(shard.read_bytes()[:-10])
    with refused("missing or damaged"):
        check(base, adapter)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (SHARD, "missing or damaged"),
        ("config.json", "is missing or cannot be read"),
    ],
)
def test_an_incomplete_base_is_refused(name: str, problem: str, pair: Pair) -> None:
    base, adapter = pair
    (base / name).unlink()
    with refused(problem):
        check(base, adapter)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_a_quantized_base_is_refused_and_the_full_one_named(key: str, pair: Pair) -> None:
    base, adapter = pair
    quantized = base.rename(base.with_name("base-bnb-4bit"))
    (quantized / "config.json").write_text(json.dumps({key: {"bits": 4}}))
    with refused("Use base."):
        check(quantized, adapter)


def test_the_base_must_be_the_one_of_the_training(pair: Pair) -> None:
    base, adapter = pair
    with refused("base is Qwen/Qwen2.5-7B-Instruct."):
        check("Qwen/Qwen2.5-7B-Instruct", adapter)
    for name in ("somebody/base-bnb-4bit", None):  # a quantized twin; not written down: names and shapes decide
        change(adapter / "adapter_config.json", base_model_name_or_path=name)
        check(base, adapter)


def assert_not_merged(base: Path, adapter: Path, *words: str) -> None:
    """A merge is refused with these words, and nothing is written."""
    out = base.with_name("out")
    with refused(*words):
        merge(base, adapter, out)
    assert not out.exists()
    assert not files.partial_of(out).exists()


@pytest.mark.parametrize("key", UNMERGEABLE)
def test_an_adapter_with_a_setting_that_cannot_be_merged_is_refused(key: str, pair: Pair) -> None:
    base, adapter = pair
    change(adapter / "adapter_config.json", **{key: ["x"]})
    assert_not_merged(base, adapter, "cannot be merged here", key)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "cannot be merged here"),
        ({"init_lora_weights": "olora"}, "cannot be merged here"),
        ({"init_lora_weights": None}, "cannot be merged here"),
        ({"peft_type": "IA3"}, "uses IA3"),
        ({"r": 5}, "fits no weight"),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_or_rank_is_refused(changed: dict[str, Any], problem: str, pair: Pair) -> None:
    base, adapter = pair
    change(adapter / "adapter_config.json", **changed)
    assert_not_merged(base, adapter, problem)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["base_model.model.model.query.lora_A.weight", "model.query.lora_B.weight"], "query.lora_A, of shape"),
        (["base_model.model.model.embed_tokens.lora_embedding_A"], "lora_embedding_A, of shape"),
        (["base_model.model.model.embed_tokens.lora_magnitude_vector"], "lora_magnitude_vector, of shape"),
    ],
)
def test_an_adapter_with_tensors_of_other_names_is_refused(names: list[str], problem: str, pair: Pair) -> None:
    base, adapter = pair
    save_file({name: torch.ones(4, 4) for name in names}, adapter / ADAPTER)
    assert_not_merged(base, adapter, problem)


def test_an_adapter_without_tensors_is_refused(pair: Pair) -> None:
    base, adapter = pair
    rewrite(adapter / ADAPTER, lambda name, tensor: None)
    assert_not_merged(base, adapter, "missing or damaged", ADAPTER)


def test_an_adapter_for_a_narrower_base_is_refused(pair: Pair) -> None:
    base, adapter = pair
    rewrite(adapter / ADAPTER, lambda name, tensor: tensor[..., :3].contiguous())
    assert_not_merged(base, adapter, "3), fits no weight")


def test_an_adapter_with_half_a_layer_is_refused(pair: Pair) -> None:
    base, adapter = pair
    rewrite(adapter / ADAPTER, lambda name, tensor: None if f"{LAYER}.lora_B" in name else tensor)
    assert_not_merged(base, adapter, f"{LAYER}.lora_A, of shape")


def test_nothing_is_written_over_base_adapter_or_foreign_files(pair: Pair, tmp_path: Path) -> None:
    base, adapter = pair
    other = shutil.copytree(adapter, tmp_path / "other")  # named as OUT: the real OUT was forgotten
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    (tmp_path / "planted").mkdir()
    files.partial_of(tmp_path / "out").symlink_to(tmp_path / "planted")
    before = sorted(tmp_path.rglob("*"))
    for out in (base, adapter, tmp_path, other, tmp_path / "mine", tmp_path / "out"):
        with pytest.raises(CourseError):
            merge(base, adapter, out)
    for option, value in (("--dtype", "int4"), ("--onto", "4bit"), ("--device", "gpu")):
        words = [str(base), str(adapter), str(tmp_path / "new"), option, value]
        assert CliRunner().invoke(cli.app, ["merge", *words]).exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_values_that_are_not_finite_are_not_written(pair: Pair, tmp_path: Path) -> None:
    for file in pair[0].glob("*.safetensors"):
        rewrite(file, lambda name, tensor: torch.full_like(tensor, 1e6) if name == "model.norm.weight" else tensor)
    (tmp_path / "cast").mkdir()
    for write in (
        lambda: merge(*pair, tmp_path / "out", dtype="float16"),
        lambda: merging.cast_model(pair[0], tmp_path / "cast", "float16"),
    ):
        with refused("A weight has infinite", "bfloat16") as caught:
            write()
        assert "learning rate" not in str(caught.value), "no training made the weight too large"
    assert not (tmp_path / "out").exists() and merge(*pair, tmp_path / "out").dtype == "bfloat16"


def test_a_trained_weight_that_is_not_finite_is_not_written(pair: Pair, tmp_path: Path) -> None:
    rewrite(pair[1] / ADAPTER, lambda name, tensor: tensor * 1e20)
    with refused("A weight has infinite", "learning rate"):
        merge(*pair, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from nbutils import merging
from nbutils.merging import merge
def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
write = merge.write_shard
def killed_at_third(file, *arguments):
    kill() if "model-00003" in str(file) else write(file, *arguments)
base, adapter, *outs = map(Path, sys.argv[1:])
for place, name, step in ((merge, "write_shard", killed_at_third), (merge, "copy_companions", kill)):
    out = outs.pop(0)
    if not (child := os.fork()):
        setattr(place, name, step)
        merging.merge_adapter(base, adapter, out)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_killed_merge_leaves_no_model_and_the_next_one_makes_it(home: Path, tmp_path: Path) -> None:
    base, adapter, secret = home / "base", home / "adapter", tmp_path / "secret.txt"
    outs = tmp_path / "third", tmp_path / "companions"
    fresh = merge(base, adapter, tmp_path / "fresh").folder
    subprocess.run([sys.executable, "-c", KILLED, str(base), str(adapter), *map(str, outs)], check=True)
    secret.write_text("mine")
    for out in outs:
        assert not out.exists() and files.stamp(files.partial_of(out)) is None
        (files.partial_of(out) / "generation_config.json").symlink_to(secret)  # planted: it is not written through
        merge(base, adapter, out)
        assert_same_bits(out, fresh)
        assert secret.read_text() == "mine"
        assert {file.name for file in out.iterdir()} == {file.name for file in fresh.iterdir()}


def test_one_file_with_an_index_is_merged_into_one_with_an_index(tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "single/base")
    (base / folders.SINGLE).rename(base / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(models.weights(base), "model-00001-of-00001.safetensors")
    (base / folders.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    adapter = models.make_adapter(base, tmp_path / "single/adapter")
    merge(base, adapter, tmp_path / "out")
    models.load(tmp_path / "out")  # without an index transformers does not find the weights


def test_a_full_disk_is_reported_and_another_merge_begins_anew(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    write, out = merge_module.write_shard, tmp_path / "out"

    def failing(file: Path, *arguments: Any) -> None:
        if file.name.startswith("model-00003"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(merge_module, "write_shard", failing)
        with pytest.raises(OSError, match="No space left"):
            merge(home / "base", home / "adapter", out)
    assert len(list(files.partial_of(out).glob("model-*"))) == 2
    other = models.make_adapter(home / "base", tmp_path / "other", seed=5)
    merge(home / "base", other, out)
    assert_same_bits(out, merge(home / "base", other, tmp_path / "fresh").folder)


def test_a_finished_merge_is_reused_only_for_the_same_weights(home: Path, pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = merge(home / "base", home / "adapter", out)
    assert (files.stamp(out) or {}).keys() == {"base", "base_mark", "dtype", "onto", "adapter"}
    for kind in ("k_proj.weight", "norm.weight"):
        again = merge(*pair, out)  # the same content elsewhere
        assert again.reused and (again.merged, again.copied, again.bytes) == (first.merged, first.copied, first.bytes)
        for file in pair[0].glob("*.safetensors"):
            rewrite(file, lambda name, tensor, kind=kind: tensor + 1 if name.endswith(kind) else tensor)
        assert not merge(*pair, out).reused


def test_the_folder_has_the_tokenizer_of_the_training_and_indices_as_they_are(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = shutil.copytree(files.TINY_MODEL, tmp_path / "base")
    change(base / "config.json", torch_dtype="float32")
    adapter = models.make_adapter(base, tmp_path / "adapter")
    indices = {"positions": torch.arange(8)[None], "mask": torch.ones(4, 4, dtype=torch.bool)}
    save_file(models.weights(base) | indices, base / folders.SINGLE, {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(base)
    merge(base, adapter, tmp_path / "plain", dtype="float16")
    merging.prove(base, adapter, tmp_path / "plain")
    written = models.weights(tmp_path / "plain")
    assert all(torch.equal(written[name], tensor) for name, tensor in indices.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template == tokenizer.chat_template
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert config["dtype"] == "float16" and "torch_dtype" not in config
    assert (tmp_path / "plain/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    tokenizer.chat_template = "{{ messages[0]['content'] }} trained"
    tokenizer.save_pretrained(adapter)
    merge(base, adapter, tmp_path / "trained", dtype="float16")
    trained = AutoTokenizer.from_pretrained(tmp_path / "trained")
    assert trained.chat_template.endswith("trained") and trained.get_vocab() == tokenizer.get_vocab()


def test_a_link_out_of_base_or_adapter_does_not_come_into_the_merged_model(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("a key")
    for folder in pair:
        link = folder / "special_tokens_map.json"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "id_rsa")
        with refused(f"{link} leads out"):
            merge(*pair, tmp_path / "out")
        link.unlink()
    assert not (tmp_path / "out").exists()


def test_a_base_to_merge_onto_that_does_not_exist_is_refused(home: Path, tmp_path: Path) -> None:
    with refused("onto is 'wrong'.", "full, dequantized"):
        merge(home / "base", home / "adapter", tmp_path / "out", onto="wrong")


def test_a_hub_id_is_found_in_the_cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision, repo = "0" * 40, tmp_path / "models--somebody--base"
    shutil.copytree(home / "base", repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_OFFLINE", True)
    check("somebody/base", home / "adapter")
    assert merge("somebody/base", home / "adapter", tmp_path / "out").base == "somebody/base"
    with refused("nobody/base could not be downloaded"):
        folders.open_base("nobody/base")


def test_a_model_too_large_for_the_run_folder_goes_to_scratch(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = record.RunFolder(files.make_folder(tmp_path / "keep/run"))
    scratch = tmp_path / "scratch/run"
    monkeypatch.setattr(disk, "free_gib", lambda folder: 10.0)

    def choose(gib: float) -> Path:
        return merging.choose_folder(run, scratch, gib)

    assert choose(8) == run.path / "merged" == run.merged
    place = choose(15)
    assert place == scratch / "merged" == record.RunFolder(run.path).merged
    assert "[WARN]" in capsys.readouterr().out
    assert choose(8) == run.path / "merged" == run.merged  # there is room again
    choose(15)
    for folder, about in ((run.adapter, {"steps": 3}), (place, {"adapter": {"steps": 3}})):
        with files.complete_folder(folder, about):
            pass
    assert choose(99) == place == run.merged  # finished: no more room is needed


@pytest.mark.parametrize(("onto", "method"), [("full", "lora"), ("dequantized", "qlora")])
def test_a_lesson_takes_a_base_to_merge_onto_that_fits_the_method(onto: str, method: str, home: Path) -> None:
    merging.check(home / "base", home / "adapter", onto, method)


@pytest.mark.parametrize(("onto", "method"), [("dequantized", "lora"), ("half", "qlora")])
def test_a_lesson_refuses_a_base_to_merge_onto_that_does_not(onto: str, method: str, home: Path) -> None:
    with refused(f"MERGE_ONTO is {onto!r}.", "full"):
        merging.check(home / "base", home / "adapter", onto, method)


def test_the_command_replaces_another_model_only_on_request(home: Path, tmp_path: Path) -> None:
    command = ["merge", str(home / "base"), str(home / "adapter"), str(tmp_path / "out"), "--dtype"]
    for _ in range(2):  # the second time there is nothing to do
        ran = CliRunner().invoke(cli.app, [*command, "float32"])
        assert ran.exit_code == 0, ran.output
    assert CliRunner().invoke(cli.app, [*command, "float16"]).exit_code == 1
    assert CliRunner().invoke(cli.app, [*command, "float16", "--replace"]).exit_code == 0


@pytest.mark.parametrize("name", ["tiny", "Qwen3-0.6B", "Qwen/Qwen3-0.6B"])
def test_the_command_takes_the_names_that_a_lesson_takes(
    name: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    if name == "tiny":
        shutil.rmtree(adapter)
        models.make_adapter(files.TINY_MODEL, adapter)
    else:
        cache = tmp_path / "hf/hub/models--Qwen--Qwen3-0.6B"
        shutil.copytree(base, cache / "snapshots/1")
        (cache / "refs").mkdir()
        (cache / "refs/main").write_text("1")
        change(adapter / folders.ADAPTER_CONFIG, base_model_name_or_path="Qwen/Qwen3-0.6B")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ran = CliRunner().invoke(cli.app, ["merge", name, str(adapter), str(tmp_path / "out")])
    assert ran.exit_code == 0 and files.stamp(tmp_path / "out"), ran.output


GROWTH = """
import sys
from pathlib import Path
from nbutils import merging
def peak(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
small, adapter, large, its_adapter, out = map(Path, sys.argv[1:])
merging.merge_adapter(small, adapter, out / "small", dtype="float16")  # all libraries are loaded
before = peak()
merging.merge_adapter(large, its_adapter, out / "large", dtype="float16")
print((peak() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_weight(home: Path, tmp_path: Path) -> None:
    """A tuned weight of 160 MiB and fused experts (few rows of millions of numbers), merged in less than one takes."""
    name, size = "model.layers.0.mlp.up_proj", 160 * 2**20
    shapes = {f"{name}.weight": (10240, 8192), "experts": (20, 2048, 2048)}
    places = zip(shapes.items(), ([0, size], [size, 2 * size]), strict=True)
    tensors = {key: {"dtype": "BF16", "shape": shape, "data_offsets": place} for (key, shape), place in places}
    header = json.dumps(tensors).encode()
    base = files.make_folder(tmp_path / "base")
    (base / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with open(base / folders.SINGLE, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * size)
    adapter = shutil.copytree(home / "adapter", tmp_path / "adapter")
    factors = {"lora_A": torch.ones(4, 8192), "lora_B": torch.ones(10240, 4)}
    save_file({f"base_model.model.{name}.{part}.weight": factor for part, factor in factors.items()}, adapter / ADAPTER)
    words = [str(path) for path in (home / "base", home / "adapter", base, adapter, tmp_path / "out")]
    ran = subprocess.run([sys.executable, "-c", GROWTH, *words], capture_output=True, text=True, check=True)
    shutil.rmtree(tmp_path / "out")
    assert int(ran.stdout) < 150, ran.stdout
