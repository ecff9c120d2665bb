"""merging: what is refused, what is asked before, and what a killed, damaged or full merge leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import merge_models as models
import pytest
import torch
from click.testing import CliRunner

from nbutils import cli, disk, lessons, merging, paths, platforms
from nbutils.errors import CourseError
from nbutils.merging import bases, plan, shards, writing


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of several files and an adapter for it, made once; tests that change them copy them first."""
    folder = tmp_path_factory.mktemp("merge")
    models.make_base(folder / "base", shards="60KB")
    models.make_adapter(folder / "base", folder / "adapter")
    return folder


@pytest.fixture
def pair(home: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies that may be changed."""
    return shutil.copytree(home / "base", tmp_path / "base"), shutil.copytree(home / "adapter", tmp_path / "adapter")


def merge(base: str | Path, adapter: Any, out: Path, **wishes: Any) -> merging.MergeReport:
    return merging.merge_adapter(base, adapter, out, progress=False, **wishes)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rewrite(file: Path, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """A safetensors file with other tensors in it."""
    from safetensors.torch import load_file, save_file

    save_file(how(load_file(file)), file, {"format": "pt"})


def same(one: Path, other: Path) -> bool:
    left, right = models.weights(one), models.weights(other)
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


# --- refused before anything is written -------------------------------------------------------------------------------


def test_no_adapter_is_a_mistake_and_home_is_found(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CourseError, match="no adapter was given"):
        merging.merge_adapter(pair[0], [], tmp_path / "out")
    monkeypatch.setenv("HOME", str(tmp_path))
    base, adapter = (f"~/{one.relative_to(tmp_path)}" for one in pair)
    assert merging.merge_adapter(base, adapter, "~/out", progress=False).folder == tmp_path / "out"


def test_a_quantised_base_is_refused_and_the_right_one_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    quantised = base.rename(tmp_path / "Qwen2.5-7B-Instruct-bnb-4bit")
    change(quantised / "config.json", quantization_config={"load_in_4bit": True})
    with pytest.raises(CourseError, match="is a quantised model") as caught:
        merging.check_base(quantised, adapter)
    assert "use Qwen2.5-7B-Instruct:" in caught.value.todo
    unnamed = quantised.rename(tmp_path / "mine")
    with pytest.raises(CourseError, match="quantised from"):
        merging.check_base(unnamed, adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"compression_config": {"format": "pack-quantized"}}, {"quantization": {"bits": 4, "group_size": 64}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)  # fmt: skip
def test_every_way_to_say_quantised_is_understood(settings: dict[str, Any], pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    change(base / "config.json", **settings)
    with pytest.raises(CourseError, match="is a quantised model"):
        merging.check_base(base, adapter)


PACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MLX": lambda weight: weight.to(torch.int32).view(torch.uint32),
    "fp8": lambda weight: weight.to(torch.float8_e4m3fn),
    "int8": lambda weight: weight.to(torch.int8),
    "bitsandbytes": lambda weight: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
}


@pytest.mark.parametrize("form", PACKED)
def test_quantised_weights_are_seen_without_settings(form: str, home: Path, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base-8bit")
    rewrite(
        base / bases.SINGLE,
        lambda found: {name: PACKED[form](one) if "v_proj.weight" in name else one for name, one in found.items()},
    )
    with pytest.raises(CourseError, match="is a quantised model") as caught:
        merge(base, home / "adapter", tmp_path / "out")
    assert "use base:" in caught.value.todo
    with pytest.raises(CourseError, match="is a quantised model"):
        merging.check_base(base, home / "adapter")


def test_what_is_no_weight_keeps_its_type_and_null_is_not_quantised(home: Path, tmp_path: Path) -> None:
    base = models.make_base(tmp_path / "base")
    change(base / "config.json", quantization_config=None)
    positions = {"positions": torch.arange(8)[None], "mask": torch.ones(4, 4, dtype=torch.bool)}
    rewrite(base / bases.SINGLE, lambda found: found | positions)
    merge(base, home / "adapter", tmp_path / "out", dtype="float16")
    made = models.weights(tmp_path / "out")
    assert all(torch.equal(made[name], tensor) for name, tensor in positions.items())


def test_headers_that_say_something_else_than_their_file_are_refused(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    file = sorted(base.glob("*.safetensors"))[0]
    for header in (b"[1, 2]  ", b'{"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b'{"w":{"dtype":"F32"}}',
                   b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'):  # fmt: skip
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        with pytest.raises(CourseError, match="is damaged"):
            merging.check_base(base, adapter)


def test_another_base_is_refused_and_a_quantised_twin_is_not(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    merging.check_base(base, adapter)
    with pytest.raises(CourseError, match="was trained on"):
        merging.check_base("Qwen/Qwen2.5-7B-Instruct", adapter)
    change(adapter / "adapter_config.json", base_model_name_or_path="somebody/base-bnb-4bit")
    merging.check_base(base, adapter)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "IA3 adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base too"),
        ({"r": 5}, "rank 5"),
        *(({key: ["x"]}, "cannot be merged") for key in plan.OTHER_KINDS),
    ],
)
def test_what_cannot_be_merged_is_refused(
    settings: dict[str, Any], words: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = pair
    change(adapter / "adapter_config.json", **settings)
    with pytest.raises(CourseError, match=words):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not paths.partial_of(tmp_path / "out").exists()


def other_adapter(adapter: Path, rename: tuple[str, str] = ("", ""), keep: int = 10**6, size: int = 0) -> None:
    """The adapter's file with other names, fewer tensors or another width."""
    rewrite(
        adapter / "adapter_model.safetensors",
        lambda tensors: {
            name.replace(*rename): weight[..., : size or None].contiguous()
            for name, weight in list(tensors.items())[:keep]
        },
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"rename": ("q_proj", "query")}, "does not have .nearest: .*q_proj.weight"),
        ({"rename": ("lora_A", "lora_E")}, "which no LoRA has"),
        ({"keep": 0}, "the adapter is empty"),
        ({"size": 3}, "was made for|rank"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(how: dict[str, Any], words: str, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    other_adapter(adapter, **how)
    with pytest.raises(CourseError, match=words):
        merging.check_base(base, adapter)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("0.self_attn.q_proj.lora_B", r"has lora_A for model.layers.0.self_attn.q_proj, and no lora_B"),
        ("1.mlp.up_proj.lora_A", r"has lora_B for model.layers.1.mlp.up_proj, and no lora_A"),
        (".layers.1.", r"has nothing for model.layers.1.*which its settings name"),
    ],
)
def test_an_adapter_that_lost_a_part_is_refused(lost: str, words: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    rewrite(adapter / "adapter_model.safetensors", lambda tensors: {k: v for k, v in tensors.items() if lost not in k})
    with pytest.raises(CourseError, match=words):
        merge(base, adapter, tmp_path / "out")
    change(adapter / "adapter_config.json", layers_to_transform=[0])
    if lost == ".layers.1.":  # asked for like that
        assert merge(base, adapter, tmp_path / "out").merged == 7


def test_an_adapter_bias_without_its_matrices_is_refused(home: Path, tmp_path: Path) -> None:
    adapter = models.make_adapter(home / "base", tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    rewrite(
        adapter / "adapter_model.safetensors",
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name.endswith("lora_B.bias")},
    )
    with pytest.raises(CourseError, match=r"has lora_B.bias for .*q_proj, and no lora_A"):
        merging.check_base(home / "base", adapter)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_a_compressed_adapter_is_refused(kind: torch.dtype, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    rewrite(adapter / "adapter_model.safetensors", lambda tensors: {k: v.to(kind) for k, v in tensors.items()})
    with pytest.raises(CourseError, match=r"holds .*lora_A.weight as (I8|F8_E4M3)"):
        merging.check_base(base, adapter)


def test_a_bias_for_layers_without_one_is_refused(home: Path, tmp_path: Path) -> None:
    adapter = models.make_adapter(home / "base", tmp_path / "adapter", target_modules=["o_proj"], lora_bias=True)
    with pytest.raises(CourseError, match=r"has a bias for .*o_proj, and the base has none"):
        merging.check_base(home / "base", adapter)


def test_files_that_are_missing_old_or_cut_off_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    shard = sorted(base.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for broken in (whole[:-10], b"short", b"\xff" * 64):
        shard.write_bytes(broken)
        with pytest.raises(CourseError, match="is damaged"):
            merge(base, adapter, tmp_path / "out")
    shard.unlink()
    (base / "pytorch_model.bin").touch()
    with pytest.raises(CourseError, match=r"lacks .*old format \(.bin\)"):
        merge(base, adapter, tmp_path / "out")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CourseError, match=r"has no adapter_model.safetensors"):
        bases.open_adapter(adapter)
    with pytest.raises(CourseError, match=r"config.json is missing"):
        bases.open_base(tmp_path)


def test_nothing_is_merged_over_base_adapter_or_strange_files(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    other = shutil.copytree(adapter, tmp_path / "other")  # its folder named as OUT: the real OUT was forgotten
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for out, words in {
        base: "needed", adapter: "needed", tmp_path: "needed", other: "is an adapter", tmp_path / "mine": "be lost",
    }.items():  # fmt: skip
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CourseError, match=words):
            merge(base, adapter, out)
        assert sorted(tmp_path.rglob("*")) == before


def test_names_as_text_and_from_inside_the_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "base")
    assert merge(".", str(home / "adapter"), str(tmp_path / "out")).base == "base"  # type: ignore[arg-type]
    assert merge(home / "base", [home / "adapter"], tmp_path / "out").reused


@pytest.mark.parametrize("name", [None, ""])
def test_where_no_base_is_written_down_names_and_shapes_decide(name: Any, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    change(adapter / "adapter_config.json", base_model_name_or_path=name)
    merging.check_base(base, adapter)
    other_adapter(adapter, rename=("q_proj", "query"))
    with pytest.raises(CourseError, match="does not have"):
        merging.check_base(base, adapter)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": None}, "says no rank"), ({"lora_alpha": None}, "says no rank"), ({"alpha_pattern": {"(": 4}}, "no rank"),
        ([], "cannot be read"),
    ],
)  # fmt: skip
def test_settings_that_say_nothing_are_refused(settings: Any, words: str, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings if settings else settings))
    with pytest.raises(CourseError, match=words):
        merging.check_base(base, adapter)


def test_an_index_that_does_not_fit_its_files_is_refused(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    index, files = base / bases.INDEX, sorted(base.glob("*.safetensors"))
    written = index.read_text()
    for wrong in ({}, {"weight_map": ["x"]}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(CourseError, match=r"is damaged|lacks model.safetensors"):
            merging.check_base(base, adapter)
    index.write_text(written)
    rewrite(files[2], lambda found: {name: one for name, one in found.items() if "norm" not in name})
    with pytest.raises(CourseError, match=r"no file has model.*norm"):
        merging.check_base(base, adapter)
    shutil.copyfile(files[0], files[2])
    with pytest.raises(CourseError, match="is damaged"):
        merging.check_base(base, adapter)


@pytest.mark.parametrize("code", [errno.EIO, errno.EFBIG, errno.EROFS])
def test_a_disk_that_fails_is_told_in_words(
    code: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_the_third_file(monkeypatch, OSError(code, os.strerror(code)))
    with pytest.raises(CourseError, match=os.strerror(code)):
        merge(home / "base", home / "adapter", tmp_path / "out")


def test_unknown_wishes_are_refused(home: Path, tmp_path: Path) -> None:
    for wishes in (
        {"dtype": "int4"}, {"onto": "4bit"}, {"device": "gpu"}, {"device": "cuda:99"},
        {"quantization": {"dtype": "int3"}},
    ):  # fmt: skip
        with pytest.raises(CourseError, match=r"is '|4-bit form was given"):
            merge(home / "base", home / "adapter", tmp_path / "out", **wishes)


def test_numbers_too_large_for_float16_are_not_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    place = bases.open_base(base).weights["model.norm.weight"]
    huge = torch.full(place.shape, 1e6, dtype=torch.bfloat16)
    shards.write_at(place.file, place.start, huge.view(torch.uint8).numpy().tobytes())
    with pytest.raises(CourseError, match=r"model.norm.weight has infinite .* in float16"):
        merge(base, adapter, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert merge(base, adapter, tmp_path / "out").dtype == "bfloat16"


def test_undefined_numbers_in_a_whole_module_are_not_written(home: Path, tmp_path: Path) -> None:
    wishes: dict[str, Any] = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"], "dtype": "bfloat16"}
    adapter = models.make_adapter(home / "base", tmp_path / "adapter", **wishes)
    rewrite(
        adapter / "adapter_model.safetensors",
        lambda found: {name: one * float("nan") if "lm_head" in name else one for name, one in found.items()},
    )
    with pytest.raises(CourseError, match=r"lm_head.weight has infinite .* in bfloat16") as caught:
        merge(home / "base", adapter, tmp_path / "out")
    assert "the adapter itself is broken" in caught.value.todo and "float16" not in caught.value.todo


def test_no_room_on_disk_or_in_memory_is_told_before(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(disk, "free_gib", lambda folder: 0.001)
        with pytest.raises(CourseError, match="writing the merged model needs"):
            merge(home / "base", home / "adapter", out)
    with monkeypatch.context() as patched:
        patched.setattr(platforms, "free_memory_gib", lambda: platforms.Limit(0.1, "a test"))
        with pytest.raises(CourseError, match=r"merging needs .* of memory, and 0.1 GiB are free"):
            merge(home / "base", home / "adapter", out)
    assert not out.exists() and not paths.partial_of(out).exists()


# --- interrupted, damaged, full ---------------------------------------------------------------------------------------

DYING = """
import os, signal, sys
from pathlib import Path
from nbutils import merging
from nbutils.merging import writing
write_at = writing.write_at
def dying(file, offset, data):
    if file.name.startswith("model-00003") and offset:
        os.kill(os.getpid(), signal.SIGKILL)
    return write_at(file, offset, data)
writing.write_at = dying
merging.merge_adapter(*(Path(each) for each in sys.argv[1:]), progress=False)
"""


def kill_in_the_third_file(home: Path, out: Path) -> None:
    line = [sys.executable, "-c", DYING, str(home / "base"), str(home / "adapter"), str(out)]
    assert subprocess.run(line, check=False).returncode == -signal.SIGKILL
    assert not out.exists() and paths.stamp(out) is None and paths.stamp(paths.partial_of(out)) is None


def test_a_killed_merge_leaves_nothing_that_looks_finished_and_goes_on_by_file(home: Path, tmp_path: Path) -> None:
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    kill_in_the_third_file(home, out)
    shutil.copytree(paths.partial_of(out), paths.partial_of(tmp_path / "damaged"))
    report = merge(home / "base", home / "adapter", out)
    assert report.resumed_shards == 2 and "2 files were there" in str(report)
    assert not merge(home / "base", home / "adapter", fresh).resumed_shards
    assert same(out, fresh) and not paths.partial_of(out).exists() and not (out / writing.JOURNAL).exists()

    first = next(paths.partial_of(tmp_path / "damaged").glob("model-00001*"))
    with open(first, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    assert merge(home / "base", home / "adapter", tmp_path / "damaged").resumed_shards == 1
    assert same(tmp_path / "damaged", fresh)


@pytest.mark.parametrize("kind", ["k_proj.weight", "norm.weight", "k_proj.bias"])
def test_a_finished_merge_does_not_count_for_other_weights_of_the_same_name(
    kind: str, home: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = pair
    merge(home / "base", home / "adapter", tmp_path / "out")
    assert merge(base, adapter, tmp_path / "out").reused  # the same content elsewhere
    for file in base.glob("*.safetensors"):
        rewrite(file, lambda found: {name: one + 1 if name.endswith(kind) else one for name, one in found.items()})
    assert not merge(base, adapter, tmp_path / "out").reused
    merge(base, adapter, tmp_path / "fresh")
    assert same(tmp_path / "out", tmp_path / "fresh")
    merging.cast_model(home / "base", tmp_path / "cast", "float16", progress=False)
    assert not merging.cast_model(base, tmp_path / "cast", "float16", progress=False).reused


KILLED_THERE = """
import os, signal, sys
from pathlib import Path
from nbutils import merging
from nbutils.merging import streaming, writing
STEP = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
merging.merge_adapter(*(Path(each) for each in sys.argv[1:]), progress=False)
"""


def test_a_merge_killed_in_its_last_step_or_in_its_journal_leaves_no_trace(home: Path, tmp_path: Path) -> None:
    """Whatever the moment: finished files are kept, and nothing but the model is in the folder afterwards."""
    for step, kept in {"streaming.write_companions": 3, "writing.write_json": 0}.items():
        code = KILLED_THERE.replace("STEP", step)
        out = tmp_path / step
        line = [sys.executable, "-c", code, str(home / "base"), str(home / "adapter"), str(out)]
        assert subprocess.run(line, check=False).returncode == -signal.SIGKILL
        (paths.partial_of(out) / f".{writing.JOURNAL}.7.partial").touch()
        (paths.partial_of(out) / ".ipynb_checkpoints").mkdir()
        assert merge(home / "base", home / "adapter", out).resumed_shards == kept
        assert not [file.name for file in out.iterdir() if "journal" in file.name]


def test_remains_of_another_merge_are_not_taken_over(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fail_in_the_third_file(monkeypatch, OSError(errno.ENOSPC, "full"))
    with pytest.raises(CourseError, match="filled up during the merge"):
        merge(home / "base", home / "adapter", out)
    assert len(list(paths.partial_of(out).glob("model-*"))) >= 2
    monkeypatch.undo()
    other = models.make_adapter(home / "base", tmp_path / "other", seed=5)
    assert not merge(home / "base", other, out).resumed_shards
    assert same(out, Path(merge(home / "base", other, tmp_path / "fresh").folder))


def fail_in_the_third_file(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    write_at = shards.write_at

    def failing(file: Path, offset: int, data: Any) -> shards.Piece:
        if file.name.startswith("model-00003") and offset:
            raise problem
        return write_at(file, offset, data)

    monkeypatch.setattr(writing, "write_at", failing)


def test_a_disk_that_loses_what_was_written_is_noticed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_at = shards.write_at

    def losing(file: Path, offset: int, data: Any) -> shards.Piece:
        piece = write_at(file, offset, data)
        write_at(file, offset, b"\x00" * min(8, len(memoryview(data))))
        return piece

    monkeypatch.setattr(writing, "write_at", losing)
    with pytest.raises(CourseError, match="does not hold what was written"):
        merge(home / "base", home / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_merge_is_kept_and_one_of_another_adapter_replaced(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = merge(home / "base", home / "adapter", out)
    assert paths.stamp(out) == merging.describe(home / "base", home / "adapter", "bfloat16")
    written = (out / "config.json").stat().st_mtime_ns
    again = merge(home / "base", home / "adapter", out)
    assert again.reused and "nothing to do" in str(again) and (out / "config.json").stat().st_mtime_ns == written
    assert (again.merged, again.copied, again.bytes) == (first.merged, first.copied, first.bytes)
    other = models.make_adapter(home / "base", tmp_path / "other", seed=5)
    assert not merge(home / "base", other, out).reused


# --- what the folder holds, and where it lies -------------------------------------------------------------------------


def test_the_folder_speaks_as_the_training_did(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = shutil.copytree(paths.TINY_MODEL, tmp_path / "base")
    adapter = models.make_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "plain", dtype="float16")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template
        == AutoTokenizer.from_pretrained(base).chat_template
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0]['content'] }} trained"
    tokenizer.save_pretrained(adapter)
    half = shutil.copytree(adapter, tmp_path / "half/adapter")
    (half / "tokenizer.json").unlink()  # settings without a vocabulary: the base has one
    merge(base, half, tmp_path / "half/out", dtype="float16")
    spoken = AutoTokenizer.from_pretrained(tmp_path / "half/out")
    assert spoken.chat_template.endswith("trained") and spoken.get_vocab() == tokenizer.get_vocab()
    change(base / "config.json", torch_dtype="float32")
    merge(base, adapter, tmp_path / "out", dtype="float16")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template.endswith("trained")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "float16" and "torch_dtype" not in config
    assert (tmp_path / "out/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert models.load(tmp_path / "out", "auto").dtype == torch.float16


def test_a_hub_id_is_found_in_the_cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    repo = tmp_path / "models--somebody--base"
    shutil.copytree(home / "base", repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_OFFLINE", True)
    merging.check_base("somebody/base", home / "adapter")
    report = merge("somebody/base", home / "adapter", tmp_path / "out")
    assert report.base == "somebody/base" == bases.called(repo / "snapshots" / revision)
    with pytest.raises(CourseError, match="nobody/base cannot be fetched"):
        merge("nobody/base", home / "adapter", tmp_path / "other")


def test_a_model_that_does_not_fit_the_run_folder_goes_to_scratch_and_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lessons.RunFolder(paths.make_folder(tmp_path / "keep/run", "a test"))
    folders = platforms.Folders(tmp_path, tmp_path / "scratch", tmp_path / "keep", None)
    monkeypatch.setattr(disk, "free_gib", lambda folder: 50.0 if folder.is_relative_to(folders.scratch) else 10.0)
    assert merging.choose_place(run, folders, 8) == run.path / "merged" == run.merged
    place = merging.choose_place(run, folders, 15)
    assert place == folders.scratch / "run/merged" == lessons.RunFolder(run.path).merged
    assert "no room for 15.0 GiB" in capsys.readouterr().out
    assert merging.choose_place(run, folders, 8) == run.path / "merged" == run.merged  # there is room again
    merging.choose_place(run, folders, 15)
    monkeypatch.setattr(disk, "folder_gib", lambda folder: 40.0 if folder == paths.partial_of(place) else 0.0)
    assert merging.choose_place(run, folders, 80) == place  # half of it is written already
    monkeypatch.setattr(disk, "folder_gib", lambda folder: 0.0)
    assert merging.choose_place(run, folders, 8) == run.merged
    for folder in (run.adapter, run.merged):
        with paths.whole_folder(folder, {"adapter": None} if folder == run.merged else {"steps": 3}):
            pass
    assert merging.choose_place(run, folders, 15) == place  # what is there is of another adapter
    with paths.whole_folder(place, {"adapter": {"steps": 3}}):
        pass
    assert merging.choose_place(run, folders, 99) == place == run.merged  # finished: no more room is needed
    with pytest.raises(CourseError, match=r"the merged model needs 60.0 GiB"):
        merging.choose_place(lessons.RunFolder(paths.make_folder(tmp_path / "keep/other", "a test")), folders, 60)
    shutil.rmtree(folders.scratch)  # another machine: the note says nothing any more
    assert lessons.RunFolder(run.path).merged == run.path / "merged"


def test_the_command_merges_and_says_what_it_did(home: Path, tmp_path: Path) -> None:
    line = ["merge", str(home / "base"), str(home / "adapter"), str(tmp_path / "out"), "--dtype", "float32"]
    ran = CliRunner().invoke(cli.app, line)
    assert ran.exit_code == 0 and "14 weights changed" in ran.output, ran.output
    assert same(tmp_path / "out", Path(merge(home / "base", home / "adapter", tmp_path / "x", dtype="float32").folder))
    other = [*line[:-1], "float16"]
    refused = CliRunner().invoke(cli.app, other)
    assert refused.exit_code == 1 and "holds another model" in refused.output and "float32" in refused.output
    assert CliRunner().invoke(cli.app, line).exit_code == 0  # the very same: nothing to do
    with open(next(Path(other[3]).glob("generation_config.json"), Path(other[3]) / "config.json"), "a") as file:
        file.write(" ")  # a model that was changed by hand is one all the same
    assert CliRunner().invoke(cli.app, other).exit_code == 1
    assert CliRunner().invoke(cli.app, [*other, "--replace"]).exit_code == 0


def test_casting_is_a_merge_without_an_adapter(home: Path, tmp_path: Path) -> None:
    report = merging.cast_model(home / "base", tmp_path / "out", "float16", progress=False)
    wanted = {name: weight.half() for name, weight in models.weights(home / "base").items()}
    made = models.weights(tmp_path / "out")
    assert report.copied == len(wanted) and all(torch.equal(made[name], wanted[name]) for name in wanted)
    assert merging.cast_model(home / "base", tmp_path / "out", "float16", progress=False).reused


GROWTH = """
import sys
from collections.abc import Callable
from pathlib import Path
import torch, transformers
from nbutils import merging
def peak(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
torch.zeros(8).add(1)
before = peak()
base, adapter, out, dtype = sys.argv[1:]
merging.merge_adapter(base, Path(adapter), Path(out), dtype=dtype, progress=False)
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("stack", "dtype"), [((), "auto"), ((32, 2048, 2048), "float16")], ids=["matrix", "experts"])
def test_memory_does_not_grow_with_the_weight(stack: tuple[int, ...], dtype: str, home: Path, tmp_path: Path) -> None:
    """A single weight of 256 MiB, which with its change would be 1 GiB in float32, merged in far less.

    Fused experts are few rows of millions of numbers each; they are cast, and a small weight beside them changed.
    """
    from safetensors.torch import save_file

    name, shape = "model.layers.0.mlp.up_proj", (64, 32) if stack else (16384, 8192)
    base = paths.make_folder(tmp_path / "base", "a test")
    (base / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    header, places = shards.lay_out(
        base / bases.SINGLE, {f"{name}.weight": ("BF16", shape)} | ({"experts": ("BF16", stack)} if stack else {})
    )
    with open(base / bases.SINGLE, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(place.size for place in places.values()))
    adapter = shutil.copytree(home / "adapter", tmp_path / "adapter")
    factors = {"lora_A": torch.ones(4, shape[1]), "lora_B": torch.ones(shape[0], 4)}
    save_file(
        {f"base_model.model.{name}.{part}.weight": weight for part, weight in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    line = [sys.executable, "-c", GROWTH, str(base), str(adapter), str(tmp_path / "out"), dtype]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 150, ran.stdout
    (tmp_path / "out" / bases.SINGLE).unlink()
