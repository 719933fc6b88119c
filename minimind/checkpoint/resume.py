"""Select the checkpoint to resume from and load it into the engine (collective).

What a resumed run needs of the manifest is read here, except `spikes` (recovery/spikes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimind.checkpoint.directory import (
    AllDamaged,
    Difference,
    Rejected,
    leftovers,
    newest_valid,
    published_checkpoints,
    read_manifest,
    require_same_run,
    set_aside,
    start_over,
    step_of,
    sweep,
    verify,
)
from minimind.checkpoint.retention import with_best
from minimind.checkpoint.tensor_files import BUFFERS, ShardFiles, Slices, read_buffers
from minimind.checkpoint.validation import read_state, validate_data_order
from minimind.data.rows.order import Order, Origin
from minimind.engine.engine import Engine
from minimind.engine.state import AVERAGE, MASTER, ZeroState
from minimind.errors import CheckpointError
from minimind.report.formats import skipped
from minimind.report.run_logger import RunLogger
from minimind.runtime import disk
from minimind.runtime.checked_json import ELSEWHERE, require_listed
from minimind.runtime.collectives import Ranks, lost_peers, on_rank_0, run_on_all_ranks
from minimind.runtime.durable_files import sync_directory
from minimind.runtime.event_log import EventLog
from minimind.runtime.terminal import phase

Manifests = Mapping[Path, dict[str, Any] | CheckpointError]  # by checkpoint, the newest first


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps, and target tokens over all ranks."""

    step: int = 0
    tokens: int = 0

    def after(self, tokens_per_step: int) -> TrainState:
        return TrainState(self.step + 1, self.tokens + tokens_per_step)


@dataclass(frozen=True)
class Resumed:
    """The resumed state, the rejected checkpoints, and the changes that were allowed."""

    state: TrainState = field(default_factory=TrainState)
    path: Path | None = None
    rejected: list[Rejected] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    changed: list[Difference] = field(default_factory=list)

    @property
    def eval_rows(self) -> int:
        """Rows of the last validation with --eval_rows auto; else 0."""
        return self.manifest.get("eval_rows", 0)


@phase("reading a checkpoint")
def resume(
    engine: Engine,
    ranks: Ranks,
    root: Path,
    requested: str,
    identity: dict[str, Any],
    allowed: Set[str] = frozenset(),
    steps: range | None = None,
    verified: Path | None = None,
    accumulation_steps: int = 0,
) -> Resumed:
    """Load the checkpoint of `--resume` into the engine.

    `ranks` is a control group with a long timeout, since ranks may read different amounts. Damaged
    and newer checkpoints of `root`, and all of them when resuming from elsewhere, are set aside, so
    that pruning and later resumes ignore them. With `steps`, only checkpoints of these steps count.
    The files of a `verified` one are not hashed again. For `accumulation_steps` see
    `require_same_run`.
    """
    candidates = on_rank_0(ranks, lambda: _candidates(root, requested))
    candidates = [path for path in candidates if steps is None or step_of(path) in steps]

    def check(path: Path) -> Rejected | None:
        return None if path == verified else verify_on_all_ranks(ranks, path)

    path, rejected = newest_valid(candidates, check)
    if path is None:
        return Resumed(rejected=rejected)
    manifest = on_rank_0(ranks, lambda: read_manifest(path))
    changed = run_on_all_ranks(
        ranks,
        lambda: require_same_run(path, manifest["identity"], identity, allowed, accumulation_steps),
    )
    _load(engine, ranks, path, manifest)
    on_rank_0(ranks, lambda: _set_aside_others(root, path, {bad.path for bad in rejected}))
    state = TrainState(manifest["step"], manifest["tokens"])
    return Resumed(state, path, rejected, manifest, changed)


def log_rejected(logger: RunLogger, rejected: Sequence[Rejected]) -> None:
    """Log the checkpoints that could not be used."""
    for bad in rejected:
        logger.event("checkpoint_rejected", path=str(bad.path), file=bad.file, reason=bad.reason)
        logger.print(skipped(bad.path, bad.file, bad.reason))


@contextmanager
def damage_logged(logger: RunLogger) -> Iterator[None]:
    """Log the checkpoints of AllDamaged; of another end of the block the caller logs them."""
    try:
        yield
    except AllDamaged as error:
        log_rejected(logger, error.rejected)
        raise


def _candidates(root: Path, requested: str) -> list[Path]:
    """Candidates for `--resume`, best first; also deletes leftovers of interrupted saves."""
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    sync_directory(root.parent)
    if requested == "none":
        start_over(root)
    candidates = requested_checkpoints(root, requested)
    if requested == "auto" and not candidates:
        _require_nothing_lost(root)
    elif requested != "none" and not candidates:
        raise CheckpointError(f"--resume {requested}: holds no checkpoint; use auto or none")
    return candidates


def requested_checkpoints(root: Path, requested: str) -> list[Path]:
    """Candidates for `--resume`, without changing anything."""
    if requested in ("none", "auto"):
        return published_checkpoints(root) if requested == "auto" else []
    path = with_best(Path(requested))
    return (
        published_checkpoints(path / "checkpoints") if disk.is_dir(path / "checkpoints") else [path]
    )


def read_manifests(root: Path, requested: str) -> Manifests:
    """Read the manifests of the candidates for `--resume`; the error of each that is damaged."""
    manifests: dict[Path, dict[str, Any] | CheckpointError] = {}
    for path in requested_checkpoints(root, requested):
        try:
            manifests[path] = read_manifest(path)
        except CheckpointError as error:
            manifests[path] = error
    return manifests


def _require_nothing_lost(root: Path) -> None:
    """Raise CheckpointError if the run had checkpoints and none is left.

    A restart from step 0 requires --resume none.
    """
    remedy = "; put one back, or start over with --resume none"
    if aside := leftovers(root):
        raise CheckpointError(
            f"{root} has only checkpoints that were set aside (last: {aside[-1].name}){remedy}"
        )
    step = newest_acknowledged(EventLog(root.parent / "metrics.jsonl"))
    if step is not None:
        raise CheckpointError(
            f"{root} holds no checkpoint, but metrics.jsonl records one at step {step}{remedy}"
        )


def newest_acknowledged(log: EventLog) -> int | None:
    """Step of the last `checkpoint_saved` event since the run started at step 0."""
    newest = None
    for event in log.events("run_start", "checkpoint_saved"):
        if event["event"] == "checkpoint_saved":
            newest = event["step"]
        elif event.get("resume_from") is None:
            newest = None
    return newest


def _set_aside_others(root: Path, resumed: Path, rejected: set[Path]) -> None:
    candidates = published_checkpoints(root)
    is_own = disk.resolve(resumed) in {disk.resolve(path) for path in candidates}
    for path in candidates:
        if path in rejected:
            set_aside(path, "rejected")
        elif not is_own or step_of(path) > step_of(resumed):
            set_aside(path, "abandoned")


def verify_on_all_ranks(ranks: Ranks, path: Path) -> Rejected | None:
    """Return the first damage found by any rank; each hashes a share of the files (collective)."""
    share = partial(verify, path, ranks.rank, ranks.world_size)
    return run_on_all_ranks(ranks, share, lambda found: next(filter(None, found), None))


def _load(engine: Engine, ranks: Ranks, path: Path, manifest: dict[str, Any]) -> None:
    saved = on_rank_0(ranks, lambda: read_state(path, manifest))
    state = engine.state()
    old, now = saved["parameters"], state.shapes(engine.model)
    if wrong := [name for name in sorted({*old, *now}) if old.get(name) != now.get(name)]:
        shapes = "; ".join(f"{name}: {old.get(name)} -> {now.get(name)}" for name in wrong[:3])
        raise CheckpointError(
            f"{path}: does not fit this model ({shapes}); give the shape flags of"
            " the run that saved it",
            cause_rank=0,
        )

    def whole() -> Slices:
        shards = ShardFiles(path, manifest["world_size"])
        shards.require_whole(saved["parameters"])
        shards.require_optimizer_step(manifest["step"], saved)
        return shards.slices

    slices = on_rank_0(ranks, whole)  # the others open no file that they do not read

    def fill() -> None:
        require_listed(manifest, path / BUFFERS)
        buffers_of_model = dict(engine.model.named_buffers())
        buffers = read_buffers(path / BUFFERS, buffers_of_model)
        shards = ShardFiles(path, manifest["world_size"], slices)
        has_frozen = "freeze" in manifest["identity"].get("lr", {})
        state.fill(_reader(shards, state, has_frozen), saved["optimizer_step"])
        for name, value in buffers.items():
            buffers_of_model[name].copy_(value)

    run_on_all_ranks(ranks, fill)
    with lost_peers():
        state.refresh()
    engine.backend.restore_counters(saved["counters"])


def _reader(
    shards: ShardFiles, state: ZeroState, has_frozen: bool
) -> Callable[[str, str, int, int], Tensor]:
    """Return `shards.read`, which raises CheckpointError for the moments of another optimizer.

    Without an average in the checkpoint it reads the weights, at which a new average starts.
    `has_frozen`: a parameter without moments there was frozen, and begins with zeros.
    """
    stored = shards.kinds

    def read(kind: str, name: str, start: int, length: int) -> Tensor:
        if kind == AVERAGE and name not in stored.get(AVERAGE, ()):
            kind = MASTER
        saved = {one for one, names in stored.items() if name in names} - {MASTER, AVERAGE}
        needed = set(state.kinds_of(name))
        if kind in state.kinds and saved and saved != needed:
            has, needs = (" and ".join(sorted(kinds)) or "nothing" for kinds in (saved, needed))
            raise CheckpointError(
                f"{shards.directory}: has {has} of {name}, and the optimizer here needs {needs};"
                " use the optimizer that saved it, or load only its weights (--init_from)"
            )
        if has_frozen and kind in needed and not saved:
            return torch.zeros(length)
        return shards.read(kind, name, start, length)

    return read


def resume_order(order: Order, resumed: Resumed) -> Order:
    """Return the checkpoint's row order, or a new one from its step if batch or data changed."""
    saved, manifest = resumed.manifest["identity"], resumed.manifest
    if order.stages_json():  # a function of the step alone, whatever was read before
        return order
    if "stages" in saved["data"]:
        step = resumed.state.step
        return replace(order, origin=Origin(step, step * order.rows_per_step))
    validate_data_order(resumed.manifest)
    rows_per_step, seed = saved["batch"]["rows_per_step"], saved["seed"]["seed"]
    start, mixture = manifest["order"], manifest["mixture"]
    try:
        before = Order.from_json(manifest["rows"], rows_per_step, seed, start, mixture)
    except ValueError as error:
        raise CheckpointError(f"manifest.json: {error}; {ELSEWHERE}") from error
    changed = {(one.group, one.name) for one in resumed.changed}
    goes_on = {("batch", "rows_per_step"), ("data", "rows_left_out")}
    is_same_text = not any(
        one not in goes_on and (one[0] in ("data", "tokenizer", "seed") or one[1] == "max_seq_len")
        for one in changed
    )
    if is_same_text and (before.n_rows, before.mixture_json()) != (
        order.n_rows,
        order.mixture_json(),
    ):
        raise CheckpointError(
            f"manifest.json: has {before.n_rows:,} rows, but the same text now makes"
            f" {order.n_rows:,}; {ELSEWHERE}"
        )
    if is_same_text and not changed & goes_on:
        return before
    origin = before.origin_at(resumed.state.step, is_same_text, order.left_out)
    return replace(order, origin=origin)
