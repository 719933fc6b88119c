"""A run of ours from a training checkpoint of other software; it resumes at the same step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimind.architecture.select import MiniMind, shape_flags
from minimind.checkpoint.directory import describe_file, step_directory, write_manifest
from minimind.checkpoint.tensor_files import BUFFERS, Part, write_parts, write_tensors
from minimind.checkpoint.validation import shard_name
from minimind.config.flags import MIXED
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.config.paths import shell_word
from minimind.data.tokenizer.load import Tokenizer
from minimind.engine.state import MASTER
from minimind.errors import CheckpointError, UsageError
from minimind.interop.deepspeed_checkpoint import ForeignCheckpoint
from minimind.interop.foreign_config import ShapeFlags, check_flags
from minimind.interop.job import CONFIG
from minimind.interop.tensor_sources import TensorSource, of_model
from minimind.interop.weights import Weights, weights_of
from minimind.model.configuration import MiniMindConfig
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes, write_durably
from minimind.runtime.installed import LAUNCH
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import named

# Groups of settings that no such checkpoint has.
UNKNOWN = ("batch", "data", "schedule", "seed")


def model_of_run(
    found: ForeignCheckpoint, config: Path | None, flags: ShapeFlags
) -> dict[str, Weights]:
    """The model by kind of number: its fp32 weights, and each moment as if it were the weights.

    All are renamed and reordered alike. config.json is that of `config`, of the checkpoint's folder
    or of the one above it; without one `flags` give the shape.
    """
    places = [config] if config else [found.folder, found.folder.parent]
    folders = [place.parent if place.name == CONFIG else place for place in places]
    path = next((one for one in folders if disk.is_file(one / CONFIG)), found.file)
    if config and path == found.file:
        raise UsageError(f"--model_config {config}: is not a {CONFIG} or its folder; name one")
    models = {}
    for kind in (MASTER, *found.kinds):
        dtypes = dict.fromkeys(found.shapes, torch.float32)
        source = TensorSource(path, found.shapes, dtypes, partial(found.read, kind))
        models[kind] = weights_of(path, of_model(source), flags)
    check_flags(path, models[MASTER].config, flags)
    return models


def import_run(
    found: ForeignCheckpoint, models: Mapping[str, Weights], tokenizer: Tokenizer, out: NewFolder
) -> str:
    """Write the run, whose only checkpoint has the step of `found`; return what to print."""
    model = models[MASTER]
    if not isinstance(model.config, MiniMindConfig):
        raise CheckpointError(f"{model.path}: is not a model of the MiniMind decoder")
    model.set_special_ids(tokenizer)
    identity = _identity(found, model.config, tokenizer)
    rows = identity["batch"]["rows_per_step"]
    manifest = {
        "identity": identity,
        **{"world_size": 1, "zero_stage": None, "dtype": found.dtype},
        **{"rows": rows, "mixture": None},
        "order": {"step": 0, "rows": 0, "epoch": 0, "offset": 0},
        "init_from": {"place": named(str(found.folder)), "kind": found.software},
        **{"step": found.step, "tokens": 0},
    }
    state = {
        "parameters": {name: model.tensors.shapes[name] for name in _weights(model)},
        "optimizer_step": found.updates,
        "counters": {
            "global_steps": found.step,
            "skipped_steps": found.skipped,
            "loss_scaler": found.scaler,
            "scheduler_iteration": found.scheduler_step,
            "muon_stack": None,
        },
    }
    parts = [*_parts(found, models)]
    needed = sum(part.bytes for part in parts)
    with out.written_aside(needed) as draft:
        folder = step_directory(draft / "checkpoints", found.step)
        folder.mkdir(parents=True)
        entries = [write_parts(folder / shard_name(0, 1), parts)]
        write_tensors(folder / BUFFERS, {})  # the decoder computes its own
        texts = {
            "state.json": json.dumps(state, indent=2).encode(),
            CONFIG: model.config.to_json_string().encode(),
            "ds_config.resolved.json": b"{}",
            **tokenizer.files(),
        }
        for name, content in texts.items():
            write_durably(folder / name, content)
        entries += [describe_file(folder / name) for name in (BUFFERS, *texts)]
        write_manifest(folder, manifest, entries)
    return _summary(found, model, out.path, needed, identity)


def _weights(model: Weights) -> list[str]:
    return sorted(model.tensors.shapes)


def _parts(found: ForeignCheckpoint, models: Mapping[str, Weights]) -> Iterator[Part]:
    """A slice of each kind of each weight."""
    for name in _weights(models[MASTER]):
        theirs = models[MASTER].tensors.file_names.get(name, name)
        for kind in (MASTER, *found.moments_of(theirs)):
            tensors = models[kind].tensors
            size = math.prod(tensors.shapes[name])

            def read(name: str = name, tensors: TensorSource = tensors) -> Tensor:
                return tensors.read_as(name, torch.float32).reshape(-1)

            yield Part(f"{kind}|{name}|0", "F32", [size], 4 * size, read)


def _identity(
    found: ForeignCheckpoint, config: MiniMindConfig, tokenizer: Tokenizer
) -> dict[str, dict[str, Any]]:
    """The settings that a resume compares, by group of --allow_change, where the file has them."""
    run = parse_flags([])
    run = run.with_values(Origin("the checkpoint", Rank.DATA), **shape_flags(config))
    row, group = OPTIMIZERS[found.optimizer], found.numbers
    named_params = (*row.fixed, *row.params) if row.keeps_block else ()
    return {
        "batch": {"rows_per_step": max(1, found.rows // max(1, found.step))},
        "lr": {
            "learning_rate": found.peak,
            "weight_decay": group.get("weight_decay"),
            "betas": [*group.get("betas", (run.beta1, run.beta2))],
            "grad_clip": found.grad_clip,
            "optimizer": row.name,
            "optimizer_params": {key: group[key] for key in named_params if key in group},
        },
        "data": {},
        "tokenizer": {"sha256": tokenizer.fingerprint},
        "model": MiniMind(config.vocab_size).identity(run),
        "dtype": {"dtype": found.dtype},
        "seed": {"seed": 0},
    }


def _summary(
    found: ForeignCheckpoint,
    model: Weights,
    out: Path,
    size: int,
    identity: Mapping[str, Mapping[str, Any]],
) -> str:
    """A text: what was written, what is not carried over, and the command that resumes."""
    parameters = sum(math.prod(model.tensors.shapes[name]) for name in _weights(model))
    moments = " and ".join(found.kinds) or "no moments"
    lr, place = identity["lr"], shell_word(str(out))
    by = [lr["optimizer"], f"updates {found.updates}"]
    if not found.unknown:
        from_ranks = [f"stage {found.stage}", f"processes {found.processes}"]
        by += [*(["universal"] if found.stage is None else from_ranks), found.dtype]
    lines = [
        f"{out}: step {found.step} of {found.folder}: {parameters:,} weights with {moments} in"
        f" float32, {mebibytes(size)}",
        f"written by {found.software}: {', '.join(by)}",
        "",
        aligned([("not carried over", "in the new run"), *_lost(found)], indent="  "),
        "",
        "resume with",
    ]
    flags = {} if found.optimizer == "adamw" else {"optimizer": found.optimizer}
    flags |= {name: lr[name] for name in ("learning_rate", "weight_decay", "grad_clip")}
    flags |= dict(zip(("beta1", "beta2"), lr["betas"], strict=True))
    of_muon = next((group for group in found.groups if group.get("use_muon")), None)
    if of_muon:
        rate = of_muon.get("initial_lr", of_muon.get("lr"))
        flags |= {"muon_lr": rate, "muon_momentum": of_muon.get("momentum")}
    more = ("lr",) if of_muon or lr["learning_rate"] is None else ()
    unknown = (*UNKNOWN, *dict.fromkeys((*more, *found.unknown)))
    given = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
    lines += [
        f"  {LAUNCH} --out_dir {place} --init_from {place} --data_path TEXT --max_steps STEPS \\",
        f"    {given} \\",
        f"    --allow_change {','.join(unknown)}",
    ]
    return "\n".join(lines)


def _lost(found: ForeignCheckpoint) -> Iterator[tuple[str, str]]:
    """What a checkpoint of other software has not, or has and a run of ours does not take."""
    group, batch = found.numbers, "--batch_size x --accumulation_steps x processes"
    yield "order of the data", "reads --data_path from its first row, in the order of --seed"
    yield "random state", "--seed"
    yield "tokens read", f"counted from 0 at step {found.step}"
    rate = f", {group['lr']:g} at step {found.step}" if "lr" in group else ""
    yield "schedule", f"--schedule, --warmup_steps, --max_steps, all counted from step 0{rate}"
    rows = f"{found.rows / max(1, found.step):g} until now: " if found.rows else ""
    yield "rows per step", f"{rows}{batch}"
    if found.low_precision:
        yield "weights in float32", f"begin at those of the file, some in {found.low_precision}"
    if found.autocast is not None and found.dtype != MIXED:
        kind = found.autocast or "low precision"
        yield f"products in {kind} (torch_autocast)", f"--dtype {found.dtype}, for products too"
    if "dtype" in found.unknown:
        yield "dtype", f"--dtype; MiniMind's own is {MIXED}"
    if (eps := group.get("eps", 1e-8)) != 1e-8 and found.optimizer == "adamw":
        yield f"eps {eps:g}", "1e-08, or an optimizer block of a DeepSpeed file (--allow_change lr)"
    if found.optimizer == "adamw" and found.is_coupled and group.get("weight_decay"):
        yield "decay in the gradient (Adam)", "apart from it (AdamW)"
    if group.get("bias_correction") is False:
        yield "moments without bias correction", "with it"
    if group.get("nesterov") and found.optimizer == "sgd":
        yield "momentum of Nesterov", "plain momentum"
    if others := found.decayed_otherwise:
        yield f"decay of {others} weights", "matrices decay, norms and biases do not"
    if len({one.get("lr") for one in found.groups}) > 1:
        yield "rates of the groups", "one rate for all weights"
    if found.untrained:
        yield f"{len(found.untrained)} frozen weights", "are trained, from moments of zero"
