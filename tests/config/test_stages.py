"""Files of --stages: what they may say, and the steps of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from minimind.config.parse import build_config
from minimind.config.run_config import RunConfig
from minimind.config.stages import plan_stages, stage_text
from minimind.errors import UsageError

TWO = [
    {"name": "warm", "until": "80%", "weights": {"web": 1}},
    {"name": "decay", "weights": {"web": 1, "books": 3}},
]


def file_of(folder: Path, stages: Any = None, **more: Any) -> str:
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({"stages": TWO if stages is None else stages, **more}))
    return str(path)


def run_of(path: str, **flags: Any) -> RunConfig:
    return build_config({"stages": path, "max_seq_len": 32, "batch_size": 4, **flags}, "--{name}")


def steps_of(
    path: str, world_size: int = 1, tokens: int | None = None, **flags: Any
) -> list[tuple[int, int]]:
    """First step and number of steps of each stage."""
    length = {"max_tokens": float(tokens)} if tokens else {"max_steps": 100}
    budgets = {"max_tokens": tokens} if tokens else {}
    _, stages, _ = plan_stages(run_of(path, **length, **flags), world_size, budgets)
    return [(stage.steps.start, len(stage.steps)) for stage in stages]


def test_a_share_is_one_of_the_steps_or_of_the_tokens_of_a_budget(tmp_path: Path):
    path = file_of(tmp_path)
    assert steps_of(path) == [(0, 80), (80, 20)]
    assert steps_of(path, tokens=128 * 100 + 127) == [(0, 80), (80, 20)]  # whole steps alone
    assert steps_of(path, world_size=2, tokens=128 * 100) == [(0, 40), (40, 10)]
    assert steps_of(path, accumulation_steps=4, tokens=128 * 100) == [(0, 20), (20, 5)]
    for until in ("0.8", "80 %".replace(" ", ""), "8e-1"):
        assert steps_of(file_of(tmp_path, [{**TWO[0], "until": until}, TWO[1]])) == [
            (0, 80),
            (80, 20),
        ]


def test_stages_differ_in_row_length_and_batch(tmp_path: Path):
    short = {"name": "short", "until": 2048, "max_seq_len": 8, "batch_size": 16}
    longer = {"name": "longer", "until": "50%", "max_seq_len": 16}
    path = file_of(tmp_path, [short, longer, {"name": "whole"}])
    # 2,048 = 16 steps of 128 tokens; up to 6,400, 4,352 = 68 of 64; 6,400 = 50 of 128.
    assert steps_of(path, tokens=12_800) == [(0, 16), (16, 68), (84, 50)]
    _, stages, _ = plan_stages(run_of(path, max_tokens=12_800.0), 1, {"max_tokens": 12_800})
    assert [stage.tokens for stage in stages] == [2048, 4352, 6400]
    assert stage_text(stages[1].facts()) == "longer: steps 17 to 84 of 4 rows x 16, 4,352 tokens"


def test_steps_that_do_not_divide_leave_no_more_than_one_step_of_each(tmp_path: Path):
    stages = [{"until": 1000}, {"until": 1500, "batch_size": 3}, {"batch_size": 5}]
    path = file_of(tmp_path, stages)
    # 7 of 128 tokens end at 896, 6 of 96 at 1,472, 9 of 160 at 2,912.
    assert steps_of(path, tokens=3000) == [(0, 7), (7, 6), (13, 9)]


def test_the_decay_begins_with_a_stage(tmp_path: Path):
    path = file_of(tmp_path, decay_from="decay")
    _, _, schedule = plan_stages(run_of(path, max_steps=100, schedule="wsd"), 1, {})
    assert (schedule.total_steps, schedule.decay_steps) == (100, 20)
    assert schedule.lr_at(79) == schedule.peak > schedule.lr_at(80)


def test_a_decay_from_the_first_stage_leaves_no_step_to_warm_up(tmp_path: Path):
    path = file_of(tmp_path, decay_from="warm")
    with pytest.raises(UsageError, match=r"after step 0, within warmup_steps = 2 \(--warmup"):
        plan_stages(run_of(path, max_steps=100, schedule="wsd", warmup_steps=2), 1, {})
    run = run_of(path, max_steps=100, schedule="wsd", warmup_steps=0)
    assert plan_stages(run, 1, {})[2].decay_steps == 100


def of_second(**changes: Any) -> list[dict[str, Any]]:
    return [TWO[0], {**TWO[1], **changes}]


def test_the_last_stage_may_say_that_it_ends_with_the_run(tmp_path: Path):
    without = steps_of(file_of(tmp_path))
    assert steps_of(file_of(tmp_path, of_second(until="100%"))) == without


def test_a_budget_of_any_size_is_laid_out(tmp_path: Path):
    run = run_of(file_of(tmp_path), max_tokens=1e25)
    _, stages, _ = plan_stages(run, 1, {"max_tokens": 10**25})
    assert sum(stage.tokens for stage in stages) == 10**25 // 128 * 128
