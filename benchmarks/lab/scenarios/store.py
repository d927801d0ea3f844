"""Runs that were made before: kept by everything that they depend on, so that a long set resumes where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import orjson

import llmproxy
from llmproxy.lab.policies.by_name import is_own
from llmproxy.lab.results.result import Point, RunResult, Trail
from llmproxy.lab.run.runs import Finished, Simulation

PACKAGE = Path(llmproxy.__file__).parent
ROOMS = ("core", "config", "scheduling", "lab")
"""The code that a run passes through."""
PRESENTATION = frozenset(
    {"drawing.py", "plots.py", "report.py", "scaling_plots.py", "simulate.py", "sizes.py", "table.py"}
)


class Store:
    """A folder with one file per run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, simulation: Simulation, point: Point) -> Finished | None:
        """The run, if the very same was made before."""
        path = self._path(simulation, point)
        if not path.exists():
            return None
        kept = orjson.loads(path.read_bytes())
        return Finished(RunResult.model_validate(kept["run"]), Trail.model_validate(kept["trail"]))

    def put(self, simulation: Simulation, finished: Finished) -> None:
        kept = {"run": finished.run.model_dump(), "trail": finished.trail.model_dump()}
        path = self._path(simulation, finished.run.point)
        # Renamed into place, so that a set that is stopped in mid-write does not leave half a run to be believed.
        part = path.with_suffix(".part")
        part.write_bytes(orjson.dumps(kept))
        part.rename(path)

    def _path(self, simulation: Simulation, point: Point) -> Path:
        parts = (
            code_digest(rivals=not is_own(point.policy)),
            _trace_digest(simulation.trace),
            repr((simulation.skip, simulation.requests, simulation.replicate, simulation.warmup, simulation.mix)),
            repr(simulation.objectives_named),
            repr(simulation.fleet),
            simulation.config.model_dump_json(warnings=False),
            repr(point),
        )
        return self._folder / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}.json"


@cache
def code_digest(rivals: bool) -> str:
    """Of every file that a run passes through; those of the baselines only where they matter."""
    digest = hashlib.sha256()
    for path in code_files():
        if "baselines" in path.parts and not rivals:
            continue
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def code_files() -> Iterator[Path]:
    """Every file that a run passes through."""
    for room in ROOMS:
        yield from (path for path in sorted((PACKAGE / room).rglob("*.py")) if path.name not in PRESENTATION)


@cache
def _trace_digest(text: str) -> str:
    return text if text.startswith("gen:") else hashlib.sha256(Path(text).read_bytes()).hexdigest()
