"""How far the fuzz tests go: few examples that are the same every time, or as many new ones as there is time for.

`LLMPROXY_FUZZ_EXAMPLES` is the number of examples of each test. Without it, as in `make test` and `make test-all`, they
are few and derived from the test itself, so that a run is repeatable. With it, as in `make fuzz`, they are drawn at
random; failing examples are kept under `.hypothesis/` and tried first the next time, until the finding has become an
`@example` of its test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.sizes import examples

QUICK_EXAMPLES = 60

_wanted = os.environ.get("LLMPROXY_FUZZ_EXAMPLES")

FUZZED = settings(
    max_examples=int(_wanted) if _wanted else examples(QUICK_EXAMPLES),
    derandomize=_wanted is None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""Put above `@given`."""
