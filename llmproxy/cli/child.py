"""`python -m llmproxy.cli.child ARGS` is `llmproxy ARGS`, but also ends when its standard input ends.

The parent has the other end of that pipe, so this process ends with its parent, however the parent ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from llmproxy.cli import main

STOP_TIMEOUT_S = 10.0


def _end_with_standard_input() -> None:
    """Ends this process when its standard input ends: by SIGTERM, and `STOP_TIMEOUT_S` later by force."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_TIMEOUT_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run() -> None:
    _end_with_standard_input()
    main()


if __name__ == "__main__":
    run()
