"""What every rank must have alike: one digest of each rank, and values only where digests differ.

Ranks compare over a store, before they have a process group: a group of ranks that differ in
device, model or precision may wait for ever.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from minimind.runtime.durable_files import fingerprint
from minimind.runtime.secret_keys import without_secret
from minimind.runtime.urls import masked_values

LONGEST = 200  # characters of a value that are shown
READ_BY_ALL_S = 10.0  # seconds that rank 0, which may hold the store, stays for the others

Kinds = Mapping[str, Mapping[str, "Told"]]  # values by name, by kind; kinds in order of precedence


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def add(self, key: str, amount: int, /) -> int: ...


@dataclass(frozen=True)
class Told:
    """A JSON value of this rank, and where it is from."""

    value: Any
    origin: str = ""

    def shown(self, name: str) -> str:
        """The value with what must not be shown left out, and its origin.

        `name` begins with the key of the value.
        """
        value = masked_values(without_secret(name.split()[0], self.value))
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        text = "none" if value is None else text
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        return f"{text} ({self.origin})" if self.origin else text


@dataclass(frozen=True)
class Difference:
    """The first value that rank 0 and the first other rank do not have alike."""

    kind: str
    name: str
    rank: int  # the other
    values: tuple[str, str]  # as shown: of rank 0 and of the other
    hosts: tuple[str, str]

    def __str__(self) -> str:
        ours, theirs = self.values
        if ours == theirs:
            theirs = "another in what is not shown"
        return (
            f"rank 0 ({self.hosts[0]}) has {ours}, rank {self.rank} ({self.hosts[1]}) has {theirs}"
        )


def first_difference(store: Store, rank: int, world_size: int, kinds: Kinds) -> Difference | None:
    """The first difference between rank 0 and another rank, the same on every rank; collective.

    Each rank sends 32 bytes, and rank 0 and one that differs also what they have.
    """
    own = fingerprint(
        {kind: {name: one.value for name, one in kinds[kind].items()} for kind in kinds}
    )
    other = first_other(store, rank, world_size, "digest", own)
    if other is None:
        return None
    if rank in (0, other):
        store.set(f"told/{rank}", json.dumps([socket.gethostname(), _sent(kinds)]))
    (host, ours), (its_host, theirs) = (json.loads(store.get(f"told/{n}")) for n in (0, other))
    store.add("read", 1)
    deadline = time.monotonic() + READ_BY_ALL_S
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.02)
    kind, name, values = next(_differing(ours, theirs))
    return Difference(kind, name, other, values, (host, its_host))


def first_other(store: Store, rank: int, world_size: int, name: str, value: str) -> int | None:
    """The first rank whose value is not that of rank 0, the same on every rank; collective."""

    def first(values: list[str]) -> str:
        return next((str(other) for other, its in enumerate(values) if its != value), "")

    differs = _decided(store, rank, world_size, name, value, first)
    return int(differs) if differs else None


def smallest(store: Store, rank: int, world_size: int, name: str, value: int) -> int:
    """The smallest value of all ranks; collective."""
    return int(
        _decided(store, rank, world_size, name, str(value), lambda values: min(values, key=int))
    )


def of_rank_0(store: Store, rank: int, world_size: int, name: str, value: str) -> str:
    """The value of rank 0; collective."""
    return _decided(store, rank, world_size, name, value, lambda values: values[0])


def _decided(
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    value: str,
    decide: Callable[[list[str]], str],
) -> str:
    """What rank 0 decides of the values of all ranks; collective."""
    others = range(1, world_size)
    if rank == 0:
        found = store.multi_get([f"{name}/{other}" for other in others]) if others else []
        store.set(f"{name}/decided", decide([value, *(its.decode() for its in found)]))
    else:
        store.set(f"{name}/{rank}", value)
    return store.get(f"{name}/decided").decode()


def _sent(kinds: Kinds) -> dict[str, dict[str, tuple[str, str]]]:
    """A digest of each value, and its text without secrets."""
    return {
        kind: {name: (fingerprint(one.value), one.shown(name)) for name, one in values.items()}
        for kind, values in kinds.items()
    }


def _differing(ours: Any, theirs: Any) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Kind, name and shown values of what two ranks that sent `_sent` do not have alike."""
    for kind in ours:
        for name in {**ours[kind], **theirs[kind]}:
            one, other = (of[kind].get(name, ("", "none")) for of in (ours, theirs))
            if one[0] != other[0]:
                yield kind, name, (one[1], other[1])
