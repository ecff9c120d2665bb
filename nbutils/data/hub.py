"""A dataset of the hub: which of its files hold rows, and their download into the hub's own cache.

Not here: choosing a mirror (platforms.network does, through HF_ENDPOINT), and reading what came.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from nbutils.errors import CourseError
from nbutils.masking import mask_secrets
from nbutils.platforms import network

HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<inside>[^:]+))?")
ALLOWED = "the name of a dataset on the hub as owner/name or owner/name:folder, or a file of your own"
OWN_FILE = "download it where there is a network, and give the path of the file"


def download(repo: str, inside: str, endings: tuple[str, ...]) -> Path:
    """The local folder (or file) with the rows of a hub dataset, downloaded once; only what is read is fetched."""
    online = network.hub_online()
    try:
        names = _listing(repo) if online else _cached_names(repo)
        chosen = _choose(repo, inside, names, endings)
        if online:
            place = mask_secrets(_endpoint() or network.HUB)
            print(f"The dataset {repo} comes from {place}, or from an earlier download")
        return _snapshot(repo, chosen, endings, online) / chosen
    except CourseError:
        raise
    except Exception as problem:  # the client's errors are of several libraries, by version
        raise _explained(repo, problem, online) from problem


def _endpoint() -> str | None:
    """The mirror as it is now: the client would keep the one it saw when it was imported."""
    return os.environ.get("HF_ENDPOINT") or None


def _listing(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    return list(HfApi(endpoint=_endpoint()).list_repo_files(repo, repo_type="dataset"))


def _cached_names(repo: str) -> list[str]:
    """The files an earlier download left on this machine."""
    from huggingface_hub import snapshot_download

    # a pattern nothing fits asks for the folder alone: what is in it is checked when it is chosen
    folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=True, allow_patterns=["-"]))
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _snapshot(repo: str, chosen: str, endings: tuple[str, ...], online: bool) -> Path:
    """Fetch the chosen file, or the data files of the chosen folder; offline, make sure that they are all there."""
    from huggingface_hub import snapshot_download

    within = "" if chosen == "." else f"{chosen}/"
    one = chosen.lower().endswith(endings)
    return Path(
        snapshot_download(
            repo,
            repo_type="dataset",
            endpoint=_endpoint(),
            local_files_only=not online,
            allow_patterns=[chosen] if one else [f"{within}*{ending}" for ending in endings],
            ignore_patterns=None if one else [f"{within}*/*"],
        )
    )


def _choose(repo: str, inside: str, names: list[str], endings: tuple[str, ...]) -> str:
    """The one folder or file of the dataset to read: the one asked for, or the only one with data in it."""
    visible = sorted(name for name in names if not name.startswith("."))
    files = [PurePosixPath(name) for name in visible if name.lower().endswith(endings)]
    asked = PurePosixPath(inside.strip("/") or ".")
    if asked in files:
        return str(asked)
    folders = sorted({str(file.parent) for file in files if asked in file.parents})
    if str(asked) in folders and (inside or len(folders) == 1):
        return str(asked)
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise _nothing(repo, inside, visible)
    choices = [str(file) for file in files if str(file.parent) == "."] + [name for name in folders if name != "."]
    raise CourseError(
        f"{repo} holds several sets of rows: {', '.join(choices[:12])}{', …' if len(choices) > 12 else ''}.",
        "one folder or file of it",
        f"name one: {', '.join(f'{repo}:{choice}' for choice in choices[:4])}",
    )


def _nothing(repo: str, inside: str, visible: list[str]) -> CourseError:
    held = ", ".join(dict.fromkeys(name.split("/")[0] for name in visible[:200])) or "nothing"
    return CourseError(
        f"The dataset {repo} holds no rows the course can read{f' under {inside!r}' if inside else ''}: only {held}.",
        ".jsonl, .json, .csv, .tsv, .parquet, also as .gz or .zst",
        'correct the name after the colon, or save it yourself: datasets.load_dataset(...).to_json("my_data.jsonl")',
    )


def _explained(repo: str, problem: Exception, online: bool) -> CourseError:
    """What the hub's refusal means for the learner."""
    kind = type(problem).__name__
    if kind == "GatedRepoError":
        todo = "accept its terms on its page of the hub, then set HF_TOKEN to a token of yours that may read it"
        return CourseError(f"The dataset {repo} is gated: the hub wants to know who reads it.", ALLOWED, todo)
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        seen = f"{repo!r} is no file here, and the hub has no dataset of that name, or it is private."
        todo = "correct the name; for a private dataset set HF_TOKEN to a token that may read it"
        return CourseError(seen, ALLOWED, todo)
    if not online:
        why = "HF_HUB_OFFLINE forbids the network" if network.offline() else "the hub does not answer"
        seen = f"{repo!r} is no file here; it looks like a hub dataset, but {why} and no whole copy is on this machine."
        todo = f"correct the path if a file was meant; else {OWN_FILE}, or set HF_ENDPOINT to a mirror that answers"
        return CourseError(seen, ALLOWED, todo)
    first = next(iter(str(problem).splitlines()), "")
    todo = f"try again, set HF_ENDPOINT to a mirror that answers, or {OWN_FILE}"
    return CourseError(f"The hub dataset {repo} did not arrive: {kind}: {first}", ALLOWED, todo)
