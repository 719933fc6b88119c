"""Weights and optimizer state of one rank, as named flat runs of float32 numbers.

ZeRO cuts every parameter where its partitions happen to end. A `Fragment` says which part of which
parameter one rank owns and where its fp32 master, exp_avg and exp_avg_sq lie in memory; written
under `kind|parameter|start`, these can be read back by any world size, stage and optimizer class.
adapters.py finds them in each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, log
from typing import Any

import torch
from torch import Tensor

MASTER, ADAM = "fp32", ("exp_avg", "exp_avg_sq")
# What each optimizer remembers of every weight.
MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), ADAM),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion"), ("exp_avg",)),
    "SGD": ("momentum_buffer",),
}


@dataclass(frozen=True)
class Fragment:
    """Elements start..start + length of one parameter, as this rank holds them."""

    name: str
    start: int
    length: int
    owner: Tensor  # the tensor that the base optimizer updates and keys its state by
    offset: int  # where in `owner` the fragment begins
    is_replicated: bool = False  # every rank holds it, and writes its share
    is_frozen: bool = False  # in no optimizer: no moments, and the precision of the model

    def view(self, tensor: Tensor) -> Tensor:
        """The fragment's part of `owner`, or of a moment laid out like it; 1-D, shares memory."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)

    def share(self, rank: int, world_size: int) -> Fragment:
        """The `rank`-th of `world_size` nearly equal parts."""
        first = self.length * rank // world_size
        last = self.length * (rank + 1) // world_size
        return replace(
            self, start=self.start + first, length=last - first, offset=self.offset + first
        )


@dataclass(frozen=True)
class ZeroState:
    """What one rank owns of the fp32 weights and moments, and how to put changes into force."""

    base: torch.optim.Optimizer
    fragments: list[Fragment]
    refresh: Callable[[], None]
    prepare: Callable[[], None]

    def runs(self, rank: int, world_size: int) -> Iterator[tuple[str, Tensor]]:
        """`kind|parameter|start` and a 1-D float32 view of what this rank has to write.

        Moments only once the optimizer has made them. Replicated state is shared out: each rank
        writes its 1 / world_size of every parameter. A frozen weight in low precision is a copy,
        not a view.
        """
        has_stepped = self.optimizer_step() is not None
        for f in self.fragments:
            part = f.share(rank, world_size) if f.is_replicated else f
            if not part.length:
                continue
            yield f"{MASTER}|{part.name}|{part.start}", part.view(part.owner).float()
            for kind in self.kinds:
                moment = self.base.state.get(part.owner, {}).get(kind)
                if moment is not None:
                    yield f"{kind}|{part.name}|{part.start}", part.view(moment)
                elif has_stepped and not part.is_frozen:  # no gradient ever came: as if of zeros
                    nothing = torch.zeros(part.length, device=part.owner.device)
                    yield f"{kind}|{part.name}|{part.start}", nothing

    @property
    def kinds(self) -> tuple[str, ...]:
        """The moments that the base optimizer keeps."""
        name = type(self.base).__name__
        has_none = name == "SGD" and not any(g["momentum"] for g in self.base.param_groups)
        return () if has_none else MOMENTS[name]

    def optimizer_step(self) -> int | None:
        """Updates the base optimizer has counted (SGD: 0, it counts none); None before any."""
        steps = [int(s.get("step", 0)) for s in self.base.state.values() if s]
        return max(steps, default=None)

    def start(self) -> None:
        """Moments of zeros, as the first update would make them, at step 0.

        Made by that, among what a first step has left in memory, they would split it for good.
        """
        for f in self.fragments:
            if not f.is_frozen and f.owner not in self.base.state:
                self.base.state[f.owner] = self._fresh_moments(f.owner, 0)

    def fill(self, read: Callable[[str, str, int, int], Tensor], step: int | None) -> None:
        """Fill every fragment from `read(kind, parameter, start, length)`.

        No rank waits for another here; `refresh`, which puts it into force, is collective.
        """
        self.prepare()
        trained = [f for f in self.fragments if not f.is_frozen]
        for owner in {id(f.owner): f.owner for f in trained}.values():
            owner.detach().zero_()  # padding between fragments, uninitialised at stage 3
            self.base.state.pop(owner, None)
            if step is not None:
                self.base.state[owner] = self._fresh_moments(owner, step)
        for f in self.fragments:
            f.view(f.owner).copy_(read(MASTER, f.name, f.start, f.length))
        for f in trained if step is not None else ():
            for kind in self.kinds:
                f.view(self.base.state[f.owner][kind]).copy_(read(kind, f.name, f.start, f.length))
        self._count_to(step or 0)

    def _fresh_moments(self, owner: Tensor, step: int) -> dict[str, Any]:
        keep = torch.preserve_format
        moments = {k: torch.zeros_like(owner, memory_format=keep) for k in self.kinds}
        if type(self.base).__name__ == "SGD":
            return moments
        if type(self.base).__module__.startswith("torch."):
            on_device = self.base.defaults.get("fused") or self.base.defaults.get("capturable")
            place = owner.device if on_device else torch.device("cpu")
            return {"step": torch.tensor(float(step), device=place), **moments}
        return {"step": step, **moments}

    def _count_to(self, step: int) -> None:
        """Let DeepSpeed's Adams count as if they had taken `step` updates.

        In C++ they keep beta^t as a product, one factor an update. A step number out of sequence
        makes it a power, which differs in the last bit, so the updates are replayed on nothing.
        """
        for group in self.base.param_groups:
            if "step" in group:  # FusedAdam's, from which it numbers a state that it makes itself
                group["step"] = step
        update = _update_in_cpp(self.base)
        if update is None:
            return
        # Beyond this 1 - beta^t is 1 in float32, however beta^t came about.
        least = max(self.base.param_groups[0].get("betas", (0.0,)))
        last = step if not 0 < least < 1 else min(step, ceil(-26 * log(2) / log(least)))
        for number in range(1, last + 1):
            update(number)


def _update_in_cpp(base: Any) -> Callable[[int], None] | None:
    """What takes update number t on tensors of no interest; None where nothing is kept in C++."""
    group, name = base.param_groups[0], type(base).__name__
    if name not in ("DeepSpeedCPUAdam", "FusedAdam"):
        return None
    if any(p.device.type != "cpu" for g in base.param_groups for p in g["params"]):
        return None  # the CUDA kernel takes powers
    weight, gradient, first, second = (torch.zeros(1) for _ in range(4))
    rates = group["lr"], *group["betas"], group["eps"]
    decay, corrected = group["weight_decay"], group["bias_correction"]
    if name == "DeepSpeedCPUAdam":
        return lambda t: base.ds_opt_adam.adam_update(
            base.opt_id, t, *rates, decay, corrected, weight, gradient, first, second
        )
    lists = [[gradient], [weight], [first], [second]]
    flag, mode = base._dummy_overflow_buf, base.adam_w_mode
    return lambda t: base.multi_tensor_adam(
        2048 * 32, flag, lists, *rates, t, mode, int(corrected), decay
    )
