"""A process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
