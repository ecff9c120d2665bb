"""The errors of Colab's package."""

from __future__ import annotations


class Error(Exception):
    """Base of most of them."""


class RuntimeManagementError(Error):
    """The machine could not be given back."""
