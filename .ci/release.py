"""`release.py [TAG]` fills dist/ with a release: wheel, source distribution, chart, inventory, notes, checksums.

The inventory is made before by `make sbom`. Without a tag, the notes are of the unreleased part of the changelog.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import yaml

DIST = Path("dist")
CHART = Path("deploy/helm/llmproxy")
ABSOLUTE = "https://github.com/llmproxy-lb/llmproxy/blob/{ref}/"


def version() -> str:
    """Returns the version of the code. Raises SystemExit if the chart has another one."""
    [code] = re.findall(r'^__version__ = "(.+)"$', Path("llmproxy/__init__.py").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    if chart["version"] != code or chart["appVersion"] != code:
        sys.exit(f"{CHART}/Chart.yaml: version and appVersion must be {code}, as in llmproxy/__init__.py")
    return str(code)


def notes(changelog: str, tag: str | None) -> str:
    """Returns the part of the changelog for a tag, or the unreleased part. Raises SystemExit if there is none."""
    wanted = tag.removeprefix("v") if tag else "Unreleased"
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title.startswith(f"[{wanted}]"):
            # The page of a release is in no folder of the repository.
            address = ABSOLUTE.format(ref=tag or "main")
            return re.sub(r"\]\((?!https?:)", f"]({address}", text.strip()) + "\n"
    sys.exit(f"CHANGELOG.md: has no part that begins with `## [{wanted}]`")


def release(tag: str | None) -> None:
    """Writes the files. Raises SystemExit if tag, code, chart and changelog do not agree."""
    import helm_python

    code = version()
    if tag and tag != f"v{code}":
        sys.exit(f"the tag is {tag}, and llmproxy/__init__.py has {code}")
    text = notes(Path("CHANGELOG.md").read_text(), tag)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "--directory", DIST], check=True)
    helm_python.package(CHART, destination=DIST)
    files = sorted(path for path in DIST.iterdir() if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    (DIST / "notes.md").write_text(text)


if __name__ == "__main__":
    release(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
