"""The batch file is checked whole, and the results file survives a kill at any byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from llmproxy.tools.batch import requests
from llmproxy.tools.batch.requests import PROBLEMS_MAX, BatchError, RequestFile
from llmproxy.tools.batch.results import Response, Result, ResultFile
from tests.tools.batch.files import line, write


def result(name: str, body: bytes = b'{"a":1}') -> Result:
    return Result(name, Response(200, "r", msgspec.Raw(body)))


def names(path: Path) -> list[str]:
    file = ResultFile(path)
    try:
        return [one.custom_id for one in file.results()]
    finally:
        file.close()


# --- the batch file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "is no JSON: "),
        ("[]", "Expected `object`"),
        ('{"method": "POST"}', "missing required field `custom_id`"),
        (line(1, custom_id=7), "Expected `str`, got `int` - at `$.custom_id`"),
        (line(1, method="GET"), "the method is GET, and should be POST"),
        (line(1, url="/v1/audio\x1b[2J"), "the url /v1/audio\ufffd[2J is none of /v1/chat/completions, "),
        (line(1, body=[]), "Expected `object`, got `array`"),
        (line(1, body={"stream": True}), "`stream` should be false"),
        (line("same"), "line 1 has the custom_id same too"),
        ('{"custom_id": "\\ud800"}', "is no JSON: "),
        ("\x00", "is no JSON: "),
        (json.dumps(line(1, body="deep")).replace('"deep"', "[" * 20_000 + "]" * 20_000), "is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, broken: object, message: str) -> None:
    path = write(tmp_path / "b.jsonl", [line("same"), "", broken, line("last")])
    with pytest.raises(BatchError) as caught:
        RequestFile(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}, line 3: ")
    assert message in problem


def test_many_problems_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", ["x"] * 100)
    with pytest.raises(BatchError) as caught:
        RequestFile(path)
    assert len(caught.value.problems) == PROBLEMS_MAX + 1
    assert "line 20" in caught.value.problems[-2]


def test_files_that_are_no_batch(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, write(tmp_path / "empty", ["", " "])):
        with pytest.raises(BatchError):
            RequestFile(path)
    with patch.object(requests, "LINE_BYTES_MAX", 300), pytest.raises(BatchError, match="line 2: is longer than"):
        RequestFile(write(tmp_path / "b.jsonl", [line(1), line(2, body={"x": "y" * 400}), line(3)]))


def test_pipes_are_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(line(1)).encode())
    os.close(writing)
    with pytest.raises(BatchError, match="is no regular file"):
        RequestFile(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(BatchError, match="cannot write"):
            ResultFile(path)


def test_bodies_keep_their_bytes(tmp_path: Path) -> None:
    body = '{"seed": 123456789012345678901234567890, "n":1.50, "x": "\\u00e9"}'
    text = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ' + body + "}"
    file = RequestFile(write(tmp_path / "b.jsonl", ["", text, line("b")]))
    assert bytes(file.request("a").body).decode() == body
    assert file.request("b").custom_id == "b"
    for changed in ("x" * 999, file.path.read_text().replace('"b"', '"c"')):
        file.path.write_text(changed)
        with pytest.raises(BatchError, match="was changed"):
            file.request("b")
    file.close()


# --- the results file -------------------------------------------------------------------------------------------------


def test_a_kill_at_any_byte_loses_and_repeats_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = ResultFile(path)
    for name in ("a", "b", "c"):
        file.append(result(name, b'"\\n\xc3\xa9"'))
    file.close()
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 3
    for size in [*range(4), *range(ends[0] - 3, len(whole) + 1)]:
        path.write_bytes(whole[:size])
        found = names(path)
        assert found == ["a", "b", "c"][: sum(end <= size for end in ends)]
        assert path.stat().st_size == max([0, *(end for end in ends if end <= size)])


def test_zeros_at_the_end_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(msgspec.json.encode(result("a")) + b"\n" + bytes(50))
    assert names(path) == ["a"]
    assert path.read_text().count("\n") == 1


def test_a_broken_line_in_the_middle_is_refused_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", ["notes", msgspec.json.encode(result("a")).decode()])
    before = path.read_bytes()
    with pytest.raises(BatchError, match="line 1: JSON is malformed"):
        names(path)
    assert path.read_bytes() == before


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "r.jsonl")
    with pytest.raises(BatchError, match="another process writes"):
        ResultFile(tmp_path / "r.jsonl")
    first.close()
    ResultFile(tmp_path / "r.jsonl").close()


@pytest.mark.parametrize("taken", [7, None])
def test_a_full_disk_leaves_no_half_line(tmp_path: Path, taken: int | None) -> None:
    file = ResultFile(tmp_path / "r.jsonl")
    file.append(result("a"))
    write_really = os.write

    def partly(fd: int, data: bytes) -> int:
        if taken is None:
            raise OSError(28, "No space left on device")
        return write_really(fd, data[:taken])

    with patch("os.write", partly), pytest.raises(BatchError, match="cannot write"):
        file.append(result("b"))
    file.close()
    assert [json.loads(one)["custom_id"] for one in file.path.read_text().splitlines()] == ["a"]


@pytest.mark.parametrize("content", ['{"my":"precious"}', '{"my":"precious"}\n', "text"])
def test_a_file_without_results_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(BatchError, match="choose another --out"):
        names(path)
    assert path.read_text() == content
