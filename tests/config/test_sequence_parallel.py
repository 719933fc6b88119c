"""What --sequence_parallel divides, and what is refused beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minimind.architecture.costs import activation_bytes, exchanged_bytes
from minimind.architecture.plan import layout_of
from minimind.architecture.shape import shape_of
from minimind.config.checks import check
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import resolve
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.deepspeed_backend import configuration
from minimind.errors import UsageError

TWO = "--n_heads 8 --n_kv_heads 2 --max_seq_len 512 --sequence_parallel"


SCALED = "--sequence_parallel 2 --rope_scaling linear --rope_original_length"


def test_rows_are_checked_at_the_length_that_scaling_gives_them():
    with pytest.raises(UsageError, match="does not divide max_seq_len = 1503"):
        parse_flags(f"{SCALED} 501 --rope_factor 3".split())
    run = parse_flags(f"--sequence_parallel 4 {SCALED[22:]} 500 --rope_factor 2".split())
    assert run.max_seq_len == 1000
    pending = parse_flags("--init_from DIR --sequence_parallel 3".split())
    with pytest.raises(UsageError, match="does not divide n_heads = 8"):
        check(pending)


def test_the_rows_of_a_step_are_divided_over_groups():
    run = parse_flags([*f"{TWO} 2 --batch_size 3 --accumulation_steps 5".split()])
    assert run.micro_batch_rows(4) == 3
    assert run.rows_per_step(4) == 3 * 5 * 2
    split = replace(run, split_batches=True, batch_size=6)
    assert split.micro_batch_rows(4) == 3
    with pytest.raises(UsageError, match=r"sequence_parallel = 2 .* does not divide 3 processes"):
        run.rows_per_step(3)


def test_deepspeed_counts_a_row_for_each_process_that_reads_it():
    path = str(DEFAULT_DEEPSPEED_CONFIG)
    run = parse_flags([*f"{TWO} 2 --batch_size 3".split()])
    resolved = resolve(read_deepspeed_json(path), path, run, 4, "cpu")
    assert resolved.config["train_batch_size"] == 6
    assert configuration(resolved) == {**resolved.config, "train_batch_size": 12}


def test_the_plan_divides_activations_and_counts_the_exchange():
    run = parse_flags([*TWO.split(), "1", "--dtype", "bfloat16"])
    shape, whole = shape_of(run), layout_of(run, 4, {}, "cpu")
    assert exchanged_bytes(shape, whole) == 0
    for n in (2, 4, 8):
        part = replace(whole, sequence=n)
        assert activation_bytes(shape, part) == activation_bytes(shape, whole) // n
        tokens = whole.rows * run.max_seq_len // n
        heads = 2 * run.n_heads + 2 * max(2, n)  # queries, results, keys and values
        channels = run.dim // run.n_heads * heads
        all_of_them = 2 * 2 * tokens * channels * run.n_layers  # bf16, forward and backward
        assert exchanged_bytes(shape, part) == all_of_them * (n - 1) // n
