"""An engine's state into a checkpoint directory and out of it again; every rank takes part."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minimind.errors import CheckpointError, RunError, StorageError
from minimind.files import sync_file, write_durably
from minimind.train.checkpoint import (
    Rejected,
    choose,
    describe_file,
    publish,
    read_manifest,
    require_same_run,
    retire,
    set_aside,
    step_directory,
    sweep,
    verify,
    write_manifest,
)
from minimind.train.engine import Engine
from minimind.train.state import TrainState
from minimind.train.tensor_files import RunFiles, shard_name, write_runs
from minimind.train.zero_state import counters, restore_counters, zero_state


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
        zero_state(engine.deepspeed)  # an engine that cannot be saved is refused now, not at step N

    def save(self, state: TrainState) -> dict[str, Any]:
        """Publish `state` and return the `checkpoint_saved` event; durable when it returns."""
        started = time.perf_counter()
        engine, final = self.engine, step_directory(self.root, state.step)
        tmp = final.with_name(f"{final.name}.tmp-{self._run_id}")
        files = self._together("writing", tmp, lambda: self._write_own_files(tmp, state))
        facts = {**self.facts, "step": state.step, "tokens": state.tokens}

        def finish() -> None:
            if engine.rank == 0:
                write_manifest(tmp, facts, [entry for part in files for entry in part])
                publish(tmp, final)
                retire(self.root, self.keep_last)

        self._together("publishing", tmp, finish)
        seconds = time.perf_counter() - started
        size = sum(entry["bytes"] for part in files for entry in part)
        return {
            "step": state.step,
            "path": str(final),
            "bytes": size,
            "stall_ms": seconds * 1e3,
            "seconds": seconds,
        }

    def _write_own_files(self, tmp: Path, state: TrainState) -> list[dict[str, Any]]:
        engine = self.engine
        tmp.mkdir(parents=True, exist_ok=True)
        held = zero_state(engine.deepspeed)
        shard = tmp / shard_name(engine.rank, engine.world_size)
        write_runs(shard, held.runs(engine.rank, engine.world_size))
        written = [shard]
        if engine.rank == 0:
            buffers = tmp / "buffers.safetensors"
            save_file(_persistent_buffers(engine.model), buffers)
            sync_file(buffers)
            about = {
                "parameters": _shapes(engine.model),
                "optimizer_step": held.optimizer_step(),
                "deepspeed": counters(engine.deepspeed),
            }
            texts = {**self.texts, "state.json": json.dumps(about, indent=1).encode()}
            for name, content in texts.items():
                write_durably(tmp / name, content)
            written += [buffers, *(tmp / name for name in texts)]
        return [describe_file(path) for path in written]

    def _together(self, doing: str, tmp: Path, work: Any) -> list[Any]:
        """What `work` returned on each rank; when one failed to write, all stop for that reason."""
        outcome: Any = None
        problem = None
        try:
            outcome = work()
        except OSError as error:
            problem = f"{doing} {tmp}: {error.strerror}; free some space or mend the path"
        outcomes = self.engine.gather((outcome, problem))
        for rank, (_, told) in enumerate(outcomes):
            if told:
                if self.engine.rank == 0:
                    shutil.rmtree(tmp, ignore_errors=True)
                raise StorageError(told, cause_rank=rank)
        return [outcome for outcome, _ in outcomes]

    def resume(self, asked: str) -> tuple[TrainState, Path | None, list[Rejected], dict[str, Any]]:
        """The state to go on from, where it was found, what was passed over, and its manifest."""
        if self.engine.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            if asked == "none" and set_aside(self.root):
                self.root.mkdir()
            sweep(self.root)
        self.engine.barrier()
        try:
            path, rejected = choose(asked, self.root, self._verify_together)
            if path is None:
                return TrainState(), None, rejected, {}
            manifest = read_manifest(path)
            require_same_run(path, manifest["identity"], self.facts["identity"])
        except CheckpointError as error:
            error.cause_rank = 0  # all ranks came to it; one tells
            raise
        self._load(path, manifest)
        return TrainState(manifest["step"], manifest["tokens"]), path, rejected, manifest

    def _verify_together(self, path: Path) -> Rejected | None:
        """The first fault any rank found, each having hashed its share of the files."""
        found = verify(path, self.engine.rank, self.engine.world_size)
        return next((bad for bad in self.engine.gather(found) if bad), None)

    def _load(self, path: Path, manifest: dict[str, Any]) -> None:
        engine = self.engine
        about = json.loads((path / "state.json").read_bytes())
        if about["parameters"] != _shapes(engine.model):
            raise CheckpointError(
                f"{path}: its parameters are not this model's; use another --out_dir"
            )
        problem: RunError | None = None
        try:
            runs = RunFiles(path, manifest["world_size"])
            zero_state(engine.deepspeed).load(runs.read, about["optimizer_step"])
        except CheckpointError as error:
            problem = error
        if told := next((str(p) for p in engine.gather(problem and str(problem)) if p), None):
            raise CheckpointError(told) from problem
        own = dict(engine.model.named_buffers())
        for name, value in load_file(path / "buffers.safetensors").items():
            own[name].copy_(value)
        restore_counters(engine.deepspeed, about["deepspeed"])


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
