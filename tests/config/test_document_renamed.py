"""Old names of keys work until 0.1.0, cause a warning, and are an error beside the new name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from llmproxy.cli.flags import flag_of, from_environment, from_flags
from llmproxy.config import ConfigError, Override, keys, keys_of_files, load, warnings_of
from llmproxy.config.document import OLD_KEYS
from tests.config.test_load import problems

ADVICE = "is the old name of scheduling.preemption and works until 0.1.0; write"
FLAG, VARIABLE = "--scheduling-withdrawal", "LLMPROXY_SCHEDULING_WITHDRAWAL"


def test_every_old_key_leads_to_a_key_and_is_none_itself() -> None:
    assert set(OLD_KEYS.values()) <= {*keys(), *keys_of_files()}
    assert not OLD_KEYS.keys() & {*keys(), *keys_of_files()}


def test_old_key_in_a_file_sets_the_new_one_with_a_warning(write: Any) -> None:
    path = write("port: 1\nscheduling:\n  reserve_s: 7\n  withdrawal: false\n")
    config = load(path)
    assert (config.scheduling.preemption, config.scheduling.headroom_s) == (False, 7)
    assert warnings_of(path, config)[1] == f"{path}:4: warning: scheduling.withdrawal: {ADVICE} scheduling.preemption"
    assert config.old_names[1] == f"{path}:4: scheduling.withdrawal: {ADVICE} scheduling.preemption"
    assert pickle.loads(pickle.dumps(config)).old_names == config.old_names
    assert load(write("scheduling: {preemption: false}")).old_names == ()


@pytest.mark.parametrize("merged", ["{withdrawal: false}", "[{withdrawal: false}, {reserve_s: 7}]"])
def test_old_key_in_a_merged_mapping_sets_the_new_one(write: Any, merged: str) -> None:
    config = load(write(f"scheduling:\n  <<: {merged}\n  initial_batch_limit: 3\n"))
    assert (config.scheduling.preemption, config.scheduling.initial_batch_limit) == (False, 3)
    assert ":2: scheduling.withdrawal: is the old name" in config.old_names[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("scheduling:\n  withdrawal: maybe", ":2: scheduling.withdrawal: should be a valid boolean"),
        ("scheduling:\n  withdrawal: null", ":2: scheduling.withdrawal: has no value, and may not be null"),
        (
            "scheduling:\n  withdrawal: true\n  preemption: true",
            ":3: scheduling.preemption: is given twice, first in line 2; withdrawal is the old name of preemption",
        ),
        (
            "scheduling:\n  preemption: true\n\n  withdrawal: true",
            ":4: scheduling.withdrawal: is given twice, first in line 2; withdrawal is the old name of preemption",
        ),
        ("scheduling.withdrawal: true", ":1: scheduling.withdrawal: is not a known key"),
        ("withdrawal: true", ":1: withdrawal: is not a known key"),
    ],
)
def test_problem_of_an_old_key_names_it_as_it_is_written(write: Any, text: str, problem: str) -> None:
    (message,) = problems(write(text))
    assert message.startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "origin", "instead"),
    [
        (from_flags({"scheduling_withdrawal": "false"}, ()), FLAG, "--scheduling-preemption"),
        (from_environment({VARIABLE: "false"}), VARIABLE, "LLMPROXY_SCHEDULING_PREEMPTION"),
    ],
)
def test_old_flag_and_variable_set_the_new_key_with_a_warning(
    overrides: list[Override], origin: str, instead: str
) -> None:
    config = load(None, overrides)
    assert config.scheduling.preemption is False
    assert config.old_names == (f"{origin}: {ADVICE} {instead}",)


def test_removed_key_says_what_to_do(write: Any) -> None:
    with pytest.raises(ConfigError, match=r":1: cluster.pools: was removed \(one leader .*\): remove the key"):
        load(write("cluster: {pools: [code]}\n"))


@pytest.mark.parametrize("old", [old for old, new in OLD_KEYS.items() if new in keys()])
def test_old_and_new_flag_together_are_refused(old: str) -> None:
    flags = {flag_of(key).strip("-").replace("-", "_"): "1" for key in (old, OLD_KEYS[old])}
    with pytest.raises(ConfigError, match=r"is set by .* too; give only one of them"):
        from_flags(flags, ())
    with pytest.raises(ConfigError, match=r"is set by .* too; give only one of them"):
        from_environment({f"LLMPROXY_{name.upper()}": text for name, text in flags.items()})
