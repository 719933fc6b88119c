"""Which lines of a step read a number back from the device, on which a GPU would be waited for.

    python -m tools.host_reads [OUT.json [cpu|cuda]]    (one process; stages 0, 1, 2)

On a CPU nothing is waited for, but the reads are the same calls: of a scalar (`item`, `float`,
`bool`, a tensor as an `if`), of a tensor (`tolist`, `numpy`, `cpu`), and of how large a result is
(`nonzero`, a mask as an index). `.to("cpu")` is no call there that differs from a copy to the
device; on a GPU it is, by CUDA. Each is put down to the innermost frame of ours, of DeepSpeed's or
of Accelerate's, and so is each time that DeepSpeed waits for the whole device. What is sent between
ranks about themselves (the control group) lies on the CPU anyway, and is not counted. On a GPU,
what CUDA itself says of having been waited for is counted beside them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.engine.clocks import PhaseClock
from tools.engines import Case, build, course
from tools.runs import ROOT

PACKAGES = ("minimind", "deepspeed", "accelerate")
ASKING = ("tests", "tools")  # folders of this project whose reads are not a step's
OF_VALUES = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal")
OFF_DEVICE = ("sum_over_ranks", "gather")  # small facts, which travel over gloo


@cache
def package_of(filename: str) -> str | None:
    """The package that is asked about of which this is a file."""
    file = Path(filename)
    parts = (file.relative_to(ROOT) if file.is_relative_to(ROOT) else file).parts
    return next((name for name in PACKAGES if name in parts and parts[0] not in ASKING), None)


def origin() -> str:
    """`package: function` of the innermost frame of a package that is asked about."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if package := package_of(frame.f_code.co_filename):
            return f"{package}: {frame.f_code.co_name}"
    return "test"


def needs_values(func: Any, args: Any) -> bool:
    """Whether the host has to know what is in a tensor: for the answer, or for its size."""
    name = func._schema.name
    if name in OF_VALUES:
        return True
    if name == "aten::index_put_" and args[2].numel() == 1:  # then the mask is filled
        return False
    return name in ("aten::index", "aten::index_put_") and any(
        at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1]
    )


class HostReads(TorchDispatchMode):
    """Counts them by origin while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default or needs_values(func, args):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        place = origin()
        if not place.endswith(OFF_DEVICE):
            self.found[place] += 1


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Reads within, by origin."""
    reads = HostReads()
    true = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}

    def noting(name: str) -> Any:
        def read(self: torch.Tensor, *given: Any, **named: Any) -> Any:
            reads.note()
            return true[name](self, *given, **named)

        return read

    for name in true:
        setattr(torch.Tensor, name, noting(name))
    try:
        with reads:
            yield reads.found
    finally:
        for name, method in true.items():
            setattr(torch.Tensor, name, method)


@contextmanager
def waits_noted(found: Counter[str], on: str) -> Iterator[None]:
    """Whatever waits for the device within, by origin, among what was found otherwise.

    DeepSpeed's own way to wait is seen on a CPU too, where it does nothing.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: TID251 (its waiting is what is noted)

    accelerator: Any = get_accelerator()
    synchronize = accelerator.synchronize

    def noting(*given: Any) -> None:
        found[f"{origin()} (waits)"] += 1
        synchronize(*given)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[f"{origin()} (waits)"] += 1

    accelerator.synchronize = noting
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            if on == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            yield
    finally:
        del accelerator.synchronize
        if on == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def reads_of_steps(case: Case, on: str, steps: int = 3) -> dict[str, float]:
    """Reads in a step by origin, after two steps that do not count."""
    engine = build(case, seed=1, on=on)
    course(engine, 0, 2)
    table = torch.zeros((2, 17), dtype=torch.int64)
    clock = PhaseClock(engine.device)
    gc.collect()  # an earlier engine waits for the device at its end
    with counted() as found, waits_noted(found, on):
        for step in range(2, 2 + steps):
            engine.seed(step)
            clock.begin()
            engine.step([table] * engine.resolved.run.accumulation_steps, 1e-3, clock)
    return {place: count / steps for place, count in sorted(found.items())}


if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    os.environ |= {**alone, "MASTER_PORT": "0", "DS_ACCELERATOR": device}
    cases = {
        f"stage {stage}, {dtype}": Case(stage, dtype)
        for stage in (0, 1, 2)
        for dtype in ("bfloat16", "float32")
    }
    cases["stage 0, bfloat16, by DeepSpeed"] = Case(0, "bfloat16", flags="--zero_update deepspeed")
    cases["stage 2, bfloat16, 4 micro-batches"] = Case(2, "bfloat16", 4)
    unclipped = {"gradient_clipping": 0.0}
    cases["stage 2, bfloat16, no clipping"] = Case(2, "bfloat16", edits=unclipped)
    without = {**unclipped, "zero_optimization.compute_grad_norm": False}
    cases["stage 2, bfloat16, no norm"] = Case(2, "bfloat16", edits=without)
    reported = {name: reads_of_steps(case, device) for name, case in cases.items()}
    print(json.dumps(reported, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(reported))
