"""The part of `make faults` for --mirror."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.faults.mirrors import CASES, Ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("mirrors"))


@pytest.fixture(autouse=True)
def _cleared(ground: Ground) -> Iterator[None]:
    yield
    ground.clear()


BRIEF = ("validation.json there: another digit", "validation.json there: a cut")


LONG = [name for name in CASES if "there" in name and name not in BRIEF]


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_the_mirror(name: str, ground: Ground):
    assert list(CASES[name](ground)) == []
