"""Copies of runs that the tests of this folder damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.tampering import trained


@pytest.fixture
def run_dir(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    return trained(corpus, tmp_path_factory.mktemp("trained"))
