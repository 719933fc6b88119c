"""The flags of a run: a typed line each, whose docstring is its help, in the groups of --help.

Parser, help, docs/flags.md and checks read `FLAGS`.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any

from minimind.config.optimizers import NEWTON_SCHULZ, OPTIMIZERS

DEFAULT_DATA = "dataset/pretrain_hq.jsonl"

MOST_LEFT_OUT = 100_000  # rows; their places are computed for every 1,000 rows, in 10 ms on a CPU
VAL_LOSS = "val_loss"  # field of an `eval` event
# For --eval_rows auto: the rows of the first validation; the standard error that is small enough,
# as a share of the loss; the most time that all validations take, as a share of the training.
FIRST_EVAL_ROWS, EVAL_ERROR, EVAL_TIME = 64, 0.01, 0.03
MIRROR_WAIT_S = 300  # at the end of a run, for its uploads
FEWEST_PIECES = 512  # of a vocabulary that is trained
MOST_EXPERTS = 1024  # per layer
MAX_ROPE_FACTOR = 1024  # also MAX_FACTOR of the model, which does not import this package
AUTO = "auto"  # value of a flag that the start decides (config/rules.py)
EPOCH = "epoch"  # value of an interval: the steps of one pass, which the start counts
CODE = "MODULE:FUNCTION"  # placeholder of the value of a flag that takes a user's function
OWN_CODE = re.compile(r"(?!.*\.py:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
MIXED = "bf16-mixed"  # value of --dtype: products in bf16 by torch.autocast, all else in fp32

# Groups of settings that must match the checkpoint on resume (checkpoint/identity.py).
CHANGEABLE = ("batch", "schedule", "lr", "data", "tokenizer", "model", "dtype", "seed")

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu")
ALONE = ("mps",)  # devices that train in a single process, without DeepSpeed
# Names of Accelerate.
TRACKERS = (
    *("wandb", "tensorboard", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab"),
    "trackio",
)
MUON = OPTIMIZERS["muon"].defaults

LIMITS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


@dataclass(frozen=True)
class Flag:
    """A flag as `--help`, the parser and the checks read it.

    A condition is the name of a flag that has another value than its default, or `name=value`.
    """

    name: str
    owner: type  # the class with its line and docstring; the group of a run's flag in --help
    type: str  # int, float, str, bool or tuple; a command also has others
    default: Any
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    unset: Any = None  # replaces a default of None (`RunConfig.in_force`)
    # How the start decides the flag: "auto" is then what is not given, and `default` the value
    # where the rule does not apply.
    rule: str = ""
    takes_auto: bool = False  # "auto" stands for the default
    takes_epoch: bool = False  # "epoch" stands for the steps of one pass over the text
    repeats: str = ""  # placeholder of the value of a flag that may be given several times
    metavar: str = ""  # placeholder of each of its values, where it is not of the type
    needs: str = ""  # condition without which the flag has no effect
    excludes: Mapping[str, str] = field(default_factory=dict)  # conditions, each with its reason
    takes_code: bool = False  # beside its choices also CODE, a function of the user's own
    built_in: bool = False  # only the built-in decoder has it, no model of transformers

    @property
    def group(self) -> str:
        """The group of a run's flag in --help."""
        return self.owner.__name__.lower()

    @property
    def help(self) -> str:
        """Its docstring, after what it needs."""
        prefix = f"with {as_words(self.needs)}: " if self.needs else ""
        return prefix + self.docstring

    @property
    def docstring(self) -> str:
        """The text below its line, as one line."""
        return docstrings(self.owner.__module__)[self.owner.__name__, self.name]

    @property
    def may_be_auto(self) -> bool:
        return bool(self.rule) or self.takes_auto

    @property
    def shown_default(self) -> str:
        """The default as typed on the command line; empty for none."""
        if self.rule:
            return f"{AUTO}, {self.rule}"
        value = self.unset if self.default is None else self.default
        return format_default(value) or ("off" if value is False else "")

    @property
    def limits(self) -> str:
        """What numbers it takes: `at least 0 and below 1`; empty for any."""
        bounds = ((words, getattr(self, limit)) for limit, (words, _) in LIMITS.items())
        limits = [f"{words} {number(bound)}" for words, bound in bounds if bound is not None]
        return " and ".join(limits)

    def unmet(self, value: Any) -> str:
        """The requirement that a value fails, its choices or its limits; empty if it meets them."""
        is_code = self.takes_code and OWN_CODE.fullmatch(value)
        if self.choices and value not in self.choices and not is_code:
            return f"one of {', '.join(self.choices)}" + f", or {CODE}" * self.takes_code
        for limit, (_, holds) in LIMITS.items():
            bound = getattr(self, limit)
            if bound is not None and not holds(value, bound):
                return self.limits
        return ""


def number(value: float) -> str:
    """A number as typed: 1 for 1.0."""
    return f"{value:.16g}"


def as_words(condition: str) -> str:
    """A condition as it is typed: `--task sft` for `task=sft`."""
    return f"--{condition.replace('=', ' ')}"


def format_default(value: Any) -> str:
    """Format a default as typed; empty for no default or a switch that is off."""
    if value is None or value is False or value == []:
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if value is True:
        return "on"
    return number(value) if isinstance(value, float) else str(value)


def flag(default: Any, **attributes: Any) -> Any:
    """Return the dataclass field of a flag with these attributes of `Flag`."""
    return field(default=default, metadata=attributes)


@cache
def docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstring of each field of a module's classes, from the source: Python keeps none."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line, below in pairwise(node.body):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found[node.name, ast.unparse(line.target)] = " ".join(text.split())
    return found


def type_of(annotation: object) -> str:
    """The name of a type without its parameters, and without `| None`."""
    return str(annotation).split(" ")[0].split("[")[0]


def meets(values: object, flags: Mapping[str, Flag], condition: str) -> bool:
    """Whether a condition of `Flag` holds for an object with these flags as attributes."""
    name, _, wanted = condition.partition("=")
    value = getattr(values, name)
    return value == wanted if wanted else value != flags[name].default


@dataclass(frozen=True)
class Length:
    """How long the run is, and in which steps."""

    epochs: int | None = flag(None, ge=1)
    """passes over the training rows (default: 1 unless --max_steps or a budget is given; of several
    limits the first ends the run)"""
    max_steps: int | None = flag(None, ge=1)
    """total optimizer steps, counted from step 0 of the run"""
    max_tokens: float | None = flag(None, gt=0.0)
    """train on this many tokens, such as 2e9, rounded down to whole steps"""
    max_flops: float | None = flag(None, gt=0.0)
    """train for this many FLOPs, such as 1e18, counted as by `minimind plan` and rounded down to
    whole steps"""
    tokens_per_param: float | None = flag(None, gt=0.0)
    """train on this many tokens per parameter, such as 20, rounded down to whole steps"""
    stop_at_step: int | None = flag(None, ge=1)
    """save and exit with status 75 at this step, like a preemption; the schedule is unchanged"""
    max_minutes: float | None = flag(None, gt=0.0)
    """save and exit with status 75 this many minutes after the start of the process"""
    batch_size: int = flag(
        8, ge=1, rule="chosen from the number of training tokens and the memory of the device"
    )
    """rows in one micro-batch of one process (with --split_batches: of all processes together)"""
    split_batches: bool = flag(False)
    """count --batch_size over all processes together"""
    accumulation_steps: int = flag(1, ge=1)
    """micro-batches of one process per optimizer step"""
    global_batch_size: int | None = flag(
        None,
        ge=1,
        excludes={
            "split_batches": "both count rows over all processes",
            "stages": "a stage has a batch of its own",
            "use_moe": "the balance loss would count rows of padding",
        },
    )
    """rows of a step over all processes, the same on any number of them: a process takes
    micro-batches of at most --batch_size rows, as many as it needs, and rows of padding where they
    do not divide evenly"""
    seed: int = flag(42, ge=0, le=2**32 - 1)
    """seed of the initial weights, the order of the rows and the random numbers of steps"""
    deterministic: bool = flag(False)
    """use deterministic kernels only"""


@dataclass(frozen=True)
class Optimizer:
    """Optimizer, learning rate, precision, and what guards the updates."""

    optimizer: str = flag("adamw", choices=tuple(OPTIMIZERS))
    """muon updates the matrices of the blocks by Muon, and embedding, head and norms by AdamW; sgd
    has momentum; adamw_8bit is AdamW with moments in 8 bits. An optimizer in the DeepSpeed JSON
    takes precedence"""
    learning_rate: float = flag(
        5e-4, gt=0.0, rule="chosen from the numbers of parameters and training tokens"
    )
    """peak learning rate"""
    min_lr_ratio: float = flag(
        0.1,
        ge=0.0,
        le=1.0,
        takes_auto=True,
        excludes={"schedule=constant": "a constant rate does not fall"},
    )
    """final learning rate as a fraction of the peak"""
    warmup_steps: int | None = flag(None, ge=0, rule="chosen from the number of steps")
    """optimizer steps of linear warm-up"""
    schedule: str = flag("cosine", choices=("cosine", "linear", "constant", "wsd", "inverse_sqrt"))
    """learning rate after the warm-up: cosine and linear decay over the whole run, wsd (warm-up,
    stable, decay) decays only in the last steps, and inverse_sqrt falls with the square root of the
    step"""
    decay_steps: int | None = flag(
        None,
        ge=1,
        needs="schedule=wsd",
        excludes={"decay_fraction": "both say when the decay begins"},
    )
    """number of steps at the end in which the learning rate decays (default: from
    --decay_fraction)"""
    decay_fraction: float | None = flag(None, gt=0.0, le=1.0, needs="schedule=wsd", unset=0.2)
    """fraction of all steps, at the end, in which the learning rate decays"""
    decay_shape: str | None = flag(
        None, choices=("linear", "1-sqrt"), needs="schedule=wsd", unset="1-sqrt"
    )
    """the decay is linear (linear), or falls faster at first (1-sqrt)"""
    muon_lr: float | None = flag(None, gt=0.0, takes_auto=True)
    """peak learning rate of Muon (default: 0.02; `--learning_rate` with `--muon_scaling
    match_rms_adamw`)"""
    muon_momentum: float | None = flag(
        None, ge=0.0, lt=1.0, takes_auto=True, unset=MUON["muon_momentum"]
    )
    """momentum of Muon"""
    muon_scaling: str | None = flag(
        None, choices=("original", "match_rms_adamw"), takes_auto=True, unset=MUON["muon_scaling"]
    )
    """multiply Muon's rate for a matrix of A rows and B columns by sqrt(max(1, A / B)) (original),
    or by 0.2 sqrt(max(A, B)), so that updates are as large as AdamW's (match_rms_adamw)"""
    muon_steps: int | None = flag(None, ge=1, takes_auto=True, unset=MUON["muon_steps"])
    """number of Newton-Schulz iterations that orthogonalize an update of Muon"""
    muon_coefficients: str | None = flag(
        None, choices=tuple(NEWTON_SCHULZ), takes_auto=True, unset=MUON["muon_coefficients"]
    )
    """polar_express takes the best polynomial for each iteration (Amsel et al. 2025) and brings
    singular values to 1. quintic takes the same one in each and leaves them between 0.68 and 1.2"""
    cautious_weight_decay: bool = flag(False)
    """Muon: decay a weight only where the update also shrinks it (also for the weights that AdamW
    trains; Chen et al. 2025)"""
    mup_base_dim: int | None = flag(None, ge=1, built_in=True)
    """muP: the --dim at which the learning rates were tuned, with the same dim / n_heads.
    Initialization and rates are scaled by dim / mup_base_dim to suit this width"""
    freeze: tuple[str, ...] | None = flag(None, metavar="PATTERN")
    """parameters that are not trained, by name: patterns of the shell, such as 'model.layers.0.*'
    or '*embed_tokens*', in quotes"""
    weight_decay: float = flag(0.1, ge=0.0, rule="chosen from the number of passes over the text")
    """weight decay of matrices (norms and biases are not decayed)"""
    dropout: float = flag(0.0, ge=0.0, lt=1.0, built_in=True)
    """share of the elements that training sets to 0 in the embedding and in the output of each
    attention and feed-forward, such as 0.1"""
    beta1: float = flag(0.9, ge=0.0, lt=1.0, takes_auto=True)
    """AdamW first-moment decay; Lion: weight of the momentum in an update"""
    beta2: float = flag(0.95, ge=0.0, lt=1.0, takes_auto=True)
    """AdamW second-moment decay; Lion: decay of the momentum"""
    sgd_momentum: float | None = flag(
        None, ge=0.0, lt=1.0, unset=OPTIMIZERS["sgd"].defaults["sgd_momentum"]
    )
    """momentum of SGD"""
    ema: float | None = flag(None, gt=0.0, lt=1.0)
    """decay of an exponential moving average of the weights, such as 0.999. The average is kept in
    float32, and saved, evaluated and exported beside the weights"""
    grad_clip: float = flag(1.0, ge=0.0)
    """maximum global gradient norm; 0 disables clipping"""
    dtype: str = flag(
        AUTO, choices=(AUTO, "bfloat16", MIXED, "float16", "float32"), takes_auto=True
    )
    """precision of forward and backward; the optimizer keeps float32 weights. bf16-mixed has
    float32 weights and gradients in the model too, and bfloat16 products (torch.autocast). auto
    takes the dtype of the checkpoint, else bfloat16 if the device of every rank has instructions
    for it, else float32"""
    tf32: bool = flag(False)
    """multiply float32 matrices as TensorFloat-32 on GPUs, which is several times as fast and has
    10 bits of mantissa instead of 23"""
    spike_guard: bool = flag(
        False, excludes={"dtype=float16": "both skip updates, for different reasons"}
    )
    """skip an update whose gradient norm is far above the norms of earlier steps. If norm or loss
    stay high, go back to the newest checkpoint before them and leave their rows out"""
    spike_factor: float | None = flag(None, gt=0.0, needs="spike_guard", unset=8.0)
    """how far above the median a spike is, in robust standard deviations"""
    spike_window: int | None = flag(None, ge=16, le=10_000, needs="spike_guard", unset=128)
    """number of earlier steps that loss and gradient norm are compared with"""
    max_rollbacks: int | None = flag(None, ge=0, le=1000, needs="spike_guard", unset=3)
    """how often the run may go back before it ends with status 6"""
    max_skipped: int = flag(10, ge=0)
    """how many non-finite steps are skipped before the run ends with status 6. float16 counts
    consecutive steps, other dtypes count all since step 0"""


@dataclass(frozen=True)
class Model:
    """Shape and initial weights."""

    model: str | None = flag(None)
    """preset (such as tiny) or YAML file, overridden by the shape flags. Or hf:DIR, or
    hf:USER/MODEL of the Hub: transformers builds the model from its config.json, with random
    weights unless --init_from is given"""
    dim: int = flag(512, ge=1)
    """width of the residual stream"""
    n_layers: int = flag(8, ge=1)
    """decoder blocks"""
    n_heads: int = flag(8, ge=1)
    """query heads"""
    n_kv_heads: int = flag(2, ge=1)
    """key/value heads, shared by groups of query heads"""
    head_dim: int | None = flag(None, ge=2)
    """channels per head (default: dim / n_heads)"""
    hidden_dim: int | None = flag(None, ge=1)
    """width of the feed-forward layers (default: 8/3 dim, rounded up to a multiple of 64)"""
    max_seq_len: int = flag(512, ge=1)
    """number of training tokens per row; a row holds one more"""
    vocab_size: int = flag(6400, ge=FEWEST_PIECES, le=2**31)
    """vocabulary size of the tokenizer trained on the data if --tokenizer is not given"""
    rope_theta: float = flag(1e6, gt=0.0)
    """base of the rotary frequencies"""
    rope_scaling: str | None = flag(None, choices=("linear", "ntk", "yarn", "llama3"))
    """extend the context of a trained model: linear (position interpolation), ntk (a larger
    --rope_theta), yarn, or llama3 (as Llama 3.1) (default: as in --init_from)"""
    rope_factor: float | None = flag(None, gt=1.0, le=MAX_ROPE_FACTOR, needs="rope_scaling")
    """factor by which the context grows (default: max_seq_len / rope_original_length); it sets
    --max_seq_len if that is not given"""
    rope_original_length: int | None = flag(None, ge=1, le=2**20, needs="rope_scaling")
    """context length that the model was trained with before (default: as in --init_from)"""
    no_rope_interval: int = flag(0, ge=0)
    """leave out rotary positions in every Nth layer (SmolLM3: 4); 0: in none"""
    norm_eps: float = flag(1e-5, gt=0.0)
    """epsilon that is added to the mean square in every norm"""
    use_flash_attn: bool = flag(True)
    """use torch's fused attention; off: the explicit reference"""
    qkv_bias: bool = flag(False)
    """add biases to queries, keys and values, as in Qwen2"""
    qk_norm: bool = flag(False)
    """normalize each head's queries and keys, as in Qwen3"""
    tie_word_embeddings: bool = flag(True)
    """share one matrix between token embedding and output head"""
    zero_init_outputs: bool = flag(
        False, built_in=True, excludes={"init_from": "the weights of --init_from are trained"}
    )
    """start the output projections of attention and feed-forward at 0, so that every block of a new
    model returns its input"""
    embedding_init: str = flag(
        "random",
        choices=("random", "bigrams"),
        built_in=True,
        excludes={
            "init_from": "the weights of --init_from are trained",
            "mup_base_dim": "muP scales random weights, which bigrams replace",
        },
    )
    """start embedding and head of a new model from random numbers, or from bigram counts of the
    training text; bigrams needs --no-tie_word_embeddings and takes a few seconds"""
    use_moe: bool = flag(False)
    """replace every feed-forward layer by a mixture of experts of width hidden_dim"""
    n_routed_experts: int = flag(4, ge=1, le=MOST_EXPERTS, needs="use_moe")
    """routed experts per layer"""
    num_experts_per_tok: int = flag(2, ge=1, needs="use_moe")
    """routed experts per token"""
    n_shared_experts: int = flag(1, ge=0, le=MOST_EXPERTS, needs="use_moe")
    """experts that process every token"""
    aux_loss_alpha: float = flag(0.01, ge=0.0, needs="use_moe")
    """weight of the load-balancing loss"""
    norm_topk_prob: bool = flag(True, needs="use_moe")
    """normalize the weights of a token's experts to a sum of 1"""
    gradient_checkpointing: bool = flag(False)
    """recompute each block in the backward pass, which takes less memory and a third more work for
    the same result"""
    init_from: str | None = flag(None)
    """place of the initial weights, the shape and the tokenizer: a run's out_dir, a step_
    directory, a directory of `minimind export` or `import`, a directory of Llama, Mistral, Qwen
    or SmolLM (DIR or hf:DIR), a MiniMind2 file or directory, or hf:USER/MODEL of the Hugging
    Face Hub"""
    teacher: str | None = flag(
        None,
        excludes={
            "loss=chunked": "the loss needs all logits",
            "sequence_parallel": "the teacher reads whole rows",
        },
    )
    """place of a model with the same tokenizer, as for --init_from, that the run is distilled from:
    at each target it also learns the probabilities of this teacher; or a folder of `minimind data
    logits`, which has them"""
    distill_weight: float = flag(0.5, ge=0.0, le=1.0, needs="teacher")
    """share W of the teacher in the loss, (1 - W) cross-entropy + W T^2 KL(teacher || student),
    where T is --distill_temperature; 0 is the cross-entropy alone, 1 goes without it"""
    distill_temperature: float = flag(1.0, gt=0.0, needs="teacher")
    """temperature of both distributions in the KL divergence; above 1, unlikely tokens count
    more"""


@dataclass(frozen=True)
class Data:
    """Text, tokenizer, and how rows are made of them."""

    data_path: tuple[str, ...] = flag((DEFAULT_DATA,))
    """text files (lines or a list of JSON, plain text, CSV, Parquet; also compressed), directories,
    globs, Hugging Face dataset directories or URLs; hf:USER/SET[/PART] of the Hub; or one folder of
    `minimind prepare`"""
    source: tuple[str, ...] | None = flag(None, repeats="NAME=PATH:WEIGHT")
    """folder of `minimind prepare`, or with --task sft conversations, in place of --data_path;
    repeat the flag to mix several, by weight if all have one"""
    loss_weight: tuple[str, ...] | None = flag(None, repeats="NAME=WEIGHT", needs="task=sft")
    """weight of the targets of a source in the loss (default: 1); repeat the flag for others"""
    stages: str | None = flag(
        None,
        excludes={
            "epochs": "stages do not read their sources in passes, so give --max_tokens or"
            " --max_steps",
            "max_flops": "the tokens of stages may differ in FLOPs, so give --max_tokens",
        },
    )
    """YAML file of the stages of the run; each has its weights of sources, row length and batch"""
    task: str = flag("pretrain", choices=("pretrain", "sft"))
    """pretrain on text, or fine-tune on conversations (sft), where only assistant turns are
    targets"""
    tokenizer: str | None = flag(None)
    """SentencePiece .model file, Hugging Face tokenizer.json, a directory with either, or
    hf:USER/MODEL of the Hub"""
    val_fraction: float = flag(0.01, ge=0.0, lt=1.0)
    """fraction of documents held out for validation, by hash"""
    val_path: str | None = flag(None)
    """text that is used for validation only, instead of --val_fraction; auto takes the validation
    part of a folder in --data_path"""
    max_document_bytes: int = flag(64 * 2**20, ge=1)
    """maximum bytes of a document in UTF-8; some tokenizers lower the default to 2 or 8 MiB
    (docs/data.md)"""
    text_field: str = flag("text", excludes={"task=sft": "conversations have fields of their own"})
    """field or column with the text, also a nested one (meta.text), or a template of several
    ('{title}\\n{text}')"""
    on_bad_data: str = flag("error", choices=("error", "skip"))
    """stop at a bad document (error), or skip and list it in rejected.jsonl"""
    max_bad_fraction: float = flag(0.05, ge=0.0, lt=1.0, needs="on_bad_data=skip")
    """fraction of documents that may be bad"""
    allow_lossy_tokenizer: bool = flag(False)
    """train although the tokenizer loses more than 0.1 % of the text"""
    doc_mask: bool = flag(False, built_in=True)
    """let tokens attend only to their own document, and restart positions in each document"""
    train_on: str | None = flag(
        None, choices=("assistant", "last", "all"), needs="task=sft", unset="assistant"
    )
    """compute the loss on all assistant turns (assistant), on the last one of each conversation
    (last), or on everything (all)"""
    chat_template: str | None = flag(None, needs="task=sft")
    """file of a Jinja chat template, as in tokenizer_config.json, or the name of a shipped one:
    thoughts_and_tools (default: the model's own, else thoughts_and_tools)"""
    chat_template_kwargs: str | None = flag(None, needs="task=sft")
    """variables of the chat template as a JSON object, such as {"enable_thinking": false}"""
    template_date: str | None = flag(None, needs="task=sft")
    """date (YYYY-MM-DD) shown to chat templates that print today's date, fixed for the whole run
    (default: 2024-07-26, as in Llama 3)"""
    skip_rows: str | None = flag(None)
    """file of rows that are never read. A line is a row such as 17, a range such as 17:19, or a
    JSON object with a row; `minimind data at RUN --steps A:B --rows` prints such a file"""
    num_workers: int = flag(1, ge=0)
    """threads that prefetch rows; 0: read in the training thread"""
    cache_dir: str = flag("~/.cache/minimind")
    """cache of tokenizers and token shards, keyed by content"""
    max_cache_gib: float | None = flag(None, gt=0.0)
    """maximum GiB of fetched objects in --cache_dir; the oldest are deleted first"""


@dataclass(frozen=True)
class Output:
    """What the run writes: checkpoints, validations, reports."""

    out_dir: str = flag("out")
    """metrics, configuration and checkpoints of this run"""
    resume: str = flag("auto")
    """auto continues from the newest valid checkpoint in --out_dir, none starts over; or give the
    path of a checkpoint"""
    save_interval: int = flag(1000, ge=1, takes_epoch=True)
    """optimizer steps between checkpoints, or epoch for those of one pass over the text; the last
    step is always saved"""
    save_minutes: float = flag(30.0, ge=0.0)
    """also save after this many minutes without a checkpoint; 0: never"""
    keep_last: int = flag(2, ge=1)
    """number of newest checkpoints to keep"""
    keep_every: int = flag(0, ge=0)
    """also keep checkpoints whose step is a multiple of this; 0: none"""
    keep_best: int = flag(0, ge=0)
    """also keep this many checkpoints with the lowest validation loss; only checkpoints of
    validated steps count; 0: none"""
    keep_best_by: str = flag(VAL_LOSS, needs="keep_best")
    """compare val_loss or a score: the name of a task in --eval_tasks, or `average`"""
    patience: int | None = flag(
        None,
        ge=1,
        needs="keep_best",
        excludes={"stages": "the run would end before its last stage"},
    )
    """end the run after this many validations in a row without an improvement of what
    --keep_best_by compares. With --schedule wsd, decay first"""
    min_delta: float = flag(0.0, ge=0.0, needs="patience")
    """smallest change of the loss or score that is an improvement"""
    mirror: str | None = flag(None)
    """URL (s3://, gs:// or file://) to which checkpoints are uploaded in the background. --resume
    auto fetches a checkpoint from there if it is newer than all in --out_dir. At its end, the run
    waits up to 300 s for uploads"""
    async_save: bool = flag(True)
    """write checkpoints in the background; needs memory for a copy of the optimizer state"""
    allow_change: str | None = flag(None)
    """settings that may differ from the checkpoint, separated by commas: batch, schedule, lr, data,
    tokenizer, model, dtype, seed"""
    eval_interval: int = flag(500, ge=1, takes_epoch=True)
    """optimizer steps between validations, or epoch for those of one pass over the text; the last
    step is always validated"""
    eval_at_start: bool = flag(False)
    """also validate the initial weights, before the first step"""
    eval_rows: int | None = flag(None, ge=0, takes_auto=True)
    """number of held-out rows per validation, over all processes, spread over the text; 0: none.
    auto (the default) takes as many as bring the standard error of the loss below 1 %, within 3 %
    of the training time"""
    log_interval: int = flag(10, ge=1)
    """optimizer steps between log lines"""
    profile: bool = flag(False)
    """print how each step's time is spent"""
    profile_interval: int = flag(10, ge=1, needs="profile")
    """optimizer steps between profile tables"""
    trace_steps: str | None = flag(None)
    """FIRST:LAST; every rank writes a Chrome trace of these steps, both included, to
    out_dir/traces"""
    peak_tflops: float | None = flag(None, gt=0.0)
    """dense peak of one device in --dtype, in TFLOPS, which MFU is a fraction of (default: from the
    data sheets of known NVIDIA GPUs)"""
    report_to: str = flag("none")
    """trackers that receive all metrics, separated by commas: none, or wandb, tensorboard, aim,
    clearml, comet_ml, dvclive, mlflow, swanlab, trackio; a failing tracker never stops the run"""
    wandb_project: str = flag("minimind", needs="report_to")
    """project name in the trackers"""
    wandb_run_name: str | None = flag(None, needs="report_to")
    """run name in the trackers (default: the last folder of --out_dir)"""
    sample_interval: int = flag(0, ge=0)
    """optimizer steps between text samples; 0: none"""
    sample_prompts: str | None = flag(None, needs="sample_interval")
    """file of prompts for the samples: one per line, or .jsonl with a prompt field (default: one
    empty prompt)"""
    eval_tasks: str | None = flag(None, needs="eval_tasks_interval")
    """tasks that score the model, separated by commas: cloze, needle, arithmetic, bits_per_byte,
    repetition, a task of lm-eval, or DIR/NAME of a folder of its YAML files; NAME:chat asks in the
    chat template of --task sft"""
    eval_tasks_interval: int = flag(0, ge=0, needs="eval_tasks")
    """optimizer steps between scores; the last step is always scored; 0: none"""
    eval_tasks_limit: int = flag(100, ge=1, needs="eval_tasks")
    """number of questions per task, over all processes; the first ones are asked"""


@dataclass(frozen=True)
class Engine:
    """How and where the run computes."""

    verify_interval: int = flag(0, ge=0)
    """how often ranks check each other for silent corruption, in optimizer steps: they compare
    weights and recompute a few rows; 0: never"""
    on_corruption: str | None = flag(
        None, choices=("warn", "stop"), needs="verify_interval", unset="warn"
    )
    """log what differs and continue (warn), or end the run with status 11 (stop)"""
    fingerprints: int = flag(0, ge=0)
    """steps between records of a few numbers of every block, by which `minimind compare` finds
    where two runs part; the first and the last step are recorded too; 0: none"""
    compile: str = flag("auto", choices=("auto", "on", "off"))
    """run torch.compile on the model and its loss; auto does so on GPUs, at ZeRO stages 0 to 2,
    without experts"""
    zero_update: str = flag("auto", choices=("auto", "deepspeed"))
    """how weights are updated at ZeRO stages 0 to 2: by DeepSpeed's own path (deepspeed), or with
    kernels per bucket instead of per parameter, where the DeepSpeed JSON allows it (auto). Both
    give the same numbers; the start says which is used"""
    loss: str = flag("auto", choices=("auto", "full", "chunked"), takes_code=True)
    """compute the logits of a micro-batch at once (full), or of 1,024 positions at a time
    (chunked), which takes less memory and more time. auto is chunked on GPUs if the model is not
    compiled. MODULE:FUNCTION trains with your own loss instead of the cross-entropy
    (docs/own_code.md)"""
    deepspeed_config: str | None = flag(None)
    """DeepSpeed JSON, or the name of a shipped one, such as zero1; its 'auto' values are filled
    from these flags. none trains without DeepSpeed (default: the file of `accelerate launch`)"""
    sequence_parallel: int = flag(
        1,
        ge=1,
        built_in=True,
        excludes={
            "use_moe": "the balance loss needs whole rows",
            "compile=on": "a model whose rows are divided is not compiled",
            "verify_interval": "rows that are divided are not computed again",
        },
    )
    """number of adjacent processes that divide the positions of each row (Ulysses), for long
    rows"""
    tensor_parallel: int = flag(1, ge=1)
    """number of processes that share every weight matrix of a block and read the same rows; needs
    DeepSpeed at ZeRO stages 0 to 2"""
    device: str = flag("auto", choices=DEVICES)
    """where the run computes; auto uses GPUs if there are any; mps (Apple silicon) has one process
    and no DeepSpeed"""
    dist_timeout: int = flag(120, ge=1)
    """maximum seconds that a rank waits for another"""
    local_rank: int | None = flag(None, ge=0)
    """set by the deepspeed launcher; the environment has the same value"""
    dry_run: bool = flag(False)
    """check flags, paths and the first records, print all values and the memory estimate, and exit;
    --device cuda works on a machine without a GPU"""
    verbose: bool = flag(False)
    """print every flag and DeepSpeed key with value and source at the start"""
    debug: bool = flag(False)
    """show tracebacks and the launcher's own log"""
    config: str | None = flag(None)
    """recipe (strong, sft) or YAML file of flag names and values; the command line takes
    precedence"""


GROUPS = (Length, Optimizer, Model, Data, Output, Engine)
FLAGS = {
    f.name: Flag(f.name, group, type_of(f.type), f.default, **f.metadata)
    for group in GROUPS
    for f in fields(group)
}
# The flags that `--help` shows, in this order.
COMMON = ("data_path", "out_dir", "model", "config", "max_steps", "epochs", "batch_size")
COMMON += ("accumulation_steps", "max_seq_len", "learning_rate", "optimizer", "dtype", "device")
COMMON += ("deepspeed_config", "tokenizer", "init_from", "resume", "save_interval")
COMMON += ("eval_interval", "dry_run")
# What decides each flag that has a rule.
RULED = {name: flag.rule for name, flag in FLAGS.items() if flag.rule}


@dataclass(frozen=True)
class ShapeField:
    """How model and checkpoints know a flag of the shape."""

    name: str  # in MiniMindConfig
    group: str = "model"  # of the identity of a run


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
    "n_routed_experts": ShapeField("n_routed_experts"),
    "num_experts_per_tok": ShapeField("num_experts_per_tok"),
    "n_shared_experts": ShapeField("n_shared_experts"),
    "aux_loss_alpha": ShapeField("aux_loss_alpha"),
    "norm_topk_prob": ShapeField("norm_topk_prob"),
}
# Without experts these have no effect.
OF_EXPERTS = tuple(name for name in SHAPE if FLAGS[name].needs == "use_moe")
