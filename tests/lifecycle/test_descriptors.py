"""How many connections the limit of open files allows, and that it is raised as far as it goes."""

from __future__ import annotations

import resource

import pytest

from llmproxy.config import Config
from llmproxy.lifecycle import descriptors

NEVER = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that were set, soft and hard; the last one holds."""
    pairs = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: pairs[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: pairs.append(pair))
    return pairs


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((4096, 4096), (4096, 4096)),
        ((1024, NEVER), (1 << 20, NEVER)),
        ((1024, 1 << 30), (1 << 20, 1 << 30)),
        ((1 << 21, 1 << 30), (1 << 21, 1 << 30)),
        ((NEVER, NEVER), (NEVER, NEVER)),
    ],
)
def test_limit_is_raised_to_the_allowed_one(
    before: tuple[int, int], after: tuple[int, int], limits: list[tuple[int, int]]
) -> None:
    limits.append(before)
    descriptors.raise_limit()
    assert limits[-1] == after


def test_a_limit_that_may_not_be_raised_stays(limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", forbidden)
    descriptors.raise_limit()
    assert descriptors.open_files_max() == limits[-1][0]


@pytest.mark.parametrize("files", [64, 256, 1024, 4096, 140_000, 1 << 20])
def test_every_client_can_be_carried_on_and_something_is_left(files: int, limits: list[tuple[int, int]]) -> None:
    limits.append((files, files))
    config = Config.model_validate({"clients": {"connections_max": 1 << 30}})
    clients = descriptors.clients_of_process(config).connections_max
    admin = descriptors.clients_of_admin_port(config).connections_max
    assert clients == descriptors.connections_max()
    assert 0 < 2 * clients < files
    assert 0 < admin < files - 2 * clients, "polls and logs need some too"


def test_systemd_unit_allows_enough_for_the_default(limits: list[tuple[int, int]]) -> None:
    limits.append((140_000, 140_000))
    config = Config()
    assert descriptors.clients_of_process(config).connections_max == config.clients.connections_max


def test_workers_share_limits_and_have_descriptors_of_their_own(limits: list[tuple[int, int]]) -> None:
    limits.append((1024, 1024))
    for configured, each in ((1_000_000, descriptors.connections_max()), (301, 101)):
        config = Config.model_validate({"workers": 3, "clients": {"connections_max": configured}})
        assert descriptors.clients_of_process(config).connections_max == each
