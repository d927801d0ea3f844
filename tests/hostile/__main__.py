"""`make hostile`: hostile requests, answers and bodies against a proxy and its readers; exits with 1 on a finding."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import uvloop

from llmproxy.telemetry import logs
from tests.hostile import answers, backends, clients, requests

BATCH = 400
"""Cases that one process plays over one proxy."""
SHOWN_MAX = 20
"""Findings of a group that are printed whole."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was sent, and what came of it that must not."""

    sent: bytes
    wrong: tuple[str, ...]


def cases_of(make: Callable[[Random], Iterator[bytes]], seed: int, most: int | None) -> list[bytes]:
    """The cases of a group, each once; with `most`, so many of them, drawn by the seed."""
    random = Random(seed)
    cases = list(dict.fromkeys(make(random)))
    return random.sample(cases, most) if most is not None and len(cases) > most else cases


async def play_requests(cases: list[bytes], sound: bool, seed: int) -> list[Finding]:
    """Each case as a client's, in one packet or in two."""
    random, found = Random(seed), []
    async with clients.bench() as (home, backend):
        for sent in cases:
            at = random.choice((0, random.randrange(len(sent) + 1)))
            try:
                seen = await clients.play(home, backend, [packet for packet in (sent[:at], sent[at:]) if packet])
                wrong = clients.wrong_of(sent, seen, sound=sound)
            except TimeoutError:
                wrong = [f"no end within {clients.LIMIT_S:g} s"]
            if wrong:
                found.append(Finding(sent, tuple(wrong)))
    return found


async def play_answers(cases: list[bytes], sound: bool, _seed: int) -> list[Finding]:
    """Each case as a backend's answer."""
    found = []
    async with backends.bench() as (home, backend):
        for sent in cases:
            try:
                wrong = backends.wrong_of(sent, await backends.play(home, backend, sent), sound=sound)
            except TimeoutError:
                wrong = ["the client waited in vain"]
            if wrong:
                found.append(Finding(sent, tuple(wrong)))
    return found


def played(play: Callable[..., Any], cases: list[bytes], sound: bool, seed: int) -> list[Finding]:
    """Play in a process of its own."""
    logs.configure("json", "error")
    return list(uvloop.run(play(cases, sound, seed)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, help="Of an earlier run, to repeat it.")
    parser.add_argument("--most", type=int, help="Most cases of a group, drawn by the seed; all of them without it.")
    parser.add_argument("--only", default="", help="Groups whose names begin so.")
    told = parser.parse_args()
    seed = secrets.randbits(32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    began_s, cases_total, found_total = time.monotonic(), 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for groups, play in ((requests.GROUPS, play_requests), (answers.GROUPS, play_answers)):
            for name, make in groups.items():
                if not name.startswith(told.only):
                    continue
                group_began_s = time.monotonic()
                cases = cases_of(make, seed, told.most)
                batches = [cases[start : start + BATCH] for start in range(0, len(cases), BATCH)]
                sound = name.startswith("sound")
                jobs = [pool.submit(played, play, batch, sound, seed) for batch in batches]
                found = [finding for job in jobs for finding in job.result()]
                print(
                    f"{name}: {len(cases)} cases, {len(found)} findings, {time.monotonic() - group_began_s:.0f} s",
                    flush=True,
                )
                for finding in found[:SHOWN_MAX]:
                    print(f"  sent {finding.sent!r}\n    " + "\n    ".join(finding.wrong), flush=True)
                cases_total += len(cases)
                found_total += len(found)
    minutes = (time.monotonic() - began_s) / 60
    print(f"{cases_total} cases, {found_total} findings, {minutes:.1f} minutes, seed {seed}")
    return 1 if found_total else 0


if __name__ == "__main__":
    sys.exit(main())
