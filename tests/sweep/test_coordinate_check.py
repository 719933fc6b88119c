"""The coordinate check: flat with muP, steep without it or with any part of it missing."""

from __future__ import annotations

import pytest

from minimind.cli.main import main
from minimind.engine import optimizers
from minimind.engine.optimizers import ADAMW, HIDDEN, INIT, MUON, OUTPUT, ROUTER
from minimind.errors import UsageError
from minimind.sweep.coordinate_check import TOLERANCE, Coordinates, _run_of, measure, runs_of_widths

WIDTHS = (64, 128, 256)
MATCHED = "--optimizer muon --muon_scaling match_rms_adamw --muon_lr 0.01"


def coordinates(line: str, is_mup: bool = True) -> Coordinates:
    return measure(runs_of_widths(_run_of(line.split()), WIDTHS, is_mup), steps=5, seeds=1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "--no-tie_word_embeddings --qk_norm",
        "--use_moe --n_layers 1",
        "--optimizer muon --n_layers 1",
        f"{MATCHED} --n_layers 1",
    ],
)
def test_changes_are_equal_at_every_width_with_mup_only(line: str):
    """Slopes measured: at most 0.2 with muP; of the residual stream without it 0.5 to 1.3."""
    found = coordinates(line)
    assert found.is_flat, found.table()
    without = coordinates(line, is_mup=False)
    assert not without.is_flat
    assert without.slope("residual stream") > 0.4
    assert without.slope("logits") > 0.4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line", "powers", "role", "kind"),
    [
        ("", ADAMW, HIDDEN, "residual stream"),
        ("", INIT, OUTPUT, "logits"),
        ("--use_moe", ADAMW, ROUTER, "router"),
        ("--use_moe --optimizer muon --muon_lr 0.1", MUON["original"], ROUTER, "router"),
        (MATCHED, MUON["match_rms_adamw"], HIDDEN, "feed-forward"),
    ],
)
def test_a_missing_part_is_found(
    monkeypatch: pytest.MonkeyPatch, line: str, powers: dict[str, float], role: str, kind: str
):
    """The rate of the final norm is not among them: in 5 steps it hardly moves."""
    assert coordinates(f"{line} --n_layers 1").slope(kind) <= TOLERANCE
    monkeypatch.setitem(powers, role, 0.0)
    found = coordinates(f"{line} --n_layers 1")
    assert found.slope(kind) > TOLERANCE, found.table()
    assert not found.is_flat


def test_head_dim_stays_and_the_heads_grow():
    runs = runs_of_widths(_run_of(["--hidden_dim", "96"]), WIDTHS, is_mup=True)
    assert [run.dim // run.n_heads for run in runs] == [16, 16, 16]
    assert [run.n_kv_heads for run in runs] == [2, 4, 8]
    assert [run.hidden_dim for run in runs] == [96, 192, 384]
    assert [run.width_ratio for run in runs] == [1, 2, 4]
    with pytest.raises(UsageError, match=r"--widths 100: n_heads = 4 .*name multiples of 64"):
        runs_of_widths(_run_of([]), (64, 100), is_mup=True)


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]):
    assert main(["coord_check", "--widths", "64", "128", "--seeds", "1", "--n_layers", "1"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("  logits")]
    assert [len(row) for row in rows] == [4, 4]
    assert abs(float(rows[0][-1])) <= TOLERANCE < float(rows[1][-1])


def test_the_status_is_1_where_a_rate_is_not_scaled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizers, "ADAMW", {**ADAMW, HIDDEN: 0.0})
    assert main(["coord_check", "--widths", "64", "256", "--seeds", "1", "--n_layers", "1"]) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--widths 64", "a slope needs two widths or more"),
        ("--dim 60 --n_heads 4 --n_kv_heads 3", "n_heads = 4"),
        ("--model hf:.", "transformers"),
        ("--optimizer sgd", "optimizer = sgd (--optimizer) does not; take another"),
        ("--muon_lr 0.1", "muon_lr = 0.1 (--muon_lr) has no effect with optimizer = adamw"),
        ("--dtype bfloat16", "dtype = bfloat16 (--dtype) is float32 in a coordinate check"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["coord_check", *line.split()]) == 2
    assert said in capsys.readouterr().err
