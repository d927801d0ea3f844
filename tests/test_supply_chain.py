"""What is shipped: its name, the image's recipe, locks that agree, and an audit that says what it knows."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel

from llmproxy import __version__
from tests import ROOT

SECRET = re.compile(r"(?i)passw|secret|token|credential|api_?key|private_?key")

Instruction = tuple[str, str]


# --- the distribution -------------------------------------------------------------------------------------------------

DISTRIBUTION = "llmproxy-lb"
"""On the package index `llmproxy` is somebody else's; the import and the command are called so all the same."""


def test_the_wheel_has_a_name_of_its_own_and_the_package_and_command_llmproxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        names = wheel.namelist()
        [metadata, scripts] = [
            wheel.read(name).decode() for name in sorted(names) if re.search(r"/(METADATA|entry_points.txt)$", name)
        ]
    assert {name.partition("/")[0] for name in names} == {"llmproxy", f"llmproxy_lb-{__version__}.dist-info"}
    assert f"Name: {DISTRIBUTION}\nVersion: {__version__}\n" in metadata
    assert "llmproxy = llmproxy.__main__:main" in scripts
    assert {"llmproxy/py.typed", "llmproxy/config/other_routers.yaml"} <= set(names)


def installed_by(text: str) -> set[str]:
    """What the commands `pip install` of a text name, without options and what they need."""
    commands = re.findall(r"\bpip install([^\n`]*)", text)
    words = [word.strip("'\"().") or "." for command in commands for word in command.partition("#")[0].split()]
    return {word for word in words if "llmproxy" in word.lower()}


def test_what_documents_and_messages_install_is_this_distribution() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    own = {DISTRIBUTION, *(f"{DISTRIBUTION}[{extra}]" for extra in extras)}
    places = [path for pattern in ("*.md", "*.yaml", "Makefile", "Dockerfile") for path in ROOT.glob(pattern)]
    for folder in ("docs", "llmproxy", "benchmarks", ".ci", ".github"):
        places += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".yml", ".yaml")]
    told = {path: installed_by(path.read_text()) for path in places}
    assert {path: names for path, names in told.items() if not names <= own} == {}
    assert any(told.values())
    assert not installed_by("pip install --quiet 'llmproxy[lab]'") <= own


# --- the recipe of the image ------------------------------------------------------------------------------------------


def parsed(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def stages(recipe: Sequence[Instruction]) -> list[list[Instruction]]:
    starts = [i for i, (word, _) in enumerate(recipe) if word == "FROM"]
    return [list(recipe[i:j]) for i, j in zip(starts, [*starts[1:], len(recipe)], strict=True)]


def is_exec(text: str) -> bool:
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


def faults(text: str) -> list[str]:
    """Which rules a Dockerfile breaks: those of hadolint and of the CIS benchmark that apply to one like ours."""
    recipe = parsed(text)
    arguments = dict(rest.split("=", 1) for word, rest in recipe if word == "ARG" and "=" in rest)
    found, names = [], set[str]()
    for stage in stages(recipe):
        image, _, name = stage[0][1].partition(" AS ")
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], ""), image)
        if image not in names and not re.search(r"@sha256:|:[\w.-]*\d[\w.-]*$", image):
            found.append(f"base without a version: {image}")
        names.add(name)
    last = stages(recipe)[-1]
    users = [rest for word, rest in last if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        found.append("no numeric user other than root")
    lists = {word for word, rest in last if is_exec(rest)}
    found += [f"{wanted} is no list of words" for wanted in ("ENTRYPOINT", "CMD") if wanted not in lists]
    checks = [rest.partition("CMD ")[2] for word, rest in last if word == "HEALTHCHECK"]
    if len(checks) != 1 or not is_exec(checks[0]):
        found.append("not one HEALTHCHECK with a list of words")
    for word, rest in recipe:
        if word == "ADD":
            found.append("ADD instead of COPY")
        if word == "WORKDIR" and not rest.startswith("/"):
            found.append("WORKDIR that is relative")
        if word in ("ENV", "ARG") and SECRET.search(rest):
            found.append(f"a secret in {word}")
        if word == "RUN":
            found += run_faults(rest)
    return found


def run_faults(command: str) -> list[str]:
    found = []
    if re.search(r"\bsudo\b", command):
        found.append("sudo")
    if re.search(r"\b(curl|wget)\b.*\|", command):
        found.append("a download into a shell")
    if "apt-get install" in command:
        if "--no-install-recommends" not in command:
            found.append("apt-get with recommended packages")
        if "rm -rf /var/lib/apt/lists" not in command:
            found.append("apt lists that stay")
    for part in command.split("&&"):
        words = shlex.split(part)
        if "install" in words and any(word.endswith("pip") for word in words):
            if "--no-cache-dir" not in words:
                found.append("a cache of pip's that stays")
            if "--require-hashes" not in words and "--no-index" not in words:
                found.append("packages without hashes")
    return found


def test_the_image_keeps_the_rules() -> None:
    assert faults((ROOT / "Dockerfile").read_text()) == []


GOOD = 'FROM python:3.12\nUSER 1000\nHEALTHCHECK CMD ["true"]\nENTRYPOINT ["a"]\nCMD ["b"]\n'


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text, ""),
        (lambda text: text.replace("3.12", "latest"), "base without a version"),
        (lambda text: text.replace(":3.12", ""), "base without a version"),
        (lambda text: text.replace("USER 1000\n", ""), "numeric user"),
        (lambda text: text.replace("1000", "0"), "numeric user"),
        (lambda text: text.replace("1000", "app"), "numeric user"),
        (lambda text: text.replace("USER 1000", "USER 1000\nUSER root"), "numeric user"),
        (lambda text: text.replace("HEALTHCHECK", "# HEALTHCHECK"), "HEALTHCHECK"),
        (lambda text: text.replace('CMD ["true"]', "CMD true"), "HEALTHCHECK"),
        (lambda text: text.replace('ENTRYPOINT ["a"]', "ENTRYPOINT a"), "ENTRYPOINT"),
        (lambda text: text + "ADD http://a /a\n", "ADD"),
        (lambda text: text + "WORKDIR src\n", "WORKDIR"),
        (lambda text: text + "ENV ADMIN_API_KEY=abc\n", "a secret"),
        (lambda text: text + "RUN sudo true\n", "sudo"),
        (lambda text: text + "RUN curl a \\\n  | sh\n", "a download"),
        (lambda text: text + "RUN apt-get install --no-install-recommends a\n", "apt lists"),
        (lambda text: text + "RUN pip install --require-hashes -r a\n", "cache"),
        (lambda text: text + "RUN true && pip install --no-cache-dir a\n", "hashes"),
    ],
)
def test_each_rule_finds_what_breaks_it(change: Callable[[str], str], told: str) -> None:
    found = faults(change(GOOD))
    assert len(found) == bool(told)
    assert not found or told in found[0]


def test_whatever_the_image_copies_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for word, rest in parsed((ROOT / "Dockerfile").read_text()) if word == "COPY"]
    sources = [source for words in copied if not words[0].startswith("--from") for source in words]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in allowed), source


def test_the_healthcheck_asks_the_port_that_is_configured() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    [check] = [rest for word, rest in parsed((ROOT / "Dockerfile").read_text()) if word == "HEALTHCHECK"]
    python, *words = json.loads(check.partition("CMD ")[2])
    assert python == "python"
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        port = str(server.server_address[1])
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        ask = [sys.executable, *words]
        done = subprocess.run(ask, env={"LLMPROXY_PORT": port}, check=False, capture_output=True)
        thread.join()
    assert done.returncode == 0, done.stderr
    assert subprocess.run(ask, env={"LLMPROXY_PORT": port}, check=False, capture_output=True).returncode != 0


# --- the locks --------------------------------------------------------------------------------------------------------


def locked(name: str) -> dict[str, str]:
    """The packages of a lock and their versions; each has a hash."""
    joined = re.sub(r"\\\n\s*", " ", (ROOT / ".ci" / name).read_text())
    found = {}
    for line in joined.splitlines():
        match = re.match(r"([\w.-]+)==([\w.+-]+) ", line)
        assert match is not None, line
        assert "--hash=sha256:" in line, line
        found[match[1]] = match[2]
    return found


def test_what_is_shipped_and_built_with_is_what_was_tested() -> None:
    everything = locked("requirements.txt")
    for name in ("runtime.txt", "build.txt"):
        assert locked(name).items() <= everything.items(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {re.split(r"[<>=]", text)[0] for text in project["project"]["dependencies"]}
    assert wanted <= locked("runtime.txt").keys()
    assert set(project["build-system"]["requires"]) <= locked("build.txt").keys()
    assert {"pip-audit", "cyclonedx-bom"} <= locked("tools.txt").keys()
    assert "zensical" in locked("docs.txt")


# --- installing it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_an_install_says_how_far_it_is_in_few_lines(
    code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lock, python = tmp_path / "lock.txt", tmp_path / "python"
    lock.write_text("".join(f"p{i}==1 \\\n    --hash=sha256:0\n" for i in range(40)))
    said = "".join(f"echo Collecting p{i}==1\necho '  Downloading p{i}'\n" for i in range(40))
    python.write_text(f'#!/bin/sh\necho "$@" >&2\n{said}echo Installing collected packages: p\nexit {code}\n')
    python.chmod(0o755)
    assert runpy.run_path(str(ROOT / ".ci" / "install.py"))["install"](str(python), str(lock)) == code
    printed = capfd.readouterr()
    assert printed.out.splitlines() == [
        f"Installing 40 packages of {lock}; this takes about a minute.",
        "  15 of 40 packages",
        "  30 of 40 packages",
        "  40 of 40 packages, now unpacking",
    ]
    assert f"--require-hashes -r {lock}" in printed.err
    assert (f"exit code {code}" in printed.err) is bool(code)


# --- the audit --------------------------------------------------------------------------------------------------------

CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "GHSA-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "stderr", "code", "told"),
    [
        ([CLEAN], "", 0, "1 packages looked up, 0 vulnerabilities"),
        ([CLEAN, FLAWED], "", 1, "b 2: GHSA-1, fixed in 2.1"),
        ([CLEAN, UNKNOWN], "", 0, "not in the database: c\n1 packages looked up"),
        ([UNKNOWN, UNKNOWN], "", 0, "skipped: advisory database not reachable (who answered knows none"),
        (
            None,
            "Traceback\nrequests.exceptions.ProxyError: no",
            0,
            "skipped: advisory database not reachable (requests",
        ),
        (None, "usage: pip-audit", 2, "pip-audit failed: usage"),
        (None, None, 0, "is not installed"),
    ],
)
def test_an_audit_tells_nobody_home_from_nothing_found(
    packages: list[dict[str, Any]] | None,
    stderr: str | None,
    code: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "pip-audit"
    if stderr is not None:
        stdout = "" if packages is None else json.dumps({"dependencies": packages})
        program.write_text(f"#!/bin/sh\necho '{stdout}'\necho '{stderr}' >&2\nexit 1\n")
        program.chmod(0o755)
    audit = runpy.run_path(str(ROOT / ".ci" / "audit.py"))["audit"]
    assert audit(str(program), ["lock"]) == code
    printed = capsys.readouterr()
    assert told in printed.out + printed.err
