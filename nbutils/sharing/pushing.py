"""Uploads, opt-in and private unless said otherwise: hub:owner/name, modelscope:owner/name, kaggle:owner/name.

The token comes from platforms.secret, goes to the library alone and is never shown.
Not here: what stands on the model's page (card), which files are given away (contents).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import masking, paths, platforms
from nbutils.errors import CourseError
from nbutils.sharing import contents
from nbutils.sharing.card import model_card

MODELSCOPE_PRIVATE = 1  # as its library calls it; 3 is internal, 5 public
ABSENT = (403, 404)  # what is public can be seen by all: it is not there, or hidden and no one else's to fill


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, and where it is."""

    url: str
    private: bool
    gib: float

    def __str__(self) -> str:
        return f"{self.url} ({self.gib:.2f} GiB, {'private' if self.private else 'PUBLIC'})"


@dataclass(frozen=True)
class Place:
    """One kind of target: its package, its secrets (any full group of them will do), the upload, the page.

    The upload sends nothing to what it cannot tell to be private, unless that is wanted, and says if it is private.
    """

    package: str
    secrets: tuple[tuple[str, ...], ...]
    get_token: str
    upload: Callable[[Path, str, dict[str, str], bool], bool]
    page: str


def push(folder: str | Path, to: str, *, private: bool = True) -> Pushed:
    """Upload a model folder with a card of its own; nothing leaves this machine unless `to` says where to."""
    kind, name = parse(to)
    place = PLACES[kind]
    folder = contents.model_folder(folder)
    files = contents.model_files(folder)
    secrets = _secrets(to, place)
    with contents.staged(folder, files, model_card(folder, name)) as staged:
        try:
            private = place.upload(staged, name, secrets, private)
        except ImportError as problem:
            raise CourseError(
                f"{place.package} is not installed here, or too old.", f"{place.package} in its newest version",
                f"pip install {place.package} --upgrade, and run this again",
            ) from problem  # fmt: skip
        except CourseError:
            raise
        except Exception as problem:
            told = masking.mask_secrets(str(problem))[:300]
            raise CourseError(
                f"the upload to {to} failed: {type(problem).__name__}: {told}",
                f"a token that may write to {name}, and a network that reaches it",
                f"check name and token ({place.get_token}); what was uploaded already is not sent again",
            ) from None  # the original may hold the token in its request
    return Pushed(place.page.format(name=name), private, contents.size_of(files) / paths.GIB)


def parse(to: str) -> tuple[str, str]:
    """Kind and name of a target."""
    kind, _, name = to.strip().partition(":")
    if kind not in PLACES or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name):
        raise CourseError(
            f"the target is {masking.mask_secrets(to)!r}.",
            "hub:owner/name, modelscope:owner/name, kaggle:owner/name or a file.tar",
            "write it so, with your own account as owner",
        )  # fmt: skip
    return kind, name


def _secrets(to: str, place: Place) -> dict[str, str]:
    """The first full group of secrets that this machine has."""
    for group in place.secrets:
        found = {name: value for name in group if (value := platforms.secret(name))}
        if len(found) == len(group):
            return found
    wanted = " or ".join(" and ".join(group) for group in place.secrets)
    raise CourseError(
        f"pushing to {to} needs {wanted}, and it was not found.", "a token with the right to write",
        f"make one at {place.get_token}, then keep it as a secret of that name (Colab: the key symbol; "
        "Kaggle: Add-ons > Secrets; elsewhere an environment variable)",
    )  # fmt: skip


def _to_hub(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=platforms.network.HUB, token=secrets["HF_TOKEN"])  # never to a mirror
    api.create_repo(name, private=private, exist_ok=True)
    hidden = api.model_info(name).private is True
    _require_private(private, hidden, name)
    api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model and card")
    return hidden


def _to_modelscope(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    from modelscope.hub.api import HubApi

    token = secrets["MODELSCOPE_API_TOKEN"]
    api = HubApi(token=token)
    about: dict[str, Any] = {"repo_id": name, "repo_type": "model", "token": token}
    existed = api.repo_exists(**about)
    if not existed:
        api.create_repo(**about, visibility="private" if private else "public", exist_ok=False)
    seen = {key.lower(): value for key, value in dict(api.get_model(name)).items()}.get("visibility")
    hidden = seen == MODELSCOPE_PRIVATE or (private and not existed and seen is None)
    _require_private(private, hidden, name)
    api.upload_folder(**about, folder_path=str(folder), commit_message="Model and card")
    return hidden


def _to_kaggle(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    import kagglehub

    before = {key: os.environ.get(key) for key in secrets}
    os.environ.update(secrets)  # the library looks nowhere else
    try:
        hidden = _hidden_at_kaggle(name)
        if hidden and not private:
            raise CourseError(
                "Kaggle makes every new model private.", "private", "push it so, and make it public on its page there"
            )
        _require_private(private, hidden, name)
        kagglehub.model_upload(f"{name}/transformers/default", str(folder), version_notes="Model and card")
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    return hidden


def _hidden_at_kaggle(name: str) -> bool:
    """Whether the model is private there, or not there yet: the library makes new ones private."""
    from kagglehub.clients import build_kaggle_client
    from kagglesdk.models.types.model_api_service import ApiGetModelRequest

    request = ApiGetModelRequest()
    request.owner_slug, request.model_slug = name.split("/")
    try:
        with build_kaggle_client() as client:
            return client.models.model_api_client.get_model(request).is_private is True
    except Exception as problem:
        if getattr(getattr(problem, "response", None), "status_code", None) in ABSENT:
            return True
        raise


def _require_private(private: bool, hidden: bool, name: str) -> None:
    """A repository that was there already may be public: nothing is uploaded into it unasked."""
    if private and not hidden:
        raise CourseError(
            f"{name} exists already and is public, or does not say that it is private.",
            "a private repository, or an upload that is meant to be public",
            "choose another name, make that one private on its page, or push with private=False (--public)",
        )  # fmt: skip


PLACES: dict[str, Place] = {
    "hub": Place(
        "huggingface_hub", (("HF_TOKEN",),), "huggingface.co/settings/tokens", _to_hub,
        "https://huggingface.co/{name}",
    ),
    "modelscope": Place(
        "modelscope", (("MODELSCOPE_API_TOKEN",),), "modelscope.cn/my/myaccesstoken", _to_modelscope,
        "https://modelscope.cn/models/{name}",
    ),
    "kaggle": Place(
        "kagglehub", (("KAGGLE_API_TOKEN",), ("KAGGLE_USERNAME", "KAGGLE_KEY")), "kaggle.com/settings",
        _to_kaggle, "https://www.kaggle.com/models/{name}",
    ),
}  # fmt: skip
