"""The program of a worker: train with the flags, and exit with the status of the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a script: the package is that of this folder, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import_module("minimind")
    del sys.path[0]
from minimind.runtime.exit import leave
from minimind.train.program import main


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Train with the flags `argv` (default: the command line) and end the process."""
    status = main(sys.argv[1:] if argv is None else argv)
    leave(status, at_once=status != 0)


if __name__ == "__main__":
    run()
