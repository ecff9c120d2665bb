"""`python -m nbutils`."""

from __future__ import annotations

from nbutils.cli import app

if __name__ == "__main__":
    app()
