"""Build the pretended CUDA device, and run cases.py on it in a process of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.conftest import ROOT

SOURCE = Path(__file__).with_name("cuda.cpp")
CXX = os.environ.get("CXX") or "c++"


@pytest.fixture
def library(pytestconfig: pytest.Config) -> Path:
    """The compiled library, in pytest's cache by its source and torch's version.

    Not by torch.utils.cpp_extension.load, which would load it here.
    """
    if torch.backends.cuda.is_built():
        pytest.skip("torch is built for CUDA, which is not pretended then")
    if sys.platform != "linux":
        pytest.skip("the library is built for Linux")
    if not shutil.which(CXX):
        pytest.skip(f"no C++ compiler ({CXX}) is on PATH")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    found = pytestconfig.cache.mkdir("pretended_cuda") / f"{key}.so"
    if not found.exists():
        mine = found.with_suffix(f".{os.getpid()}")
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        options = ["-std=c++20", "-O0", "-fPIC", "-shared", *includes]
        output = [*libraries, "-lc10", "-ltorch_cpu", "-o", str(mine)]
        subprocess.run([CXX, *options, str(SOURCE), *output], check=True)
        mine.rename(found)  # several workers may build it
    return found


def test_cases_on_a_pretended_device(library: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.pretended.device"),
            *("-p", "no:cacheprovider", "tests/pretended/cases.py"),
        ],
        env={**os.environ, "PRETENDED_CUDA": str(library), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert "skipped" not in done.stdout
