"""Finds every regular expression of the package, and makes texts that are slow for it.

A pattern that can match a text in several ways may try them all before it fails, so that the time grows faster than the
text. Patterns are found in the source at each call of `re`, so that no list is needed. The parse of a pattern gives the
texts: a beginning that leads to a repetition, the repeated text, and a wrong end.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import llmproxy

ROOT = Path(llmproxy.__file__).parent
METHODS = ("match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "split")
SCREEN_CHARS = 2048
SCREEN_S = 0.0005
"""A linear pattern takes about 50 µs for SCREEN_CHARS, a quadratic pattern 5 ms. Slower patterns are measured."""
ENOUGH_S = 0.05
"""A longer time is measured once, because noise matters little."""
EXPONENT_MAX = 1.5
"""A higher exponent of time over length is not linear. Quadratic time has 2; the margin is for noise."""

_ENDS = ("", "\x00")
_PUMPS = [chr(code) for code in range(32, 127)] + ["\t", "\n", "\x00", "µ"]
_PARSER: Any = importlib.import_module("re._parser")


class UnreadError(Exception):
    """A pattern is built at run time, so it cannot be read from the source."""


@dataclass(frozen=True)
class Found:
    """A pattern, where it is in the source, and the methods that use it there."""

    where: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]

    def run(self, text: str) -> None:
        """Calls all these methods of the pattern with a text."""
        given: Any = text.encode("latin-1") if isinstance(self.pattern.pattern, bytes) else text
        for method in self.methods:
            if method in ("match", "fullmatch", "search"):
                getattr(self.pattern, method)(given)
            else:
                # All methods that find every match spend their time searching.
                sum(1 for _ in self.pattern.finditer(given))


def found_patterns() -> list[Found]:
    """Returns every pattern of the package. Raises UnreadError for a pattern that is built at run time."""
    found: list[Found] = []
    for path, text in _sources().items():
        if "import re" not in text:
            continue
        tree = ast.parse(text)
        names = {id(call): name for name, call in _assigned(tree)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _is_re(call.func):
                assert isinstance(call.func, ast.Attribute)
                uses = _uses(names[id(call)], path) if id(call) in names else ()
                where = f"{path.relative_to(ROOT.parent)}:{call.lineno}"
                if call.func.attr == "compile":
                    found.append(Found(where, _evaluated(path, call), uses or ("match", "fullmatch", "search")))
                elif call.func.attr in METHODS:
                    found.append(Found(where, _evaluated(path, call), (call.func.attr,)))
    return found


@cache
def _sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def _is_re(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            yield node.targets[0].id, node.value


def _uses(name: str, home: Path) -> tuple[str, ...]:
    """Returns the methods that the package calls on the pattern `name`; empty if `name` is passed to other code too."""
    texts = [_sources()[home]] if name.startswith("_") else [text for text in _sources().values() if name in text]
    text = "\n".join(texts)
    calls = re.findall(rf"\b{name}\b(?!\s*=[^=])(?:\.(\w+)\()?", text)
    return tuple(sorted(set(calls))) if calls and all(method in METHODS for method in calls) else ()


def _evaluated(path: Path, call: ast.Call) -> re.Pattern[Any]:
    """Returns the pattern in a call of `re`, resolved by the names of its module."""
    assert isinstance(call.func, ast.Attribute)
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    flags = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    # The text is second. A replacement and a limit may come between it and the flags.
    flags += call.args[1:2] if call.func.attr == "compile" else [one for one in call.args[2:] if _is_re(one)]
    try:
        pattern, *rest = [
            eval(compile(ast.Expression(one), str(path), "eval"), vars(module)) for one in (call.args[0], *flags)
        ]
    except NameError as error:
        raise UnreadError(f"{path}:{call.lineno}: the pattern is known to its caller alone ({error})") from None
    return re.compile(pattern, *rest)


# --- texts that are slow ----------------------------------------------------------------------------------------------


def attacks(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], str]]:
    """Yields makers of texts: a beginning that leads to a repetition of the pattern, a repeated text, and an end."""
    tree = _PARSER.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    places = dict.fromkeys([("", ""), *_repetitions(tree, "")])
    for prefix in dict.fromkeys(prefix for prefix, _ in places):
        bodies = [body for at, body in places if at == prefix and len(body) > 1]
        for pump in (*_PUMPS, *bodies):
            for end in _ENDS:
                yield partial(_text, prefix, pump, end)


def _text(prefix: str, pump: str, end: str, chars: int) -> str:
    return prefix + pump * (chars // len(pump)) + end


def _repetitions(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the beginning that leads to each repetition, and each text that may be repeated there."""
    for kind, what in tree:
        name = str(kind)
        for inner in _inner(name, what):
            if name.endswith("_REPEAT") and what[1] > 16:
                yield from ((prefix, text) for text in _texts(inner))
            yield from _repetitions(inner, prefix)
        prefix += next(iter(_texts([(kind, what)])), "")


def _inner(name: str, what: Any) -> list[Any]:
    if name.endswith("_REPEAT"):
        return [what[2]]
    if name == "SUBPATTERN":
        return [what[3]]
    if name == "BRANCH":
        return list(what[1])
    if name == "ATOMIC_GROUP":
        return [what]
    return [what[1]] if name in ("ASSERT", "ASSERT_NOT") else []


def _texts(tree: Any) -> list[str]:
    """Returns a few texts that a part of a pattern matches, a text for each branch of its first choice."""
    texts = [""]
    for kind, what in tree:
        name = str(kind)
        if name == "LITERAL":
            own = [chr(what)]
        elif name in ("NOT_LITERAL", "IN", "ANY"):
            one = re.compile(_source(name, what))
            own = [next((char for char in "a0 " + "".join(_PUMPS) if one.fullmatch(char)), "")]
        elif name.startswith("ASSERT"):
            own = [""]
        else:
            own = [text for inner in _inner(name, what) for text in _texts(inner)] or [""]
            own = [text * max(1, what[0]) for text in own] if name.endswith("_REPEAT") else own
        texts = [before + after for before in texts[:4] for after in own[:4]]
    return texts


def _source(name: str, what: Any) -> str:
    """Returns a single character of a pattern as the source of a pattern."""
    if name == "ANY":
        return "."
    if name == "NOT_LITERAL":
        return f"[^{re.escape(chr(what))}]"
    parts: dict[str, Callable[[Any], str]] = {"NEGATE": lambda _: "^", "LITERAL": lambda code: re.escape(chr(code))}
    parts["RANGE"] = lambda ends: f"{re.escape(chr(ends[0]))}-{re.escape(chr(ends[1]))}"
    classes = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w", "NOT_DIGIT": r"\D", "NOT_SPACE": r"\S", "NOT_WORD": r"\W"}
    parts["CATEGORY"] = lambda category: classes[str(category).removeprefix("CATEGORY_")]
    return "[" + "".join(parts[str(kind)](value) for kind, value in what) + "]"


def cpu_s(work: Callable[[], object], times: int = 3) -> float:
    """Returns the CPU seconds of this thread for one call of `work`: the smallest of `times` measurements."""
    best_s = inf
    for _ in range(times):
        began_s = time.thread_time()
        work()
        best_s = min(best_s, time.thread_time() - began_s)
        if best_s > ENOUGH_S:
            break
    return best_s


def slowest(found: Found) -> tuple[Callable[[int], str], bool]:
    """Returns a function that makes the slowest text for a pattern, and whether the time grows linearly.

    The search ends at the first text with faster growth.
    """
    worst: tuple[Callable[[int], str], float] = (lambda chars: "a" * chars), 0.0
    for text in attacks(found.pattern):
        took_s = 0.0
        # Short texts first, because exponential patterns never end with long texts.
        for chars in (16, 20, 24, 28, 32, 128, 512, SCREEN_CHARS):
            took_s = _took_s(found, text(chars), 1)
            if took_s > SCREEN_S:
                whole_s, quarter_s = _took_s(found, text(chars)), _took_s(found, text(chars // 4))
                if whole_s > SCREEN_S and whole_s > quarter_s * 4**EXPONENT_MAX:
                    return text, False
        if took_s > worst[1]:
            worst = text, took_s
    return worst[0], True


def _took_s(found: Found, text: str, times: int = 3) -> float:
    return cpu_s(lambda: found.run(text), times)
