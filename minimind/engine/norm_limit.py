"""Lets DeepSpeed skip an update whose gradient norm is above a limit."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

TEST = "is_invalid_grad_norm"  # the test of the norm in each of DeepSpeed's optimizers, by name


class NormLimit:
    """Stands in for DeepSpeed's test of the gradient norm, and also fails it above `limit`.

    DeepSpeed then skips the update as it does for a norm that is not finite, on every rank. Its own
    `_global_grad_norm` is infinite afterwards, so the norm is kept here.
    """

    def __init__(self, optimizer: Any) -> None:
        self._module: Any = sys.modules[type(optimizer).__module__]
        self._test = getattr(self._module, TEST)
        setattr(self._module, TEST, self)
        # Stages 1 and 2 in bf16 test the norm only with this, and compute one only with the other.
        optimizer.check_grad_overflow = optimizer.compute_grad_norm = True
        self.limit = math.inf
        self.norm: float | torch.Tensor | None = None  # of the last update if it was above

    def __call__(self, norm: Any) -> bool:
        """Whether DeepSpeed has to skip the update."""
        if self._test(norm):
            return True
        self.norm = norm if float(norm) > self.limit else None
        return self.norm is not None

    def take(self) -> float | torch.Tensor | None:
        """The norm of the last update if it was skipped for being above the limit, else None."""
        norm, self.norm = self.norm, None
        return norm

    def release(self) -> None:
        """Give DeepSpeed its own test back."""
        setattr(self._module, TEST, self._test)
