"""Which model is meant: the bundled one, a short name of the course, a folder, or a hub id that can be had here.

Not here: loading a model. `configs/models.yaml` is the list of short names, with the shapes that memory plans need.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nbutils import disk, paths
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.masking import mask_secrets
from nbutils.platforms import network, places
from nbutils.profiles import packaged
from nbutils.profiles.reading import mistakes, read_sheet, refuse
from nbutils.profiles.schema import Count, Strict, Text

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
INDEX = "model.safetensors.index.json"
DOWNLOADED = "downloaded.json"  # written last into a model folder from ModelScope


class KnownModel(Strict):
    """A model the course knows by a short name."""

    hub: Text
    modelscope: Text
    billions: Annotated[float, Field(gt=0)]
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate: Count
    vocab: Count
    tied: bool


def known_models() -> dict[str, KnownModel]:
    """The models of `configs/models.yaml` by short name."""
    sheet = read_sheet(paths.CONFIGS / "models.yaml")
    wrong = [
        f"{name}.{key}: {said}"
        for name, entry in sheet.tree.items()
        for key, said in mistakes(entry, KnownModel).items()
    ]
    refuse([*sheet.twice, *wrong], str(sheet.file), "models.yaml")
    return {name: KnownModel.model_validate(entry) for name, entry in sheet.tree.items()}


def is_tiny(model: str) -> bool:
    """Whether the bundled model is meant."""
    return model in ("tiny", str(paths.TINY_MODEL))


def is_known(model: str) -> bool:
    """Whether it is one of the course's own models, by its name or its hub id."""
    return is_tiny(model) or any(model in (name, known.hub) for name, known in known_models().items())


def meant(model: str, inputs: Path | None = None) -> Choice:
    """What `from_pretrained` should be given for this name; whether a hub id can be had is asked by `reachable`.

    `inputs` is what was attached to the notebook; a model there is named by the end of its path.
    """
    if is_tiny(model):
        return Choice(model_folder(paths.TINY_MODEL), "bundled with the course: needs no network")
    known = known_models()
    for name, entry in known.items():
        if model.casefold() in (name.casefold(), entry.hub.partition("/")[2].casefold()):
            return Choice(entry.hub, f"{name}, {entry.billions:g} billion parameters")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Choice(model_folder(folder.absolute()), "a folder of this machine")
    attached = places.find_input(inputs, model)
    if attached and attached.is_dir():
        return Choice(model_folder(attached), "attached to this notebook")
    if HUB_ID.fullmatch(model):
        return Choice(model, "a hub id")
    raise _missing(model, list(known))


def name_of(given: str, value: str) -> str:
    """A model as it is written down, to be found again on another machine: no folder where there is a better name."""
    if is_tiny(value):
        return "tiny"
    attached = Path(value).is_absolute() and not Path(given).expanduser().is_dir()
    return given if attached else value


def model_folder(folder: Path) -> str:
    """The folder as text, if a model is in it."""
    if (folder / "config.json").is_file():
        return str(folder)
    adapter = " It is an adapter: merge it first (lesson 04)." if (folder / "adapter_config.json").is_file() else ""
    raise CourseError(
        f"{folder} has no config.json, so it is no model folder.{adapter}",
        "a folder with config.json, safetensors and tokenizer files",
        "check the path, or reinstall the course if this is its bundled model",
    )


def _missing(model: str, known: list[str]) -> CourseError:
    """The error for a folder that is not there, or for a short name nobody knows."""
    allowed = f"tiny, {', '.join(known)}, a hub id (owner/name), or a folder with config.json"
    if model.startswith((".", "~", os.sep)) or os.sep in model:
        return CourseError(f"missing model folder {model}.", allowed, "correct the path in MODEL, or name a model")
    near = difflib.get_close_matches(model, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return CourseError(f"unknown model {model!r}.", allowed, f"{hint}Set MODEL to one of these")


def reachable(model: str, online: Callable[[], bool], work: Path | None = None) -> str:
    """How a model can be had ("folder", "cache", "modelscope", "package", "network"), or "" if it cannot."""
    if Path(model).is_absolute():
        return "folder"
    if _in_cache(model):
        return "cache"
    if work and (modelscope_folder(model, work) / DOWNLOADED).exists():
        return "modelscope"
    if work and network.chosen() == "modelscope" and not network.offline():
        return "modelscope"
    packed = work is not None and model == packaged.HUB_ID
    if work and packed and paths.stamp(packaged.folder_of(work)) is not None:
        return "package"
    if online():
        return "network"
    return "package" if packed and not network.offline() else ""


def fetched(model: str, way: str, work: Path) -> str:
    """What `from_pretrained` is given: a folder for what transformers cannot download itself."""
    if way == "package":
        return packaged.from_package(work)
    return from_modelscope(model, work) if way == "modelscope" else model


def modelscope_folder(hub_id: str, work: Path) -> Path:
    """Where a model from ModelScope lies on this machine; the last two parts are its id there."""
    theirs = next((known.modelscope for known in known_models().values() if known.hub == hub_id), hub_id)
    return work / "modelscope" / theirs


def from_modelscope(hub_id: str, work: Path) -> str:
    """The folder of a model from ModelScope, downloaded if it is not there yet; a broken download is continued."""
    folder = modelscope_folder(hub_id, work)
    theirs = folder.relative_to(work / "modelscope").as_posix()
    if (folder / DOWNLOADED).exists():
        return model_folder(folder)
    billions = next((known.billions for known in known_models().values() if known.hub == hub_id), 0.0)
    disk.require_disk(work, 2.1 * billions, f"{theirs} from ModelScope")
    os.environ.setdefault("MODELSCOPE_CACHE", str(work / "modelscope/.cache"))  # read when it is imported
    print(f"model     {theirs} from ModelScope to {folder}", flush=True)
    from nbutils import install

    try:
        install.import_package("modelscope").snapshot_download(theirs, local_dir=str(folder))
    except CourseError:
        raise
    except Exception as problem:  # the library has a dozen types of its own for what a network can do
        raise CourseError(
            f"ModelScope did not give {theirs} ({type(problem).__name__}: {mask_secrets(str(problem))[:200]}).",
            "a model of that name at www.modelscope.cn, and a connection that holds",
            "run this cell again, it continues; or set NBUTILS_MIRROR to hub or hf-mirror, or MODEL to a folder",
        ) from problem
    paths.write_json(folder / DOWNLOADED, {"modelscope": theirs})
    return model_folder(folder)


def _in_cache(hub_id: str) -> bool:
    """Whether config and all weights of a hub id are in the local cache; half a download does not count."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False

    def found(name: str) -> str | None:
        path = try_to_load_from_cache(hub_id, name)
        return path if isinstance(path, str) else None

    if not found("config.json"):
        return False
    if index := found(INDEX):
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        return all(map(found, shards))
    return found("model.safetensors") is not None


def unreachable(model: str) -> CourseError:
    """The error for a hub id that can be had neither from the cache nor from the network."""
    return CourseError(
        f"{model} is not in the local cache (at least not completely), and the model hub does not answer.",
        "a model in the cache, a hub that answers, or a folder with the model",
        'connect this machine (or set HF_ENDPOINT to a mirror it reaches), set MODEL to a folder, or PROFILE="tiny"',
    )
