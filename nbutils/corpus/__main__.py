"""`python -m nbutils.corpus` writes the sample rows again."""

from __future__ import annotations

from nbutils.corpus import write_samples

print("wrote", *write_samples())
