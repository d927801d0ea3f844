"""Labels and errors of PromQL queries, checked against the metrics of the process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from llmproxy.observe.metrics import Metrics
from llmproxy.tools.export.rules import RECORDED
from tests.docs.reference import live_state

TARGET = frozenset({"job", "instance"})
"""Labels that Prometheus gives to every series that it reads."""
COUNTED = ("rate", "increase")
Labels = frozenset[str]


class QueryError(Exception):
    """A query names an unknown series or label, or joins series that never match."""


def exported() -> dict[str, tuple[str, Labels]]:
    """Kind and labels of every series of the process, by name. From families, because some have no samples."""
    found: dict[str, tuple[str, Labels]] = {}
    for family in Metrics(live_state).registry.collect():
        names = getattr(family, "_labelnames", None)
        if names is None:
            # Collectors of the library always have a sample.
            names = {label for sample in family.samples for label in sample.labels}
        labels = frozenset(names) | TARGET
        match family.type:
            case "counter":
                found[f"{family.name}_total"] = "counter", labels
            case "histogram" | "summary":
                found |= {f"{family.name}_{part}": ("counter", labels) for part in ("sum", "count")}
                if family.type == "histogram":
                    found[f"{family.name}_bucket"] = "counter", labels | {"le"}
            case kind:
                found[family.name] = kind, labels
    return found


def known() -> dict[str, tuple[str, Labels]]:
    """Exported series and recording rules."""
    return exported() | {name: ("gauge", frozenset({"job", "band"})) for name, _ in RECORDED}


def plain(expression: str) -> str:
    """A query of a dashboard without its variables."""
    expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1h")
    return re.sub(r'"\$\w+"', '".*"', expression)


def labels_of(expression: str, series: Mapping[str, tuple[str, Labels]]) -> Labels:
    """The labels of the result of a query. Raises QueryError."""
    try:
        parsed = promql_parser.parse(expression)
    except ValueError as error:
        raise QueryError(f"{expression}: {error}") from None
    return _labels(parsed, series)


def names_in(expression: str) -> Iterator[str]:
    """The names of the series that a query reads."""
    yield from re.findall(r"\b((?:llmproxy|process)[_:][\w:]+)", expression)


def _labels(node: Any, series: Mapping[str, tuple[str, Labels]]) -> Labels:
    match type(node).__name__:
        case "VectorSelector":
            return _selected(node, series)[1]
        case "MatrixSelector":
            return _labels(node.vector_selector, series)
        case "NumberLiteral" | "StringLiteral":
            return frozenset()
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            return _labels(node.expr, series)
        case "Call":
            return _called(node, series)
        case "AggregateExpr":
            inner = _labels(node.expr, series)
            if node.modifier is None:
                return inner if str(node.op) in ("topk", "bottomk") else frozenset()
            kept = frozenset(node.modifier.labels)
            _within(kept, inner, node)
            return kept
        case "BinaryExpr":
            return _joined(node, series)
    raise QueryError(f"{type(node).__name__} is not known here: {node}")


def _selected(node: Any, series: Mapping[str, tuple[str, Labels]]) -> tuple[str, Labels]:
    if node.name not in series:
        raise QueryError(f"no series {node.name}")
    kind, labels = series[node.name]
    _within(frozenset(matcher.name for matcher in node.matchers.matchers), labels, node)
    return kind, labels


def _called(node: Any, series: Mapping[str, tuple[str, Labels]]) -> Labels:
    name, vector = node.func.name, node.args[-1]
    labels = _labels(vector, series)
    if name in COUNTED and _selected(vector.vector_selector, series)[0] != "counter":
        raise QueryError(f"{name} of a metric that is no counter: {node}")
    if name.endswith("_over_time") and _selected(vector.vector_selector, series)[0] == "counter":
        raise QueryError(f"{name} of a counter: {node}")
    if name == "histogram_quantile":
        _within(frozenset({"le"}), labels, node)
        return labels - {"le"}
    return frozenset() if name in ("absent", "scalar") else labels


def _joined(node: Any, series: Mapping[str, tuple[str, Labels]]) -> Labels:
    left, right = _labels(node.lhs, series), _labels(node.rhs, series)
    matching = node.modifier.matching if node.modifier is not None else None
    if matching is not None:
        _within(frozenset(matching.labels), left & right, node)
        added = frozenset(node.modifier.group_labels or ())
        _within(added, right, node)
        return left | added
    vectors = not any(_is_number(side) for side in (node.lhs, node.rhs))
    if vectors and left != right:
        raise QueryError(f"never match: {sorted(left)} and {sorted(right)} in {node}")
    return left | right


def _is_number(node: Any) -> bool:
    match type(node).__name__:
        case "NumberLiteral":
            return True
        case "ParenExpr":
            return _is_number(node.expr)
        case "BinaryExpr":
            return _is_number(node.lhs) and _is_number(node.rhs)
        case "Call":
            return bool(node.func.name == "scalar")
    return False


def _within(labels: Labels, all_of: Labels, node: Any) -> None:
    if not labels <= all_of:
        raise QueryError(f"no label {', '.join(sorted(labels - all_of))} in {node}")
