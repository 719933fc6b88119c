"""`minimind compare` names planted faults by kind and place, and nothing in runs that are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.cli.main import main
from minimind.errors import UsageError
from minimind.recovery.compare import Comparison, Side, cause, compare, described, read_side
from tests.recovery.compared import EQUAL, FAULTS, SOUND, TRIALS, take_all
from tools.forking import Nursery
from tools.runs import events

train: Any = training  # a package that is called like a function
STEPS = 5
# Without DeepSpeed and in one process, which this one can do for itself.
HERE = [name for name, (sound, ranks, *_) in FAULTS.items() if ranks == 1]
BASE: dict[str, Any] = {
    **{"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 4, "max_steps": 4, "log_interval": 2, "eval_rows": 0},
    **{"device": "cpu", "dtype": "float32", "save_interval": 2, "save_minutes": 0},
    **{"deepspeed_config": "none", "learning_rate": 2e-3, "compile": "off"},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Side]:
    """A trial that this process trains."""
    folder = tmp_path_factory.mktemp("here")

    @cache
    def trained(name: str) -> Side:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
                patch.setenv(variable, value)
            take_all(folder, STEPS, [name])
        return read_side(str(folder / f"{name}.x1.jsonl"))

    return trained


@pytest.fixture(scope="module")
def launched(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Side]:
    """A trial of so many ranks; all of them are trained by one launch."""
    folder = tmp_path_factory.mktemp("launched")
    of_faults = {(one, n) for name, (sound, n, *_) in FAULTS.items() for one in (sound, name)}
    of_pairs = {pair for a, m, b, n in EQUAL for pair in ((a, m), (b, n))}

    @cache
    def trained(ranks: int) -> None:
        names = sorted(name for name, n in of_faults | of_pairs if n == ranks)
        words, place = [str(folder), "8", *names], folder / f"ranks{ranks}"
        statuses, _, report = nursery.run("tests.recovery.compared", words, place, ranks, 1200)
        assert statuses == [0] * ranks, report[-3000:]

    def side(name: str, ranks: int) -> Side:
        trained(ranks)
        return read_side(str(folder / f"{name}.x{ranks}.jsonl"))

    return side


def require_named(name: str, result: Comparison) -> None:
    """Raise AssertionError if a fault is not named, or at another step or place."""
    _, _, _, step, kind, word = FAULTS[name]
    assert (result.step, result.found[0].kind) == (step, kind), described(result)
    assert word in cause(result)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HERE)
def test_a_planted_fault_is_named_by_kind_and_place(name: str, here: Callable[[str], Side]):
    require_named(name, compare(here(FAULTS[name][0]), here(name)))


@pytest.mark.parametrize(
    ("sound", "name"),
    [("plain", "micro-batches"), ("plain", "attention"), ("experts", "experts-micro-batches")],
)
def test_equal_runs_do_not_part(sound: str, name: str, here: Callable[[str], Side]):
    result = compare(here(sound), here(name))
    assert result.step is None, described(result)
    assert result.recorded == STEPS
    assert result.first is not None  # another order of sums
    assert 0 < max(result.sizes.values()) < 1e-5


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_named(name: str, launched: Callable[[str, int], Side]):
    sound, ranks, *_ = FAULTS[name]
    require_named(name, compare(launched(sound, ranks), launched(name, ranks)))


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize(("a", "m", "b", "n"), EQUAL)
def test_no_equal_runs_part(a: str, m: int, b: str, n: int, launched: Callable[[str, int], Side]):
    result = compare(launched(a, m), launched(b, n))
    assert result.step is None, described(result)
    assert result.recorded == len(result.steps) == 8


def test_the_table_has_every_trial_once():
    assert {*TRIALS} == {*SOUND} | {*FAULTS}
    assert not {*SOUND} & {*FAULTS}
    assert len(FAULTS) > 20
    assert len(EQUAL) > 10


@pytest.fixture(scope="module")
def runs(cached: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def trained(name: str, **changes: Any) -> Path:
        out = folder / name
        assert train({**BASE, **cached, **changes}, out_dir=str(out)) == 0
        return out

    return trained


def test_a_run_with_fingerprints_trains_as_without(runs: Callable[..., Path]):
    steps = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in events(out) if e["event"] == "step"]
        for out in (runs("without"), runs("with", fingerprints=3))
    ]
    assert steps[0] == steps[1]
    found = [e for e in events(runs("with", fingerprints=3)) if e["event"] == "fingerprint"]
    assert [one["step"] for one in found] == [1, 3, 4]  # the first, every third, the last
    assert [*found[0]["numbers"]] == [
        *("activation", "rows", "gradient", "exp_avg", "exp_avg_sq", "fp32")
    ]
    assert found[0]["lines"]["model.layers.1.mlp"].startswith("minimind/model/decoder.py:")


def test_the_command_compares_two_runs(runs: Callable[..., Path], capsys: Any):
    a, b = (str(runs(name, fingerprints=3)) for name in ("with", "again"))
    c = str(runs("decayed", fingerprints=3, weight_decay=0.3))
    assert main(["compare", a, b]) == 0
    assert "equal, to the last digit" in capsys.readouterr().out
    assert main(["compare", a, c]) == 1
    text = capsys.readouterr().out
    assert "lr.weight_decay: 0.1 -> 0.3" in text
    assert "at step 1: weights" in text
    assert len(text.splitlines()) < 24
    assert main(["compare", a, c, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["parts"], found["step"], found["found"][0]["kind"]) == (True, 1, "fp32")


def test_a_run_without_fingerprints_is_compared_by_its_lines(
    runs: Callable[..., Path], capsys: Any
):
    a, b = runs("without"), runs("faster", learning_rate=3e-3)
    assert main(["compare", str(a / "metrics.jsonl"), str(b)]) == 1
    text = capsys.readouterr().out
    assert "at step 2: learning rate" in text
    assert "no fingerprints on both sides" in text


def test_a_run_and_its_checkpoint_agree(runs: Callable[..., Path], capsys: Any):
    out = runs("with", fingerprints=3)
    saved = out / "checkpoints" / "step_00000004"
    assert main(["compare", str(out), str(saved)]) == 0
    assert main(["compare", str(runs("faster", learning_rate=3e-3)), str(saved)]) == 2
    assert "have no number of the same step" in capsys.readouterr().err
    other = runs("recorded", fingerprints=1, learning_rate=3e-3)
    capsys.readouterr()
    assert main(["compare", str(other), str(saved), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["found"][0]["kind"] == "exp_avg"


def test_steps_that_were_taken_again_count_once(tmp_path: Path):
    lines = [
        {"event": "run_start", "step": 0, "dtype": "float32"},
        *({"event": "step", "step": n, "loss": 1.0, "lr": 0.1} for n in (1, 2, 3)),
        {"event": "rolled_back", "step": 3, "to": 1},
        {"event": "run_start", "step": 1, "dtype": "float32"},
        {"event": "step", "step": 2, "loss": 5.0, "lr": 0.1},
        {"event": "step", "step": 2, "loss": "five"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    side = read_side(str(path))
    assert {step: one["loss"] for step, one in side.steps.items()} == {1: 1.0, 2: 5.0}
    assert side.unread == 1


def test_a_difference_may_grow_as_rounding_does():
    def side(losses: list[float]) -> Side:
        steps = {n + 1: {"loss": loss} for n, loss in enumerate(losses)}
        return Side("one", dtype="float32", steps=steps)

    even = side([1.0] * 5)
    assert compare(even, side([1.0, 1 + 1e-6, 1 + 8e-6, 1 + 5e-5, 1 + 3e-4])).step is None
    assert compare(even, side([1.0, 1.0, 1 + 1e-6, 1 + 8e-5, 1.0])).step == 4
    assert compare(even, side([1.0, float("nan"), 1.0, 1.0, 1.0])).step == 2
    with pytest.raises(UsageError):
        compare(even, Side("another"))
    assert torch.finfo(torch.float32).eps == 2**-23


def test_adam_may_move_a_weight_whose_gradient_is_rounding():
    def side(weight: float, rate: float) -> Side:
        numbers = {"fp32": {"model.norm": [1.0, weight, 0.0]}}
        return Side("one", dtype="float32", steps={1: {"lr": rate, "numbers": numbers}})

    assert compare(side(0.5, 6e-3), side(0.5 + 5e-6, 6e-3)).step is None
    assert compare(side(0.5, 6e-3), side(0.5 + 2e-4, 6e-3)).step == 1
    assert compare(side(0.5, 6e-6), side(0.5 + 5e-6, 6e-6)).step == 1


def test_a_bias_that_rounding_has_moved_shows_in_the_activations_after_it():
    """256 tokens of a GPT-2: a bias has moved by 6e-8, which is 256 times as much in a sum."""

    def side(total: float, step: int, loss: float = 7.0) -> Side:
        first = {1: {"lr": 2e-3, "loss": loss}} if step == 2 else {}
        numbers = {"activation": {"transformer.h.0.mlp": [0.7057878, total, 0.0360196]}}
        return Side("one", dtype="float32", steps={**first, step: {"lr": 2e-3, "numbers": numbers}})

    moved = 5.4853080, 5.4852933
    assert compare(side(moved[0], 2), side(moved[1], 2, 7.000001)).step is None
    assert compare(*(side(total, 2) for total in moved)).step == 2  # nothing has differed before
    assert compare(*(side(total, 1) for total in moved)).step == 1
    assert compare(side(5.4853, 2), side(5.4863, 2, 7.000001)).step == 2


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_rounding_of_the_norm_is_no_fault_of_gradients_and_moments(clip: float):
    """torch rounds the norm of a CPU by ten eps, and a clipped gradient is divided by it."""

    def side(norm: float) -> Side:
        by = clip / norm if clip else 1.0
        numbers = {
            "gradient": {"model.norm": [1.4 * by, 0.1 * by, 3.5 * by]},
            "exp_avg": {"model.norm": [0.14 * by, 0.01 * by, 0.35 * by]},
        }
        fields = {"grad_norm": norm, "lr": 1e-3, "numbers": numbers}
        return Side("one", {"lr": {"grad_clip": clip}}, dtype="float32", steps={1: fields})

    assert compare(side(1.4), side(1.4 * (1 + 1.2e-6))).step is None
    parted = compare(side(1.4), side(1.4 * (1 + 3e-6)))
    assert (parted.step, parted.found[0].kind) == (1, "grad_norm")
