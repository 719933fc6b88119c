"""What the JSON files of a checkpoint claim, checked before any of it is believed.

A hash says that a file is what its writer wrote; it does not say who wrote it. So no number from a
checkpoint sizes an allocation, ends a loop or names a file before it was looked at here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from minimind.config.model_flags import MOST_EXPERTS
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import (
    ABOVE_0,
    AT_LEAST_0,
    COUNT,
    DIGEST,
    ELSEWHERE,
    FILE_NAME,
    LIST,
    MAX_INTEGER,
    NAME,
    NUMBER,
    OBJECT,
    OBJECTS,
    SHAPE,
    SIZE,
    SIZES,
    WEIGHTS,
    WHOLE,
    YES_OR_NO,
    Kind,
    _count,
    or_null,
    read_object,
    require,
    require_listed,
    shown,
)

PARAMETER = re.compile(r"[A-Za-z0-9_.-]{1,400}")


# No weight has this size: the rotary table is computed, not read.
POSITIONS = Kind(
    f"a whole number from 1 to {2**20}", lambda value: _count(value) and 0 < value <= 2**20
)
# Modules are built for each layer before any weight is read.
EXPERTS = Kind(f"a whole number up to {MOST_EXPERTS}", lambda v: _count(v) and v <= MOST_EXPERTS)


def shard_name(rank: int, world_size: int) -> str:
    """File name of the shard of a rank."""
    return f"shard-{rank}-of-{world_size}.safetensors"


MANIFEST = {
    **dict.fromkeys(("step", "tokens"), COUNT),
    "world_size": SIZE,
    "identity": OBJECTS,
    "files": LIST,
}
ENTRY = {"name": NAME, "bytes": COUNT, "sha256": DIGEST}
STATE = {"parameters": OBJECT, "optimizer_step": or_null(COUNT), "counters": OBJECT}
COUNTERS = {
    **dict.fromkeys(("global_steps", "skipped_steps"), COUNT),
    "loss_scaler": OBJECT,
    "scheduler_iteration": or_null(WHOLE),
}
MIXTURE = {"sizes": SIZES, "weights": WEIGHTS}
ORIGIN: dict[str, Kind] = dict.fromkeys(("step", "rows", "epoch", "offset"), COUNT)
CONFIG = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), SIZE),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), SIZE),
    "max_position_embeddings": POSITIONS,
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), ABOVE_0),
    **dict.fromkeys(("use_flash_attn", "doc_mask", "tie_word_embeddings"), YES_OR_NO),
}
MAYBE_IN_CONFIG = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), or_null(COUNT)),
    **dict.fromkeys(("qk_norm", "use_moe", "norm_topk_prob"), YES_OR_NO),
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "n_shared_experts"), EXPERTS),
    "aux_loss_alpha": AT_LEAST_0,
}


def require_manifest(manifest: dict[str, Any]) -> None:
    """Raise CheckpointError for an invalid manifest; every shard must be listed."""
    require(manifest, MANIFEST)
    names = set()
    for entry in manifest["files"]:
        if type(entry) is not dict:
            raise CheckpointError(f"lists {shown(entry)} as a file")
        require(entry, ENTRY, "a file's ")
        name = entry["name"]
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"names a file outside the checkpoint: {shown(name)}")
        if name in names:
            raise CheckpointError(f"lists {name} twice")
        names.add(name)
    world_size = manifest["world_size"]
    shards = (shard_name(rank, world_size) for rank in range(world_size))
    missing = next((name for name in shards if name not in names), None)
    if missing:
        raise CheckpointError(f"does not list {missing}")


def read_state(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Read `state.json`: `parameters` (shape by name), `optimizer_step`, `counters`."""
    path = directory / "state.json"
    require_listed(manifest, path)
    try:
        about, _ = read_object(path)
        require(about, STATE)
        require(about["counters"], COUNTERS, "counters.")
        scaler = about["counters"]["loss_scaler"]
        numbers = {name: v for name, v in scaler.items() if type(v) is not bool}
        require(numbers, dict.fromkeys(numbers, NUMBER), "counters.loss_scaler.")
        for name in about["parameters"]:
            if not PARAMETER.fullmatch(name):
                raise CheckpointError(f"names a parameter {shown(name)}")
        require(about["parameters"], dict.fromkeys(about["parameters"], SHAPE), "parameters.")
        _require_counted(about, manifest["step"])
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}; {ELSEWHERE}") from error
    return about


def _require_counted(about: dict[str, Any], step: int) -> None:
    """Raise CheckpointError if the counters are impossible after `step` optimizer steps."""
    counters = about["counters"]
    if counters["global_steps"] != step:
        value = shown(counters["global_steps"])
        raise CheckpointError(f"has counters.global_steps = {value} at step {step}")
    counts = {"counters.skipped_steps": counters["skipped_steps"]}
    counts["optimizer_step"] = about["optimizer_step"] or 0  # null before the first update
    for name, count in counts.items():
        if count > step:
            raise CheckpointError(f"has {name} = {shown(count)} at step {step}")


def read_config(directory: Path, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the values in `config.json` that determine the model; others are ignored.

    Of a checkpoint its manifest must list the file; an exported directory has none.
    """
    path = directory / "config.json"
    if manifest is not None:
        require_listed(manifest, path)
    try:
        found, _ = read_object(path)
        require(found, CONFIG)
        more = {name: kind for name, kind in MAYBE_IN_CONFIG.items() if name in found}
        require(found, more)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}; {ELSEWHERE}") from error
    return {name: found[name] for name in (*CONFIG, *more)}


def validate_data_order(manifest: dict[str, Any]) -> None:
    """Raise CheckpointError if the manifest does not define the row order."""
    try:
        require(manifest, {"order": OBJECT, "rows": SIZE, "mixture": or_null(OBJECT)})
        if manifest["mixture"] is not None:
            require(manifest["mixture"], MIXTURE, "mixture.")
        order = manifest["order"]
        require(order, ORIGIN, "order.")
        saved = manifest["identity"]
        require(saved, dict.fromkeys(("batch", "data", "seed"), OBJECT), "identity.")
        require(saved["batch"], {"rows_per_step": SIZE}, "identity.batch.")
        require(saved["seed"], {"seed": WHOLE}, "identity.seed.")
        if unknown := next((shown(name) for name in order if name not in ORIGIN), ""):
            raise CheckpointError(f"has order.{unknown}")
        if manifest["rows"] < saved["batch"]["rows_per_step"]:
            raise CheckpointError("has fewer rows than a step reads")
        if order["step"] > manifest["step"]:
            raise CheckpointError(
                f"has order.step = {order['step']} at step {manifest['step']}, which lies before it"
            )
        if order["offset"] > manifest["rows"]:
            raise CheckpointError(
                f"has order.offset = {order['offset']} in an epoch of {manifest['rows']} rows"
            )
        if manifest["rows"] * order["epoch"] > MAX_INTEGER:
            raise CheckpointError("has read more epochs than anyone could")
    except CheckpointError as error:
        raise CheckpointError(f"manifest.json: {error}; {ELSEWHERE}") from error
