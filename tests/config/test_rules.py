"""What "auto" stands for: as a value of flags and files, and the numbers of its rules."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from minimind.config.deepspeed.resolve import resolve
from minimind.config.flags import RULED
from minimind.config.origin import Origin, Rank
from minimind.config.parse import build_config, build_parser, parse_flags
from minimind.config.rules import (
    MICRO_BATCH_TOKENS,
    Workload,
    batch_values,
    flags_with_rules,
    held_out_of,
    most_rows,
    suited_rows,
    suited_values,
    tokens_per_step,
    values_by_rules,
)
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError

WORK = Workload(parameters=25_829_888, tokens=500_000_000, epochs=1.0, steps=4000)
PLAIN = {"batch_size": 8, "learning_rate": 5e-4, "weight_decay": 0.1, "warmup_steps": None}


def parse(line: str) -> RunConfig:
    return parse_flags(line.split())


def test_flags_with_a_rule_are_auto_until_a_value_is_given():
    run = parse("--learning_rate 1e-3")
    assert set(PLAIN) == set(RULED)
    assert sorted(run.open_flags) == ["batch_size", "warmup_steps", "weight_decay"]
    assert not any(map(run.is_explicit, run.open_flags))
    assert {name: getattr(parse(""), name) for name in PLAIN} == PLAIN


def test_auto_takes_back_a_value_of_a_recipe_or_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-3\nweight_decay: auto\n")
    run = parse(f"--config {file} --learning_rate auto --batch_size=auto")
    assert sorted(run.open_flags) == sorted(PLAIN)
    assert {name: getattr(run, name) for name in PLAIN} == PLAIN


@pytest.mark.parametrize(
    ("name", "value"), [("min_lr_ratio", 0.1), ("beta1", 0.9), ("beta2", 0.95)]
)
def test_auto_is_the_default_of_a_flag_without_a_rule(name, value):
    run = parse(f"--{name} auto")
    assert (getattr(run, name), run.sources[name]) == (value, "default")


def test_auto_from_python_and_no_auto_for_other_flags():
    assert "learning_rate" in build_config({"learning_rate": "auto"}, "train({name})").open_flags
    with pytest.raises(UsageError, match=r"max_steps = 'auto' .* is not a whole number"):
        parse("--max_steps auto")


def test_the_help_says_by_what_a_rule_decides():
    text = " ".join(build_parser().format_help().split())
    assert f"peak learning rate (default: auto, {RULED['learning_rate']})" in text


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "batch_size"])
def test_a_literal_of_the_deepspeed_file_is_in_force(name):
    literals = {
        "learning_rate": {"optimizer": {"type": "AdamW", "params": {"lr": 0.002}}},
        "weight_decay": {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.3}}},
        "batch_size": {"train_micro_batch_size_per_gpu": 3},
    }
    document = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **literals[name]}
    run = resolve(document, "ds.json", parse("--dim 64"), 2, "cpu").run
    assert run.sources[name].startswith("ds.json: ")
    assert name not in run.open_flags


def test_a_train_batch_size_of_the_file_leaves_nothing_of_the_batch_open():
    document = {"zero_optimization": {"stage": 2}, "train_batch_size": 64}
    run = resolve(document, "ds.json", parse("--dim 64"), 2, "cpu").run
    assert (run.batch_size, run.accumulation_steps) == (8, 4)
    assert "batch_size" not in run.open_flags


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_step_are_the_power_of_two_nearest_to_the_rule(seed: int):
    draw, optimizer = random.Random(seed), ("AdamW", "Muon")[seed % 2]
    unit, length = draw.randint(1, 12), draw.choice([32, 256, 1024])
    tokens = int(10 ** draw.uniform(4, 10))
    rows = suited_rows(unit, length, tokens, 10**9, optimizer)
    assert math.log2(rows / unit).is_integer()
    ratio = rows * length / tokens_per_step(tokens, optimizer)
    assert 2**-0.501 <= ratio or rows == unit
    assert ratio <= 2**0.501 or rows == unit


def test_rows_are_no_more_than_there_are():
    assert suited_rows(2, 256, 10**9, 17, "AdamW") == 16
    assert suited_rows(3, 256, 10**9, 0, "Muon") == 3


@pytest.mark.parametrize("device", MICRO_BATCH_TOKENS)
@pytest.mark.parametrize("split", ["", " --split_batches"])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_micro_batches_of_all_processes_are_the_rows(processes: int, split: str, device: str):
    for length in (64, 512, 16_384):
        for power in range(9):
            rows = processes << power
            run = parse(f"--max_seq_len {length}{split}")
            run = run.with_values(
                Origin("auto: ", Rank.RULE),
                **batch_values(run, processes, rows, most_rows(run, device)),
            )
            assert run.rows_per_step(processes) == rows
            each = run.micro_batch_rows(processes)
            assert each * length <= MICRO_BATCH_TOKENS[device] or each == 1


@pytest.mark.parametrize("stage", ["{until: 50%}", "{until: 50%, batch_size: 3}"])
@pytest.mark.parametrize("processes", [1, 3])
def test_micro_batches_of_stages_are_no_larger(tmp_path: Path, processes: int, stage: str):
    (tmp_path / "s.yaml").write_text(f"stages: [{stage}, {{name: b}}]\n")
    run = parse(f"--max_seq_len 512 --max_tokens 2e9 --stages {tmp_path / 's.yaml'}")

    def budgets(tokens: int) -> dict[str, int]:
        return {"max_tokens": int(2e9) // tokens}

    values, _ = values_by_rules(
        run, ["batch_size"], "AdamW", processes, "cuda", None, 10**7, budgets
    )
    run = run.with_values(Origin("auto: ", Rank.RULE), **values)
    assert run.micro_batch_rows(processes) == 16
    if "batch_size" in stage:
        assert "accumulation_steps" not in values
    else:
        assert run.rows_per_step(processes) == suited_rows(
            processes, 512, 2 * 10**9, 10**9, "AdamW"
        )


def test_accumulation_that_is_given_is_kept():
    run = parse("--accumulation_steps 4")
    assert batch_values(run, 2, 64, 32) == {"batch_size": 8}


def test_more_parameters_want_a_lower_rate_and_more_epochs_a_larger_decay():
    def values(**changes) -> dict[str, float]:
        return suited_values(
            ["learning_rate", "weight_decay"], Workload(**{**vars(WORK), **changes})
        )

    assert values(parameters=400_000_000)["learning_rate"] < values()["learning_rate"]
    assert values(epochs=12.0)["weight_decay"] > values()["weight_decay"]


@pytest.mark.parametrize(
    ("steps", "warmup"), [(0, 0), (10, 3), (200, 60), (334, 100), (10**6, 100)]
)
def test_a_warm_up_is_a_hundred_steps_or_three_tenths_of_a_short_run(steps: int, warmup: int):
    assert suited_values(["warmup_steps"], Workload(10**6, 10**6, 1.0, steps)) == {
        "warmup_steps": warmup
    }


@pytest.mark.parametrize(
    ("line", "optimizer", "names"),
    [
        ("", "AdamW", ["batch_size", "learning_rate", "warmup_steps", "weight_decay"]),
        ("--optimizer muon", "Muon", ["batch_size"]),
        ("--optimizer sgd", "SGD", []),
        ("--task sft --init_from x", "AdamW", []),
        ("--init_from x", "AdamW", []),
        ("--mup_base_dim 256", "AdamW", []),
    ],
)
def test_rules_hold_for_what_they_were_fitted_to(line: str, optimizer: str, names: list[str]):
    assert sorted(flags_with_rules(parse(line), optimizer)) == names


@pytest.mark.parametrize(
    ("documents", "tokens", "row_tokens", "fraction"),
    [
        (200, 1e6, 257, 0.025),
        (10_000, 1e9, 257, 0.01),
        (100, 4000, 257, 0.129),
        (49, 1e6, 257, 0.0),
        (100, 900, 257, 0.0),
    ],
)
def test_the_share_that_is_held_out_has_documents_and_rows(
    documents: int, tokens: float, row_tokens: int, fraction: float
):
    assert held_out_of(documents, tokens, row_tokens) == pytest.approx(fraction, abs=5e-4)
