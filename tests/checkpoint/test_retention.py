"""Which checkpoints are kept: the rules one by one, and over random courses of saves."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint import retention
from minimind.checkpoint.directory import published_checkpoints, set_aside, step_of
from minimind.checkpoint.resume import requested_checkpoints
from minimind.checkpoint.retention import (
    VALIDATION,
    Rules,
    Saved,
    fate,
    good_step,
    kept,
    kept_unknown,
    prune,
    record_validation,
    rules_of_run,
    saved_of,
    with_best,
)
from minimind.checkpoint.run_folder import lock_out_dir
from minimind.cli.main import main
from minimind.config.flags import FLAGS
from minimind.config.run_record import ALWAYS, with_sum
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import Unreadable
from minimind.runtime.durable_files import Metrics
from minimind.runtime.event_log import EventLog
from tests.checkpoint.test_directory import saved
from tests.faults import tiny


def of(*steps: int, **losses: float) -> list[Saved]:
    """Checkpoints; `s40=3.1` is the loss of step 40."""
    return [Saved(step, losses.get(f"s{step}")) for step in steps]


def stay(found: list[Saved], rules: Rules, good: int | None = None) -> list[int]:
    return [step for step, reasons in kept(found, rules, good).items() if reasons]


def test_each_rule_keeps_its_own_and_names_it():
    found = of(10, 20, 30, 40, 50, 60, s20=3.5, s30=3.25, s40=3.75)
    rules = Rules(2, keep_every=30, keep_best=1)
    assert kept(found, rules, good=45) == {
        60: ["last", "every"],
        50: ["last"],
        40: ["good"],
        30: ["every", "best 3.25"],
        20: [],
        10: [],
    }
    assert stay(found, Rules(1, keep_best=2)) == [60, 30, 20]
    assert stay(found, Rules(1, keep_best=9)) == [60, 40, 30, 20]


def test_the_spike_guard_keeps_what_it_may_go_back_to():
    found = of(*range(5, 65, 5))
    assert stay(found, Rules(1, reach=17)) == [60, 55, 50, 45, 40]
    assert stay(found, Rules(7, reach=17)) == [60, 55, 50, 45, 40, 35, 30]
    assert stay(of(10), Rules(1, reach=17)) == [10]


def test_of_equal_losses_the_newer_one_is_the_best():
    assert stay(of(10, 20, 30, s10=3.0, s20=3.0), Rules(1, keep_best=1)) == [30, 20]


def test_what_the_next_save_takes_is_said_before():
    found = of(10, 20, 30, s10=3.0)
    assert fate(found, Rules(2, keep_best=1, interval=10)) == {
        30: "last",
        20: "last, will be deleted at the next save",
        10: "best 3",
    }
    assert fate(of(10, 20, 30), Rules(2, interval=10))[10] == "will be deleted at the next save"


@pytest.mark.parametrize("seed", range(40))
def test_no_course_of_saves_and_kills_loses_one_that_a_rule_keeps(seed: int):
    """Pruned after every save or only after some, what is left is what the rules say of all."""
    draw = random.Random(seed)
    rules = Rules(
        draw.randint(1, 3), draw.choice((0, 20, 30)), draw.randint(0, 3), draw.choice((0, 17)), 10
    )
    every: list[Saved] = []
    left: list[Saved] = []
    for step in range(10, 400, 10):
        # The validation of a checkpoint is known before the next one is saved.
        one = Saved(step, draw.choice((None, draw.uniform(2, 4))))
        every, left = [*every, one], [*left, one]
        good = draw.choice((None, step - draw.randint(0, 30)))
        if draw.random() < 0.3:  # killed before it pruned
            continue
        reasons = kept(left, rules, good)
        assert all(reasons[one.step] for one in every[-rules.keep_last :])
        left = [one for one in left if reasons[one.step]]
        assert len(left) <= rules.most(400)
        assert kept(left, rules, good) == {k: v for k, v in reasons.items() if v}
    of_all, of_left = kept(every, rules), kept(left, rules)
    assert [s for s, why in of_all.items() if why] == [s for s, why in of_left.items() if why]


def test_the_most_checkpoints_at_once():
    assert Rules(2).most(100) == 3
    assert Rules(2, keep_every=40, keep_best=3, interval=10).most(100) == 3 + 2 + 3
    assert Rules(2, keep_every=25, interval=10).most(100) == 3 + 2  # steps 50 and 100
    assert Rules(1, reach=17, interval=5, verifies=True).most(100) == 5 + 1 + 1


def test_a_validation_goes_with_its_checkpoint(tmp_path):
    path = saved(tmp_path, 10)
    assert saved_of(path).val_loss is None
    record_validation(path, 3.125)
    assert saved_of(path).val_loss == 3.125
    set_aside(path, "abandoned")
    again = saved(tmp_path, 10)  # of another course
    assert saved_of(again).val_loss is None
    record_validation(again, float("nan"))
    assert saved_of(again).val_loss is None
    (again / VALIDATION).write_text('{"step": 10, "by": "val_loss", "value": 3')
    assert saved_of(again).fault
    record_validation(saved(tmp_path, 20), 3.0)
    shutil.copy(tmp_path / "step_00000020" / VALIDATION, again)
    assert saved_of(again) == Saved(10, fault="is for step 20")


def test_pruning_a_folder_keeps_the_best_and_every_third(tmp_path):
    for step in range(10, 80, 10):
        path = saved(tmp_path, step)
        if step in (20, 40):
            record_validation(path, 3 + step / 100)
    prune(tmp_path, Rules(1, keep_every=30, keep_best=1))
    assert [step_of(path) for path in published_checkpoints(tmp_path)] == [70, 60, 30, 20]


def test_one_whose_loss_cannot_be_read_stays(tmp_path, monkeypatch):
    for step in (10, 20, 30, 40):
        record_validation(saved(tmp_path, step), 3 + step / 100)
    real = retention.read_object

    def unreadable(path: Path) -> tuple[dict[str, Any], bytes]:
        if "step_00000020" in str(path):
            raise Unreadable("cannot be read (Input/output error)")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "read_object", unreadable)
        (told,) = kept_unknown(tmp_path, Rules(1, keep_best=1))
        prune(tmp_path, Rules(1, keep_best=1))
    assert re.match(r".*/step_00000020/validation\.json cannot be read \(Input/out.*stays", told)
    assert [step_of(path) for path in published_checkpoints(tmp_path)] == [40, 20, 10]
    assert kept_unknown(tmp_path, Rules(1, keep_best=1)) == []
    prune(tmp_path, Rules(1, keep_best=1))
    assert [step_of(path) for path in published_checkpoints(tmp_path)] == [40, 10]


def test_verify_list_and_prune_name_a_loss_in_doubt(run_dir, capsys):
    path = run_dir / "checkpoints" / "step_00000004" / VALIDATION
    path.write_bytes(path.read_bytes().replace(b"3.25", b"7.25"))
    assert main(["checkpoint", "verify", str(run_dir)]) == 4
    fault = "DAMAGED: validation.json does not match its own sha256 (a resume does not need it)"
    assert f"{path.parent}: {fault}" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(run_dir)]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "step_00000004" in one)
    assert line.endswith(f"{fault}  unproven")
    assert main(["checkpoint", "prune", str(run_dir)]) == 0
    assert "it may be among the best: validation.json does not" in capsys.readouterr().out
    assert steps(run_dir) == [8, 4, 2]
    assert main(["checkpoint", "prune", str(run_dir), "--keep_best", "0"]) == 0
    assert steps(run_dir) == [8]


def test_the_last_good_step_follows_starts_checks_and_rollbacks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert good_step(EventLog(path), 0) == (None, True)
    metrics = Metrics(path)
    for event, fields, good in (
        ("run_start", {"step": 0}, 0),
        ("verified", {"step": 30, "passed": True}, 30),
        ("verified", {"step": 60, "passed": False}, 30),
        ("rolled_back", {"step": 70, "to": 40}, 30),
        ("run_start", {"step": 40}, 30),
        ("verified", {"step": 60, "passed": True}, 60),
        ("rolled_back", {"step": 70, "to": 40}, 40),
        ("run_start", {"step": 40}, 40),
        ("run_start", {"step": 70}, 70),
    ):
        metrics.write(event, **fields)
        assert good_step(EventLog(path), 0) == (good, True)
    metrics.close()


@pytest.fixture
def run_dir(tmp_path: Path, tiny_tokenizer: bytes) -> Path:
    """A run with checkpoints of steps 2, 4, 6, 8, of which 4 is the best."""
    out_dir = tiny.new_run(tmp_path / "run", tiny_tokenizer, steps=(2, 4, 6, 8))
    for step, loss in ((2, 3.5), (4, 3.25), (6, 3.75)):
        record_validation(out_dir / "checkpoints" / f"step_{step:08d}", loss)
    values = {name: FLAGS[name].default for name in ALWAYS}
    values |= {"keep_last": 1, "keep_best": 1, "save_interval": 2, "eval_interval": 2}
    text = "".join(f"{name}: {value}  # --{name}\n" for name, value in values.items())
    (out_dir / "config.yaml").write_bytes(with_sum(text))
    return out_dir


def test_the_best_is_a_name_of_a_checkpoint(run_dir: Path, capsys, monkeypatch):
    root = run_dir / "checkpoints"
    four = root / "step_00000004"
    assert with_best(run_dir / "best") == with_best(root / "best") == four
    assert requested_checkpoints(root, str(run_dir / "best")) == [four]
    assert main(["checkpoint", "verify", str(run_dir / "best")]) == 0
    assert f"{four}: ok" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(run_dir), str(run_dir / "best")]) == 1
    monkeypatch.chdir(run_dir)
    assert with_best(Path("best")) == Path("checkpoints/step_00000004")
    # One whose value cannot be read, or is not finite, is not the best.
    (four / VALIDATION).write_text("{")
    assert step_of(with_best(run_dir / "best")) == 2
    record_validation(four, math.nan)
    assert step_of(with_best(run_dir / "best")) == 2
    # Of two kinds of values those of the newest one are compared, and of equal ones the newer.
    for step, score in ((4, -0.25), (6, -0.25), (8, -0.125)):
        record_validation(root / f"step_{step:08d}", score, "cloze")
    assert step_of(with_best(run_dir / "best")) == 6
    # A place of that name comes first, and the name is one of a run only.
    assert with_best(run_dir.parent / "best") == run_dir.parent / "best"
    (run_dir / "best").mkdir()
    assert with_best(run_dir / "best") == run_dir / "best"


def test_a_run_without_a_validation_has_no_best(run_dir: Path):
    for path in published_checkpoints(run_dir / "checkpoints"):
        (path / VALIDATION).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="has a validation"):
        with_best(run_dir / "best")


def steps(out_dir: Path) -> list[int]:
    return [step_of(path) for path in published_checkpoints(out_dir / "checkpoints")]


def test_list_says_why_each_is_kept(run_dir, capsys):
    assert rules_of_run(run_dir) == Rules(1, keep_best=1, interval=2, compared_every=2)
    assert main(["checkpoint", "list", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index("kept")
    assert [line[column:] for line in lines[1:]] == [
        "last, will be deleted at the next save",
        "will be deleted at the next save",
        "best 3.25",
        "will be deleted at the next save",
    ]
    assert main(["checkpoint", "list", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["val_loss"], one["kept"]) for one in found[2:]] == [
        (3.25, "best 3.25"),
        (3.5, "will be deleted at the next save"),
    ]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], [8, 4]),
        (["--keep_last", "2"], [8, 6, 4]),
        (["--keep_best", "0"], [8]),
        (["--keep_last", "1", "--keep_every", "3", "--keep_best", "2"], [8, 6, 4, 2]),
    ],
)
def test_prune_applies_the_rules_of_the_run_unless_others_are_given(words, left, run_dir):
    assert main(["checkpoint", "prune", str(run_dir), *words]) == 0
    assert steps(run_dir) == left


def test_a_damaged_best_one_is_not_counted(run_dir, capsys):
    shard = run_dir / "checkpoints" / "step_00000004" / "shard-0-of-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["checkpoint", "prune", str(run_dir)]) == 0
    reason = r"deleted .*step_00000004 \(.* MiB\), which is damaged: shard-0-of-1\.safetensors is"
    assert re.search(reason, capsys.readouterr().out)
    assert steps(run_dir) == [8, 2]
    with lock_out_dir(run_dir):
        assert main(["checkpoint", "prune", str(run_dir)]) == 8
    assert main(["checkpoint", "verify", str(run_dir)]) == 0
    assert "note" not in capsys.readouterr().out.rpartition("pruned")[2]


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "."])
def test_a_linked_checkpoints_folder_has_the_lock_and_rules_of_its_run(
    place, run_dir, capsys, monkeypatch
):
    root, big = run_dir / "checkpoints", run_dir.parent / "disk" / "big"
    big.parent.mkdir()
    root.rename(big)
    root.symlink_to(big)
    monkeypatch.chdir(run_dir if place == "." else run_dir.parent)
    with lock_out_dir(run_dir):
        assert main(["checkpoint", "prune", place]) == 8
    assert main(["checkpoint", "list", place]) == 0
    assert "best 3.25" in capsys.readouterr().out
    assert main(["checkpoint", "prune", place]) == 0
    assert steps(run_dir) == [8, 4]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_was_not_finite_is_known_and_never_the_best(tmp_path: Path, value: float):
    path = tmp_path / "step_00000010"
    path.mkdir()
    record_validation(path, value)
    assert saved_of(path) == Saved(10, math.inf)
    found = [saved_of(path), *of(20, 30, s20=3.5)]
    assert stay(found, Rules(1, keep_best=2, compared_every=10)) == [30, 20]
