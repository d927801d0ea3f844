"""Parses fleets: names like `4xllama-8b-h100+4xllama-8b-a100` or `3xllama-8b-h100:prefill+5xllama-8b-h100:decode`, and
YAML files with faults:

proxies: 2                  # independent of each other
kv_transfer: {bytes_per_s: 1.25e+9, latency_s: 0.01}
replicas:
  - {count: 6, profile: llama-8b-h100, max_num_seqs: 128, role: decode}
  - name: late
    joins_s: 120
    profile: {name: my-8b, small_ms: [5.7, 0.006], large_ms: [0.2, 0.018], decode_ms: [0.4, 4.5e-5],
              prefill_ms: [0.8, 4.3e-7], kv_tokens: 400000}
faults:
  - {at_s: 60, kind: slow, value: 2, until_s: 90, replica: gpu-3}
  - {at_s: 80, kind: lost_readings, value: 0.1, replica: all}
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from llmproxy.config.document import ConfigError, Document, Place, dotted
from llmproxy.config.load import validated
from llmproxy.config.schema.section import Section

# The loader of the configuration gives the line of every value, so errors in a fleet file name lines too.
from llmproxy.config.value_types import Count, Integer, Name, Number, nearest, one_of
from llmproxy.core.domain import Role
from llmproxy.lab.fleet.spec import (
    KV_TRANSFER,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    STEP_TOKENS,
    Autoscale,
    Fault,
    FleetFaultKind,
    ReplicaSpec,
    SimulatedFleet,
)
from llmproxy.lab.scaling.signals import SIGNALS
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import PROFILES, Profile

REPLICAS_MAX = 4_096
PROXIES_MAX = 256
FAULTS_MAX = 1_000
EVERY = "all"
"""The replica name of a fault that hits every replica."""
EXAMPLE = (
    "write it like 8xllama-8b-h100, 4xllama-8b-h100+4xllama-8b-a100, 3xllama-8b-h100:prefill+5xllama-8b-h100:decode,"
    " or as the path of a YAML file"
)

KNOWN_PROFILES = tuple(PROFILES)
RESTARTS = frozenset({FleetFaultKind.RESTART, FleetFaultKind.ROLL})
ENDLESS = RESTARTS | {FleetFaultKind.KILL}
VALUELESS = frozenset({FleetFaultKind.KILL, FleetFaultKind.HANG})
PROBABLE = frozenset({FleetFaultKind.RESET, FleetFaultKind.LOST_READINGS, FleetFaultKind.LOST_KV_EVENTS})

Finding = tuple[Place, str]


class FleetError(ConfigError):
    """A fleet that cannot be simulated. `problems` has one line for each error, ready to print."""


def fleet_named(text: str) -> SimulatedFleet:
    """Returns the fleet of `text`: COUNTxPROFILE or COUNTxPROFILE:ROLE, joined by `+`, or the path of a YAML file.

    A path ends in .yaml or .yml, or exists. Replicas are named gpu-0, gpu-1 and so on, with leading zeros where needed,
    so that sorted names keep the order. Raises FleetError with all errors.
    """
    # Unlike `Path.is_file`, it returns False for text that is no valid file name.
    if text.endswith((".yaml", ".yml")) or os.path.isfile(text):  # noqa: PTH113
        return _fleet_in(Path(text))
    groups = [_group(part) for part in text.split("+")]
    count = sum(number for number, _, _ in groups)
    if count > REPLICAS_MAX:
        raise FleetError([f"fleet {reprlib.repr(text)}: has {count} replicas, more than {REPLICAS_MAX}"])
    names = iter(_numbered("gpu", count))
    return SimulatedFleet(
        text,
        tuple(
            ReplicaSpec(
                next(names), profile_name, profile, profile.kv_tokens, _context_tokens(profile.kv_tokens, 16), role=role
            )
            for number, profile_name, role in groups
            for profile in (PROFILES[profile_name],)
            for _ in range(number)
        ),
    )


def _group(part: str) -> tuple[int, str, Role]:
    found = re.fullmatch(r"([0-9]{1,9})x([^:]+)(?::(.*))?", part.strip())
    if found is None:
        raise FleetError([f"fleet: {reprlib.repr(part.strip())} is no COUNTxPROFILE and no file; {EXAMPLE}"])
    count, profile = int(found[1]), found[2]
    if not 1 <= count <= REPLICAS_MAX:
        raise FleetError([f"fleet: {reprlib.repr(part.strip())} should be of 1 to {REPLICAS_MAX} replicas"])
    if profile not in PROFILES:
        raise FleetError([f"fleet: {_unknown_profile(profile)}"])
    role = Role.BOTH if found[3] is None else found[3]
    if role not in tuple(Role):
        known = ", ".join(Role)
        near = nearest(role, tuple(Role))
        raise FleetError([f'fleet: there is no role {role!r} (nearest: "{near}"; known: {known})'])
    return count, profile, Role(role)


def _unknown_profile(name: str) -> str:
    known = ", ".join(sorted(KNOWN_PROFILES))
    return f'there is no engine profile {name!r} (nearest: "{nearest(name, KNOWN_PROFILES)}"; known: {known})'


def _numbered(stem: str, count: int) -> list[str]:
    width = len(str(count - 1))
    return [f"{stem}-{number:0{width}}" for number in range(count)]


def room_tokens(kv_tokens: int, block_size: int) -> int:
    """Returns the longest sequence that fits into a KV cache, in tokens. vLLM reserves one block for itself."""
    return (kv_tokens // block_size - 1) * block_size


def _context_tokens(kv_tokens: int, block_size: int) -> int:
    return min(MAX_MODEL_LEN, room_tokens(kv_tokens, block_size))


# --- the file ---------------------------------------------------------------------------------------------------------

Cost = Annotated[Number, Field(ge=0)]
Pair = tuple[Cost, Cost]


class _ProfileEntry(Section):
    """Step times of a model. Reports show `name`; a name with `8b` gets the objectives of 8B models."""

    name: Name = "custom"
    small_ms: Pair
    large_ms: Pair
    decode_ms: Pair
    prefill_ms: Pair
    kv_tokens: Count
    overhead_ms: Cost = 1.2
    frontend_s: Cost = 0.016
    adapter_factor: Annotated[Number, Field(ge=1)] = 1.05
    adapter_load_s: Cost = 0.010
    adapter_cold_load_s: Cost = 0.300

    @model_validator(mode="after")
    def _takes_time(self) -> _ProfileEntry:
        if self.overhead_ms + min(sum(self.small_ms), sum(self.large_ms)) <= 0:
            raise ValueError("a step may take no time: give overhead_ms, or costs in both small_ms and large_ms")
        return self

    def profile(self) -> Profile:
        return Profile(**self.model_dump(exclude={"name"}))


def _profile_of(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in PROFILES:
        raise ValueError(_unknown_profile(value))
    costs = {key: cost for key, cost in asdict(PROFILES[value]).items() if key != "prefill_factor"}
    return _ProfileEntry(name=value, **costs)


class _ReplicaEntry(Section):
    count: Annotated[Integer, Field(ge=1, le=REPLICAS_MAX)] = 1
    profile: Annotated[_ProfileEntry, BeforeValidator(_profile_of)]
    name: Name | None = None
    kv_tokens: Count | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count = MAX_NUM_SEQS
    step_tokens: Count = STEP_TOKENS
    async_scheduling: bool = True
    block_size: Annotated[Integer, Field(ge=1, le=1_024)] = 16
    max_loras: Annotated[Integer, Field(ge=0)] = 8
    max_cpu_loras: Annotated[Integer, Field(ge=0)] | None = None
    joins_s: Cost = 0.0
    role: Annotated[str, one_of(tuple(Role))] = Role.BOTH

    @property
    def cache_tokens(self) -> int:
        return self.profile.kv_tokens if self.kv_tokens is None else self.kv_tokens

    @property
    def host_loras(self) -> int:
        return max(32, self.max_loras) if self.max_cpu_loras is None else self.max_cpu_loras

    def specs(self, names: Sequence[str]) -> Iterator[ReplicaSpec]:
        profile, context_tokens = self.profile.profile(), _context_tokens(self.cache_tokens, self.block_size)
        alike = self.model_dump(
            include={"max_num_seqs", "step_tokens", "async_scheduling", "block_size", "max_loras", "joins_s"}
        )
        for name in names:
            yield ReplicaSpec(
                name=name,
                profile_name=self.profile.name,
                profile=profile,
                kv_tokens=self.cache_tokens,
                max_model_len=self.max_model_len or context_tokens,
                max_cpu_loras=self.host_loras,
                role=Role(self.role),
                **alike,
            )

    def findings(self) -> Iterator[tuple[str, str]]:
        """Yields errors in combinations of keys, as (key, reason)."""
        longest = room_tokens(self.cache_tokens, self.block_size)
        if self.max_num_seqs > self.step_tokens:
            yield "max_num_seqs", f"should be at most step_tokens, {self.step_tokens}, not {self.max_num_seqs}"
        if longest < self.block_size:
            yield "kv_tokens", f"should hold at least two blocks of {self.block_size} tokens, not {self.cache_tokens}"
        elif self.max_model_len is not None and self.max_model_len > longest:
            yield "max_model_len", f"is more than the {longest} tokens that fit into the KV-cache"
        if self.host_loras < self.max_loras:
            yield "max_cpu_loras", f"should be at least max_loras, {self.max_loras}, not {self.host_loras}"


class _FaultEntry(Section):
    at_s: Cost
    kind: Annotated[str, one_of(tuple(FleetFaultKind))]
    replica: Name
    until_s: Cost | None = None
    value: Cost | None = None

    @property
    def what(self) -> FleetFaultKind:
        return FleetFaultKind(self.kind)

    def fault(self) -> Fault:
        replica = None if self.replica == EVERY else self.replica
        return Fault(self.at_s, self.what, replica, self.until_s, 0.0 if self.value is None else self.value)

    def findings(self) -> Iterator[tuple[str, str]]:
        """Yields errors in combinations of keys, as (key, reason)."""
        if self.until_s is not None and self.what in ENDLESS:
            yield "until_s", f"means nothing to a {self.kind}"
        elif self.until_s is not None and self.until_s <= self.at_s:
            yield "until_s", f"should be after at_s, {self.at_s:g}, not {self.until_s:g}"
        if self.what in VALUELESS:
            if self.value is not None:
                yield "value", f"means nothing to a {self.kind}"
        elif self.value is None:
            yield "value", f"is missing: {VALUES[self.what]}"
        elif (self.what in PROBABLE and self.value > 1) or (self.what is FleetFaultKind.SLOW and self.value <= 1):
            yield "value", f"{VALUES[self.what]}, not {self.value:g}"


VALUES = {
    **dict.fromkeys(RESTARTS, "should be the seconds until it serves again"),
    **dict.fromkeys(PROBABLE, "should be a probability from 0 to 1"),
    FleetFaultKind.SLOW: "should be a factor above 1",
    FleetFaultKind.METRIC_AGE: "should be an age in seconds",
}


class _AutoscaleEntry(Section):
    policy: Annotated[str, one_of(tuple(SIGNALS))] = "ours"
    min: Count = 1
    start_s: Cost = 120.0
    ask_s: Annotated[Number, Field(gt=0)] = 15.0


class _KvTransferEntry(Section):
    bytes_per_token: Count = KV_TRANSFER.bytes_per_token
    bytes_per_s: Annotated[Number, Field(gt=0)] = KV_TRANSFER.bytes_per_s
    latency_s: Cost = KV_TRANSFER.latency_s
    handshake_s: Cost = KV_TRANSFER.handshake_s


class _FleetEntry(Section):
    replicas: tuple[_ReplicaEntry, ...]
    faults: Annotated[tuple[_FaultEntry, ...], Field(max_length=FAULTS_MAX)] = ()
    proxies: Annotated[Integer, Field(ge=1, le=PROXIES_MAX)] = 1
    autoscale: _AutoscaleEntry | None = None
    kv_transfer: _KvTransferEntry = _KvTransferEntry()


def _fleet_in(path: Path) -> SimulatedFleet:
    try:
        document = Document(path)
        entry = validated(_FleetEntry, document, {})
    except ConfigError as error:
        raise FleetError(error.problems) from None
    findings: list[Finding] = []
    fleet = _fleet_of(path.stem, entry, findings)
    if fleet is None or findings:
        findings.sort(key=lambda finding: document.line(finding[0]))
        raise FleetError([f"{document.at(document.line(at))}: {dotted(at)}{reason}" for at, reason in findings])
    return fleet


def _fleet_of(name: str, entry: _FleetEntry, findings: list[Finding]) -> SimulatedFleet | None:
    """Returns the fleet, or None after adding errors to `findings`."""
    for i, replica in enumerate(entry.replicas):
        findings += ((("replicas", i, key), reason) for key, reason in replica.findings())
        if replica.block_size != entry.replicas[0].block_size:
            findings.append((("replicas", i, "block_size"), "should be the same for all replicas of a fleet"))
    for i, fault in enumerate(entry.faults):
        findings += ((("faults", i, key), reason) for key, reason in fault.findings())
    total = sum(replica.count for replica in entry.replicas)
    if not entry.replicas:
        findings.append((("replicas",), "should have at least one entry"))
    if total > REPLICAS_MAX:
        findings.append((("replicas",), f"are {total} servers, more than {REPLICAS_MAX}"))
    if findings:
        return None
    specs = _specs(entry.replicas, total, findings)
    findings += _faults_out_of_place(entry.faults, specs)
    # Sorting is stable, so faults of one time keep the order of the file.
    faults = tuple(sorted((fault.fault() for fault in entry.faults), key=lambda fault: fault.at_s))
    scale = entry.autoscale
    if scale is not None and scale.min > total:
        findings.append((("autoscale", "min"), f"should be at most the {total} replicas of the fleet, not {scale.min}"))
    autoscale = None if scale is None else Autoscale(scale.policy, scale.min, scale.start_s, scale.ask_s)
    transfer = KvTransfer(**entry.kv_transfer.model_dump())
    return SimulatedFleet(name, tuple(specs.values()), faults, entry.proxies, autoscale, transfer)


def _specs(entries: Sequence[_ReplicaEntry], total: int, findings: list[Finding]) -> dict[str, ReplicaSpec]:
    anonymous = _numbered("gpu", total)
    specs: dict[str, ReplicaSpec] = {}
    first = 0
    for i, entry in enumerate(entries):
        names = anonymous[first : first + entry.count]
        if entry.name is not None:
            names = [entry.name] if entry.count == 1 else _numbered(entry.name, entry.count)
        first += entry.count
        taken = next((name for name in names if name in specs or name == EVERY), None)
        if taken is not None:
            key = ("replicas", i) if entry.name is None else ("replicas", i, "name")
            reason = "means every replica" if taken == EVERY else "is the name of another replica too"
            findings.append((key, f"{taken!r} {reason}"))
        specs |= {spec.name: spec for spec in entry.specs(names)}
    return specs


def _faults_out_of_place(entries: Sequence[_FaultEntry], specs: dict[str, ReplicaSpec]) -> Iterator[Finding]:
    """Yields errors: faults of replicas that are unknown, not started or dead, and overlapping faults of one kind."""
    dead: dict[str, tuple[float, float]] = {}
    ends: dict[tuple[str, FleetFaultKind], float] = {}
    for i, entry in sorted(enumerate(entries), key=lambda numbered: numbered[1].at_s):
        if entry.replica != EVERY and entry.replica not in specs:
            known = nearest(entry.replica, (*specs, EVERY))
            yield ("faults", i, "replica"), f'{entry.replica!r} is no replica of this fleet (nearest: "{known}")'
            continue
        named = entry.replica != EVERY
        for name in (entry.replica,) if named else specs:
            since_s, back_s = dead.get(name, (0.0, 0.0))
            starting = entry.at_s < back_s < inf
            if specs[name].joins_s > entry.at_s and (named or entry.what in RESTARTS):
                yield ("faults", i, "at_s"), f"{name} joins only at {specs[name].joins_s:g} seconds"
            elif starting and (named or entry.what in ENDLESS):
                yield ("faults", i, "at_s"), f"{name} restarts since {since_s:g} and until {back_s:g} seconds"
            elif entry.at_s < back_s and named and entry.what is not FleetFaultKind.RESTART:
                yield ("faults", i, "at_s"), f"{name} is dead since {since_s:g} seconds"
            elif entry.at_s < ends.get((name, entry.what), 0.0):
                yield ("faults", i, "at_s"), f"another {entry.kind} of {name} is still on at {entry.at_s:g} seconds"
                break
            if entry.what in ENDLESS:
                dead[name] = (entry.at_s, inf if entry.value is None else entry.at_s + entry.value)
            else:
                ends[name, entry.what] = inf if entry.until_s is None else entry.until_s
