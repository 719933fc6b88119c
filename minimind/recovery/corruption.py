"""Which ranks hold or compute something wrong, by comparing what all of them found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minimind.engine.replay import Key, Replay

# Relative differences that the order of summation explains: of a loss, of the norm of a gradient.
ROUNDING = {
    "float32": (1e-5, 1e-4),
    "tf32": (1e-3, 1e-2),
    "bfloat16": (1e-3, 3e-2),
    "float16": (1e-3, 1e-2),
}
EXACT = (0.0, 0.0)
SMALL = 1e-3  # of the whole gradient: norms below it are compared with this
MOST_NAMES = 2


@dataclass(frozen=True)
class Holding:
    """What one rank holds."""

    place: str  # host and GPU
    hardware: str
    replicated: dict[str, int]  # checksums of what every rank holds
    masters: dict[Key, int]  # checksums of its fp32 weights, rounded


@dataclass(frozen=True)
class Finding:
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


def owners(holdings: Sequence[Holding]) -> dict[Key, int]:
    """The rank that holds the master of each slice; of several, the first."""
    found: dict[Key, int] = {}
    for rank, holding in enumerate(holdings):
        for key in holding.masters:
            found.setdefault(key, rank)
    return found


def faults(
    holdings: Sequence[Holding], findings: Sequence[Finding], dtype: str, is_exact: bool
) -> list[Fault]:
    """Everything that differs between ranks or repetitions.

    `is_exact`: repetitions have to agree in every bit, as far as hardware is the same; otherwise up
    to the rounding of `dtype`.
    """
    weights = [*weight_faults(holdings, findings)]
    certain = {rank for fault in weights for rank in fault.ranks}
    found = [*weights]
    for fault in state_faults(holdings):
        known = sorted(certain & {*fault.ranks}) if fault.is_either else []
        found.append(replace(fault, ranks=known, is_either=False) if known else fault)
    wrong = {rank for fault in found for rank in fault.ranks}
    rounding = ROUNDING[dtype]
    return [*found, *_computation_faults(holdings, findings, wrong, rounding, is_exact)]


def state_faults(holdings: Sequence[Holding]) -> Iterator[Fault]:
    """Ranks whose replicated state is not that of most ranks on the same hardware.

    Without ZeRO every rank computes all of the state, on different hardware with other rounding.
    """
    names: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for hardware in dict.fromkeys(holding.hardware for holding in holdings):
        ranks = [r for r, holding in enumerate(holdings) if holding.hardware == hardware]
        for name in holdings[ranks[0]].replicated:
            sums = {rank: holdings[rank].replicated.get(name) for rank in ranks}
            if odd := _odd_ranks(sums):
                names.setdefault(odd, []).append(name)
    for (ranks_, is_either), several in names.items():
        text = f"holds another {_list(several)} than the other ranks"
        yield Fault("state", list(ranks_), text, is_either)


def weight_faults(holdings: Sequence[Holding], findings: Sequence[Finding]) -> Iterator[Fault]:
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
    holdings: Sequence[Holding],
    findings: Sequence[Finding],
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
    other: dict[int, str] = {}  # by rank whose rows they are
    for rank in range(n_ranks if n_ranks > 1 else 0):
        after = (rank + 1) % n_ranks
        if wrong & {rank, after}:
            continue
        own, theirs = findings[rank].own[0], findings[after].neighbour
        if own.rows != theirs.rows:
            text = "reads other token ids for the same rows than the other"
            yield Fault("rows", sorted({rank, after}), text, is_either=True)
            continue
        is_same = holdings[rank].hardware == holdings[after].hardware
        if difference := _difference(own, theirs, EXACT if is_exact and is_same else rounding):
            other[rank] = difference
    yield from _neighbour_faults(other, n_ranks)


def _neighbour_faults(other: Mapping[int, str], n_ranks: int) -> Iterator[Fault]:
    """Name the rank between two differences; of a difference that has none both ranks."""
    both = [rank for rank in other if (rank - 1) % n_ranks in other] if n_ranks > 2 else []
    for rank in sorted(both):
        yield Fault("computation", [rank], f"computes {other[rank]} for the same rows than others")
    for rank, difference in other.items():
        after = (rank + 1) % n_ranks
        pair = sorted((rank, after))
        if {rank, after}.isdisjoint(both) and (n_ranks > 2 or rank == min(other)):
            text = f"computes {difference} for the same rows than the other"
            yield Fault("computation", pair, text, is_either=True)


def _odd_ranks(sums: Mapping[int, Hashable]) -> tuple[tuple[int, ...], bool] | None:
    """The ranks that differ from most, and False; without a majority all of them, and True."""
    counts = Counter(sums.values()).most_common(2)
    if len(counts) < 2:
        return None
    if counts[0][1] == counts[1][1]:
        return tuple(sums), True
    return tuple(rank for rank, one in sums.items() if one != counts[0][0]), False


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
