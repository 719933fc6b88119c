"""--batch_size auto: the largest micro-batch that fits, and half of one that was out of memory."""

from __future__ import annotations

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)

import minimind.train as training
from minimind.architecture import costs
from minimind.architecture.plan import fits, layout_of
from minimind.architecture.select import MiniMind
from minimind.architecture.shape import shape_of
from minimind.config import rules
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch
from minimind.config.parse import build_config, parse_flags
from minimind.config.rules import divided
from minimind.engine.build import leave_process_group
from minimind.engine.engine import Engine
from minimind.errors import HALVED, MemoryFull
from minimind.launch import launcher
from minimind.runtime.agreement import of_rank_0, smallest
from minimind.runtime.device import CUDA, HOST
from minimind.runtime.exit import log_end
from minimind.runtime.heartbeat import Layout
from minimind.runtime.process import Progress
from minimind.train import agreement, pretrain
from minimind.train.agreement import with_common_fit
from minimind.train.memory import Fit, halved, largest_fit
from minimind.train.start import Plan, rehearse
from tests.conftest import SMALL, Trained
from tests.train.test_memory_report import fail_at
from tools.limited_card import LimitedCard
from tools.runs import events

MIB, GIB = 2**20, 2**30
ROWS = 96
train: Any = training
AUTO = {**SMALL, "batch_size": "auto", "global_batch_size": ROWS, "max_steps": 3, "log_interval": 1}


@pytest.fixture
def flags(trained: Trained, tmp_path: Path) -> dict[str, Any]:
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    return {**AUTO, **places, "dtype": "float32", "out_dir": str(tmp_path / "auto")}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """A card of so many MiB, which may hold fewer than it tells; a CPU's rule does not limit."""
    monkeypatch.setitem(rules.MICRO_BATCH_TOKENS, "cpu", 2**30)

    def limited(told: int, held: float | None = None) -> LimitedCard:
        monkeypatch.setattr(type(HOST), "memory", lambda self, index=None: told * MIB)
        return LimitedCard(int((held or told) * MIB))

    return limited


def losses(out_dir: str) -> list[float]:
    return [event["loss"] for event in events(Path(out_dir)) if event["event"] == "step"]


def of(out_dir: str, name: str) -> list[dict[str, Any]]:
    return [event for event in events(Path(out_dir)) if event["event"] == name]


def setup_of(card: int, world_size: int = 1, rank: int = 0, device: str = "cuda") -> Any:
    return SimpleNamespace(device=device, launch=Launch(rank, world_size, world_size))


@pytest.mark.parametrize("gib", [8, 12, 24, 80])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_largest_micro_batch_that_plan_counts_as_fitting(
    gib: int, processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(type(CUDA), "memory", lambda self, index=None: gib * GIB)
    monkeypatch.setattr(type(CUDA), "is_available", lambda self: True)
    words = f"--model 104m --dtype bfloat16 --global_batch_size 512 --out_dir {tmp_path}"
    run = parse_flags([*words.split(), "--device", "cuda"])
    resolved, setup = ResolvedConfig(run, "single"), setup_of(gib, processes)
    fit = largest_fit(setup, run, resolved, MiniMind())
    chosen = divided(run, processes, fit.rows, fit.why)
    chosen = chosen.with_micro_batches(processes)
    layout, shape = layout_of(chosen, processes, {}, "cuda"), shape_of(chosen)
    assert chosen.rows_per_step(processes) == 512
    assert fits(costs.memory(shape, replace(layout, rows=fit.rows)), gib * GIB)
    assert 0 < layout.rows <= fit.rows
    is_limited = not fits(costs.memory(shape, replace(layout, rows=fit.rows + 1)), gib * GIB)
    assert is_limited or fit.rows * run.max_seq_len == 32_768
    why = f"in {gib}.00 GiB" if is_limited else "32,768 tokens"
    assert chosen.sources["batch_size"].endswith(f"at most {fit.rows} at once, {why}")
    assert is_limited == (gib < 24)


@pytest.mark.parametrize(
    "mib", [8, *(pytest.param(mib, marks=pytest.mark.long) for mib in (12, 24, 80))]
)
def test_a_run_fits_the_card(mib: int, card: Any, flags: dict[str, Any]):
    with card(mib) as limited:
        assert train(flags) == 0
    (start,) = of(flags["out_dir"], "run_start")
    assert limited.refused == 0
    assert limited.most > mib * MIB / 2 or start["accumulation_steps"] == 1
    assert start["order"]["rows_per_step"] == ROWS


def test_a_card_that_holds_less_halves_twice_and_trains_as_if_begun_there(
    card: Any, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each start with the memory of the one before, and with signals as before the first step."""
    models, build, progress = list[Any](), pretrain.build_engine, Progress()

    def built(*args: Any) -> Engine:
        gc.collect()
        assert [model() for model in models] == [None] * len(models)
        assert not progress.is_training
        engine = build(*args)
        models.append(weakref.ref(engine.model))
        return engine

    with card(80, held=20) as limited, monkeypatch.context() as patched:
        patched.setattr(pretrain, "build_engine", built)
        run = build_config({**flags, "resume": "none"}, "{name}")
        assert pretrain.pretrain(run, progress) == 0
    assert progress.lock
    progress.lock.close()
    leave_process_group()
    first, *_, last = starts = of(flags["out_dir"], "run_start")
    found = of(flags["out_dir"], "micro_batch_halved")
    assert len(starts) == len(models) == 3
    assert limited.refused == len(found) == 2
    assert [one["most_rows"] for one in found] == [
        first["micro_batch_rows"] // 2, first["micro_batch_rows"] // 4
    ]  # fmt: skip
    assert len(of(flags["out_dir"], "exit")) == 1
    begun = {**flags, "out_dir": str(tmp_path / "begun"), "batch_size": last["micro_batch_rows"]}
    assert train(begun) == 0
    assert losses(begun["out_dir"]) == losses(flags["out_dir"])
    # A resume remembers it, also where the memory would let it take more.
    assert train({**flags, "max_steps": 4, "allow_change": "schedule"}) == 0
    *_, resumed = of(flags["out_dir"], "run_start")
    assert resumed["resume_from"]
    assert resumed["micro_batch_rows"] == last["micro_batch_rows"]
    assert losses(flags["out_dir"])[:3] == losses(begun["out_dir"])


@pytest.mark.parametrize(
    ("place", "resume"),
    [("evaluate", "none"), pytest.param("Saver.begin", "auto", marks=pytest.mark.long)],
)
def test_out_of_memory_after_a_step_goes_on_from_what_is_saved(
    place: str, resume: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module = {"evaluate": "train.evaluate", "Saver.begin": "checkpoint.saver"}[place]
    name, failed = f"minimind.{module}.{place}", []
    owner: Any = __import__(f"minimind.{module}", fromlist=["x"])
    for part in place.split(".")[:-1]:
        owner = getattr(owner, part)
    real = getattr(owner, place.split(".")[-1])

    def once(*args: Any, **more: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **more)

    whole = {**flags, "out_dir": str(tmp_path / "whole"), "save_interval": 2, "async_save": False}
    whole |= {"eval_interval": 2}
    assert train(whole) == 0
    monkeypatch.setattr(name, once)
    assert train({**whole, "out_dir": flags["out_dir"], "resume": resume}) == 0
    _, again = of(flags["out_dir"], "run_start")
    assert again["step"] == (2 if place == "evaluate" else 0)  # a save comes first
    assert losses(flags["out_dir"])[-1] == pytest.approx(losses(whole["out_dir"])[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "halves"),
    [
        ({"batch_size": 4}, False),
        ({"global_batch_size": None, "accumulation_steps": 2}, False),
        ({"global_batch_size": 1}, False),  # one row
        pytest.param({"deepspeed_config": "zero2"}, True, marks=pytest.mark.long),  # by a launcher
    ],
)
def test_where_the_run_ends(
    given: dict[str, Any], halves: bool, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    flags = {key: value for key, value in {**flags, **given}.items() if value is not None}
    fail_at(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(MemoryFull) as raised:
        train(flags)
    assert raised.value.status == 10
    assert bool(raised.value.halved) is halves
    assert len(of(flags["out_dir"], "micro_batch_halved")) == halves


def test_the_peak_of_the_first_start_is_not_that_of_the_second(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    monkeypatch.setattr(type(CUDA), "is_available", lambda self: True)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, partial(called.append, name))
    pretrain.begin_anew(parse_flags(["--device", "cuda"]), Progress())
    assert called == ["empty_cache", "reset_peak_memory_stats"]


def test_what_does_not_depend_on_the_micro_batch_halves_none(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Else each start to come has one row, also where other programs have left the memory."""

    def fail(*args: Any) -> Engine:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pretrain, "build_engine", fail)
    with pytest.raises(MemoryFull, match="minimind plan"):
        train(flags)
    assert not (Path(flags["out_dir"]) / "metrics.jsonl").exists()


def test_a_record_counts_for_the_same_model_and_device(tmp_path: Path):
    words = f"--dtype float32 --device cpu --out_dir {tmp_path} --max_seq_len 64"
    run = parse_flags(words.split())
    setup, zero = setup_of(0, device="cpu"), {"zero_optimization": {"stage": 2}}
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

    def fit(more: str = "", config: Any = zero, **values: Any) -> Fit:
        other = replace(parse_flags([*words.split(), *more.split()]), **values)
        return largest_fit(setup, other, ResolvedConfig(other, "deepspeed", config), MiniMind())

    before = fit()
    record = halved(run, 1, before)
    assert record
    log_end(tmp_path, {"step": 0, **record}, "", event=HALVED)
    assert fit().rows == run.micro_batch_rows(1) // 2
    assert fit("--gradient_checkpointing").rows == before.rows
    assert fit("--dim 256").rows == before.rows
    for other in ("--dtype bfloat16", "--optimizer lion", "--ema 0.9", "--loss chunked"):
        assert fit(other).rows == before.rows, other
    for other in ("--freeze model.layers.[01].* *embed*", "--doc_mask", "--compile off"):
        assert fit(other).rows == before.rows, other
        log_end(tmp_path, {"step": 0, **(halved(run, 1, fit(other)) or {})}, "", event=HALVED)
        assert fit(other).rows == run.micro_batch_rows(1) // 2, other
    assert fit(config=offload).rows == before.rows
    assert fit(teacher_weights=10**6).rows == before.rows
    assert halved(run, 1, None) is None


def test_all_ranks_take_the_smallest_number_and_the_facts_of_rank_0():
    store = HashStore()

    def told(rank: int) -> tuple[int, str]:
        rows = smallest(store, rank, 3, "fit", [9, 4, 30][rank])
        return rows, of_rank_0(store, rank, 3, "facts", f"of {rank}")

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(told, range(3))] == [(4, "of 0")] * 3


def test_ranks_of_different_devices_plan_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agreement, "rendezvous", nullcontext)
    store = HashStore()

    def planned(rank: int) -> Plan:
        setup: Any = SimpleNamespace(launch=Launch(rank, 2, 2), complete=completed)
        run = parse_flags("--global_batch_size 64 --dtype float32".split())
        fit = Fit([24, 6][rank], "", {"device_mib": [80, 12][rank]})
        run = divided(run, 2, fit.rows, fit.why).with_micro_batches(2)
        unused: Any = None
        resolved = ResolvedConfig(run, "ddp")
        return with_common_fit(store, Plan(setup, resolved, unused, unused, None, None, None, fit))

    def completed(resolved: ResolvedConfig, run: Any, schedule: Any) -> ResolvedConfig:
        return replace(resolved, run=run.with_micro_batches(2))

    with ThreadPoolExecutor(2) as pool:
        plans = [*pool.map(planned, range(2))]
    for plan in plans:
        assert (plan.run.micro_batch_rows(2), plan.run.rows_per_step(2)) == (6, 64)
        assert plan.run.accumulation_steps == 6  # 8 rows of padding
        assert plan.fit
        assert plan.fit.facts == {"device_mib": 80}


def test_a_number_in_the_deepspeed_file_is_in_force(tmp_path: Path, trained: Trained):
    document = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**document, "zero_optimization": {"stage": 2}}))
    words = f"--batch_size auto --deepspeed_config {path} --data_path {trained.mixed} --max_steps 2"
    plan = rehearse(parse_flags([*words.split(), "--device", "cpu", "--dtype", "float32"]))
    assert plan.fit is None
    assert plan.run.batch_size == 4


def test_the_launcher_starts_again_without_a_restart_for_each_smaller_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Not for one that is as large as before, which would come again."""
    monkeypatch.setenv("MAX_RESTARTS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(launcher, "Signals", lambda: SimpleNamespace(reason="", torchrun=None))
    seen: list[tuple[str, list[str]]] = []
    ends = [(10, 8), (10, 4), (7, None), (10, 2), (10, 2)]

    def start(signals: Any, python: str, script: str, words: list[str], place: Path) -> Any:
        place.mkdir()
        seen.append((place.name, words))
        status, halved = ends[len(seen) - 1]
        return status, {}, halved

    def restarted(signals: Any, places: list[Path], number: int, launched: Any) -> list[str]:
        assert ([place.name for place in places], number) == (["2"], 1)
        return ["--resume", "auto"]

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher, "prepare_restart", restarted)
    assert launcher.main("python", ["--model", "tiny"]) == 10
    assert [name for name, _ in seen] == ["0", "1", "2", "3", "4"]
    assert [len(words) for _, words in seen] == [2, 2, 2, 4, 4]
    assert capsys.readouterr().err.count("starting again with smaller micro-batches") == 3


def test_a_launch_that_recorded_a_smaller_micro_batch_resumes_what_it_saved(tmp_path: Path):
    metrics, place = tmp_path / "metrics.jsonl", tmp_path / "place"
    assert launcher.halved_rows(metrics, 0) is None
    log_end(tmp_path, {"step": 3, "micro_batch_rows": 8}, "", event="micro_batch_halved")
    assert launcher.halved_rows(metrics, 0) == 8
    assert launcher.halved_rows(metrics, metrics.stat().st_size) is None  # of an earlier launch
    log_end(tmp_path, {"step": 0}, "", event="run_start")  # the process went on by itself
    assert launcher.halved_rows(metrics, 0) is None
    place.mkdir()
    assert launcher.flags_to_resume(place) == []  # nothing was begun
    layout = Layout("a", str(tmp_path), 2, 8, 1, 8, split_batches=False, resume="none", fixed_by="")
    (place / "layout-0").write_text(json.dumps(asdict(layout)))
    assert launcher.flags_to_resume(place) == []  # nothing was saved
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").write_text("{}")
    assert launcher.flags_to_resume(place) == ["--resume", "auto"]
