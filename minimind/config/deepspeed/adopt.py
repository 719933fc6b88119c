"""What launcher and DeepSpeed file decide of a run: each adopts its values, and yields faults.

A value overrides a default, with the file or the launcher as its source. One that contradicts an
explicit flag is a fault with both values and both remedies.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from minimind.config.checks import given
from minimind.config.deepspeed.document import AUTO, MISSING, get, put
from minimind.config.deepspeed.key_checks import Fault
from minimind.config.deepspeed.keys import (
    ACCUMULATION,
    BATCH,
    BETAS,
    KEYS,
    MICRO_BATCH,
    PARAMS,
    TENSOR_PARALLEL,
    TOTAL_STEPS,
    optimizer_name,
)
from minimind.config.flags import MIXED
from minimind.config.launcher_env import Launch
from minimind.config.optimizers import FLAG_OF_TYPE, OPTIMIZERS
from minimind.config.origin import Origin, Rank
from minimind.config.parse import convert
from minimind.config.run_config import CONFIGS, DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.errors import UsageError
from minimind.runtime import disk

Layer = Generator[Fault, None, RunConfig]  # yields faults and returns the run with its values
IN_FILE = 'write "auto" in the file'
DTYPE_BLOCKS = {"bf16": "bfloat16", "fp16": "float16", "torch_autocast": MIXED}
# Parameters of DeepSpeed's Muon that torch's does not have, with their only accepted values.
ONLY_IN_DEEPSPEED = {
    "torch_adam": (True,),
    "eps": (1e-8,),
    "adam_lr": (),
    "ns_method": (),
    "per_head_muon": (),
}


def _written(path: str, key: str) -> Origin:
    """The origin of a value of the DeepSpeed file."""
    return Origin(f"{path}: {key}", Rank.DEEPSPEED)


def adopt(
    run: RunConfig, name: str, value: Any, origin: Origin, remedy: str = IN_FILE, key: str = ""
) -> Layer:
    """Adopt `value` as the flag `name`, unless it contradicts an explicit value."""
    try:
        value = convert(name, value, origin)
    except UsageError as error:
        yield Fault(key, str(error))
        return run
    if run.is_explicit(name):
        if value != getattr(run, name):
            yield _contradiction(run, name, value, origin, remedy, key)
        return run
    return run.with_values(origin, **{name: value})


def _contradiction(
    run: RunConfig, name: str, value: Any, where: str, remedy: str = IN_FILE, key: str = ""
) -> Fault:
    flag = given(run, name)
    sentence = f"{where} is {value} but {flag.source} says {name} = {flag.value}"
    return Fault(key, f"{sentence}; {flag.remove}, or {remedy}")


def adopt_launch(run: RunConfig, launch: Launch) -> Layer:
    """Adopt precision, accumulation, clipping and config file of `accelerate launch`."""
    for name, (value, field) in launch.flags.items():
        origin = Origin(f"{launch.source}: {field}", Rank.LAUNCHER)
        if name == "device" and run.device == "auto":  # even an explicit --device auto
            run = run.with_values(origin, device=value)
        else:
            run = yield from adopt(run, name, value, origin, "remove it there")
    if launch.deepspeed_config and not run.is_explicit("deepspeed_config"):
        origin = Origin(f"{launch.source}: deepspeed_config_file", Rank.LAUNCHER)
        run = run.with_values(origin, deepspeed_config=launch.deepspeed_config)
    return run


def adopt_zero_fields(
    config: dict[str, Any], path: str, launch: Launch
) -> Generator[Fault, None, dict[str, Origin]]:
    """Write the ZeRO fields of the launcher into `config`; return their sources by key."""
    sources: dict[str, Origin] = {}
    for key, (value, field) in launch.deepspeed.items():
        written = get(config, key)
        if written in (MISSING, AUTO):
            put(config, key, value)
            sources[key] = Origin(f"{launch.source}: {field}", Rank.LAUNCHER)
        elif written != value:
            yield Fault(
                key,
                f"{path}: {key} is {json.dumps(written)} but {launch.source} says {field} ="
                f" {value}; remove one of them",
            )
    return sources


def adopt_file(config: Mapping[str, Any], path: str, run: RunConfig, world_size: int) -> Layer:
    """Adopt every value of the DeepSpeed file that corresponds to a flag."""
    run = yield from _adopt_dtype(config, path, run)
    total = get(config, TOTAL_STEPS)
    if isinstance(total, int) and run.is_explicit("epochs") and not run.is_explicit("max_steps"):
        origin = _written(path, TOTAL_STEPS)
        remedy = f"{IN_FILE}, or give the same --max_steps"
        yield _contradiction(run, "epochs", total, origin, remedy, TOTAL_STEPS)
        run = run.with_values(origin, max_steps=total)
    for key, row in KEYS.items():
        value, origin = get(config, key), _written(path, key)
        if not row.flag or key == MICRO_BATCH or value in (MISSING, AUTO, None):
            continue  # null defers to the parameter groups
        if key == ACCUMULATION and run.global_batch_size is not None:
            continue  # a rule compares it
        if isinstance(value, list):  # of one value per group
            if run.is_explicit(row.flag):
                yield _contradiction(run, row.flag, value, origin, key=key)
            continue
        value = 1 if key == TENSOR_PARALLEL and value == 0 else value  # as DeepSpeed reads it
        run = yield from adopt(run, row.flag, value, origin, key=key)
    betas = get(config, BETAS)
    if isinstance(betas, list) and len(betas) == 2:
        for n, name in enumerate(("beta1", "beta2")):
            run = yield from adopt(run, name, betas[n], _written(path, f"{BETAS}[{n}]"), key=BETAS)
    elif isinstance(betas, list):
        shown = json.dumps(betas)
        yield Fault(BETAS, f"{path}: {BETAS} is {shown}, not two numbers; write [0.9, 0.95]")
    if run.global_batch_size is not None:  # rules compare what the file says of the batch
        return run
    data_size = run.parallel(world_size).data_size
    rows, key = get(config, MICRO_BATCH), MICRO_BATCH
    if isinstance(rows, int) and run.split_batches:
        rows *= data_size  # --batch_size then counts all processes
        key += f" x {data_size} processes (--split_batches)"
    if rows not in (MISSING, AUTO):
        run = yield from adopt(run, "batch_size", rows, _written(path, key), key=MICRO_BATCH)
    return _with_batch(config, path, run, data_size)


def _with_batch(config: Mapping[str, Any], path: str, run: RunConfig, data_size: int) -> RunConfig:
    """Derive accumulation_steps or batch_size, whichever is not explicit, from train_batch_size."""
    total, origin = get(config, BATCH), _written(path, BATCH)
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        return run
    processes = 1 if run.split_batches else data_size
    rows, micro_batches = run.batch_size * processes, run.accumulation_steps * processes
    if not run.is_explicit("accumulation_steps") and total % rows == 0:
        values = {"accumulation_steps": total // rows}
        if not run.is_explicit("batch_size"):
            values["batch_size"] = run.batch_size  # no rule decides it
        return run.with_values(origin, **values)
    if not run.is_explicit("batch_size") and total % micro_batches == 0:
        return run.with_values(origin, batch_size=total // micro_batches)
    return run


def _adopt_dtype(config: Mapping[str, Any], path: str, run: RunConfig) -> Layer:
    """Adopt the precision of the blocks of which one may be on."""
    enabled = {dtype: get(config, f"{block}.enabled") for block, dtype in DTYPE_BLOCKS.items()}
    on = [dtype for dtype, value in enabled.items() if value is True]
    if len(on) > 1:
        names = [f"{block}.enabled" for block, dtype in DTYPE_BLOCKS.items() if dtype in on]
        yield Fault("", f"{path}: {' and '.join(names)} are both true; write false for one of them")
        return run
    if not on and enabled.get(run.dtype) is not False:
        return run
    decides = on[0] if on else run.dtype  # a block that is off leaves float32
    block = next(block for block, dtype in DTYPE_BLOCKS.items() if dtype == decides)
    origin, dtype = _written(path, f"{block}.enabled"), on[0] if on else "float32"
    if not run.is_explicit("dtype"):
        return run.with_values(origin, dtype=dtype)
    if dtype != run.dtype:
        yield _contradiction(run, "dtype", json.dumps(bool(on)), origin, key=f"{block}.enabled")
    return run


def adopt_optimizer(config: dict[str, Any], path: str, run: RunConfig) -> Layer:
    """Adopt the optimizer block of the file as flags; a shipped default gives way to a flag."""
    name = FLAG_OF_TYPE.get(optimizer_name(get(config, "optimizer.type")) or "")
    if name is None:
        return run
    origin = _written(path, "optimizer.type")
    if not run.is_explicit("optimizer"):
        run = run.with_values(origin, optimizer=name)
    elif run.optimizer != name:
        block = config.pop("optimizer")
        if not _is_shipped_default(block, path):
            shipped = "muon" if run.muon else "torch_adamw, which has no optimizer block"
            remedy = f"give --deepspeed_config none or {shipped}"
            written = json.dumps(block["type"])
            yield _contradiction(run, "optimizer", written, origin, remedy, "optimizer.type")
        return run
    row = OPTIMIZERS[name]
    params = config["optimizer"].setdefault("params", {})
    for key, flag in row.params.items():
        if row.keeps_block and key not in params:
            if not run.is_explicit(flag):
                run = run.with_values(Origin("torch's default", Rank.DEFAULT), **{flag: 0.0})
            params[key] = AUTO
        if params.get(key, AUTO) not in (AUTO, None):
            origin = _written(path, f"{PARAMS}{key}")
            run = yield from adopt(run, flag, params[key], origin, key=f"{PARAMS}{key}")
    if not row.keeps_block:
        yield from _muon_faults(config.pop("optimizer")["params"], path)
    return run


def _muon_faults(params: Mapping[str, Any], path: str) -> Iterator[Fault]:
    """What torch's Muon, which takes the place of DeepSpeed's, does not have.

    DeepSpeed's clips the orthogonalized update in place of the gradient, and its checkpoints fit
    one number of processes only; torch's has neither fault.
    """
    if "muon_lr" not in params:
        yield Fault(
            f"{PARAMS}muon_lr",
            f"{path}: {PARAMS}muon_lr is missing, and AdamW's rate does not suit Muon; write a"
            ' number, or "auto" for --muon_lr',
        )
    for name, accepted in ONLY_IN_DEEPSPEED.items():
        if name in params and params[name] not in (AUTO, *accepted):
            key, shown = f"{PARAMS}{name}", json.dumps(params[name])
            yield Fault(
                key, f"{path}: {key} is {shown}, but torch's Muon does not have it; remove it"
            )


def is_shipped(path: str) -> bool:
    """Whether a DeepSpeed JSON is of this package."""
    file = disk.resolve(Path(path))
    return file == DEFAULT_DEEPSPEED_CONFIG or file.parent == CONFIGS / "deepspeed"


def _is_shipped_default(block: Mapping[str, Any], path: str) -> bool:
    """Whether a block of AdamW holds nothing that a user chose, in a file of this package."""
    params = block.get("params", {})
    return (
        is_shipped(path)
        and block.keys() <= {"type", "params"}
        and block["type"] == "AdamW"
        and all(value == AUTO or (key, value) == ("eps", 1e-8) for key, value in params.items())
    )
