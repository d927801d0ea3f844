"""The workloads W1 to W11, which run in virtual time. W10, the cost of the proxy itself, is `make bench`."""

from benchmarks.lab.scenarios.workloads import (
    w1_conversation,
    w2_shared_prefix,
    w3_adapters,
    w4_noisy_neighbour,
    w4b_objectives,
    w5_priority,
    w5b_first_token,
    w6_bursts,
    w7_mixed_fleet,
    w8_failure,
    w9_stale_state,
    w11_disaggregation,
)

SCENARIOS = tuple(
    workload.SCENARIO
    for workload in (
        w1_conversation,
        w2_shared_prefix,
        w3_adapters,
        w4_noisy_neighbour,
        w4b_objectives,
        w5_priority,
        w5b_first_token,
        w6_bursts,
        w7_mixed_fleet,
        w8_failure,
        w9_stale_state,
        w11_disaggregation,
    )
)
