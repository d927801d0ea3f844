"""The wheel runs alone: in a new virtual environment, in empty folders, without the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmproxy import __version__
from tests import ROOT
from tests.docs.shell import matches
from tests.docs.shell import run as run_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXTRAS = ("lab", "otel", "srv", "valkey")
# Two loads, because a plot needs two.
LOADS = ("--rate-scale", "1", "--rate-scale", "2", "--requests", "50")
TRACE = ("--trace", "gen:interactive_chat,rate=5", "--fleet", "1xllama-8b-h100")
SIMULATE = ("simulate", *TRACE, *LOADS, "--policy", "cost", "--no-oracle", "--out", "out")
BACKEND = "http://127.0.0.1:1"
NEED_EXTRAS: dict[str, dict[str, Any]] = {
    "valkey": {"backends": [BACKEND], "cluster": {"listen": "127.0.0.1:0", "lock": "valkey://127.0.0.1:1"}},
    "otel": {"backends": [BACKEND], "tracing": True},
    "srv": {"backends": ["srv+http://_http._tcp.vllm.invalid"]},
}


class Installed:
    """A virtual environment with the wheel and nothing for development."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        # The scripts of a copied environment name the original one.
        self._command = [str(self.programs / "python"), "-m", "llmproxy"]

    def pip_install(self, *words: str | Path) -> None:
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            self.programs / "python",
        ]
        subprocess.run([*pip, "install", *words], check=True, stdout=subprocess.DEVNULL)

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *words]
        return subprocess.run(command, cwd=cwd, env=clean(cwd), text=True, capture_output=True, check=False)

    @contextmanager
    def running(self, *words: str, says: str, cwd: Path) -> Iterator[str]:
        """Run a command. Yields the URL that it prints: the group of the pattern `says`."""
        with subprocess.Popen(
            [*self._command, *words],
            cwd=cwd,
            env=clean(cwd),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                printed, found = "", None
                while found is None and (line := process.stdout.readline()):
                    printed += line
                    found = re.search(says, printed, re.DOTALL)
                assert found is not None, printed
                yield found[1]
            finally:
                process.terminate()
                process.communicate()


def clean(home: Path) -> dict[str, str]:
    """Returns an environment without Python's variables and the user's files."""
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tested versions, as constraints: only the wheel says which packages it needs."""
    file = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    file.write_text(
        "\n".join(re.findall(r"^[\w.-]+==[^\\\n]+", (ROOT / ".ci/requirements.txt").read_text(), re.MULTILINE))
    )
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tested: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    found = Installed(tmp_path_factory.mktemp("bare"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", found.folder], check=True)
    found.pip_install("--constraint", tested, wheel)
    return found


@pytest.fixture(scope="module")
def with_extras(installed: Installed, wheel: Path, tested: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    found = Installed(tmp_path_factory.mktemp("extras") / "venv")
    shutil.copytree(installed.folder, found.folder, symlinks=True)
    found.pip_install("--constraint", tested, f"{wheel}[{','.join(EXTRAS)}]")
    return found


def test_readme_works_with_the_wheel_alone(installed: Installed, tmp_path: Path) -> None:
    for line, expected, printed in run_page(ROOT / "README.md", tmp_path, installed.programs):
        assert matches(expected, printed), f"line {line}: printed {printed!r}"


def test_version(installed: Installed, tmp_path: Path) -> None:
    assert installed.run("--version", cwd=tmp_path).stdout == f"llmproxy {__version__}\n"


def test_demo_shows_its_table_and_page(installed: Installed, tmp_path: Path) -> None:
    with installed.running("demo", "--port", "0", says=r"(http://\S+)/ui.*replica-1", cwd=tmp_path) as url:
        page = urllib.request.urlopen(f"{url}/ui").read().decode()
        parts = re.findall(r'(?:src|href)="([^"]+\.(?:js|css|svg))"', page)
        assert len(parts) > 1
        for part in parts:
            assert urllib.request.urlopen(f"{url}/{part.lstrip('/')}").status == 200


def test_commands_of_the_first_hour(installed: Installed, tmp_path: Path) -> None:
    def ran(*words: str) -> str:
        done = installed.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with installed.running("replica", "--port", "0", says=r"(http://\S+)", cwd=tmp_path) as replica:
        assert "vLLM" in ran("doctor", replica)
        assert "written" in ran("init", replica)
        assert "fine" in ran("check", "llmproxy.yaml")
        body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
        serve = ("serve", "--config", "llmproxy.yaml", "--host", "127.0.0.1", "--port", "0")
        with installed.running(*serve, says=r"listening url=(\S+).*backend_up", cwd=tmp_path) as proxy:
            ran("batch", "batch.jsonl", "--url", proxy)
    [result] = (tmp_path / "batch.results.jsonl").read_text().splitlines()
    assert json.loads(result)["response"]["status_code"] == 200


@pytest.mark.parametrize("extra", NEED_EXTRAS)
def test_serve_names_the_extra_that_it_lacks(extra: str, installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "llmproxy.yaml").write_text(yaml.safe_dump(NEED_EXTRAS[extra]))
    done = installed.run("serve", "--config", "llmproxy.yaml", "--port", "0", cwd=tmp_path)
    assert done.returncode != 0
    assert f"pip install 'llmproxy-lb[{extra}]'" in done.stdout + done.stderr


def test_serve_starts_with_all_extras(with_extras: Installed, tmp_path: Path) -> None:
    (tmp_path / "llmproxy.yaml").write_text(yaml.safe_dump(reduce(or_, NEED_EXTRAS.values())))
    serve = ("serve", "--config", "llmproxy.yaml", "--host", "127.0.0.1", "--port", "0")
    with with_extras.running(*serve, says=r"listening url=(\S+)", cwd=tmp_path) as url:
        assert urllib.request.urlopen(f"{url}/health").status == 200


def test_a_report_has_plots_or_names_the_extra(installed: Installed, with_extras: Installed, tmp_path: Path) -> None:
    for found, plots in ((installed, False), (with_extras, True)):
        done = found.run(*SIMULATE, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = (tmp_path / "out" / "report.html").read_text()
        assert ("pip install 'llmproxy-lb[lab]'" not in report) is plots
        assert ("<svg" in report) is plots


def test_systemd_accepts_the_units(installed: Installed, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in (ROOT / "docs/systemd").iterdir():
        text = unit.read_text().replace("/opt/llmproxy/bin", str(installed.programs))
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(tmp_path.iterdir())], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
