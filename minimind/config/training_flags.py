"""Flags of training, data, output and engine: one dataclass field each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_DATA = "dataset/pretrain_hq.jsonl"

# Groups of settings that must match the checkpoint on resume (checkpoint/identity.py).
CHANGEABLE = ("batch", "schedule", "lr", "data", "tokenizer", "model", "dtype", "seed")


def flag(help: str, default: Any, group: str, **limits: Any) -> Any:
    """Return a dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"group": group, "help": help, **limits})


@dataclass(frozen=True)
class TrainingFlags:
    """Length of the run and optimizer."""

    epochs: int | None = flag(
        "passes over the training rows (1 unless --max_steps is given; with both, the first"
        " reached ends)",
        None,
        "length",
        at_least=1,
    )
    max_steps: int | None = flag(
        "optimizer steps in all, counted from step 0 of the run", None, "length", at_least=1
    )
    stop_at_step: int | None = flag(
        "save and exit 75 at this step, as a preemption would; the schedule is untouched",
        None,
        "length",
        at_least=1,
    )
    max_minutes: float | None = flag(
        "minutes after which to save and exit 75, as a preemption would; counted from the start"
        " of the process",
        None,
        "length",
        above=0.0,
    )
    batch_size: int = flag(
        "rows in one micro-batch of one process (with --split_batches: of all processes together)",
        8,
        "length",
        at_least=1,
    )
    split_batches: bool = flag(
        "count --batch_size over all processes, so that more of them do not change the step",
        False,
        "length",
    )
    accumulation_steps: int = flag(
        "micro-batches per optimizer step of one process", 1, "length", at_least=1
    )
    seed: int = flag(
        "seeds the weights, the row order and every step",
        42,
        "length",
        at_least=0,
        at_most=2**32 - 1,
    )
    deterministic: bool = flag("use deterministic kernels only", False, "length")

    learning_rate: float = flag("peak learning rate", 5e-4, "optimizer", above=0.0)
    min_lr_ratio: float = flag(
        "learning rate at the end, as a share of the peak",
        0.1,
        "optimizer",
        at_least=0.0,
        at_most=1.0,
    )
    warmup_steps: int | None = flag(
        "optimizer steps of linear warm-up (default: 5 % of all steps, at most 100)",
        None,
        "optimizer",
        at_least=0,
    )
    schedule: str = flag(
        "shape of the decay after warm-up",
        "cosine",
        "optimizer",
        choices=("cosine", "linear", "constant"),
    )
    weight_decay: float = flag(
        "AdamW weight decay of matrices (norms are not decayed)", 0.1, "optimizer", at_least=0.0
    )
    beta1: float = flag("AdamW first-moment decay", 0.9, "optimizer", at_least=0.0, below=1.0)
    beta2: float = flag("AdamW second-moment decay", 0.95, "optimizer", at_least=0.0, below=1.0)
    grad_clip: float = flag(
        "largest global gradient norm; 0 switches clipping off", 1.0, "optimizer", at_least=0.0
    )
    dtype: str = flag(
        "precision of the forward and backward pass; the optimizer's weights are float32",
        "bfloat16",
        "optimizer",
        choices=("bfloat16", "float16", "float32"),
    )

    max_skipped: int = flag(
        "optimizer steps that may be skipped because a loss or gradient is not finite, in all since"
        " step 0 (in float16 in a row, as the loss scaler finds its scale by skipping); one more"
        " ends the run with status 6",
        10,
        "optimizer",
        at_least=0,
    )


@dataclass(frozen=True)
class PlaceFlags:
    """Data, output and engine."""

    data_path: tuple[str, ...] = flag(
        "text files (.jsonl .jsonl.gz .jsonl.zst .txt .parquet), directories and globs of them,"
        " Hugging Face dataset directories; or one folder that `minimind prepare` wrote",
        (DEFAULT_DATA,),
        "data",
    )
    tokenizer: str | None = flag(
        "SentencePiece .model file, Hugging Face tokenizer.json, or a directory that has either",
        None,
        "data",
    )
    val_fraction: float = flag(
        "share of the documents held out for validation, chosen by hash",
        0.01,
        "data",
        at_least=0.0,
        below=1.0,
    )
    max_document_bytes: int = flag(
        "longest document accepted, in UTF-8 bytes; 2 or 8 MiB unless given where a --tokenizer"
        " takes a text at once (docs/data.md)",
        64 * 2**20,
        "data",
        at_least=1,
    )
    text_field: str = flag("field or column that has the text", "text", "data")
    on_bad_data: str = flag(
        "what is no document ends the run (error), or is counted and listed in rejected.jsonl",
        "error",
        "data",
        choices=("error", "skip"),
    )
    max_bad_fraction: float = flag(
        "share of the documents that may be bad with --on_bad_data skip",
        0.05,
        "data",
        at_least=0.0,
        below=1.0,
    )
    doc_mask: bool = flag(
        "stop attention, and begin positions anew, where a document ends within a row",
        False,
        "data",
    )
    num_workers: int = flag(
        "threads that read rows ahead, a step or, of small ones, several; 0: read when a step asks",
        1,
        "data",
        at_least=0,
    )
    cache_dir: str = flag(
        "where tokenizers and token shards are kept, keyed by content", "~/.cache/minimind", "data"
    )

    out_dir: str = flag("metrics, configuration and checkpoints of this run", "out", "output")
    resume: str = flag(
        "auto: the newest valid checkpoint in out_dir; none: start over; or a checkpoint's path",
        "auto",
        "output",
    )
    init_from: str | None = flag(
        "weights, shape and tokenizer that a new run begins with: a run's out_dir, a step_"
        " directory, what `minimind export` or `import` wrote, a Llama directory, a MiniMind2 file"
        " or directory",
        None,
        "model",
    )
    save_interval: int = flag(
        "optimizer steps between checkpoints; the last step is always saved",
        1000,
        "output",
        at_least=1,
    )
    save_minutes: float = flag(
        "minutes without a checkpoint after which one is saved as well; 0: only by --save_interval",
        30.0,
        "output",
        at_least=0.0,
    )
    keep_last: int = flag("checkpoints kept", 2, "output", at_least=1)
    async_save: bool = flag(
        "write checkpoints while training goes on; costs a copy of the optimizer state in memory",
        True,
        "output",
    )
    allow_change: str | None = flag(
        f"what may differ from the checkpoint on resume, by commas: {', '.join(CHANGEABLE)}",
        None,
        "output",
    )
    eval_interval: int = flag(
        "optimizer steps between validations; the last step is always validated",
        500,
        "output",
        at_least=1,
    )
    eval_rows: int = flag(
        "held-out rows per validation, over all processes; 0 switches it off",
        64,
        "output",
        at_least=0,
    )
    log_interval: int = flag(
        "optimizer steps between step lines; the last step and a stop have one too",
        10,
        "output",
        at_least=1,
    )

    compile: str = flag(
        "torch.compile the model and its loss; auto: on GPUs, where the model is one graph (ZeRO"
        " stages 0 to 2, no experts)",
        "auto",
        "engine",
        choices=("auto", "on", "off"),
    )
    loss: str = flag(
        "make the logits of a micro-batch at once (full), or of 1,024 positions at a time and again"
        " in the backward pass: less memory for another pass through the head (chunked)",
        "full",
        "engine",
        choices=("full", "chunked"),
    )
    deepspeed_config: str | None = flag(
        "DeepSpeed JSON, its 'auto' values filled from these flags; none: train without DeepSpeed"
        " (default: what `accelerate launch` was told)",
        None,
        "engine",
    )
    device: str = flag(
        "auto takes the GPUs where there are any", "auto", "engine", choices=("auto", "cpu", "cuda")
    )
    dist_timeout: int = flag(
        "seconds a rank waits for another before it gives up", 120, "engine", at_least=1
    )
    local_rank: int | None = flag(
        "appended by the deepspeed launcher; the environment says the same",
        None,
        "engine",
        at_least=0,
    )
    dry_run: bool = flag(
        "print what every number would be and what it would cost, and end", False, "engine"
    )
    verbose: bool = flag(
        "print every flag and DeepSpeed key with value and source at the start", False, "engine"
    )
    debug: bool = flag("show tracebacks and the launcher's own log", False, "engine")
    config: str | None = flag(
        "YAML file of flag names and values; flags given beside it win", None, "engine"
    )
