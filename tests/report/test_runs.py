"""Reading metrics.jsonl: which lines hold after crashes and resumes, and what a run comes to."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from minimind.report.figures import Summary, sparkline
from minimind.report.history import read_runs
from tests.report.made import (
    NOW,
    PHASES,
    crashed_and_resumed,
    end,
    evaluation,
    made_run,
    run_start,
    step_line,
    values_at,
    write_run,
)


def test_steps_taken_again_are_those_of_the_last_writing(tmp_path):
    run = made_run(tmp_path, crashed_and_resumed())
    assert run.column("step").tolist() == list(range(1, 41))
    assert run.column("loss").tolist() == [9.0 - n / 8 for n in range(1, 41)]
    (lost,) = run.lost_lines()
    assert run.lines("step")[lost].tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert run.lines("loss")[lost].tolist() == [7.75, *[1.0] * 6]


def test_a_validation_that_a_crash_undid_is_not_the_best_one(tmp_path):
    run = made_run(tmp_path, crashed_and_resumed())
    best = Summary(run, NOW).figures["validation"]
    assert (best.value, best.remark.split(",")[0]) == (4.25, " at step 40")
    assert [e["step"] for e in run.events("eval", is_lost=True)] == [15]


def test_how_each_start_ended(tmp_path):
    run = made_run(tmp_path, crashed_and_resumed())
    ends = [kind for kind, _ in run.outcomes(NOW)]
    assert ends == ["crashed", "stopped", "done"]
    assert values_at(run, "resumes", "crashes", "lost") == (2, 1, 6)
    assert sum(run.spent(run.starts, is_lost=True).values()) == pytest.approx(600)
    assert values_at(run, "steps", "tokens") == (40, 4000)
    assert Summary(run, NOW).figures["time"].remark == " in 3 starts, 6 steps lost"


def test_how_far_the_mirror_lags_is_told(tmp_path):
    def told(*lines: tuple[str, int]) -> tuple[str, ...]:
        written = [run_start(), step_line(1), *({"event": n, "step": at} for n, at in lines)]
        run = made_run(tmp_path / str(len(lines)), [*written, step_line(40)])
        return Summary(run, NOW).figures["mirror"][1:]

    assert told(("checkpoint_saved", 10)) == ("", "")
    fetched, saved = ("checkpoint_fetched", 5), [("checkpoint_saved", n) for n in (10, 20, 30)]
    uploaded = [("checkpoint_mirrored", n) for n in (20, 10)]
    remark = ", the newest of 2 checkpoints uploaded, 10 steps behind out_dir, failed at 1 step"
    lines = [fetched, *saved, *uploaded, ("mirror_failed", 30)]
    assert told(*lines) == ("step 20", f"{remark}, fetched at 1 start")
    assert told(saved[0], ("mirror_failed", 10)) == (
        "nothing uploaded",
        ", 10 steps behind out_dir, failed at 1 step",
    )


def test_what_a_rollback_leaves_behind_is_not_the_newest_at_the_mirror(tmp_path):
    def line(name: str, step: int, **facts: int) -> dict[str, Any]:
        return {"event": name, "step": step, **facts}

    lines = [run_start(), *(line("checkpoint_saved", n) for n in (5, 10, 15)), step_line(16)]
    lines += [line("checkpoint_mirrored", 5), line("rolled_back", 16, to=10), step_line(11)]
    late = [line("checkpoint_mirrored", n) for n in (10, 15)]  # uploaded meanwhile
    one = Summary(made_run(tmp_path / "a", [*lines, *late, step_line(12)]), NOW).figures["mirror"]
    assert one == (10, "step 10", ", the newest of 2 checkpoints uploaded")
    fetched = [run_start(10), line("checkpoint_fetched", 10), line("checkpoint_mirrored", 5)]
    assert values_at(made_run(tmp_path / "b", [*fetched, step_line(12)]), "mirror") == (10,)


def test_the_shares_are_of_all_the_time_that_was_measured_also_of_what_was_lost(tmp_path):
    lines = [run_start(), step_line(10, evaluate_ms=100.0), step_line(12), run_start(10)]
    shares = Summary(made_run(tmp_path, [*lines, step_line(11)]), NOW).shares
    whole = 13 * sum(PHASES.values()) + 10 * 100.0
    assert shares["forward"] == pytest.approx(13 * 29.0 / whole)
    assert shares["evaluate"] == pytest.approx(1000.0 / whole)
    assert sum(shares.values()) == pytest.approx(1)


def test_what_the_last_step_waited_for_is_in_the_shares_though_no_line_follows(tmp_path):
    last = {**end(10), "evaluate_ms": 3000.0, "checkpoint_ms": 1000.0}
    figures = Summary(made_run(tmp_path / "a", [run_start(), step_line(10), last]), NOW)
    assert figures.shares["evaluate"] == pytest.approx(0.6)
    assert figures.shares["checkpoint"] == pytest.approx(0.2)
    undone = [run_start(), step_line(10), last, run_start(5), step_line(6)]
    run = made_run(tmp_path / "b", undone)
    assert sum(run.spent(run.starts, is_lost=True).values()) == pytest.approx(5 * 100 + 4000)


def test_a_start_that_failed_before_its_run_start_ends_no_other(tmp_path):
    never = {**end(0, 3, "E_DATA", "no text"), "time": NOW - 100, "started": False}
    run = made_run(tmp_path, [run_start(), step_line(10), never])
    assert values_at(run, "time", "steps", "crashes") == (pytest.approx(1), 10, 1)
    assert Summary(run, NOW).figures["time"].remark == " in 1 start"
    assert Summary(run, NOW).ending == "status 3, E_DATA: no text"
    again = [run_start(), step_line(10), never, run_start(10), step_line(12), end(12)]
    run = made_run(tmp_path, again)
    assert (*values_at(run, "steps", "lost"), Summary(run, NOW).ending) == (12, 0, "done")


def test_tokens_per_second_are_tokens_over_seconds_not_a_mean_of_speeds(tmp_path):
    lines = [run_start(), step_line(10, tokens_per_second=100.0)]
    lines += [step_line(40, tokens_per_second=300.0)]
    assert values_at(made_run(tmp_path, lines), "tokens/s") == (pytest.approx(200.0),)


def test_lines_of_larger_steps_count_by_their_tokens(tmp_path):
    """As with --stages, or a batch that was changed."""
    sizes = np.cumsum([10] * 10 + [1000] * 10)
    lines = [
        step_line(n + 1, tokens=int(tokens), tokens_per_second=100.0 if n < 10 else 1000.0)
        for n, tokens in enumerate(sizes)
    ]
    (speed,) = values_at(made_run(tmp_path, [run_start(), *lines]), "tokens/s")
    assert speed == pytest.approx(sizes[-1] / (10 * 10 / 100 + 10 * 1000 / 1000))


def test_a_line_after_a_crash_counts_by_the_steps_that_it_is_of(tmp_path):
    lines = [run_start(), step_line(100), run_start(190), step_line(200, tokens_per_second=100.0)]
    (speed,) = values_at(made_run(tmp_path, lines), "tokens/s")
    assert speed == pytest.approx((10_000 + 1000) / (10 + 10))


def test_of_a_line_that_began_before_the_cutoff_only_what_is_beyond_it_is_lost(tmp_path):
    lines = [run_start(), step_line(100), step_line(200), run_start(190), step_line(200)]
    run = made_run(tmp_path, lines)
    assert values_at(run, "lost") == (10,)
    assert sum(run.spent(run.starts, is_lost=True).values()) == pytest.approx(10 * 100)


def test_the_end_of_a_run_whose_patience_ran_out_is_the_earlier_one(tmp_path):
    ran_out = {"event": "patience_ran_out", "time": NOW, "step": 20, "total_steps": 25}
    lines = [run_start(), *(step_line(n) for n in (10, 20)), ran_out]
    failed = {**end(20, 3, "E_DATA", "no text"), "started": False}
    # A start says in its first line where it ends; what a later one undid does not count.
    more = [], [end(25), failed], [run_start(20, total_steps=25)], [run_start(10)]
    runs = [made_run(tmp_path / str(n), [*lines, *one]) for n, one in enumerate(more)]
    assert [Summary(run, NOW).total_steps for run in runs] == [25, 25, 25, 40]


def test_a_later_start_that_took_no_step_undoes_all_the_same(tmp_path):
    lines = [run_start(), *(step_line(n) for n in range(1, 9)), run_start(5)]
    run = made_run(tmp_path, lines)
    assert run.column("step").tolist() == [1, 2, 3, 4, 5]
    assert run.last_step == 5
    assert values_at(run, "lost") == (3,)


def test_a_start_that_failed_before_it_began_undoes_nothing(tmp_path):
    failed = end(0, 4, "E_CHECKPOINT", "damaged")
    lines = [run_start(), step_line(1), step_line(2), end(2), failed]
    run = made_run(tmp_path, lines)
    assert run.column("step").tolist() == [1, 2]
    assert run.outcomes(NOW)[-1][0] == "failed"


def test_steps_that_go_back_without_a_run_start_begin_again(tmp_path):
    lines = [run_start(), step_line(1), step_line(2), step_line(3), '{"event": "run_st\n']
    run = made_run(tmp_path, [*lines, step_line(2, loss=0.25), step_line(3, loss=0.5)])
    assert run.column("step").tolist() == [1, 2, 3]
    assert run.column("loss").tolist() == [8.875, 0.25, 0.5]
    assert run.unread_lines == 1


ODD: tuple[dict[str, Any], ...] = ({"loss": "low"}, {"tokens": [1]}, {"grad_norm": True})


def test_what_cannot_be_read_is_passed_over_and_counted(tmp_path):
    torn = json.dumps(step_line(9))[:40]
    strange = [
        *({"event": "eclipse", "step": 3}, {"event": ["step"]}, {"no": "event"}, "[1]\n", "\n"),
        *("7\n", "\x00\x00\n", '{"event": "step", "loss": 1e999, "step": 2}\n'),
        *(step_line(3, **odd) for odd in ODD),
        *(step_line(3, expert_load="x"), step_line(3, lr=None, loss=None), torn),
    ]
    run = made_run(tmp_path, [run_start(), step_line(1), *strange])
    assert run.column("step").tolist() == [1, 2, 3]
    assert [math.isnan(value) for value in run.column("loss")] == [False, True, True]
    assert np.isnan(run.column("lr")[2])
    assert run.unread_lines == 9
    assert values_at(run, "loss") == (8.875,)


def test_a_run_without_an_end_is_running_while_it_writes(tmp_path):
    run = made_run(tmp_path, [run_start(), step_line(1)])
    last = run.starts[0].last_time
    assert Summary(run, last + 5).kind == "running"
    assert Summary(run, last + 5000).kind == "silent"
    slow = made_run(tmp_path, [run_start(), step_line(1), step_line(20_001)])
    assert Summary(slow, slow.starts[0].last_time + 5000).kind == "running"


@pytest.mark.parametrize("lines", [[], [run_start()], [run_start(), step_line(1)]])
def test_a_run_of_nothing_or_of_one_step_has_a_summary(tmp_path, lines):
    run = made_run(tmp_path, lines)
    text = Summary(run, NOW).as_text()
    assert text.startswith(str(tmp_path))
    assert "nan" not in text.lower()


def test_the_summary_reports_what_a_reader_asks_first(tmp_path):
    run = made_run(tmp_path, crashed_and_resumed())
    text = Summary(run, NOW).as_text()
    for expected in (
        "1,000 parameters, float32, DDP on 2 processes (cpu)",
        "step 40 of 40 after 7.6 s: done",
        "2 resumes, 1 crash, 6 steps lost (0.6 s)",
        "loss        4.0000 at step 40",
        "validation  4.2500 at step 40, the best, perplexity 2, bits per byte 1.417",
        "4,000, 1,000 tokens/s",
        "data 1.0%, forward 29%, backward 60%, optimizer 10%",
        "340 MiB",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_best_validation_of_the_average_has_a_line_of_its_own(tmp_path):
    averages = [{"ema_val_loss": y, "ema_val_bpb": y / 2} for y in (3.0, 3.5)]
    evals = [evaluation(n, 4.0, **average) for n, average in enumerate(averages, 1)]
    run = made_run(tmp_path, [run_start(), step_line(1), step_line(2), *evals])
    text = Summary(run, NOW).as_text()
    assert "\n  average     3.0000 at step 1, the best, bits per byte 1.5\n" in text
    without = made_run(tmp_path, [run_start(), step_line(1), evaluation(1, 4.0)])
    assert "average" not in Summary(without, NOW).as_text()


def test_the_sparkline_falls_as_the_curve_does():
    assert sparkline(np.array([4.0, 3.0, 2.0, 1.0]), "1234").startswith("4321  4.00 to 1.00")
    assert sparkline(np.array([4.0, math.nan]), "1234") == ""
    assert len(sparkline(np.linspace(1, 2, 5000), "1234").split()[0]) == 60


def test_runs_are_named_by_as_much_of_their_path_as_it_takes(tmp_path):
    places = [write_run(tmp_path / one, []) for one in ("x/run", "y/run", "y/other")]
    names = [run.name for run in read_runs(places)]
    assert names == ["x/run", "y/run", "y/other"]


def test_where_validation_is_null_there_is_no_best(tmp_path):
    lines = [run_start(), step_line(1), {**evaluation(1, 1.0), "val_loss": None}]
    assert math.isnan(*values_at(made_run(tmp_path, lines), "validation"))


def test_a_run_alone_has_two_parts_of_its_path_for_a_name(tmp_path):
    place = tmp_path / "sample" / "run"
    write_run(place, [run_start(), step_line(1), end(1)])
    assert read_runs([place])[0].name == "sample/run"
