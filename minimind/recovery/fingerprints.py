"""A few numbers of each block and step, by which `minimind compare` finds where two runs part.

With --fingerprints. The numbers of a tensor are its sum of squares, its sum, and its projection:
the sum of its elements times a key of the row and one of the column, which are hashes between -2
and 2. All three add up over micro-batches, ranks and slices, so they do not depend on how a step is
divided. An activation has a row per token, whose key is that of its row in the step times that of
its position. A weight is read in rows of WIDTH elements, whose keys depend on its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import shake_128
from inspect import getsourcelines, unwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind.engine.compile import compiled_methods
from minimind.engine.state import AVERAGE, GRADIENT, MASTER
from minimind.runtime.device import widened

if TYPE_CHECKING:
    from minimind.data.rows.batches import Batches
    from minimind.engine.engine import Engine, StepResult

WIDTH = 1024
SCALE = np.float32(3**0.5 / 2**15)
PIECE = WIDTH * 2**14  # elements of a weight that are copied at once
ROWS, ACTIVATION = "rows", "activation"  # kinds, beside those of engine/state.py
TOKENS = {"input_ids": "inputs", "shift_labels": "targets"}  # arguments of the model
Key = tuple[str, str]  # kind, and place: the name of a module


def place_of(parameter: str) -> str:
    """The module that a parameter is counted to: a part of a block, or one outside of blocks."""
    parts = parameter.split(".")
    block = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: min(block + 2, len(parts) - 1)]) or parameter


def watched(model: nn.Module, opaque: Iterable[nn.Module] = ()) -> dict[str, nn.Module]:
    """Embedding, blocks, their parts and final norm by name, but none inside of `opaque`."""
    names = {module: name for name, module in model.named_modules()}
    lists = (m for m in names if any(isinstance(one, nn.ModuleList) for one in m.children()))
    found = []
    for one in next(lists, nn.Module()).children():
        blocks = [*one] if isinstance(one, nn.ModuleList) else []
        found += [part for block in blocks for part in (block, *block.children())] or [one]
    inside = {one for module in opaque for one in module.modules() if one is not module}
    return {names[module]: module for module in found if module not in inside}


def line_of(kind: type) -> str:
    """Where the code of a module or an optimizer begins, such as minimind/model/decoder.py:181."""
    code: Any = unwrap(getattr(kind, "forward", kind))
    if code.__module__.split(".")[0] != kind.__module__.split(".")[0]:
        code = kind  # its forward pass is torch's
    try:
        line = getsourcelines(code)[1]
    except (OSError, TypeError):  # it was typed in, or is not Python
        return code.__module__
    return f"{code.__module__.replace('.', '/')}.py:{line}"


class Recorder:
    """Sums the numbers of a step: those of rows and activations by hooks, others by `add`."""

    def __init__(self, model: nn.Module | None = None, opaque: Iterable[nn.Module] = ()) -> None:
        """Without a model for parameters alone; see `watched`."""
        self.model, self.watched = model, watched(model, opaque) if model else {}
        self._known: dict[Any, Tensor] = {}
        self._sums: dict[Key, Tensor] = {}
        self._hooks: list[Any] = []

    @property
    def lines(self) -> dict[str, str]:
        """The code of each place."""
        return {name: line_of(type(module)) for name, module in self.watched.items()}

    def begin(
        self,
        rows: range = range(sys.maxsize),
        part: int = 0,
        counts: tuple[bool, bool] = (True, True),
    ) -> None:
        """Record the forward passes from now on, which read these rows of a step, then padding.

        part: which of the equal parts of the positions activations have. counts: whether those of
        rows and of activations are counted, and not by another rank.
        """
        self._rows, self._part, self._counts = rows, part, counts
        assert self.model is not None
        self._sums = {}
        begin = self.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        self._hooks = [begin]
        for name, module in self.watched.items():

            def take(_: nn.Module, given: Any, output: Any, name: str = name) -> None:
                self._take(name, output)

            self._hooks.append(module.register_forward_hook(take))

    def add(self, kind: str, name: str, values: Tensor, start: int = 0) -> None:
        """Count elements of a parameter from `start` on."""
        flat = values.detach().reshape(-1)
        columns = self._keys("column", 0, WIDTH, flat.device)
        for piece in flat.split(PIECE):
            before = start % WIDTH
            padding = before, -(before + len(piece)) % WIDTH
            matrix = F.pad(piece.float(), padding) if any(padding) else piece.float()
            matrix = matrix.view(-1, WIDTH)
            rows = self._keys(name, start // WIDTH, len(matrix), flat.device)
            self._count(kind, place_of(name), matrix, rows, columns)
            start += len(piece)

    def end(self) -> dict[Key, list[float]]:
        """Stop, and return the numbers: sums of squares, sums and projections."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, by_device = [], dict[Any, dict[Key, Tensor]]()
        for key, numbers in self._sums.items():
            by_device.setdefault(numbers.device, {})[key] = numbers
        found: dict[Key, list[float]] = {key: [] for key in self._sums}  # in their order
        for sums in by_device.values():
            found.update(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))
        return found

    def _begin_pass(self, _: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        self._seen: set[str] = set()
        named = {**dict(zip(TOKENS, given, strict=False)), **named}
        ids = named["input_ids"]
        self._size, self._read, self._rows = (
            len(ids),
            self._rows[: len(ids)],
            self._rows[len(ids) :],
        )
        if not self._read:
            return
        keys = self._keys("row", self._read.start, len(self._read), ids.device)
        positions = self._keys("position", 0, ids.shape[1], ids.device)
        for name, place in TOKENS.items():
            if named.get(name) is not None and self._counts[0]:
                tokens = widened(named[name][: len(self._read)])
                self._count(ROWS, place, tokens, keys, positions)

    @torch.no_grad()
    def _take(self, name: str, output: Any) -> None:
        """Count an activation (B, T, E), once if the backward pass computes it again."""
        x = output[0] if isinstance(output, tuple) else output
        is_row = torch.is_tensor(x) and x.ndim == 3 and len(x) == self._size
        if name in self._seen or not is_row or not self._counts[1] or not self._read:
            return
        self._seen.add(name)
        x, (length, width) = x[: len(self._read)], x.shape[1:]
        rows = self._keys("row", self._read.start, len(x), x.device)
        positions = self._keys("position", self._part * length, length, x.device)
        columns = self._keys("column", 0, width, x.device)
        tokens = torch.outer(rows, positions).view(-1)
        self._count(ACTIVATION, name, x.detach().float().reshape(-1, width), tokens, columns)

    @torch.no_grad()
    def _count(self, kind: str, place: str, matrix: Tensor, rows: Tensor, columns: Tensor) -> None:
        with torch.autocast(matrix.device.type, enabled=False):
            projected = matrix @ columns.to(matrix.dtype) * rows
        # Norms of rows: torch's norm of a large tensor has few digits on a CPU.
        each = torch.linalg.vector_norm(matrix, dim=1), matrix.sum(1), projected
        squares, *sums = map(widened, each)
        numbers = torch.stack([squares.square().sum(), *(one.sum() for one in sums)])
        before = self._sums.get((kind, place))
        self._sums[kind, place] = numbers if before is None else before + numbers

    def _keys(self, name: str, first: int, count: int, device: torch.device) -> Tensor:
        """Keys `first` and after it of a sequence, float32, of mean 0 and variance 1."""
        known = name, first, count, device
        if known not in self._known:
            digest = shake_128(name.encode()).digest(2 * (first + count))
            words = np.frombuffer(digest, "<u2")[first:].astype(np.float32)
            self._known[known] = torch.from_numpy((words - 32767.5) * SCALE).to(device)
        return self._known[known]


def as_event(step: int, numbers: Mapping[Key, list[float]], **fields: Any) -> dict[str, Any]:
    """Fields of the event `fingerprint`: by kind and place the norm, the sum, the projection."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for (kind, place), (squares, *others) in numbers.items():
        kinds.setdefault(kind, {})[place] = [squares**0.5, *others]
    return {"step": step, **fields, "numbers": kinds}


class Fingerprints:
    """Records those of an engine's steps, over all ranks."""

    def __init__(self, engine: Engine, batches: Batches) -> None:
        self.engine, self.batches = engine, batches
        is_compiled = engine.resolved.run.compile == "on"
        compiled = compiled_methods(engine.model) if is_compiled else []
        # Hooks inside of a graph would not run.
        opaque = [one for one, name in compiled if one is not engine.model or name == "forward"]
        self._recorder, self._has_told_lines = Recorder(engine.model, opaque), False

    def begin(self, step: int) -> None:
        """Record the step that `step` steps are before."""
        engine, parallel = self.engine, self.engine.parallel
        positions = self.batches.order.positions(step)
        counts = parallel.is_first(engine.rank), parallel.is_first(engine.rank)
        if engine.sequence:
            counts = counts[0], True
        share = self.batches.order.of(step).share(engine.data_rank, parallel.data_size)
        self._recorder.begin(share, engine.rank % parallel.sequence, counts)
        self._rows, self._state = [positions.start, positions.stop], engine.state()
        self._taken = self._state.base.register_step_pre_hook(self._add_gradients)

    def _add_gradients(self, *_: Any) -> None:
        """Hook: the optimizer is about to take reduced, clipped gradients, or some of them."""
        self._add(self._state.gradients(self.engine.rank, self.engine.world_size))

    def _add(self, slices: Iterator[tuple[str, Tensor]]) -> None:
        for key, values in slices:
            kind, name, start = key.split("|")
            self._recorder.add(kind, name, values, int(start))

    def end(self, step: int, result: StepResult) -> dict[str, Any]:
        """The fields of the event of this step, over all ranks (collective)."""
        engine, state = self.engine, self._state
        self._taken.remove()
        self._add(state.slices(engine.rank, engine.world_size))
        own, names = self._recorder.end(), [*state.shapes(engine.model)]
        kinds = dict.fromkeys(kind for name in names for kind in state.kinds_of(name))
        places = dict.fromkeys(map(place_of, names))
        # Every rank sums the same keys. Only the first of those with equal rows has activations.
        taken = [key for key in own if key[0] == ACTIVATION]  # in the order of the forward pass
        keys: list[Key] = [(ACTIVATION, name) for name in self._recorder.watched]
        keys += [(ROWS, place) for place in TOKENS.values()]
        keys += [(kind, p) for kind in (GRADIENT, *kinds, MASTER, AVERAGE) for p in places]
        flat = [number for key in keys for number in (key in own, *own.get(key, [0.0] * 3))]
        loss, count, *flat = engine.sum_over_ranks(
            [float(result.loss_sum), float(result.tokens), *flat]
        )
        sums = {key: flat[4 * n : 4 * n + 4] for n, key in enumerate(keys)}
        norm = None if result.grad_norm is None else float(result.grad_norm)
        fields: dict[str, Any] = {"rows": self._rows, "lr": result.lr, "grad_norm": norm}
        if not self._has_told_lines:
            self._has_told_lines = True
            optimizer = {"optimizer": line_of(type(state.base))}
            fields["lines"] = {**self._recorder.lines, **optimizer}
        in_order = {key: sums[key] for key in (*taken, *keys)}
        numbers = {key: numbers for key, (is_there, *numbers) in in_order.items() if is_there}
        return as_event(step, numbers, loss=loss / max(count, 1.0), **fields)
