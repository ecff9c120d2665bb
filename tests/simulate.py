"""Imitated platforms: a file-system root of their own, a clean environment, fakes of their packages; in a subprocess.

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
    """An imitated machine: where its paths begin, its environment, the fake packages it has installed."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def make(self, *folders: str, **files: str) -> Machine:
        """Add folders; files are given as keyword arguments through `write`."""
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
        path = [*(str(FAKES / name) for name in self.packages), str(ROOT)]
        base = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
        own = {"NBUTILS_FS_ROOT": str(self.root), "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
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
