"""The page `/debug/explain`: the last placement decisions, with the price of each candidate in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10
from typing import Any

import msgspec

from llmproxy.core.domain import BackendPace, Explained, Learned, Price
from llmproxy.core.snapshot import PoolChoices

PRICES_MAX = 500
"""The maximum number of prices on a page with several decisions. Writing a price takes 15 µs.

A decision has a price for each candidate.
"""
UNPRICED = "This placement has no prices; the terms of its choices are in the log."
ALIKE = 0.05  # A speed that differs from the pool's by less than this share is shown as equal.


def choice_pages(pools: Iterable[PoolChoices], now: float, limit: int, wanted: str | None) -> list[dict[str, Any]]:
    """Returns the last `limit` placement decisions of each pool, newest first.

    Decisions beyond PRICES_MAX prices in all are left out, but never the first. `wanted` selects the decisions about
    the request with this id or label; None selects all. `now` is the clock of the decisions, for their ages.
    """
    pages, left = [], PRICES_MAX
    for pool in pools:
        found = [choice for choice in pool.choices if wanted is None or wanted in (choice.id, choice.label)]
        shown = []
        for choice in found[:limit]:
            # At least one choice is shown, however large the fleet is.
            if len(choice.prices) > left and left < PRICES_MAX:
                break
            left -= len(choice.prices)
            shown.append(_choice(choice, now))
        page: dict[str, Any] = {"pool": pool.pool, "priced": pool.learned is not None}
        if pool.learned is None:
            page["note"] = UNPRICED
        page |= {"choices": shown, "more": len(found) - len(shown), "learned": _learned(pool.learned)}
        pages.append(page)
    return pages


def price_text(price: Price, prompt_tokens: int) -> str:
    """Returns a price as text: `0.41 s = queue 0.10 + prefill 0.27 + harm 0.04; 1,830 of 9,200 tokens uncached`."""
    digits = _digits(price.total_s)
    parts = terms_text(price.terms)
    text = f"{price.total_s:.{digits}f} s" + (f" = {parts}" if parts else "")
    text += f"; {prompt_tokens - price.cached_tokens:,.0f} of {prompt_tokens:,} tokens uncached"
    return text if price.fits else f"{text}; takes no request now"


def terms_text(terms: Sequence[tuple[str, float]]) -> str:
    """Returns, as text, the terms that do not round to zero: `queue 0.10 + prefill 0.27 + harm 0.04`."""
    digits = _digits(sum(value for _, value in terms))
    return " + ".join([f"{name} {value:.{digits}f}" for name, value in terms if round(value, digits)])


def _digits(total: float) -> int:
    """Returns the decimal places for a sum and its terms, so that the sum has at least two significant digits."""
    return max(2, 1 - floor(log10(total))) if total > 0.0 else 2


def pace_line(pace: BackendPace) -> str:
    """Returns the speed of one backend as text: `gpu-3: prompts 1.9x slower, tokens as the pool, ...`."""
    return (
        f"{pace.backend}: prompts {_compared(pace.prefill_factor)}, tokens {_compared(pace.step_factor)}, "
        f"{pace.busy_share:.0%} busy with prompts, {pace.in_flight:,} sequences in flight, "
        f"{pace.indexed_blocks:,} of {pace.indexed_blocks_max:,} blocks indexed"
    )


def _compared(factor: float) -> str:
    if abs(factor - 1.0) < ALIKE:
        return "as the pool"
    return f"{factor:.1f}x slower" if factor > 1.0 else f"{1.0 / factor:.1f}x faster"


def _choice(choice: Explained, now: float) -> dict[str, Any]:
    ordered = sorted(choice.prices, key=lambda price: (price.backend != choice.chosen, price.total_s))
    return {
        "request": choice.label,
        "id": choice.id,
        "model": choice.model,
        "age_s": round(now - choice.at_s, 4),
        "prompt_tokens": choice.prompt_tokens,
        "chosen": choice.chosen,
        "candidates": [_candidate(price, choice.prompt_tokens) for price in ordered],
    }


def _candidate(price: Price, prompt_tokens: int) -> dict[str, Any]:
    return {
        "price": price_text(price, prompt_tokens),
        **page_fields(price, 6),
        "terms": {name: round(seconds, 6) for name, seconds in price.terms},
        "cached_tokens": round(price.cached_tokens),
    }


def _learned(learned: Learned | None) -> dict[str, Any] | None:
    if learned is None:
        return None
    token_s = learned.prefill_token_s
    return {
        "prefill_tokens_per_s": round(1.0 / token_s, 1) if token_s > 0.0 else None,
        "prefill_attention": round(learned.prefill_attention, 8),
        "prefill_base_s": round(learned.prefill_base_s, 6),
        "step_s": round(learned.step_s, 6),
        "step_s_per_sequence": round(learned.sequence_s, 9),
        "adapter_s": round(learned.adapter_s, 6),
        "ttft_p90_factor": round(learned.ttft_p90_factor, 3),
        "tpot_p90_factor": round(learned.tpot_p90_factor, 3),
        "backends": [{"line": pace_line(pace), **page_fields(pace, 3)} for pace in learned.backends],
    }


def page_fields(record: object, digits: int, **renamed: str) -> dict[str, Any]:
    """Returns the fields of a struct or dataclass, with floats rounded to `digits` decimal places.

    `renamed` maps a field name to its name on the page.
    """
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return {
        renamed.get(name, name): round(value, digits) if isinstance(value, float) else value
        for name, value in fields.items()
    }
