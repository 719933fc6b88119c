"""Compiles the pretended CUDA device; imports no torch before a build, which it would precede."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda.cpp")
CXX = os.environ.get("CXX") or "c++"


def build_library(folder: Path) -> Path:
    """Return the library in `folder`, by its source and torch's version; several may build it.

    Not by torch.utils.cpp_extension.load, which would load it here.
    """
    import torch
    from torch.utils import cpp_extension

    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    found = folder / f"{key}.so"
    if not found.exists():
        mine = found.with_suffix(f".{os.getpid()}")
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        options = ["-std=c++20", "-O0", "-fPIC", "-shared", *includes]
        output = [*libraries, "-lc10", "-ltorch_cpu", "-o", str(mine)]
        subprocess.run([CXX, *options, str(SOURCE), *output], check=True)
        mine.rename(found)
    return found
