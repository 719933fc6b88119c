"""What other projects call our flags: every hint is right, or there is none."""

import pytest

from minimind.cli.main import build_parser
from minimind.config.command_line import commands_of
from minimind.config.flags import FLAGS
from minimind.config.foreign_flags import COMMANDS, TABLES, equivalent_flag, rows
from minimind.config.names import suggest
from minimind.config.parse import parse_flags
from minimind.errors import UsageError

OURS = dict(commands_of(build_parser()))
# By hand: names of MiniMind, nanoGPT and the Trainer that are not ours, and what is meant here.
MEANT = {
    "hidden_size": "--dim",
    "num_hidden_layers": "--n_layers",
    "save_dir": "--out_dir",
    "from_weight": "--init_from FILE",
    "from_resume": "--resume auto",
    "use_wandb": "--report_to wandb",
    "use_compile": "--compile on",
    "eval_iters": "--eval_rows",
    "always_save_checkpoint": "--save_interval N",
    "dataset": "--data_path",
    "gradient_accumulation_steps": "--accumulation_steps",
    "block_size": "--max_seq_len",
    "n_layer": "--n_layers",
    "n_head": "--n_heads",
    "n_embd": "--dim",
    "max_iters": "--max_steps",
    "lr_decay_iters": "--max_steps",
    "warmup_iters": "--warmup_steps",
    "min_lr": "--min_lr_ratio",
    "decay_lr": "--schedule constant",
    "wandb_log": "--report_to wandb",
    "output_dir": "--out_dir",
    "per_device_train_batch_size": "--batch_size",
    "num_train_epochs": "--epochs",
    "adam_beta1": "--beta1",
    "adam_beta2": "--beta2",
    "max_grad_norm": "--grad_clip",
    "lr_scheduler_type": "--schedule",
    "bf16": "--dtype bfloat16",
    "fp16": "--dtype float16",
    "logging_steps": "--log_interval",
    "eval_steps": "--eval_interval",
    "save_steps": "--save_interval",
    "save_total_limit": "--keep_last",
    "resume_from_checkpoint": "--resume",
    "data_seed": "--seed",
    "full_determinism": "--deterministic",
    "torch_compile": "--compile on",
    "deepspeed": "--deepspeed_config",
    "fsdp": "--deepspeed_config",
    "accelerator_config": "--split_batches",
    "dataloader_num_workers": "--num_workers",
    "run_name": "--wandb_run_name",
    "project": "--wandb_project",
    "ddp_timeout": "--dist_timeout",
    "use_cpu": "--device cpu",
    "lr": "--learning_rate",
}
NONE_HERE = {
    "bias": "no biases",
    "attention-dropout": "attention weights",
    "save_weight": "--out_dir",
    "start": "minimind generate",
    "backend": "nccl",
    "push_to_hub": "minimind export --push_to_hub USER/NAME",
    "auto_find_batch_size": "--batch_size auto",
    "pipeline-model-parallel-size": "not split",
    "fp8": "FP8",
}


def error_of(word: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_flags([word, "1"])
    return str(caught.value)


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_a_name_of_another_project_is_answered_with_ours(name: str, meant: str):
    assert len(MEANT) == 47
    for word in (f"--{name}", f"--{name.replace('_', '-')}"):
        text = error_of(word)
        assert text == f"unknown flag {word}; here it is {meant}" or text.startswith(
            f"unknown flag {word}; here it is {meant} ("
        )


@pytest.mark.parametrize(("name", "words"), NONE_HERE.items())
def test_a_name_without_a_counterpart_reports_it(name: str, words: str):
    assert words in error_of(f"--{name}")
    assert "did you mean" not in error_of(f"--{name}")


def test_a_value_decides_where_the_same_name_means_two_things():
    assert equivalent_flag("--init_from=resume").startswith("here it is --resume auto")
    assert equivalent_flag("--init_from=gpt2").startswith("here it is --model hf:DIR")


def test_every_right_side_is_a_flag_of_ours():
    for table in TABLES.values():
        for theirs, ours, note in rows(table):
            assert ours or note, theirs
            for word in ours:
                name = word.split()[0].removeprefix("--").removeprefix("no-")
                assert name in FLAGS, (theirs, word)


def test_every_command_of_ours_in_the_table_is_one_and_no_name_of_theirs_is_ours():
    for theirs, ours, note in rows(COMMANDS):
        assert ours or note, theirs
        assert not {*theirs} & {*OURS}
        for command in ours:
            program, name, *rest = command.split()
            assert program == "minimind"
            assert name in OURS
            if name == "launch":
                parse_flags(rest)
            elif rest:  # an action of the command
                build_parser().parse_args([name, *rest, "a.jsonl", "--out", "DIR"])


@pytest.mark.parametrize("word", ["--frobnicate", "--quux_size", "--tokens_per_second"])
def test_no_hint_is_better_than_a_wrong_one(word: str):
    assert error_of(word) == f"unknown flag {word}; --help all lists every flag"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batch_sise", "--batch_size"),
        ("--epoch", "--epochs"),
        ("--laerning_rate", "--learning_rate"),
    ],
)
def test_a_misspelling_is_answered_with_the_closest_flag(typed: str, meant: str):
    assert suggest(typed, [f"--{name}" for name in FLAGS]) == f"did you mean {meant}?"


def test_every_fault_of_a_command_line_is_reported_at_once(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("hidden_size: 512\nseed: soon\n")
    line = "--save_dir x --use_wandb --dim 256 --n_heads 7 --allow_change schedul --max_steps many"
    with pytest.raises(UsageError) as caught:
        parse_flags([*line.split(), "--config", str(file), "--model", "big"])
    text = str(caught.value)
    parts = ("--save_dir", "--use_wandb", "hidden_size", "seed = 'soon'", "max_steps = 'many'")
    parts += ("'schedul' is not one", "dim = 256", "--model big: there is no such preset")
    for part in parts:
        assert part in text
    assert text.startswith("9 faults: (1) ")


def test_a_refused_value_leaves_no_conflict_with_its_default():
    with pytest.raises(UsageError) as caught:
        parse_flags("--dim wide --n_heads 7 --n_kv_heads 7".split())
    assert str(caught.value) == "dim = 'wide' (--dim) is not a whole number; give one"
