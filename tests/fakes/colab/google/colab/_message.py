"""Messages to the page."""

from __future__ import annotations

from google.colab import errors


class MessageError(errors.Error):
    """The page answered with an error."""
