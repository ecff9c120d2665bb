"""Simulated platforms: a file-system root of their own, a clean environment, fakes of their packages.

`machine.enter(monkeypatch)` moves this process there until the test ends, `machine.python("-c", code)` runs a process
there. The fakes of packages lie in `tests/fakes/<name>/`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAKES = Path(__file__).resolve().parent / "fakes"


@dataclass
class Machine:
    """A simulated machine: where its paths begin, its environment, the fake packages it has installed."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def make(self, *folders: str) -> Machine:
        """Add folders; files are added by `write`."""
        for folder in folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        return self

    def write(self, place: str, text: str) -> Path:
        """Write one file of the machine."""
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def environment(self) -> dict[str, str]:
        """A clean environment: PATH and HOME of the machine, its own variables, nothing inherited."""
        home = self.root / "root"
        home.mkdir(parents=True, exist_ok=True)
        import_path = []
        gpu = ""
        for name in self.packages:  # such as colab, torch_cpu or torch_t4
            package, _, variant = name.partition("_")
            import_path.append(str(FAKES / package))
            if package == "torch" and variant != "cpu":
                gpu = variant
        import_path.append(str(ROOT))
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "NBUTILS_FS_ROOT": str(self.root),
            "PYTHONPATH": os.pathsep.join(import_path),
            "HF_HUB_OFFLINE": "1",
            "FAKE_GPU": gpu,
            "OMP_WAIT_POLICY": "passive",
            "PYTHONWARNINGS": "ignore",
            **self.env,
        }

    def python(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run this Python there, nobody at its input."""
        settings = {
            "cwd": self.root,
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "text": True,
            "timeout": 300,
            **options,
        }
        return subprocess.run([sys.executable, *words], env=self.environment(), **settings)

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        """This process is there until the test ends: the machine's variables and no others, its packages."""
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)
        for name in list(sys.modules):
            if name.startswith(("google.colab", "kaggle_secrets")):
                monkeypatch.delitem(sys.modules, name)
        for package in self.packages:
            monkeypatch.syspath_prepend(FAKES / package.partition("_")[0])
            if package.startswith("torch_"):
                fake = runpy.run_path(str(FAKES / "torch/torch/__init__.py"))
                monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**fake))  # type: ignore[arg-type]
        return self


COLAB_ENV = {"COLAB_RELEASE_TAG": "release-colab_20260819", "COLAB_JUPYTER_IP": "172.28.0.12", "TBE_RUNTIME_ADDR": "x"}
KAGGLE_ENV = {"KAGGLE_USER_SECRETS_TOKEN": "jwt", "COLAB_RELEASE_TAG": "release-colab-external-images_20260514"}
AUTODL_ENV = {
    "AutoDLContainerUUID": "a1b2c3d4e5-0f9e8d7c", "AutoDLRegion": "west-E",
    "AutoDLService6006URL": "https://u1-abc.westb.seetacloud.com:8443",
}  # fmt: skip
SHUTDOWN = '#!/bin/sh\necho "called with [$*]" >> "$(dirname "$0")/../../shutdown.log"\n'


def colab(folder: Path, gpu: bool = True, **env: str) -> Machine:
    """Colab with or without a GPU, its stray /kaggle folders included; Drive is not mounted."""
    machine = Machine(folder / "colab", COLAB_ENV | {"COLAB_GPU": "1" if gpu else ""} | env, ("colab",))
    machine.make("content/sample_data", "kaggle/working", "kaggle/input/some-slug")
    machine.write("var/colab/hostname", "m-s-test\n")
    return machine


def mounted(machine: Machine) -> Machine:
    """Drive is mounted on that Colab, as the kernel's list of mounts tells it."""
    machine.make("content/drive/My Drive")
    (machine.root / "content/drive/MyDrive").symlink_to("My Drive")
    machine.write("proc/mounts", f"drive {machine.root}/content/drive fuse.drive rw 0 0\n")
    return machine


def kaggle(folder: Path, batch: bool = False) -> Machine:
    """Kaggle, whose image is built from Colab's: its package, its variable, its /content are there."""
    kind = {"KAGGLE_KERNEL_RUN_TYPE": "Batch" if batch else "Interactive"}
    machine = Machine(folder / "kaggle", KAGGLE_ENV | kind, ("kaggle",))
    return machine.make("kaggle/working", "kaggle/temp", "kaggle/input", "content")


def autodl(folder: Path, gpu: bool = True) -> Machine:
    """AutoDL; without `gpu` it is started in the mode without one: 2 GiB of memory and half a core."""
    machine = Machine(folder / "autodl", dict(AUTODL_ENV))
    machine.make("root/autodl-tmp", "root/autodl-pub", "root/tf-logs", "root/miniconda3", "root/autodl-fs")
    machine.write("etc/network_turbo", "")
    machine.write("usr/bin/shutdown", SHUTDOWN).chmod(0o755)
    if not gpu:
        machine.write("sys/fs/cgroup/memory.max", f"{2 * 2**30}\n")
        machine.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    return machine
