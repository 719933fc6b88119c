"""--rope_scaling: the scaling of a run, from its flags and the model that it starts from."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from minimind.config.run_config import RunConfig
from minimind.errors import UsageError
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

    Without the flag both are returned as they are.
    """
    if run.rope_scaling is None:
        return run, config
    run, extended = _completed(run, by, config), deepcopy(config)
    extended.rope_scaling = scaling_of(run)
    return run, extended


def _completed(run: RunConfig, by: str, config: MiniMindConfig) -> RunConfig:
    """Complete the flags of the scaling by the lengths of the model.

    The original length is that of the model before any scaling. Factor and rows follow from one
    another. Raise UsageError if there is neither.
    """
    if run.rope_original_length is None:
        before = scaling_flags(config)["rope_original_length"]
        length = before or config.max_position_embeddings
        run = run.with_values(by, rope_original_length=length)
    given = f"rope_scaling = {run.rope_scaling} ({run.sources['rope_scaling']})"
    original, has_length = run.rope_original_length or 1, run.sources["max_seq_len"] != "default"
    if run.rope_factor is None:
        if not has_length or run.max_seq_len <= original:
            raise UsageError(
                f"{given} extends rows of {original} tokens ({run.sources['rope_original_length']})"
                " without a length to reach; give --rope_factor, or a larger --max_seq_len"
            )
        by_rows = f"max_seq_len {run.max_seq_len} / {original}"
        return run.with_values(by_rows, rope_factor=run.max_seq_len / original)
    if has_length:
        return run
    by_factor = f"{run.rope_factor:g} x {original}"
    return run.with_values(by_factor, max_seq_len=int(run.rope_factor * original))


def scaling_text(run: RunConfig) -> list[str]:
    """Return `rope yarn, 4 x 512 positions` for the start summary; nothing without scaling."""
    if run.rope_scaling is None:
        return []
    return [f"rope {run.rope_scaling}, {run.rope_factor:g} x {run.rope_original_length} positions"]
