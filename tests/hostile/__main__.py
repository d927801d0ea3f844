"""`make hostile`: hostile requests, answers and bodies against a proxy; exits with 1 on a finding."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import uvloop

from llmproxy.observe import logs
from tests.e2e.proxies import ProxyUnderTest
from tests.e2e.scripted import Scripted
from tests.hostile import answers, backends, bodies, clients, requests
from tests.strictness.answers import CONFIG, answer_bench
from tests.strictness.observe import bench
from tests.strictness.table import observed

BATCH = 250
"""The number of cases that a process plays over one proxy."""
SHOWN_MAX, SHOWN_CHARS = 20, 6000
"""The number of findings of a group that are printed, and the length of each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case, and its wrong outcome."""

    sent: bytes
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join([f"  sent {self.sent!r}"[:SHOWN_CHARS], *(wrong[:SHOWN_CHARS] for wrong in self.wrong)])


def cases_of(make: Callable[[Random], Iterator[bytes]], seed: int, most: int) -> list[bytes]:
    """The distinct cases of a group; with `most`, a sample of that size, drawn by the seed."""
    random = Random(seed)
    cases = list(dict.fromkeys(make(random)))
    return random.sample(cases, most) if 0 < most < len(cases) else cases


Judge = Callable[[ProxyUnderTest, Scripted, bytes], Awaitable[list[str]]]
Bench = AbstractAsyncContextManager[tuple[ProxyUnderTest, Scripted]]


async def findings(cases: list[bytes], opened: Bench, judge: Judge) -> list[Finding]:
    """The cases with a wrong outcome, or without an outcome in time."""
    found = []
    async with opened as (home, backend):
        for sent in cases:
            try:
                wrong = await judge(home, backend, sent)
            except TimeoutError:
                wrong = ["no end within the time limit"]
            if wrong:
                found.append(Finding(sent, tuple(wrong)))
    return found


async def play_requests(cases: list[bytes], sound: bool, seed: int) -> list[Finding]:
    """Send each case as a client, in one packet or in two."""
    random = Random(seed)

    async def judge(home: ProxyUnderTest, backend: Scripted, sent: bytes) -> list[str]:
        at = random.choice((0, random.randrange(len(sent) + 1)))
        seen = await clients.play(home, backend, [packet for packet in (sent[:at], sent[at:]) if packet])
        return clients.violations(sent, seen, sound=sound)

    return await findings(cases, bench(clients.LIMITS, **CONFIG), judge)


async def play_bodies(cases: list[bytes], _sound: bool, _seed: int) -> list[Finding]:
    """Send each case as the body of a sound request."""

    async def judge(home: ProxyUnderTest, backend: Scripted, body: bytes) -> list[str]:
        return bodies.violations(body, await clients.play(home, backend, [bodies.request_of(body)]))

    return await findings(cases, bench(clients.LIMITS, **CONFIG), judge)


async def play_answers(cases: list[bytes], sound: bool, _seed: int) -> list[Finding]:
    """Send each case as the answer of a backend."""

    async def judge(home: ProxyUnderTest, backend: Scripted, sent: bytes) -> list[str]:
        return backends.violations(sent, await backends.play(home, backend, sent), sound=sound)

    return await findings(cases, answer_bench(timeouts=backends.TIMEOUTS), judge)


Play = Callable[[list[bytes], bool, int], Coroutine[Any, Any, list[Finding]]]
Result = tuple[int, list[str]]
"""The number of cases, and the findings."""
PLAYS: tuple[tuple[dict[str, Callable[[Random], Iterator[bytes]]], Play], ...] = (
    (requests.GROUPS, play_requests),
    (answers.GROUPS, play_answers),
    (bodies.GROUPS, play_bodies),
)


def _played(play: Play, cases: list[bytes], sound: bool, seed: int) -> list[Finding]:
    logs.configure("json", "error")
    return uvloop.run(play(cases, sound, seed))


def _table() -> Result:
    logs.configure("json", "error")
    rows, answer_rows, wrong = uvloop.run(observed())
    return sum(map(len, rows.values())) + len(answer_rows), wrong


def play_group(
    pool: ProcessPoolExecutor, play: Play, name: str, make: Callable[[Random], Iterator[bytes]], seed: int, most: int
) -> Result:
    """Play the cases of one group in all processes at once."""
    cases = cases_of(make, seed, most)
    batches = [cases[start : start + BATCH] for start in range(0, len(cases), BATCH)]
    jobs = [pool.submit(_played, play, batch, name.startswith("sound"), seed) for batch in batches]
    return len(cases), [str(finding) for job in jobs for finding in job.result()]


def groups(pool: ProcessPoolExecutor, seed: int, most: int) -> dict[str, Callable[[], Result]]:
    """The groups to run, in order."""
    found: dict[str, Callable[[], Result]] = {
        "tables of docs/reference/strictness.md": lambda: pool.submit(_table).result()
    }
    for made, play in PLAYS:
        for name, make in made.items():
            found[name] = partial(play_group, pool, play, name, make, seed, most)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, help="Of an earlier run, to repeat it.")
    parser.add_argument("--most", type=int, default=2000, help="Most cases of a group, drawn by the seed; 0 is all.")
    parser.add_argument("--only", default="", help="Groups whose names begin so.")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began_s, cases_total, found_total = time.monotonic(), 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, run in groups(pool, seed, args.most).items():
            if not name.startswith(args.only):
                continue
            group_began_s = time.monotonic()
            cases, findings = run()
            took_s = time.monotonic() - group_began_s
            print(f"{name}: {cases} cases, {len(findings)} findings, {took_s:.0f} s", flush=True)
            for finding in findings[:SHOWN_MAX]:
                print(finding, flush=True)
            cases_total, found_total = cases_total + cases, found_total + len(findings)
    minutes = (time.monotonic() - began_s) / 60
    print(f"{cases_total} cases, {found_total} findings, {minutes:.1f} minutes; python -m tests.hostile --seed {seed}")
    return 1 if found_total else 0


if __name__ == "__main__":
    sys.exit(main())
