"""Runs the shell commands of a page as a reader would, and compares their output.

A `sh` block is run, the `text` block after it is the expected output, and a block with a `title` is a file. All blocks
of a page run in one bash, in an empty folder. Blocks in other languages, such as `shell`, are not run.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.docs.pages import blocks

TIMEOUT_S = 100.0
PORTS = ("6379", "8001", "8002", "8080", "8081", "8090", "8091")
"""Ports that pages name; each run takes free ones in their place."""


def free_ports(count: int) -> list[str]:
    """Free ports of this machine, ascending."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [str(port) for port in sorted(one.getsockname()[1] for one in taken)]
    finally:
        for one in taken:
            one.close()


def run(page: Path, folder: Path, programs: Path = Path(sys.executable).parent) -> Iterator[tuple[int, str, str]]:
    """Run a page. Returns line, expected output and output of each block with an expected output.

    `programs` is a folder with `llmproxy`. Raises AssertionError if a block fails or the page takes longer than
    TIMEOUT_S.
    """
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    names = re.compile("|".join(PORTS))

    def here(text: str) -> str:
        return names.sub(lambda port: ports[port[0]], text)

    found = list(blocks(page))
    script = ["set -m"]
    for number, block in enumerate(found):
        if block.title is not None:
            script.append(f"cat > {block.title} <<'END_OF_FILE'\n{here(block.text)}END_OF_FILE")
        elif block.language == "sh":
            script.append(
                f"{{\n{here(block.text)}\n}} > {folder}/.out{number} 2> {folder}/.err{number} || exit {number + 1}"
            )
    work = folder / "work"
    work.mkdir()
    path = f"{programs}:{os.environ['PATH']}"
    bash = subprocess.Popen(
        ["bash", "-c", "\n".join(script)], cwd=work, env={**os.environ, "PATH": path, "HOME": str(work)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        failed = bash.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        failed = -1
    finally:
        _end_session(bash.pid)
    outputs = "".join(f"{one.name}: {one.read_text()}" for one in sorted(folder.glob(".[eo]*")))
    assert failed == 0, f"{page.name}, line {found[failed - 1].line if failed > 0 else '?'}: {outputs}"
    for number, (block, expected) in enumerate(pairwise(found)):
        if block.language == "sh" and expected.language == "text":
            yield block.line, here(expected.text), (folder / f".out{number}").read_text()


def _end_session(session: int) -> None:
    """End every process of a session; background jobs have process groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue


def matches(expected: str, printed: str) -> bool:
    """Whether the output is as expected; `...` matches anything, also whole lines."""
    pattern = ".*?".join(
        re.escape(part) for part in re.sub(r"\n\.\.\.\n|^\.\.\.\n", "...", expected.strip()).split("...")
    )
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
