"""The timeline of faults: each begins and ends in its time, and its effect is seen where a real one's would be."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from llmproxy.core.domain import Outcome, Reading
from llmproxy.core.pools import Pools
from llmproxy.lab.arrival import Arrival
from llmproxy.lab.faults import schedule
from llmproxy.lab.fleet import Fault, FaultKind
from llmproxy.lab.replay import SETTLE_S
from llmproxy.lab.replica import Replica
from llmproxy.lab.virtual_time import run
from tests.lab.small import fleet, records, setup, traffic

START_S = 1.5


def walked(count: int, faults: list[Fault], looks_s: list[float]) -> list[list[Replica]]:
    """Replicas under `faults`; each look at them, `looks_s` after the trace began, is asserted upon in `seen`."""
    raise NotImplementedError
