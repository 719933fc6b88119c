"""The flags of a run: one dataclass field each, with its default, limits and help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minimind.config.optimizers import NEWTON_SCHULZ, OPTIMIZERS

DEFAULT_DATA = "dataset/pretrain_hq.jsonl"

MOST_LEFT_OUT = 100_000  # rows; their places are computed for every 1,000 rows, in 10 ms on a CPU
VAL_LOSS = "val_loss"  # field of an `eval` event
# For --eval_rows auto: the rows of the first validation; the standard error that is small enough,
# as a share of the loss; the most time that all validations take, as a share of the training.
FIRST_EVAL_ROWS, EVAL_ERROR, EVAL_TIME = 64, 0.01, 0.03
MIRROR_WAIT_S = 300  # at the end of a run, for its uploads
BY_TASK = "--task sft"  # source of the values that it sets
AUTO = "auto"  # value, and source, of a flag that the start decides (config/rules.py)

# Groups of settings that must match the checkpoint on resume (checkpoint/identity.py).
CHANGEABLE = ("batch", "schedule", "lr", "data", "tokenizer", "model", "dtype", "seed")

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu")
ALONE = ("mps",)  # of them, those of one process without DeepSpeed


def is_auto(source: str) -> bool:
    """Whether the start decides a value, or has decided it."""
    return source == AUTO or source.startswith(f"{AUTO}: ")


def flag(help: str, default: Any, group: str, **limits: Any) -> Any:
    """Return a dataclass field that is also a command-line flag.

    `rule` says by what "auto" is decided, which then is the default in place of the plain number
    `default`; with `takes_auto` the flag takes "auto" for its default.
    """
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
        rule="by the tokens of the run",
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
        "text files (.jsonl .ndjson .json .txt .md .csv .tsv, also compressed; .parquet),"
        " directories, globs, Hugging Face dataset directories or URLs; hf:USER/SET[/PART] of the"
        " Hub; or one folder of `minimind prepare`",
        (DEFAULT_DATA,),
        "data",
    )
    source: tuple[str, ...] | None = flag(
        "folder of `minimind prepare` in place of --data_path; repeat it to mix several, by weight"
        " if all have one",
        None,
        "data",
        repeats="NAME=PATH:WEIGHT",
    )
    stages: str | None = flag(
        "YAML file of stages of the run, each with its weights of sources, row length and batch",
        None,
        "data",
    )
    task: str = flag(
        "pretrain on text, or fine-tune on conversations (sft): only assistant turns are targets",
        "pretrain",
        "data",
        choices=("pretrain", "sft"),
    )
    tokenizer: str | None = flag(
        "SentencePiece .model file, Hugging Face tokenizer.json, a directory with either, or"
        " hf:USER/MODEL of the Hub",
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
    val_path: str | None = flag(
        "text of your own that is held out for validation, in place of --val_fraction; or auto: the"
        " validation part of a folder in --data_path",
        None,
        "data",
    )
    max_document_bytes: int = flag(
        "longest document in UTF-8 bytes (default 2 or 8 MiB for some tokenizers, see"
        " docs/data.md)",
        64 * 2**20,
        "data",
        at_least=1,
    )
    text_field: str = flag(
        "field or column of the text, also one in another (meta.text), or a template of several"
        " ('{title}\\n{text}')",
        "text",
        "data",
    )
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
        "with --task sft: file of a Jinja chat template, as in tokenizer_config.json, or the name"
        " of a shipped one: thoughts_and_tools (default: that of the model, else"
        " thoughts_and_tools)",
        None,
        "data",
    )
    chat_template_kwargs: str | None = flag(
        "with --task sft: variables of the chat template as a JSON object, such as"
        ' {"enable_thinking": false}',
        None,
        "data",
    )
    template_date: str | None = flag(
        "with --task sft: the date YYYY-MM-DD that strftime_now gives a chat template, on"
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
        " `minimind export` or `import`, a directory of Llama, Mistral, Qwen or SmolLM (DIR or"
        " hf:DIR), a MiniMind2 file or directory; or hf:USER/MODEL of the Hugging Face Hub",
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
    keep_best_by: str = flag(
        f"what --keep_best compares: {VAL_LOSS}, or a score: a task of --eval_tasks, or `average`",
        VAL_LOSS,
        "output",
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
    eval_rows: int | None = flag(
        "held-out rows per validation, over all processes, spread over the held-out text; 0: none;"
        " auto (the default): as many as bring the standard error of the loss below 1 %, within"
        " 3 % of the time of training",
        None,
        "output",
        at_least=0,
        takes_auto=True,
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
    zero_update: str = flag(
        "who updates at ZeRO stages 0 to 2: DeepSpeed by its own path (deepspeed), or the same"
        " numbers with kernels per bucket instead of per parameter where the DeepSpeed JSON allows"
        " it (auto); the start says which",
        "auto",
        "engine",
        choices=("auto", "deepspeed"),
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
        "DeepSpeed JSON, its 'auto' values filled from these flags, or the name of a shipped one,"
        " such as zero1; none: train without DeepSpeed (default: the file of"
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
        "auto uses GPUs if there are any; mps (Apple silicon) has one process and no DeepSpeed",
        "auto",
        "engine",
        choices=DEVICES,
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
        " then exit; with --device (cuda, mps, ...) also where there is none",
        False,
        "engine",
    )
    verbose: bool = flag(
        "print every flag and DeepSpeed key with value and source at the start", False, "engine"
    )
    debug: bool = flag("show tracebacks and the launcher's own log", False, "engine")
    config: str | None = flag(
        "recipe (strong, sft) or YAML file of flag names and values; the command line"
        " takes precedence",
        None,
        "engine",
    )


MOST_EXPERTS = 1024  # per layer
MAX_ROPE_FACTOR = 1024  # also MAX_FACTOR of the model, which does not import this package


@dataclass(frozen=True)
class ShapeField:
    """How model and checkpoints know a flag of the shape."""

    name: str  # in MiniMindConfig
    group: str = "model"  # of the identity of a run
    of_experts: bool = False  # has no effect without them


SHAPE = {
    "dim": ShapeField("hidden_size"),
    "n_layers": ShapeField("num_hidden_layers"),
    "n_heads": ShapeField("num_attention_heads"),
    "n_kv_heads": ShapeField("num_key_value_heads"),
    "head_dim": ShapeField("head_dim"),
    "hidden_dim": ShapeField("intermediate_size"),
    "max_seq_len": ShapeField("max_position_embeddings", group="batch"),
    "vocab_size": ShapeField("vocab_size"),
    "rope_theta": ShapeField("rope_theta"),
    "rope_scaling": ShapeField("rope_scaling.rope_type"),
    "rope_factor": ShapeField("rope_scaling.factor"),
    "rope_original_length": ShapeField("rope_scaling.original_max_position_embeddings"),
    "no_rope_interval": ShapeField("no_rope_layer_interval"),
    "norm_eps": ShapeField("rms_norm_eps"),
    "qkv_bias": ShapeField("qkv_bias"),
    "qk_norm": ShapeField("qk_norm"),
    "tie_word_embeddings": ShapeField("tie_word_embeddings"),
    "use_moe": ShapeField("use_moe"),
    "n_routed_experts": ShapeField("n_routed_experts", of_experts=True),
    "num_experts_per_tok": ShapeField("num_experts_per_tok", of_experts=True),
    "n_shared_experts": ShapeField("n_shared_experts", of_experts=True),
    "aux_loss_alpha": ShapeField("aux_loss_alpha", of_experts=True),
    "norm_topk_prob": ShapeField("norm_topk_prob", of_experts=True),
}
OF_EXPERTS = tuple(flag for flag, row in SHAPE.items() if row.of_experts)


@dataclass(frozen=True)
class ModelFlags:
    """Flags of the model."""

    model: str | None = flag(
        "preset (such as tiny) or YAML file, overridden by the shape flags; or hf:DIR,"
        " the model that transformers builds from DIR/config.json (or from hf:USER/MODEL of the"
        " Hub), randomly initialized unless --init_from is given",
        None,
        "model",
    )
    dim: int = flag("width of the residual stream", 512, "model", at_least=1)
    n_layers: int = flag("decoder blocks", 8, "model", at_least=1)
    n_heads: int = flag("query heads", 8, "model", at_least=1)
    n_kv_heads: int = flag(
        "key/value heads, shared by groups of query heads", 2, "model", at_least=1
    )
    head_dim: int | None = flag(
        "channels per head (default: dim / n_heads)", None, "model", at_least=2
    )
    hidden_dim: int | None = flag(
        "width of the feed-forward layers (default: 8/3 dim, rounded up to a multiple of 64)",
        None,
        "model",
        at_least=1,
    )
    max_seq_len: int = flag(
        "tokens per row that are trained on; a row has one more", 512, "model", at_least=1
    )
    vocab_size: int = flag(
        "vocabulary size of the tokenizer trained on the data if --tokenizer is not given",
        6400,
        "model",
        at_least=512,
        at_most=2**31,
    )
    rope_theta: float = flag("base of the rotary frequencies", 1e6, "model", above=0.0)
    rope_scaling: str | None = flag(
        "extend the context of a trained model: linear (position interpolation), ntk (a larger"
        " --rope_theta), yarn, or llama3 (as Llama 3.1) (default: that of --init_from)",
        None,
        "model",
        choices=("linear", "ntk", "yarn", "llama3"),
    )
    rope_factor: float | None = flag(
        "with --rope_scaling: times by which the context grows (default: max_seq_len /"
        " rope_original_length); sets max_seq_len if that is not given",
        None,
        "model",
        above=1.0,
        at_most=MAX_ROPE_FACTOR,
    )
    rope_original_length: int | None = flag(
        "with --rope_scaling: positions that the model was trained on before (default: those of"
        " --init_from)",
        None,
        "model",
        at_least=1,
        at_most=2**20,
    )
    no_rope_interval: int = flag(
        "one layer of so many is without rotary positions (SmolLM3: 4); 0: none",
        0,
        "model",
        at_least=0,
    )
    norm_eps: float = flag("added to the mean square in every norm", 1e-5, "model", above=0.0)
    use_flash_attn: bool = flag(
        "torch's fused attention; off: the explicit reference", True, "model"
    )
    qkv_bias: bool = flag("add biases to queries, keys and values, as in Qwen2", False, "model")
    qk_norm: bool = flag("normalize each head's queries and keys, as in Qwen3", False, "model")
    tie_word_embeddings: bool = flag(
        "share one matrix between token embedding and output head", True, "model"
    )
    zero_init_outputs: bool = flag(
        "start the output projections of attention and feed-forward at 0, so that every block of a"
        " new model returns its input",
        False,
        "model",
    )
    embedding_init: str = flag(
        "start embedding and head of a new model from random numbers, or from which token follows"
        " which in the training text (bigrams: an untied head, seconds at the start)",
        "random",
        "model",
        choices=("random", "bigrams"),
    )
    use_moe: bool = flag(
        "replace every feed-forward layer by a mixture of experts of width hidden_dim",
        False,
        "model",
    )
    n_routed_experts: int = flag(
        "routed experts per layer", 4, "model", at_least=1, at_most=MOST_EXPERTS
    )
    num_experts_per_tok: int = flag("routed experts per token", 2, "model", at_least=1)
    n_shared_experts: int = flag(
        "experts that process every token", 1, "model", at_least=0, at_most=MOST_EXPERTS
    )
    aux_loss_alpha: float = flag("weight of the load-balancing loss", 0.01, "model", at_least=0.0)
    norm_topk_prob: bool = flag(
        "normalize the weights of a token's experts to a sum of 1", True, "model"
    )
    gradient_checkpointing: bool = flag(
        "recompute each block in the backward pass: less memory, a third more work, the same"
        " result",
        False,
        "model",
    )

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def feed_forward_width(self) -> int:
        """Width of the feed-forward; its default as in the model, which does not import this."""
        return self.hidden_dim or 64 * -(-8 * self.dim // (3 * 64))


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer, learning rate and precision."""

    optimizer: str = flag(
        "AdamW, Lion, SGD with momentum, or Muon for the matrices of the blocks with AdamW for"
        " embedding, head and norms; an optimizer block in the DeepSpeed JSON takes its place",
        "adamw",
        "optimizer",
        choices=tuple(OPTIMIZERS),
    )
    learning_rate: float = flag(
        "peak learning rate",
        5e-4,
        "optimizer",
        above=0.0,
        rule="by the parameters and tokens of the run",
    )
    min_lr_ratio: float = flag(
        "final learning rate as a fraction of the peak",
        0.1,
        "optimizer",
        at_least=0.0,
        at_most=1.0,
        takes_auto=True,
    )
    warmup_steps: int | None = flag(
        "optimizer steps of linear warm-up",
        None,
        "optimizer",
        at_least=0,
        rule="by the steps of the run",
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
        takes_auto=True,
    )
    muon_momentum: float | None = flag(
        "momentum of Muon (default 0.95)",
        None,
        "optimizer",
        at_least=0.0,
        below=1.0,
        takes_auto=True,
    )
    muon_scaling: str | None = flag(
        "factor of Muon's rate for a matrix of A rows and B columns: sqrt(max(1, A / B)) (original,"
        " the default), or 0.2 sqrt(max(A, B)), the size of AdamW's updates (match_rms_adamw)",
        None,
        "optimizer",
        choices=("original", "match_rms_adamw"),
        takes_auto=True,
    )
    muon_steps: int | None = flag(
        "Newton-Schulz iterations by which Muon orthogonalizes an update (default 5)",
        None,
        "optimizer",
        at_least=1,
        takes_auto=True,
    )
    muon_coefficients: str | None = flag(
        "polynomials of these iterations: quintic, the same in each, leaves singular values between"
        " 0.68 and 1.2 (the default); polar_express, the best one for each (Amsel et al. 2025),"
        " brings them to 1",
        None,
        "optimizer",
        choices=tuple(NEWTON_SCHULZ),
        takes_auto=True,
    )
    cautious_weight_decay: bool = flag(
        "with Muon, also for its weights of AdamW: decay only where the update, too, makes a weight"
        " smaller (Chen et al. 2025)",
        False,
        "optimizer",
    )
    mup_base_dim: int | None = flag(
        "muP: the --dim at which the learning rates were tuned, with the same dim / n_heads;"
        " initialization and rates are scaled by dim / mup_base_dim, so that they suit this width",
        None,
        "optimizer",
        at_least=1,
    )
    weight_decay: float = flag(
        "weight decay of matrices (norms and biases are not decayed)",
        0.1,
        "optimizer",
        at_least=0.0,
        rule="by passes over the text",
    )
    beta1: float = flag(
        "AdamW first-moment decay; Lion: weight of the momentum in an update",
        0.9,
        "optimizer",
        at_least=0.0,
        below=1.0,
        takes_auto=True,
    )
    beta2: float = flag(
        "AdamW second-moment decay; Lion: decay of the momentum",
        0.95,
        "optimizer",
        at_least=0.0,
        below=1.0,
        takes_auto=True,
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
        "precision of forward and backward; the optimizer's weights are float32; auto: that of the"
        " checkpoint, else bfloat16 where the device of every rank has instructions for it, else"
        " float32",
        AUTO,
        "optimizer",
        choices=(AUTO, "bfloat16", "float16", "float32"),
        takes_auto=True,
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


# Names of Accelerate.
TRACKERS = (
    *("wandb", "tensorboard", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab"),
    "trackio",
)


@dataclass(frozen=True)
class ReportFlags:
    """Outputs besides metrics.jsonl."""

    profile: bool = flag("print how each step's time is spent", False, "output")
    profile_interval: int = flag("optimizer steps between profile tables", 10, "output", at_least=1)
    trace_steps: str | None = flag(
        "FIRST:LAST: steps, both included, of which every rank writes a Chrome trace to"
        " out_dir/traces",
        None,
        "output",
    )
    peak_tflops: float | None = flag(
        "peak of one device in TFLOPS in --dtype, dense, for MFU (default: data sheet values of"
        " known NVIDIA GPUs)",
        None,
        "output",
        above=0.0,
    )
    report_to: str = flag(
        "trackers that receive all metrics, separated by commas: none, or"
        f" {', '.join(TRACKERS)}; a failing one never stops the run",
        "none",
        "output",
    )
    wandb_project: str = flag("project name in the trackers", "minimind", "output")
    wandb_run_name: str | None = flag(
        "run name in the trackers (default: the last folder of --out_dir)", None, "output"
    )
    sample_interval: int = flag(
        "optimizer steps between text samples; 0: none", 0, "output", at_least=0
    )
    sample_prompts: str | None = flag(
        "file of prompts for the samples: one per line, or .jsonl with a prompt field (default:"
        " one empty prompt)",
        None,
        "output",
    )
    eval_tasks: str | None = flag(
        "tasks that score the model, separated by commas: cloze, needle, arithmetic, bits_per_byte,"
        " repetition, a task of lm-eval, or DIR/NAME of a folder of its YAML files; NAME:chat asks"
        " in the chat template of --task sft",
        None,
        "output",
    )
    eval_tasks_interval: int = flag(
        "optimizer steps between scores; the last step is always scored; 0: none",
        0,
        "output",
        at_least=0,
    )
    eval_tasks_limit: int = flag(
        "questions of each task, the first ones, over all processes", 100, "output", at_least=1
    )

    def trackers(self) -> tuple[str, ...]:
        """Unique tracker names of --report_to; empty for `none`."""
        if self.report_to.strip() == "none":
            return ()
        names = (name.strip() for name in self.report_to.split(","))
        return tuple(dict.fromkeys(name for name in names if name))
