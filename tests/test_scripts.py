"""Files that are run by their path import the package of their own tree, whichever is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minimind
from minimind.runtime.environment import module_path
from tests.conftest import ROOT

# Tells at the end of a process which package it had; it writes no pages of docs/.
TELLS = """
import atexit, os, pathlib, sys
atexit.register(lambda: print("HAD", getattr(sys.modules.get("minimind"), "__file__", None)))
if "PAGES" in os.environ:
    pathlib.Path.write_text = lambda *_, **__: 0
"""
OTHER = "import sys; sys.exit(f'another checkout: {__file__}')"
SCRIPTS = {
    "train_pretrain.py": "--version",
    "train_pretrain_accelerate.py": "--version",
    "run_accelerate.sh": "--help",
    "minimind/launch/train_pretrain.py": "--version",
    "minimind/launch/launcher.py": "{python} --dry_run --device cpu",
    "minimind/launch/accelerate_launch.py": "",
    "scripts/flag_reference.py": "",
    "scripts/device_reference.py": "",
    "scripts/check_export.py": "",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with another checkout."""
    (tmp_path / "minimind").mkdir()
    (tmp_path / "minimind" / "__init__.py").write_text(OTHER)
    tells = tmp_path / "tells"
    tells.mkdir()
    (tells / "sitecustomize.py").write_text(TELLS)
    (tells / "torch.py").write_text("raise SystemExit")  # it would take seconds
    return tmp_path


@pytest.mark.parametrize("is_safe", [False, True])
def test_each_script_has_the_package_of_its_tree(place: Path, is_safe: bool):
    """Run from the folder of another one, which is installed, through a link to the file.

    The libraries of this interpreter are there without what its .pth files install.
    """
    paths = [place / "tells", place, *(p for p in sys.path if p.endswith("-packages"))]
    python = getattr(sys, "_base_executable", sys.executable)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHON": python}
    environ |= {"MAX_RESTARTS": "1", "RESTART_WAIT": "1", "PAGES": "", "CDPATH": str(ROOT.parent)}
    environ |= {"PYTHONSAFEPATH": "1"} if is_safe else {}
    started = {}
    for n, (script, line) in enumerate(SCRIPTS.items()):
        link = place / f"script-{n}"
        link.symlink_to(ROOT / script)
        words = ["bash" if script.endswith(".sh") else python, link.name]
        words += line.format(python=python).split()
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        started[script] = subprocess.Popen(
            words, env=environ, cwd=place, stderr=subprocess.STDOUT, **pipes
        )
    found = {script: process.communicate()[0] for script, process in started.items()}
    own = f"HAD {ROOT / 'minimind' / '__init__.py'}\n"
    assert {script: text for script, text in found.items() if own not in text} == {}


def test_the_processes_of_a_command_have_its_package_in_the_folder_of_another(place: Path):
    """As trials of a sweep, which `python -m` starts there."""
    words = [sys.executable, "-m", "minimind.cli.main", "--version"]
    environ = {**os.environ, **module_path()}
    done = subprocess.run(words, env=environ, cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert minimind.__version__ in done.stdout
