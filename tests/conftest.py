"""What tests of every area may need."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from typer.main import get_command

# How long an example takes depends on the machine. `make test-all` chooses `ci` with --hypothesis-profile. In
# continuous integration a tree always gets the same examples, so that a failure comes from the change. Elsewhere, and
# in `make fuzz`, they are random.
FIXED = "CI" in os.environ
settings.register_profile("dev", deadline=None, max_examples=20, derandomize=FIXED)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=FIXED)
settings.load_profile("dev")

DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of the longest tests of `make test` on an idle machine, by node id."""
RECORDED: dict[str, float] = json.loads(DURATIONS.read_text())
RECORDED_S = 1.0
FAST_S = 2.0

ON_UVLOOP = ("tests/e2e/", "tests/faults/", "tests/remote/cluster/")
"""A test that hangs on uvloop is out of reach of the alarm that ends others; a thread still ends it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}; `make durations`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among modules and tests: nearly all of them stay, and each collection would visit them all."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on uvloop, and as slow all cases of a test with `sampled(n)` except the first of each n."""
    cases: Counter[str] = Counter()
    for item in items:
        if item.nodeid.startswith(ON_UVLOOP) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60, method="thread"))
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        test = item.nodeid.partition("[")[0]
        if cases[test] % sampled.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[test] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that is recorded as slow and not marked so. Nothing is timed, so a busy machine changes nothing."""
    seconds = RECORDED.get(item.nodeid, 0.0)
    if seconds > FAST_S and item.get_closest_marker("slow") is None and not item.config.getoption("--record-durations"):
        pytest.fail(
            f"{DURATIONS.name} has this test with {seconds} s, and `make test` has none of more than {FAST_S} s. "
            "Mark it with pytest.mark.slow, or make it faster and run `make durations`.",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--record-durations"):
        return
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid] += report.duration  # type: ignore[assignment]
    long = {name: round(seconds, 1) for name, seconds in sorted(spent.items()) if seconds >= RECORDED_S}
    DURATIONS.write_text(json.dumps(long, indent=2) + "\n")


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the command of an app once for all its runs: building it takes ten times as long as a run."""
    with patch("typer.testing._get_command", cache(get_command)):
        yield


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return to_file
