"""SWEEP.yaml: what it says, and what is refused with status 2 and one sentence."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from minimind.cli.main import main
from minimind.config.parse import parse_flags, words_of
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.sweep.sweep_file import points, read_sweep, rehearsed
from tests.docs.commands import all_blocks, files_in
from tests.sweep.made import CONTENT, made_process, sweep_in, write_sweep

RATE = {"low": "1e-4", "high": "1e-1"}


GRID = {"sampler": "grid", "dimensions": {"dim": ["16", "32"], "batch_size": ["2", "4", "8"]}}
HUGE = {
    **{"sampler": "grid", "trials": None},
    "dimensions": {
        "dim": {"low": 1, "high": 41, "step": 1},
        "batch_size": {"low": 1, "high": 271, "step": 1},
    },
}


def refused(capsys: Any, *words: object) -> str:
    assert main(["sweep", *map(str, words)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("minimind: error[E_USAGE]: ")
    return output.err


def dimension(**changes: Any) -> dict[str, Any]:
    return {"dimensions": {**CONTENT["dimensions"], **changes}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            dimension(muon_lr=["0.01", "0.02"]),
            "muon_lr = 0.01 ({}: muon_lr) has no effect with opti",
        ),
        (dimension(decay_steps=["2", "3"]), "decay_steps = 2 ({}: decay_steps) has no effect with"),
        (dimension(lerning_rate=RATE), "key 'lerning_rate' in dimensions of {}; did you mean lea"),
        ({"flags": {"max_stepps": 4}}, "unknown key 'max_stepps' in flags of {}; did you mean max"),
        ({"flags": {"lr": 1}}, "unknown key 'lr' in flags of {}"),
        ({"trails": 4}, "{}: has the unknown field trails; did you mean trials?"),
        (dimension(dim={"low": 8, "high": 16, "stepp": 8}), "field dimensions.dim.stepp; did you"),
        (dimension(dim={"low": 8}), "{}: has no dimensions.dim.high; add it"),
        ({"flags": {"batch_size": 4}}, "batch_size is in flags and in dimensions of {}; remove on"),
        (dimension(batch_size=[]), "dimensions.batch_size = [], which should have at least 1"),
        ({"dimensions": {}}, "{}: has dimensions = {{}}, which should have at least 1"),
        (dimension(learning_rate={"low": 2, "high": 2}), "learning_rate.low = 2.0 (dimens"),
        (dimension(learning_rate={"low": 2, "high": 1}), "is not below high = 1.0; change one"),
        (dimension(learning_rate={"low": -1, "high": 1}), "learning_rate = -1.0 (dim"),
        (dimension(beta2=["0.9", "1.0"]), "beta2 = 1.0 (dimensions of {}) must be below 1.0; cha"),
        (dimension(beta2=["0.9", "0.90"]), "has a value twice; remove one"),
        (dimension(batch_size=["auto", "auto"]), "has a value twice; remove one"),
        (dimension(dim=["auto", "64"]), "dim = 'auto' (dimensions of {}) is not a whole number; g"),
        (
            dimension(learning_rate={"low": "auto", "high": 1}),
            "learning_rate (dimensions of {}) has auto at an end of its range; list its values",
        ),
        (dimension(schedule=["cosine", "cosin"]), "schedule = cosin (dimensions of {}) must be"),
        (dimension(dim={"low": 8.5, "high": 16}), "dim = '8.5' (dimensions of {}) is not a whole"),
        (dimension(dim={"low": 8, "high": 16, "step": 0.5}), "dim.step = 0.5 (dimensions of {})"),
        (dimension(beta1={"low": 0, "high": 0.9, "step": -1}), "beta1.step = -1 (dimensions of"),
        (dimension(schedule={"low": 1, "high": 2}), "schedule (dimensions of {}) is no number; li"),
        (dimension(beta1={"low": 0, "high": 0.9, "log": True}), "beta1 (dimensions of {}) is log"),
        (dimension(dim={"low": 8, "high": 16, "step": 8, "log": True}), "is log with a step; rem"),
        (dimension(out_dir=["a", "b"]), "dimensions.out_dir in {} is set for every trial"),
        ({"flags": {"stop_at_step": 4}}, "flags.stop_at_step in {} is set for every trial"),
        ({"flags": {"eval_rows": 0}}, "eval_rows = 0 ({}: eval_rows) leaves no val_bpb to compare"),
        ({"flags": {"val_fraction": 0}}, "val_fraction = 0 ({}: val_fraction) leaves no val_bpb"),
        ({"flags": {"max_steps": 0}}, "max_steps = 0 ({}: max_steps) must be at least 1; cha"),
        ({"flags": {"n_heads": 7}}, "n_heads = 7 ({}: n_heads)"),
        ({"flags": {"config": "none.yaml"}}, "--config none.yaml: no such recipe or file"),
        ({"trials": 0}, "{}: has trials = '0', which should be greater than or equal to 1; corr"),
        ({"trials": None}, "{}: has no trials, which tpe needs; add trials: N"),
        ({"metric": "loss"}, "has metric = 'loss', which should be 'val_bpb' or 'val_loss'"),
        ({"sampler": "grid"}, "learning_rate (dimensions of {}) is a range without step, and sa"),
        ({**GRID, "trials": 7}, "trials = 7 ({}) is more than the 6 points of the grid; lower it"),
        (dimension(dim={"low": 1, "high": 20000, "step": 1}), "dim.step = 1 (dimensions of {}) ma"),
        (HUGE, "the grid of {} has 11,111 points, more than 10,000; use another sampler"),
        ({"flags": "max_steps"}, "{}: has flags = 'max_steps', which should be"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_remedy(
    capsys: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
):
    path = write_sweep(tmp_path, **changes)
    assert sentence.format(path) in refused(capsys, path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_optimizer_of_a_users_deepspeed_file_contradicts_that_of_the_sweep(
    capsys: Any, tmp_path: Path
):
    own = copy(DEFAULT_DEEPSPEED_CONFIG, tmp_path / "own.json")
    path = write_sweep(tmp_path, flags={"optimizer": "lion", "deepspeed_config": str(own)})
    sentence = f'optimizer.type is "AdamW" but {path}: optimizer says optimizer = lion'
    assert sentence in refused(capsys, path, "--out", tmp_path / "out")


def test_a_file_that_is_not_there_or_no_yaml_is_named(capsys: Any, tmp_path: Path):
    missing, broken = tmp_path / "no.yaml", tmp_path / "broken.yaml"
    broken.write_text("flags: {\n")
    assert f"{missing}: No such file" in refused(capsys, missing, "--out", tmp_path / "out")
    assert f"{broken}:" in refused(capsys, broken, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("resume", "none"), ("resume", "out/mine"), ("dry_run", "True")],
        *[("stop_at_step", "4"), ("max_minutes", "5.0"), ("local_rank", "0")],
    ],
)
def test_a_config_file_has_no_flags_that_the_sweep_sets_itself(
    capsys: Any, tmp_path: Path, name: str, value: str
):
    base = tmp_path / "base.yaml"
    base.write_text(f"{name}: {value}\n")
    path = write_sweep(tmp_path, flags={"config": str(base)})
    error = refused(capsys, path, "--out", tmp_path / "out")
    assert f"{name} = {value} (--config {base}) is no setting of a trial: minimind sw" in error
    assert not (tmp_path / "out").exists()


def test_a_config_file_may_have_an_out_dir_and_what_is_default_anyway(tmp_path: Path):
    base = tmp_path / "base.yaml"
    base.write_text("out_dir: out/mine\nresume: auto\ndry_run: false\n")
    path = write_sweep(tmp_path, flags={**CONTENT["flags"], "config": str(base)})
    sweep = read_sweep(str(path))
    words = words_of({**sweep.flags_of({}), "out_dir": "trial-0000"})
    assert parse_flags(words).out_dir == "trial-0000"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 7}, "seed"),
        ({"trials": 2}, "trials"),
        ({"sampler": "random", "metric": "val_loss"}, "metric, sampler"),
        ({"flags": {**CONTENT["flags"], "max_steps": 50}}, "flags.max_steps"),
        (dimension(weight_decay=["0", "0.1"]), "dimensions.weight_decay"),
        (dimension(batch_size=["2", "4"]), "dimensions.batch_size"),
    ],
)
def test_a_changed_file_is_refused_by_the_names_of_its_changes(
    capsys: Any, tmp_path: Path, changes: dict[str, Any], names: str
):
    out = tmp_path / "out"
    sweep_in(out, made_process(), trials=3)
    capsys.readouterr()
    path = write_sweep(tmp_path, **{"trials": 3, **changes})
    error = refused(capsys, path, "--out", out)
    assert f"{names} in {path} changed since --out {out} was started; only trials may" in error


def test_a_folder_of_something_else_is_refused(capsys: Any, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("")
    error = refused(capsys, write_sweep(tmp_path), "--out", out)
    assert f"--out {out} holds 'thesis.tex' and no sweep.db" in error
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_without_optuna_the_command_says_what_to_install(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minimind.cli.train.find_spec", lambda name: None)
    error = refused(capsys, write_sweep(tmp_path), "--out", tmp_path / "out")
    assert "the package optuna, which is not installed; " in error
    assert "-m pip install -e '.[sweep]'" in error


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("beta1", {"low": 0.1, "high": 0.3, "step": 0.1}, [0.1, 0.2, 0.3]),
        ("beta1", {"low": 0, "high": 0.25, "step": 0.1}, [0.0, 0.1, 0.2]),
        ("dim", {"low": 8, "high": 31, "step": 8}, [8, 16, 24]),
        ("dim", {"low": 8, "high": 31, "log": True}, [8, 31]),
        ("schedule", ["linear", "cosine"], ["linear", "cosine"]),
    ],
)
def test_points_of_a_dimension(tmp_path: Path, name: str, given: Any, expected: list[Any]):
    flags = {"n_heads": 2, "n_kv_heads": 2}
    path = write_sweep(tmp_path, flags=flags, dimensions={name: given})
    sweep = read_sweep(str(path))
    assert points(name, sweep.dimensions[name]) == pytest.approx(expected)


def test_the_words_of_a_trial_are_its_settings(tmp_path: Path):
    flags = {"data_path": ["a b.jsonl", "c.jsonl"], "qk_norm": "true", "use_flash_attn": "false"}
    sweep = read_sweep(str(write_sweep(tmp_path, flags=flags)))
    parameters = {"learning_rate": 0.1 + 0.2, "batch_size": "8"}
    found = parse_flags(words_of({**sweep.flags, **parameters}))
    assert found == rehearsed(sweep, parameters, "sweep.yaml")[0]
    assert found.learning_rate == 0.1 + 0.2


def test_auto_is_a_choice_as_in_a_command(tmp_path: Path):
    dimensions = {"batch_size": ["auto", "8"], "beta2": ["auto", "0.99"]}
    path = write_sweep(tmp_path, dimensions=dimensions, sampler="grid", trials=None)
    sweep = read_sweep(str(path))
    first, *others = sweep.grid()
    assert (first, len(others)) == ({"batch_size": "auto", "beta2": "auto"}, 3)
    run, _ = rehearsed(sweep, first, str(path))
    assert ("batch_size" in run.open_flags, run.sources["beta2"]) == (True, "default")
    assert parse_flags(words_of(sweep.flags_of(first))) == run
    assert rehearsed(sweep, others[-1], str(path))[0].batch_size == 8


def test_the_file_of_the_docs_is_accepted(tmp_path: Path):
    path = tmp_path / "sweep.yaml"
    path.write_text(files_in(all_blocks())[path.name])
    sweep = read_sweep(str(path))
    assert sweep.total == 40
    assert sweep.dimensions["schedule"] == ["cosine", "wsd"]
