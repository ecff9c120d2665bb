"""`drive.mount` in the order of checks the real one has."""

from __future__ import annotations

import os
import time
from pathlib import Path

from google.colab import ROOT, _message, called, kernel, wait


class TIMEOUT(Exception):
    """As pexpect calls it."""


def mount(mountpoint: str, force_remount: bool = False, timeout_ms: int = 120000, readonly: bool = False) -> None:
    """Mount Drive, or fail as it does there."""
    called(f"mount {timeout_ms}")
    place, outcome = Path(mountpoint), os.environ.get("FAKE_DRIVE", "headless")
    if not (ROOT / "var/colab/hostname").exists():
        raise NotImplementedError("google.colab.drive is unsupported in this environment.")
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    if os.environ.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE":
        raise NotImplementedError("google.colab.drive is unsupported in this environment.")
    _ = os.environ["TBE_EPHEM_CREDS_ADDR"]
    kernel()
    _ask(outcome)
    if _listed(place) and not force_remount:
        print(f"Drive already mounted at {mountpoint}; to attempt to forcibly remount, use force_remount=True.")
        return
    if place.is_symlink():
        raise ValueError("Mountpoint must not be a symlink")
    if place.is_dir() and any(place.iterdir()):
        raise ValueError("Mountpoint must not already contain files")
    _begin(outcome, place)


def _ask(outcome: str) -> None:
    """Ask the page; without one this waits, and does not fail yet."""
    if outcome in ("headless", "pexpect"):
        wait()
    if outcome == "hang":
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue
    if outcome == "denied":
        raise _message.MessageError("Error: credential propagation was unsuccessful")


def _begin(outcome: str, place: Path) -> None:
    if outcome == "pexpect":
        raise TIMEOUT("Timeout exceeded.")
    if outcome == "policy":
        raise ValueError("The domain policy has disabled Drive File Stream: see your administrator")
    if outcome == "too_big":
        raise ValueError("mount failed: timeout during initial read of root folder; see faq.html#drive-timeout")
    if outcome == "odd":
        raise OSError(28, "no room for hf_" + "x" * 30)
    if outcome == "headless":
        raise ValueError("mount failed")
    place.mkdir(parents=True, exist_ok=True)
    if outcome == "liar":
        return
    (place / "My Drive").mkdir()
    (place / "MyDrive").symlink_to("My Drive")
    (ROOT / "proc").mkdir(exist_ok=True)
    with open(ROOT / "proc/mounts", "a", encoding="utf-8") as file:
        file.write("drive /content/drive fuse.drive rw,nosuid,nodev,relatime,user_id=0 0 0\n")
    print(f"Mounted at {place}")


def _listed(place: Path) -> bool:
    mounts = ROOT / "proc/mounts"
    return mounts.exists() and " fuse.drive " in mounts.read_text(encoding="utf-8")
