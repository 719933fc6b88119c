"""An engine's state into a checkpoint directory and out of it again; every rank takes part."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from minimind.errors import CheckpointError, RunError, StorageError
from minimind.files import sync_directory, write_durably
from minimind.train.checkpoint import (
    Rejected,
    candidates,
    describe_file,
    newest_valid,
    publish,
    read_manifest,
    require_same_run,
    retire,
    set_aside,
    start_over,
    step_directory,
    sweep,
    verify,
    write_manifest,
)
from minimind.train.engine import Engine
from minimind.train.ranks import lost_peers
from minimind.train.state import TrainState
from minimind.train.tensor_files import RunFiles, shard_name, write_runs, write_tensors

BUFFERS = "buffers.safetensors"


class Saver:
    """Saves and resumes one run; every method is collective."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        keep_last: int,
        facts: dict[str, Any],
        texts: dict[str, bytes],
    ) -> None:
        self.engine = engine
        self.root = root
        self.keep_last = keep_last
        self.facts = facts  # goes into the manifest; facts["identity"] may not change on resume
        self.texts = texts  # small files kept beside the tensors, by name
        self._run_id = engine.gather(secrets.token_hex(4))[0]
        engine.backend.state()  # an engine that cannot be saved is refused now, not at step N

    def has(self, step: int) -> bool:
        """Whether a checkpoint of `step` is published here, as rank 0 sees it."""
        return self._on_rank_0(lambda: step_directory(self.root, step).is_dir())

    def save(self, state: TrainState) -> dict[str, Any]:
        """Publish `state` and return the `checkpoint_saved` event; durable when it returns."""
        started = time.perf_counter()
        final = step_directory(self.root, state.step)
        tmp = final.with_name(f"{final.name}.tmp-{self._run_id}")
        try:
            files = self._together(lambda: self._write_own_files(tmp, state))
            entries = [entry for part in files for entry in part]
            facts = {**self.facts, "step": state.step, "tokens": state.tokens}
            self._on_rank_0(lambda: write_manifest(tmp, facts, entries))
            self._on_rank_0(lambda: publish(tmp, final))
        except RunError:
            if self.engine.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise
        self._on_rank_0(lambda: retire(self.root, self.keep_last))
        seconds = time.perf_counter() - started
        return {
            "step": state.step,
            "path": str(final),
            "bytes": sum(entry["bytes"] for entry in entries),
            "stall_ms": seconds * 1e3,
            "seconds": seconds,
        }

    def _write_own_files(self, tmp: Path, state: TrainState) -> list[dict[str, Any]]:
        engine = self.engine
        tmp.mkdir(parents=True, exist_ok=True)
        held = engine.backend.state()
        shard = tmp / shard_name(engine.rank, engine.world_size)
        write_runs(shard, held.runs(engine.rank, engine.world_size))
        written = [shard]
        if engine.rank == 0:
            write_tensors(tmp / BUFFERS, _persistent_buffers(engine.model))
            about = {
                "parameters": _shapes(engine.model),
                "optimizer_step": held.optimizer_step(),
                "counters": engine.backend.counters(),
            }
            texts = {**self.texts, "state.json": json.dumps(about, indent=1).encode()}
            for name, content in texts.items():
                write_durably(tmp / name, content)
            written += [tmp / BUFFERS, *(tmp / name for name in texts)]
        return [describe_file(path) for path in written]

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returned on each rank; where it failed on one, all raise the same error."""
        outcome, problem = None, None
        try:
            outcome = work()
        except OSError as error:
            where = error.filename or self.root
            told = f"{where}: {error.strerror or error}; free some space, or mend the path"
            problem = (StorageError, told)
        except RunError as error:
            problem = (type(error), str(error))
        outcomes = self.engine.gather((outcome, problem))
        for rank, (_, found) in enumerate(outcomes):
            if found:
                kind, told = found
                raise kind(told, cause_rank=rank)
        return [outcome for outcome, _ in outcomes]

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What `work` returned on rank 0, on every rank."""
        return self._together(lambda: work() if self.engine.rank == 0 else None)[0]

    def resume(self, asked: str) -> tuple[TrainState, Path | None, list[Rejected], dict[str, Any]]:
        """The state to go on from, where it was found, what was passed over, and its manifest.

        Checkpoints of `root` that are damaged, or newer than the one resumed from, step aside:
        the first must not be counted among those kept, the second belong to a course abandoned.
        """
        found = self._on_rank_0(lambda: self._candidates(asked))
        path, rejected = newest_valid(found, self._verify_together)
        if path is None:
            return TrainState(), None, rejected, {}
        manifest = self._on_rank_0(lambda: read_manifest(path))
        self._together(lambda: require_same_run(path, manifest["identity"], self.facts["identity"]))
        self._load(path, manifest)
        self._on_rank_0(lambda: self._step_aside(manifest["step"], {bad.path for bad in rejected}))
        return TrainState(manifest["step"], manifest["tokens"]), path, rejected, manifest

    def _candidates(self, asked: str) -> list[Path]:
        """The checkpoints that `--resume` may mean, best first; leftovers are swept on the way."""
        self.root.mkdir(parents=True, exist_ok=True)
        sweep(self.root)
        sync_directory(self.root.parent)
        if asked == "none":
            start_over(self.root)
            return []
        if asked == "auto":
            return candidates(self.root)
        path = Path(asked)
        if (path / "checkpoints").is_dir():
            path = path / "checkpoints"
            if not candidates(path):
                raise CheckpointError(f"--resume {asked}: holds no checkpoint; use auto or none")
            return candidates(path)
        return [path]

    def _step_aside(self, step: int, rejected: set[Path]) -> None:
        for path in candidates(self.root):
            if path in rejected:
                set_aside(path, "rejected")
            elif int(path.name.removeprefix("step_")) > step:
                set_aside(path, "abandoned")

    def _verify_together(self, path: Path) -> Rejected | None:
        """The first fault any rank found, each having hashed its share of the files."""
        engine = self.engine
        found = self._together(lambda: verify(path, engine.rank, engine.world_size))
        return next((bad for bad in found if bad), None)

    def _load(self, path: Path, manifest: dict[str, Any]) -> None:
        engine = self.engine
        about = self._on_rank_0(lambda: json.loads((path / "state.json").read_bytes()))
        if about["parameters"] != _shapes(engine.model):
            raise CheckpointError(f"{path}: has other parameters than this model", cause_rank=0)
        held = engine.backend.state()

        def fill() -> None:
            held.fill(RunFiles(path, manifest["world_size"]).read, about["optimizer_step"])
            own = dict(engine.model.named_buffers())
            for name, value in load_file(path / BUFFERS).items():
                own[name].copy_(value)

        self._together(fill)
        with lost_peers():
            held.refresh()
        engine.backend.restore_counters(about["counters"])


def _shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Full shape of every parameter, also where stage 3 has left each rank a piece."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()
    return {name: b.detach().cpu() for name, b in model.named_buffers() if name in kept}


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every fp32 parameter of a checkpoint, whole; needs neither DeepSpeed nor its world size."""
    manifest = read_manifest(directory)
    about = json.loads((directory / "state.json").read_bytes())
    runs = RunFiles(directory, manifest["world_size"])
    return {
        name: runs.read("fp32", name, 0, int(torch.Size(shape).numel())).view(shape)
        for name, shape in about["parameters"].items()
    }
