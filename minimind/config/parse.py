"""Parse the command line, --config files and model presets into a `RunConfig`.

Precedence: a flag on the command line > `--config FILE.yaml` > the model preset > the default.
Values of the Accelerate and DeepSpeed files override only the default (deepspeed/adopt.py).
Imports only the standard library and PyYAML, so errors appear before torch is imported. For a flag or
command of another project the message names ours.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import yaml

from minimind.config.arguments import EXAMPLE, Formatter, PrintCompletion, format_default
from minimind.config.checks import check, conflicts
from minimind.config.flags import AUTO, SHAPE
from minimind.config.run_config import (
    CONFIGS,
    DISTRIBUTION,
    FLAGS,
    RECIPES,
    RULED,
    RunConfig,
    deepspeed_files,
    files_by_name,
)
from minimind.errors import UsageError, fault_error
from minimind.runtime import disk
from minimind.runtime.durable_files import read_small_text
from minimind.runtime.file_kinds import form_of_folder
from minimind.runtime.urls import HUB_PREFIX


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                problem = f"duplicate key {name}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _TextLoader(_Loader):
    """Loader that keeps every scalar as text: `010` is not octal, `no` is not false."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        kinds = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
        self.yaml_implicit_resolvers = {}
        self.yaml_constructors = {tag: _Loader.yaml_constructors[tag] for tag in (None, *kinds)}

    def construct_scalar(self, node: Any) -> Any:
        """Return the text of a node; raise MarkedYAMLError if it is empty."""
        if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
            raise yaml.MarkedYAMLError(
                problem="the value is empty; remove the line, or quote the text",
                problem_mark=node.start_mark,
            )
        return super().construct_scalar(node)


def load_yaml(path: str, source: str) -> dict[str, Any]:
    """Load a mapping with YAML's types; `source` names its flag or variable in errors."""
    return _load(path, source, lambda text: yaml.load(text, _Loader))


def load_yaml_texts(path: str, source: str) -> dict[str, Any]:
    """Load a mapping with every scalar as text."""
    return _load(path, source, lambda text: yaml.load(text, _TextLoader))


def _load(path: str, source: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        document = parse(read_small_text(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{source} {path}: {reason}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UsageError(f"{where}: {error.problem}; correct the YAML there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise UsageError(f"{path}: {error}; correct the YAML") from error
    if not isinstance(document, dict):
        content = "empty" if document is None else type(document).__name__
        raise UsageError(f"{path}: is {content}, not a mapping; write `name: value` lines")
    return document


# In the order of the page. The first row of a name gives the hint, unless a `=value` matches.
TABLES = {
    "MiniMind": """
hidden_size | --dim |
num_hidden_layers | --n_layers |
num_attention_heads num_key_value_heads | --n_heads, --n_kv_heads |
intermediate_size | --hidden_dim |
save_dir | --out_dir | checkpoints are in its `checkpoints/`
save_weight |  | not needed: `--out_dir` identifies the weights
from_weight=NAME | --init_from FILE | a `.pth` file or a directory, [imported](export.md#in)
from_resume=1 | --resume auto | the default; weights are saved in fp32
log_interval save_interval | --log_interval, --save_interval | steps here, micro-batches there; `--save_minutes` also saves every 30 minutes
max_seq_len | --max_seq_len | documents are packed here, truncated and padded there
inference_rope_scaling | --rope_scaling yarn | with `--rope_factor`, in training; the model keeps it ([long context](models.md#long-context))
dtype=bfloat16 | --dtype bfloat16 | with fp32 master weights; or `float32`
use_moe=1 | --use_moe | [its flags](experts.md)
data_path=x.jsonl | --data_path x.jsonl | tokenised once and cached
use_wandb wandb_project | --report_to wandb, --wandb_project | or `--report_to swanlab`
use_compile=1 | --compile on | `auto`, the default, is on for GPUs
num_workers | --num_workers | threads that prefetch rows; 1 is enough
device=cuda:0 | --device cuda | select one by `CUDA_VISIBLE_DEVICES`
flash_attn | --use_flash_attn | the default
""",
    "nanoGPT": """
out_dir log_interval eval_interval | --out_dir, --log_interval, --eval_interval |
eval_iters | --eval_rows | in rows, the same ones every time
always_save_checkpoint | --save_interval N | with `--keep_last`; ignores the validation loss
init_from=resume | --resume auto | the default
init_from=gpt2 | --model hf:DIR | with `--init_from DIR`, a directory that `save_pretrained` wrote; [models of transformers](models.md)
init_from=scratch | --resume none | existing checkpoints are set aside
dataset | --data_path | text, or a folder that `minimind prepare` wrote; `.bin` files of nanoGPT are not read
gradient_accumulation_steps | --accumulation_steps | of one process; nanoGPT divides it by the processes
batch_size block_size | --batch_size, --max_seq_len |
n_layer n_head n_embd | --n_layers, --n_heads, --dim | and `--n_kv_heads` (default 2); without GQA, give the number of heads
dropout bias |  | our decoder has neither dropout nor biases, but for `--qkv_bias`; GPT-2 by `--model hf:DIR` has both
learning_rate weight_decay beta1 beta2 grad_clip | --learning_rate, --weight_decay, --beta1, --beta2, --grad_clip |
max_iters lr_decay_iters | --max_steps | the decay ends with the run
warmup_iters | --warmup_steps |
min_lr | --min_lr_ratio | a fraction of the peak, not a rate
decay_lr=False | --schedule constant |
wandb_log wandb_run_name | --report_to wandb, --wandb_run_name |
compile=False | --compile off |
backend |  | nccl on GPUs, gloo on CPUs
start |  | `--prompt` of `minimind generate`
""",
    "nanochat": """
depth | --n_layers | does not determine width and heads: set `--dim`, `--n_heads`, or `--model PRESET`
aspect_ratio | --dim | the width itself: depth x aspect ratio
head_dim | --head_dim | by default dim / n_heads
device_batch_size | --batch_size |
total_batch_size | --accumulation_steps | tokens of a step / (rows x `--max_seq_len` x processes)
num_iterations | --max_steps |
target_param_data_ratio target_flops | --tokens_per_param, --max_flops |
embedding_lr unembedding_lr scalar_lr matrix_lr | --learning_rate, --learning_rate, --learning_rate, --muon_lr | with `--optimizer muon`
warmup_ratio | --warmup_steps |
final_lr_frac | --min_lr_ratio |
warmdown_ratio | --decay_fraction | with `--schedule wsd`
resume_from_step | --resume auto | the newest checkpoint, or a path
eval_every | --eval_interval |
eval_tokens | --eval_rows | rows of `--max_seq_len` tokens
sample_every | --sample_interval |
save_every | --save_interval |
model_tag | --out_dir |
run | --wandb_run_name | with `--report_to wandb`
device_type | --device |
fp8 fp8_recipe |  | training in FP8 is not available, as it is slower for small models ([parallelism](memory.md#what-is-not-available))
window_pattern |  | attention is not windowed
core_metric_every core_metric_max_per_task | --eval_tasks_interval, --eval_tasks_limit | of the tasks of `--eval_tasks`
""",
    "the Trainer of transformers": """
output_dir | --out_dir |
seed gradient_checkpointing | --seed, --gradient_checkpointing |
per_device_train_batch_size | --batch_size |
per_device_eval_batch_size | --eval_rows | evaluation uses the training batch size
num_train_epochs | --epochs | with `--max_steps`, whichever ends first
adam_beta1 adam_beta2 | --beta1, --beta2 |
adam_epsilon |  | `optimizer.params.eps` of the DeepSpeed JSON
max_grad_norm | --grad_clip | 0 switches it off
lr_scheduler_type | --schedule | `cosine` ends at `--min_lr_ratio` of the peak (default 0.1), the Trainer's at 0
bf16 fp16 | --dtype bfloat16, --dtype float16 |
logging_steps | --log_interval |
eval_steps | --eval_interval | of `--eval_rows` rows
save_steps save_total_limit | --save_interval, --keep_last |
resume_from_checkpoint | --resume | `auto`, `none`, or a path
data_seed | --seed | one seed for weights and order
full_determinism | --deterministic |
torch_compile | --compile on |
deepspeed | --deepspeed_config | every `"auto"` is filled; contradictions are errors
fsdp | --deepspeed_config | use ZeRO stage 3; FSDP is refused
accelerator_config | --split_batches |
dataloader_num_workers | --num_workers |
run_name project | --wandb_run_name, --wandb_project | with `--report_to`, `none` by default
ddp_timeout | --dist_timeout | seconds; 120 here
ddp_find_unused_parameters |  | set if the model has unused parameters
use_cpu | --device cpu |
auto_find_batch_size |  | `minimind plan --memory` lists what fits
push_to_hub |  | `minimind export --push_to_hub USER/NAME`, once the run has ended
""",
    "run_clm.py of transformers": """
model_name_or_path config_name | --model hf:DIR | or `hf:USER/NAME`; with `--init_from` of the same for its weights
tokenizer_name | --tokenizer PATH |
train_file | --data_path |
validation_file | --val_path | or --val_fraction of the text
preprocessing_num_workers |  | tokenising uses every core
""",
    "litgpt": """
model_name | --model | a preset, or `hf:DIR`
initial_checkpoint_dir | --init_from |
precision | --dtype |
data | --data_path |
tokenizer_dir | --tokenizer |
logger_name | --report_to |
train.save_interval train.log_interval | --save_interval, --log_interval |
train.micro_batch_size | --batch_size |
train.global_batch_size | --accumulation_steps | rows of a step / (rows of a micro-batch x processes)
train.lr_warmup_steps | --warmup_steps |
train.epochs train.max_steps | --epochs, --max_steps |
train.max_tokens | --max_tokens |
train.max_time | --max_minutes |
train.max_seq_length | --max_seq_len |
train.max_norm train.min_lr | --grad_clip, --min_lr_ratio |
train.tie_embeddings | --tie_word_embeddings |
eval.interval eval.max_iters | --eval_interval, --eval_rows |
devices num_nodes |  | set by the launcher: `NUM_PROCESSES`, `NUM_MACHINES` of `run_accelerate.sh`
""",
    "Megatron-LM": """
num_layers | --n_layers |
num_query_groups | --n_kv_heads |
ffn_hidden_size | --hidden_dim |
seq_length max_position_embeddings | --max_seq_len |
micro_batch_size | --batch_size |
global_batch_size | --accumulation_steps | rows of a step / (rows of a micro-batch x processes)
train_iters | --max_steps |
train_samples | --max_steps | samples / rows of a step
lr | --learning_rate |
lr_warmup_iters | --warmup_steps |
lr_decay_style | --schedule | WSD and inverse-square-root are `wsd` and `inverse_sqrt`
lr_wsd_decay_iters lr_wsd_decay_style | --decay_steps, --decay_shape | with `--schedule wsd`
clip_grad | --grad_clip |
save | --out_dir |
load | --resume | `auto`, the default, or a path
tokenizer_model | --tokenizer |
split | --val_fraction | the held-out fraction
rotary_base | --rope_theta |
rotary_seq_len_interpolation_factor | --rope_factor | with `--rope_scaling linear`
recompute_activations recompute_granularity | --gradient_checkpointing |
exit_interval exit_duration_in_mins | --stop_at_step, --max_minutes |
wandb_exp_name | --wandb_run_name |
num_experts moe_router_topk | --n_routed_experts, --num_experts_per_tok | with `--use_moe`
distributed_timeout_minutes | --dist_timeout | seconds here
context_parallel_size | --sequence_parallel | divides the heads of attention, not a ring ([long rows](memory.md#sequence-parallelism))
tensor_model_parallel_size | --tensor_parallel | under DeepSpeed at ZeRO stages 0 to 2
pipeline_model_parallel_size |  | models up to 1B parameters are not split so; ZeRO shards their state
untie_embeddings_and_output_weights | --no-tie_word_embeddings |
attention_dropout |  | our decoder has no dropout
""",
    "torchtitan": """
model.flavor | --model |
job.dump_folder | --out_dir |
training.local_batch_size | --batch_size |
training.global_batch_size | --accumulation_steps | rows of a step / (rows of a micro-batch x processes)
training.seq_len | --max_seq_len |
training.steps | --max_steps |
training.max_norm | --grad_clip |
training.seed training.deterministic | --seed, --deterministic |
optimizer.lr | --learning_rate |
lr_scheduler.warmup_steps | --warmup_steps |
lr_scheduler.min_lr_factor | --min_lr_ratio |
lr_scheduler.decay_ratio lr_scheduler.decay_type | --decay_fraction, --decay_shape | with `--schedule wsd`
checkpoint.interval checkpoint.keep_latest_k | --save_interval, --keep_last |
compile.enable | --compile on |
activation_checkpoint.mode | --gradient_checkpointing |
profiling.enable_profiling | --profile |
metrics.log_freq | --log_interval |
metrics.enable_wandb metrics.enable_tensorboard | --report_to wandb, --report_to tensorboard |
parallelism.context_parallel_degree | --sequence_parallel | divides the heads of attention, not a ring ([long rows](memory.md#sequence-parallelism))
parallelism.tensor_parallel_degree | --tensor_parallel | under DeepSpeed at ZeRO stages 0 to 2
parallelism.data_parallel_shard_degree |  | the ZeRO stage of the DeepSpeed JSON shards over all processes
""",
}
# What other projects call a command or a script, without `.py`; ours are those of `minimind`.
COMMANDS = """
server api openai serve_openai_api | minimind serve | 
web webui webchat web_demo chat_web gradio board | minimind serve | which has a chat page at /
pretrain train_pretrain base_train | minimind train | on all GPUs `minimind launch`
finetune sft train_full_sft chat_sft full | minimind launch --config sft | with `--init_from RUN`
infer inference run sample eval_llm chat_cli | minimind generate | `minimind chat` after fine-tuning
evaluate lm_eval base_eval bench | minimind eval | also tasks of lm-eval (`--lm_eval`)
preprocess preprocess_data tokenize | minimind prepare |
tok_train train_tokenizer | minimind tokenizer train |
convert convert_model merge save_pretrained push | minimind export | from other projects `minimind import`
estimate_memory | minimind plan |
"""
Row = tuple[list[str], list[str], str]


def rows(table: str) -> list[Row]:
    """Parse a table into (their names, our flags, note) rows."""
    parsed = []
    for line in table.strip().splitlines():
        theirs, ours, note = (cell.strip() for cell in line.split("|"))
        parsed.append((theirs.split(), ours.split(", ") if ours else [], note))
    return parsed


def equivalent_flag(flag: str) -> str:
    """Return the equivalent of another project's `flag` as a clause; "" if unknown."""
    wanted, _, value = flag.lstrip("-").replace("-", "_").partition("=")
    return _equivalent(wanted, value, TABLES.values())


def equivalent_command(command: str) -> str:
    """Return the equivalent of another project's command or script as a clause; "" if unknown."""
    return _equivalent(command.removesuffix(".py").replace("-", "_"), "", [COMMANDS])


def _equivalent(wanted: str, value: str, tables: Iterable[str]) -> str:
    clauses = []
    for names, ours, note in (row for table in tables for row in rows(table)):
        for place, name in enumerate(names):
            known, _, its_value = name.partition("=")
            if known == wanted:
                remark = re.sub(r"\[([^]]*)\]\([^)]*\)|`([^`]*)`", r"\1\2", note)
                here = ours[place if len(ours) == len(names) else 0] if ours else ""
                clause = (
                    f"here it is {here}" + (f" ({remark})" if remark else "") if here else remark
                )
                clauses.insert(0 if its_value and its_value == value else len(clauses), clause)
    return clauses[0] if clauses else ""


def suggest(name: str, names: Sequence[str], otherwise: str = "--help lists every flag") -> str:
    """Suggest the name closest to an unknown one; `otherwise` if none is close."""
    plain = {known.lstrip("-"): known for known in names}
    word = str(name).lstrip("-")
    close = [known for known in plain if sorted(known) == sorted(word)]  # letters out of order
    longer = [known for known in plain if known.startswith(word)]
    close += longer if len(longer) == 1 and len(word) > 3 else []
    close += difflib.get_close_matches(word, plain, n=1, cutoff=0.8)
    return f"did you mean {plain[close[0]]}?" if close else otherwise


MOST_NAMES = 1000  # of a folder, that are compared with one that is not there


def no_such_file(path: Path) -> str:
    """Describe a path that is not there: from which folder it is read, and the closest name."""
    where, names = "", []
    with suppress(OSError):  # the folder is not there either, or closed
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        names = [entry.name for entry in islice(disk.entries(path.parent), MOST_NAMES)]
    hint = suggest(path.name, names, "correct the path")
    return f"{path}: there is no such file or directory{where}; {hint}"


_FLAG_NAMES = [
    *FLAGS,
    *(f"no-{name}" for name, spec in FLAGS.items() if isinstance(spec.default, bool)),
]
PRESETS = CONFIGS / "models"
EXIT_FLAGS = ("--help", "-h", "--version", "--print_completion")  # flags that exit


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists every flag")


@cache  # it takes longer than parsing
def build_parser(prog: str = "train_pretrain.py") -> argparse.ArgumentParser:
    """Build the parser; values stay strings until `convert`. `prog` is the command in --help."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} [--flag value ...]",
        description="Pretrain a MiniMind decoder under DeepSpeed ZeRO.",
        formatter_class=Formatter,
        epilog=f"{EXAMPLE}\n  {prog} --data_path my_text.jsonl --model tiny --dry_run",
    )
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    known = {n: s.metadata["choices"] for n, s in FLAGS.items() if "choices" in s.metadata}
    # After `python`, a shell completes the words of Python itself.
    completed = {"action": PrintCompletion, "command": "run_accelerate.sh", "known": known}
    parser.add_argument("--print_completion", **completed)
    titles = dict.fromkeys(spec.metadata["group"] for spec in FLAGS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, spec in FLAGS.items():
        options: dict[str, Any] = {"dest": name, "help": _help(spec)}
        if isinstance(spec.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(spec)
            if spec.metadata.get("repeats"):
                options["action"] = "append"
            else:
                options["nargs"] = "+" if isinstance(spec.default, tuple) else None
        groups[spec.metadata["group"]].add_argument(f"--{name}", **options)
    return parser


def _help(spec: Any) -> str:
    default = "off" if spec.default is False else format_default(spec.default)
    if "rule" in spec.metadata:
        default = f"{AUTO}, {spec.metadata['rule']}"
    text = spec.metadata["help"] + (f" (default: {default})" if default else "")
    return text.replace("%", "%%")  # argparse formats it


def _metavar(spec: Any) -> str:
    choices = spec.metadata.get("choices")
    kind = {"str": "TEXT", "tuple": "PATH"}.get(type_name(spec), type_name(spec).upper())
    kind = spec.metadata.get("repeats", kind)
    return "{" + ",".join(choices) + "}" if choices else kind


def type_name(spec: Any) -> str:
    """Return `int`, `float`, `str`, `bool` or `tuple`, from the annotation."""
    return spec.type.split(" ")[0].split("[")[0]


def parse_flags(argv: Sequence[str]) -> RunConfig:
    """Parse `argv`; raise a UsageError that lists all faults."""
    flags, faults = _parse_argv(argv)
    return build_config(flags, "--{name}", faults)


def words_of(given: Mapping[str, Any]) -> list[str]:
    """The words that `parse_flags` reads as these flags, of values before or after `convert`."""
    words: list[str] = []
    for name, value in given.items():
        if isinstance(FLAGS[name].default, bool):
            words.append(f"--{name}" if _to_bool(value) else f"--no-{name}")
            continue
        values = [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
        each = [[one] for one in values] if FLAGS[name].metadata.get("repeats") else [values]
        for texts in each:
            # A single value is joined if argparse would read it as a flag.
            is_joined = len(texts) == 1 and texts[0].startswith("-")
            words += [f"--{name}={texts[0]}"] if is_joined else [f"--{name}", *texts]
    return words


def build_config(given: Mapping[str, Any], source: str, faults: Sequence[str] = ()) -> RunConfig:
    """Build a RunConfig from `given` (name: value); `source` is a template such as "--{name}".

    Raise a UsageError that lists `faults` and all faults of the values.
    """
    all_faults = [*faults, *unknown_keys(given, "the arguments")]
    values: dict[str, Any] = {}
    unset = {name: AUTO if name in RULED else "default" for name in FLAGS}
    sources = dict(unset)
    invalid = set()
    for layer, source_of in _layers(given, source, all_faults):
        for name in layer:
            where = source_of.format(name=name)
            if stands_for_auto(name, layer[name]):
                values.pop(name, None)
                sources[name] = unset[name]
                continue
            try:
                values[name], sources[name] = convert(name, layer[name], where), where
                if name == "deepspeed_config":
                    values[name] = deepspeed_files().get(values[name], values[name])
            except UsageError as error:
                all_faults.append(str(error))
                invalid.add(name)
    run = RunConfig(**values, sources=sources)
    # An invalid field keeps its default: skip conflicts that mention it.
    of_invalid = re.compile("|".join(rf"\b{name} [=(]" for name in invalid) or "(?!)")
    all_faults += [conflict for conflict in conflicts(run) if not of_invalid.search(conflict)]
    if all_faults:
        raise fault_error(all_faults)
    return run if run.init_from else check(run.with_complete_scaling())


def in_template(text: str) -> str:
    """`text` as a part of a source of `build_config`: braces of a path are characters."""
    return text.replace("{", "{{").replace("}", "}}")


def _layers(
    given: Mapping[str, Any], source: str, faults: list[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the known fields of the preset, of --config and of `given`, highest precedence last."""
    from_file: Mapping[str, Any] = {}
    preset: Mapping[str, Any] = {}
    path = given.get("config")
    try:
        from_file = _load_config_file(path) if path is not None else {}
        faults += unknown_keys(from_file, path)
        if "config" in from_file:
            faults.append(f"'config' in {path}: a file cannot include another; remove it")
    except UsageError as error:
        faults.append(str(error))
    name = given.get("model", from_file.get("model"))
    try:
        preset = load_preset(str(name)) if name else {}
    except UsageError as error:
        faults.append(str(error))
    for layer, place in ((preset, f"model {name}"), (from_file, f"--config {path}")):
        known = {key: layer[key] for key in layer if key in FLAGS and key != "config"}
        yield known, in_template(place)
    yield {key: given[key] for key in given if key in FLAGS}, source


def _load_config_file(name: Any) -> dict[str, Any]:
    """Load the recipe `name`, else the file."""
    recipes = files_by_name(RECIPES)
    if not isinstance(name, str | Path):
        raise UsageError(f"config = {name!r} is no path; give a recipe or a file")
    if str(name) not in recipes and disk.is_absent(name):
        hint = suggest(str(name), list(recipes), f"give a file or {', '.join(recipes)}")
        raise UsageError(f"--config {name}: no such recipe or file; {hint}")
    return load_yaml_texts(recipes.get(str(name), str(name)), "--config")


def _parse_argv(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by flag, and one sentence per unknown argument."""
    faults = _unknown_flags(argv)
    try:
        namespace, unknown = build_parser().parse_known_args([_normalize_flag(w) for w in argv])
    except UsageError as error:  # argparse ends at the first one
        return {}, [*faults, str(error)]
    if unknown and not faults:
        faults.append(f"unexpected argument {unknown[0]!r}; values follow a --flag")
    return vars(namespace), faults


def _unknown_flags(argv: Sequence[str]) -> list[str]:
    """Return one sentence per unknown flag."""
    spelled = [f"--{name}" for name in _FLAG_NAMES]
    return [
        unknown_flag(word, spelled)
        for word in dict.fromkeys(argv)
        if re.match(r"--?[A-Za-z]", word)
        and _normalize_flag(word).split("=")[0] not in (*spelled, *EXIT_FLAGS)
    ]


def unknown_flag(word: str, known: Sequence[str]) -> str:
    """Describe an unknown flag and suggest its equivalent or the closest known one."""
    name = word.split("=")[0]
    return f"unknown flag {name}; {equivalent_flag(word) or suggest(name, known)}"


def _normalize_flag(word: str) -> str:
    """Rewrite `--a-b=c` to `--a_b=c` and `--no_a` to `--no-a`; other words stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if name not in FLAGS and name.startswith("no_"):
        name = f"no-{name.removeprefix('no_')}"
    return f"--{name}{equals}{value}"


def unknown_keys(values: Mapping[str, Any], where: str | None) -> list[str]:
    """Return one sentence per key that is no flag; `where` names the source."""
    unknown = [name for name in values if name not in FLAGS]
    hints = [equivalent_flag(str(name)) or suggest(name, list(FLAGS)) for name in unknown]
    return [f"unknown key {n!r} in {where}; {hint}" for n, hint in zip(unknown, hints, strict=True)]


def load_preset(name: str) -> dict[str, Any]:
    """Load the shape fields of a preset or YAML file; empty for hf:, which is read later."""
    if name.startswith(HUB_PREFIX):
        return {}
    presets = files_by_name(PRESETS)
    path = presets.get(name, name)
    try:
        is_file = disk.is_file(Path(path))
    except OSError as error:
        raise UsageError(
            f"--model {name}: cannot be read ({error.strerror}); correct the path or its"
            " permissions"
        ) from error
    if not is_file:
        known = list(presets)
        raise UsageError(
            f"--model {name}: no such preset or file;"
            f" {suggest(name, known, 'give one')} ({', '.join(known)})"
        )
    shape = load_yaml_texts(path, "--model")
    for key in shape:
        if key not in SHAPE:
            raise UsageError(f"{path}: {key!r} is not a shape field; {suggest(key, [*SHAPE])}")
    return shape


def config_file(place: str) -> Path:
    """Return the config.json that --model hf:`place` names, of the Hub if it is no local path.

    Raise UsageError if it is missing.
    """
    from minimind.runtime.hub import local_model

    path = local_model(f"{HUB_PREFIX}{place}", weights=False)
    path = path / "config.json" if disk.is_dir(path) else path
    if not disk.is_file(path):
        if form := form_of_folder(path.parent):
            raise UsageError(f"--model hf:{place}: {form}")
        raise UsageError(f"--model hf:{place}: has no config.json; name a directory that has one")
    return path


def stands_for_auto(name: str, raw: Any) -> bool:
    """Whether `raw` leaves a flag to its rule or its default, as if it were not given."""
    return raw == AUTO and (name in RULED or "takes_auto" in FLAGS[name].metadata)


def convert(name: str, raw: Any, source: str) -> Any:
    """Convert `raw` to the type of field `name`; raise UsageError outside its limits."""
    spec = FLAGS[name]
    kind = type_name(spec)
    if raw is None and spec.default is None:
        return None
    try:
        value = _CONVERSIONS[kind](raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{name} = {raw!r} ({source}) is not {_KIND_NAMES[kind]}; give one"
        ) from error
    _within_limits(name, value, source, spec.metadata)
    return value


def _within_limits(name: str, value: Any, source: str, limits: Mapping[str, Any]) -> None:
    rules = [
        (
            "choices",
            f"one of {', '.join(map(str, limits.get('choices', ())))}",
            lambda bound: value in bound,
        ),
        ("at_least", f"at least {limits.get('at_least')}", lambda bound: value >= bound),
        ("above", f"above {limits.get('above')}", lambda bound: value > bound),
        ("at_most", f"at most {limits.get('at_most')}", lambda bound: value <= bound),
        ("below", f"below {limits.get('below')}", lambda bound: value < bound),
    ]
    for limit, requirement, holds in rules:
        if limit in limits and not holds(limits[limit]):
            raise UsageError(f"{name} = {value} ({source}) must be {requirement}; change it")


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and raw != int(raw)):
        raise ValueError(raw)
    return int(raw)


def _to_float(raw: Any) -> float:
    value = float(raw)
    if isinstance(raw, bool) or not math.isfinite(value):
        raise ValueError(raw)
    return value


def _to_bool(raw: Any) -> bool:
    if isinstance(raw, str) and raw.lower() in ("true", "false"):  # of a YAML file
        return raw.lower() == "true"
    if not isinstance(raw, bool):
        raise ValueError(raw)
    return raw


def _to_str(raw: Any) -> str:
    if isinstance(raw, dict | list) or raw == "":
        raise ValueError(raw)
    return str(raw)


def _to_tuple(raw: Any) -> tuple[str, ...]:
    if raw in ([], ()):
        raise ValueError(raw)
    return tuple(map(_to_str, raw if isinstance(raw, list | tuple) else [raw]))


_CONVERSIONS = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "tuple": _to_tuple,
}
_KIND_NAMES = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a non-empty string",
    "tuple": "a list of paths",
}
