"""SWEEP.yaml: what it says, and what is refused with status 2 and one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main
from minimind.config.parse import parse_flags, words_of
from minimind.errors import UsageError
from minimind.sweep import run
from minimind.sweep.run import SWEEP
from minimind.sweep.sweep_file import points, read_sweep, settings_of
from tests.docs.commands import all_blocks, files_in
from tests.sweep.made import CONTENT, write_sweep

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
    tmp_path: Path, changes: dict[str, Any], names: str
):
    def accept(**more: Any) -> None:
        path = str(write_sweep(tmp_path, **{"trials": 3, **more}))
        run.accept(SWEEP, read_sweep(path).model_dump(mode="json"), path, out)

    out = tmp_path / "out"
    out.mkdir()
    accept()
    accept(trials=4)
    with pytest.raises(UsageError) as refusal:
        accept(**{"trials": 4, **changes})
    path = tmp_path / "sweep.yaml"
    sentence = f"{names} in {path} changed since --out_dir {out} was started; only trials may grow"
    assert sentence in str(refusal.value)
    accept(trials=4)


def test_without_optuna_the_command_says_what_to_install(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minimind.runtime.installed.find_spec", lambda name: None)
    error = refused(capsys, write_sweep(tmp_path), "--out_dir", tmp_path / "out")
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
    assert found == settings_of(sweep.flags_of(parameters), "val_bpb", "sweep.yaml")
    assert found.learning_rate == 0.1 + 0.2


def test_auto_is_a_choice_as_in_a_command(tmp_path: Path):
    dimensions = {"batch_size": ["auto", "8"], "beta2": ["auto", "0.99"]}
    path = write_sweep(tmp_path, dimensions=dimensions, sampler="grid", trials=None)
    sweep = read_sweep(str(path))
    first, *others = sweep.grid()
    assert (first, len(others)) == ({"batch_size": "auto", "beta2": "auto"}, 3)
    found, other = (
        settings_of(sweep.flags_of(one), "val_bpb", str(path)) for one in (first, others[-1])
    )
    assert ("batch_size" in found.open_flags, found.sources["beta2"]) == (True, "default")
    assert parse_flags(words_of(sweep.flags_of(first))) == found
    assert other.batch_size == 8


def test_the_file_of_the_docs_is_accepted(tmp_path: Path):
    path = tmp_path / "sweep.yaml"
    path.write_text(files_in(all_blocks())[path.name])
    sweep = read_sweep(str(path))
    assert sweep.total == 40
    assert sweep.dimensions["schedule"] == ["cosine", "wsd"]
