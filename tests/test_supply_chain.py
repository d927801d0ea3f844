"""Packaging: names, the image, locks that agree, and the report of an audit."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel

from llmproxy import __version__
from tests import ROOT

Instruction = tuple[str, str]


# --- the distribution -------------------------------------------------------------------------------------------------

DISTRIBUTION = "llmproxy-lb"
"""On the package index `llmproxy` is somebody else's; the import and the command are called so all the same."""


def test_wheel_is_llmproxy_lb_with_package_and_command_llmproxy(
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
    assert "llmproxy/py.typed" in names


# --- a release --------------------------------------------------------------------------------------------------------

RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
CHANGELOG = """# Changelog

## [Unreleased]: 0.2.0

**New.** [Page](docs/page.md), [elsewhere](https://example.org).

## [0.1.0]: 2026-11-01

**First.**
"""


@pytest.mark.parametrize(
    ("tag", "notes"),
    [
        ("v0.1.0", "**First.**\n"),
        (None, "**New.** [Page](https://github.com/llmproxy-lb/llmproxy/blob/main/docs/page.md), "
         "[elsewhere](https://example.org).\n"),
    ],
)  # fmt: skip
def test_notes_are_a_part_of_the_changelog_with_links_that_lead_somewhere(tag: str | None, notes: str) -> None:
    assert RELEASE["notes"](CHANGELOG, tag) == notes


@pytest.mark.parametrize("tag", ["v0.2.0", "v9"])
def test_a_release_without_a_part_of_the_changelog_is_refused(tag: str) -> None:
    with pytest.raises(SystemExit, match="has no part that begins with"):
        RELEASE["notes"](CHANGELOG, tag)


def test_the_chart_is_of_this_version() -> None:
    assert RELEASE["version"]() == __version__


# --- the recipe of the image ------------------------------------------------------------------------------------------


def parsed(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_image_has_versioned_base_hashed_packages_and_no_root() -> None:
    recipe = parsed((ROOT / "Dockerfile").read_text())
    [base] = [rest for word, rest in recipe if word == "ARG"]
    assert re.fullmatch(r"BASE=\S+:[\w.-]*\d[\w.-]*", base)
    assert {rest.partition(" AS ")[0] for word, rest in recipe if word == "FROM"} == {"${BASE}"}
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", next(rest for word, rest in reversed(recipe) if word == "USER"))
    installs = [
        part
        for word, rest in recipe
        if word == "RUN"
        for part in rest.split("&&")
        if re.search(r"pip (install|wheel)", part)
    ]
    assert installs
    for install in installs:
        assert re.search(r"--require-hashes|--no-index|--no-deps --no-build-isolation", install), install


def test_no_recipe_or_lock_names_a_package_index() -> None:
    for path in (ROOT / "Dockerfile", *(ROOT / ".ci").rglob("*.txt")):
        assert not re.search(r"(?m)--(extra-)?index-url|--trusted-host|^-i ", path.read_text()), path


def test_files_copied_into_the_image_exist_and_are_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for word, rest in parsed((ROOT / "Dockerfile").read_text()) if word == "COPY"]
    sources = [source for words in copied if not words[0].startswith("--from") for source in words]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in allowed), source


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


def test_shipped_and_build_packages_are_the_tested_ones() -> None:
    everything = locked("requirements.txt")
    for name in ("runtime.txt", "build.txt"):
        assert locked(name).items() <= everything.items(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # An image has no pip, so the lock of a cluster is in it.
    shipped = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["valkey"]
    wanted = {re.split(r"[<>=]", text)[0] for text in shipped}
    assert wanted <= locked("runtime.txt").keys()
    assert set(project["build-system"]["requires"]) <= locked("build.txt").keys()
    assert {"pip-audit", "cyclonedx-bom"} <= locked("tools.txt").keys()
    assert "zensical" in locked("docs.txt")
    # Further packages must not replace the tested ones.
    assert set(project["dependency-groups"]["deploy"]) <= locked("deploy.txt").keys()
    shared = locked("deploy.txt").keys() & everything.keys()
    assert {name: everything[name] for name in shared}.items() <= locked("deploy.txt").items()


# --- installing it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_install_checks_hashes_and_prints_little_unless_it_fails(
    code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lock, python = tmp_path / "lock.txt", tmp_path / "python"
    lock.write_text("".join(f"p{i}==1 \\\n    --hash=sha256:0\n" for i in range(40)))
    said = "".join(f"echo Collecting p{i}==1\necho '  Downloading p{i}'\n" for i in range(40))
    python.write_text(f'#!/bin/sh\necho "$@" >&2\n{said}echo Installing collected packages: p\nexit {code}\n')
    python.chmod(0o755)
    assert runpy.run_path(str(ROOT / ".ci" / "install.py"))["install"](str(python), str(lock)) == code
    printed = capfd.readouterr()
    assert len(printed.out.splitlines()) < 6
    assert f"--require-hashes --no-deps -r {lock}" in printed.err
    assert (f"exit code {code}" in printed.err) is bool(code)


# --- the audit --------------------------------------------------------------------------------------------------------

CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "GHSA-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "stderr", "code", "message"),
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
def test_audit_tells_an_unreachable_database_from_no_findings(
    packages: list[dict[str, Any]] | None,
    stderr: str | None,
    code: int,
    message: str,
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
    assert message in printed.out + printed.err
