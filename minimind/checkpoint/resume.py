"""Which checkpoint a run goes on from, and its state back into an engine; every rank takes part."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.choose import newest_valid
from minimind.checkpoint.directory import (
    Difference,
    Rejected,
    candidates,
    leftovers,
    read_manifest,
    require_same_run,
    set_aside,
    start_over,
    step_of,
    sweep,
    verify,
)
from minimind.checkpoint.reader import Contents, require_counted
from minimind.checkpoint.saver import shapes
from minimind.checkpoint.tensor_files import BUFFERS, RunFiles, read_buffers
from minimind.checkpoint.train_state import TrainState
from minimind.checkpoint.validation import read_state
from minimind.engine.build import Engine
from minimind.engine.optimizer_state import MASTER
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import require_listed
from minimind.runtime.collectives import Ranks, lost_peers, on_rank_0, run_on_all_ranks
from minimind.runtime.durable_files import newest_acknowledged, sync_directory
from minimind.runtime.terminal import phase


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on, what was passed over on the way, and what --allow_change let through."""

    state: TrainState = field(default_factory=TrainState)
    path: Path | None = None
    rejected: list[Rejected] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    changed: list[Difference] = field(default_factory=list)


@phase("reading a checkpoint")
def resume(
    engine: Engine,
    ranks: Ranks,
    root: Path,
    asked: str,
    identity: dict[str, Any],
    allowed: Set[str] = frozenset(),
) -> Resumed:
    """The state that `--resume asked` means, loaded into the engine.

    `ranks` is a control group that waits long: one rank may have more to read than another.
    Checkpoints of `root` that are damaged, newer than the one resumed from, or of another course
    than one from elsewhere step aside: they must neither be kept in its place nor fallen back to.
    """
    found = on_rank_0(ranks, lambda: _candidates(root, asked))
    path, rejected = newest_valid(found, lambda path: _verify_together(ranks, path))
    if path is None:
        return Resumed(rejected=rejected)
    manifest = on_rank_0(ranks, lambda: read_manifest(path))
    changed = run_on_all_ranks(
        ranks, lambda: require_same_run(path, manifest["identity"], identity, allowed)
    )[0]
    _load(engine, ranks, path, manifest)
    on_rank_0(ranks, lambda: _step_aside(root, path, {bad.path for bad in rejected}))
    state = TrainState(manifest["step"], manifest["tokens"])
    return Resumed(state, path, rejected, manifest, changed)


def _candidates(root: Path, asked: str) -> list[Path]:
    """The checkpoints that `--resume` may mean, best first; leftovers are swept on the way."""
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    sync_directory(root.parent)
    if asked == "none":
        start_over(root)
    found = meant(root, asked)
    if asked == "auto" and not found:
        _require_nothing_lost(root)
    elif asked != "none" and not found:
        raise CheckpointError(f"--resume {asked}: holds no checkpoint; use auto or none")
    return found


def meant(root: Path, asked: str) -> list[Path]:
    """The same without touching anything: none where a run begins, or cannot go on."""
    if asked in ("none", "auto"):
        return candidates(root) if asked == "auto" else []
    path = Path(asked)
    return candidates(path / "checkpoints") if (path / "checkpoints").is_dir() else [path]


def _require_nothing_lost(root: Path) -> None:
    """Nothing, or a CheckpointError where there were checkpoints and none is left.

    Never a silent step 0: who wants that says --resume none.
    """
    way_out = "; put one back, or start over with --resume none"
    if aside := leftovers(root):
        raise CheckpointError(f"{root} holds no checkpoint but {aside[-1].name}{way_out}")
    step = newest_acknowledged(root.parent / "metrics.jsonl")
    if step is not None:
        raise CheckpointError(
            f"{root} holds no checkpoint, and metrics.jsonl tells of one at step {step}{way_out}"
        )


def _step_aside(root: Path, resumed: Path, rejected: set[Path]) -> None:
    found = candidates(root)
    is_own = resumed.resolve() in {path.resolve() for path in found}
    for path in found:
        if path in rejected:
            set_aside(path, "rejected")
        elif not is_own or step_of(path) > step_of(resumed):
            set_aside(path, "abandoned")


def _verify_together(ranks: Ranks, path: Path) -> Rejected | None:
    """The first fault any rank found, each having hashed its share of the files."""
    found = run_on_all_ranks(ranks, lambda: verify(path, ranks.rank, ranks.world_size))
    return next((bad for bad in found if bad), None)


def _load(engine: Engine, ranks: Ranks, path: Path, manifest: dict[str, Any]) -> None:
    about = on_rank_0(ranks, lambda: read_state(path, manifest))
    if wrong := misfits(about["parameters"], shapes(engine.model)):
        raise CheckpointError(
            f"{path}: does not fit this model ({'; '.join(wrong[:3])}); give the shape flags of"
            " the run that saved it",
            cause_rank=0,
        )
    held = engine.backend.state()

    def fill() -> None:
        require_listed(manifest, path / BUFFERS)
        own = dict(engine.model.named_buffers())
        buffers = read_buffers(path / BUFFERS, own)
        runs = RunFiles(path, manifest["world_size"])
        runs.require_whole(about["parameters"])
        require_counted(runs, manifest["step"], about)
        held.fill(runs.read, about["optimizer_step"])
        for name, value in buffers.items():
            own[name].copy_(value)

    run_on_all_ranks(ranks, fill)
    with lost_peers():
        held.refresh()
    engine.backend.restore_counters(about["counters"])


def misfits(saved: dict[str, list[int]], own: dict[str, list[int]]) -> list[str]:
    """`name: saved -> own` for every parameter of another shape, or that only one side has."""
    names = sorted({*saved, *own})
    return [f"{n}: {saved.get(n)} -> {own.get(n)}" for n in names if saved.get(n) != own.get(n)]


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every fp32 parameter of a checkpoint, whole; needs neither DeepSpeed nor its world size."""
    contents = Contents(directory)
    return {name: contents.read(MASTER, name) for name in contents.shapes}
