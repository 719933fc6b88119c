"""The part of `make faults` that fits in two minutes: some of every kind that needs a real kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.faults.forked import ALONE, Bench, no_strace
from tools.faults.harness import Site
from tools.faults.kills import random_kills
from tools.faults.outcomes import Outcome, table
from tools.faults.syscalls import fail_at_each, in_order, kill_at_each
from tools.forking import Nursery

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("faults"), seed=1)
    yield site
    site.close()


@pytest.fixture(scope="module")
def bench(site: Site, nursery: Nursery) -> Bench:
    if reason := no_strace():
        pytest.skip(reason)
    return Bench(site, nursery, ALONE)


def require_right(outcomes: list[Outcome]) -> None:
    wrong = [report for outcome in outcomes for report in outcome.wrong]
    assert not wrong, "\n".join([*table(outcomes), *wrong])


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, 4])
def test_killed_at_random_it_repeats_the_unbroken_run_bit_for_bit(site: Site, kills: int):
    """The group, a worker, then the launcher, the script; one of them in a save."""
    site.measure()
    outcomes = list(random_kills(site, kills, in_saves=1))
    assert sum("SIGKILL" in o.fault for o in outcomes) >= kills
    require_right(outcomes)


def test_a_save_is_on_the_disk_before_it_has_its_name_and_is_reported(bench: Bench):
    require_right([in_order(bench)])


@pytest.mark.parametrize(
    ("call", "at_least"), [pytest.param("fsync", 8, marks=pytest.mark.long), ("rename", 2)]
)
def test_killed_at_each_call_of_a_save_it_continues(call: str, at_least: int, bench: Bench):
    outcomes = list(kill_at_each(bench, call, rank=0, since="training"))
    assert len(outcomes) >= at_least
    require_right(outcomes)


@pytest.mark.long  # tests/checkpoint/test_saver.py has a full disk in process
def test_a_disk_that_fails_is_reported_and_costs_no_checkpoint(bench: Bench):
    outcomes = list(fail_at_each(bench, "rename", "EDQUOT", "training"))
    assert len(outcomes) >= 2
    require_right(outcomes)
