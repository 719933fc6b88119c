"""The DeepSpeed JSON with every "auto" filled from the run, and the source of each value.

Pure: no deepspeed import. A literal that contradicts a flag somebody typed is an error naming both;
a literal against a mere default wins and becomes the run's own number. Nothing is left "auto".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.config import RunConfig
from minimind.errors import UsageError
from minimind.flags import convert, nearest

AUTO = "auto"
MISSING = object()


@dataclass(frozen=True)
class Resolved:
    """What DeepSpeed is given, the run whose numbers it agrees with, and who set each value."""

    config: dict[str, Any]
    run: RunConfig
    sources: dict[str, str]

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in force."""
        return int(self.config["zero_optimization"]["stage"])

    def table(self) -> str:
        """One line per value: key path, value, source."""
        rows = [(key, json.dumps(value)) for key, value in leaves(self.config).items()]
        wide = max(len(key) for key, _ in rows)
        broad = max(len(value) for _, value in rows)
        return "\n".join(f"  {k:<{wide}}  {v:<{broad}}  {self.sources[k]}" for k, v in rows)


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """The JSON object in `path`; a UsageError with line and column when it is none."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--deepspeed_config {path}: {error.strerror}; name a DeepSpeed JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: {error.msg}; mend the JSON there"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: holds {type(config).__name__}, not a JSON object; write one")
    return config


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value that is not itself an object, keyed by its dotted path."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def resolve(
    written: Mapping[str, Any], path: str, run: RunConfig, world_size: int, device: str
) -> Resolved:
    """`written` (read from `path`) and `run` made to agree, for so many processes on `device`."""
    config: dict[str, Any] = json.loads(json.dumps(written))
    if "scheduler" in config:
        raise UsageError(
            f"{path}: scheduler: the learning rate is set by --schedule, --warmup_steps and"
            " --min_lr_ratio; remove the block"
        )
    _require_objects(config, path)
    run = _adopt_dtype(config, path, run)
    problems: list[str] = []
    for key, name in FLAG_OF.items():
        literal = _get(config, key)
        if literal is not MISSING and literal != AUTO:
            run = _adopt(run, name, literal, f"{path}: {key}", problems)
    betas = _get(config, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, literal in zip(("beta1", "beta2"), betas, strict=True):
            run = _adopt(run, name, literal, f"{path}: optimizer.params.betas", problems)
    if problems:
        raise UsageError("; ".join(problems))
    stage = _get(config, "zero_optimization.stage")
    filled = _filled(run, world_size, device, 0 if stage in (MISSING, AUTO) else stage)
    sources = {key: path for key in leaves(config)}
    always = ALWAYS + (ADAM if _get(config, "optimizer.type") in ("Adam", "AdamW") else ())
    for key, (value, source) in filled.items():
        literal = _get(config, key)
        wanted = literal == AUTO or (literal is MISSING and key in always)
        if wanted:
            _set(config, key, value)
            sources[key] = source
    _check(config, path, run, world_size, device)
    return Resolved(config, run, {key: sources[key] for key in leaves(config)})


FLAG_OF = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "grad_clip",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
}
# DeepSpeed has a default of its own for each of these (clipping: 1.0), so they are always written.
ALWAYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
)


# Likewise, once a file names Adam at all.
ADAM = tuple(f"optimizer.params.{name}" for name in ("lr", "betas", "weight_decay", "torch_adam"))
ADAM_PARAMS = (
    *(
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "foreach",
        "fused",
        "capturable",
    ),
    *("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"),
)
OBJECTS = ("bf16", "fp16", "zero_optimization", "optimizer", "optimizer.params")


def _require_objects(config: Mapping[str, Any], path: str) -> None:
    for key in OBJECTS:
        value = _get(config, key)
        if value is not MISSING and not isinstance(value, dict):
            raise UsageError(f"{path}: {key} is {json.dumps(value)}, not an object; write {{...}}")


def _adopt(run: RunConfig, name: str, literal: Any, where: str, problems: list[str]) -> RunConfig:
    """The run with `literal` as its `name`, unless a typed flag says otherwise."""
    current = getattr(run, name)
    try:
        value = convert(name, literal, where)
    except UsageError as error:
        problems.append(str(error))
        return run
    if value == current:
        return run
    if run.is_explicit(name):
        problems.append(
            f"{where} is {literal} but {run.sources[name]} says {name} = {current}; drop the flag,"
            f' or write "auto" in the file'
        )
        return run
    return run.with_values(where, **{name: value})


def _adopt_dtype(config: Mapping[str, Any], path: str, run: RunConfig) -> RunConfig:
    """The run in the precision the file's bf16 / fp16 blocks spell out, if they do."""
    asked = {name: _get(config, f"{key}.enabled") for key, name in DTYPE_BLOCKS.items()}
    on = [name for name, value in asked.items() if value is True]
    if len(on) > 1:
        raise UsageError(f"{path}: bf16.enabled and fp16.enabled are both true; turn one off")
    if not on and asked.get(run.dtype) is not False:
        return run
    dtype = on[0] if on else "float32"
    if dtype == run.dtype:
        return run
    key = next(k for k, name in DTYPE_BLOCKS.items() if name in (dtype, run.dtype))
    where = f"{path}: {key}.enabled"
    if run.is_explicit("dtype"):
        raise UsageError(
            f"{where} is {json.dumps(asked[DTYPE_BLOCKS[key]])} but {run.sources['dtype']} says"
            f' dtype = {run.dtype}; drop the flag, or write "auto" in the file'
        )
    return run.with_values(where, dtype=dtype)


DTYPE_BLOCKS = {"bf16": "bfloat16", "fp16": "float16"}


def _filled(run: RunConfig, world_size: int, device: str, stage: Any) -> dict[str, tuple[Any, str]]:
    """What each "auto" becomes, and why."""

    def by(name: str) -> str:
        return f"{name} ({run.sources[name]})"

    width = run.dim
    block = 12 * width**2  # dim x dim, the usual choice, is 64 all-reduces a step for tiny
    overlap = device == "cuda" and world_size > 1
    # DeepSpeed's fused AdamW has no checkpoint adapter where the optimizer is not partitioned.
    torch_adam = device == "cpu" or run.deterministic or stage == 0
    return {
        "train_micro_batch_size_per_gpu": (run.batch_size, by("batch_size")),
        "gradient_accumulation_steps": (run.accumulation_steps, by("accumulation_steps")),
        "train_batch_size": (
            run.batch_size * run.accumulation_steps * world_size,
            f"derived: batch_size x accumulation_steps x {world_size} processes",
        ),
        "gradient_clipping": (run.grad_clip, by("grad_clip")),
        "bf16.enabled": (run.dtype == "bfloat16", by("dtype")),
        "fp16.enabled": (run.dtype == "float16", by("dtype")),
        "zero_optimization.stage": (0, "DeepSpeed's default: no stage is named"),
        "zero_optimization.overlap_comm": (
            overlap,
            "derived: several GPUs" if overlap else "derived: not several GPUs",
        ),
        "zero_optimization.reduce_bucket_size": (block, "derived: 12 x dim x dim, about a block"),
        "zero_optimization.allgather_bucket_size": (
            block,
            "derived: 12 x dim x dim, about a block",
        ),
        "zero_optimization.stage3_prefetch_bucket_size": (
            width**2 * 9 // 10,
            "derived: 0.9 x dim x dim",
        ),
        "zero_optimization.stage3_param_persistence_threshold": (width * 10, "derived: 10 x dim"),
        "optimizer.params.lr": (run.learning_rate, by("learning_rate")),
        "optimizer.params.betas": ([run.beta1, run.beta2], "beta1, beta2"),
        "optimizer.params.eps": (1e-8, "AdamW's default"),
        "optimizer.params.weight_decay": (run.weight_decay, by("weight_decay")),
        "optimizer.params.torch_adam": (
            torch_adam,
            "derived: CPU, --deterministic or stage 0"
            if torch_adam
            else "derived: GPU, fused AdamW",
        ),
    }


def _check(
    config: Mapping[str, Any], path: str, run: RunConfig, world_size: int, device: str
) -> None:
    """Nothing, or a UsageError: an "auto" nobody fills, a stage or a batch that cannot be."""
    for name in config.get("optimizer", {}).get("params", {}):
        if config["optimizer"].get("type") in ("Adam", "AdamW") and name not in ADAM_PARAMS:
            raise UsageError(f"{path}: optimizer.params.{name}: {nearest(name, ADAM_PARAMS)}")
    left = [key for key, value in leaves(config).items() if value == AUTO]
    if left:
        raise UsageError(f'{path}: nothing fills "auto" of {", ".join(left)}; write a value there')
    stage = _get(config, "zero_optimization.stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(
            f"{path}: zero_optimization.stage is {json.dumps(stage)}; write 0, 1, 2 or 3"
        )
    rows = run.batch_size * run.accumulation_steps * world_size
    if config["train_batch_size"] != rows:
        raise UsageError(
            f"{path}: train_batch_size is {config['train_batch_size']}, but {run.batch_size} rows x"
            f" {run.accumulation_steps} micro-batches x {world_size} processes = {rows}; write"
            ' "auto" there, or change --batch_size or --accumulation_steps'
        )
    if run.dtype == "float16" and device == "cpu":
        raise UsageError(
            f"dtype = float16 ({run.sources['dtype']}) needs a GPU; use bfloat16 or float32 here"
        )
    if run.dtype == "float16" and stage == 0:
        raise UsageError(
            "dtype = float16 trains wrongly at ZeRO stage 0 in DeepSpeed 0.19.8 (gradients are"
            f" unscaled that were never scaled); use bfloat16, or stage 1 to 3 in {path}"
        )


def _get(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path, or `MISSING`."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value
