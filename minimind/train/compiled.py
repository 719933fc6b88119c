"""torch.compile as this package uses it: one graph of model and loss, with its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minimind.config import RunConfig
from minimind.model.decoder import MiniMindForCausalLM


def compile_within(model: MiniMindForCausalLM, run: RunConfig) -> None:
    """Have the model compiled at its first micro-batch, in place: no name of a weight changes.

    Shapes are static, for rows are packed: every micro-batch has the same. Whatever wraps the model
    afterwards (DeepSpeed, DDP) is not compiled, so that its hooks break no graph.

    With --deterministic no kernel is chosen by how long it took: on a GPU another choice, after a
    resume, would sum in another order.
    """
    if run.compile != "on":
        return
    model.compile(dynamic=False, options={"deterministic": True} if run.deterministic else None)


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the model as it is written, compiled or not; whatever else is compiled stays so.

    Document masks on a GPU are: attention that is compiled by itself.
    """
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
