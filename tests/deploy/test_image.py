"""The image runs without rights on a read-only file system; `make image-test` names the image."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from llmproxy import __version__
from tests import ROOT

IMAGE = os.environ.get("LLMPROXY_TEST_IMAGE", "")
ENGINE = os.environ.get("DOCKER", "docker")
PORT = "9000"
START_MAX_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IMAGE, reason="`make image` and `make image-test` run it")]


def engine(*words: str) -> str:
    return subprocess.run([ENGINE, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    """A running container without rights, configured by variables."""
    closed = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
    config = ("--env", f"LLMPROXY_PORT={PORT}", "--env", "LLMPROXY_BACKEND=http://127.0.0.1:9")
    name = engine("run", "--detach", *closed, *config, IMAGE)
    yield name
    engine("rm", "--force", name)


def test_version() -> None:
    assert engine("run", "--rm", IMAGE, "--version") == f"llmproxy {__version__}"


def test_the_health_check_of_the_page_succeeds(container: str) -> None:
    [page] = re.findall(r'"(import urllib.request .*)"', (ROOT / "docs/how-to/production.md").read_text())
    command = ("python", "-c", page.replace("8080", PORT))
    end_s = time.monotonic() + START_MAX_S
    while subprocess.run([ENGINE, "exec", container, *command], check=False, capture_output=True).returncode:
        assert time.monotonic() < end_s, engine("logs", container)
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import os; print(os.getuid(), os.getgid())", "65532 65532"),
        ("import importlib.util as u; print(u.find_spec('pip'), u.find_spec('valkey') is not None)", "None True"),
        # The official images say so; Debian's Python does not.
        ("import sysconfig; print('--enable-optimizations' in sysconfig.get_config_var('CONFIG_ARGS'))", "True"),
    ],
    ids=["no-root", "packages", "profile-guided"],
)
def test_inside(code: str, printed: str, container: str) -> None:
    assert engine("exec", container, "python", "-c", code) == printed
