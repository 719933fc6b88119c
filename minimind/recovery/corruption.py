"""Which ranks hold or compute something wrong, by comparing what all of them found.

With --verify_interval checksums of state are compared between ranks, and the passes of some rows
are repeated.
"""

from __future__ import annotations

import math
import random
import socket
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from minimind.checkpoint.directory import published_checkpoints, set_aside, step_of
from minimind.checkpoint.identity import hardware
from minimind.config.run_config import RunConfig
from minimind.data.rows.batches import Batches
from minimind.engine.compile import uncompiled
from minimind.engine.engine import Engine, mean_loss
from minimind.errors import CorruptionError
from minimind.report.run_logger import RunLogger
from minimind.runtime.collectives import on_rank_0
from minimind.runtime.device import CUDA, HOST, device_kind, widened

PIECE = 2**22  # elements that are summed at once: the sum converts them to int64 first
FP16_SCALE = 2.0**10  # scale of the loss, so that gradients in float16 are not too small
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes by their bytes
K = TypeVar("K", bound=Hashable)
Key = tuple[str, int, int]  # a slice of a weight: name, first element, number of elements


@dataclass(frozen=True)
class Replay:
    """Result of one forward and backward pass over some rows."""

    rows: int  # checksum of the token ids
    loss: float  # nats per token; 0 without targets
    norms: list[float]  # norm of the gradient of each weight; empty at stage 3
    sums: list[int]  # checksums of the loss and of these gradients


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The checksum of a tensor, int64 on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    parts = flat.view(INTEGERS[flat.element_size()]).split(PIECE)
    sums = [part.sum(dtype=torch.int64) for part in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def checksums(tensors: Iterable[tuple[K, Tensor]]) -> dict[K, int]:
    """Checksums by key, with one wait for each device; holds one tensor at a time."""
    by_device: dict[torch.device, dict[K, Tensor]] = {}
    for key, tensor in tensors:
        by_device.setdefault(tensor.device, {})[key] = sum_of_bits(tensor)
        del tensor
    found: dict[K, int] = {}
    for sums in by_device.values():
        found.update(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    return found


def is_sharded(engine: Engine) -> bool:
    """Whether a rank holds only a part of each weight (stage 3)."""
    return any(hasattr(p, "ds_tensor") for p in engine.model.parameters())


class GradientRecord:
    """Norms and checksums of the gradients of weights, each taken as soon as it is computed.

    The gradient itself is dropped: all of them at once would need as much memory as the weights.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        device = weights[0].device
        self.norms = [torch.zeros((), device=device) for _ in weights]
        self.sums = [torch.zeros((), dtype=torch.int64, device=device) for _ in weights]
        self._handles = [p.register_hook(partial(self._take, n)) for n, p in enumerate(weights)]

    def _take(self, number: int, grad: Tensor) -> Tensor:
        self.norms[number] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.sums[number] = sum_of_bits(grad)
        return grad.new_zeros(()).expand_as(grad)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def replay(engine: Engine, rows: Tensor, data_rank: int, is_whole: bool) -> Replay:
    """Compute loss and gradients of rows (B, T + 1) with the random state of `data_rank`.

    Gradients are not accumulated or reduced. `is_whole`: the rows are a micro-batch, for which the
    model is compiled. At stage 3 only the loss is computed, which is collective.
    """
    engine.seed(engine.seeded_step, data_rank)
    rows = rows.to(engine.device)
    norms: list[Tensor] = []
    sums = [sum_of_bits(rows)]
    if is_sharded(engine):
        loss_sum, targets = engine.loss_of(rows)
    else:
        loss_sum, targets, record = _loss_and_gradients(engine, rows, is_whole)
        norms, sums = record.norms, [*sums, *record.sums]
    sums.append(sum_of_bits(loss_sum))
    mean = widened(loss_sum) / targets.clamp(min=1)
    rows_sum, *others = torch.stack(sums).tolist()
    return Replay(rows_sum, float(mean), torch.stack(norms).tolist() if norms else [], others)


def _loss_and_gradients(
    engine: Engine, rows: Tensor, is_whole: bool
) -> tuple[Tensor, Tensor, GradientRecord]:
    model: Any = engine.model
    if not model.training:
        engine.backend.forward.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    record = GradientRecord(weights)
    scale = FP16_SCALE if engine.resolved.run.dtype == "float16" else 1.0
    try:
        with nullcontext() if is_whole else uncompiled(model):
            out = model(**engine.inputs_of(rows), **engine.trained_loss)
            total = mean_loss(out, out.targets.clamp(min=1)) * scale
            # Not backward(), whose hooks reduce gradients.
            torch.autograd.grad(total, weights, allow_unused=True)
    finally:
        record.close()
    return out.loss_sum.detach(), out.targets, record


def replicated_checksums(engine: Engine) -> dict[str, int]:
    """Checksums of what every rank holds in full, by kind and name.

    Buffers; without ZeRO also weights and moments; at stage 3 the small weights that each rank
    keeps.
    """
    model = engine.model
    tensors = {f"buffer|{name}": buffer for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        if getattr(p, "ds_persist", False) and p.numel() == p.ds_numel:
            tensors[f"weight|{name}"] = p
    state = engine.state()
    for f in state.fragments:
        if f.is_replicated:
            tensors |= {f"{kind}|{f.name}": values for kind, values in state.tensors_of(f).items()}
    return checksums(tensors.items())


def master_checksums(engine: Engine) -> dict[Key, int]:
    """Checksums of this rank's fp32 weights, rounded to the weights they are copied to."""
    return checksums(
        (key, master.to(weight.device, weight.dtype)) for key, weight, master in _pairs(engine)
    )


def weight_checksums(engine: Engine, keys: Mapping[Key, Any]) -> dict[Key, int]:
    """Checksums of slices of this rank's weights, except those that it has no copy of."""
    if is_sharded(engine):
        return checksums((key, weight) for key, weight, _ in _pairs(engine) if key in keys)
    weights = dict(engine.model.named_parameters())
    return checksums((key, weights[key[0]].view(-1).narrow(0, *key[1:])) for key in keys)


def _pairs(engine: Engine) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """Slices of weights on this rank that have an fp32 copy here, each with that copy."""
    weights = dict(engine.model.named_parameters())
    for f in engine.state().fragments:
        p: Any = weights[f.name]
        if not f.length or f.is_frozen or f.owner is p:
            continue
        if hasattr(p, "ds_tensor"):  # stage 3: the partition of this rank
            weight = p.ds_tensor.view(-1).narrow(0, 0, f.length)
        else:
            weight = p.detach().view(-1).narrow(0, f.start, f.length)
        yield (f.name, f.start, f.length), weight, f.view(f.owner)


# Relative differences that the order of summation explains: of a loss, of the norm of a gradient.
ROUNDING = {
    "float32": (1e-5, 1e-4),
    "tf32": (1e-3, 1e-2),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), (1e-3, 3e-2)),
    "float16": (1e-3, 1e-2),
}
EXACT = (0.0, 0.0)
SMALL = 1e-3  # of the whole gradient: norms below it are compared with this
MOST_NAMES = 2


@dataclass(frozen=True)
class RankState:
    """What one rank holds."""

    place: str  # host and GPU
    hardware: str
    replicated: dict[str, int]  # checksums of what every rank holds
    masters: dict[Key, int]  # checksums of its fp32 weights, rounded


@dataclass(frozen=True)
class RankCheck:
    """What one rank found with the holdings and rows of others."""

    stale: list[Key]  # weights that are not the masters of their owner
    own: tuple[Replay, Replay]  # its rows, computed twice
    neighbour: Replay  # the rows of the rank before it


@dataclass(frozen=True)
class Fault:
    """Something that differs; with `is_either`, one of the ranks is at fault."""

    kind: str  # rows, state, weights or computation
    ranks: list[int]
    text: str  # follows the names of the ranks
    is_either: bool = False


def owners(holdings: Sequence[RankState]) -> dict[Key, int]:
    """The rank that holds the master of each slice; of several, the first."""
    ranks: dict[Key, int] = {}
    for rank, holding in enumerate(holdings):
        for key in holding.masters:
            ranks.setdefault(key, rank)
    return ranks


def faults(
    holdings: Sequence[RankState], findings: Sequence[RankCheck], dtype: str, is_exact: bool
) -> list[Fault]:
    """Everything that differs between ranks or repetitions.

    `is_exact`: repetitions have to agree in every bit, as far as hardware is the same; otherwise up
    to the rounding of `dtype`.
    """
    weights = [*weight_faults(holdings, findings)]
    certain = {rank for fault in weights for rank in fault.ranks}
    result = [*weights]
    for fault in state_faults(holdings):
        known = sorted(certain & {*fault.ranks}) if fault.is_either else []
        result.append(replace(fault, ranks=known, is_either=False) if known else fault)
    wrong = {rank for fault in result for rank in fault.ranks}
    rounding = ROUNDING[dtype]
    return [*result, *_computation_faults(holdings, findings, wrong, rounding, is_exact)]


def state_faults(holdings: Sequence[RankState]) -> Iterator[Fault]:
    """Ranks whose replicated state is not that of most ranks on the same hardware.

    Without ZeRO every rank computes all of the state, on different hardware with other rounding.
    """
    names: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for model in dict.fromkeys(holding.hardware for holding in holdings):
        ranks = [r for r, holding in enumerate(holdings) if holding.hardware == model]
        for name in holdings[ranks[0]].replicated:
            sums = {rank: holdings[rank].replicated.get(name) for rank in ranks}
            if odd := _odd_ranks(sums):
                names.setdefault(odd, []).append(name)
    for (ranks_, is_either), several in names.items():
        text = f"holds a different {_list(several)} from the other ranks"
        yield Fault("state", list(ranks_), text, is_either)


def weight_faults(holdings: Sequence[RankState], findings: Sequence[RankCheck]) -> Iterator[Fault]:
    """Ranks whose weights are not the fp32 weights they were copied from.

    If no rank has the rounded master, the master is wrong or has not been copied.
    """
    owner_of, names = owners(holdings), dict[int, list[str]]()
    stale: dict[Key, list[int]] = {}
    for rank, finding in enumerate(findings):
        for key in finding.stale:
            stale.setdefault(key, []).append(rank)
    for key, ranks in stale.items():
        is_everywhere = len(ranks) == len(findings)
        for rank in [owner_of[key]] if is_everywhere else ranks:
            names.setdefault(rank, []).append(key[0])
    for rank, several in sorted(names.items()):
        yield Fault("weights", [rank], f"holds weights of {_list(several)} that are not its master")


def _computation_faults(
    holdings: Sequence[RankState],
    findings: Sequence[RankCheck],
    wrong: set[int],
    rounding: tuple[float, float],
    is_exact: bool,
) -> Iterator[Fault]:
    """Ranks that read or compute something else than before, or than their neighbour.

    Ranks that are `wrong` by what they hold compute something else for that reason.
    """
    n_ranks = len(findings)
    for rank, finding in enumerate(findings):
        if difference := _difference(*finding.own, EXACT if is_exact else rounding):
            wrong = wrong | {rank}
            text = f"computes {difference} the second time"
            yield Fault("computation", [rank], text)
    other: dict[int, str] = {}  # differences by the rank whose rows they are
    for rank in range(n_ranks if n_ranks > 1 else 0):
        after = (rank + 1) % n_ranks
        if wrong & {rank, after}:
            continue
        ours, theirs = findings[rank].own[0], findings[after].neighbour
        if ours.rows != theirs.rows:
            text = "reads different token ids for the same rows from the other"
            yield Fault("rows", sorted({rank, after}), text, is_either=True)
            continue
        is_same = holdings[rank].hardware == holdings[after].hardware
        if difference := _difference(ours, theirs, EXACT if is_exact and is_same else rounding):
            other[rank] = difference
    yield from _neighbour_faults(other, n_ranks)


def _neighbour_faults(other: Mapping[int, str], n_ranks: int) -> Iterator[Fault]:
    """Name the rank between two differences; of a difference that has none both ranks."""
    both = [rank for rank in other if (rank - 1) % n_ranks in other] if n_ranks > 2 else []
    for rank in sorted(both):
        yield Fault("computation", [rank], f"computes {other[rank]} for the same rows as others")
    for rank, difference in other.items():
        after = (rank + 1) % n_ranks
        pair = sorted((rank, after))
        if {rank, after}.isdisjoint(both) and (n_ranks > 2 or rank == min(other)):
            text = f"computes {difference} for the same rows as the other"
            yield Fault("computation", pair, text, is_either=True)


def _odd_ranks(sums: Mapping[int, Hashable]) -> tuple[tuple[int, ...], bool] | None:
    """The ranks that differ from most, and False; without a majority all of them, and True."""
    counts = Counter(sums.values()).most_common(2)
    if len(counts) < 2:
        return None
    if counts[0][1] == counts[1][1]:
        return tuple(sums), True
    return tuple(rank for rank, checksum in sums.items() if checksum != counts[0][0]), False


def _difference(first: Replay, second: Replay, rounding: tuple[float, float]) -> str:
    """What differs by more than `rounding`, or by a bit if that is EXACT; empty if nothing does."""
    of_loss, of_norm = rounding
    if rounding == EXACT:
        if first.sums == second.sums:
            return ""
    elif not _differs(first.loss, second.loss, of_loss, 0.0):
        least = SMALL * math.sqrt(math.fsum(norm * norm for norm in first.norms))
        pairs = zip(first.norms, second.norms, strict=True)
        if not any(_differs(a, b, of_norm, least) for a, b in pairs):
            return ""
    if first.loss != second.loss and not (math.isnan(first.loss) and math.isnan(second.loss)):
        return f"another loss ({second.loss:.9g} instead of {first.loss:.9g})"
    return "another gradient"


def _differs(first: float, second: float, rounding: float, least: float) -> bool:
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.isnan(first) != math.isnan(second) or first != second == second
    return abs(first - second) > rounding * max(abs(first), abs(second), least)


def _list(names: Sequence[str]) -> str:
    """`a, b and 3 more`."""
    unique = list(dict.fromkeys(name.replace("|", " of ") for name in names))
    more = f" and {len(unique) - MOST_NAMES} more" if len(unique) > MOST_NAMES else ""
    return ", ".join(unique[:MOST_NAMES]) + more


WHOLE = 4  # micro-batches of a step, from which on a check computes a whole one
SHARE = 6  # otherwise the part of the rows of a step that it computes


@dataclass
class CorruptionCheck:
    """Checks the state after a step, and computes some of the rows of the next step."""

    run: RunConfig
    engine: Engine
    first: int = 0  # step from which the run goes on
    last_passed: int | None = None  # step; None: none since `first`
    seconds: float = 0.0  # time of the last check
    places: list[str] = field(default_factory=list)  # places of the ranks, after a check
    _checks: int = 0
    _is_cost_known: bool = False

    @property
    def good(self) -> int:
        """The last step known to be good, or at which the run started."""
        return self.first if self.last_passed is None else self.last_passed

    def go_back(self, first: int) -> None:
        """Go on from an earlier step: checks after it no longer count."""
        if self.last_passed is not None and self.last_passed > first:
            self.last_passed = None
        self.first = first

    def rows_of_check(self, step: int, size: int) -> tuple[int, slice, bool]:
        """A micro-batch of the step after `step`, rows of it, and whether these are all.

        The same on every rank, and after a resume.
        """
        run, choose = self.run, random.Random(f"{self.run.seed} {step}")
        is_whole = run.accumulation_steps >= WHOLE
        rows = size if is_whole else max(1, size * run.accumulation_steps // SHARE)
        number, first = choose.randrange(run.accumulation_steps), choose.randrange(size - rows + 1)
        return number, slice(first, first + rows), rows == size

    def check(self, step: int, batches: Batches) -> list[Fault]:
        """Everything that is wrong, on every rank (collective)."""
        engine, run = self.engine, self.run
        device_kind(engine.device).synchronize(engine.device)
        started, before = time.perf_counter(), (engine.rank - 1) % engine.world_size
        first, again = (self._replay(step, batches, engine.rank) for _ in range(2))
        neighbour = first if before == engine.rank else self._replay(step, batches, before)
        holding = RankState(
            place_of(engine.device),
            kind_of(engine.device),
            replicated_checksums(engine),
            master_checksums(engine),
        )
        holdings = engine.gather(holding)
        self.places = [one.place for one in holdings]
        owner_of = owners(holdings)
        # Every rank has its own copy of replicated fp32 weights.
        expected = {key: holdings[rank].masters[key] for key, rank in owner_of.items()}
        expected |= holding.masters
        checksums = weight_checksums(engine, expected)
        stale = [key for key, one in checksums.items() if one != expected[key]]
        findings = engine.gather(RankCheck(stale, (first, again), neighbour))
        is_tf32 = run.tf32 and run.dtype == "float32" and device_kind(engine.device).has_tf32
        dtype = "tf32" if is_tf32 else run.dtype
        wrong = faults(holdings, findings, dtype, run.deterministic)
        self.seconds = time.perf_counter() - started
        self._checks += 1
        if not wrong:
            self.last_passed = step
        return wrong

    def _replay(self, step: int, batches: Batches, rank: int) -> Replay:
        number, part, is_whole = self.rows_of_check(step, batches.of(step).micro_batch_rows)
        rows = batches.micro_batch_of(step, rank, number)[part]
        return replay(self.engine, rows, rank, is_whole)

    def report(self, faults: list[Fault], step: int, logger: RunLogger, is_timed: bool) -> None:
        """Log a check; `is_timed`: the logger knows the time of a step."""
        logger.event("verified", step=step, seconds=self.seconds, passed=not faults)
        if faults:
            logger.event("corruption", step=step, faults=[self.fields(fault) for fault in faults])
            if self.run.on_corruption != "stop":
                text = self.text(faults)
                logger.print(f"warning: corruption at step {step}: {text}; the run continues")
        elif is_timed and self._checks > 1 and not self._is_cost_known:  # now warm
            self._is_cost_known = True
            interval = self.run.verify_interval
            share = self.seconds / (logger.seconds_per_step() * interval + self.seconds)
            logger.print(
                f"step {step}: checked for corruption in {self.seconds:.2g} s,"
                f" {share:.1%} of the time with --verify_interval {interval}"
            )

    def error(self, faults: list[Fault], root: Path) -> CorruptionError:
        """The error of --on_corruption stop (collective).

        Sets the checkpoints in `root` aside that are newer than the last good step.
        """
        exclude, step = "take that GPU or host out", self.last_passed
        path = on_rank_0(self.engine, lambda: _abandon_after(root, self.good))
        passed = f"the last check that passed, at step {step}"
        if step is None:
            passed = f"step {self.first}, where this run started; no check has passed since"
        remedy = f"{exclude} and train again: no checkpoint is left from before {passed}"
        if path is not None:
            remedy = f"{exclude} and continue from {path} (--resume), saved before {passed}"
        return CorruptionError(f"{self.text(faults)}; {remedy}", cause_rank=faults[0].ranks[0])

    def text(self, faults: list[Fault]) -> str:
        """`rank 1 (host b, cuda:1) holds ...; rank 2 ...`."""
        return "; ".join(map(self._sentence, faults))

    def _sentence(self, fault: Fault) -> str:
        names = [f"rank {rank} (host {self.places[rank]})" for rank in fault.ranks]
        return f"{(' or ' if fault.is_either else ' and ').join(names)} {fault.text}"

    def fields(self, fault: Fault) -> dict[str, Any]:
        """The fault in a `corruption` event."""
        hosts = [self.places[rank] for rank in fault.ranks]
        return {"kind": fault.kind, "ranks": fault.ranks, "hosts": hosts} | {
            "is_either": fault.is_either,
            "text": self._sentence(fault),
        }


def place_of(device: torch.device) -> str:
    """Host and GPU of this rank: `b, cuda:1`, on a CPU `b`."""
    gpu = "" if device_kind(device) is HOST else f", {device}"
    return f"{socket.gethostname()}{gpu}"


def kind_of(device: torch.device) -> str:
    """What decides how this rank rounds: ranks of one kind compute the same bits."""
    versions = f"torch {torch.__version__}"
    if device.type == CUDA.name:
        return f"{hardware(device)}, {versions}, cuDNN {torch.backends.cudnn.version()}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{hardware(device)}, {capability}, {torch.get_num_threads()} threads, {versions}"


def _abandon_after(root: Path, step: int) -> Path | None:
    """The newest checkpoint up to `step`; sets aside all that are newer."""
    paths = published_checkpoints(root)
    good = [path for path in paths if step_of(path) <= step]
    for path in paths[: len(paths) - len(good)]:
        set_aside(path, "abandoned")
    return good[0] if good else None
