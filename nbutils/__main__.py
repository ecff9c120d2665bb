"""`python -m nbutils`."""

from nbutils.cli import app

if __name__ == "__main__":
    app()
