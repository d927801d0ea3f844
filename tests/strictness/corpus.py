"""Sends the requests of gunicorn's tests: `python -m tests.strictness.corpus gunicorn-27.0.1/tests/requests`.

The folder comes from gunicorn's source distribution (`pip download --no-binary gunicorn --no-deps gunicorn`), which has
its license; nothing of it is kept here. Its `invalid` requests must be refused, and its `valid` ones must
reach a route. Differences are printed for a person to judge.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import uvloop

from tests.strictness.observe import HASTY, Observed, bench, observe

REFUSALS = {400, 408, 413, 414, 417, 431, 501, 505}


def bytes_of(written: bytes) -> bytes:
    """The request in a file of the corpus: line breaks are ignored, and escapes are decoded."""
    text = written.replace(b"\n", b"")
    for spelt, byte in ((b"\\r\\n", b"\r\n"), (b"\\0", b"\0"), (b"\\n", b"\n"), (b"\\t", b"\t")):
        text = text.replace(spelt, byte)
    if b"host:" not in text.lower():
        # Many have no Host, and would be refused for that alone.
        text = text.replace(b"\r\n", b"\r\nHost: corpus\r\n", 1)
    return re.sub(rb"\\x([0-9a-fA-F]{2})", lambda found: bytes([int(found[1], 16)]), text)


async def _run(folder: Path) -> None:
    for kind in ("invalid", "valid"):
        files = sorted((folder / kind).glob("*.http"))
        different = []
        async with bench(HASTY) as (home, backend):
            for file in files:
                try:
                    seen = await observe(home, backend, bytes_of(file.read_bytes()), limit_s=2.0)
                except TimeoutError:
                    # Its head has no end, so there is no answer.
                    seen = Observed((), closed=False, reached=())
                refused = bool(REFUSALS & set(seen.statuses)) or not seen.statuses
                if refused != (kind == "invalid") or seen.reached:
                    different.append(f"  {file.name}: {seen.statuses} {seen.last_body[:120].decode(errors='replace')}")
        print(f"{kind}: {len(files)} requests, {len(files) - len(different)} as in gunicorn; otherwise:")
        print("\n".join(different))


def main() -> None:
    uvloop.run(_run(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
