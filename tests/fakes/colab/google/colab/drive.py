"""`drive.mount` in the order of checks the real one has."""

import os
import time
from pathlib import Path

from google.colab import ROOT, MessageError, called, kernel, wait


class TIMEOUT(Exception):
    """As pexpect calls it."""


def mount(mountpoint: str, force_remount: bool = False, timeout_ms: int = 120000) -> None:
    called(f"mount {timeout_ms}")
    place, outcome = Path(mountpoint), os.environ.get("FAKE_DRIVE", "headless")
    if not (ROOT / "var/colab/hostname").exists():
        raise NotImplementedError("google.colab.drive is unsupported in this environment.")
    _ = os.environ["TBE_EPHEM_CREDS_ADDR"]
    if outcome != "hang":
        kernel()
    while outcome == "hang":
        try:
            time.sleep(60)
        except Exception:
            continue
    failures = {
        "denied": MessageError("Error: credential propagation was unsuccessful"),
        "pexpect": TIMEOUT("Timeout exceeded."),
        "policy": ValueError("The domain policy has disabled Drive File Stream: see your administrator"),
        "too_big": ValueError("mount failed: timeout during initial read of root folder; see faq.html#drive-timeout"),
        "odd": OSError(28, "no room for hf_" + "x" * 30),
        "headless": ValueError("mount failed"),
    }
    if outcome in failures:
        wait()
        raise failures[outcome]
    if place.is_dir() and any(place.iterdir()):
        raise ValueError("Mountpoint must not already contain files")
    place.mkdir(parents=True, exist_ok=True)
    if outcome == "liar":
        return
    (place / "My Drive").mkdir()
    (place / "MyDrive").symlink_to("My Drive")
    (ROOT / "proc").mkdir(exist_ok=True)
    with open(ROOT / "proc/mounts", "a", encoding="utf-8") as file:
        file.write("drive /content/drive fuse.drive rw,nosuid,nodev,relatime,user_id=0 0 0\n")
