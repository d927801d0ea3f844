"""The rounds of a run: in each round every case, and in each case every running proxy, in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.peers.cases import Case
from benchmarks.peers.competitors import Competitor
from benchmarks.peers.measure import Bench, Running, Window, measured
from benchmarks.peers.table import DIRECT
from benchmarks.proxy import BenchError

Results = dict[str, list[dict[str, Window]]]  # The windows of each case, in the order of rounds, by competitor.


class Stage:
    """The running proxies.

    A peer that fails is added to `failures` and started again. If that fails too, it is left out. An error of a
    required proxy ends the run.
    """

    def __init__(
        self, bench: Bench, competitors: Sequence[Competitor], seconds: float, tries: int, failures: list[str]
    ) -> None:
        self._bench = bench
        self._competitors = competitors
        self._seconds = seconds
        self._tries = tries
        self._failures = failures
        self._serving: dict[str, Running] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Runs all proxies during the block. Raises BenchError if a required proxy does not start."""
        try:
            for one in self._competitors:
                self._start(one)
            yield
        finally:
            for name in list(self._serving):
                self._stop(name)

    def rounds(self, cases: Sequence[Case], count: int, results: Results) -> None:
        """Measures `count` rounds, and adds each complete round of a case to `results`."""
        for number in range(count):
            for case in cases:
                print(f"round {number + 1}/{count} {case.name}:", end="", file=sys.stderr, flush=True)
                windows = {DIRECT: self._window(case, self._bench.direct)}
                for one in self._competitors if number % 2 == 0 else reversed(self._competitors):
                    window = self._turn(case, one)
                    if window is not None:
                        windows[one.name] = window
                        print(f" {one.name}", end="", file=sys.stderr, flush=True)
                print(file=sys.stderr)
                names = [DIRECT, *(one.name for one in self._competitors if one.name in windows)]
                results[case.name].append({name: windows[name] for name in names})

    def _turn(self, case: Case, one: Competitor) -> Window | None:
        """Measures a proxy in a case. Returns None if the proxy failed or does not run any more."""
        if one.name not in self._serving:
            return None
        try:
            if case.fresh:
                self._stop(one.name)
                self._serving[one.name] = self._bench.start(one)
            return self._window(case, self._serving[one.name])
        except BenchError as error:
            self._failed(one, error)
        self._stop(one.name)
        self._start(one)
        return None

    def _window(self, case: Case, running: Running) -> Window:
        return measured(lambda: self._bench.measure(case, running, self._seconds), self._tries)

    def _start(self, one: Competitor) -> None:
        try:
            self._serving[one.name] = self._bench.start(one)
        except BenchError as error:
            self._failed(one, error)

    def _failed(self, one: Competitor, error: BenchError) -> None:
        if one.required:
            raise error
        why = str(error).splitlines()[0].removesuffix("; the end of its log:")
        self._failures.append(f"{one.name} FAILED: {why}")
        print(f"\n{error}", file=sys.stderr)

    def _stop(self, name: str) -> None:
        running = self._serving.pop(name, None)
        if running is not None and running.child is not None:
            running.child.stop()
