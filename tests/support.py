"""Helpers the test files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nbutils.errors import CourseError


@contextmanager
def refused(code: str, *words: str, **values: Any) -> Iterator[Any]:
    """A CourseError of this code, raised with these values; `words` are what its text must name."""
    with pytest.raises(CourseError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    assert {name: error.values.get(name) for name in values} == values
    assert all(word in str(error) for word in words), str(error)
