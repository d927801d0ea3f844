"""A real browser, driven by Playwright. Without one, or without Playwright, these tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.compat.browser import BROWSERS, found_browser

if TYPE_CHECKING:
    from playwright.async_api import Browser

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A headless browser of this machine."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed; `make browser` does it")
    path = found_browser()
    if path is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
def axe() -> str:
    """The source of axe-core, which checks accessibility."""
    found: Any = find_spec("axe_playwright_python")
    if found is None:
        pytest.skip("axe-playwright-python is not installed; `make browser` does it")
    return (Path(found.origin).parent / "axe.min.js").read_text()
