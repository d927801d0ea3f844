"""Random events for a `World`, drawn from one seed: every process must decide the same."""

from __future__ import annotations

from random import Random
from typing import Any

from llmproxy.core.domain import Reading, Trouble, Verdict
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings
from tests.core.machine import fleets
from tests.core.machine.world import World


def random_walk(seed: int, steps: int, begins_s: float = 0.0) -> World:
    rng = Random(seed)
    settings = fleets.settings(
        fairness=rng.choice(sorted(policies.names())),
        ordering=rng.choice(sorted(orderings.names())),
        placement=rng.choice(("round_robin", "least_request", "session", "cost", "cost")),
        ceilings=rng.choice(fleets.CEILINGS),
        limits=fleets.LIMITS,
        min_shares=rng.choice(fleets.MIN_SHARES),
        no_backend_wait_s=rng.choice((0.0, 2.0)),
        prompt_window_s=(None, 0.02)[seed % 2],
    )
    world = World(rng.choice(fleets.FLEETS), settings, seed, begins_s=begins_s)
    for _ in range(steps):
        _random_event(world, rng)
        world.decide()
        world.check()
    return world


def _random_event(world: World, rng: Random) -> None:
    kind = rng.random()
    backend = rng.choice(list(world.fleet))
    if kind < 0.40:
        pool = rng.choice(list(world.pools.catalogue.pools))
        given: dict[str, Any] = {
            "prompt_tokens": rng.choice((5, 50, 150, 800)),
            "sequences": rng.choice((1, 1, 1, 4)),
            "slo": rng.choice(fleets.SLOS),
            "limits": rng.choice(fleets.LIMITED_BY),
            "session": rng.choice((None, "s", "t")),
            "prefix": rng.choice(fleets.PREFIXES),
            "prefix_tokens": 16.0,
            "backend": rng.choice(fleets.BOUND_TO),
        }
        world.submit(
            pool,
            rng.choice(fleets.ADAPTERS[pool]),
            rng.choice(fleets.BANDS),
            rng.choice(fleets.FLOWS),
            rng.choice((3.0, 1e3)),
            **given,
        )
    elif kind < 0.50 and world.held:
        world.started(rng.choice(list(world.held)))
    elif kind < 0.75 and world.held:
        verdict = rng.choice((Verdict.SERVED, Verdict.SERVED, *Verdict))
        world.finish(rng.choice(list(world.held)), verdict, rng.choice((None, 10, 500)), retry=rng.random() < 0.7)
    elif kind < 0.80 and world.waiting:
        world.cancel(rng.choice(list(world.waiting)))
    elif kind < 0.88:
        adapters = frozenset(name for name in ("x", "y", "z") if rng.random() < 0.5)
        running, waiting = rng.choice(((0, 0), (3, 0), (4, 2))), rng.choice((None, 0.5, 1.0))
        world.observe(backend, Reading(world.now, *running, waiting, 2000, adapters, rng.choice((None, 1, 2))))
    elif kind < 0.92:
        world.troubled(backend, rng.choice(list(Trouble)))
    elif kind < 0.96:
        world.answered(backend)
    else:
        world.advance(rng.choice((0.1, 1.0, 4.0)))


if __name__ == "__main__":
    for walk in range(3):
        print("\n".join(random_walk(walk, 400).trace))
