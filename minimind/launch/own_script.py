"""The program of a worker that runs a script of the user's, as `python SCRIPT FLAGS` does.

Run as `own_script.py SCRIPT FLAGS...` by launcher.py. What the script prints to stderr reaches the
user from its first line on. If it ends by an error before a run has ended, that of the launch is 2.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a script: the package is that of this folder, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import_module("minimind")
    del sys.path[0]
from minimind.errors import MemoryFull, UsageError
from minimind.runtime.environment import rank_of
from minimind.runtime.process import claim_status, restore_stderr


def main(script: str) -> None:
    """Run it with the words of sys.argv."""
    restore_stderr()
    try:
        runpy.run_path(script, run_name="__main__")
    except (Exception, SystemExit) as error:
        if getattr(error, "code", 1):  # not sys.exit(0)
            # The launcher starts a run with a halved micro-batch again.
            status = (MemoryFull if isinstance(error, MemoryFull) else UsageError).status
            claim_status(status, rank_of(os.environ))
        raise


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    main(sys.argv[0])
