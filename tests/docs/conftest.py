"""What the commands of the pages find, made once for all pages."""

from __future__ import annotations

import pytest

from tests.conftest import Trained
from tests.docs.things import Things


@pytest.fixture(scope="session")
def things(trained: Trained) -> Things:
    return Things(trained)
