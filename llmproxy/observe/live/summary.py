"""A few sentences for operators about the state of the proxy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from llmproxy.core.domain import BackendPace, Outcome, WaitReason
from llmproxy.core.snapshot import EXTERNAL, BackendStatus, PoolSnapshot
from llmproxy.observe.live.minute import REFUSED, Sums

OK, WARNING, BAD = "ok", "warning", "bad"
NAMES_SHOWN = 3
SLOWER = 1.5
"""The summary names a replica that is at least this many times as slow as its pool.

With several kinds of GPU, this is normal.
"""
FAILS, FAILURES_MIN = 0.05, 3
"""The summary names a replica if at least this share, and this number, of its attempts failed in the last minute."""


def summary_of(
    pools: Sequence[PoolSnapshot],
    statuses: Sequence[BackendStatus],
    reasons: dict[str, str],
    bands: dict[int, str],
    nameless: int,
    learned: Sequence[BackendPace] = (),
    *,
    minute: Sums | None = None,
    led: bool = True,
) -> tuple[str, str]:
    """Returns the level (OK, WARNING or BAD) and the text of the summary.

    `reasons` maps a backend to the reason of its state, and `bands` a level to its name. `nameless` requests wait for a
    model that no backend lists yet. `learned` are the speeds that the placement learned. `minute` has the requests that
    ended in the last minute. A cluster member without a leader is not `led`.
    """
    parts: list[tuple[str, str]] = []
    elsewhere = [one for one in statuses if one.role == EXTERNAL]
    statuses = [one for one in statuses if one.role != EXTERNAL]
    up = [one for one in statuses if one.state == "up"]
    if not led:
        parts.append((BAD, "This member of the cluster has no leader: it holds requests, and then refuses them."))
    if not statuses:
        return BAD, "No backend is known."
    if not up:
        parts.append((BAD, "No backend is up."))
    parts += [_backends(statuses, state, reasons) for state in ("down", "ejected") if _in(statuses, state)]
    if minute is not None:
        parts += _failing(up, minute)
    waiting = [_waiting(pool, bands) for pool in pools if any(band.waiting for band in pool.bands)]
    parts += [(WARNING, text) for text in waiting]
    if nameless:
        parts.append((WARNING, f"{_requests(nameless)} for a model that no backend serves yet."))
    if minute is not None:
        parts += _ended(minute)
        for one in elsewhere:
            if ends := minute.backend(one.name).ends:
                parts.append((OK, f"{one.name} (external) got {_count(ends, 'request')} in the last minute."))
    limits: Counter[str] = Counter()
    for pool in pools:
        for band in pool.bands:
            limits.update(band.blocked)
    if limits:
        name, _ = limits.most_common(1)[0]
        more = f" and {len(limits) - 1} other limits" if len(limits) > 1 else ""
        parts.append((OK, f"{_requests(sum(limits.values()))} for the limit {name}{more}."))
    for state in ("drained", "starting"):
        if found := _in(statuses, state):
            parts.append((OK, f"{_listed([one.name for one in found])} {_is(found)} {state}."))
    named = {one.name for one in up}
    paces = {name: pace for pool in pools for name, pace in pool.paces.items() if name in named}
    parts += [(OK, text) for text in _slow(paces, [one for one in learned if one.backend in named])]
    unknown = sorted(name for name, pace in paces.items() if pace is None)
    if not any(level != OK for level, _ in parts):
        quiet = "nothing waits" if not limits else "nothing else waits"
        head = f"{'Learning' if unknown else 'Healthy'}: {len(up)} of {_count(len(statuses), 'replica')} up, {quiet}."
        if unknown:
            head += f" The pace of {_listed(unknown)} is not known yet."
        parts.insert(0, (OK, head))
    worst = BAD if any(level == BAD for level, _ in parts) else WARNING if any(lv == WARNING for lv, _ in parts) else OK
    return worst, " ".join(text for _, text in parts)


def _waiting(pool: PoolSnapshot, bands: dict[int, str]) -> str:
    asked = [band for band in pool.bands if band.waiting]
    first = max(asked, key=lambda band: band.level)
    counts = ", ".join(f"{band.waiting:,} {bands.get(band.level, band.level)}" for band in asked)
    oldest_s = max((flow.oldest_age_s for band in asked for flow in band.shown), default=0.0)
    total = sum(band.waiting for band in asked)
    why = f": {first.reason}" if first.reason is not None else ""
    if first.reason is WaitReason.FULL:
        why = f": {_full(sum(one.view.available for one in pool.backends), len(pool.backends))}"
    return f"{pool.pool}: {counts} {'requests wait' if total != 1 else 'request waits'}, up to {oldest_s:.1f} s{why}."


def _full(available: int, count: int) -> str:
    if available == 1:
        return "its replica is full" if count == 1 else "the only replica that takes requests is full"
    return f"all {available} replicas {'that take requests ' if available < count else ''}are full"


def _failing(up: Sequence[BackendStatus], minute: Sums) -> list[tuple[str, str]]:
    found = [(one.name, minute.backend(one.name)) for one in up]
    bad = [(name, sums) for name, sums in found if sums.failures >= max(FAILURES_MIN, FAILS * sums.ends)]
    texts = [f"{name} failed {sums.failures:,} of {sums.ends:,} attempts in the last minute." for name, sums in bad]
    more = f"So did {_count(len(bad) - NAMES_SHOWN, 'other replica')}."
    return [(WARNING, text) for text in [*texts[:NAMES_SHOWN], *([more] if len(bad) > NAMES_SHOWN else [])]]


def _ended(minute: Sums) -> list[tuple[str, str]]:
    """Returns (level, text) for the refused and for the failed requests of the last minute, if there are any.

    The level is OK if all of them exceeded a rate limit, otherwise WARNING.
    """
    parts = []
    total = _count(sum(band.kinds.total() for band in minute.bands.values()), "request")
    for kind, word in (("refused", "were refused"), ("failed", "failed")):
        found = [(n, outcome) for outcome, n in minute.outcomes.items() if (outcome in REFUSED) is (kind == "refused")]
        if found:
            level = OK if all(outcome == Outcome.RATE_LIMITED for _, outcome in found) else WARNING
            names = f"{max(found)[1]}{', ...' if len(found) > 1 else ''}"
            parts.append((level, f"{minute.kind(kind):,} of {total} {word} in the last minute ({names})."))
    return parts


def _backends(statuses: Sequence[BackendStatus], state: str, reasons: dict[str, str]) -> tuple[str, str]:
    found = _in(statuses, state)
    why = reasons.get(found[0].name, "") if len(found) == 1 else ""
    return WARNING, f"{_listed([one.name for one in found])} {_is(found)} {state}{f': {why}' if why else ''}."


def _slow(paces: Mapping[str, float | None], learned: Sequence[BackendPace]) -> list[str]:
    """Returns a sentence about replicas that are slow, or slow only for prompts; an empty list without them."""
    now = sorted((-pace, name) for name, pace in paces.items() if pace is not None and pace >= SLOWER)
    prompts = sorted(
        (-one.prefill_factor, one.backend) for one in learned if one.step_factor < SLOWER <= one.prefill_factor
    )
    slow = [f"{name} ({-pace:.1f}x)" for pace, name in now]
    slow += [f"{name} (prompts {-pace:.1f}x)" for pace, name in prompts if name not in {name for _, name in now}]
    return [f"{_listed(slow)} {_is(slow)} slower than the pool."] if slow else []


def _in(statuses: Sequence[BackendStatus], state: str) -> list[BackendStatus]:
    return [one for one in statuses if one.state == state]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _is(some: Sequence[object]) -> str:
    return "is" if len(some) == 1 else "are"


def _requests(count: int) -> str:
    return f"{count:,} request waits" if count == 1 else f"{count:,} requests wait"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
