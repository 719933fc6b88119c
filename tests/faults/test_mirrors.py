"""The part of `make faults` for --mirror."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.mirrors import CASES, Ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("mirrors"))


@pytest.fixture(autouse=True)
def _cleared(ground: Ground) -> Iterator[None]:
    yield
    ground.clear()


@pytest.mark.parametrize("name", CASES)
def test_the_mirror(name: str, ground: Ground):
    assert list(CASES[name](ground)) == []
