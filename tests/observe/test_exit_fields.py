"""The log line of a request, written past structlog, is the same as the line that structlog writes."""

from __future__ import annotations

import io
import re
from typing import Any, get_type_hints

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmproxy.core.domain import GrantReason, Outcome, Predicted, Slo, Stage, Usage, Verdict
from llmproxy.core.retry import Again
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import exit_fields, why_fields
from llmproxy.observe.logs import FORMATS, configure, log_exit
from llmproxy.scheduling.attempt import Attempt, AttemptState, Split
from tests.exits import exit_of

TEXTS = st.one_of(
    st.sampled_from(["m", "default", "", "two words", 'a="b"', "\n", "\x1b[2J", "é", "\udcff"]), st.text()
)
NUMBERS = st.one_of(st.floats(min_value=-1e6, max_value=1e9), st.sampled_from([0.0, 1.0, 0.00005, 0.12345]))
TIME = re.compile(r'^(\{"timestamp": ?"[0-9T:.-]+Z"|[0-9-]+ [0-9:.]+(?= ))')
WHYS = st.builds(
    GrantReason, st.just(((100, 1), (0, 2))), st.integers(), st.just((("counter", 3.00001),)), st.integers()
)
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    float: NUMBERS,
    int: st.integers(-(10**6), 10**12),
    bool: st.booleans(),
    Outcome: st.sampled_from(Outcome),
    tuple[tuple[str, float], ...]: st.lists(st.tuples(TEXTS, NUMBERS), max_size=3, unique_by=lambda term: term[0]).map(
        tuple
    ),
    Slo: st.none(),
    GrantReason: WHYS,
    Predicted: st.none(),
    Verdict: st.sampled_from(Verdict),
    Stage: st.sampled_from(Stage),
    Split: st.sampled_from(Split),
    AttemptState: st.sampled_from(AttemptState),
    Again: st.sampled_from(Again),
    Usage: st.none(),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold, None included where it may."""
    return STRATEGIES[hint] if hint in STRATEGIES else st.none() | STRATEGIES[hint.__args__[0]]


FIELDS = {
    name: hint
    for part in (Attempt, RequestExit)
    for name, hint in get_type_hints(part).items()
    if name in part.__struct_fields__ and name not in ("tried", "trace")
}
EXITS = st.fixed_dictionaries({name: _values(hint) for name, hint in FIELDS.items()}).map(
    lambda values: exit_of(**values)
)
REFUSED = exit_of(request_id="r", method="GET", path="/", outcome=Outcome.UNKNOWN_MODEL, status=404, duration_s=0.00001)


def _written(ended: RequestExit, log_format: str, level: str, *, past_the_library: bool) -> str:
    """The line without its time of day."""
    out = io.StringIO()
    configure(log_format, level, out)
    if not past_the_library:
        chain = structlog.get_config()["processors"]
        last = chain[-1]
        chain[-1] = lambda *event: last(*event)
    log_exit(ended)
    return TIME.sub("", out.getvalue())


@pytest.mark.parametrize("log_format", FORMATS)
@pytest.mark.parametrize("level", ["debug", "info", "warning"])
@given(ended=EXITS)
@example(ended=REFUSED)
def test_line_equals_the_librarys(log_format: str, level: str, ended: RequestExit) -> None:
    direct = _written(ended, log_format, level, past_the_library=True)
    assert direct == _written(ended, log_format, level, past_the_library=False)
    assert bool(direct) == (level != "warning" or ended.outcome in (Outcome.INTERNAL, Outcome.BROKEN_STREAM))


def test_captured_events_of_the_library_have_it_too() -> None:
    out = io.StringIO()
    configure("text", "info", out)
    with capture_logs() as events:
        log_exit(REFUSED)
    assert out.getvalue() == ""
    assert events == [{"event": "request", "log_level": "info", **exit_fields(REFUSED)}]


def test_why_names_bands_by_integers() -> None:
    why = GrantReason(waiting=((100, 1),), flows=2, standing=(("counter", 3.00001),), passed_over=4, guaranteed=True)
    assert why_fields(why) == {
        "waiting": {"100": 1}, "flows": 2, "standing": {"counter": 3.0}, "passed_over": 4, "guaranteed": True,
    }  # fmt: skip
