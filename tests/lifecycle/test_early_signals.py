"""Signals that come while a command is still being read."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
LOST = """
import os
from llmproxy.lifecycle import early_signals as early

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), {number})

early.remember()
Dropped()
print("went on")
"""
READING = """
import os, sys, types
from llmproxy.__main__ import main

def command():
    os.kill(os.getpid(), {number})
    print("went on")

sys.modules["llmproxy.cli.commands"] = types.SimpleNamespace(main=command)
sys.argv = ["llmproxy", "{command}"]
main()
"""


def run(code: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


@BOTH
def test_a_signal_is_not_lost_where_exceptions_are(number: signal.Signals) -> None:
    assert run(LOST.format(number=int(number))) == (0, "")


@pytest.mark.sampled(4)
@BOTH
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_command_ends_without_a_word_while_it_is_read(command: str, number: signal.Signals) -> None:
    assert run(READING.format(command=command, number=int(number))) == (0, "")
