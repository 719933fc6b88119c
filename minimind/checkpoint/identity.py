"""Identity of a run: values in its checkpoints, code and library versions."""

from __future__ import annotations

import json
import platform
import subprocess
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch

from minimind import __version__
from minimind.config.loss_weights import loss_weights
from minimind.config.run_config import PROJECT, RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Order, count_rows
from minimind.engine.build import Engine
from minimind.runtime import disk
from minimind.runtime.device import device_kind
from minimind.runtime.urls import masked_values

OF_WSD = ("decay_steps", "decay_shape")  # of the schedule
ENDS_EARLY = ("patience", "min_delta", "keep_best_by")  # what may end a run before its last step


def identity(
    run: RunConfig,
    model: dict[str, Any],
    prepared: Prepared,
    schedule: Schedule,
    order: Order,
    engine: Engine,
) -> dict[str, Any]:
    """Values that must not change on resume, by group of --allow_change.

    `model` holds those of the architecture.
    """
    frozen = sorted(n for n, p in engine.model.named_parameters() if not p.requires_grad)
    left_out = order.left_out
    groups: dict[str, dict[str, Any]] = {
        "batch": {"rows_per_step": order.rows_per_step, "max_seq_len": run.max_seq_len},
        "schedule": {
            "shape": engine.resolved.config.get("scheduler", schedule.shape),
            "total_steps": schedule.total_steps,
            "warmup_steps": schedule.warmup_steps,
            "min_lr_ratio": schedule.min_ratio,
            **({n: getattr(schedule, n) for n in OF_WSD} if schedule.shape == "wsd" else {}),
            **({n: getattr(run, n) for n in ENDS_EARLY} if run.patience is not None else {}),
        },
        "lr": {
            "learning_rate": run.learning_rate,
            "weight_decay": run.weight_decay,
            "betas": [run.beta1, run.beta2],
            "grad_clip": run.grad_clip,
            "optimizer": engine.resolved.optimizer,
            "optimizer_params": engine.resolved.optimizer_params,
            **_loss_weights(run, prepared),
            **({} if run.ema is None else {"ema": run.ema}),
            **({"dropout": run.dropout} if run.dropout else {}),
            **({} if run.mup_base_dim is None else {"mup_base_dim": run.mup_base_dim}),
            **({"freeze": _brief(f"{len(frozen)} parameters", frozen)} if run.freeze else {}),
        },
        "data": {
            "sha256": prepared.manifest["fingerprint"],
            "weights": order.mixture and list(order.mixture.weights),
            **({"rows_left_out": _brief(str(count_rows(left_out)), left_out)} if left_out else {}),
        },
        "tokenizer": {"sha256": prepared.tokenizer.fingerprint, **_template(run, prepared)},
        "model": model | _own_loss(run, engine),
        "dtype": {"dtype": "tf32" if run.tf32 else run.dtype},
        "seed": {"seed": run.seed},
    }
    for group, values in order.stages_json().items():
        groups[group] |= values
    return masked_values(groups)


def _template(run: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """Digest of the chat template that prompts the model, with its date and variables."""
    source = prepared.tokenizer.chat_template if run.task == "sft" else None
    if source is None:
        return {}
    told = {"template_date": run.template_date, "chat_template_kwargs": run.chat_template_kwargs}
    told = {name: value for name, value in told.items() if value is not None}
    return {"chat_template": sha256(source.encode()).hexdigest(), **told}


def _loss_weights(run: RunConfig, prepared: Prepared) -> dict[str, list[float]]:
    """Weights of the targets of each source, if they differ."""
    if not run.loss_weight:
        return {}
    names = [source["name"] for source in prepared.manifest["sources"]]
    return {"loss_weights": [*(loss_weights(run.loss_weight, names) or ())]}


def _own_loss(run: RunConfig, engine: Engine) -> dict[str, str]:
    """Name of a loss that is not the cross-entropy, with a digest of its module or its teacher."""
    if engine.distillation:
        return {"loss": engine.distillation.name}
    if run.own_loss is None:
        return {}
    from minimind.model.own_loss import OwnLoss

    return {"loss": f"{run.own_loss} ({OwnLoss.imported(run.own_loss).digest()[:8]})"}


def _brief(count: str, these: Any) -> str:
    """`3 (1f2e3d4c)`: a number of things, and a digest of them."""
    return f"{count} ({sha256(json.dumps(these).encode()).hexdigest()[:8]})"


def hardware(device: torch.device) -> str:
    """Name of the GPU, or of the CPU."""
    return device_kind(device).model_of(device)


def layout(run: RunConfig, engine: Engine) -> dict[str, Any]:
    """Distribution of the work of a step, which may change on resume."""
    return {
        "world_size": engine.world_size,
        **engine.parallel.to_json(),
        "zero_stage": engine.resolved.zero_stage,
        "backend": engine.resolved.backend,
        "micro_batch_rows": run.micro_batch_rows(engine.world_size),
        "accumulation_steps": run.accumulation_steps,
        **({} if (rows := run.global_batch_size) is None else {"global_batch_size": rows}),
        "compile": run.compile,
    }


@cache
def versions() -> dict[str, str]:
    """Versions of Python, this package and the libraries that affect numerics.

    Cached: each call parses the metadata of five installed packages.
    """
    libraries = ("torch", "accelerate", "deepspeed", "transformers", "sentencepiece")
    own = {"python": platform.python_version(), "minimind": __version__}
    return own | {name: version(name) for name in libraries}


def source_commit() -> str:
    """The git commit of the code that runs, or the package version outside a checkout."""
    if not disk.exists(PROJECT / ".git"):
        return __version__
    command = ["git", "-C", str(PROJECT), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return result.stdout.strip() or __version__
