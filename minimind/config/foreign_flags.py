"""What other projects call our flags and commands: tables of names, which docs/coming_from.md shows.

A row is `their names | our flags | note`; `name=value` is a row for this value of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# In the order of the page. The first row of a name gives the hint, unless a `=value` matches.
TABLES = {
    "MiniMind": """
hidden_size | --dim |
num_hidden_layers | --n_layers |
num_attention_heads num_key_value_heads | --n_heads, --n_kv_heads |
intermediate_size | --hidden_dim |
save_dir | --out_dir | checkpoints are in its `checkpoints/`
save_weight |  | not needed: `--out_dir` identifies the weights
from_weight=NAME | --init_from FILE | a `.pth` file or a directory, [imported](export.md#import)
from_teacher_weight=NAME | --teacher FILE | of `train_distillation.py`; its student is `--init_from` ([distillation](fine_tuning.md#distillation))
alpha temperature | --distill_weight, --distill_temperature | 1 - alpha; the same temperature
from_resume=1 | --resume auto | the default; weights are saved in fp32
log_interval save_interval | --log_interval, --save_interval | steps here, micro-batches there; `--save_minutes` also saves every 30 minutes
max_seq_len | --max_seq_len | documents are packed here, truncated and padded there
inference_rope_scaling | --rope_scaling yarn | with `--rope_factor`, in training; the model keeps it ([long context](models.md#long-context))
dtype=bfloat16 | --dtype bf16-mixed | fp32 weights and bf16 products by autocast; `bfloat16` has bf16 weights with an fp32 copy
use_moe=1 | --use_moe | [its flags](models.md#mixture-of-experts)
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
init_from=gpt2 | --model hf:DIR | with `--init_from DIR`, a directory that `save_pretrained` wrote; [models of transformers](models.md#models-of-transformers)
init_from=scratch | --resume none | existing checkpoints are set aside
dataset | --data_path | text, or a folder that `minimind prepare` wrote; `.bin` files of nanoGPT are not read
gradient_accumulation_steps | --accumulation_steps | of one process; nanoGPT divides it by the processes
batch_size block_size | --batch_size, --max_seq_len |
n_layer n_head n_embd | --n_layers, --n_heads, --dim | and `--n_kv_heads` (default 2); without GQA, give the number of heads
dropout | --dropout | of the embedding and the outputs of blocks, not of attention weights
bias |  | our decoder has no biases, but for `--qkv_bias`; GPT-2 by `--model hf:DIR` has them
learning_rate weight_decay beta1 beta2 grad_clip | --learning_rate, --weight_decay, --beta1, --beta2, --grad_clip |
max_iters lr_decay_iters | --max_steps | the decay ends with the run
warmup_iters | --warmup_steps |
min_lr | --min_lr_ratio | a fraction of the peak, not a rate
decay_lr=False | --schedule constant |
dtype='bfloat16' | --dtype bf16-mixed | the same: autocast of fp32 weights
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
total_batch_size | --global_batch_size | tokens of a step / `--max_seq_len`
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
bf16 fp16 | --dtype bfloat16, --dtype float16 | without DeepSpeed the Trainer's `bf16` is `--dtype bf16-mixed`
logging_steps | --log_interval |
eval_steps eval_on_start | --eval_interval, --eval_at_start | of `--eval_rows` rows
eval_strategy save_strategy | --eval_interval, --save_interval | `epoch`, or a number of steps
save_steps save_total_limit | --save_interval, --keep_last |
load_best_model_at_end metric_for_best_model | --keep_best 1, --keep_best_by | `RUN/best` then names the best checkpoint; `--patience` stops early
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
auto_find_batch_size | --batch_size auto | the default: the micro-batch fits the device, and is halved where it was out of memory; the rows of a step stay
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
precision | --dtype | of `bf16-mixed` under the same name; `bf16-true` has no fp32 copy of the weights
data | --data_path |
tokenizer_dir | --tokenizer |
logger_name | --report_to |
train.save_interval train.log_interval | --save_interval, --log_interval |
train.micro_batch_size | --batch_size |
train.global_batch_size | --global_batch_size |
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
hidden_dropout | --dropout |
attention_dropout |  | no dropout of attention weights: fused kernels draw them from the device
""",
    "torchtitan": """
model.flavor | --model |
job.dump_folder | --out_dir |
training.local_batch_size | --batch_size |
training.global_batch_size | --global_batch_size |
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

# What others write for a value: ours, then theirs, in lower case.
VALUES = """
bfloat16 | bf16 bfloat bf16-true
bf16-mixed | bf16_mixed bf16mixed bfloat16-mixed amp_bf16 autocast torch_autocast amp mixed
float16 | fp16 half 16 16-mixed 16-true
float32 | fp32 float single full 32 32-true no
cuda | gpu nvidia cuda:0
adamw | adam adamw_torch adamw_torch_fused fusedadam
cosine | cosine_with_warmup cosine_with_min_lr
constant | constant_with_warmup none
wsd | warmup_stable_decay warmup-stable-decay trapezoidal
inverse_sqrt | inverse_square_root inverse-square-root invsqrt
on | true yes 1
off | false no 0 none
sft | finetune fine-tune chat instruct
pretrain | lm base
llama | hf huggingface transformers
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


def equivalent_value(value: str, choices: Iterable[str]) -> str | None:
    """The one of `choices` that other projects write as `value`; None if unknown."""
    for line in VALUES.strip().splitlines():
        ours, theirs = line.split(" | ")
        if ours in choices and value.lower() in theirs.split():
            return ours
    return None


def equivalent_command(command: str) -> str:
    """Return the equivalent of another project's command or script as a clause; "" if unknown."""
    return _equivalent(command.removesuffix(".py").replace("-", "_"), "", [COMMANDS])


def _equivalent(wanted: str, value: str, tables: Iterable[str]) -> str:
    clauses = []
    for names, ours, note in (row for table in tables for row in rows(table)):
        for number, name in enumerate(names):
            known, _, its_value = name.partition("=")
            if known == wanted:
                remark = re.sub(r"\[([^]]*)\]\([^)]*\)|`([^`]*)`", r"\1\2", note)
                here = ours[number if len(ours) == len(names) else 0] if ours else ""
                clause = (
                    f"here it is {here}" + (f" ({remark})" if remark else "") if here else remark
                )
                clauses.insert(0 if its_value and its_value == value else len(clauses), clause)
    return clauses[0] if clauses else ""
