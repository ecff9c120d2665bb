"""Simulated platforms: a file-system root of their own, a clean environment, fakes of their packages; in a subprocess.

The marks, the decoys and the failures are those the real platforms show. Each builder returns a `Machine`;
`machine.python("-c", code)` runs there. The fakes of packages that cannot exist here lie in `tests/fakes/<name>/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        path = [*(str(FAKES / name.partition("_")[0]) for name in self.packages), str(ROOT)]
        gpu = next((name.partition("_")[2] for name in self.packages if name.startswith("torch_")), "")
        base = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
        own = {"NBUTILS_FS_ROOT": str(self.root), "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
        own["FAKE_GPU"] = gpu.replace("cpu", "")
        return base | own | {"OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"} | self.env

    def python(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run this Python there, nobody at its input."""
        given = {"cwd": self.root, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([sys.executable, *words], env=self.environment(), **(given | options))

    def ask(self, expression: str, imports: str = "from nbutils import platforms") -> Any:
        """The JSON value of an expression evaluated there."""
        code = f"import json\n{imports}\nprint('\\n' + json.dumps({expression}, default=str))"
        ran = self.python("-c", code)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return json.loads(ran.stdout.strip().splitlines()[-1])


COLAB_ENV = {
    "COLAB_RELEASE_TAG": "release-colab_20260819-060114_RC00", "COLAB_BACKEND_VERSION": "next", "COLAB_TPU_1VM": "",
    "COLAB_JUPYTER_IP": "172.28.0.12", "COLAB_JUPYTER_TRANSPORT": "ipc", "COLAB_JUPYTER_TOKEN": "",
    "COLAB_KERNEL_MANAGER_PROXY_HOST": "172.28.0.12", "COLAB_KERNEL_MANAGER_PROXY_PORT": "6000",
    "COLAB_NOTEBOOK_ID": "", "COLAB_FILE_HANDLER_ADDR": "localhost:3453", "COLAB_WARMUP_DEFAULTS": "1",
    "TBE_RUNTIME_ADDR": "172.28.0.1:8011", "TBE_CREDS_ADDR": "172.28.0.1:8008",
    "TBE_EPHEM_CREDS_ADDR": "172.28.0.1:8009", "USE_AUTH_EPHEM": "1", "ENABLE_DIRECTORYPREFETCHER": "1",
    "UV_SYSTEM_PYTHON": "true", "PYTHONUTF8": "1",
}  # fmt: skip
KAGGLE_ENV = {
    "KAGGLE_DATA_PROXY_URL": "http://127.0.0.1:1", "KAGGLE_URL_BASE": "http://127.0.0.1:1",
    "KAGGLE_USER_SECRETS_TOKEN": "jwt", "COLAB_RELEASE_TAG": "release-colab-external-images_20260514-060047_RC00",
    "UV_SYSTEM_PYTHON": "true",
}  # fmt: skip
AUTODL_ENV = {
    "AutoDLContainerUUID": "a1b2c3d4e5-0f9e8d7c", "AutoDLRegion": "west-E",
    "AutoDLService6006URL": "https://u1-abc.westb.seetacloud.com:8443",
}  # fmt: skip
TURBO = (
    "export no_proxy=localhost,127.0.0.1\nexport http_proxy=http://127.0.0.1:12798 && "
    "export https_proxy=http://127.0.0.1:12798\n"
)
SHUTDOWN = '#!/bin/sh\necho "called with [$*]" >> "$(dirname "$0")/../../shutdown.log"\n'


def colab(folder: Path, gpu: bool = True, enterprise: bool = False) -> Machine:
    """S1, S2, S7: Colab with or without a card, its stray /kaggle folders included; Drive is not mounted."""
    machine = Machine(folder / "colab", COLAB_ENV | {"COLAB_GPU": "1" if gpu else ""}, ("colab",))
    if enterprise:
        machine.env["VERTEX_PRODUCT"] = "COLAB_ENTERPRISE"
    machine.make("content/sample_data", "kaggle/working", "kaggle/input/some-slug")
    machine.env["CLOUDSDK_CONFIG"] = str(machine.root / "content/.config")
    machine.write("var/colab/hostname", "m-s-test\n")
    return machine


def mounted(machine: Machine) -> Machine:
    """Drive is mounted on that Colab, as the kernel's list of mounts tells it."""
    machine.make("content/drive/My Drive")
    (machine.root / "content/drive/MyDrive").symlink_to("My Drive")
    machine.write("proc/mounts", f"drive {machine.root}/content/drive fuse.drive rw 0 0\n")
    return machine


def kaggle(folder: Path, batch: bool = False) -> Machine:
    """K1, K2: Kaggle, whose image is built from Colab's: its package, its variable, its /content are there."""
    kind = {"KAGGLE_KERNEL_RUN_TYPE": "Batch" if batch else "Interactive"}
    machine = Machine(folder / "kaggle", KAGGLE_ENV | kind, ("kaggle",))
    return machine.make("kaggle/working", "kaggle/temp", "kaggle/input", "content")


def autodl(folder: Path, login: bool = True, file_storage: bool = True, card: bool = True) -> Machine:
    """A1-A4: AutoDL; without `login` none of its variables, without `file_storage` no autodl-fs.

    Without `card` it is started in the mode without one: 2 GiB of memory and half a core.
    """
    machine = Machine(folder / "autodl", dict(AUTODL_ENV) if login else {})
    machine.make("root/autodl-tmp", "root/autodl-pub", "root/tf-logs", "root/miniconda3")
    if file_storage:
        machine.make("root/autodl-fs")
    machine.write("etc/network_turbo", TURBO)
    machine.write("usr/bin/shutdown", SHUTDOWN).chmod(0o755)
    if not card:
        machine.write("sys/fs/cgroup/memory.max", f"{2 * 2**30}\n")
        machine.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    return machine


def lanyun(folder: Path) -> Machine:
    """A5: another provider that ships AutoDL's proxy script and nothing else of it."""
    machine = Machine(folder / "lanyun")
    machine.write("etc/network_turbo", TURBO)
    return machine


def local(folder: Path, **env: str) -> Machine:
    """L1: a machine of one's own, on which nothing is set but what is given."""
    return Machine(folder / "local", env).make("home")
