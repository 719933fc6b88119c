"""Flags of optimizer, learning rate and precision: one dataclass field each."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.training_flags import flag

# Optimizers that read a flag; the flags that are not listed are read by all.
READ_BY = {
    **dict.fromkeys(("beta1", "beta2"), ("adamw", "muon", "lion")),
    **dict.fromkeys(("muon_lr", "muon_momentum", "muon_scaling"), ("muon",)),
    "sgd_momentum": ("sgd",),
}


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer, learning rate and precision."""

    optimizer: str = flag(
        "AdamW, Lion, SGD with momentum, or Muon for the matrices of the blocks with AdamW for"
        " embedding, head and norms; an optimizer block in the DeepSpeed JSON takes its place",
        "adamw",
        "optimizer",
        choices=("adamw", "muon", "lion", "sgd"),
    )
    learning_rate: float = flag("peak learning rate", 5e-4, "optimizer", above=0.0)
    min_lr_ratio: float = flag(
        "final learning rate as a fraction of the peak", 0.1, "optimizer", at_least=0.0, at_most=1.0
    )
    warmup_steps: int | None = flag(
        "optimizer steps of linear warm-up (default: 5 % of all steps, at most 100)",
        None,
        "optimizer",
        at_least=0,
    )
    schedule: str = flag(
        "learning rate after the warm-up: cosine and linear decay over the whole run; wsd (warm-up,"
        " stable, decay) only in its last steps; inverse_sqrt with the square root of the step",
        "cosine",
        "optimizer",
        choices=("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
    )
    decay_steps: int | None = flag(
        "last optimizer steps, in which wsd decays (default: by --decay_fraction)",
        None,
        "optimizer",
        at_least=1,
    )
    decay_fraction: float | None = flag(
        "the same as a fraction of all steps (default 0.2)",
        None,
        "optimizer",
        above=0.0,
        at_most=1.0,
    )
    decay_shape: str | None = flag(
        "decay of wsd: linear, or 1-sqrt (the default), which is steeper at first",
        None,
        "optimizer",
        choices=("linear", "1-sqrt"),
    )
    muon_lr: float | None = flag(
        "peak learning rate of Muon (default 0.02; `--learning_rate` with `--muon_scaling"
        " match_rms_adamw`)",
        None,
        "optimizer",
        above=0.0,
    )
    muon_momentum: float | None = flag(
        "momentum of Muon (default 0.95)", None, "optimizer", at_least=0.0, below=1.0
    )
    muon_scaling: str | None = flag(
        "factor of Muon's rate for a matrix of A rows and B columns: sqrt(max(1, A / B)) (original,"
        " the default), or 0.2 sqrt(max(A, B)), the size of AdamW's updates (match_rms_adamw)",
        None,
        "optimizer",
        choices=("original", "match_rms_adamw"),
    )
    mup_base_dim: int | None = flag(
        "muP: the --dim at which the learning rates were tuned, with the same dim / n_heads;"
        " initialization and rates are scaled by dim / mup_base_dim, so that they suit this width",
        None,
        "optimizer",
        at_least=1,
    )
    weight_decay: float = flag(
        "weight decay of matrices (norms are not decayed)", 0.1, "optimizer", at_least=0.0
    )
    beta1: float = flag(
        "AdamW first-moment decay; Lion: weight of the momentum in an update",
        0.9,
        "optimizer",
        at_least=0.0,
        below=1.0,
    )
    beta2: float = flag(
        "AdamW second-moment decay; Lion: decay of the momentum",
        0.95,
        "optimizer",
        at_least=0.0,
        below=1.0,
    )
    sgd_momentum: float | None = flag(
        "momentum of SGD (default 0.9)", None, "optimizer", at_least=0.0, below=1.0
    )
    ema: float | None = flag(
        "decay of an exponential moving average of the weights, such as 0.999: kept in float32,"
        " saved, evaluated and exported beside them",
        None,
        "optimizer",
        above=0.0,
        below=1.0,
    )
    grad_clip: float = flag(
        "maximum global gradient norm; 0 disables clipping", 1.0, "optimizer", at_least=0.0
    )
    dtype: str = flag(
        "precision of forward and backward; the optimizer's weights are float32",
        "bfloat16",
        "optimizer",
        choices=("bfloat16", "float16", "float32"),
    )
    tf32: bool = flag(
        "multiply float32 matrices as TensorFloat-32 on GPUs: several times as fast, with 10 bits"
        " of mantissa instead of 23",
        False,
        "optimizer",
    )

    spike_guard: bool = flag(
        "skip updates whose gradient norm is far above that of the steps before; if norm or loss"
        " stay high, go back to the newest checkpoint before and leave the rows out",
        False,
        "optimizer",
    )
    spike_factor: float | None = flag(
        "with --spike_guard: what counts as far, in robust standard deviations above the median"
        " (default 8)",
        None,
        "optimizer",
        above=0.0,
    )
    spike_window: int | None = flag(
        "with --spike_guard: steps that loss and gradient norm are compared with (default 128)",
        None,
        "optimizer",
        at_least=16,
        at_most=10_000,
    )
    max_rollbacks: int | None = flag(
        "with --spike_guard: times that a run may go back before it ends with status 6 (default 3)",
        None,
        "optimizer",
        at_least=0,
        at_most=1000,  # as many jumps as a checkpoint may hold
    )
    max_skipped: int = flag(
        "non-finite steps to skip before the run ends with status 6; counted since step 0, in"
        " float16 only those in a row",
        10,
        "optimizer",
        at_least=0,
    )
