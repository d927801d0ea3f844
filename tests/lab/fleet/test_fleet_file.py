"""Fleets from names and files. Errors have line, key and the nearest known word."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from llmproxy.core.domain import Role
from llmproxy.lab.fleet import fleet_file
from llmproxy.lab.fleet.fleet_file import FAULTS_MAX, REPLICAS_MAX, FleetError, fleet_named
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import PROFILES, Profile

Write = Callable[[str], str]
ONE = "replicas: [{profile: tiny}]\n"
THREE = "replicas: [{profile: tiny, count: 3}]\n"
CUSTOM = "small_ms: [5, 0.006], large_ms: [0.2, 0.02], decode_ms: [0.4, 1.0e-5], prefill_ms: [0.7, 1.0e-7]"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> str:
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        return str(path)

    return to_file


def problems(text: str) -> list[str]:
    with pytest.raises(FleetError) as caught:
        fleet_named(text)
    return [problem.replace(f"{text}:", "FILE:") for problem in caught.value.problems]


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_makes_a_fleet_that_an_engine_accepts(name: str) -> None:
    fleet = fleet_named(f"2x{name}")
    assert (fleet.name, fleet.proxies, fleet.faults) == (f"2x{name}", 1, ())
    for spec in fleet.replicas:
        assert (spec.profile_name, spec.profile, spec.kv_tokens) == (name, PROFILES[name], PROFILES[name].kv_tokens)
        assert (spec.max_num_seqs, spec.step_tokens) == (256, 8_192)
        engine = Engine(spec.profile, kv_tokens=spec.kv_tokens, block_size=spec.block_size)
        assert spec.max_model_len == min(131_072, engine.kv_room_tokens)


def test_mixed_fleets_number_their_replicas_through() -> None:
    fleet = fleet_named("2xllama-8b-h100 + 1xllama-8b-a100")
    assert [(r.name, r.profile_name) for r in fleet.replicas] == [
        ("gpu-0", "llama-8b-h100"),
        ("gpu-1", "llama-8b-h100"),
        ("gpu-2", "llama-8b-a100"),
    ]


def test_a_name_may_give_replicas_roles() -> None:
    fleet = fleet_named("1xtiny:prefill+2xtiny:decode+1xtiny")
    assert [spec.role for spec in fleet.replicas] == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH]
    assert fleet.split_up
    assert not fleet_named("2xtiny+1xtiny:both").split_up


@pytest.mark.parametrize("count", [1, 10, 11, 100, 101])
def test_sorted_names_keep_the_order(count: int) -> None:
    names = [replica.name for replica in fleet_named(f"{count}xtiny").replicas]
    assert len(set(names)) == count
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no COUNTxPROFILE and no file; write it like 8xllama-8b-h100"),
        ("tiny", "'tiny' is no COUNTxPROFILE"),
        ("2xtiny+", "'' is no COUNTxPROFILE"),
        ("-2xtiny", "'-2xtiny' is no COUNTxPROFILE"),
        ("x" * 5_000, "is no COUNTxPROFILE"),
        ("a\0b", "is no COUNTxPROFILE"),
        ("2xllama-8b-h10", "there is no engine profile 'llama-8b-h10' (nearest: \"llama-8b-h100\"; known: llama-70b"),
        ("1xtiny:decoder", "there is no role 'decoder' (nearest: \"decode\"; known: both, prefill, decode)"),
        ("1xtiny:", "there is no role ''"),
        ("0xtiny", "'0xtiny' should be of 1 to 4096 replicas"),
        ("99999xtiny", "'99999xtiny' should be of 1 to 4096 replicas"),
        ("4096xtiny+1xtiny", "has 4097 replicas, more than 4096"),
    ],
)
def test_a_wrong_name_is_reported_briefly(text: str, message: str) -> None:
    (problem,) = problems(text)
    assert message in problem
    assert len(problem) < 400


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_can_say_everything(write: Write) -> None:
    fleet = fleet_named(
        write(
            f"""
proxies: 4
replicas:
  - {{count: 2, profile: llama-8b-h100, max_num_seqs: 128, step_tokens: 2048, kv_tokens: 200000, joins_s: 30}}
  - {{name: old, count: 2, profile: llama-8b-a100, max_loras: 40}}
  - name: odd
    profile: {{name: my-8b-l40s, {CUSTOM}, kv_tokens: 1000, overhead_ms: 2}}
    max_model_len: 500
    max_cpu_loras: 9
faults:
  - {{at_s: 20, kind: slow, replica: odd, value: 2, until_s: 30}}
  - {{at_s: 10, kind: metric_age, replica: all, value: 5}}
"""
        )
    )
    assert (fleet.name, fleet.proxies) == ("fleet", 4)
    assert [spec.name for spec in fleet.replicas] == ["gpu-0", "gpu-1", "old-0", "old-1", "odd"]
    first, _, old, _, odd = fleet.replicas
    assert (first.max_num_seqs, first.step_tokens, first.kv_tokens, first.joins_s) == (128, 2_048, 200_000, 30)
    assert first.max_model_len == 131_072
    assert (old.max_loras, old.max_cpu_loras) == (40, 40)
    assert odd.profile == Profile((5, 0.006), (0.2, 0.02), (0.4, 1e-5), (0.7, 1e-7), kv_tokens=1_000, overhead_ms=2)
    assert (odd.profile_name, odd.kv_tokens, odd.max_model_len, odd.max_cpu_loras) == ("my-8b-l40s", 1_000, 500, 9)
    assert fleet.faults == (
        Fault(10, FleetFaultKind.METRIC_AGE, None, None, 5),
        Fault(20, FleetFaultKind.SLOW, "odd", 30, 2),
    )


def test_the_example_is_a_fleet(write: Write) -> None:
    assert fleet_file.__doc__ is not None
    fleet = fleet_named(write(textwrap.dedent(fleet_file.__doc__.partition("\n\n")[2])))
    assert [spec.name for spec in fleet.replicas] == [*(f"gpu-{i}" for i in range(6)), "late"]
    assert (len(fleet.faults), fleet.proxies) == (2, 2)
    assert [spec.role for spec in fleet.replicas] == [*[Role.DECODE] * 6, Role.BOTH]
    assert fleet.kv_transfer == KvTransfer(bytes_per_s=1.25e9, latency_s=0.01)


def test_a_file_needs_no_telling_ending(tmp_path: Path) -> None:
    path = tmp_path / "2xtiny"
    path.write_text(ONE)
    assert len(fleet_named(str(path)).replicas) == 1


def test_the_default_context_leaves_a_block_of_the_cache(write: Write) -> None:
    (spec,) = fleet_named(write("replicas: [{profile: tiny, kv_tokens: 1000, block_size: 32}]")).replicas
    assert spec.max_model_len == Engine(spec.profile, kv_tokens=1_000, block_size=32).kv_room_tokens == 30 * 32


@pytest.mark.parametrize(("written", "ahead"), [("", True), (", async_scheduling: false", False)])
def test_steps_are_planned_ahead_unless_the_file_says_otherwise(write: Write, written: str, ahead: bool) -> None:
    (spec,) = fleet_named(write(f"replicas: [{{profile: tiny{written}}}]")).replicas
    assert spec.async_scheduling is ahead


def test_everything_wrong_is_reported_at_once_with_its_line(write: Write) -> None:
    message = problems(
        write(
            """replicas:
  - count: 4
    profile: llama-8b-h100
    max_num_seq: 3
  - {profile: llama-8b-h10}
  - profile: {small_ms: [1, 2], large_ms: [1], decode_ms: [0.4, -1], prefill_ms: [0, 0], kv_tokens: 10, overhead: 3}
  - count: 0
faults:
  - {at_s: 3, kind: kil, replica: gpu-1}
  - {kind: kill}
proxi: 3
"""
        )
    )
    expected = [
        'FILE:4: replicas[0].max_num_seq: is not a known key (nearest known key: "max_num_seqs")',
        "FILE:5: replicas[1].profile: there is no engine profile 'llama-8b-h10' (nearest: \"llama-8b-h100\"",
        "FILE:6: replicas[2].profile.large_ms[1]: is missing",
        "FILE:6: replicas[2].profile.decode_ms[1]: should be greater than or equal to 0, not -1",
        'FILE:6: replicas[2].profile.overhead: is not a known key (nearest known key: "overhead_ms")',
        "FILE:7: replicas[3].count: should be greater than or equal to 1, not 0",
        "FILE:7: replicas[3].profile: is missing",
        "FILE:9: faults[0].kind: 'kil' is none of kill, restart,",
        "FILE:10: faults[1].at_s: is missing",
        "FILE:10: faults[1].replica: is missing",
        'FILE:11: proxi: is not a known key (nearest known key: "proxies")',
    ]
    assert len(message) == len(expected)
    assert all(line.startswith(start) for line, start in zip(message, expected, strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "replicas: is missing"),
        ("- 1\n", "FILE:1: should be lines of the form"),
        ("replicas: []\n", "FILE:1: replicas: should have at least one entry"),
        ("replicas: [\n", "is no valid YAML"),
        (ONE + ONE, "FILE:2: replicas: is given twice, first in line 1"),
        ("replicas: [{profile: tiny, count: 1.5}]", "replicas[0].count: should be a valid integer"),
        ("replicas: [{profile: tiny, count: true}]", "replicas[0].count: should be a number, not true"),
        (f"replicas: [{{profile: tiny, count: {REPLICAS_MAX + 1}}}]", "should be less than or equal to 4096"),
        ("replicas: [{profile: tiny, count: 4096}, {profile: tiny}]", "replicas: are 4097 servers, more than 4096"),
        ("replicas: [{profile: tiny, max_num_seqs: 9000}]", "max_num_seqs: should be at most step_tokens, 8192"),
        ("replicas: [{profile: tiny, step_tokens: 100}]", "max_num_seqs: should be at most step_tokens, 100, not 256"),
        ("replicas: [{profile: tiny, kv_tokens: 31}]", "kv_tokens: should hold at least two blocks of 16 tokens"),
        ("replicas: [{profile: tiny, max_model_len: 65521}]", "max_model_len: is more than the 65520 tokens"),
        ("replicas: [{profile: tiny, max_loras: 9, max_cpu_loras: 8}]", "should be at least max_loras, 9, not 8"),
        ("replicas: [{profile: tiny, joins_s: .inf}]", "joins_s: should be a valid number"),
        ("replicas: [{profile: tiny}, {profile: tiny, block_size: 32}]", "[1].block_size: should be the same for all"),
        ("replicas: [{profile: tiny, name: a}, {profile: tiny, name: a}]", "[1].name: 'a' is the name of another"),
        ("replicas: [{profile: tiny, name: gpu-1}, {profile: tiny}]", "replicas[1]: 'gpu-1' is the name of another"),
        ("replicas: [{profile: tiny, name: all}]", "replicas[0].name: 'all' means every replica"),
        (
            "replicas: [{profile: {small_ms: [0, 1], large_ms: [0, 0], decode_ms: [0, 1], prefill_ms: [0, 1], "
            "kv_tokens: 1000, overhead_ms: 0}}]",
            "replicas[0].profile: a step may take no time",
        ),
    ],
)
def test_a_wrong_file_is_reported(write: Write, text: str, message: str) -> None:
    found = problems(write(text))
    assert len(found) == 1, found
    assert message in found[0]


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    assert problems(str(tmp_path / "none.yaml")) == ["FILE: cannot be read: No such file or directory"]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("{at_s: 1, kind: kill, replica: gpu-7}", ".replica: 'gpu-7' is no replica of this fleet (nearest: \"gpu-"),
        ("{at_s: -1, kind: kill, replica: gpu-1}", ".at_s: should be greater than or equal to 0"),
        ("{at_s: 1, kind: kill, replica: gpu-1, until_s: 3}", ".until_s: means nothing to a kill"),
        ("{at_s: 1, kind: hang, replica: gpu-1, value: 3}", ".value: means nothing to a hang"),
        ("{at_s: 1, kind: restart, replica: gpu-1}", ".value: is missing: should be the seconds until it serves"),
        ("{at_s: 1, kind: slow, replica: gpu-1}", ".value: is missing: should be a factor above 1"),
        ("{at_s: 1, kind: slow, replica: gpu-1, value: 1}", ".value: should be a factor above 1, not 1"),
        ("{at_s: 1, kind: reset, replica: gpu-1, value: 1.1}", ".value: should be a probability from 0 to 1, not 1.1"),
        ("{at_s: 1, kind: lost_readings, replica: gpu-1, value: 2}", ".value: should be a probability from 0 to 1"),
        ("{at_s: 1, kind: lost_kv_events, replica: gpu-1, value: 2}", ".value: should be a probability from 0 to 1"),
        ("{at_s: 5, kind: hang, replica: gpu-1, until_s: 5}", ".until_s: should be after at_s, 5, not 5"),
    ],
)
def test_a_wrong_fault_is_reported(write: Write, faults: str, message: str) -> None:
    found = problems(write(f"{THREE}faults:\n  - {faults}\n"))
    assert len(found) == 1, found
    assert f"FILE:3: faults[0]{message}" in found[0]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("at_s: 1, kind: kill, replica: gpu-1", "at_s: 2, kind: kill, replica: gpu-1", "gpu-1 is dead since 1 seconds"),
        ("at_s: 1, kind: kill, replica: all", "at_s: 2, kind: hang, replica: gpu-2", "gpu-2 is dead since 1 seconds"),
        (
            "at_s: 1, kind: restart, value: 5, replica: gpu-1",
            "at_s: 2, kind: kill, replica: all",
            "gpu-1 restarts since 1 and until 6 seconds",
        ),
        (
            "at_s: 1, kind: hang, replica: gpu-1",
            "at_s: 9, kind: hang, replica: all",
            "another hang of gpu-1 is still on at 9 seconds",
        ),
        (
            "at_s: 1, kind: slow, value: 2, replica: all, until_s: 4",
            "at_s: 3, kind: slow, value: 3, replica: gpu-0",
            "another slow of gpu-0 is still on at 3 seconds",
        ),
    ],
)
def test_faults_that_cannot_follow_one_another_are_reported(
    write: Write, first: str, second: str, message: str
) -> None:
    assert problems(write(f"{THREE}faults:\n- {{{first}}}\n- {{{second}}}\n")) == [f"FILE:4: faults[1].at_s: {message}"]
    # The timeline counts, not the order in the file.
    assert problems(write(f"{THREE}faults:\n- {{{second}}}\n- {{{first}}}\n")) == [f"FILE:3: faults[0].at_s: {message}"]


def test_a_replica_that_has_not_joined_cannot_fail(write: Write) -> None:
    late = "replicas: [{profile: tiny, joins_s: 10}]\nfaults: [{at_s: 9, kind: kill, replica: gpu-0}]\n"
    assert problems(write(late)) == ["FILE:2: faults[0].at_s: gpu-0 joins only at 10 seconds"]


@pytest.mark.parametrize(
    "faults",
    [
        "[{at_s: 1, kind: kill, replica: gpu-1}, {at_s: 2, kind: restart, value: 3, replica: gpu-1}]",
        "[{at_s: 1, kind: restart, value: 3, replica: gpu-1}, {at_s: 4, kind: hang, replica: gpu-1}]",
        "[{at_s: 1, kind: kill, replica: gpu-1}, {at_s: 4, kind: metric_age, value: 1, replica: all}]",
        "[{at_s: 1, kind: hang, until_s: 2, replica: all}, {at_s: 2, kind: hang, replica: gpu-2}]",
        "[{at_s: 1, kind: hang, replica: gpu-1}, {at_s: 2, kind: slow, value: 2, replica: gpu-1}]",
        "[{at_s: 1, kind: reset, value: 0.5, replica: gpu-1}, {at_s: 1, kind: reset, value: 1, replica: gpu-2}]",
    ],
)
def test_faults_may_follow_one_another(write: Write, faults: str) -> None:
    assert len(fleet_named(write(f"{THREE}faults: {faults}\n")).faults) == 2


def test_faults_are_limited(write: Write) -> None:
    line = "- {at_s: 1, kind: restart, value: 0, replica: gpu-0}\n"
    (problem,) = problems(write(f"{ONE}faults:\n{line * (FAULTS_MAX + 1)}"))
    assert "FILE:2: faults: should have at most 1000 items" in problem
    assert len(problem) < 600
