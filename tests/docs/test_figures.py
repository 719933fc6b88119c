"""What the docs say that the program says, or that was measured, against the program and files."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.racers import RECIPE
from benchmarks.throughput import ratio
from benchmarks.time_to_loss import final, needed
from minimind import errors
from minimind.architecture.costs import Layout, memory
from minimind.architecture.plan import Machine, plan
from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import resolve
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import deepspeed_files
from minimind.errors import UsageError
from tests.conftest import ROOT
from tests.docs.pages import PAGES, blocks, rows

MIB, GIB = 2**20, 2**30
STAGES = {"without DeepSpeed": None, **{f"stage {stage}": stage for stage in range(4)}}
YAML = {"ACCELERATE_MIXED_PRECISION": "bf16", "MINIMIND_CONFIG_FILE": "accelerate.yaml"}
# Command line, DeepSpeed JSON and environment behind each message of configuration.md, in order.
MISTAKES = [
    ("--batch_sise 4", {}, {}),
    ("--config small.yaml", {}, {}),
    ("--learning_rate fast", {}, {}),
    ("--dim 100 --n_heads 8", {}, {}),
    ("--grad_clip 1.0", {"gradient_clipping": 0.5}, {}),
    ("--batch_size 4 --accumulation_steps 2", {"train_batch_size": 30}, {}),
    ("", {"zero_optimisation": {"stage": 3}}, {}),
    ("", {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}),
    ("", {"steps_per_print": "auto"}, {}),
    ("--dtype float32", {}, YAML),
]


def ask(argv: list[str], environ: dict[str, str]) -> None:
    """Resolve a run on two CPU processes with ds.json; raises UsageError where it cannot be."""
    run, launch = parse_flags(argv), read_launch(environ)
    resolve(read_deepspeed_json("ds.json"), "ds.json", run, 2, "cpu", launch=launch)


def test_the_messages_shown_are_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = PAGES["configuration.md"].split("<!-- messages -->")[1].split("<!-- /messages -->")[0]
    shown = re.sub(r"\n  +", " ", blocks(text)[0]).splitlines()
    assert len(shown) == len(MISTAKES)
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("learning_rat: 1.0e-3\n")
    for (words, document, environ), line in zip(MISTAKES, shown, strict=True):
        Path("ds.json").write_text(json.dumps(document))
        with pytest.raises(UsageError) as caught:
            ask(words.split(), environ)
        assert line == str(caught.value)


def test_the_plan_shown_is_what_minimind_plan_prints(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    command, shown = blocks(PAGES["memory.md"])[:2]
    requested = "minimind plan --gpus 4 --memory 16GiB "
    assert command.startswith(requested)
    flags = command.removeprefix(requested).split()
    assert shown.rstrip() == plan(flags, Machine(gpus=4, memory=16 * GIB))


def test_the_memory_shown_is_as_near_the_arithmetic_as_on_the_page():
    shape = shape_of(parse_flags(["--model", "tiny"]))
    table = rows(PAGES["measurements.md"], "\n## Memory\n")
    assert [cells[0] for cells in table] == list(STAGES)
    for name, measured, report in table:
        held = memory(shape, Layout(STAGES[name], 2, "bfloat16", 1, 1, 12 * 192**2, device="cpu"))
        predicted = held.weights + held.optimizer + max(held.gradients + held.buffers, held.update)
        assert report == f"{predicted / MIB:.1f}"
        assert float(measured) == pytest.approx(predicted / MIB, rel=0.05)


@pytest.mark.parametrize(
    ("page", "heading"),
    [("troubleshooting.md", "\n## Exit status\n"), ("troubleshooting_zh.md", "\n## 退出码\n")],
)
def test_every_exit_status_is_reported_with_its_name(page: str, heading: str):
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    known = {(kind.status, kind.code) for kind in kinds if issubclass(kind, errors.RunError)}
    report = {(int(cells[0]), cells[1].strip("`")) for cells in rows(PAGES[page], heading)}
    assert report == known | {(0, "")}


def test_the_names_of_deepspeed_files_are_all_listed():
    text = PAGES["deepspeed_json.md"].split("<!-- names -->")[1].split("<!-- /names -->")[0]
    assert {*re.findall(r"`(\w+)`", text)} == {*deepspeed_files()}


@pytest.mark.parametrize(
    ("file", "shares", "by_cpu"),
    [
        (
            "time_to_loss-2026-11-28-cpu",
            r"by seed of nanochat: (.+?) by the pace",
            r"by the pace, (.+?) by the CPU",
        ),
        ("time_to_loss-8m-2026-11-27-cpu", r"nanochat's seeds after (0\.70.+?) of their", None),
    ],
)
def test_the_race_is_told_by_seed_of_the_rival(file: str, shares: str, by_cpu: str | None):
    text = re.sub(r"\s+", " ", PAGES["measurements.md"])
    runs = results(file)["runs"]
    for axis, said in (("seconds", shares), ("cpu_seconds", by_cpu)):
        if said is None:
            continue
        expected = [
            statistics.median(needed(one, final(rival), axis) for one in runs[RECIPE])
            / rival["curve"][-1][axis]
            for rival in runs["nanochat"]
        ]
        (found,) = re.findall(said, text)
        assert re.findall(r"\d\.\d\d", found) == [f"{share:.2f}" for share in expected]


def results(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def time_of(file: str, one: str, other: str) -> float:
    """Time of a step over that of another: the median over pairs of the same round."""
    steps = results(file)["steps"]
    return ratio(steps, other, one, "seconds")


def harm(spared: str) -> list[str]:
    """Percent that a planted document raises the last validation loss by, of each seed."""
    losses = [
        (seed[spared]["val_loss"], seed["without it"]["val_loss"])
        for seed in results("poisoned_text-2026-11-25-cpu")["seeds"].values()
    ]
    return [f"{100 * (loss / usual - 1):.1f}" for loss, usual in losses]


def most() -> list[str]:
    """The largest harm without the guard, and with it."""
    return [max(harm(spared), key=float) for spared in ("with it", "guarded")]


def sooner(file: str) -> str:
    """How many times sooner the recipe reaches the last value of MiniMind's packed rows."""
    return f"{results(file)['table'][RECIPE]['sooner']['MiniMind, packed']['seconds']:.1f}"


RACES = ("time_to_loss-2026-11-28-cpu", "time_to_loss-8m-2026-11-27-cpu")
THROUGHPUT, ONE_GPU = "throughput-2026-11-23-cpu", "stages-one-gpu-2026-11-26-h100"
SETTINGS, SCALING = "stages-settings-2026-11-22-cpu", "stages-scaling-2026-11-22-cpu"
LARGE, ZERO_2 = "buckets of 500,000,000", "ours, ZeRO-2, compiled"


@pytest.mark.parametrize(
    ("page", "said", "measured"),
    [
        (
            "faster.md",
            "a step without DeepSpeed takes {} of the time of ZeRO-2, on a CPU {}",
            lambda: [
                time_of(ONE_GPU, "no DeepSpeed", "stage 2"),
                time_of(THROUGHPUT, "ours, single, compiled", ZERO_2),
            ],
        ),
        (
            "faster.md",
            "compute {} times the tokens/s of one, with stage 2 by DeepSpeed's own path {} times",
            lambda: [kind["weak"] for kind in results(SCALING)["scaling"].values()],
        ),
        (
            "faster.md",
            "with packed rows {} times sooner, with 8M parameters {} times",
            lambda: [sooner(file) for file in RACES],
        ),
        (
            "faster.md",
            "{} times the tokens/s of the eager model",
            lambda: [1 / time_of(THROUGHPUT, ZERO_2, "ours, ZeRO-2, eager")],
        ),
        (
            "faster.md",
            "{} of the time with buckets of 500,000,000 (800 MiB more) on one H100; {} without",
            lambda: [
                time_of(ONE_GPU, LARGE, "stage 2"),
                time_of(SETTINGS, "no contiguous_gradients", "as shipped"),
            ],
        ),
        (
            "measurements.md",
            "loss by {}, {} and {} %, with the guard by {}, {} and {} %",
            lambda: [*harm("with it"), *harm("guarded")],
        ),
        ("troubleshooting.md", "by up to {} %, and with the guard by at most {} %", most),
        ("troubleshooting_zh.md", "最多升高 {} %，有这种保护时最多升高 {} %", most),
    ],
)
def test_figures_that_a_page_repeats_are_those_of_the_files(page: str, said: str, measured: Any):
    pattern = re.escape(said).replace(r"\{\}", r"(-?\d+\.\d+)")
    (found,) = re.findall(pattern, re.sub(r"\s+", " ", PAGES[page]))
    values = [value if isinstance(value, str) else f"{value:.2f}" for value in measured()]
    assert ([found] if isinstance(found, str) else [*found]) == values
