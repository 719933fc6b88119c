"""Models of the JSON files of a checkpoint, which are validated before any value is used.

A hash proves that a file is what its writer wrote, not who wrote it. So no number from a checkpoint
sizes an allocation, bounds a loop or names a file before it is validated here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, RootModel

from minimind.config.flags import MOST_EXPERTS, MOST_LEFT_OUT
from minimind.errors import CheckpointError
from minimind.model.sizes import MAX_FACTOR
from minimind.runtime.checked_json import (
    ELSEWHERE,
    MAX_INTEGER,
    CheckedJson,
    ClosedJson,
    Count,
    Digest,
    FileName,
    Integer,
    Positive,
    Real,
    Shape,
    Size,
    read_foreign_object,
    read_object,
    require_listed,
    shown,
    validate,
)

# No weight has this size: the rotary table is computed, not read.
Positions = Annotated[int, Field(ge=1, le=2**20)]
# Modules are built for each layer before any weight is read.
Experts = Annotated[int, Field(ge=0, le=MOST_EXPERTS)]
MAX_TENSORS = 100_000
MAX_JUMPS = 1000
RowRange = Annotated[list[Count], Field(min_length=2, max_length=2)]
ParameterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,400}$")]


# A closed model that gains a field needs a new directory.FORMAT.
class FileEntry(ClosedJson):
    """A file of the checkpoint, in its own directory."""

    name: FileName
    bytes: Count
    sha256: Digest


class Manifest(CheckedJson):
    """`manifest.json`, as far as every reader needs it."""

    step: Count
    tokens: Count
    world_size: Size
    identity: dict[str, dict[str, Any]]
    eval_rows: Count = 0
    files: Annotated[list[FileEntry], FailFast()]


class Counters(ClosedJson):
    """The engine's counters in `state.json`."""

    global_steps: Count
    skipped_steps: Count
    loss_scaler: dict[str, Any]
    scheduler_iteration: Integer | None
    muon_stack: Count | None  # elements that Muon iterates together; null before its first update


class Numbers(RootModel[dict[str, Real]]):
    """The loss scaler's numbers, by name."""

    model_config = ConfigDict(strict=True)


class State(ClosedJson):
    """`state.json`: the shape of each parameter, and counters."""

    parameters: Annotated[dict[ParameterName, Shape], Field(max_length=MAX_TENSORS)]
    optimizer_step: Count | None
    counters: Counters


class Mixture(ClosedJson):
    """Rows and weight of each source."""

    sizes: Annotated[list[Size], FailFast()]
    weights: Annotated[list[Positive], FailFast()]


class OrderJump(ClosedJson):
    """Where the row order starts, or continues."""

    step: Count
    rows: Count
    epoch: Count
    offset: Count


class OrderOrigin(OrderJump):
    """Start of the row order, ranges of rows that are left out, and jumps."""

    left_out: Annotated[list[RowRange], Field([], max_length=MOST_LEFT_OUT), FailFast()]
    jumps: Annotated[list[OrderJump], Field([], max_length=MAX_JUMPS), FailFast()]


class Batch(CheckedJson):
    """Identity of the batch."""

    rows_per_step: Size


class Seed(CheckedJson):
    """Identity of the random state."""

    seed: Integer


class OrderIdentity(CheckedJson):
    """The part of the run's identity that determines the row order."""

    batch: Batch
    data: dict[str, Any]
    seed: Seed


class DataOrder(CheckedJson):
    """The part of `manifest.json` that determines the row order."""

    order: OrderOrigin
    rows: Size
    mixture: Mixture | None
    identity: OrderIdentity


class RopeScaling(ClosedJson):
    """How the rotary positions of a decoder are scaled (model/rotary.py)."""

    rope_type: Literal["linear", "ntk", "yarn", "llama3"]
    factor: Annotated[float, Field(ge=1, le=MAX_FACTOR)]
    original_max_position_embeddings: Positions


class ModelConfig(CheckedJson):
    """The values of `config.json` that determine the MiniMind decoder."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size | None = None
    max_position_embeddings: Positions
    rms_norm_eps: Positive
    rope_theta: Positive
    use_flash_attn: bool
    doc_mask: bool
    tie_word_embeddings: bool
    bos_token_id: Count | None = None
    eos_token_id: Count | None = None
    pad_token_id: Count | None = None
    no_rope_layer_interval: Count = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    use_moe: bool = False
    norm_topk_prob: bool = False
    n_routed_experts: Experts = 0
    num_experts_per_tok: Experts = 0
    n_shared_experts: Experts = 0
    aux_loss_alpha: Annotated[float, Field(ge=0, le=MAX_INTEGER)] = 0


def shard_name(rank: int, world_size: int) -> str:
    """File name of the shard of a rank."""
    return f"shard-{rank}-of-{world_size}.safetensors"


def require_manifest(manifest: dict[str, Any]) -> None:
    """Raise CheckpointError for an invalid manifest; every shard must be listed."""
    validate(Manifest, manifest)
    names = set()
    for entry in manifest["files"]:
        if entry["name"] in names:
            raise CheckpointError(f"lists {entry['name']} twice")
        names.add(entry["name"])
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
        validate(State, about)
        scaler = about["counters"]["loss_scaler"]
        numbers = {name: value for name, value in scaler.items() if type(value) is not bool}
        validate(Numbers, numbers, "counters.loss_scaler.")
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
    counts = {"counters.skipped_steps": (counters["skipped_steps"], step)}
    # Null before the first update. At stage 0 in bf16 and fp16 DeepSpeed 0.19.8 allocates the
    # moments by an update, which a checkpoint that it wrote counts too.
    counts["optimizer_step"] = (about["optimizer_step"] or 0, step + 1)
    for name, (count, most) in counts.items():
        if count > most:
            raise CheckpointError(f"has {name} = {shown(count)} at step {step}")


def read_config(directory: Path, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the values in `config.json` that determine the model; others are ignored.

    The manifest of a checkpoint must list the file; an exported directory has no manifest.
    """
    path = directory / "config.json"
    if manifest is not None:
        require_listed(manifest, path)
    try:
        values = read_foreign_object(path) if manifest is None else read_object(path)[0]
        validate(ModelConfig, values)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}; {ELSEWHERE}") from error
    return {name: values[name] for name in ModelConfig.model_fields if name in values}


def validate_data_order(manifest: dict[str, Any]) -> None:
    """Raise CheckpointError if the manifest does not define the row order."""
    try:
        validate(DataOrder, manifest)
        order = manifest["order"]
        if manifest["rows"] < manifest["identity"]["batch"]["rows_per_step"]:
            raise CheckpointError("has fewer rows than a step reads")
        if order["step"] > manifest["step"]:
            raise CheckpointError(
                f"has order.step = {order['step']} after its step {manifest['step']}"
            )
        validate_order(manifest["rows"], order)
    except CheckpointError as error:
        raise CheckpointError(f"manifest.json: {error}; {ELSEWHERE}") from error


def validate_order(rows: int, start: dict[str, Any]) -> None:
    """Raise CheckpointError if the start of an order does not fit a text of that many rows."""
    ends = [0]
    for first, stop in start.get("left_out", ()):
        if not ends[-1] <= first < stop <= rows:
            raise CheckpointError(f"has an impossible order.left_out = [{first}, {stop}]")
        ends.append(stop)
    last = start["step"]
    for origin in (start, *start.get("jumps", ())):
        if origin["step"] < last:
            raise CheckpointError(f"has a jump at step {origin['step']} after one at {last}")
        last = origin["step"]
        if origin["offset"] > rows:
            raise CheckpointError(
                f"has order.offset = {origin['offset']} in an epoch of {rows} rows"
            )
        if rows * origin["epoch"] > MAX_INTEGER:
            raise CheckpointError(f"has an impossible order.epoch = {shown(origin['epoch'])}")
