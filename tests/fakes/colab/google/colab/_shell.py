"""The class of Colab's shell, by which some libraries know it."""

from __future__ import annotations


class Shell:
    """Nothing but its name."""

    kernel = None
