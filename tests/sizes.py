"""Sizes of property tests under the profiles of tests/conftest.py."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Returns `count` under the profile `ci`, and a fifth of it but at least 20 under `dev`."""
    return max(count * settings().max_examples // 100, 20)
