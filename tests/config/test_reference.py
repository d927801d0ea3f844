"""The generated pages in the repository are current, and the example configuration is valid."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmproxy.cli import commands as cli
from llmproxy.cli.flags import FLAGS, OLD_FLAGS
from llmproxy.cli.reference import page as cli_page
from llmproxy.config import Config, load
from llmproxy.config.keys import walk
from llmproxy.config.reference import SAMPLE, as_yaml, example_file, page, sample
from tests import ROOT

EXAMPLE = ROOT / "config.example.yaml"
REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize(
    ("path", "arguments", "generate"),
    [
        (EXAMPLE, [], example_file),
        (REFERENCE / "configuration.md", ["--markdown"], page),
        (REFERENCE / "cli.md", ["--cli"], lambda: cli_page(cli.app)),
    ],
)
def test_page_is_the_generated_one(path: Path, arguments: list[str], generate: Callable[[], str]) -> None:
    assert path.read_text() == generate(), f"{path} is old: make reference"
    result = CliRunner().invoke(cli.app, ["config", *arguments])
    assert (result.exit_code, result.stdout) == (0, generate())


def test_example_holds_the_defaults_and_a_sample_of_each_list(write: Any) -> None:
    assert load(EXAMPLE).model_copy(update=dict.fromkeys(SAMPLE, ())) == Config()
    assert not load(EXAMPLE).needs_key()
    with_tenant = re.sub(r"^#(?=  )", "", EXAMPLE.read_text(), flags=re.MULTILINE).replace("tenants: []", "tenants:")
    assert load(write(with_tenant)) == sample()


def test_example_and_page_have_every_key_with_its_meaning() -> None:
    without_types = re.sub(r"(?<=[^\s#])  # .*", "", EXAMPLE.read_text())
    example, reference = re.sub(r"\n#? *# (?=\S)", " ", without_types), page()
    for key in walk(Config):
        meaning = " ".join((key.field.description or "").split())
        assert re.search(rf"{re.escape(meaning)}\n#? *(- )?{key.last}:", example), key.name
        name = re.escape(key.name if key.section else key.last)
        assert re.search(rf"`{name}(\[\])?`.*\s+.*{re.escape(meaning)}", reference), key.name


@pytest.mark.parametrize(
    "row",
    [
        "| `port` | integer >= 0, <= 65535 | `8080` | Port to listen on. 0: a free port. *restart* |",
        "| `max_in_flight` | integer >= 1 or null | `null` |",
        "| `url` | text | required |",
        "| `name` | text | from `url` |",
        "| `trust_headers` | auto or networks | `auto` |",
        "| `trusted_proxies` | networks | `none` |",
        "| `ceilings` | mapping of names to number > 0, <= 1 | `{critical: 1.0, default: 0.95, sheddable: 0.85}` |",
        "| `weights` | mapping of names to number > 0 | `{}` | Weights of flows by name. Others: the"
        " tenant's, or 1. Example: `{my-model: 2.5}`. *file* |",
        "| `scheduling.withdrawal` | `scheduling.preemption` |",
    ],
)
def test_page_has_type_default_example_and_marks(row: str) -> None:
    assert any(line.startswith(row) for line in page().splitlines())


def test_cli_page_has_every_command_and_other_flag_but_no_old_one() -> None:
    text = cli_page(cli.app)
    assert {flag.name for flag in FLAGS if f"`{flag.name}`" in text} >= {"--worker-urls", "--scheduling-placement"}
    assert not [flag.name for flag in OLD_FLAGS if flag.name in text]
    assert set(re.findall(r"^## llmproxy (.+)$", text, re.MULTILINE)) >= {"serve", "check", "config", "simulate"}


def test_config_prints_the_values_of_a_file_without_its_secrets(write: Any) -> None:
    text = "port: 81\napi_keys: [s3cret]\nbackends: [{url: http://a, api_key: s3cret}, http://b]\n"
    path = write(text + "scheduling: {weights: {m: 2}}\n")
    result = CliRunner().invoke(cli.app, ["config", str(path)])
    assert (result.exit_code, result.stdout) == (0, as_yaml(load(path)))
    for line in ("port: 81  # integer >= 0, <= 65535", "api_keys: '***'  # list", "  - url: http://b", "{m: 2.0}"):
        assert line in result.stdout
    assert "s3cret" not in result.stdout


@pytest.mark.parametrize(("arguments", "problem"), [(["FILE"], "not a known key"), (["FILE", "--cli"], "only one of")])
def test_config_refuses_a_wrong_file_and_two_pages(write: Any, arguments: list[str], problem: str) -> None:
    path = str(write("prot: 1"))
    result = CliRunner().invoke(cli.app, ["config", *(path if word == "FILE" else word for word in arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr
