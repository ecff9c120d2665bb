"""Behaves as Colab's `drive` and `userdata` are documented to, failures included; none of its code.

Variables say what the machine does: FAKE_DRIVE and FAKE_USERDATA (the outcome), FAKE_SECRETS (JSON), FAKE_NOT_GRANTED
(a name). Calls are written to fake_calls.txt.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(os.environ.get("NBUTILS_FS_ROOT", "/"))
SecretNotFoundError, NotebookAccessError, TimeoutException = (
    type(name, (Exception,), {}) for name in ("SecretNotFoundError", "NotebookAccessError", "TimeoutException")
)


def called(what: str) -> None:
    with open(ROOT / "fake_calls.txt", "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def mount(mountpoint: str, force_remount: bool = False, timeout_ms: int = 120000) -> None:
    called(f"mount {timeout_ms}")
    place, outcome = Path(mountpoint), os.environ.get("FAKE_DRIVE", "headless")
    if outcome == "liar":
        return
    if outcome != "ok":
        raise ValueError(f"mount failed for hf_{'x' * 30}")
    if place.is_dir() and any(place.iterdir()):
        raise ValueError("Mountpoint must not already contain files")
    (place / "My Drive").mkdir(parents=True)
    (place / "MyDrive").symlink_to("My Drive")
    (ROOT / "proc").mkdir(exist_ok=True)
    (ROOT / "proc/mounts").write_text(f"drive {place} fuse.drive rw,nosuid,nodev 0 0\n", encoding="utf-8")


def get(key: str) -> str:
    if os.environ.get("FAKE_USERDATA", "timeout") == "timeout":
        raise TimeoutException(f"Requesting secret {key} timed out. Secrets can only be fetched from the Colab UI.")
    if key == os.environ.get("FAKE_NOT_GRANTED"):
        raise NotebookAccessError(f"Notebook does not have access to secret {key}")
    known = json.loads(os.environ.get("FAKE_SECRETS", "{}"))
    if key not in known:
        raise SecretNotFoundError(f"Secret {key} does not exist.")
    return known[key]


drive, userdata = SimpleNamespace(mount=mount), SimpleNamespace(get=get)
