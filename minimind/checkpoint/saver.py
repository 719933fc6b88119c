"""Save the state of an engine in the background (collective)."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimind.checkpoint.directory import (
    describe_file,
    publish,
    published_checkpoints,
    step_directory,
    write_manifest,
)
from minimind.checkpoint.retention import Rules, prune, record_validation, saved_of
from minimind.checkpoint.tensor_files import BUFFERS, Staging, write_slices, write_tensors
from minimind.checkpoint.validation import shard_name
from minimind.data.prepare.prepared import Prepared
from minimind.engine.engine import Engine
from minimind.engine.state import AVERAGE, MASTER, ZeroState
from minimind.errors import RunError, StorageError
from minimind.runtime import disk
from minimind.runtime.collectives import Ranks, on_rank_0, run_on_all_ranks
from minimind.runtime.device import device_kind
from minimind.runtime.durable_files import free_bytes, mebibytes, storing, write_durably
from minimind.runtime.urls import masked_values

REMEDY = "correct the path of --out_dir; earlier checkpoints are untouched"


@dataclass(frozen=True)
class Snapshot:
    """What a save writes; `slices` are copies if the save runs in the background."""

    manifest: dict[str, Any]  # without format and files
    slices: list[tuple[str, Tensor]]
    buffers: dict[str, Tensor]
    about: dict[str, Any]  # state.json


class Saver:
    """Saves one run: `begin` copies, a thread writes and publishes while training continues.

    `ranks` is a separate control group for the thread.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        root: Path,
        rules: Rules,
        texts: dict[str, bytes],
        in_background: bool = True,
        minutes: float = 0.0,
    ) -> None:
        """A save is overdue `minutes` after the previous one began; 0: never."""
        self.engine = engine
        self.ranks = ranks
        self.root = root
        self.rules = rules
        self.good: int | None = None  # the last step at which a check for corruption passed
        self.had_rules = False  # whether they are those of the start before
        self.has_saved = False
        self.texts = texts  # small files kept beside the tensors, by name
        self.in_background = in_background
        self._run_id = engine.from_rank_0(secrets.token_hex(4))
        state = engine.state()  # raises for an engine that cannot be saved
        elements = _elements(state, engine)
        self._staging = Staging(elements, engine.device) if in_background else None
        small = sum(map(len, texts.values()))
        small += sum(buffer.nbytes for buffer in _persistent_buffers(engine.model).values())
        self.bytes = engine.decide(4 * elements, sum) + small
        self._thread = ThreadPoolExecutor(
            1, "save", device_kind(engine.device).use, (engine.device,)
        )
        self._interval = 60 * minutes or math.inf
        self._last_begin = time.monotonic()
        # The save in progress, and how many milliseconds it has blocked the loop.
        self._saving: tuple[Future[dict[str, Any]], float] | None = None
        self._pruning: Future[None] | None = None
        self._recording: list[Future[None]] = []  # validations that are being recorded

    def has(self, step: int) -> bool:
        """Whether a checkpoint of `step` exists, as seen by rank 0."""
        return on_rank_0(self.engine, lambda: disk.is_dir(step_directory(self.root, step)))

    def lacks_validation(self, step: int) -> bool:
        """Whether a checkpoint of `step` exists without what --keep_best compares (collective)."""
        path = step_directory(self.root, step)

        def lacks() -> bool:
            saved = saved_of(path)
            is_known = saved.value is not None and saved.by == self.rules.keep_best_by
            return disk.is_dir(path) and not is_known

        return on_rank_0(self.engine, lacks)

    def require_capacity(self, last_step: int) -> str:
        """Describe how many checkpoints fit; raise StorageError if none does."""

        def look() -> str:
            free = free_bytes(self.root)
            if free < self.bytes:
                raise StorageError(
                    f"{self.root}: a checkpoint needs {self.bytes:,} bytes"
                    f" ({mebibytes(self.bytes)}) and {free:,} ({mebibytes(free)}) are free;"
                    " free some space, or give another --out_dir"
                )
            fits, kept = free // self.bytes, len(published_checkpoints(self.root))
            message = f"{mebibytes(self.bytes)} each, and the disk has room for {fits:,} more"
            most = self.rules.most(last_step)
            missing = most - kept - fits
            if missing > 0:  # the new one is written before the oldest is deleted
                message += (
                    f"; {self.rules.flags()} needs {mebibytes(missing * self.bytes)} more for up to"
                    f" {most:,} checkpoints"
                )
            return message

        return on_rank_0(self.engine, look)

    def begin(self, manifest: dict[str, Any]) -> None:
        """Start saving (collective); the previous save must have been polled.

        `manifest` has all of its fields but format and files.
        """
        assert self._saving is None
        started = time.perf_counter()
        self._last_begin = time.monotonic()
        self.has_saved = True
        engine = self.engine
        held = engine.state()
        about = {
            "parameters": held.shapes(engine.model),
            "optimizer_step": held.optimizer_step(),
            "counters": engine.backend.counters(),
        }
        buffers = _persistent_buffers(engine.model)
        # One by one: moments in 8 bits become fp32. Last: what the host reads after it waits too.
        slices = held.slices(engine.rank, engine.world_size)
        slices = self._staging.copy(slices) if self._staging else list(slices)
        snapshot = Snapshot(manifest, slices, buffers, about)
        future = self._thread.submit(self._save, snapshot, started)
        self._saving = future, (time.perf_counter() - started) * 1e3

    @property
    def is_overdue(self) -> bool:
        """Whether a save is due by rank 0's clock; False on other ranks."""
        waited = time.monotonic() - self._last_begin
        return self.engine.rank == 0 and waited >= self._interval

    @property
    def has_failed(self) -> bool:
        """Whether the save in progress, or recording a validation, has failed on this rank."""
        futures = [self._saving[0]] if self._saving else []
        return any(future.done() and future.exception() for future in (*futures, *self._recording))

    def poll(self, wait: bool) -> dict[str, Any] | None:
        """Return the `checkpoint_saved` event of a finished save, else None.

        With `wait` (collective), wait for the save, and raise its error on every rank.
        """
        if self._saving is None:
            return None
        future, stall_ms = self._saving
        if not wait and (not future.done() or future.exception()):
            return None
        waiting = time.perf_counter()
        event = future.result()
        self._saving = None
        waited = (time.perf_counter() - waiting) * 1e3
        copying = self._staging.synchronize() if self._staging else 0.0  # ms on its stream
        return {**event, "stall_ms": max(stall_ms, copying) + waited}

    def validated(self, step: int, value: float) -> None:
        """Record what --keep_best compares in the checkpoint of its step, saved or being saved."""
        if self.ranks.rank == 0:
            self._recording.append(self._thread.submit(self._record, step, value))

    def _record(self, step: int, value: float) -> None:
        if disk.is_dir(path := step_directory(self.root, step)):
            with storing(str(path), REMEDY):
                record_validation(path, value, self.rules.keep_best_by)

    def wait_for_validations(self) -> None:
        """Wait until validations are recorded; raise an error on every rank (collective)."""

        def wait() -> None:
            for future in self._recording:
                future.result()
            self._recording = []  # not before: `_prune` looks at them

        run_on_all_ranks(self.engine, wait)

    def prune(self) -> None:
        """Delete older checkpoints in the background, after the new one was reported."""
        if self.ranks.rank == 0:
            self._pruning = self._thread.submit(self._prune, self.good)

    def _prune(self, good: int | None) -> None:
        if not self.has_failed:  # a checkpoint without a validation may be the best
            prune(self.root, self.rules, good)

    def prune_error(self, wait: bool = False) -> str:
        """Return what the last pruning could not delete and why, only once; empty if nothing."""
        retiring = self._pruning
        if retiring is None or not (wait or retiring.done()):
            return ""
        self._pruning = None
        error = retiring.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        return f"older checkpoints could not be deleted: {error}" if error else ""

    def close(self) -> None:
        """End the thread without joining it: after a failure it may wait for a dead rank."""
        self._thread.shutdown(wait=False)

    def _save(self, snapshot: Snapshot, started: float) -> dict[str, Any]:
        """Write and publish; return the event or raise the same error on every rank."""
        step, is_first = snapshot.manifest["step"], self.ranks.rank == 0
        final = step_directory(self.root, step)
        tmp = final.with_name(f"{final.name}.tmp-{self._run_id}")
        self.ranks.from_rank_0(None)  # it has finished pruning, as the free-space check assumes
        try:
            size = run_on_all_ranks(
                self.ranks,
                lambda: self._write_own_files(tmp, snapshot),
                lambda parts: self._publish(tmp, final, snapshot.manifest, [*chain(*parts)]),
            )
        except RunError:
            if is_first:
                shutil.rmtree(tmp, ignore_errors=True)  # the next start deletes what remains
            raise
        return {
            "step": step,
            "path": str(final),
            "bytes": size,
            "seconds": time.perf_counter() - started,
        }

    def _write_own_files(self, tmp: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        if self._staging:
            self._staging.synchronize()
        with storing(str(tmp), REMEDY, needed=self.bytes):
            tmp.mkdir(parents=True, exist_ok=True)
            written = [write_slices(tmp / shard_name(rank, world_size), snapshot.slices)]
            if rank == 0:
                write_tensors(tmp / BUFFERS, snapshot.buffers)
                about = json.dumps(snapshot.about, indent=2).encode()
                texts = {**self.texts, "state.json": about}
                for name, content in texts.items():
                    write_durably(tmp / name, content)
                written += [describe_file(tmp / name) for name in (BUFFERS, *texts)]
        return written

    def _publish(
        self, tmp: Path, final: Path, manifest: dict[str, Any], entries: list[dict[str, Any]]
    ) -> int:
        """Publish the checkpoint of these files; return their bytes."""
        with storing(str(final), REMEDY, needed=self.bytes):
            write_manifest(tmp, manifest, entries)
            publish(tmp, final)
        return sum(entry["bytes"] for entry in entries)


def sidecar_files(prepared: Prepared, engine: Engine) -> dict[str, bytes]:
    """Small files beside the tensors: enough to generate text from a checkpoint alone."""
    config, model = engine.resolved.config, json.loads(engine.model.config.to_json_string())
    return {
        "ds_config.resolved.json": json.dumps(masked_values(config), indent=2).encode(),
        "config.json": json.dumps(masked_values(model), indent=2, sort_keys=True).encode() + b"\n",
        **prepared.tokenizer.files(),
    }


def _persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()
    return {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in kept}


def _elements(state: ZeroState, engine: Engine) -> int:
    """Elements in this rank's shard once optimizer state exists."""
    slices = state.slices(engine.rank, engine.world_size)
    keys = ((key.split("|"), values) for key, values in slices)
    moments = {f.name: len(state.kinds_of(f.name)) * (not f.is_frozen) for f in state.fragments}
    return sum(
        values.numel() * (1 + moments[name] if kind == MASTER else 1)
        for (kind, name, _), values in keys
        if kind in (MASTER, AVERAGE)
    )
