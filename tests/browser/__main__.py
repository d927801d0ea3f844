"""Exit code 0 where a browser is installed; otherwise it says which would do."""

import sys

from tests.compat.browser import BROWSERS, found_browser

if found_browser() is None:
    print(f"The tests of the page are skipped: no browser is installed. One of these does: {', '.join(BROWSERS)}")
    sys.exit(1)
