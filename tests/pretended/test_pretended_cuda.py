"""Build the pretended CUDA device, and run cases.py on it in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tools.pretended.library import CXX, build_library


@pytest.fixture
def library(pytestconfig: pytest.Config) -> Path:
    """The compiled library, in pytest's cache."""
    if torch.backends.cuda.is_built():
        pytest.skip("torch is built for CUDA, which is not pretended then")
    if sys.platform != "linux":
        pytest.skip("the library is built for Linux")
    if not shutil.which(CXX):
        pytest.skip(f"no C++ compiler ({CXX}) is on PATH")
    return build_library(pytestconfig.cache.mkdir("pretended_cuda"))


def test_cases_on_a_pretended_device(library: Path, pytestconfig: pytest.Config):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tools.pretended.device"),
            *("-p", "no:cacheprovider", "tests/pretended/cases.py"),
            *(["--long"] if pytestconfig.getoption("--long") else []),
        ],
        env={**os.environ, "PRETENDED_CUDA": str(library), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert "skipped" not in done.stdout
