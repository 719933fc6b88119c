"""torch.compile as this package uses it: one graph of model and loss, with its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from minimind.config import RunConfig


def compile_within(model: PreTrainedModel, run: RunConfig, device: str) -> None:
    """Have the model compiled at its first micro-batch, in place: no name of a weight changes.

    Shapes are static, for rows are packed: every micro-batch has the same. Its forward is, and not
    the call that goes through its hooks: DeepSpeed hangs its timers there, which wait for the GPU,
    and torch 2.13 cannot compile that. Whatever wraps the model is not compiled either.

    With --deterministic no kernel is chosen by how long it took: on a GPU another choice, after a
    resume, would sum in another order.

    On a CPU the backward pass is made with the forward one, from here on of any model: made at
    its first use, beside all that is kept for it, what the compiler leaves behind would split the
    memory in which every later step keeps the same.
    """
    if run.compile != "on":
        return
    if device == "cpu":
        from torch._functorch import config

        config.force_non_lazy_backward_lowering = True
    options: dict[str, Any] | None = {"deterministic": True} if run.deterministic else None
    model.forward = torch.compile(model.forward, dynamic=False, options=options)


class CompileClock:
    """How long this process has been making graphs, by torch's own count."""

    def __init__(self, run: RunConfig) -> None:
        self._is_on = run.compile == "on"
        self._told = self._seconds()

    def take(self) -> float:
        """Seconds since the last call, or the start; 0 where nothing was compiled."""
        told, self._told = self._told, self._seconds()
        return self._told - told

    def _seconds(self) -> float:
        if not self._is_on:
            return 0.0
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent()["total_wall_time"]


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the model as it is written, compiled or not; whatever else is compiled stays so.

    Document masks on a GPU are: attention that is compiled by itself.
    """
    found = model.forward
    if not hasattr(found, "_torchdynamo_orig_callable"):
        yield
        return
    model.forward = found._torchdynamo_orig_callable
    try:
        yield
    finally:
        model.forward = found
