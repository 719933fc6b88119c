"""How this installation is called and extended, as commands for messages."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from minimind.errors import UsageError
from minimind.runtime import disk

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE.parent  # the checkout, or site-packages
DISTRIBUTION_NAME = "minimind-deepspeed"


def minimind_command(python: str) -> str:
    """The installed `minimind` of an interpreter, else `PYTHON -m minimind`; quoted for a shell."""
    script = Path(python).parent / "minimind"
    return near(script) if disk.exists(script) else f"{near(Path(python))} -m minimind"


def install_packages(*packages: str) -> str:
    """The command that installs packages for this interpreter."""
    return f"{near(Path(sys.executable))} -m pip install {shlex.join(packages)}"


def install_extra(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation.

    In a checkout it keeps the editable installation, which a plain one would replace by a copy.
    """
    if disk.is_file(PROJECT / "pyproject.toml"):
        folder = "." if Path.cwd() == PROJECT else str(PROJECT)
        return install_packages("-e", f"{folder}[{extra}]")
    return install_packages(f"{DISTRIBUTION_NAME}[{extra}]")


def require_extra(extra: str, what: str, *packages: str) -> None:
    """Raise UsageError where a package that `what` needs is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise UsageError(
                f"{what} needs the package {package}, which is not installed;"
                f" run {install_extra(extra)}"
            )


def near(path: Path) -> str:
    """A path for a shell: relative below the current directory, else absolute."""
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the current directory is gone
        relative = os.pardir
    return shlex.quote(str(path) if relative.startswith("..") else relative)


# The command that starts a run.
_SCRIPT = PROJECT / "run_accelerate.sh"
LAUNCH = (
    f"bash {near(_SCRIPT)}"
    if disk.exists(_SCRIPT)
    else f"{minimind_command(sys.executable)} launch"
)
