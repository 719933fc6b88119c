"""Resolved DeepSpeed configurations against the flags they were filled from."""

import json
import re
from pathlib import Path

import pytest

from minimind.checkpoint.run_folder import write_reference
from minimind.config.deepspeed.document import AUTO, leaves, read_deepspeed_json
from minimind.config.deepspeed.keys import Facts
from minimind.config.deepspeed.resolve import ResolvedConfig, auto_values, completed, resolve
from minimind.config.origin import DEFAULT
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, PROJECT
from minimind.config.schedule import Schedule
from minimind.errors import UsageError

SHIPPED = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
DEFAULTS = {  # of DeepSpeed's models
    key: value
    for key, (value, source) in auto_values(Facts({}, parse_flags([]), 1, "cpu")).items()
    if source == "DeepSpeed's default" and not key.startswith("scheduler.")
}


def resolved(line: str = "", config=None, world_size: int = 2, device: str = "cpu"):
    config = SHIPPED if config is None else config
    run = with_dtype(parse_flags(line.split()), device, has_bf16=True)
    return resolve(config, "ds.json", run, world_size, device)


def with_value(key: str, value):
    config = json.loads(json.dumps(SHIPPED))
    place = config
    *parents, last = key.split(".")
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return config


def test_every_auto_of_the_shipped_file_is_the_flags_number():
    found = resolved(
        "--batch_size 3 --accumulation_steps 5 --grad_clip 0.7 --learning_rate 2e-3"
        " --weight_decay 0.05 --beta1 0.8 --beta2 0.9 --dim 64 --dtype bfloat16"
    ).config
    assert found["train_micro_batch_size_per_gpu"] == 3
    assert found["gradient_accumulation_steps"] == 5
    assert found["train_batch_size"] == 30
    assert found["gradient_clipping"] == 0.7
    assert found["bf16"]["enabled"] is True
    assert found["fp16"]["enabled"] is False
    assert found["optimizer"]["params"] == {
        "lr": 2e-3,
        "betas": [0.8, 0.9],
        "eps": 1e-8,
        "weight_decay": 0.05,
        "torch_adam": True,
        "fused": True,  # in one kernel
    }
    assert found["zero_optimization"]["reduce_bucket_size"] == 12 * 64 * 64


def test_nothing_is_left_auto_and_every_value_has_a_source():
    found = resolved()
    flat = leaves(found.config)
    assert AUTO not in flat.values()
    assert set(found.sources) == set(flat)
    assert all(found.sources.values())
    for key in flat:
        assert key in found.table()


def test_the_input_is_left_as_it_was():
    before = json.dumps(SHIPPED)
    resolved("--batch_size 3")
    assert json.dumps(SHIPPED) == before


def test_numbers_deepspeed_has_defaults_for_are_written_even_when_the_file_omits_them():
    found = resolved("--grad_clip 0.3", config={"zero_optimization": {"stage": 1}}).config
    assert found["gradient_clipping"] == 0.3
    assert found["gradient_accumulation_steps"] == 1
    assert found["bf16"]["enabled"] is True


def test_an_adam_block_without_numbers_gets_the_flags():
    bare = {"optimizer": {"type": "AdamW"}}
    params = resolved("--beta2 0.8 --weight_decay 0", config=bare).config["optimizer"]["params"]
    fixed = {"torch_adam": True, "fused": True}
    assert params == {"lr": 5e-4, "betas": [0.9, 0.8], "weight_decay": 0.0, **fixed}
    assert resolved(config={"optimizer": {"type": "adamw"}}).config["optimizer"]["params"]["betas"]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_the_adamw_that_needs_no_compiler(stage, device):
    config = with_value("zero_optimization.stage", stage)
    assert resolved(config=config, device=device).config["optimizer"]["params"]["torch_adam"]
    own = with_value("optimizer.params.torch_adam", False)
    params = resolved(config=own, device=device).config["optimizer"]["params"]
    assert params["torch_adam"] is False
    assert "fused" not in params  # which is torch's


@pytest.mark.parametrize("name", ["bias_correction", "set_grad_none", "fp32_optimizer_states"])
def test_beside_what_only_deepspeeds_adamw_takes_auto_is_that(name):
    found = resolved(config=with_value(f"optimizer.params.{name}", True), device="cuda")
    assert found.config["optimizer"]["params"]["torch_adam"] is False
    assert found.sources["optimizer.params.torch_adam"] == f"derived: of {name}"


def test_deepspeeds_clock_waits_for_no_gpu_unless_requested_to():
    assert resolved(device="cuda").config["timers"] == {"throughput": {"synchronized": False}}
    requested = with_value("timers.throughput.synchronized", True)
    assert resolved(config=requested).config["timers"] == requested["timers"]


@pytest.mark.parametrize("key", DEFAULTS)
def test_auto_is_the_default_where_deepspeeds_own_models_read_it_so(key: str):
    config = with_value("zero_optimization.stage", 3)
    *parents, last = key.split(".")
    place = config
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = AUTO
    found = resolved(config=config)
    assert leaves(found.config)[key] == DEFAULTS[key]
    assert found.sources[key] == "DeepSpeed's default"


def test_communication_overlaps_on_several_gpus_only():
    def overlap(world_size, device):
        found = resolved(world_size=world_size, device=device).config
        return found["zero_optimization"]["overlap_comm"]

    assert overlap(2, "cuda") is True
    assert overlap(1, "cuda") is False
    assert overlap(2, "cpu") is False


def test_a_literal_wins_over_a_default_and_becomes_the_runs_number():
    found = resolved(config=with_value("train_micro_batch_size_per_gpu", 4))
    assert found.run.batch_size == 4
    assert found.run.sources["batch_size"] == "ds.json: train_micro_batch_size_per_gpu"
    assert found.config["train_batch_size"] == 8
    assert resolved(config=with_value("optimizer.params.betas", [0.5, 0.6])).run.beta2 == 0.6


@pytest.mark.parametrize("name", ["train_batch_size", "gradient_accumulation_steps"])
def test_null_is_an_unset_part_of_the_batch(name: str):
    flags = "--batch_size 3 --accumulation_steps 5"
    assert resolved(flags, with_value(name, None)).config == resolved(flags).config


def test_a_literal_equal_to_the_flag_is_no_conflict():
    assert (
        resolved("--grad_clip 1.0", config=with_value("gradient_clipping", 1.0)).run.grad_clip == 1
    )


def test_a_precision_the_file_spells_out_is_the_runs():
    assert resolved(config=with_value("bf16.enabled", False)).run.dtype == "float32"
    fp16 = resolved(config=with_value("fp16.enabled", True), device="cuda")
    assert fp16.run.dtype == "float16"
    assert fp16.config["bf16"]["enabled"] is False


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 2,},}',
        "{zero_optimization: {stage: 2}}",
        "{'zero_optimization': {'stage': 2}}",
        '{\n  // stage\n  "zero_optimization": {"stage": 2} # two\n  /* three */\n}',
        '{"zero_optimization": {\n"stage": 2 // of four\n}\n}',
        '# first\r\n{"zero_optimization": {"stage": 2}}\r\n',
        '\ufeff{"zero_optimization": {"stage": 2}}',
        "\ufeff{zero_optimization: {stage: 2}}",
        "zero_optimization: {\n  stage: 2\n}",
        '{\n"zero_optimization": {"stage": 2}\n"steps_per_print": 10\n}',
    ],
)
def test_a_file_is_read_as_deepspeed_reads_it(text: str, tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8", newline="")
    document = read_deepspeed_json(str(file))
    assert document.pop("zero_optimization") == {"stage": 2}
    assert document in ({}, {"steps_per_print": 10})
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "1:1: Expecting value"),
        (" \n", "2:1: Expecting value"),
        ('{"a": 1', "1:8: Expecting ',' delimiter"),
        ('{"a": 1 "b": 2}', "1:9: Expecting ',' delimiter"),
        ('{"a": True}', "1:7: Expecting value"),
        ('{"a": 1}}', "1:9: Extra data"),
        ('{\n// a\n"a": 1,\n"b": "c}', "4:6: Unterminated string"),  # not the comment
        ("{\n'a': 1,\n'b': {\n}\n", "5:1: Bad key name (eof)"),
        ('{"a": 1, // one\n"b" 2}', "2:5: Expecting ':' delimiter"),
        ("[1,]", "is not a JSON object"),
        ("{a: 1, a: 2}", "a is written twice; remove one"),
        ("<html>", "is not a JSON object"),
    ],
)
def test_a_file_that_deepspeed_cannot_read_is_refused_where_it_is_wrong(
    text: str, fault: str, tmp_path: Path
):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_deepspeed_json(str(file))
    assert fault in str(caught.value)


def of_length(schedule: Schedule, resolved: ResolvedConfig) -> ResolvedConfig:
    return completed(resolved, resolved.run, 2, "cpu", schedule)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("zero3", {}),
        ("warmup_cosine", {}),
        ("torch_adamw", {}),
        ("zero2_offload", {}),
        ("zero1", {"scheduler": {"type": "WarmupLR"}}),
        ("zero1", {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}),
    ],
)
def test_the_config_a_run_leaves_behind_repeats_it(name, blocks, tmp_path):
    path = str(PROJECT / "configs" / "deepspeed" / f"{name}.json")
    written = read_deepspeed_json(path) | blocks
    schedule = Schedule("cosine", 2e-3, 0.1, 5, 100)
    first = parse_flags(["--deepspeed_config", path, "--max_steps", "100", "--warmup_steps", "5"])
    if blocks and "scheduler" not in blocks:
        first = parse_flags(["--deepspeed_config", path])
    done = of_length(schedule, resolve(written, path, first, 2, "cpu"))
    write_reference(tmp_path, done)
    again = parse_flags(["--config", str(tmp_path / "config.yaml")])
    assert again.deepspeed_config == path
    repeated = of_length(schedule, resolve(written, path, again, 2, "cpu"))
    assert repeated.config == done.config


def test_a_scheduler_of_deepspeeds_gets_the_flags_and_the_length_of_the_run():
    config = {**SHIPPED, "scheduler": {"type": "WarmupDecayLR"}}
    schedule = Schedule("cosine", 2e-3, 0.1, 7, 50)
    run = parse_flags(["--learning_rate", "2e-3", "--max_steps", "50", "--warmup_steps", "7"])
    found = of_length(schedule, resolve(config, "ds.json", run, 2, "cpu"))
    assert found.scheduler == "WarmupDecayLR"
    params = found.config["scheduler"]["params"]
    assert params == {"warmup_max_lr": 2e-3, "warmup_num_steps": 7, "total_num_steps": 50}
    assert found.sources["scheduler.params.total_num_steps"] == "derived: the steps of the run"
    literal = {"type": "WarmupDecayLR", "params": {"total_num_steps": 30}}
    adopted = resolve({**SHIPPED, "scheduler": literal}, "ds.json", parse_flags([]), 2, "cpu").run
    assert (adopted.max_steps, adopted.sources["max_steps"]) == (
        30,
        "ds.json: scheduler.params.total_num_steps",
    )


DECAYING = {**SHIPPED, "scheduler": {"type": "WarmupDecayLR"}}
BY_STEPS = "derived: by the steps of the run, which the start counts"


def shown(line: str, world_size: int = 1) -> dict[str, tuple[str, str]]:
    """Value and source of the lines of the table, by the last part of the key."""
    found = resolve(DECAYING, "ds.json", parse_flags(line.split()), world_size, "cpu")
    lines = (re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in found.table().splitlines())
    return {key.rpartition(".")[2]: (value, source) for key, value, source in lines}


@pytest.mark.parametrize(
    ("line", "total", "warmup"),
    [
        ("", ('"auto"', BY_STEPS), ('"auto"', "warmup_steps (auto)")),
        ("--warmup_steps 9", ('"auto"', BY_STEPS), ("9", "warmup_steps (--warmup_steps)")),
        ("--max_tokens 9e9", ('"auto"', BY_STEPS), ('"auto"', "warmup_steps (auto)")),
        ("--max_steps 90 --epochs 1", ('"auto"', BY_STEPS), ('"auto"', "warmup_steps (auto)")),
        (
            "--max_steps 90 --warmup_steps 9",
            ("90", "derived: the steps of the run"),
            ("9", "warmup_steps (--warmup_steps)"),
        ),
    ],
)
def test_a_number_that_the_start_decides_is_auto_in_the_table(line, total, warmup):
    found = shown(line)
    assert (found["total_num_steps"], found["warmup_num_steps"]) == (total, warmup)


def test_a_warm_up_without_a_rule_waits_for_the_steps():
    run = parse_flags([]).with_values(DEFAULT, warmup_steps=None)
    found = resolve(DECAYING, "ds.json", run, 1, "cpu")
    assert found.sources["scheduler.params.warmup_num_steps"] == BY_STEPS
    lines = [line.split() for line in found.table().splitlines()]
    assert ["scheduler.params.warmup_num_steps", '"auto"', *BY_STEPS.split()] in lines


def test_a_batch_that_the_start_decides_is_auto_in_the_table():
    batch = ('"auto"', "batch_size (auto)")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [shown("", 2)[key] for key in keys] == [batch] * 3
    assert [shown("--split_batches", 2)[key] for key in keys] == [batch] * 3
    given = shown("--accumulation_steps 3")["gradient_accumulation_steps"]
    assert given == ("3", "accumulation_steps (--accumulation_steps)")
    assert shown("--batch_size 4")[keys[2]] == ("1", "accumulation_steps (default)")


def test_split_batches_fills_the_share_of_one_process():
    found = resolved("--batch_size 6 --split_batches", world_size=3)
    assert found.config["train_micro_batch_size_per_gpu"] == 2
    assert found.config["train_batch_size"] == 6
    assert "3 processes (--split_batches)" in found.sources["train_micro_batch_size_per_gpu"]
    literal = with_value("train_micro_batch_size_per_gpu", 4)
    assert resolved("--split_batches", config=literal, world_size=3).run.batch_size == 12
    product = (
        r"_per_gpu x 3 processes \(--split_batches\) is 12 but --batch_size says batch_size = 6"
    )
    with pytest.raises(UsageError, match=product):
        resolved("--split_batches --batch_size 6", config=literal, world_size=3)
