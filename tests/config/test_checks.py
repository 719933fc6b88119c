"""Each rule of combinations of flags: flags that break it and no other, and flags that do not."""

import re

import pytest

from minimind.config.checks import DECODER_RULES, HUGGING_FACE_RULES, RULES, Rule
from minimind.config.flags import FLAGS
from minimind.config.parse import parse_flags, words_of
from minimind.errors import UsageError

ROTARY = "--rope_factor 2 --rope_original_length 64 --rope_scaling"
BIGRAMS = "--embedding_init bigrams --no-tie_word_embeddings"
SPLIT = "--n_heads 8 --n_kv_heads 2 --max_seq_len 512 --sequence_parallel"
OF_TWO = f"{SPLIT} 2"
TASKS = "--eval_tasks cloze --eval_tasks_interval"
BEST = "--keep_best 2 --keep_best_by average"
# Part of a sentence: flags that break its rule, and the closest ones that do not.
EXAMPLES = {
    "with sample_interval = 0": ("--sample_prompts p", "--sample_prompts p --sample_interval 5"),
    ": there is no such": ("--model hf:none", "--model hf:."),
    " beside --model": ("--model hf:. --dim 64", "--model hf:. --max_seq_len 64"),
    "zero_init_outputs = True (--zero_init_outputs) is only": (
        "--model hf:. --zero_init_outputs",
        "--zero_init_outputs",
    ),
    "zero_init_outputs = True (--zero_init_outputs) and init_from = a": (
        "--zero_init_outputs --init_from a",
        "--init_from a",
    ),
    "embedding_init = bigrams (--embedding_init) is only": (
        "--model hf:. --embedding_init bigrams",
        BIGRAMS,
    ),
    "embedding_init = bigrams (--embedding_init) and init_from = a": (
        f"{BIGRAMS} --init_from a",
        "--init_from a",
    ),
    "a head of its own": ("--embedding_init bigrams", BIGRAMS),
    "embedding_init = bigrams (--embedding_init) and mup_base_dim": (
        f"{BIGRAMS} --mup_base_dim 8",
        BIGRAMS,
    ),
    "between 3 and": (f"{BIGRAMS} --dim 1024 --vocab_size 600", f"{BIGRAMS} --dim 64"),
    "mup_base_dim = 8 (--mup_base_dim) is only": (
        "--model hf:. --mup_base_dim 8",
        "--mup_base_dim 8",
    ),
    "sequence_parallel = 2 (--sequence_parallel) is only": (
        "--model hf:. --sequence_parallel 2",
        OF_TWO,
    ),
    "doc_mask = True (--doc_mask) is only": (
        "--model hf:. --doc_mask",
        "--model hf:. --no-doc_mask",
    ),
    "{loss} is": ("--model hf:. --loss chunked", "--model hf:. --loss full"),
    "{dim} is": ("--dim 100 --n_heads 8", "--dim 96 --n_heads 8"),
    "= {size} is odd": ("--dim 24 --n_heads 8", "--dim 32 --n_heads 8"),
    "{head_dim} is odd": ("--head_dim 7", "--head_dim 8"),
    "{num_experts_per_tok} is": ("--use_moe --num_experts_per_tok 5", "--num_experts_per_tok 2"),
    "with use_moe = False": ("--n_routed_experts 8", "--n_routed_experts 8 --use_moe"),
    "with rope_scaling = None": ("--rope_factor 2", f"{ROTARY} linear"),
    "extends the": ("--rope_scaling ntk --rope_factor 2", "--rope_scaling ntk --init_from a"),
    "2 channels": (f"{ROTARY} ntk --dim 16 --n_heads 8", f"{ROTARY} yarn --dim 16 --n_heads 8"),
    "a base above 1": (f"{ROTARY} yarn --rope_theta 1", f"{ROTARY} yarn --rope_theta 1.5"),
    "and use_moe = True": (f"{OF_TWO} --use_moe", f"{SPLIT} 1 --use_moe"),
    "and compile = on": (f"{OF_TWO} --compile on", f"{OF_TWO} --compile auto"),
    "and verify_interval = 5": (f"{OF_TWO} --verify_interval 5", "--verify_interval 5"),
    "{n_heads} is": ("--n_kv_heads 3", "--n_kv_heads 4"),
    "with schedule = cosine (default); add --schedule wsd": (
        "--decay_steps 5",
        "--decay_steps 5 --schedule wsd",
    ),
    "decay_steps = 5 (--decay_steps) and decay_fraction": (
        *("--schedule wsd --decay_steps 5 --decay_fraction 0.1", "--schedule wsd --decay_steps 5"),
    ),
    "{source} and {data_path}": ("--source a=b --data_path c", "--source a=b"),
    "stages = a (--stages) and task = sft": (
        "--stages a --max_steps 9 --task sft",
        "--stages a --max_steps 9",
    ),
    "stages = a (--stages) and epochs = 2": ("--stages a --epochs 2", "--stages a --max_tokens 9"),
    "{stages} needs": ("--stages a", "--stages a --tokens_per_param 9"),
    "stages = a (--stages) and max_flops = 9": ("--stages a --max_flops 9", "--max_flops 9"),
    "reads other rows": (*("--stages a --max_steps 9 --spike_guard", "--spike_guard"),),
    "{warmup_steps}": ("--warmup_steps 9 --max_steps 8", "--warmup_steps 9 --max_steps 9"),
    "with spike_guard = False": ("--spike_factor 5", "--spike_factor 5 --spike_guard"),
    "with verify_interval = 0": (
        "--on_corruption stop",
        "--on_corruption stop --verify_interval 5",
    ),
    "{keep_every} and": ("--keep_every 5 --save_interval 2", "--keep_every 4 --save_interval 2"),
    "{val_path} is all": ("--val_path a --val_fraction 0.1", "--val_path a --val_fraction 0"),
    "has no validation": ("--keep_best 2 --eval_rows 0", "--keep_best 0 --eval_rows 0"),
    "with eval_tasks_interval = 0": ("--eval_tasks cloze", f"{TASKS} 5"),
    "with eval_tasks = None": ("--eval_tasks_interval 5", f"{TASKS} 5 --eval_tasks_limit 9"),
    "with keep_best = 0": ("--keep_best_by val", "--keep_best_by val_loss"),
    "{keep_best_by} is a": ("--keep_best 2 --keep_best_by average", f"{TASKS} 5"),
    "that have scores": (
        f"{BEST} --save_interval 3 {TASKS} 2",
        f"{BEST} --save_interval 4 {TASKS} 2",
    ),
    "are validated": ("--keep_best 2 --save_interval 3 --eval_interval 2", "--keep_best 2"),
    "mirror = {url}": ("--mirror https://h/x", "--mirror s3://h/x"),
    "with task = pretrain": ("--train_on last", "--train_on last --task sft"),
    "{doc_mask} lets": ("--task sft --no-doc_mask", "--no-doc_mask"),
    "{template_date} is no": (
        *("--task sft --template_date 26.7.2024", "--task sft --template_date 2024-07-26"),
    ),
    "{chat_template_kwargs} {refusal}": (
        '--task sft --chat_template_kwargs {"messages":1}',
        '--task sft --chat_template_kwargs {"enable_thinking":false}',
    ),
    "text_field = body (--text_field) and task = sft": (
        "--task sft --text_field body",
        "--text_field body",
    ),
    "spike_guard = True (--spike_guard) and dtype = float16": (
        "--spike_guard --dtype float16",
        "--spike_guard --dtype bfloat16",
    ),
    "{mup_base_dim} has": ("--mup_base_dim 8 --optimizer sgd", "--mup_base_dim 8 --optimizer lion"),
    # Of functions.
    "n_kv_heads = 2; give one of 1, 2, 4, 8": (f"{SPLIT} 3 --max_seq_len 510", f"{SPLIT} 4"),
    "divide max_seq_len = 12": (f"{SPLIT} 8 --max_seq_len 12", f"{SPLIT} 8 --max_seq_len 16"),
    "(--allow_change): 'a' is none of batch,": ("--allow_change a", "--allow_change data"),
    "(--report_to): 'a' is none of wandb,": ("--report_to a", "--report_to aim"),
    "extends rows of 64": ("--rope_scaling ntk --rope_original_length 64", f"{ROTARY} ntk"),
}
TABLES = (*RULES, *HUGGING_FACE_RULES, *DECODER_RULES)
SENTENCES = [rule.sentence for rule in TABLES if isinstance(rule, Rule)]


def pattern(sentence: str) -> str:
    """The sentence with any values and sources."""
    flag = rf"\\\{{({'|'.join(FLAGS)})(:g)?\\\}}"
    text = re.sub(flag, r"\1 = \\S+ \(.+?\)", re.escape(sentence))
    return re.sub(r"\\\{.*?\\\}", ".+", text)


def test_every_rule_has_one_example():
    for sentence in SENTENCES:
        assert sum(part in sentence for part in EXAMPLES) == (sentence != "{refusal}"), sentence


@pytest.mark.parametrize("part", EXAMPLES)
def test_a_rule_is_its_sentence_and_its_neighbour_is_taken(part: str):
    broken, right = EXAMPLES[part]
    parse_flags(right.split())
    with pytest.raises(UsageError) as caught:
        parse_flags(broken.split())
    fault, sentences = str(caught.value), [pattern(one) for one in SENTENCES if part in one]
    assert any(re.fullmatch(one, fault) for one in sentences) or not sentences, fault
    assert sentences or part in fault
    assert "faults:" not in fault


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.needs])
def test_a_flag_without_what_it_needs_has_no_effect(name: str):
    flag = FLAGS[name]
    other = {"str": "x", "int": "20", "float": "0.5", "bool": "false"}[flag.type]
    value = "2.5" if name == "rope_factor" else (*flag.choices, other)[0]
    needed = flag.needs.partition("=")[0]
    with pytest.raises(UsageError) as caught:
        parse_flags(words_of({name: value}))
    assert f"{name} = " in str(caught.value)
    assert (
        f"has no effect with {needed} = {FLAGS[needed].default} (default); add --{needed}"
        in str(caught.value)
    )
    assert flag.help.startswith(f"with --{flag.needs.replace('=', ' ')}: ")
