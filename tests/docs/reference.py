"""Pages and tables of the reference, generated from the code: `python -m tests.docs.reference` writes them.

Each table is in its page between `<!-- generated: NAME -->` and `<!-- end -->`; the rest is written by hand.
Names, types, labels, statuses and fields come from the code; meanings that the code lacks are in `meanings.py`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

from msgspec.structs import replace

from llmproxy.core.domain import GrantReason, Outcome, Predicted, Slo, Trouble, Verdict
from llmproxy.core.scaling.need import Capacity, Need, RoleNeed
from llmproxy.gateway.http.errors import STATUS, error_fields
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import FIELDS as EXIT_FIELDS
from llmproxy.observe.logs import LEVELS
from llmproxy.observe.metrics import BackendState, ClusterState, LiveState, Metrics, QueueState
from llmproxy.scheduling.attempt import Split
from tests import ROOT
from tests.docs import cli_page, keys_page
from tests.docs.meanings import EVENTS, FIELDS, METRICS, OUTCOMES
from tests.exits import exit_of

DOCS = ROOT / "docs"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def full_exit() -> RequestExit:
    """A record of a request in which every field is set."""
    return exit_of(
        request_id="r", method="POST", path="/v1/completions", outcome=Outcome.COMPLETED, status=200, duration_s=1.0,
        model="alias", target="adapter", adapter="adapter", tenant="t", band="default", level=0, flow="f",
        max_wait_s=60.0,
        slo=Slo(ttft_s=1.0), met=True, unknown_objective="x", unknown_model="m", stream=True, backend="b", attempts=2,
        preemptions=1,
        why=GrantReason(waiting=((0, 1),), flows=1, standing=(("counter", 0.0),), passed_over=0, guaranteed=False),
        split=Split.SPLIT, candidates=1, terms=(("queue", 0.0),),
        predicted_ttft=Predicted(0.1, 0.2), predicted_tpot=Predicted(0.01, 0.02),
        arrived_s=0.0, granted_s=0.1, queued_ahead=1, queue_wait_s=0.1, ttft_s=0.5, max_gap_s=0.1,
        committed=True, continued="text", not_continued="w",
        expected_prompt_tokens=1, expected_cached_tokens=1, prompt_tokens=2, cached_tokens=1, output_tokens=3, cost=0.1,
        body_bytes=1, response_bytes=1, chunks=2, error="e",
    )  # fmt: skip


def live_state() -> LiveState:
    """A state in which every gauge has a series."""
    backend = BackendState(
        "b", 1, 1, 1.0, True, running=1, waiting=1, kv_used=0.5, reading_age_s=0.1, pool="m", day_left=1.0
    )
    need = Need(
        desired=1, need=0.9, reason="work", sure=True, up=1, terms={"work": 0.9}, prefill=0.1, decode=0.8,
        capacity=Capacity(seats=4.0, prompt_s=0.1, output_s=0.2), waiting=0, waiting_s=0.0, start_s=120.0, own=0.9,
        roles={"decode": RoleNeed(1, 0.8, 1)},
    )  # fmt: skip
    return LiveState(
        queues=(QueueState("default", 1, 1),), blocked={"limit": 1}, backends=(backend,), work_s={"m": 1.0},
        cluster=ClusterState(leads=True, led=True, epoch=1, members=1, changes=1, gap_s=0.0, lock_away=False),
        needs={"m": need},
    )  # fmt: skip


def metrics() -> str:
    found = Metrics(live_state)
    found.record(full_exit())
    # Only streams that were not continued are compared with their predictions.
    found.record(replace(full_exit(), continued=None))
    found.replica_started("m", 1.0)
    found.attempted("b", Verdict.SERVED)
    found.poll_failed("b", Trouble.TIMEOUT)
    found.adapter_changed("b", "load", ok=True)
    found.source_queried("file", True)
    found.reloaded(True)
    rows: list[tuple[str, ...]] = []
    for family in found.registry.collect():
        if family.name.startswith("llmproxy_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
            rows.append((f"`{name}`", family.type, code(labels), METRICS.get(name, family.documentation)))
    unknown = METRICS.keys() - {row[0].strip("`") for row in rows}
    assert not unknown, f"tests/docs/meanings.py explains metrics that do not exist: {sorted(unknown)}"
    return table(("name", "type", "labels", "meaning"), sorted(rows))


def outcomes() -> str:
    rows: list[tuple[str, ...]] = []
    for outcome in Outcome:
        status = STATUS.get(outcome, 200)
        kind = f"`{error_fields(status, '')['type']}`" if status >= 400 else ""
        rows.append((f"`{outcome.value}`", str(status), kind, OUTCOMES[outcome.value]))
    return table(("outcome", "status", "`error.type`", "when"), sorted(rows, key=lambda row: row[1]))


def request_fields() -> str:
    rows = ((f"`{field.log}`", FIELDS[field.log]) for field in EXIT_FIELDS if field.log)
    return table(("field", "meaning"), rows)


def events() -> str:
    """The events that the code logs, by the calls of `_log` in it."""
    found: dict[str, tuple[set[str], dict[str, None]]] = {}
    for path in sorted((ROOT / "llmproxy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name, level, names in _events_of(node):
                levels, fields = found.setdefault(name, (set(), {}))
                levels.add(level)
                fields |= dict.fromkeys(names)
    missing = found.keys() - EVENTS.keys()
    gone = EVENTS.keys() - found.keys()
    assert not missing | gone, f"tests/docs/meanings.py: no meaning of {missing}, {gone} no longer logged"
    rows = (
        (f"`{name}`", ", ".join(sorted(found[name][0])), EVENTS[name], code(found[name][1])) for name in sorted(found)
    )
    return table(("event", "level", "meaning", "fields"), rows)


def _events_of(node: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """Name, level and fields of the events of a call such as `_log.info("reloaded", cause=...)`, or of `self._log`."""
    if not (isinstance(node, ast.Call) and node.args):
        return
    fields = [word.arg for word in node.keywords if word.arg is not None and word.arg != "exc_info"]
    for function, event in product(_choices(node.func), _choices(node.args[0])):
        owner, _, level = ast.unparse(function).rpartition(".")
        if owner in ("_log", "self._log") and level in LEVELS and isinstance(event, ast.Constant):
            yield str(event.value), level, fields


def _choices(node: ast.expr) -> tuple[ast.expr, ...]:
    return (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)


def rooms() -> str:
    """The folders of `llmproxy/` in the order of the import contract, with the first paragraph of their docstrings."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = [name for layer in contracts[0]["layers"] for name in layer.split(" | ")]
    rows = []
    for name in names:
        file = ROOT / "llmproxy" / f"{name}.py"
        path = file if file.exists() else ROOT / "llmproxy" / name / "__init__.py"
        purpose = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append((f"`{name}.py`" if file.exists() else f"`{name}/`", " ".join(purpose.split("\n\n")[0].split())))
    return table(("folder or file", "purpose"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "metrics": metrics, "outcomes": outcomes, "request-fields": request_fields, "events": events, "rooms": rooms,
}  # fmt: skip
PAGES = (
    "reference/metrics.md", "reference/errors.md", "reference/log-fields.md", "concepts/architecture.md",
)  # fmt: skip
WHOLE_PAGES = {"reference/configuration.md": keys_page.page, "reference/cli.md": cli_page.page}


def generated(text: str) -> str:
    """The text of a page with new generated parts."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + "\n" + part[3], text)


def main() -> None:
    for name in PAGES:
        page = DOCS / name
        page.write_text(generated(page.read_text()))
    for name, text in WHOLE_PAGES.items():
        (DOCS / name).write_text(text())


if __name__ == "__main__":
    main()
