"""A loss or gradient spoilt on one of two ranks: at every stage and dtype all skip that step.

All cases (some without --long) run in one launch of skip_steps.py; the end of a run is that of two
real ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launcher
from tests.distributed.skip_steps import COURSE, NORM_LIMIT, ORDER, all_rows
from tools.forking import Nursery

pytestmark = pytest.mark.launch
# Stage 3 comes last: it replaces torch's linear function in the whole process.
CASES = [f"{stage},{dtype}" for stage in (None, 0, 1, 2, 3) for dtype in ("float32", "bfloat16")]
CASES.insert(-2, "2,float32,zero_optimization.compute_grad_norm=false")
CASES.insert(-2, '1,bfloat16,data_types.grad_accum_dtype="fp32"')  # BF16_Optimizer
SHORT = [
    *("None,float32", "None,bfloat16", "0,float32", "1,bfloat16", "2,bfloat16"),
    *("2,float32,zero_optimization.compute_grad_norm=false", "3,bfloat16"),
]
SPOILT = [step for step, fault in enumerate(COURSE, 1) if fault and fault[0] != "limit"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spoilt")


@pytest.fixture(scope="module")
def skip_runs(
    root: Path, nursery: Nursery, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    cases = CASES if request.config.getoption("--long") else SHORT
    words = [str(root), *cases]
    statuses, _, text = nursery.run("tests.distributed.skip_steps", words, root / "ranks")
    assert statuses == [0, 0], text
    return dict(zip(cases, json.loads((root / "results.json").read_text()), strict=True))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_all_ranks_skip_the_same_steps_and_count_them(skip_runs):
    so_far = [sum(step <= at for step in SPOILT) for at in range(1, len(COURSE) + 1)]
    expected = [[at in SPOILT, count] for at, count in enumerate(so_far, 1)]
    found = {case: [seen["skipped"] for seen in ranks] for case, ranks in skip_runs.items()}
    assert found == dict.fromkeys(skip_runs, [expected] * 2)


def test_a_skipped_step_changes_nothing_and_the_others_are_as_without_it(skip_runs):
    for case, ranks in skip_runs.items():
        for seen in ranks:
            assert seen["unchanged"] == [bool(fault) for fault in COURSE], case
            spoilt, clean = seen["ends"]
            assert spoilt == clean, case
            assert clean[1] == COURSE.count(None), case  # the optimizer's own count


def test_the_norm_above_the_limit_is_that_of_the_gradient(skip_runs):
    at = COURSE.index(("limit", 0))
    for case, ranks in skip_runs.items():
        norms = [seen["norms"][at] for seen in ranks]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6), case
        ddp = skip_runs[f"None,{case.split(',')[1]}"][0]["norms"][at]
        assert norms[0] == pytest.approx(ddp, rel=2e-2 if "bfloat16" in case else 1e-5), case
        assert norms[0] > NORM_LIMIT, case


def test_only_the_spoilt_loss_is_not_finite(skip_runs):
    for case, ranks in skip_runs.items():
        for rank, seen in enumerate(ranks):
            for fault, losses in zip(COURSE, seen["losses"], strict=True):
                bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
                is_spoilt = rank == 1 and fault and fault[0] == "loss"
                assert bad == ([fault[1]] if is_spoilt else []), (case, rank)


def test_every_stage_continues_alike(skip_runs):
    for case in (case for case in skip_runs if "=" not in case):
        dtype = case.split(",")[1]
        rel, abs_ = (2e-6, None) if dtype == "float32" else (None, 2e-3)
        for rank in (0, 1):
            losses = skip_runs[case][rank]["losses"]
            ddp = skip_runs[f"None,{dtype}"][rank]["losses"]
            for at in (at for at, fault in enumerate(COURSE) if not fault):
                assert losses[at] == pytest.approx(ddp[at], rel=rel, abs=abs_), case


def test_one_too_many_is_the_end_on_every_rank(skip_runs):
    for case, ranks in skip_runs.items():
        raised = [seen["raised"] for seen in ranks]
        assert raised[0] == raised[1], case
        step, message, cause_rank = raised[0]
        assert (step, cause_rank) == (SPOILT[-1], 1), case
        assert "the loss is not finite on rank 1 (micro-batch 1); 3 in all" in message
        assert "max_skipped = 2 (--max_skipped)" in message
        assert "nonfinite_rows.jsonl" in message


def test_the_rows_at_fault_are_dumped(skip_runs, root):
    rows = all_rows()
    expected = []
    for step in SPOILT:
        what, micro_batch = COURSE[step - 1] or ("", 0)
        positions = ORDER.positions(step - 1)
        if what == "gradient":
            places = [positions.start, positions.stop]
            expected.append({"step": step, "reason": "gradient", "positions": places})
            continue
        own = ORDER.rows_for(step - 1, 1, 2).tolist()
        for at in (2 * micro_batch, 2 * micro_batch + 1):
            tokens = rows[own[at]].tolist()
            place = {"rank": 1, "micro_batch": micro_batch, "position": positions.start + 4 + at}
            line = {"step": step, "reason": "loss", **place, "row": own[at], "loss": None}
            expected.append({**line, "tokens": tokens, "text": str(tokens)})
    found = {case: lines_of(root / case / "nonfinite_rows.jsonl") for case in skip_runs}
    assert found == dict.fromkeys(skip_runs, expected)


def test_each_is_an_event(skip_runs, root):
    expected = [
        {"event": "step_skipped", "step": step, "reason": what, "ranks": [1] * (what == "loss")}
        for step, what in zip(SPOILT, ("loss", "gradient", "loss"), strict=True)
    ]
    for case in skip_runs:
        lines = lines_of(root / case / "metrics.jsonl")
        assert [{k: line[k] for k in line if k != "time"} for line in lines] == expected, case


def test_a_run_that_diverges_ends_with_6_and_is_reported_once(forked: Launcher, tmp_path: Path):
    flags = "--learning_rate 1e30 --warmup_steps 0 --max_skipped 2 --save_interval 1"
    run = forked.run(tmp_path / "out", flags)
    assert run.status == 6, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "error[" in line]
    assert "error[E_NONFINITE]" in line
    assert "stopped because rank" in run.stderr
    assert [event["step"] for event in run.events("step_skipped")] == [2, 3, 4]
    assert [step["skipped"] for step in run.events("step")] == [0, 1, 2]
    (end,) = run.events("exit")
    assert (end["status"], end["step"]) == (6, 4)
    assert [line["step"] for line in lines_of(run.out_dir / "nonfinite_rows.jsonl")] == [2, 3, 4]
