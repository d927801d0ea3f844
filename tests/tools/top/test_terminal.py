"""Pressed keys, and foreign text in the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import sys
import termios

import pytest

from llmproxy.tools.terminal import NAME_MAX, pressed, printable


async def test_keys_are_read_from_a_terminal_that_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with open(slave, "r+b", buffering=0) as raw:  # noqa: ASYNC230, PTH123
        terminal = io.TextIOWrapper(raw, write_through=True)
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stdin", terminal)
        before, keys = termios.tcgetattr(slave), asyncio.Queue[str]()
        with pressed(keys.put_nowait):
            os.write(master, "f\x1b[A\x1bOP\x1b[1;5Dé".encode())
            assert [await keys.get(), await keys.get()] == ["f", "é"]
        assert termios.tcgetattr(slave) == before
        monkeypatch.undo()
    os.close(master)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu-0", "gpu-0"),
        ("\x1b[2J\x1b]0;title\x07", "�[2J�]0;title�"),
        ("\x9b31m", "�31m"),
        ("a\r\nb\tc", "a  b c"),
        ("a\u202eb\u2066c", "a�b�c"),
        ("\udcff", "�"),
        ("语言 é", "语言 é"),
    ],
)
def test_text_of_others_cannot_control_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_is_cut() -> None:
    assert printable("n" * 10_000) == "n" * (NAME_MAX - 1) + "…"
