"""Muon: the optimizer block of the file as flags, and what cannot be combined with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.auto_values import offloads
from minimind.config.deepspeed.config_values import MISSING, adopt, get
from minimind.config.deepspeed.keys import AUTO
from minimind.config.deepspeed.schema import optimizer_name
from minimind.config.run_config import RunConfig

PARAMS = "optimizer.params."
FLAGS_OF_MUON = {"muon_lr": "muon_lr", "momentum": "muon_momentum"}
# Parameters of DeepSpeed's Muon that torch's does not have, with their only accepted values.
OTHERS = {
    "torch_adam": (True,),
    "eps": (1e-8,),
    "adam_lr": (),
    "ns_method": (),
    "per_head_muon": (),
}
ONLY_MUON = ("muon_lr", "muon_momentum", "muon_scaling")


def adopt_muon(config: dict[str, Any], path: str, run: RunConfig, faults: list[str]) -> RunConfig:
    """Adopt an optimizer block of type Muon as flags, and remove it from `config`.

    DeepSpeed's Muon clips the orthogonalized update in place of the gradient, and its checkpoints
    fit one number of processes only; torch's has neither fault.
    """
    if optimizer_name(get(config, "optimizer.type")) != "Muon":
        return run
    block = config.pop("optimizer")
    params = block.get("params", {})
    run = adopt(run, "optimizer", "muon", f"{path}: optimizer.type", "change the block", faults)
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
        if key in params and params[key] not in (AUTO, *accepted)
    ]
    return run


def with_muon_defaults(run: RunConfig) -> RunConfig:
    """Return the run with every value of Muon that is in force; unchanged without Muon."""
    for name, value in run.muon.items():
        if getattr(run, name) is None:
            is_shared = name == "muon_lr" and run.muon["muon_scaling"] != "original"
            source = "derived: learning_rate" if is_shared else "Muon's default"
            run = run.with_values(source, **{name: value})
    return run


def muon_faults(run: RunConfig, config: Mapping[str, Any] | None = None) -> list[str]:
    """Faults of flags that only Muon reads, and of settings of the file that exclude it.

    The source of a fault in `config`, the resolved DeepSpeed file, is added by the caller.
    """
    config, flag = config or {}, f"optimizer = {run.optimizer} ({run.sources['optimizer']})"
    if not run.muon:
        return [
            f"{name} = {getattr(run, name)} ({run.sources[name]}) has no effect with {flag}; drop"
            " it, or use --optimizer muon"
            for name in ONLY_MUON
            if getattr(run, name) is not None
        ]
    faults = []
    written = get(config, "optimizer.type")
    if written is not MISSING:
        faults.append(
            f"optimizer.type is {json.dumps(written)} but {flag}; take --deepspeed_config"
            " configs/deepspeed/muon.json, or none, or write such a block in the file"
        )
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
