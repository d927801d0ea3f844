"""The benchmark beside other proxies: arithmetic, loads, and competitors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from benchmarks.peers import table
from benchmarks.peers.__main__ import parse_options
from benchmarks.peers.cases import CASES, CHUNKS, NUMBER, Case
from benchmarks.peers.competitors import PEERS, Competitor, Launch, Peer, Site, llmproxy
from benchmarks.peers.measure import Bench, Books, Running, Spread, Window, measured
from benchmarks.peers.stage import Stage
from benchmarks.proxy import BenchError, core_times_s

SSE = Case(name="sse", title="streams", clients=8, chunks=20, gap_us=1000)
LINE = {
    "window_s": 2.0,
    "requests": 10,
    "chunks": 1000,
    "bytes": 1,
    "skipped": 0,
    "streams": 5,
    "latency": None,
    "ttft": {"count": 3, "p50_us": 100.0, "p99_us": 200.0, "max_us": 300.0},
    "transit": None,
    "gap": None,
    "failures": {},
}


def window(cpu_s: float = 0.1, ttft_us: float = 100.0, disturbed: float = 0.0) -> Window:
    books = Books(cpu_s, 0.5, 0.0, cpu_s, 0.5, 0.0)
    seen = Window.parse(json.dumps(LINE), books, cores=1, realtime=False)
    return replace(seen, ttft=Spread(3, ttft_us, ttft_us, ttft_us), disturbed_share=disturbed)


def of(case: Case, name: str) -> table.Figure:
    return next(figure for figure in table.figures(case) if figure.name == name)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_inside_each_round() -> None:
    rounds = [
        {"a": window(0.1), "b": window(0.1)},
        {"a": window(0.4), "b": window(0.2)},
        {"a": window(0.9), "b": window(0.3)},
    ]
    assert table.ratios(of(SSE, "CPU/chunk, µs"), rounds, "a", "b") == pytest.approx([1.0, 2.0, 3.0])


def test_a_round_without_one_of_both_gives_no_ratio() -> None:
    rounds = [{"a": window(0.1)}, {"a": window(0.4), "b": window(0.2)}]
    assert table.ratios(of(SSE, "CPU/chunk, µs"), rounds, "a", "b") == pytest.approx([2.0])


def test_added_time_is_relative_to_direct_access_of_its_round() -> None:
    rounds = [
        {"direct": window(ttft_us=40), "a": window(ttft_us=100)},
        {"direct": window(ttft_us=90), "a": window(ttft_us=110)},
    ]
    figure = of(SSE, "added TTFT p50, µs")
    assert table.values(figure, rounds, "a") == pytest.approx([60.0, 20.0])
    assert table.values(figure, rounds, "direct") == pytest.approx([40.0, 90.0])


def test_cost_is_cpu_time_by_what_was_served() -> None:
    assert table.values(of(SSE, "CPU/chunk, µs"), [{"a": window(0.1)}], "a") == pytest.approx([100.0])
    json_case = replace(SSE, chunks=0)
    assert table.values(of(json_case, "CPU/request, µs"), [{"a": window(0.1)}], "a") == pytest.approx([10_000.0])


def test_memory_of_a_stream_is_what_it_added() -> None:
    fresh = replace(SSE, fresh=True)
    held = replace(window(), rss_before_bytes=1_000_000, rss_bytes=1_200_000)
    assert table.values(of(fresh, "RSS/stream, kB"), [{"a": held}], "a") == pytest.approx([40.0])


def test_disturbed_windows_are_dropped_unless_there_are_no_others() -> None:
    rounds = [
        {"a": window(0.1, disturbed=0.5), "b": window(disturbed=0.5)},
        {"a": window(0.2), "b": window(disturbed=0.9)},
    ]
    kept = table.kept(rounds)
    assert [sorted(one) for one in kept] == [["b"], ["a", "b"]]


def test_the_least_disturbed_window_is_taken() -> None:
    shares = iter([0.5, 0.3, 0.4])
    assert measured(lambda: window(disturbed=next(shares)), tries=3).disturbed_share == 0.3


def test_no_window_is_repeated_that_nobody_disturbed() -> None:
    shares = iter([0.5, 0.01])
    assert measured(lambda: window(disturbed=next(shares)), tries=5).disturbed_share == 0.01


def test_others_are_who_is_neither_the_proxy_nor_the_harness() -> None:
    books = Books(proxy_s=1.0, harness_s=0.8, harness_here_s=0.8, busy_s=2.4, harness_busy_s=1.5, stolen_s=0.1)
    both_cores = Window.parse(json.dumps(LINE), books, cores=2, realtime=False)
    assert both_cores.foreign_s == pytest.approx(0.6)
    assert both_cores.harness_foreign_s is None
    assert both_cores.disturbed_share == pytest.approx((0.6 / 2 + 0.1) / 2.0)


def test_in_real_time_only_the_hypervisor_disturbs() -> None:
    books = Books(proxy_s=1.0, harness_s=0.0, harness_here_s=0.0, busy_s=1.9, harness_busy_s=2.0, stolen_s=0.1)
    seen = Window.parse(json.dumps(LINE), books, cores=1, realtime=True)
    assert seen.disturbed_share == pytest.approx(0.05)
    assert seen.harness_foreign_s is None


def test_books_of_two_moments_give_what_was_used_between() -> None:
    before, after = Books(1.0, 2.0, 0.0, 3.0, 5.0, 0.5), Books(1.5, 2.25, 0.0, 4.0, 7.0, 0.75)
    assert after.since(before) == Books(0.5, 0.25, 0.0, 1.0, 2.0, 0.25)
    assert replace(after, proxy_s=None).since(replace(before, proxy_s=None)).proxy_s is None


def test_stolen_time_is_no_busy_time() -> None:
    times = core_times_s(
        "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 0 5 5 0 0 0 0 0\ncpu1 100 100 100 5 5 100 100 300 0 0\nintr 5\n"
    )
    tick_s = times[0][0] / 100
    assert times[0] == pytest.approx((100 * tick_s, 0.0))
    assert times[1] == pytest.approx((500 * tick_s, 300 * tick_s))


def test_the_table_has_a_row_and_a_ratio_for_each_proxy() -> None:
    rounds = [{"direct": window(), "a": window(0.4), "b": window(0.2)} for _ in range(3)]
    text = table.render(SSE, rounds, bases=("b", "nobody"))
    assert "| CPU/chunk ÷ b |" in text
    assert "nobody" not in text
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| a |")] == [
        "400 [400..400]",
        "2.00 [2.00..2.00]",
    ]


def test_others_beside_the_load_generator_are_reported() -> None:
    books = Books(proxy_s=1.0, harness_s=0.8, harness_here_s=0.0, busy_s=1.0, harness_busy_s=1.4, stolen_s=0.0)
    seen = Window.parse(json.dumps(LINE), books, cores=1, realtime=False)
    assert seen.harness_foreign_s == pytest.approx(0.6)
    assert table.doubts(SSE, [{"a": seen}]) == [
        "sse, round 1, a: others had 30% of a core of the load generator, so its times are late"
    ]
    assert table.doubts(SSE, [{"a": replace(seen, harness_foreign_s=0.1)}]) == []


def test_failed_requests_are_reported() -> None:
    bad: Mapping[str, Window] = {"a": replace(window(), failures={"status": 3})}
    assert table.doubts(SSE, [bad]) == ["sse, round 1, a: 3 FAILED: status"]


# --- loads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_requests_are_whole_and_as_long_as_they_say(case: Case, tmp_path: Path) -> None:
    case = replace(case, prompt_bytes=min(case.prompt_bytes, 10_000))
    systems = set()
    for file in case.requests(tmp_path):
        head, _, body = file.read_bytes().partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert body.count(NUMBER.encode()) == 1
        ask = json.loads(body.replace(CHUNKS.encode(), b"   17"))
        assert ask.get("max_tokens", 17) == 17
        assert ask.get("stream", False) == bool(case.chunks)
        *system, user = ask["messages"]
        assert user["content"].startswith(NUMBER)
        systems.add(system[0]["content"] if system else "")
        assert len(body) == pytest.approx(case.prompt_bytes, abs=300)
    assert len(systems) == (8 if case.shared_bytes else 1)


def test_options_take_lists() -> None:
    options = parse_options(["--case", "sse64,json64", "--workers", "1,2", "--only", "nginx", "--only", "litellm"])
    assert [case.name for case in options.cases] == ["sse64", "json64"]
    assert options.workers == [1, 2]
    assert options.only == ["nginx", "litellm"]


def site(folder: Path, workers: int = 1) -> Site:
    return Site(folder, 8123, 8124, tuple(f"http://127.0.0.1:{port}" for port in range(9001, 9005)), workers)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_is_given_its_port_and_every_backend(peer: Peer, tmp_path: Path) -> None:
    launch = peer.launch("/bin/peer")(site(tmp_path))
    configured = " ".join([*launch.argv, *(file.read_text() for file in tmp_path.iterdir())])
    assert launch.argv[0] == "/bin/peer"
    assert launch.cwd == tmp_path
    assert all(f"127.0.0.1:{port}" in configured for port in range(9001, 9005))
    assert "8123" in configured


def test_llmproxy_runs_from_its_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    one, two = (llmproxy("x", tree).launch(site(tmp_path, workers)) for workers in (1, 2))
    assert one.cwd == tree
    assert one.env["PYTHONPATH"].split(os.pathsep)[0] == str(tree)
    assert "--workers" not in one.argv
    assert two.argv[-2:] == ["--workers", "2"]


def test_two_programs_of_one_name_are_distinguished(tmp_path: Path) -> None:
    for name, module in (("rust", "vllm_router.launch_router"), ("python", "vllm_router.app")):
        script = tmp_path / name / "bin" / "vllm-router"
        script.parent.mkdir(parents=True)
        script.write_text(f"from {module} import main")
        script.chmod(0o755)
    found = {peer.name: peer.find([tmp_path / "rust" / "bin", tmp_path / "python" / "bin"]) for peer in PEERS}
    assert found["vllm-router"] == found["vllm-router-ca"] == str(tmp_path / "rust" / "bin" / "vllm-router")
    assert found["production-stack"] == str(tmp_path / "python" / "bin" / "vllm-router")
    assert found["nginx"] is None


# --- who takes part ---------------------------------------------------------------------------------------------------


class FakeBench:
    """Starts no process. Proxies in `broken` do not start, and proxies in `weak` fail in their first window."""

    direct = Running("direct", 1)

    def __init__(self, broken: Sequence[str] = (), weak: Sequence[str] = ()) -> None:
        self.started: list[str] = []
        self.measured: list[str] = []
        self._broken = broken
        self._weak = list(weak)

    def start(self, competitor: Competitor) -> Running:
        if competitor.name in self._broken:
            raise BenchError(f"{competitor.name} does not answer\nits log")
        self.started.append(competitor.name)
        return Running(competitor.name, 2)

    def measure(self, case: Case, running: Running, seconds: float) -> Window:
        assert seconds == 1.0
        self.measured.append(running.name)
        if running.name in self._weak:
            self._weak.remove(running.name)
            raise BenchError(f"{running.name} ended during {case.name}")
        return window()


def staged(
    bench: FakeBench, case: Case = SSE, rounds: int = 2, required: str = ""
) -> tuple[list[list[str]], list[str]]:
    """The names measured in each round, and the failures."""
    everybody = [
        Competitor(name, "", lambda site: Launch([], site.folder), required=name == required) for name in ("a", "b")
    ]
    failures: list[str] = []
    stage = Stage(cast(Bench, bench), everybody, seconds=1.0, tries=1, failures=failures)
    results: dict[str, list[dict[str, Window]]] = {case.name: []}
    with stage.open():
        stage.rounds([case], rounds, results)
    return [list(one) for one in results[case.name]], failures


def test_every_second_round_takes_the_proxies_in_reverse() -> None:
    bench = FakeBench()
    rounds, failures = staged(bench)
    assert bench.measured == ["direct", "a", "b", "direct", "b", "a"]
    assert rounds == [["direct", "a", "b"]] * 2
    assert not failures


def test_a_proxy_that_cannot_be_started_is_left_out() -> None:
    rounds, failures = staged(FakeBench(broken="b"))
    assert rounds == [["direct", "a"]] * 2
    assert failures == ["b FAILED: b does not answer"]


def test_a_proxy_that_fails_in_a_case_is_started_anew() -> None:
    bench = FakeBench(weak="a")
    rounds, failures = staged(bench)
    assert rounds == [["direct", "b"], ["direct", "a", "b"]]
    assert bench.started == ["a", "b", "a"]
    assert failures == ["a FAILED: a ended during sse"]


def test_a_proxy_that_is_required_must_not_fail() -> None:
    with pytest.raises(BenchError, match="does not answer"):
        staged(FakeBench(broken="a"), required="a")
    with pytest.raises(BenchError, match="ended during"):
        staged(FakeBench(weak="a"), required="a")


def test_a_case_for_fresh_processes_starts_each_anew() -> None:
    bench = FakeBench()
    staged(bench, replace(SSE, fresh=True), rounds=1)
    assert bench.started == ["a", "b", "a", "b"]
