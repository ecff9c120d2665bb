"""torch on a machine without a card; starts in no time."""

from __future__ import annotations

from types import SimpleNamespace

__version__ = "2.11.0+cu128"
version = SimpleNamespace(cuda="12.8")
cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0, get_arch_list=list)
