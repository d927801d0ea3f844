"""The command `llmproxy export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from llmproxy.cli.commands import app
from llmproxy.tools.export import KINDS, files_of


@pytest.mark.parametrize("kind", KINDS)
def test_export_writes_its_files_and_names_the_next_step(kind: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", kind, str(tmp_path / "new" / "folder")])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert written == files_of(kind)
    assert {Path(line).name for line in done.stdout.splitlines() if line} == set(written)
    assert done.stderr.startswith("\nNext: ")
    for name, text in written.items():
        assert json.loads(text) if name.endswith(".json") else all(yaml.safe_load_all(text))


def test_an_unknown_kind_names_the_known(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "graphana", str(tmp_path)])
    assert (done.exit_code, done.stderr.strip()) == (2, "llmproxy export: graphana is none of grafana, alerts")
    assert not list(tmp_path.iterdir())


def test_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["export", "alerts", str(tmp_path / "file" / "below")])
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert "Not a directory" in done.stderr
