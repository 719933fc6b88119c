"""`minimind doctor`: silent on healthy runs, one kind of sentence for each kind of sick one."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.cli.main import build_parser, main
from minimind.config.flags import FLAGS
from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.batches import Batches, held_out_rows
from minimind.engine.engine import Engine
from minimind.report import findings as doctor
from minimind.report.findings import diagnose
from minimind.report.history import read_runs
from minimind.report.placement import REFERENCES, band, placement
from minimind.train.evaluate import HeldOutRows
from minimind.train.floors import NGrams, floors, training_tokens
from tests.conftest import ROOT, SMALL, Trained, sentences
from tests.report.made import (
    NOW,
    end,
    evaluation,
    made_run,
    recorded_run,
    run_start,
    step_line,
    write_run,
)
from tools.runs import events

SMALLER: dict[str, Any] = {
    **SMALL,
    **{"dim": 16, "n_layers": 1, "batch_size": 8, "vocab_size": 600, "val_fraction": 0.05},
    **{"deepspeed_config": "none", "max_steps": 50, "log_interval": 1, "eval_interval": 20},
    **{"eval_rows": 8, "dtype": "float32"},
}
OF_TEXT = ("vocab_size", "val_fraction")  # of a prepared folder
# Where a case has to train for a while.
LONGER: dict[str, Any] = {
    **{"dim": 32, "n_layers": 2, "max_steps": 120, "log_interval": 2, "eval_rows": 64}
}
STRONG = str(ROOT / "configs" / "recipes" / "strong.yaml")
UNBALANCED: dict[str, Any] = {
    **{"use_moe": True, "aux_loss_alpha": 0.0, "n_routed_experts": 8, "num_experts_per_tok": 1},
    **{"n_shared_experts": 0, "learning_rate": 2e-2, "max_steps": 100},
}
long = pytest.mark.long
HEALTHY = [
    pytest.param({}, id="adamw"),
    pytest.param({"use_moe": True}, id="experts"),
    pytest.param({"max_steps": 3, "val_fraction": 0.0}, id="unvalidated"),
    pytest.param({"max_steps": 6, "eval_rows": "auto"}, id="six steps"),
    pytest.param({"config": STRONG, "learning_rate": 0.008}, id="strong"),
    *(
        pytest.param({**LONGER, **flags}, id=name, marks=long)
        for name, flags in {
            "longer": {},
            "wide": {"dim": 64, "n_layers": 3, "batch_size": 4},
            "experts, longer": {"use_moe": True},
            "auto": {"seed": 7, "learning_rate": "auto", "batch_size": "auto"},
            "wsd": {"schedule": "wsd"},
            "constant": {"schedule": "constant", "ema": 0.98},
            "linear": {"schedule": "linear", "min_lr_ratio": 0.0},
            "muon": {"optimizer": "muon", "muon_lr": 0.01, "seed": 3},
            "fast": {"learning_rate": 1.5e-2, "dim": 48, "log_interval": 10},
            "sorted": {"text": "sorted"},
        }.items()
    ),
]
SICK = [
    pytest.param({"diverged"}, {"optimizer": "sgd", "learning_rate": 10.0}, id="sgd"),
    pytest.param({"high_rate"}, {"learning_rate": 1.0}, id="rate x 200"),
    pytest.param({"low_rate"}, {"learning_rate": 2e-5}, id="rate / 250"),
    pytest.param({"nothing_learnt"}, {"learning_rate": 1e-9, "max_steps": 30}, id="no rate"),
    pytest.param(
        {"vocabulary", "small_validation"}, {"max_steps": 3, "text": "small"}, id="little text"
    ),
    pytest.param({"copies"}, {"max_steps": 3, "text": "copied"}, id="copies"),
    pytest.param({"leak"}, {"max_steps": 3, "text": "half", "val_fraction": 0.0}, id="leak"),
    pytest.param({"clipping"}, {"grad_clip": 0.01}, id="clipping"),
    pytest.param(
        {"evaluate_pauses"}, {"eval_interval": 1, "max_steps": 10, "batch_size": 1}, id="evaluation"
    ),
    pytest.param(
        {"score_pauses"},
        {"eval_tasks": "arithmetic", "eval_tasks_interval": 1, "max_steps": 6, "batch_size": 1},
        id="scores",
    ),
    pytest.param({"dead_experts"}, UNBALANCED, id="experts"),
    *(
        pytest.param(found, {**LONGER, **flags}, id=name, marks=long)
        for name, found, flags in (
            ("rate x 100", {"high_rate"}, {"learning_rate": 0.5}),
            ("rate x 1000", {"high_rate"}, {"learning_rate": 5.0, "max_steps": 60}),
            ("rate / 1000", {"low_rate"}, {"learning_rate": 5e-6}),
            (
                "muon x 50",
                {"high_rate"},
                {"optimizer": "muon", "muon_lr": 1.0, "learning_rate": 0.5, "max_steps": 60},
            ),
            (
                "40 epochs",
                {"repeats", "vocabulary", "small_validation"},
                {"max_steps": 260, "text": "small"},
            ),
            (
                "inverse_sqrt",
                {"idle_rate"},
                {
                    **{"schedule": "inverse_sqrt", "min_lr_ratio": 0.0, "warmup_steps": 0},
                    **{"max_steps": 640, "log_interval": 5, "eval_interval": 320},
                },
            ),
            (
                "a loop",
                {"copies", "leak", "small_validation", "repeating_samples"},
                {"text": "loop", "sample_interval": 60},
            ),
            ("unigram", {"above_unigram"}, {"max_steps": 320, "learning_rate": 1e-4}),
            (
                "trigram",
                {"above_trigram"},
                {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_steps": 320},
            ),
        )
    ),
]


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    place = tmp_path_factory.mktemp("doctor")
    documents = sentences(1, 400)
    texts = {"big": documents, "small": documents[:40], "copied": documents[:20] * 20}
    texts |= {"half": documents[:200], "sorted": sorted(documents)}
    words = "the same words come again and again " * 30
    texts["loop"] = [f"{n} {words}" for n in range(40)]
    (place / "prompts.txt").write_text("the\n")
    # Other documents than those of `half`, with the same words.
    texts["held_out"] = [f"{one}{other}" for one, other in pairwise(documents[:40])]
    for name, given in texts.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in given))

    def train(text: str = "big", **flags: Any) -> Path:
        out = place / f"run-{len([*place.glob('run-*')])}"
        run: Any = training
        places = {"data_path": str(place / f"{text}.jsonl"), "cache_dir": str(place / "cache")}
        if "sample_interval" in flags:  # a document has ended after an empty prompt
            places["sample_prompts"] = str(place / "prompts.txt")
        if text == "half":
            places["val_path"] = str(place / "held_out.jsonl")
        assert run({**SMALLER, **places, "out_dir": str(out), **flags}) == 0
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
    assert placement(read_runs([tmp_path / "out"])[0]).startswith("validation ")
    assert run(flags) == 0
    assert kinds(tmp_path / "out") == []
    assert kinds(trained.run) == []
    assert len(events(tmp_path / "out", "floors")) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(("found", "flags"), SICK)
def test_what_ails_a_run_is_named(trains, found: set[str], flags: dict[str, Any], capsys):
    out = trains(**flags)
    capsys.readouterr()
    assert main(["doctor", str(out), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {one["kind"] for one in findings} == found
    advised = [
        pair for one in findings for pair in re.findall(r"--(\w+) (\d[\d.e-]*)", one["text"])
    ]
    for name, value in advised:
        assert not FLAGS[name].unmet(float(value.rstrip(".")))


@pytest.mark.long
def test_memory_that_a_run_keeps_is_named(trained: Trained, tmp_path: Path):
    """In a process of its own, whose peak is not that of other runs."""
    code = """if True:
        import json, sys
        import numpy as np
        import minimind.train as train
        from minimind.train import loop

        kept, log_step = [], loop.log_step

        def leaking(*given):
            kept.append(np.ones(2**20))  # 8 MiB
            log_step(*given)

        loop.log_step = leaking
        train(json.loads(sys.argv[1]))
    """
    flags = {name: value for name, value in SMALLER.items() if name not in OF_TEXT}
    flags |= {"data_path": str(trained.mixed), "out_dir": str(tmp_path / "out"), "max_steps": 60}
    subprocess.run([sys.executable, "-c", code, json.dumps(flags)], check=True, cwd=ROOT)
    assert kinds(tmp_path / "out") == ["memory"]


def test_rows_that_a_run_waits_for_are_named(trains, monkeypatch: pytest.MonkeyPatch):
    batches = Batches.at

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        return batches(*given)

    monkeypatch.setattr(Batches, "at", slow)
    assert kinds(trains(max_steps=6)) == ["data_waits"]


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_named(trains, monkeypatch: pytest.MonkeyPatch):
    step_of, taken = Engine.step, []

    def step(self: Engine, *given: Any) -> Any:
        taken.append(1)
        if len(taken) != 20:
            return step_of(self, *given)
        weight = next(self.model.parameters())
        hook = weight.register_hook(lambda gradient: gradient * math.inf)
        found = step_of(self, *given)
        hook.remove()
        return found

    monkeypatch.setattr(Engine, "step", step)
    out = trains()
    (found,) = diagnose(read_runs([out])[0], NOW)
    assert found.kind == "precision"
    assert found.text.startswith("1 step of 50 skipped, as gradients were not finite in float32")


def test_text_of_another_kind_in_the_next_stage_is_named(trained: Trained, tmp_path: Path):
    sources = {name: str(tmp_path / name) for name in ("letters", "digits")}
    fixed = ["--tokenizer", str(trained.mixed / "tokenizer"), "--val_fraction", "0.1"]
    for name, place in sources.items():
        table = str.maketrans("abcdefgh", "01234567") if name == "digits" else {}
        lines = (json.dumps({"text": one.translate(table)}) + "\n" for one in sentences(1, 60))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        assert main(["prepare", f"{place}.jsonl", *fixed, "--out", place]) == 0
    run: Any = training
    flags = {name: value for name, value in SMALLER.items() if name not in OF_TEXT}
    flags |= {"learning_rate": 2e-2, "cache_dir": str(trained.cache)}
    for rest, found in ((0, ["order"]), (1, [])):
        weights = [{"letters": 3, "digits": rest}, {"letters": rest, "digits": 3}]
        stages = [{"weights": weights[0], "until": "50%"}, {"weights": weights[1]}]
        path, out = tmp_path / f"stages-{rest}.yaml", tmp_path / f"run-{rest}"
        path.write_text(json.dumps({"sources": sources, "stages": stages}))
        assert run({**flags, "stages": str(path), "out_dir": str(out)}) == 0
        assert kinds(out) == found


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
    "source_weight": healthy(order=MIXED),
    "repeating_samples": with_event(healthy(), **LOOP),
    "small_validation": [
        *healthy()[:-2],
        *(evaluation(n, 3.1, tokens=64, rows=1, held_out=9) for n in range(20, 201, 20)),
        end(200),
    ],
    "leak": with_event(healthy(), event="floors", bits={"xz": 2.0}, repeated=0.0, seen=0.6),
    "above_trigram": [
        *changed(healthy(400, order=ORDER)[:-1], tokens=lambda n: 25 * 64 * n),
        {"event": "floors", "time": NOW, "step": 400, "bits": {"trigram": 0.7, "unigram": 3.0}},
        end(400),
    ],
    "crashes": [
        line
        for n in range(3)
        for line in (run_start(5 * n), *[step_line(5 * n + k) for k in (1, 2, 3)])
    ],
    "failed": [*healthy()[:-1], end(200, 5, "STORAGE", "the disk is full")],
    "silent": healthy()[:-1],
}


RECORDED = {
    one["name"]: one
    for one in map(
        json.loads, (Path(__file__).parent / "recorded_runs.jsonl").read_text("utf-8").splitlines()
    )
}
HEALTHY_ONES = [name for name, one in RECORDED.items() if not one["sick"]]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_are_judged_rightly(tmp_path, name: str):
    """What ails a sick one is named alone, with more than a chance; of a healthy one nothing."""
    run = read_runs([recorded_run(tmp_path, RECORDED[name])])[0]
    found = diagnose(run, run.starts[-1].last_time)
    sick = RECORDED[name]["sick"]
    assert [(one.kind, one.counts) for one in found] == ([(sick, True)] if sick else [])


@pytest.mark.parametrize("name", HEALTHY_ONES)
def test_a_healthy_run_is_left_in_peace_while_it_goes_on(tmp_path, name: str):
    whole = (recorded_run(tmp_path / "whole", RECORDED[name]) / "metrics.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    for share in (0.1, 0.3, 0.5, 0.8):
        place = tmp_path / str(share)
        recorded_run(place, RECORDED[name])
        write_run(place, lines[: int(share * len(lines))])
        run = read_runs([place])[0]
        assert diagnose(run, run.starts[-1].last_time) == []


def test_there_are_healthy_runs_of_every_size():
    assert len(HEALTHY_ONES) >= 20
    assert {RECORDED[name]["flags"]["batch_size"] for name in HEALTHY_ONES} >= {"4", "64"}


def test_waiting_for_the_first_rows_alone_is_healthy(tmp_path):
    lines = changed(healthy(20), data_ms=lambda n: 9000.0 if n == 1 else 1.0)
    assert diagnose(made_run(tmp_path, lines), NOW) == []


def test_the_lines_that_are_made_sick_are_healthy(tmp_path):
    for number, order in enumerate((None, ORDER)):
        run = made_run(tmp_path / str(number), healthy(order=order))
        assert diagnose(run, NOW) == []


def test_a_curve_of_many_lines_is_smoothed_at_few_places(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    median = doctor._median
    monkeypatch.setattr(doctor, "_median", lambda values: taken.append(1) or median(values))
    for lines in (0, 1, 50, 3999, 100_000):
        values = np.arange(lines, dtype=float)
        smooth = doctor._medians(values)
        assert len(smooth) == lines
        assert not lines or abs(smooth - values).max() <= max(1, lines / 80)
    assert len(taken) < 10_000


@pytest.mark.parametrize(("rows", "found"), [(3, []), (64, ["other_text", "leak"])])
def test_a_few_rows_of_a_mixed_text_are_no_other_text(tmp_path, rows: int, found: list[str]):
    lines = healthy(order=ORDER)
    last = evaluation(40, curve(40) + 2, tokens=1000, rows=rows, val_loss_se=0.05)
    of_text = {"event": "floors", "time": NOW, "step": 0, "rows": rows, "seen": 0.5, "bits": {}}
    run = made_run(tmp_path, [*lines[:-2], of_text, last, lines[-1]])
    assert [one.kind for one in diagnose(run, NOW)] == found


@pytest.mark.parametrize("kind", MADE)
def test_lines_made_sick(tmp_path, kind: str):
    (found,) = diagnose(made_run(tmp_path, MADE[kind]), NOW)
    assert found.kind == kind
    assert found.counts == (kind != "small_validation")  # as far as the time allows
    assert ":" in found.text


def test_passes_are_those_of_the_rows_that_were_read_when_the_batch_changes(tmp_path):
    order, rows = {**ORDER, "rows_per_step": 32}, 50 * 2 + 10 * 32
    lines = [run_start(order=order, rows_per_epoch=224), step_line(50, tokens=50 * 2 * 64)]
    lines += [run_start(50, order=order), step_line(60, tokens=rows * 64)]
    assert doctor.Case(made_run(tmp_path, lines), NOW).epochs == pytest.approx(rows / 224)


def test_a_run_with_one_line_may_not_have_come_to_the_next(tmp_path):
    for lines, sure in ((1, doctor.LIKELY), (2, doctor.CERTAIN)):
        run = made_run(tmp_path / str(lines), healthy()[: 1 + lines])
        (found,) = (one for one in diagnose(run, NOW + 1000) if one.kind == "silent")
        assert (found.sure, "second line yet" in found.text) == (sure, lines == 1)


def test_how_a_run_ended_is_a_sentence(tmp_path):
    saved = {"event": "checkpoint_saved", "time": NOW, "step": 150}
    whole = with_event(healthy(), event="checkpoint_saved")
    found = []
    for number, lines in enumerate(
        (
            [*healthy()[:-1], saved, end(200, 5, "E_STORAGE", "/mnt: no space; free some space")],
            [run_start(total_steps=200), end(0, 70, "E_INTERNAL", "KeyError: 'x'")],
            healthy()[:101],
            [*whole, {**end(200, 4, "E_CHECKPOINT", "of another run"), "started": False}],
            [*MADE["crashes"], step_line(20)],
            [*MADE["crashes"], {**saved, "step": 1}, run_start(1), step_line(2), end(15)],
        )
    ):
        run = made_run(tmp_path / str(number), lines)
        found += [one.text for one in diagnose(run, run.starts[-1].last_time + 7500)]
    assert found == [
        "the run ended at step 200 of 200 with exit status 5 (E_STORAGE): /mnt: no space; free"
        " some space; once that is fixed, the same command continues from step 150",
        "the run ended at step 0 of 200 with exit status 70 (E_INTERNAL): KeyError: 'x'; once"
        " that is fixed, the same command starts from the beginning, as nothing was saved",
        "the last line is 2 h 5 min old, at step 100 of 200, and no end is recorded: the run"
        " hangs, or was killed, perhaps for lack of memory; look at the end of its log; the same"
        " command starts from the beginning, as nothing was saved",
        "the last start ended at step 200 of 200 with exit status 4 (E_CHECKPOINT): of another run;"
        " all 200 steps are trained and saved",
        "3 of 3 starts ended in an error or without a recorded end: the cause is still there; fix"
        " what the first error of the log names",
        "3 of 4 starts ended in an error or without a recorded end, and 8 steps had to be"
        " computed again: the cause is still there; fix what the first error of the log names,"
        " and save more often (--save_interval below ?)",
    ]


@pytest.mark.parametrize(
    ("rise", "validation", "expected"),
    [
        (0.0, (4.65, 4.03, 3.77, 3.66), []),
        (2.5, (4.65, 4.03, 3.77, 5.4), [("diverged", "certain")]),
        (2.5, (4.65, 4.03, 3.77, 3.66), []),  # what is read at the end is harder
        (2.5, (), [("diverged", "likely")]),
        (1.5, (), [("diverged", "possible")]),
        (0.5, (), []),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_rise_counts_beyond_noise_and_with_the_validation(
    tmp_path, capsys, seed: int, rise: float, validation: tuple[float, ...], expected: list[Any]
):
    """Lines of steps of few rows, which vary by half a nat."""
    noise = np.random.default_rng(seed).normal(0, 0.5, 201)
    whole = [line for line in healthy() if line["event"] != "eval"]
    lines = changed(whole, loss=lambda n: curve(n) + noise[n] + rise * (n > 160))
    found = [evaluation(50 * n, loss, tokens=4096) for n, loss in enumerate(validation, 1)]
    run = made_run(tmp_path, [*lines[:-1], *found, lines[-1]])
    assert [(one.kind, one.sure) for one in diagnose(run, NOW)] == expected
    assert main(["doctor", str(tmp_path)]) == any(sure != "possible" for _, sure in expected)
    said = f"diverged ({expected[0][1]}): " if expected else "nothing stands out"
    assert said in capsys.readouterr().out


def test_a_run_that_went_back_until_it_stopped_is_told_so(tmp_path):
    """Its numbers are finite, and it has the guard already."""
    lines = healthy()[:80]
    reason = "loss or gradient norm are high for 8 steps, 72 to 79, after 2 rollbacks; the last"
    back = [
        {"event": "rolled_back", "time": NOW, "step": 79, "to": 60},
        run_start(60),
        *(step_line(n, loss=curve(n)) for n in range(61, 80)),
    ]
    (tmp_path / "config.yaml").write_text(
        "spike_guard: true  # --spike_guard\ngrad_clip: 1.0  # default\n"
    )
    stop = {**end(79, 6, "E_NONFINITE", reason), "time": NOW}
    (found,) = diagnose(made_run(tmp_path, [*lines, *back, *back, stop]), NOW)
    assert (found.kind, found.sure) == ("spikes", "certain")
    assert "with 2 rollbacks" in found.seen
    assert "--spike_guard" not in found.text
    assert "not finite" not in found.text
    skipped = {"event": "step_skipped", "time": NOW, "step": 70}
    (other,) = diagnose(made_run(tmp_path / "b", [*lines, skipped, stop]), NOW)
    assert other.kind == "diverged"
    assert "numbers that are not finite" in other.seen


def test_a_run_that_went_back_and_went_on_is_left_in_peace(tmp_path):
    back = [{"event": "rolled_back", "time": NOW, "step": 79, "to": 60}, run_start(60)]
    risen = [step_line(n, loss=curve(n) + 2.0) for n in range(71, 80)]
    lines = healthy()
    run = made_run(tmp_path, [*lines[:71], *risen, *back, *lines[61:]])
    assert [kind for kind, _ in run.outcomes(NOW)] == ["rolled back", "done"]
    assert diagnose(run, NOW) == []


def test_a_rise_without_a_warmup_is_named(tmp_path):
    def loss(n: int) -> float:
        return curve(n) + max(0.0, 2 - abs(n - 15) / 3)

    (tmp_path / "config.yaml").write_text("warmup_steps: 0  # default\n")
    (found,) = diagnose(made_run(tmp_path, changed(healthy(), loss=loss)), NOW)
    assert found.kind == "warmup"
    assert "--warmup_steps 10 in place of 0" in found.text


def test_nats_do_not_measure_a_loss_of_ones_own(tmp_path):
    def loss(n: int) -> float:
        return 300 - n / 10 + max(0.0, 8 - abs(n - 15))

    found = []
    for name, model in ("full", {}), ("own", {"loss": "mine:f (1a2b)"}):
        lines = healthy(identity={"model": model}) if model else healthy()
        run = made_run(tmp_path / name, changed(lines, loss=loss))
        found.append([one.kind for one in diagnose(run, NOW)])
    assert found == [["high_rate"], []]


def test_a_jump_at_a_stage_is_named(tmp_path):
    """Also one that is made good within a few lines."""
    lines = changed(healthy(stages=STAGES), loss=lambda n: curve(n) + 3 * (100 <= n < 104))
    assert [one.kind for one in diagnose(made_run(tmp_path, lines), NOW)] == ["order"]


@pytest.mark.parametrize("steps", [3, 30, 90])
def test_what_comes_right_later_is_no_finding_in_a_run_that_goes_on(tmp_path, steps: int):
    """A loss that hardly moves in the warm-up, experts that are not balanced yet."""
    lines = changed(
        healthy(400, parameters=1000),
        loss=lambda n: 6.5 - n / 1000,
        expert_load=lambda n: [0.0, 1.0],
        expert_load_range=lambda n: [0.0, 2.0],
    )
    (tmp_path / "config.yaml").write_text(
        "vocab_size: 665  # default\nwarmup_steps: 10  # default\n"
    )
    run = made_run(tmp_path, lines[: 1 + steps])
    assert diagnose(run, run.starts[-1].last_time) == []
    run = made_run(tmp_path / "whole", lines)
    assert [one.kind for one in diagnose(run, NOW)] == ["dead_experts"]


def test_the_rate_of_a_long_warmup_is_not_idle(tmp_path):
    (tmp_path / "config.yaml").write_text("learning_rate: 0.001  # default\n")
    lines = changed(healthy(2000), lr=lambda n: n * 1e-6)[:41]
    run = made_run(tmp_path, lines)
    assert diagnose(run, run.starts[-1].last_time) == []


def test_an_empty_run_is_left_in_peace(tmp_path):
    assert diagnose(made_run(tmp_path, [""]), NOW) == []


def test_a_terminal_gets_lines_broken_between_words(tmp_path, capsys, monkeypatch):
    made_run(tmp_path, MADE["memory"])
    assert main(["doctor", str(tmp_path)]) == 1
    _, whole = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor", str(tmp_path)]) == 1
    _, first, *others = capsys.readouterr().out.splitlines()
    assert max(map(len, [first, *others])) <= 60
    assert all(line.startswith("    ") for line in others)
    assert " ".join(map(str.strip, [first, *others])) == whole.strip()


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


@pytest.mark.parametrize("limit", ["MOST_HELD_OUT", "MOST_TRAINED"])
def test_floors_read_so_much_text(trained: Trained, monkeypatch, limit: str):
    """Floors read the first rows of every source, so a large corpus takes no longer."""
    prepared = open_prepared(trained.mixed)
    shards, row_tokens = prepared.val, 17
    rows = held_out_rows(shards, 10**6, row_tokens)
    sizes = prepared.bytes_per_id("val")
    held_out = HeldOutRows(shards, rows, row_tokens, sizes, ("a", "b"))
    few = np.concatenate([indices[:3] for indices in held_out.by_source().values()])
    assert len(few) == 6 < len(rows)
    whole = floors(prepared, held_out)
    monkeypatch.setattr(f"minimind.train.floors.{limit}", 3 * row_tokens * 2 + 1)
    found = floors(prepared, held_out)
    if limit == "MOST_HELD_OUT":
        assert found == floors(prepared, replace(held_out, rows=few))
    else:
        assert found["trained"] == 3 * row_tokens * 2
    assert found["bits"] != whole["bits"]


def test_floors_follow_from_all_of_a_long_text(trained: Trained, monkeypatch):
    """Each third of a source is read alike; its first tokens may be of another kind."""

    class Sorted:
        def source_ends(self) -> np.ndarray:
            return np.array([400_000, 2_000_000])

        def stretch(self, begin: int, length: int) -> np.ndarray:
            return np.arange(begin, begin + length)

    prepared: Any = SimpleNamespace(train=Sorted())
    monkeypatch.setattr("minimind.train.floors.MOST_TRAINED", 2**18)
    parts = training_tokens(prepared)
    tokens = np.concatenate(parts)
    assert len(parts) == 2 * 64
    assert len({*tokens.tolist()}) == len(tokens) == 2**18
    for begin, size in ((0, 400_000), (400_000, 1_600_000)):
        own = tokens[(tokens >= begin) & (tokens < begin + size)]
        assert len(own) == 2**17
        thirds = np.bincount((own - begin) * 3 // size) / len(own)
        assert thirds == pytest.approx([1 / 3] * 3, abs=0.04)


def test_a_run_is_placed_among_floors(trained: Trained, capsys):
    run = read_runs([trained.run])[0]
    bits = run.events("floors")[-1]["bits"]
    assert {"zlib", "xz", "unigram", "trigram"} <= {*bits}
    assert all(0 < value < 8 for value in bits.values())
    assert placement(run).startswith("validation ")
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
    source = (ROOT / "minimind" / "report" / "findings.py").read_text(encoding="utf-8")
    commands = re.findall(r"`minimind ([^`]+)`", source)
    assert commands
    for command in commands:
        words = command.split()
        if words[-1] == "filter":  # whose text and output are the reader's to choose
            words += ["TEXT.jsonl", "--out", "DIR"]
        build_parser().parse_args(words)
    flags = {*re.findall(r"--([a-z][a-z_0-9]+)", re.sub(r"`[^`]+`", "", source))}
    assert len(flags) > 10
    assert flags <= {*FLAGS}
