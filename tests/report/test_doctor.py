"""`minimind doctor`: silent on healthy runs, one kind of sentence for each kind of sick one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.cli.main import build_parser, main
from minimind.config.run_config import FLAGS
from minimind.report.doctor import diagnose
from minimind.report.history import read_runs
from minimind.report.placement import REFERENCES, band, placement
from minimind.train.floors import NGrams
from tests.conftest import ROOT, SMALL, Trained, sentences
from tests.report.made import NOW, end, evaluation, made_run, run_start, step_line

LONG: dict[str, Any] = {
    **SMALL,
    **{"batch_size": 8, "max_steps": 120, "vocab_size": 600, "val_fraction": 0.05},
    **{"deepspeed_config": "none", "eval_interval": 20},
}
STRONG = str(ROOT / "configs" / "recipes" / "strong.yaml")
long = pytest.mark.long
HEALTHY = [
    pytest.param({}, id="adamw"),
    pytest.param({"dim": 64, "n_layers": 3, "batch_size": 4}, id="wide"),
    pytest.param({"config": STRONG, "learning_rate": 0.008}, id="strong"),
    pytest.param({"use_moe": True, "max_steps": 60}, id="experts"),
    pytest.param({"max_steps": 20, "log_interval": 1, "eval_interval": 10}, id="short"),
    pytest.param({"seed": 7, "learning_rate": "auto", "batch_size": "auto"}, id="auto", marks=long),
    pytest.param({"schedule": "wsd"}, id="wsd", marks=long),
    pytest.param({"schedule": "constant", "ema": 0.98}, id="constant", marks=long),
    pytest.param({"schedule": "linear", "min_lr_ratio": 0.0}, id="linear", marks=long),
    pytest.param({"optimizer": "muon", "muon_lr": 0.01, "seed": 3}, id="muon", marks=long),
    pytest.param({"learning_rate": 1.5e-2, "dim": 48, "log_interval": 10}, id="fast", marks=long),
]
SICK = [
    pytest.param("high_rate", {"learning_rate": 0.5}, id="rate x 100"),
    pytest.param("low_rate", {"learning_rate": 5e-6}, id="rate / 1000"),
    pytest.param("repeats", {"max_steps": 260, "text": "small"}, id="40 epochs"),
    pytest.param("copies", {"max_steps": 10, "text": "copied"}, id="copies"),
    pytest.param("vocabulary", {"max_steps": 10, "text": "small", "vocab_size": 2000}, id="pieces"),
    pytest.param("small_validation", {"max_steps": 10, "text": "small"}, id="validation"),
    pytest.param("clipping", {"grad_clip": 0.01, "max_steps": 60}, id="clipping"),
    pytest.param(
        "evaluate_pauses", {"eval_interval": 1, "max_steps": 20, "batch_size": 1}, id="evaluation"
    ),
    pytest.param(
        "high_rate", {"learning_rate": 5.0, "max_steps": 60}, id="rate x 1000", marks=long
    ),
    pytest.param(
        "high_rate",
        {"optimizer": "muon", "muon_lr": 1.0, "learning_rate": 0.5, "max_steps": 60},
        id="muon x 100",
        marks=long,
    ),
]


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    place = tmp_path_factory.mktemp("doctor")
    documents = sentences(1, 400)
    texts = {"big": documents, "small": documents[:40], "copied": documents[:20] * 20}
    for name, given in texts.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in given))

    def train(text: str = "big", **flags: Any) -> Path:
        out = place / f"run-{len([*place.glob('run-*')])}"
        run: Any = training
        places = {"data_path": str(place / f"{text}.jsonl"), "cache_dir": str(place / "cache")}
        assert run({**LONG, **places, "out_dir": str(out), **flags}) == 0
        return out

    return train


def kinds(out_dir: Path) -> list[str]:
    return [one.kind for one in diagnose(read_runs([out_dir])[0], NOW)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", HEALTHY)
def test_a_healthy_run_is_left_in_peace(trains, flags: dict[str, Any], capsys):
    out = trains(**flags)
    assert diagnose(read_runs([out])[0], NOW) == []
    capsys.readouterr()
    assert main(["doctor", str(out)]) == 0
    assert "nothing stands out" in capsys.readouterr().out


def test_a_resumed_run_is_left_in_peace(trains, trained: Trained, tmp_path: Path):
    run: Any = training
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    flags = {**SMALL, **places, "out_dir": str(tmp_path / "out")}
    assert run({**flags, "stop_at_step": 3}) == 75
    assert kinds(tmp_path / "out") == []
    assert run(flags) == 0
    assert kinds(tmp_path / "out") == []
    assert kinds(trained.run) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "flags"), SICK)
def test_what_ails_a_run_is_named(trains, kind: str, flags: dict[str, Any], capsys):
    out = trains(**flags)
    capsys.readouterr()
    assert main(["doctor", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert kind in [one["kind"] for one in found]


def curve(step: int) -> float:
    return 3.0 + 3.5 * math.exp(-step / 40)


def healthy(steps: int = 200, **start: Any) -> list[dict[str, Any]]:
    """A run whose lines can be made sick."""
    lines = [run_start(total_steps=steps, rows_per_epoch=1000, **start)]
    for n in range(1, steps + 1):
        lines.append(step_line(n, loss=curve(n), lr=1e-3, memory_mib=300.0 + min(n, 20)))
    return [*lines, evaluation(steps, 3.1, tokens=5000), end(steps)]


def changed(lines: list[dict[str, Any]], **makers: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [
        {**line, **{name: make(line["step"]) for name, make in makers.items()}}
        if line["event"] == "step"
        else line
        for line in lines
    ]


def with_event(lines: list[dict[str, Any]], **event: Any) -> list[dict[str, Any]]:
    return [*lines[:-1], {"time": NOW, "step": 200, **event}, lines[-1]]


ORDER = {"rows": 1000, "rows_per_step": 25, "row_tokens": 65, "mixture": None}
MIXED = {**ORDER, "mixture": {"sizes": [10, 990], "weights": [0.5, 0.5]}}
STAGES = [{"name": "a", "steps": [0, 100]}, {"name": "b", "steps": [100, 200]}]
LOOP = {"event": "sample", "number": 0, "prompt": "", "text": "the same again and " * 20}
MADE = {
    "diverged": changed(healthy(), loss=lambda n: None if n > 150 else curve(n)),
    "memory": changed(healthy(), memory_mib=lambda n: 300.0 + 2 * n),
    "data_waits": changed(healthy(), data_ms=lambda n: 60.0),
    "dead_experts": changed(
        healthy(), expert_load=lambda n: [0.0, 1.0], expert_load_range=lambda n: [0.0, 2.0]
    ),
    "precision": changed(healthy(), skipped=lambda n: n // 50),
    "idle_rate": changed(healthy(), lr=lambda n: 1e-3 if n < 100 else 0.0),
    "order": changed(healthy(order=ORDER), loss=lambda n: curve(n) + math.sin(n * math.pi / 20)),
    "source_weight": healthy(order=MIXED),
    "repeating_samples": with_event(healthy(), **LOOP),
    "leak": with_event(healthy(), event="floors", bits={"xz": 2.0}, repeated=0.0, seen=0.6),
    "above_trigram": [
        *healthy(400, order=ORDER)[:-1],
        {"event": "floors", "time": NOW, "step": 400, "bits": {"trigram": 0.7, "unigram": 3.0}},
        end(400),
    ],
    "crashes": [
        line
        for n in range(4)
        for line in (run_start(5 * n), *[step_line(5 * n + k) for k in (1, 2, 3)])
    ],
    "failed": [*healthy()[:-1], end(200, 5, "STORAGE", "the disk is full")],
}


def test_the_lines_that_are_made_sick_are_healthy(tmp_path):
    for number, order in enumerate((None, ORDER)):
        run = made_run(tmp_path / str(number), healthy(order=order))
        assert diagnose(run, NOW) == []


@pytest.mark.parametrize("kind", MADE)
def test_lines_made_sick(tmp_path, kind: str):
    (found,) = diagnose(made_run(tmp_path, MADE[kind]), NOW)
    assert found.kind == kind
    assert ":" in found.text


def test_a_jump_at_a_stage_is_named(tmp_path):
    lines = changed(healthy(stages=STAGES), loss=lambda n: curve(n) + 2 * (n >= 100))
    assert [one.kind for one in diagnose(made_run(tmp_path, lines), NOW)] == ["order"]


def test_an_empty_run_is_left_in_peace(tmp_path):
    assert diagnose(made_run(tmp_path, [""]), NOW) == []


def test_the_probabilities_of_a_trigram_sum_to_one():
    tokens = np.random.default_rng(1).integers(0, 7, 300)
    rows = np.array([[a, b, c] for a, b in ((0, 1), (6, 6), (3, 2)) for c in range(7)])
    model = NGrams(tokens, 7)
    third = [
        model.losses(row[None])["trigram"] - model.losses(row[None, :2])["trigram"] for row in rows
    ]
    assert np.exp(-np.array(third)).reshape(3, 7).sum(axis=1) == pytest.approx(1.0)


def test_a_trigram_of_a_repeated_text_knows_what_follows():
    tokens = np.tile(np.arange(20), 50)
    losses = NGrams(tokens, 20).losses(tokens[:40].reshape(2, 20))
    assert losses["trigram"] < 0.1 * losses["unigram"]
    assert losses["unigram"] == pytest.approx(38 * math.log(20), rel=1e-3)


def test_a_run_is_placed_among_floors(trained: Trained, capsys):
    run = read_runs([trained.run])[0]
    bits = run.events("floors")[-1]["bits"]
    assert {"zlib", "xz", "unigram", "trigram"} <= {*bits}
    assert all(0 < value < 8 for value in bits.values())
    assert placement(run).startswith("val ")
    assert main(["report", str(trained.run)]) == 0
    assert placement(run) in capsys.readouterr().out


def test_a_run_like_a_reference_is_placed_in_its_band(tmp_path):
    (path,) = REFERENCES.glob("*.json")
    known = json.loads(path.read_text())
    reference = known["curves"][0]
    last, size = reference["tokens"][-1], reference["tokens_per_step"]
    low, high = band(reference, last)
    assert (
        low
        < min(s[-1] for s in reference["val_bpb"])
        <= max(s[-1] for s in reference["val_bpb"])
        < high
    )

    def placed(bits: float, name: str, **flags: str) -> str:
        out = tmp_path / name
        steps = last // size
        run = made_run(
            out,
            [
                run_start(total_steps=steps, tokens_per_step=size),
                step_line(steps, tokens=last),
                evaluation(steps, 4.0, val_bpb=bits),
                {"event": "floors", "time": NOW, "step": steps, "bits": known["text"]},
                end(steps),
            ],
        )
        config = {**reference["flags"], **flags}
        (out / "config.yaml").write_text("".join(f"{k}: {v}  # x\n" for k, v in config.items()))
        return placement(run)

    assert f"within the band of {reference['name']}" in placed((low + high) / 2, "a")
    assert "above the band" in placed(1.1 * high, "b")
    assert "band" not in placed(low, "c", dim="384")


def test_every_command_and_flag_of_the_advice_exists():
    source = (ROOT / "minimind" / "report" / "doctor.py").read_text(encoding="utf-8")
    commands = re.findall(r"`minimind ([^`]+)`", source)
    assert len(commands) >= 3
    for command in commands:
        words = command.split()
        if words[-1] == "filter":  # whose text and output are the reader's to choose
            words += ["TEXT.jsonl", "--out", "DIR"]
        build_parser().parse_args(words)
    flags = {*re.findall(r"--([a-z][a-z_0-9]+)", re.sub(r"`[^`]+`", "", source))}
    assert len(flags) > 10
    assert flags <= {*FLAGS}
