"""Check that this interpreter has what pyproject.toml requires; installs nothing.

Command: python scripts/check_environment.py [DISTRIBUTION...], which are needed besides. Prints one
sentence and exits with 2 if anything is missing or of a version out of bounds. Imports only the
standard library, and `packaging` where it is installed.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
OLDEST_PYTHON = (3, 11)


def requirements() -> list[str]:
    """The dependencies of pyproject.toml, without extras."""
    import tomllib

    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]


def problems(needed: list[str]) -> dict[str, str]:
    """What is wrong with each requirement that is not met, by requirement."""
    found = {}
    for requirement in needed:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()  # pyright: ignore
        try:
            installed = version(name)
        except PackageNotFoundError:
            found[requirement] = f"{requirement} is missing"
            continue
        if not is_within(installed, bounds):
            found[requirement] = f"{name} is {installed}, not {bounds}"
    return found


def is_within(installed: str, bounds: str) -> bool:
    """Whether a version is within `bounds`, such as `>=2.11`; local parts like +cpu are ignored."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # without transformers too, which is reported as missing
        return True
    return SpecifierSet(bounds).contains(installed.partition("+")[0], prereleases=True)


def main(more: list[str]) -> str:
    """Return the sentence; empty if nothing is missing."""
    python = shlex.quote(sys.executable)
    if sys.version_info < OLDEST_PYTHON:
        return f"{python} is Python {sys.version.split()[0]}; Python 3.11 or newer is needed"
    found = problems([*requirements(), *more])
    if not found:
        return ""
    return (
        f"{python} cannot run this: {', '.join(found.values())}; install with {python} -m pip"
        f" install {shlex.join(found)}, or leave out PYTHON=, and make creates .venv"
    )


if __name__ == "__main__":
    if sentence := main(sys.argv[1:]):
        print(sentence, file=sys.stderr)
        sys.exit(2)
