"""Trace files: the arrivals of each format, and the error messages of invalid files."""

from __future__ import annotations

import gzip
import os
from itertools import islice
from pathlib import Path

import pytest

from llmproxy.lab.traces import files, open_trace, survey, trace_named
from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError
from tests.lab.traces.conftest import Saved, complaint, read

MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 7]}
{"timestamp": 1500, "input_length": 1024, "output_length": 20, "hash_ids": [0, 8]}
{"timestamp": 1500, "input_length": 1025, "output_length": 1, "hash_ids": [0, 8, 9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:59.6805900,374,44\r
2023-11-17 00:00:03.9951690,396,109"""
SERVEGEN = "t_s,client,input_tokens,output_tokens,reason_ratio\n0.5,45,969,53,0.25\n0.501,80,142,78,0\n"
ARENA = 't_s,client,prompt_tokens,output_tokens\n0,13,13,199\n2e-1,"two, three",36,137\n'
OWN = """\
{"llmproxy_trace": 1, "block_tokens": 16}

{"at_s": 0.5, "prompt_tokens": 20, "output_tokens": 30, "blocks": [4, 5, 6, 7], "tenant": "blue", "adapter": "sql", \
"criticality": " Critical", "session": "s", "max_wait_s": 2, "ttft_slo_s": 0.5, "tpot_slo_s": 1e-2}
{"at_s": 3, "prompt_tokens": 1, "output_tokens": 1, "model": "sql", "criticality": -7, "deadline_s": 9.5, \
"tenant": null}
"""
HEAD = "t_s,client,prompt_tokens,output_tokens\n"


# --- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "block_tokens", "arrivals"),
    [
        (
            MOONCAKE,
            512,
            [Arrival(0.0, 600, 52, (0, 7)), Arrival(1.5, 1024, 20, (0, 8)), Arrival(1.5, 1025, 1, (0, 8, 9))],
        ),
        (SERVEGEN, 512, [Arrival(0.5, 969, 53, (), "45"), Arrival(0.501, 142, 78, (), "80")]),
        (ARENA, 512, [Arrival(0.0, 13, 199, (), "13"), Arrival(0.2, 36, 137, (), "two, three")]),
        (
            OWN,
            16,
            [
                Arrival(0.5, 20, 30, (4, 5, 6, 7), "blue", "sql", "critical", "s", 2.0, 0.5, 0.01),
                Arrival(3.0, 1, 1, adapter="sql", band=-7, max_wait_s=9.5),
            ],
        ),
        (
            '{"at_s": 1, "prompt_tokens": 513, "output_tokens": 2, "blocks": [1, 2]}',
            512,
            [Arrival(1.0, 513, 2, (1, 2))],
        ),
    ],
    ids=["Mooncake", "ServeGen", "arena", "own", "own without a header"],
)
def test_what_a_file_says_is_read(saved: Saved, content: str, block_tokens: int, arrivals: list[Arrival]) -> None:
    path = saved(content)
    assert open_trace(path).block_tokens == block_tokens
    assert read(path) == arrivals


def test_azure_counts_from_the_first_row_of_each_reading(saved: Saved) -> None:
    trace = open_trace(saved(AZURE))
    first, second = trace.arrivals()
    assert first == Arrival(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert list(trace.arrivals()) == [first, second]


def test_gzip_is_known_by_its_first_bytes(saved: Saved) -> None:
    assert len(read(saved(gzip.compress(MOONCAKE.encode())))) == 3


def test_a_mark_of_spreadsheets_and_empty_lines_mean_nothing(saved: Saved) -> None:
    assert len(read(saved("\ufeff\n\n" + ARENA + "\n  \n"))) == 2


def test_a_name_is_the_files_without_its_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "monday.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert trace_named(str(path)).name == "monday"


def test_reading_holds_one_line_at_a_time(saved: Saved) -> None:
    # The invalid last line must not be read.
    path = saved(ARENA + "torn")
    assert len(list(islice(open_trace(path).arrivals(), 2))) == 2


# --- errors -----------------------------------------------------------------------------------------------------------


def mooncake(**changed: object) -> str:
    fields = {"timestamp": "2000", "input_length": "600", "output_length": "5", "hash_ids": "[1, 2]", **changed}
    return MOONCAKE + "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items() if value is not None) + "}"


def own(more: str) -> str:
    return '{"at_s": 0, "prompt_tokens": 20, "output_tokens": 30' + more + "}"


FAULTS: dict[str, tuple[str | bytes, str]] = {
    "torn last line": (MOONCAKE + '{"timestamp": 27, "inp', "trace.data:4: not valid JSON: "),
    "no object": (MOONCAKE + "[1]", "trace.data:4: not a JSON object but [1]"),
    "negative": (mooncake(input_length=-1), "trace.data:4: input_length is -1; should be 1 to 10,000,000"),
    "zero": (mooncake(output_length=0), "trace.data:4: output_length is 0; should be 1 to 10,000,000"),
    "too long": (
        mooncake(input_length=10_000_001),
        "trace.data:4: input_length is 10000001; should be 1 to 10,000,000",
    ),
    "no integer": (mooncake(input_length=6.5), "trace.data:4: input_length is 6.5; should be an integer"),
    "true": (mooncake(output_length="true"), "trace.data:4: output_length is true; should be an integer"),
    "NaN": (mooncake(timestamp="NaN"), "trace.data:4: not valid JSON: "),
    "before": (
        mooncake(timestamp=1499),
        "trace.data:4: arrives at 1.499 s, before the request above it at 1.5 s: sort",
    ),
    "below 0 s": (mooncake(timestamp=-1), "trace.data:4: timestamp is -1; times count from the start of the trace"),
    "a calendar's": (mooncake(timestamp=1.7e12), "trace.data:4: timestamp is 1700000000000.0; times count from"),
    "a missing key": (mooncake(hash_ids=None), "trace.data:4: hash_ids missing"),
    "ids": (mooncake(hash_ids="[1, 2, 3]"), "trace.data:4: hash_ids has 3 blocks, but 600 tokens fill 2 of 512 tokens"),
    "an id": (mooncake(hash_ids="[1, -2]"), "trace.data:4: hash_ids should be a list of integers, none below 0"),
    "unknown key": (own(', "prioritty": 1'), 'trace.data:1: unknown key "prioritty" (nearest: "criticality")'),
    "two names": (own(', "model": "a", "adapter": "a"'), "trace.data:1: adapter and model mean the same; give one"),
    "own ids": (own(', "blocks": [1, 2]'), "trace.data:1: blocks has 2 blocks, but 50 tokens fill 1 of 512 tokens"),
    "a span": (own(', "deadline_s": 0'), "trace.data:1: deadline_s is 0; should be a number of seconds above 0"),
    "a name": (own(', "tenant": 3'), "trace.data:1: tenant is 3; should be a text of 1 to 512 characters"),
    "a band": (own(', "criticality": 1.5'), "trace.data:1: criticality is 1.5; should be a text of"),
    "a version": ('{"llmproxy_trace": 2}\n' + own(""), "trace.data:1: llmproxy_trace is 2; only version 1 is known"),
    "a header's key": ('{"llmproxy_trace": 1, "blocks": 2}', 'trace.data:1: unknown key "blocks" (nearest: "block_tok'),
    "a header's size": (
        '{"llmproxy_trace": 1, "block_tokens": 0}',
        "trace.data:1: block_tokens is 0; should be 1 to 1,048,576",
    ),
    "a short row": (HEAD + "0,1,5", "trace.data:2: 3 columns where the header has 4"),
    "words": (HEAD + "0,1,5,many", 'trace.data:2: output_tokens is "many"; should be an integer from 1 to 10,000,000'),
    "half a token": (HEAD + "0,1,5.5,1", 'trace.data:2: prompt_tokens is "5.5"; should be an integer'),
    "endless digits": (HEAD + f"0,1,{'9' * 5_000},1", 'trace.data:2: prompt_tokens is "999'),
    "other digits": (HEAD + "0,1,\u0663,1", 'trace.data:2: prompt_tokens is "\u0663"; should be an integer'),
    "a CSV's 0": (HEAD + "0,1,0,1", 'trace.data:2: prompt_tokens is "0"; should be an integer'),
    "nan": (HEAD + "nan,1,5,1", 'trace.data:2: t_s is "nan"; should be a number of seconds'),
    "inf": (HEAD + "inf,1,5,1", 'trace.data:2: t_s is "inf"; should be a number of seconds'),
    "no time": (HEAD + "soon,1,5,1", 'trace.data:2: t_s is "soon"; should be a number of seconds'),
    "an open quote": (HEAD + '0,"1,5,1', "trace.data:2: not valid CSV: "),
    "unsorted": (HEAD + "3,1,5,1\n2,1,5,1", "trace.data:3: arrives at 2 s, before the request above it at 3 s: sort"),
    "no client": (HEAD + "3,,5,1", 'trace.data:2: client is ""; should be a text of 1 to 512 characters'),
    "no column": ("t_s,client,input_tokens\n", "trace.data:1: no column output_tokens, which ServeGen CSV has: t_s,"),
    "a column twice": ("t_s,client,client,input_tokens,output_tokens\n", "trace.data:1: more than one column client"),
    "unknown column": (
        "t_s,cleint,client,input_tokens,output_tokens",
        'trace.data:1: unknown column "cleint" in Serve',
    ),
    "a stamp": (AZURE + "\nyesterday,1,1", 'trace.data:4: TIMESTAMP is "yesterday"; should be like 2023-11-16 18:15'),
    "a stamp too early": (
        AZURE + "\n2023-11-16 23:00:00.0,1,1",
        "trace.data:4: TIMESTAMP 2023-11-16 23:00:00.0 is before",
    ),
    "mixed stamps": (
        AZURE + "\n2023-11-17 23:00:00+00:00,1,1",
        'trace.data:4: TIMESTAMP is "2023-11-17 23:00:00+00:00"',
    ),
    "empty": ("", "trace.data: no requests: the file is empty"),
    "blank": (" \n\n", "trace.data: no requests: the file is empty"),
    "a header alone": (HEAD, "trace.data: no requests: there is nothing below the first line"),
    "other CSV": ("tokens,ratio\n1,2", "trace.data:1: a trace of unknown format; known are Mooncake JSONL ("),
    "other JSON": ('{"prompt": "hello"}', "trace.data:1: a trace of unknown format; known are Mooncake JSONL ("),
    "other text": (HEAD.encode("latin-1") + b"0,\xe9,5,1", "trace.data:2: not UTF-8 text: "),
    "cut gzip": (gzip.compress(MOONCAKE.encode())[:-12], "trace.data:1: the gzip stream is broken: "),
    "bad gzip": (b"\x1f\x8b\x08\x00" + bytes(40), "trace.data:1: the gzip stream is broken: "),
    "no gzip": (b"\x1f\x8bhello", "trace.data:1: the gzip stream is broken: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_with_its_place(saved: Saved, fault: str) -> None:
    content, message = FAULTS[fault]
    assert complaint(saved(content)).startswith(message)


def test_an_endless_line_is_not_read_to_its_end(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_BYTES_MAX", 1 << 20)
    zeros = gzip.compress(HEAD.encode() + b"0" * (8 << 20))
    assert complaint(saved(zeros)) == "trace.data:2: the line is longer than 1 MB"


def test_what_is_no_file(tmp_path: Path) -> None:
    assert complaint(tmp_path / "nowhere") == "nowhere: cannot be read: No such file or directory"
    assert complaint(tmp_path).endswith(": cannot be read: Is a directory")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert complaint(pipe).startswith("pipe: not a regular file")


# --- the survey -------------------------------------------------------------------------------------------------------


def test_a_survey_adds_up_all_turns() -> None:
    last = Arrival(9.0, 30, 7, adapter="b", band=5)
    arrivals = [
        Arrival(1.0, 10, 20, tenant="x", adapter="a", then=Arrival(4.0, 25, 2, adapter="a", then=last)),
        Arrival(2.0, 1, 1, tenant="y"),
    ]
    found = survey(Trace("t", lambda: iter(arrivals)))
    assert (found.count, found.duration_s) == (4, 9.0)
    assert (found.adapters, found.bands) == ({"a": 2, "b": 1}, ("default", 5))


def test_a_survey_is_bounded() -> None:
    def many(**field: str) -> Trace:
        (key, value), *_ = field.items()
        return Trace("t", lambda: (Arrival(0.0, 1, 1, **{key: f"{value}{n}"}) for n in range(10_001)))  # type: ignore[arg-type]

    with pytest.raises(TraceError, match="t: more than 10,000 adapters"):
        survey(many(adapter="x"))
    with pytest.raises(TraceError, match="t: more than 100 bands"):
        survey(many(band="x"))


def test_a_survey_finds_the_last_line(saved: Saved) -> None:
    with pytest.raises(TraceError, match=":4: not valid JSON"):
        survey(open_trace(saved(MOONCAKE + "{")))
    with pytest.raises(TraceError, match="nothing: no requests"):
        survey(Trace("nothing", lambda: iter(())))
