"""A command that is killed while a folder it wrote takes the place of an earlier one."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

# Killed as it asks for its Nth change of a folder's name, or to delete one, once it replaces.
CODE = """
import os, shutil, signal, sys
from pathlib import Path
from minimind.runtime.output_folder import NewFolder
from minimind.cli.main import main

at, words = int(sys.argv[1]), sys.argv[2:]
replace, calls = NewFolder.replace, []

def counted(call):
    def change(*args, **kwargs):
        calls.append(call)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return change

def replacing(*args):
    Path.rename, shutil.rmtree = counted(Path.rename), counted(shutil.rmtree)
    return replace(*args)

NewFolder.replace = replacing
main(words)
sys.exit(f"was not killed; {len(calls)} calls")
"""


def killed_in_replacing(words: list[str], at: int) -> None:
    """Run `minimind WORDS`, and kill -9 it before its `at`-th rename or deletion of folders."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(at), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
