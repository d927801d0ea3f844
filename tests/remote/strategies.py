"""Random messages of each kind between processes: of workers and of members."""

from __future__ import annotations

from math import inf
from typing import Any, get_args

from hypothesis import strategies as st

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import (
    AdmissionKind,
    GrantReason,
    KnownCapacity,
    KnownLimit,
    Outcome,
    Placed,
    Predicted,
    Slo,
    Stage,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Committed, Progress, Recomputing, Returned, Started
from llmproxy.remote import messages
from llmproxy.remote.messages import (
    Balances,
    Drained,
    Hello,
    Learned,
    LeaseAcknowledged,
    Members,
    NotLeader,
    Ping,
    RateDebts,
    RememberedPrefix,
    Resume,
    Resumed,
    RunningLease,
    Welcome,
)
from tests.core.make import request
from tests.exits import exit_of

TEXTS = st.text(max_size=20)
NUMBERS = st.integers(0, 2**63)
TIMES = st.floats(0, 1e9)
USAGES = st.none() | st.builds(Usage, NUMBERS, NUMBERS, st.none() | NUMBERS)
TERMS = st.lists(st.tuples(TEXTS, TIMES), max_size=3).map(tuple)
REQUESTS = st.builds(
    request, id=TEXTS, adapter=st.none() | TEXTS, flow=TEXTS, arrived_s=TIMES, max_tokens=st.none() | NUMBERS,
    slo=st.none() | st.builds(Slo, st.none() | TIMES, st.none() | TIMES), limits=st.lists(TEXTS, max_size=2).map(tuple),
    prefix=st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple), session=st.none() | TEXTS,
)  # fmt: skip
PREDICTED = st.none() | st.builds(Predicted, TIMES, TIMES)
PLACED = st.builds(Placed, TEXTS, TIMES, TERMS, NUMBERS, ttft=PREDICTED, tpot=PREDICTED)
WHYS = st.builds(
    GrantReason, st.lists(st.tuples(st.integers(-100, 100), NUMBERS), max_size=3).map(tuple), NUMBERS, TERMS, NUMBERS
)
EXITS = st.builds(
    exit_of, request_id=TEXTS, method=st.just("POST"), path=TEXTS, outcome=st.sampled_from(Outcome), status=NUMBERS,
    duration_s=TIMES, why=st.none() | WHYS, terms=TERMS, predicted_ttft=PREDICTED, met=st.none() | st.booleans(),
)  # fmt: skip
CALLS = st.integers(-(2**40), 2**40)
CALL_SETS = st.frozensets(CALLS, max_size=5)
BOOLS = st.booleans()
TARGETS = st.builds(Target, TEXTS, TEXTS, TEXTS, st.none() | TEXTS)
LIMIT = st.builds(KnownLimit, NUMBERS, BOOLS, st.lists(TEXTS, max_size=3).map(tuple), st.none() | NUMBERS)
SIZE = st.tuples(NUMBERS, NUMBERS, TIMES, TIMES)
CAPACITY = st.builds(KnownCapacity, st.lists(TIMES, max_size=3).map(tuple), st.lists(SIZE, max_size=3).map(tuple))
LIMITS, CAPACITIES = (st.dictionaries(TEXTS, one, max_size=3) for one in (LIMIT, CAPACITY))
FROM: dict[type[Any], st.SearchStrategy[Any]] = {
    messages.Admit: st.builds(messages.Admit, CALLS, REQUESTS, st.frozensets(TEXTS), st.sampled_from(AdmissionKind)),
    messages.CancelCall: st.builds(messages.CancelCall, CALLS),
    Started: st.builds(Started, CALLS),
    Committed: st.builds(Committed, CALLS),
    Progress: st.builds(Progress, CALLS, NUMBERS),
    Returned: st.builds(Returned, CALLS, st.sampled_from(Verdict), USAGES),
    Recomputing: st.builds(Recomputing, CALLS),
    messages.RequestEnded: st.builds(messages.RequestEnded, TEXTS, st.none() | BOOLS),
    messages.PrefixCached: st.builds(
        messages.PrefixCached, TEXTS, CALLS, TEXTS, st.lists(NUMBERS, max_size=5).map(tuple)
    ),
    messages.ResponseStored: st.builds(messages.ResponseStored, TEXTS, TEXTS, TEXTS),
    messages.PageRequest: st.builds(messages.PageRequest, CALLS, st.binary(max_size=50), TEXTS),
    messages.Resolve: st.builds(messages.Resolve, CALLS, st.none() | TEXTS, TIMES, NUMBERS),
    messages.ExitReport: st.builds(messages.ExitReport, EXITS),
    Hello: st.builds(Hello, NUMBERS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, NUMBERS),
    Resume: st.builds(Resume, CALL_SETS, CALL_SETS),
    RunningLease: st.builds(RunningLease, CALLS, REQUESTS, PLACED, TIMES, st.none() | TIMES, BOOLS, NUMBERS),
    Resumed: st.just(Resumed()),
    LeaseAcknowledged: st.builds(LeaseAcknowledged, CALLS),
    RememberedPrefix: st.builds(RememberedPrefix, TEXTS, TEXTS, st.lists(NUMBERS, max_size=5).map(tuple)),
    Ping: st.just(Ping()),
}
TO: dict[type[Any], st.SearchStrategy[Any]] = {
    messages.LeaseGranted: st.builds(
        messages.LeaseGranted, CALLS, st.sampled_from(Stage), PLACED, TIMES, NUMBERS, WHYS, TIMES | st.just(inf)
    ),
    messages.CallRefused: st.builds(messages.CallRefused, CALLS, st.sampled_from(Outcome), TEXTS, st.none() | TIMES),
    messages.LeaseCut: st.builds(messages.LeaseCut, CALLS, BOOLS),
    messages.ResponseStored: st.builds(messages.ResponseStored, TEXTS, TEXTS, TEXTS),
    messages.PageResponse: st.builds(
        messages.PageResponse, CALLS, st.integers(100, 599), TEXTS, st.lists(st.tuples(TEXTS, TEXTS)).map(tuple),
        st.binary(max_size=50),
    ),
    messages.NameResolved: st.builds(messages.NameResolved, CALLS, TARGETS),
    Welcome: st.builds(Welcome, NUMBERS, TEXTS, TEXTS, TEXTS),
    NotLeader: st.builds(NotLeader, TEXTS),
    Members: st.builds(Members, st.lists(TEXTS, max_size=5).map(tuple)),
    Drained: st.builds(Drained, st.frozensets(TEXTS, max_size=5)),
    Balances: st.builds(Balances, TEXTS, st.integers(-100, 100), st.dictionaries(TEXTS, TIMES, max_size=5)),
    Learned: st.builds(Learned, LIMITS, CAPACITIES),
    RateDebts: st.builds(RateDebts, st.lists(st.tuples(TEXTS, TEXTS, TIMES), max_size=3).map(tuple)),
    Ping: st.just(Ping()),
}  # fmt: skip
UP: dict[type[Any], st.SearchStrategy[Any]] = {
    kind: strategy for kind, strategy in FROM.items() if kind in get_args(messages.FromWorker)
} | {
    messages.WorkerIdle: st.just(messages.WorkerIdle()),
    messages.Listening: st.builds(messages.Listening, TEXTS),
    messages.LogLinesLost: st.builds(messages.LogLinesLost, NUMBERS),
    messages.BufferedBytes: st.builds(messages.BufferedBytes, NUMBERS),
}
DOWN: dict[type[Any], st.SearchStrategy[Any]] = {
    kind: strategy for kind, strategy in TO.items() if kind in get_args(messages.ToWorker)
} | {
    messages.StopWorker: st.just(messages.StopWorker()),
    messages.ShutdownState: st.builds(messages.ShutdownState, leaving=BOOLS),
    messages.WorkerStart: st.just(messages.WorkerStart("w1", (3, 4), b"config")),
    messages.LearnedEstimates: st.just(messages.LearnedEstimates({})),
    messages.KnownBackends: st.builds(
        messages.KnownBackends, st.binary(max_size=50), st.dictionaries(TEXTS, TARGETS), st.none()
    ),
}
