"""Commands with a time limit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SHOWN_CHARS = 3000


class CommandFailed(Exception):  # noqa: N818 - it failed, or had no time left
    """A command did not end in time, or with another code than 0. The message ends with its output."""


async def run(
    command: Sequence[str], *, cwd: Path | None = None, limit_s: float = 120.0, environ: Mapping[str, str] | None = None
) -> str:
    """Returns the output (stdout and stderr) of a command without input. Raises CommandFailed; kills its processes."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = b""
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        raise CommandFailed(f"{command[0]} did not end within {limit_s:g} s") from None
    finally:
        # Its children, too: they share its process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    text = output.decode(errors="replace")
    if process.returncode:
        raise CommandFailed(f"{command[0]} ended with {process.returncode}:\n{text[-SHOWN_CHARS:]}")
    return text
