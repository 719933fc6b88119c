"""Flags of training, data, output and engine: one dataclass field each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_DATA = "dataset/pretrain_hq.jsonl"

MOST_LEFT_OUT = 100_000  # rows; their places are computed for every 1,000 rows, in 10 ms on a CPU
MIRROR_WAIT_S = 300  # at the end of a run, for its uploads
BY_TASK = "--task sft"  # source of the values that it sets

# Groups of settings that must match the checkpoint on resume (checkpoint/identity.py).
CHANGEABLE = ("batch", "schedule", "lr", "data", "tokenizer", "model", "dtype", "seed")


def flag(help: str, default: Any, group: str, **limits: Any) -> Any:
    """Return a dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"group": group, "help": help, **limits})


@dataclass(frozen=True)
class TrainingFlags:
    """Length of the run."""

    epochs: int | None = flag(
        "passes over the training rows (default 1 unless --max_steps or a budget is given; of"
        " several limits the first ends the run)",
        None,
        "length",
        at_least=1,
    )
    max_steps: int | None = flag(
        "total optimizer steps, counted from step 0 of the run", None, "length", at_least=1
    )
    max_tokens: float | None = flag(
        "budget in training tokens, such as 2e9, in whole steps", None, "length", above=0.0
    )
    max_flops: float | None = flag(
        "budget in FLOPs as `minimind plan` counts them, such as 1e18, in whole steps",
        None,
        "length",
        above=0.0,
    )
    tokens_per_param: float | None = flag(
        "budget in training tokens per parameter, such as 20, in whole steps",
        None,
        "length",
        above=0.0,
    )
    stop_at_step: int | None = flag(
        "save and exit with status 75 at this step, like a preemption; the schedule is unchanged",
        None,
        "length",
        at_least=1,
    )
    max_minutes: float | None = flag(
        "minutes from the start of the process after which to save and exit with status 75",
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
    split_batches: bool = flag("count --batch_size over all processes together", False, "length")
    accumulation_steps: int = flag(
        "micro-batches of one process per optimizer step", 1, "length", at_least=1
    )
    seed: int = flag(
        "seed of weights, row order and steps", 42, "length", at_least=0, at_most=2**32 - 1
    )
    deterministic: bool = flag("use deterministic kernels only", False, "length")


@dataclass(frozen=True)
class PlaceFlags:
    """Data, output and engine."""

    data_path: tuple[str, ...] = flag(
        "text files (.jsonl .jsonl.gz .jsonl.zst .txt .parquet), directories, globs or Hugging"
        " Face dataset directories; or one folder of `minimind prepare`",
        (DEFAULT_DATA,),
        "data",
    )
    task: str = flag(
        "pretrain on text, or fine-tune on conversations (sft): only assistant turns are targets",
        "pretrain",
        "data",
        choices=("pretrain", "sft"),
    )
    tokenizer: str | None = flag(
        "SentencePiece .model file, Hugging Face tokenizer.json, or a directory with either",
        None,
        "data",
    )
    val_fraction: float = flag(
        "fraction of documents held out for validation, by hash",
        0.01,
        "data",
        at_least=0.0,
        below=1.0,
    )
    max_document_bytes: int = flag(
        "longest document in UTF-8 bytes (default 2 or 8 MiB for some tokenizers, see"
        " docs/data.md)",
        64 * 2**20,
        "data",
        at_least=1,
    )
    text_field: str = flag("field or column of the text", "text", "data")
    on_bad_data: str = flag(
        "stop at a bad document (error), or skip and list it in rejected.jsonl",
        "error",
        "data",
        choices=("error", "skip"),
    )
    max_bad_fraction: float = flag(
        "fraction of documents that may be bad with --on_bad_data skip",
        0.05,
        "data",
        at_least=0.0,
        below=1.0,
    )
    allow_lossy_tokenizer: bool = flag(
        "train although the tokenizer loses more than 0.1 % of the text", False, "data"
    )
    doc_mask: bool = flag(
        "restrict attention to the document, and restart positions in each", False, "data"
    )
    train_on: str | None = flag(
        "with --task sft: the targets are all assistant turns (assistant, the default), the last"
        " one of each conversation (last), or everything (all)",
        None,
        "data",
        choices=("assistant", "last", "all"),
    )
    chat_template: str | None = flag(
        "with --task sft: file of a Jinja chat template, as in tokenizer_config.json (default: one"
        " special token before each turn, and one after)",
        None,
        "data",
    )
    template_date: str | None = flag(
        "with --task sft: the date YYYY-MM-DD that a chat template with strftime_now is told, on"
        " every day of the run (default: 2024-07-26, which Llama 3 has for a host without a clock)",
        None,
        "data",
    )
    skip_rows: str | None = flag(
        "file of rows that are never read: per line a row such as 17, a range such as 17:19, or a"
        " JSON object with a row; `minimind data at RUN --steps A:B --rows` prints one",
        None,
        "data",
    )
    num_workers: int = flag(
        "threads that prefetch rows; 0: read in the training thread", 1, "data", at_least=0
    )
    cache_dir: str = flag(
        "cache of tokenizers and token shards, keyed by content", "~/.cache/minimind", "data"
    )
    max_cache_gib: float | None = flag(
        "GiB of fetched objects that --cache_dir keeps; others are deleted, oldest first",
        None,
        "data",
        above=0.0,
    )

    out_dir: str = flag("metrics, configuration and checkpoints of this run", "out", "output")
    resume: str = flag(
        "auto: the newest valid checkpoint of out_dir; none: start over; or the path of a"
        " checkpoint",
        "auto",
        "output",
    )
    init_from: str | None = flag(
        "initial weights, shape and tokenizer: a run's out_dir, a step_ directory, a directory of"
        " `minimind export` or `import`, a directory of Llama, Mistral or Qwen3 (DIR or hf:DIR), a"
        " MiniMind2 file or directory",
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
        "also save after this many minutes without a checkpoint; 0: never",
        30.0,
        "output",
        at_least=0.0,
    )
    keep_last: int = flag("newest checkpoints to keep", 2, "output", at_least=1)
    keep_every: int = flag(
        "also keep checkpoints whose step is a multiple of this; 0: none", 0, "output", at_least=0
    )
    keep_best: int = flag(
        "also keep this many checkpoints with the lowest validation loss, of those saved at a step"
        " that was validated; 0: none",
        0,
        "output",
        at_least=0,
    )
    mirror: str | None = flag(
        "URL (s3://, gs:// or file://) to which checkpoints are uploaded in the background, and"
        " from which --resume auto fetches one that is newer than those of out_dir; the end of the"
        f" run waits for uploads, at most {MIRROR_WAIT_S} s",
        None,
        "output",
    )
    async_save: bool = flag(
        "write checkpoints in the background; needs memory for a copy of the optimizer state",
        True,
        "output",
    )
    allow_change: str | None = flag(
        "settings that may differ from the checkpoint, separated by commas:"
        f" {', '.join(CHANGEABLE)}",
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
        "held-out rows per validation, over all processes; 0 disables it", 64, "output", at_least=0
    )
    log_interval: int = flag("optimizer steps between log lines", 10, "output", at_least=1)

    verify_interval: int = flag(
        "optimizer steps between checks for silent corruption: ranks compare weights and state, and"
        " compute some rows again, each twice and once for its neighbour; 0: never",
        0,
        "engine",
        at_least=0,
    )
    on_corruption: str | None = flag(
        "with --verify_interval: log what differs and go on (warn, the default), or end the run"
        " with status 11 (stop)",
        None,
        "engine",
        choices=("warn", "stop"),
    )
    compile: str = flag(
        "torch.compile the model and its loss; auto: on GPUs, for ZeRO stages 0 to 2 without"
        " experts",
        "auto",
        "engine",
        choices=("auto", "on", "off"),
    )
    loss: str = flag(
        "compute the logits of a micro-batch at once (full), or of 1,024 positions at a time,"
        " recomputed in the backward pass (chunked): less memory, slower; auto: chunked on GPUs if"
        " the model is not compiled",
        "auto",
        "engine",
        choices=("auto", "full", "chunked"),
    )
    deepspeed_config: str | None = flag(
        "DeepSpeed JSON, its 'auto' values filled from these flags, or the name of one of"
        " configs/deepspeed, such as zero1; none: train without DeepSpeed (default: the file of"
        " `accelerate launch`)",
        None,
        "engine",
    )
    sequence_parallel: int = flag(
        "adjacent processes that divide the positions of each row (Ulysses), for long rows",
        1,
        "engine",
        at_least=1,
    )
    tensor_parallel: int = flag(
        "processes that share every weight matrix of a block and read the same rows; needs"
        " DeepSpeed at ZeRO stages 0 to 2",
        1,
        "engine",
        at_least=1,
    )
    device: str = flag(
        "auto uses GPUs if there are any", "auto", "engine", choices=("auto", "cpu", "cuda")
    )
    dist_timeout: int = flag("seconds that a rank waits for another", 120, "engine", at_least=1)
    local_rank: int | None = flag(
        "set by the deepspeed launcher; the environment has the same value",
        None,
        "engine",
        at_least=0,
    )
    dry_run: bool = flag(
        "print every resolved value and its cost after a look at every path and the first records,"
        " then exit; with --device cuda also where there is no GPU",
        False,
        "engine",
    )
    verbose: bool = flag(
        "print every flag and DeepSpeed key with value and source at the start", False, "engine"
    )
    debug: bool = flag("show tracebacks and the launcher's own log", False, "engine")
    config: str | None = flag(
        "recipe (configs/recipes/*.yaml) or YAML file of flag names and values; the command line"
        " takes precedence",
        None,
        "engine",
    )
