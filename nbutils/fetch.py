"""Downloads the model and the data of a training before it starts: `python -m nbutils fetch`.

It imports no torch and needs no GPU, so it runs where time is cheap: AutoDL's machines without a GPU have 2 GiB.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from nbutils import config, disk, files, hardware, install, models, platforms
from nbutils.data import read
from nbutils.errors import CourseError, DownloadFailed
from nbutils.language import tr
from nbutils.plan import gpus
from nbutils.platforms import Folders, network

DATA_COPIES = 2  # the files of a hub dataset, and the rows that `datasets` makes of them


def run(model: str, data: str, profile: str) -> None:
    """Download what the lessons need with these parameters; without any, what PROFILE auto trains on this GPU."""
    platform = platforms.detect()
    folders = platforms.folders(platform)
    if profile in ("", "auto"):
        profile = "" if model else profile_here()
    given = {"PROFILE": profile, "MODEL": model, "DATA": data}
    if profile:
        chosen = config.load(profile)
        model = model or chosen.model
        data = data or chosen.course.data
    choice = models.meant(model, folders.inputs)
    platforms.use_model_cache(platform, folders)
    remote = not Path(choice.value).is_absolute()
    for line in platforms.prepare_network(platform, probe=remote or is_hub_dataset(data, folders)):
        print(line, flush=True)
    place = Path(fetch_model(choice.value, folders.work) if remote else choice.value)
    size = sum(files.sizes(place).values()) / 1e9
    print(tr("model     {folder}, {size:.2f} GB ({reason})", folder=place, size=size, reason=choice.reason))
    if data:
        paths = fetch_data(data, folders)
        size = sum(path.stat().st_size for path in paths) / 1e6
        place = paths[0] if len(paths) == 1 else paths[0].parent
        print(tr("data      {folder}, {size:.3g} MB", folder=place, size=size))
    else:
        print(tr("data      the rows that come with the course"))
    parameters = " ".join(f"-p {name} {shlex.quote(value)}" for name, value in given.items() if value)
    print(tr("With {parameters}, lessons 01 to 05 download no other model and no other rows.", parameters=parameters))


def find_model(name: str) -> str:
    """The folder of a model named as in the lessons, or its hub id if it is in the cache; else it is downloaded."""
    platform = platforms.detect()
    folders = platforms.folders(platform)
    platforms.use_model_cache(platform, folders)
    model = str(models.meant(name, folders.inputs).value)
    if Path(model).is_absolute() or models.is_cached(model):
        return model
    for line in platforms.prepare_network(platform):
        print(line, flush=True)
    return fetch_model(model, folders.work)


def profile_here() -> str:
    """What PROFILE auto chooses for the GPU that the driver lists."""
    if gpu := hardware.driver_gpu():
        return gpus.profile_for(gpu)
    profiles = [f"{name} ({config.load(name).model})" for name in ("laptop", *gpus.PROFILES)]
    raise CourseError(
        tr("There is no GPU here, so PROFILE auto cannot say what you will train."),
        allowed=tr(
            "--profile with one of: {profiles}; or a model: tiny, {models}, a hub id (owner/name), a folder",
            profiles=", ".join(profiles),
            models=", ".join(models.known_models()),
        ),
        todo=tr(
            "Name the profile of the GPU you will rent, as in `python -m nbutils fetch --profile "
            "ampere_24gb`, or the model, as in `python -m nbutils fetch Qwen2.5-7B`."
        ),
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
    raise failed or CourseError(
        tr(
            "{model} is not in the local cache (at least not completely), and the model hub does not answer.",
            model=hub_id,
        ),
        todo=tr(
            "Connect this machine (or set HF_ENDPOINT to a mirror it reaches), set MODEL to a folder, or "
            'PROFILE="tiny".'
        ),
    )


def is_hub_dataset(data: str, folders: Folders) -> bool:
    """Whether DATA names a dataset of the hub and no file, folder or attached input."""
    name = read.HUB_NAME.fullmatch(data)
    if name is None or read.format_of(Path(name["repo"])):
        return False
    here = Path(data).expanduser().parent.exists()
    return not here and not platforms.find_input(folders.inputs, data)


def fetch_data(data: str, folders: Folders) -> list[Path]:
    """The files of DATA, as lesson 02 reads them; those of a hub dataset are downloaded if the disk has the room."""
    name = read.HUB_NAME.fullmatch(data)
    if name and is_hub_dataset(data, folders):
        hub = install.import_package("huggingface_hub")
        install.import_package("datasets")
        with suppress(OSError, hub.errors.OfflineModeIsEnabled):  # what cannot be asked now may be in the cache
            dataset = hub.HfApi().dataset_info(name["repo"], files_metadata=True)
            size = 0
            for file in dataset.siblings:
                if file.rfilename.startswith(name["folder"] or ""):
                    size += file.size or 0
            disk.require_disk(Path(hub.constants.HF_HUB_CACHE), DATA_COPIES * size / files.GIB, name["repo"])
    return read.find_files(data)
