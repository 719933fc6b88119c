"""A device with little memory: on a CPU, tensors beyond a limit are refused as on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LimitedCard(TorchDispatchMode):
    """Counts what operators return while it is on, each storage once, until it is freed.

    Raise torch.OutOfMemoryError above `limit` bytes. `most` is the peak.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.held = self.most = self.refused = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        if self.held + size > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._sizes[key] = size
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)
