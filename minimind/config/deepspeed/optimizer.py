"""The optimizer: a block of the file as flags, flags without effect, and what excludes Muon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimind.config.deepspeed.auto_values import offloads
from minimind.config.deepspeed.config_values import MISSING, adopt, get
from minimind.config.deepspeed.keys import AUTO
from minimind.config.deepspeed.schema import optimizer_name
from minimind.config.optimizer_flags import READ_BY
from minimind.config.run_config import CONFIGS, DEFAULT_DEEPSPEED_CONFIG, RunConfig

PARAMS = "optimizer.params."
TYPES = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "sgd": "SGD"}  # in DeepSpeed's words
FLAG_OF_TYPE = {"Adam": "adamw", **{written: flag for flag, written in TYPES.items()}}
FLAGS_OF_MUON = {"muon_lr": "muon_lr", "momentum": "muon_momentum"}
# Parameters of DeepSpeed's Muon that torch's does not have, with their only accepted values.
OTHERS = {
    "torch_adam": (True,),
    "eps": (1e-8,),
    "adam_lr": (),
    "ns_method": (),
    "per_head_muon": (),
}


def adopt_optimizer(
    config: dict[str, Any], path: str, run: RunConfig, faults: list[str]
) -> RunConfig:
    """Adopt the optimizer block of the file as flags; a shipped default gives way to a flag."""
    name = FLAG_OF_TYPE.get(optimizer_name(get(config, "optimizer.type")) or "")
    if name is None:
        return run
    if not run.is_explicit("optimizer"):
        run = run.with_values(f"{path}: optimizer.type", optimizer=name)
    elif run.optimizer != name and _is_shipped_default(config["optimizer"], path):
        del config["optimizer"]
        return run
    elif run.optimizer != name:
        written = json.dumps(config.pop("optimizer")["type"])
        file = "muon.json" if run.muon else "torch_adamw.json, which has no such block"
        faults.append(
            f"{path}: optimizer.type is {written} but {run.sources['optimizer']} says optimizer ="
            f" {run.optimizer}; drop optimizer, or take --deepspeed_config none, or"
            f" configs/deepspeed/{file}"
        )
        return run
    adopt_params = {"muon": _adopt_muon, "sgd": _adopt_sgd}.get(name)
    return adopt_params(config, path, run, faults) if adopt_params else run


def _is_shipped_default(block: Mapping[str, Any], path: str) -> bool:
    """Whether a block of AdamW holds nothing that a user chose, in a file of this package."""
    file = Path(path).resolve()
    is_shipped = file == DEFAULT_DEEPSPEED_CONFIG or file.parent == CONFIGS / "deepspeed"
    params = block.get("params", {})
    return (
        is_shipped
        and block.keys() <= {"type", "params"}
        and block["type"] == TYPES["adamw"]
        and all(value == AUTO or (key, value) == ("eps", 1e-8) for key, value in params.items())
    )


def replaced_block(document: Mapping[str, Any], path: str, run: RunConfig) -> str:
    """Notice that --optimizer is in force in place of the block of a shipped file; else empty."""
    written = optimizer_name(get(document, "optimizer.type")) or ""
    if FLAG_OF_TYPE.get(written, run.optimizer) == run.optimizer:
        return ""
    by = run.sources["optimizer"]
    return f"optimizer {run.optimizer} by {by}, in place of {path}'s {written}"


def _adopt_sgd(config: dict[str, Any], path: str, run: RunConfig, faults: list[str]) -> RunConfig:
    """Adopt the momentum of the block; one without it has the flag's if given, else torch's 0."""
    params = config["optimizer"].setdefault("params", {})
    if "momentum" not in params and not run.is_explicit("sgd_momentum"):
        run = run.with_values("torch's default", sgd_momentum=0.0)
    momentum = params.setdefault("momentum", AUTO)
    if momentum in (AUTO, None):
        return run
    where = f"{path}: {PARAMS}momentum"
    return adopt(run, "sgd_momentum", momentum, where, 'write "auto" in the file', faults)


def _adopt_muon(config: dict[str, Any], path: str, run: RunConfig, faults: list[str]) -> RunConfig:
    """Adopt a block of type Muon, and remove it from `config`.

    DeepSpeed's Muon clips the orthogonalized update in place of the gradient, and its checkpoints
    fit one number of processes only; torch's has neither fault.
    """
    params = config.pop("optimizer").get("params", {})
    for key, name in FLAGS_OF_MUON.items():
        if params.get(key, AUTO) not in (AUTO, None):
            where, remedy = f"{path}: {PARAMS}{key}", 'write "auto" in the file'
            run = adopt(run, name, params[key], where, remedy, faults)
    if "muon_lr" not in params:
        faults.append(
            f"{path}: {PARAMS}muon_lr is missing, and Muon's rate is not AdamW's; write a number,"
            ' or "auto" for --muon_lr'
        )
    faults += [
        f"{path}: {PARAMS}{key} is {json.dumps(params[key])}, which torch's Muon does not have;"
        " remove it"
        for key, accepted in OTHERS.items()
        if key in params
        and params[key] not in (AUTO, *accepted)
        and not any(fault.startswith(f"{path}: {PARAMS}{key} is ") for fault in faults)  # its type
    ]
    return run


def with_optimizer_defaults(run: RunConfig) -> RunConfig:
    """Return the run with every value of Muon or SGD that is in force."""
    for name, value in (run.muon | run.sgd).items():
        if getattr(run, name) is None:
            is_shared = name == "muon_lr" and run.muon["muon_scaling"] != "original"
            source = "derived: learning_rate" if is_shared else f"{TYPES[run.optimizer]}'s default"
            run = run.with_values(source, **{name: value})
    return run


def unread_flag_faults(run: RunConfig) -> list[str]:
    """Faults of given flags that the optimizer does not read."""
    return [
        f"{name} = {getattr(run, name)} ({run.sources[name]}) has no effect with"
        f" optimizer = {run.optimizer} ({run.sources['optimizer']}); drop it, or use"
        f" --optimizer {READ_BY[name][0]}"
        for name in run.unread_flags
        if run.is_explicit(name)
    ]


def plain_faults(run: RunConfig) -> list[str]:
    """Faults of given flags without DeepSpeed."""
    faults = unread_flag_faults(run)
    if run.tensor_parallel > 1:
        faults.append(
            f"tensor_parallel = {run.tensor_parallel} ({run.sources['tensor_parallel']}) needs"
            " DeepSpeed; give --deepspeed_config FILE, or drop it"
        )
    return faults


def muon_faults(run: RunConfig, config: Mapping[str, Any]) -> list[str]:
    """Faults of settings of the resolved file that exclude Muon; the caller adds its path."""
    flag, faults = f"optimizer = {run.optimizer} ({run.sources['optimizer']})", []
    if not run.muon:
        return []
    if get(config, "scheduler.type") is not MISSING:
        faults.append(
            f"scheduler sets one learning rate, and {flag} has two; remove the block, and use"
            " --schedule"
        )
    if offloads(config, "optimizer"):
        faults.append(
            f"zero_optimization.offload_optimizer is not supported with {flag}; remove it, or use"
            " AdamW"
        )
    return faults
