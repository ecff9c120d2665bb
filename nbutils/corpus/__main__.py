"""`python -m nbutils.corpus [folder]` writes the sample rows again."""

from __future__ import annotations

import sys
from pathlib import Path

from nbutils.corpus import write_samples

for path in write_samples(*map(Path, sys.argv[1:2])):
    print("wrote", path)
