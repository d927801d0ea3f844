"""The generated pages in the repository are current, and the example configuration is valid."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from llmproxy.cli import commands as cli
from llmproxy.cli.flags import FLAGS, OLD_FLAGS
from llmproxy.config import Config, load
from llmproxy.config.keys import walk
from llmproxy.config.reference import SAMPLE, as_yaml, example_file, sample
from tests import ROOT
from tests.docs import cli_page, keys_page

EXAMPLE = ROOT / "config.example.yaml"


@pytest.mark.parametrize(
    ("name", "generate"),
    [
        ("config.example.yaml", example_file),
        ("docs/reference/configuration.md", keys_page.page),
        ("docs/reference/cli.md", cli_page.page),
    ],
)
def test_page_is_the_generated_one(name: str, generate: Callable[[], str]) -> None:
    assert (ROOT / name).read_text() == generate(), f"{name} is old: make reference"


def test_config_prints_the_example_file() -> None:
    result = CliRunner().invoke(cli.app, ["config"])
    assert (result.exit_code, result.stdout) == (0, example_file())


def test_example_holds_the_defaults_and_a_sample_of_each_list(write: Any) -> None:
    assert load(EXAMPLE).model_copy(update=dict.fromkeys(SAMPLE, ())) == Config()
    assert not load(EXAMPLE).needs_key()
    with_tenant = re.sub(r"^#(?=  )", "", EXAMPLE.read_text(), flags=re.MULTILINE).replace("tenants: []", "tenants:")
    assert load(write(with_tenant)) == sample()


def test_example_and_page_have_every_key_with_its_meaning() -> None:
    without_types = re.sub(r"(?<=[^\s#])  # .*", "", EXAMPLE.read_text())
    example, reference = re.sub(r"\n#? *# (?=\S)", " ", without_types), keys_page.page()
    for key in walk(Config):
        meaning = " ".join((key.field.description or "").split())
        assert re.search(rf"{re.escape(meaning)}\n#? *(- )?{key.last}:", example), key.name
        name = re.escape(key.name if key.section else key.last)
        assert re.search(rf"`{name}(\[\])?`.*\s+.*{re.escape(meaning)}", reference), key.name


@pytest.mark.parametrize(
    "row",
    [
        "| `port` | integer >= 0, <= 65535 | `8080` | Port to listen on. 0: a free port. *restart* |",
        "| `max_in_flight` | integer >= 1 | `null` |",
        "| `url` | text | required |",
        "| `name` | text | from `url` |",
        "| `trust_headers` | auto or networks | `auto` |",
        "| `trusted_proxies` | networks | `none` |",
        "| `ceilings` | mapping of names to number > 0, <= 1 | `{critical: 1.0, default: 0.95, sheddable: 0.85}` |",
        "| `weights` | mapping of names to number > 0 | `{}` | Weights of flows by name. Other flows have the weight of"
        " the tenant, or 1. Example: `{my-model: 2.5}`. *file* |",
    ],
)
def test_page_has_type_default_example_and_marks(row: str) -> None:
    assert any(line.startswith(row) for line in keys_page.page().splitlines())


def test_cli_page_has_every_command_and_other_flag_but_no_old_one() -> None:
    text = cli_page.page()
    assert {flag.name for flag in FLAGS if f"`{flag.name}`" in text} >= {"--worker-urls", "--placement"}
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


def test_config_refuses_a_wrong_file(write: Any) -> None:
    result = CliRunner().invoke(cli.app, ["config", str(write("prot: 1"))])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not a known key" in result.stderr
