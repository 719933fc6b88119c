"""datatrove's tasks without what each of them asks again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def _libraries() -> Iterator[None]:
    """The log of every task would ask where libraries lie, which takes longer than small tasks."""
    from loguru._better_exceptions import ExceptionFormatter

    with pytest.MonkeyPatch.context() as patch:
        found = staticmethod(cache(ExceptionFormatter._get_lib_dirs))
        patch.setattr(ExceptionFormatter, "_get_lib_dirs", found)
        yield
