"""`python -m llmproxy.cli.child ARGS` is `llmproxy ARGS`, and ends when its parent ends.

The parent has the other end of standard input, which ends with the parent, even after a `kill -9`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from llmproxy.cli import main

STOP_TIMEOUT_S = 10.0


def _watch_parent() -> None:
    """Ends this process when its standard input ends: by SIGTERM, and `STOP_TIMEOUT_S` later by force."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    os._exit(1)


def run() -> None:
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    main()


if __name__ == "__main__":
    run()
