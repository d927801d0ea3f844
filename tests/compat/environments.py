"""An environment for each group of clients, built from its pins in `.ci/compat` and kept until they change."""

from __future__ import annotations

import shutil
import sys
from hashlib import sha256
from pathlib import Path

from tests.compat.commands import run

TOP = Path(__file__).parents[2]
PINS, BUILT = TOP / ".ci" / "compat", TOP / ".venv-compat"
INSTALL_MAX_S = 1800.0


async def ready(name: str) -> Path:
    """The folder of an environment, built if its pins are new: one of Python where they are `name.txt`, else of npm."""
    pins = PINS / f"{name}.txt"
    files = [pins] if pins.exists() else [PINS / name / "package.json", PINS / name / "package-lock.json"]
    digest = sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    folder, stamp = BUILT / name, BUILT / name / "pins.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if pins.exists():
        await run([sys.executable, "-m", "venv", str(folder)], limit_s=INSTALL_MAX_S)
        pip = [python_of(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Where the pins are complete, a resolver has nothing to find, and refuses hashes beside extras.
        complete = [] if pins.read_text().startswith("#") else ["--no-deps"]
        await run([*pip, *complete, "-r", str(pins)], limit_s=INSTALL_MAX_S)
    else:
        for file in files:
            shutil.copy(file, folder)
        await run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, limit_s=INSTALL_MAX_S)
    stamp.write_text(digest)
    return folder


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")
