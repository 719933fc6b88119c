"""Weights and optimizer state of one rank as named flat fp32 slices.

ZeRO partitions split parameters at arbitrary offsets. A `Fragment` is the part of a parameter that
a rank owns, with the location of its fp32 master and moments. Stored as `kind|parameter|start`,
fragments can be read by any world size, stage and optimizer class. adapters.py finds them in each
engine. Under tensor parallelism a rank holds part of a weight, whose place in the whole is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, log
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimind.config.optimizers import ADAM, KINDS_OF_CLASS, MOMENTUM
from minimind.errors import CheckpointError
from minimind.runtime.collectives import lost_peers

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
OF_HEADS = ("q_norm", "k_norm")  # whole on every rank, and applied to its own heads only
Run = tuple[int, Tensor]  # start in the whole weight, values


def layer_specs() -> dict[str, Any]:
    """DeepSpeed's `partition_config` for the decoder; layers that are not named stay whole."""
    kinds = {"column": BY_ROWS, "row": BY_COLUMNS}  # DeepSpeed names them by the transposed matrix
    specs = [
        {"patterns": [rf".*\.({'|'.join(names)})\.weight$"], "partition_type": kind}
        for kind, names in kinds.items()
    ]
    return {"use_default_specs": False, "layer_specs": specs}


@dataclass(frozen=True)
class TensorSplit:
    """The part of each divided weight that rank `rank` of a tensor-parallel group holds."""

    rank: int
    size: int
    group: Any
    shapes: Mapping[str, tuple[int, int]]  # shapes of the parts, by the name of the weight

    @classmethod
    def of(cls, model: nn.Module, rank: int, size: int, group: Any) -> TensorSplit:
        """The split of a model whose layers were divided by `layer_specs`."""
        shapes = {
            name: (p.shape[0], p.shape[1])
            for name, p in model.named_parameters()
            if _layer(name) in (*BY_ROWS, *BY_COLUMNS)
        }
        return cls(rank, size, group, shapes)

    def whole_shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """Shape of the whole weight; this rank holds a part of `shape`."""
        if name not in self.shapes:
            return list(shape)
        rows, columns = shape
        by_rows = _layer(name) in BY_ROWS
        return [rows * self.size, columns] if by_rows else [rows, columns * self.size]

    def runs(self, name: str, start: int, values: Tensor) -> Iterator[Run]:
        """Runs of the whole weight for elements of this rank's part, 1-D from `start` on.

        Collective over the group for a weight divided by columns, where a row is in pieces: whole
        rows are gathered, and each rank yields some of them. All ranks have the same `start` and
        the same number of values.
        """
        if name not in self.shapes:
            yield start, values
            return
        rows, columns = self.shapes[name]
        if _layer(name) in BY_ROWS:
            yield self.rank * rows * columns + start, values
            return
        end = start + len(values)
        first, last = -(-start // columns), end // columns  # rows that are complete
        borders = [first * columns, last * columns] if first < last else [min(first * columns, end)]
        for begin, stop in ((start, borders[0]), (borders[-1], end)):
            if begin < stop:
                row, column = divmod(begin, columns)
                place = (row * self.size + self.rank) * columns + column
                yield place, values[begin - start : stop - start]
        if first < last:
            complete = values[borders[0] - start : borders[1] - start].view(-1, columns)
            share = slice(
                len(complete) * self.rank // self.size, len(complete) * (self.rank + 1) // self.size
            )
            parts = [part[share] for part in self._gather(complete)]
            if len(parts[0]):
                place = (first + share.start) * columns * self.size
                yield place, torch.cat(parts, dim=1).view(-1)

    def _gather(self, values: Tensor) -> list[Tensor]:
        """The values of every rank of the group, which have the same shape (collective)."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with lost_peers():
            dist.all_gather(parts, values.contiguous(), group=self.group)
        return parts

    def read(
        self, read: Callable[[int, int], Tensor], name: str, start: int, length: int
    ) -> Tensor:
        """Elements of this rank's part; `read` returns elements (start, length) of the whole."""
        if name not in self.shapes:
            return read(start, length)
        rows, columns = self.shapes[name]
        if _layer(name) in BY_ROWS:
            return read(self.rank * rows * columns + start, length)
        first, last = start // columns, -(-(start + length) // columns)
        width = columns * self.size
        whole = read(first * width, (last - first) * width).view(-1, width)
        part = whole[:, self.rank * columns : (self.rank + 1) * columns].reshape(-1)
        return part[start - first * columns :][:length]


def sum_partial_gradients(model: nn.Module, group: Any) -> None:
    """Sum the gradients of whole weights that see only some heads on each rank, as computed."""

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    for name, p in model.named_parameters():
        if _layer(name) in OF_HEADS and p.requires_grad:
            p.register_hook(summed)


def gradient_norm(model: nn.Module, split: TensorSplit | None) -> Tensor:
    """Norm of the gradients of the whole weights; every rank has a part of each."""
    divided, whole = [], []
    for name, p in model.named_parameters():
        if p.grad is not None:
            (divided if split and name in split.shapes else whole).append(p.grad)
    norm = torch.nn.utils.get_total_norm(whole)
    if split is None:
        return norm
    squares = torch.nn.utils.get_total_norm(divided).square()
    squares += norm.square() / split.size  # equal on every rank, and so is the sum of both
    with lost_peers():
        dist.all_reduce(squares, group=split.group)
    return squares.sqrt()


def _layer(name: str) -> str:
    """Name of the layer that a parameter belongs to."""
    return name.split(".")[-2] if "." in name else ""


MASTER, AVERAGE, GRADIENT = "fp32", "ema", "gradient"


@dataclass(frozen=True)
class Fragment:
    """Elements start to start + length of one parameter, held by this rank.

    Under tensor parallelism the parameter is this rank's part of a weight.
    """

    name: str
    start: int
    length: int
    owner: Tensor  # tensor that the base optimizer updates, the key of its state
    offset: int  # start of the fragment in `owner`
    is_replicated: bool = False  # all ranks hold it and save a share each
    is_frozen: bool = False  # it is in no optimizer: no moments, dtype of the model

    def view(self, tensor: Tensor) -> Tensor:
        """1-D view of the fragment in `owner`, or in a moment of the same layout."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)

    def share(self, rank: int, world_size: int) -> Fragment:
        """Return part `rank` of `world_size` nearly equal parts."""
        first = self.length * rank // world_size
        last = self.length * (rank + 1) // world_size
        return replace(
            self, start=self.start + first, length=last - first, offset=self.offset + first
        )


@runtime_checkable
class Quantized(Protocol):
    """An optimizer that stores moments in another form than fp32."""

    def unpacked(self, owner: Tensor, kind: str, start: int, length: int) -> Tensor:
        """Values of a moment of `owner`, 1-D fp32."""
        ...

    def pack(self, owner: Tensor, moments: dict[str, Any]) -> bool:
        """Store `step` and fp32 moments by kind; return whether it holds them exactly."""
        ...


@dataclass(frozen=True)
class ZeroState:
    """The fp32 weights and moments of one rank, and how to apply changes to them."""

    base: torch.optim.Optimizer
    fragments: list[Fragment]
    refresh: Callable[[], None]
    prepare: Callable[[], None]
    averages: Mapping[int, Tensor] = field(default_factory=dict)  # average by id of the owner
    split: TensorSplit | None = None  # how tensor-parallel ranks split the weights

    def shapes(self, model: nn.Module) -> dict[str, list[int]]:
        """Full shapes of all parameters, also at stage 3 and under tensor parallelism."""
        local = {n: list(getattr(p, "ds_shape", p.shape)) for n, p in model.named_parameters()}
        if self.split is None:
            return local
        return {name: self.split.whole_shape(name, shape) for name, shape in local.items()}

    def slices(self, rank: int, world_size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield `kind|parameter|start` and 1-D fp32 values for all that this rank saves.

        Moments exist after the first step. Each rank saves a share of every replicated parameter.
        The values are a view, except those of a frozen low-precision weight and of a weight divided
        by columns. For the latter the call is collective over the tensor-parallel group.
        """
        has_stepped = any(self.base.state.values())
        yield from self._slices(rank, world_size, lambda part: self._values(part, has_stepped))

    def gradients(self, rank: int, world_size: int) -> Iterator[tuple[str, Tensor]]:
        """The same of the gradients that the base optimizer is about to take, as it has them.

        DeepSpeed has it take one group after another, and with offload keeps the gradients of all.
        """
        taken = {id(p) for group in self.base.param_groups for p in group["params"]}

        def gradient_of(part: Fragment) -> Iterator[tuple[str, Tensor]]:
            if part.owner.grad is not None and id(part.owner) in taken:
                yield GRADIENT, part.view(part.owner.grad)

        yield from self._slices(rank, world_size, gradient_of)

    def _slices(
        self,
        rank: int,
        world_size: int,
        values_of: Callable[[Fragment], Iterator[tuple[str, Tensor]]],
    ) -> Iterator[tuple[str, Tensor]]:
        for f in self.fragments:
            part = self._share(f, rank, world_size)
            if not part.length:
                continue
            for kind, values in values_of(part):
                if self.split is None:
                    yield f"{kind}|{part.name}|{part.start}", values
                    continue
                for start, run in self.split.runs(part.name, part.start, values):
                    yield f"{kind}|{part.name}|{start}", run

    def _share(self, f: Fragment, rank: int, world_size: int) -> Fragment:
        """The part of `f` that this rank saves of all ranks that hold the same."""
        if self.split is None:
            return f.share(rank, world_size) if f.is_replicated else f
        size = self.split.size
        if f.name in self.split.shapes:
            return f.share(rank // size, world_size // size) if f.is_replicated else f
        return f.share(rank, world_size) if f.is_replicated else f.share(self.split.rank, size)

    def _values(self, part: Fragment, has_stepped: bool) -> Iterator[tuple[str, Tensor]]:
        """Kind and 1-D fp32 values of all that is saved of a fragment."""
        yield MASTER, part.view(part.owner).float()
        if (average := self.averages.get(id(part.owner))) is not None:
            yield AVERAGE, part.view(average)
        for kind in self.kinds_of(part.name):
            if (moment := self._moment(part, kind)) is not None:
                yield kind, moment
            elif has_stepped and not part.is_frozen:  # never had a gradient
                yield kind, torch.zeros(part.length, device=part.owner.device)

    def _moment(self, f: Fragment, kind: str) -> Tensor | None:
        """1-D fp32 values of a moment of a fragment: a view, unless they are stored in 8 bits."""
        state = self.base.state.get(f.owner, {})
        if isinstance(self.base, Quantized):
            return self.base.unpacked(f.owner, kind, f.offset, f.length) if state else None
        return f.view(state[kind]) if kind in state else None

    def tensors_of(self, f: Fragment) -> dict[str, Tensor]:
        """Master, average and moments of a fragment by kind, 1-D, as far as they exist."""
        average = self.averages.get(id(f.owner))
        tensors = {kind: self._moment(f, kind) for kind in self.kinds_of(f.name)}
        tensors[MASTER] = f.view(f.owner)
        tensors[AVERAGE] = None if average is None else f.view(average)
        return {kind: tensor for kind, tensor in tensors.items() if tensor is not None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments of the base optimizer."""
        kinds = KINDS_OF_CLASS[type(self.base).__name__]
        if kinds == (MOMENTUM,) and not any(g["momentum"] for g in self.base.param_groups):
            return ()
        return kinds

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Names of the moments of one parameter."""
        muon_names = getattr(self.base, "muon_names", None)
        if muon_names is None:
            return self.kinds
        return (MOMENTUM,) if name in muon_names else ADAM

    def optimizer_step(self) -> int | None:
        """Step count of the base optimizer (SGD: 0); None before the first update.

        Counts on a device are read together, with one wait.
        """
        states = [state for state in self.base.state.values() if state]
        steps: list[Any] = [state["step"] for state in states if "step" in state]
        if states and not steps:
            return 0
        if steps and all(torch.is_tensor(step) for step in steps):
            steps = torch.stack([step.to(steps[0].device) for step in steps]).tolist()
        return max((int(step) for step in steps), default=None)

    def start(self) -> None:
        """Allocate zero moments at step 0.

        If the first update allocated them, between activations, memory would stay fragmented.
        """
        for f in self.fragments:
            if not f.is_frozen and f.owner not in self.base.state:
                self._store(f, self._fresh_moments(f, 0))

    def fill(self, read: Callable[[str, str, int, int], Tensor], step: int | None) -> None:
        """Fill every fragment from `read(kind, parameter, start, length)`.

        Not collective, unlike `refresh`, which applies the values.
        """
        self.prepare()
        by_owner: dict[int, list[Fragment]] = {}
        for f in self.fragments:
            if not f.is_frozen:
                by_owner.setdefault(id(f.owner), []).append(f)
        for f, *_ in by_owner.values():
            f.owner.detach().zero_()  # padding is uninitialized at stage 3
            self.base.state.pop(f.owner, None)
        for f in self.fragments:
            f.view(f.owner).copy_(self._read(read, MASTER, f))
            if (average := self.averages.get(id(f.owner))) is not None:
                f.view(average).copy_(self._read(read, AVERAGE, f))
        for parts in by_owner.values() if step is not None else ():
            moments = self._fresh_moments(parts[0], step or 0)
            for f in parts:
                for kind in self.kinds_of(f.name):
                    f.view(moments[kind]).copy_(self._read(read, kind, f))
            self._store(parts[0], moments)
        self._set_step_count(step or 0)

    def _store(self, f: Fragment, moments: dict[str, Any]) -> None:
        """Give the optimizer the moments of the tensor that holds `f`."""
        if not isinstance(self.base, Quantized):
            self.base.state[f.owner] = moments
        elif not self.base.pack(f.owner, moments):
            raise CheckpointError(
                f"{f.name}: its moments were saved by another optimizer, ZeRO stage or number of"
                f" processes, and {type(self.base).__name__} here cannot hold them exactly; use"
                " those that saved them, or --optimizer adamw --allow_change lr, or load only the"
                " weights (--init_from)"
            )

    def _read(self, read: Callable[[str, str, int, int], Tensor], kind: str, f: Fragment) -> Tensor:
        """Elements of a fragment from `read`, which has whole weights."""
        if self.split is None:
            return read(kind, f.name, f.start, f.length)
        return self.split.read(partial(read, kind, f.name), f.name, f.start, f.length)

    def _fresh_moments(self, f: Fragment, step: int) -> dict[str, Any]:
        """Zero moments of the tensor that holds `f` and other parameters of the same kinds."""
        keep, kinds = torch.preserve_format, self.kinds_of(f.name)
        moments: dict[str, Any] = {
            kind: torch.zeros_like(f.owner, memory_format=keep) for kind in kinds
        }
        if MOMENTUM in kinds or not kinds:  # nothing counts updates
            return moments
        if type(self.base).__module__.startswith(("torch.", "minimind.")):
            on_device = self.base.defaults.get("fused") or self.base.defaults.get("capturable")
            device = f.owner.device if on_device else torch.device("cpu")
            return {"step": torch.tensor(float(step), device=device), **moments}
        return {"step": step, **moments}

    def _set_step_count(self, step: int) -> None:
        """Set the step count of DeepSpeed's Adams.

        In C++ they keep beta^t as a running product. For a step number out of sequence they compute
        a power, which differs in the last bit, so the updates are replayed on dummy tensors.
        """
        for group in self.base.param_groups:
            if "step" in group:  # FusedAdam numbers new states from it
                group["step"] = step
        update = _cpp_update(self.base)
        if update is None:
            return
        # Beyond this 1 - beta^t rounds to 1 in float32.
        beta = max(self.base.param_groups[0].get("betas", (0.0,)))
        last = step if not 0 < beta < 1 else min(step, ceil(-26 * log(2) / log(beta)))
        for number in range(1, last + 1):
            update(number)


def _cpp_update(base: Any) -> Callable[[int], None] | None:
    """Return a function that runs update t on dummy tensors; None without C++ state."""
    group, name = base.param_groups[0], type(base).__name__
    if name not in ("DeepSpeedCPUAdam", "FusedAdam"):
        return None
    if any(p.device.type != "cpu" for g in base.param_groups for p in g["params"]):
        return None  # the CUDA kernel computes powers
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
