"""Training on a busy CPU: compute threads that spin while they wait against threads that sleep.

    python benchmarks/threads.py [BUSY]     BUSY other processes (default 4) keep the cores occupied meanwhile

Trains lesson 03 for 10 steps with each OMP_WAIT_POLICY, prints the seconds and their ratio, and keeps them in
benchmarks/results/threads.json. The lessons set `passive` (nbutils.hardware.share_processors).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from nbutils.files import write_json

ROOT = Path(__file__).resolve().parent.parent


def train_seconds(policy: str) -> float:
    """Seconds of training of a fresh 10-step run; an empty policy is the library's own default."""
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {"NBUTILS_HOME": home, "OMP_WAIT_POLICY": policy}
        lesson = [sys.executable, str(ROOT / "notebooks/03_qlora.py"), "--PROFILE", "tiny", "--MAX_STEPS", "10"]
        subprocess.run(lesson, env=env, check=True, capture_output=True)
        facts = json.loads((Path(home) / "tiny/facts.json").read_text(encoding="utf-8"))
    return facts["lessons"]["03_qlora"]["train_seconds"]


def main(busy: int) -> None:
    """The policies under the same load, one after the other."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        seconds = {policy or "default": train_seconds(policy) for policy in ("", "active", "passive")}
    finally:
        for process in load:
            process.kill()
    ratio = round(seconds["default"] / seconds["passive"], 2)
    result = {"busy_processes": busy, "cores": os.cpu_count(), "train_seconds": seconds, "default_over_passive": ratio}
    write_json(ROOT / "benchmarks/results/threads.json", result)
    print(result)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
