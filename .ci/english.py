"""Counts sentence forms that make this project's texts hard to read, and fails if there are more than before.

    python .ci/english.py             compare with .ci/english.json
    python .ci/english.py --write     record lower counts; higher ones are refused
    python .ci/english.py --list DIR  every form in a folder or file

It reads docstrings, comments and messages of Python files, texts of JavaScript files, and Markdown without its code.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci" / "english.json"
FORMS = {
    # A question may begin with "What", and a heading too.
    "begins with What, That, Those or One": r"(?:^|[.:;!]\s+)(?:What|That|Those|Ones?)\b(?![^.:;!]*\?)",
    "one that": r"\b(?:ones?|that|those|something|somebody|nobody) (?:that|who|which|whose)\b|\bof (?:which|whom)\b",
    "that of": r"\b(?:that|those|one) (?:of|in|from|with|for) (?:a|an|the|all|its|one|another|each|every|which)\b",
    "what is": r"\bwhat (?:is|it|was|were|they|he|has|had|its?|a|an|the|each|another|others?|came|comes)\b",
    "a program that is told, stands or lets": r"\b(?:is|are|was|were|be|been) told\b|\b(?:stands?|stood)\b|\blets?\b",
}
PATTERN = re.compile("|".join(f"({form})" for form in FORMS.values()), re.MULTILINE)
_FENCED = re.compile(r"```.*?```|<!-- generated.*?<!-- end -->|^#.*?$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
_COMMENTS = re.compile(r"(?:^[ ]*# [^\n]*\n)+|  # [^\n]*", re.MULTILINE)
_JAVASCRIPT = re.compile(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]* [^\"\n]*\"|`[^`]* [^`]*`", re.DOTALL)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields each text of a file with the number of its first line."""
    source = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, re.sub(r"`[^`]*`", "x", node.value)
        for found in _COMMENTS.finditer(source):
            text = "\n".join(line.strip().lstrip("# ") for line in found[0].splitlines())
            yield source.count("\n", 0, found.start()) + 1, text
    elif path.suffix == ".js":
        for found in _JAVASCRIPT.finditer(source):
            yield source.count("\n", 0, found.start()) + 1, re.sub(r"\$\{[^}]*\}", "x", found[0]).strip('/*`" \n')
    else:
        prose = _FENCED.sub(lambda part: "x" + "\n" * part[0].count("\n"), source)
        line = 1
        for paragraph in re.split(r"(\n\n|\n(?=[-|]))", prose):
            yield line, paragraph.strip("-|* ")
            line += paragraph.count("\n")


def forms(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line of each forbidden form in a file and the words around it."""
    for line, text in texts(path):
        for found in PATTERN.finditer(text):
            around = text[max(0, found.start() - 30) : found.end() + 30]
            yield line + text.count("\n", 0, found.start()), " ".join(around.split())


def files(place: str = ".") -> list[Path]:
    names = subprocess.run(["git", "ls-files", place], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = (ROOT / name for name in names.splitlines() if name.endswith((".py", ".md", ".js")))
    return [path for path in named if "vendor" not in path.parts and path.name != "english.py" and path.exists()]


def room(path: Path) -> str:
    """The first two folders of a path, or the first one, or the root."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--list"]:
        for path in files(*arguments[1:2]):
            for line, words in forms(path):
                print(f"{path.relative_to(ROOT)}:{line}: {words}")
        return 0
    gc.disable()  # Syntax trees have no cycles, and looking for some takes a fifth of the time.
    found: Counter[str] = Counter()
    for path in files():
        found[room(path)] += sum(1 for _ in forms(path))
    known = json.loads(RECORD.read_text()) if RECORD.exists() else dict(found)
    higher = {name: count for name, count in found.items() if count > known.get(name, 0)}
    if sum(found.values()) > sum(known.values()):
        for name, count in higher.items():
            print(f"{name}: {count} hard sentences, {known.get(name, 0)} before: python .ci/english.py --list {name}")
        return 1
    if arguments == ["--write"]:
        RECORD.write_text(json.dumps({name: n for name, n in sorted(found.items()) if n}, indent=2) + "\n")
    elif sum(found.values()) < sum(known.values()):
        print("Fewer hard sentences than recorded. Keep it so: `python .ci/english.py --write`, and commit the file.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
