"""One tiny run for all tests of this folder that damage copies of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults import tiny


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny.tokenizer_bytes(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def whole(tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, which nobody may change."""
    return tiny.new_run(tmp_path_factory.mktemp("whole") / "run", tokenizer)


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))
