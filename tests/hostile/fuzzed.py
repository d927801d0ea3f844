"""The readers of bodies and forms without a socket: tests of `tests/fuzz`, with more examples and a count of them."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis

GROUPS = {
    "readers, bodies": "tests.fuzz.test_bodies",
    "readers, forms": "tests.fuzz.test_forms",
    "readers, answers": "tests.fuzz.test_answers",
}
"""The modules whose tests need no fixture."""


def tests_of(module: str) -> list[str]:
    """The names of the property tests of a module. Raises TypeError if a test needs a fixture."""
    found = importlib.import_module(module)
    names = [name for name, test in vars(found).items() if name.startswith("test_") and hasattr(test, "hypothesis")]
    for name in names:
        if inspect.signature(getattr(found, name)).parameters:
            raise TypeError(f"{module}.{name} wants a fixture")
    return names


def prepare(examples: int) -> None:
    """Set the number of examples of each test. Call this before the tests are imported, in every process."""
    os.environ["LLMPROXY_FUZZ_EXAMPLES"] = str(examples)


def run(module: str, name: str, seed: int) -> tuple[int, str]:
    """The number of examples, and the description of the failed example."""
    test: Any = getattr(importlib.import_module(module), name)
    tried = 0
    inner: Callable[..., None] = test.hypothesis.inner_test

    @functools.wraps(inner)
    def counted(*values: Any, **named: Any) -> None:
        nonlocal tried
        tried += 1
        inner(*values, **named)

    test.hypothesis.inner_test = counted
    try:
        hypothesis.seed(seed)(test)()
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        return tried, traceback.format_exc()
    return tried, ""
