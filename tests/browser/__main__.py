"""Exits with 0 if a browser is installed. Otherwise prints the supported browsers."""

import sys

from tests.compat.browser import BROWSERS, found_browser

if found_browser() is None:
    print(f"The tests of the page are skipped: no browser is installed. Install one of these: {', '.join(BROWSERS)}")
    sys.exit(1)
