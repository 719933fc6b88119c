"""The verdict of a report: as recorded, of profiles, of step lines."""

from __future__ import annotations

from typing import Any

import pytest

from minimind.cli.main import main
from minimind.report.slowness import verdict_of
from tests.report.made import (
    made_profile,
    made_run,
    page_of,
    run_start,
    step_line,
    verdict_line,
    write_run,
)

WAITS = {"data_ms": 60.0, "step_ms": 160.0}
OF_WAITS = "data-bound: 38 % of the step (60.0 of 159.0 ms) waits for rows; "


def test_the_last_recorded_verdict_is_shown(tmp_path, capsys):
    lines = [run_start(), step_line(1), made_profile(), verdict_line("first"), verdict_line("last")]
    run = write_run(tmp_path / "run", lines)
    assert main(["report", str(run)]) == 0
    assert "  verdict     last\n" in capsys.readouterr().out
    assert " Last.</p>" in page_of(tmp_path, run)
    other = write_run(tmp_path / "other", [run_start(), step_line(1), verdict_line("<b>other")])
    both = page_of(tmp_path, run, other)
    assert '<p class="quiet">last</p>' in both
    assert '<p class="quiet">&lt;b&gt;other</p>' in both


def test_a_start_without_a_profile_leaves_the_verdict_of_the_one_before(tmp_path):
    lines = [run_start(), verdict_line("first"), run_start(10), step_line(11, **WAITS)]
    assert verdict_of(made_run(tmp_path, lines)) == "first"


def test_a_run_without_a_recorded_verdict_gets_that_of_its_profiles(tmp_path):
    start = run_start(num_workers=1)
    waits: dict[str, Any] = {"data_ms": 60.0}
    lines = [start, made_profile(forward_ms=9e9), *[made_profile(**waits)] * 2]
    place = tmp_path / "run"
    assert verdict_of(made_run(place, lines)) == f"{OF_WAITS}--num_workers 2"
    (place / "config.yaml").write_text("num_workers: 8  # --num_workers\n")
    lines[0] = run_start()
    assert verdict_of(made_run(place, lines)).endswith("the limit, --num_workers is 8")
    (place / "config.yaml").unlink()
    assert verdict_of(made_run(place, lines)) == f"{OF_WAITS}increase --num_workers"


def test_a_key_of_the_deepspeed_file_decides_what_is_advised(tmp_path):
    place = write_run(tmp_path, [run_start()])
    (place / "ds_config.resolved.json").write_text(
        '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'
    )
    found = verdict_of(made_run(place, [run_start(), made_profile(optimizer_ms=90.0)]))
    assert "remove offload_optimizer" in found


def test_the_host_of_a_profile_is_the_limit_and_a_run_that_recorded_none_has_none(tmp_path):
    phases = {name: [made_profile()[name]] for name in ("data_ms", "forward_ms", "backward_ms")}
    ranks = {**phases, "optimizer_ms": [10.0]}
    start = run_start(device="cuda", zero_stage=1, zero_update="by DeepSpeed (--zero_update)")
    lines = [start, *[made_profile(ranks={**ranks, "host_ms": [89.0]})] * 2]
    assert verdict_of(made_run(tmp_path / "host", lines)) == (
        "the host is the limit: the GPU waits for it in passes that are 89 % of the step (89.0 of"
        " 100.0 ms); --zero_update auto, or a larger --batch_size"
    )
    lines = [start, *[made_profile(ranks=ranks)] * 2]
    assert verdict_of(made_run(tmp_path / "before", lines)).startswith("nothing stands out")


def test_a_late_rank_of_a_profile_is_named(tmp_path):
    by_rank: dict[str, list[float]] = {
        **{"data_ms": [1.0, 1.0], "forward_ms": [29.0, 90.0], "backward_ms": [121.0, 60.0]},
        **{"optimizer_ms": [10.0, 10.0], "comm_ms": [65.0, 4.0]},
    }
    lines = [run_start(world_size=2), made_profile(backward_ms=121.0, ranks=by_rank)]
    found = verdict_of(made_run(tmp_path, lines))
    assert found.startswith("rank 1 is 210 % slower than rank 0 in forward (90.0 against 29.0 ms")


@pytest.mark.parametrize(
    "damage",
    [{"steps": 0}, {"steps": None}, {"data_ms": None}, {"forward_ms": "x"}, {"ranks": "x"}],
)
def test_a_malformed_profile_is_left_out(tmp_path, damage):
    lines = [run_start(), *[made_profile(data_ms=60.0)] * 2]
    whole = verdict_of(made_run(tmp_path, lines))
    assert whole.startswith(OF_WAITS)
    damaged = made_profile(**{"data_ms": 9e3, **damage})
    assert verdict_of(made_run(tmp_path, [*lines, damaged])) == whole
    assert verdict_of(made_run(tmp_path, [run_start(), damaged])) == ""


@pytest.mark.parametrize("ranks", [None, {"data_ms": [1.0, 2.0]}])
def test_profiles_without_all_ranks_are_those_of_rank_0(tmp_path, ranks):
    lines = [run_start(), *[made_profile(data_ms=60.0, ranks=ranks)] * 2]
    assert verdict_of(made_run(tmp_path, lines)).startswith(OF_WAITS)


def test_without_profiles_step_lines_name_a_cause_but_do_not_rule_one_out(tmp_path):
    lines = [run_start(), *(step_line(n, **WAITS) for n in (10, 20))]
    assert verdict_of(made_run(tmp_path, lines)).startswith(OF_WAITS)
    assert verdict_of(made_run(tmp_path, [run_start(), step_line(10), step_line(20)])) == ""
    for nothing in ([], [run_start()], [run_start(), step_line(1, forward_ms="x")]):
        assert verdict_of(made_run(tmp_path, nothing)) == ""
