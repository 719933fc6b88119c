"""Autocast and torch.compile of the model, the time of the latter, and the model without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from minimind.config.flags import MIXED
from minimind.config.run_config import RunConfig
from minimind.runtime.terminal import phase

# The option of torch 2.10 to 2.13. Versions without it use more memory, and ranks that compile the
# backward pass for different times wait for --dist_timeout.
EAGER_BACKWARD = "force_non_lazy_backward_lowering"
ORIGINAL = "_torchdynamo_orig_callable"  # attribute of a compiled function
# The choice of attention kernels; its arguments are in the graph, and so in the key of torch's
# cache. Without this mark every block on a GPU bypasses the cache of AOTAutograd.
CACHEABLE = dict.fromkeys(
    ("torch.nn.attention._sdpa_kernel", "torch.nn.attention._backend_from_string"), "1"
)


# One C++ file for each graph instead of one for each kernel, most of whose time is that of the
# headers; and no trial of the vector instructions that the processor reports.
CPU_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "cpp.vec_isa_ok": True}


def compute_in(dtype: str, model: Any, device: str) -> None:
    """With a --dtype of bf16-mixed, run every forward pass of the model under torch.autocast.

    Evaluations, samples and checks call the model itself, without DeepSpeed's engine, whose own
    autocast is around this one in training. To be called before `compile_model`.
    """
    if dtype == MIXED:
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)


def compile_model(model: Any, run: RunConfig, device: str) -> None:
    """Compile methods of the model in place if --compile is on; names of weights do not change.

    `device` is cpu or cuda, where the model will be.

    Shapes are static, because rows are packed. Hooks are not compiled: DeepSpeed registers timers
    there that synchronize the GPU, which torch 2.13 cannot compile. With --deterministic no kernel
    is selected by timing, since another choice after a resume would sum in another order.
    """
    if run.compile != "on":
        return
    from torch._inductor import config

    marked = config.unsafe_marked_cacheable_functions
    config.unsafe_marked_cacheable_functions = marked | CACHEABLE
    options = CPU_OPTIONS if device == "cpu" else {}
    options = options | ({"deterministic": True} if run.deterministic else {})
    for module, name in compiled_methods(model):
        compiled = torch.compile(getattr(module, name), dynamic=False, options=options or None)
        setattr(module, name, compiled)
    is_whole = hasattr(model.forward, ORIGINAL)
    model.forward = with_compile_message(with_compiler_settings(model.forward, is_whole))


def compiled_methods(model: Any) -> list[tuple[Any, str]]:
    """Modules and their methods that are compiled: those the model names, else its forward."""
    return getattr(model, "compiled_methods", lambda: [(model, "forward")])()


def with_compile_message(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Print a line on rank 0 if the first call, which compiles, takes long."""
    has_run = False

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            return forward(*args, **kwargs)
        has_run = True
        with phase("compiling the model, which takes tens of seconds unless torch has it cached"):
            return forward(*args, **kwargs)

    return called


def with_compiler_settings(forward: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
    """Run `forward`, whose first call compiles, under settings of torch's compiler.

    The backward graph is compiled with the forward graph, so that a rank has compiled all before
    its first collective. By default torch compiles it at its first use, when all saved activations
    are in memory; what the compiler allocates then fragments the memory of a CPU for good. Compiled
    early it may not support backward(retain_graph=True), which is not used here. Under DDP torch
    splits a graph where a bucket of gradients is full, which only a model compiled as a whole needs
    to overlap the reduction.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    settings = [] if is_whole else [dynamo.patch(optimize_ddp=False)]
    if hasattr(functorch, EAGER_BACKWARD):
        settings.append(functorch.patch({EAGER_BACKWARD: True}))

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:  # not for other code of the process
            for setting in settings:
                stack.enter_context(setting)
            return forward(*args, **kwargs)

    return called


class CompileClock:
    """Time that this process spends in torch.compile, as counted by torch."""

    def __init__(self, run: RunConfig) -> None:
        self._is_on = run.compile == "on"
        self._last = self._seconds()

    def take(self) -> float:
        """Seconds of compilation since the last call or the start."""
        before, self._last = self._last, self._seconds()
        return self._last - before

    def _seconds(self) -> float:
        if not self._is_on:
            return 0.0
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent()["total_wall_time"]


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the model uncompiled inside the block; flex attention stays compiled."""
    methods = [(module, name, getattr(module, name)) for module, name in compiled_methods(model)]
    compiled = [entry for entry in methods if hasattr(entry[2], ORIGINAL)]
    for module, name, method in compiled:
        setattr(module, name, getattr(method, ORIGINAL))
    try:
        yield
    finally:
        for module, name, method in compiled:
            setattr(module, name, method)
