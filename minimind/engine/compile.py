"""torch.compile as this package uses it: one graph of model and loss, with its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from minimind.config.run_config import RunConfig
from minimind.runtime.phases import phase

# How torch 2.10 to 2.13 call it. Where another one does not, there is more memory in use.
AHEAD = "force_non_lazy_backward_lowering"


def compile_within(model: PreTrainedModel, run: RunConfig, device: str) -> None:
    """Have the model compiled at its first micro-batch, in place: no name of a weight changes.

    Shapes are static, for rows are packed: every micro-batch has the same. Its forward is, and not
    the call that goes through its hooks: DeepSpeed hangs its timers there, which wait for the GPU,
    and torch 2.13 cannot compile that. Whatever wraps the model is not compiled either.

    With --deterministic no kernel is chosen by how long it took: on a GPU another choice, after a
    resume, would sum in another order.

    On a CPU the backward pass is made `ahead`; on GPUs that was not measured.
    """
    if run.compile != "on":
        return
    options: dict[str, Any] | None = {"deterministic": True} if run.deterministic else None
    forward = torch.compile(model.forward, dynamic=False, options=options)
    model.forward = announced(ahead(forward) if device == "cpu" else forward)


def announced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a line on rank 0 when its first call, which compiles, takes long."""
    has_run = False

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            return forward(*args, **kwargs)
        has_run = True
        with phase("compiling the model"):
            return forward(*args, **kwargs)

    return called


def ahead(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled `forward`, whose first call makes the graph of its backward pass too.

    torch makes that at its first use, when all that is kept for it is in memory. What the compiler
    leaves behind would lie between, for good, and later steps would not fit the gaps. Made so, it
    may refuse backward(retain_graph=True), which nothing here asks for.
    """
    from torch._functorch import config

    if not hasattr(config, AHEAD):
        return forward
    both = config.patch({AHEAD: True})

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with both:  # and not for whatever else the process compiles
            return forward(*args, **kwargs)

    return called


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
