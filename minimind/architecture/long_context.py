"""--rope_scaling: the scaling of a run, from its flags and the model that it starts from."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from minimind.config.run_config import RunConfig
from minimind.model.configuration import MiniMindConfig

FIELDS = {  # flag -> key of MiniMindConfig.rope_scaling
    "rope_scaling": "rope_type",
    "rope_factor": "factor",
    "rope_original_length": "original_max_position_embeddings",
}


def scaling_of(run: RunConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of the run's MiniMindConfig."""
    if run.rope_scaling is None:
        return None
    return {key: getattr(run, flag) for flag, key in FIELDS.items()}


def scaling_flags(config: MiniMindConfig) -> dict[str, Any]:
    """Return the values of the flags that describe the scaling of a model; None without one."""
    scaling = config.rope_scaling or {}
    return {flag: scaling.get(key) for flag, key in FIELDS.items()}


def extend(run: RunConfig, by: str, config: MiniMindConfig) -> tuple[RunConfig, MiniMindConfig]:
    """Return the run and the model that it continues, both with the scaling of --rope_scaling.

    Without the flag both are returned as they are. Raise UsageError if the lengths do not fit.
    """
    if run.rope_scaling is None:
        return run, config
    if run.rope_original_length is None:  # that of the model before any scaling
        before = scaling_flags(config)["rope_original_length"]
        length = before or config.max_position_embeddings
        run = run.with_values(by, rope_original_length=length)
    run, extended = run.with_complete_scaling(), deepcopy(config)
    extended.rope_scaling = scaling_of(run)
    return run, extended


def scaling_text(run: RunConfig) -> list[str]:
    """Return `rope yarn, 4 x 512 positions` for the start summary; nothing without scaling."""
    if run.rope_scaling is None:
        return []
    return [f"rope {run.rope_scaling}, {run.rope_factor:g} x {run.rope_original_length} positions"]
