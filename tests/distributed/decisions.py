"""Small collectives of some ranks: each writes what it got to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimind.errors import RunError, StorageError
from minimind.runtime.collectives import Ranks, on_rank_0, run_on_all_ranks


def outcome(work: Callable[[], Any]) -> Any:
    """What `work` returns, or class, message and cause of its error."""
    try:
        return work()
    except RunError as error:
        return [type(error).__name__, str(error), error.cause_rank]


def full(path: str) -> Any:
    raise OSError(28, "No space left on device", path)


def main() -> None:
    """Take every way of deciding."""
    dist.init_process_group("gloo")
    ranks = Ranks(timedelta(seconds=60))
    rank, last = ranks.rank, ranks.world_size - 1
    big = "x" * 100_000 * rank  # of other sizes on every rank

    def fails_on_last() -> int:
        return full("/theirs") if rank == last else rank

    def refuses(_: Any) -> Any:
        raise StorageError("the manifest cannot be written")

    found = {
        "from_rank_0": ranks.from_rank_0([rank, "told"]),
        "decide": ranks.decide((rank, big), lambda every: [[r, len(b)] for r, b in every]),
        "own": outcome(lambda: run_on_all_ranks(ranks, lambda: 10 * rank)),
        "then": outcome(lambda: run_on_all_ranks(ranks, lambda: 10 * rank, sum)),
        "one fails": outcome(lambda: run_on_all_ranks(ranks, fails_on_last, sum)),
        "then fails": outcome(lambda: run_on_all_ranks(ranks, lambda: rank, refuses)),
        "on_rank_0": outcome(lambda: on_rank_0(ranks, lambda: ["of", rank])),
        "on_rank_0 fails": outcome(lambda: on_rank_0(ranks, lambda: full("/ours"))),
        "gather": ranks.gather(rank),
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    ranks.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
