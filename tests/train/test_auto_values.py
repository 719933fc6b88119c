"""Numbers of "auto" in a run: by its text, the same in every process, and as saved on resume."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import minimind.train as training
from minimind.architecture.select import MiniMind
from minimind.checkpoint.directory import with_sum
from minimind.checkpoint.resume import read_manifests
from minimind.cli.main import main as minimind
from minimind.config import rules
from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.flags import RULED
from minimind.config.launcher_env import read_launch
from minimind.config.parse import build_config
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.runtime.device import Host
from minimind.train.auto_values import Numbers, numbers_to_resume, with_auto_values
from tests.conftest import Launcher, sentences
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "device": "cpu", "eval_rows": 0, "log_interval": 1},
    **{"deepspeed_config": "none", "max_steps": 8, "save_interval": 4, "dtype": "float32"},
}
NAMES = ("batch_size", "accumulation_steps", "learning_rate", "weight_decay", "warmup_steps")


def configuration(out_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((out_dir / "config.yaml").read_text())


def losses(out_dir: Path) -> list[tuple[int, float, float]]:
    return [(e["step"], e["loss"], e["lr"]) for e in events(out_dir, "step")]


@pytest.fixture
def places(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.getbasetemp() / "cache-of-auto"
    return {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(cache)}


def test_the_numbers_are_those_of_the_rules_and_say_so(places, tmp_path, capsys):
    assert train(places, out_dir=str(tmp_path / "out")) == 0
    found = configuration(tmp_path / "out")
    work = rules.Workload(600 * 16, 8 * 32 * found["batch_size"], 1.0, 8)
    expected = rules.suited_values(("learning_rate", "warmup_steps"), work)
    assert {name: found[name] for name in expected} == expected
    text = (tmp_path / "out" / "config.yaml").read_text()
    assert "parameters, " in text.split("learning_rate: ")[1].split("\n")[0]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"batch_size {found['batch_size']} auto: " in shown
    assert "accumulation_steps 1 auto: " in shown


def test_the_numbers_written_out_train_the_same(places, tmp_path):
    assert train(places, out_dir=str(tmp_path / "auto")) == 0
    numbers = {name: configuration(tmp_path / "auto")[name] for name in NAMES}
    assert train(places, out_dir=str(tmp_path / "given"), **numbers) == 0
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")


def test_a_resumed_run_keeps_its_numbers_though_the_rules_changed(places, tmp_path, monkeypatch):
    assert train(places, out_dir=str(tmp_path / "whole")) == 0
    assert train(places, out_dir=str(tmp_path / "cut"), stop_at_step=4) == 75
    before = configuration(tmp_path / "cut")
    for name, rule in {**rules.RULES}.items():
        monkeypatch.setitem(rules.RULES, name, lambda work, rule=rule: 2 * rule(work))
    monkeypatch.setattr(rules, "tokens_per_step", lambda tokens, optimizer: 10_000.0)
    assert train(places, out_dir=str(tmp_path / "cut")) == 0
    after = configuration(tmp_path / "cut")
    assert {name: after[name] for name in NAMES} == {name: before[name] for name in NAMES}
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert "auto: as in step_00000004" in (tmp_path / "cut" / "config.yaml").read_text()


def test_a_resumed_run_keeps_its_dtype_on_another_device(places, tmp_path, monkeypatch):
    given = dict.fromkeys(RULED, 1)  # no number is taken from the checkpoint
    flags = {**places, **given, "out_dir": str(tmp_path / "out"), "dtype": "auto"}
    for has_bf16, steps in ((False, 4), (True, 8)):
        monkeypatch.setattr(Host, "has_bf16", has_bf16)
        assert train(flags, max_steps=steps, allow_change="schedule") == 0
        starts = [event for event in events(tmp_path / "out") if event["event"] == "run_start"]
        assert starts[-1]["dtype"] == "float32"
        assert configuration(tmp_path / "out")["dtype"] == "float32"
    manifest = tmp_path / "out" / "checkpoints" / "step_00000008" / "manifest.json"
    assert json.loads(manifest.read_text())["dtype"] == "float32"
    assert "# auto: as in step_00000004" in (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_older_here", [False, True])
def test_a_run_whose_disk_is_lost_takes_the_numbers_of_its_mirror(
    places, tmp_path, is_older_here: bool
):
    """The run was continued with another length, for which the rules have other numbers."""
    longer = {"max_steps": 24, "allow_change": "schedule,lr"}
    ends = []
    for name in ("kept", "lost"):
        out, flags = tmp_path / name, {**places, "mirror": f"file://{tmp_path}/mirror-{name}"}
        flags["out_dir"] = str(out)
        assert train(flags, stop_at_step=4) == 75
        if is_older_here:
            shutil.copytree(out, tmp_path / "backup", dirs_exist_ok=True)
        given = {"learning_rate": 0.003, "warmup_steps": 1}
        assert train(flags, **longer, **given, stop_at_step=8) == 75
        if name == "lost":
            shutil.rmtree(out)
        if name == "lost" and is_older_here:
            shutil.copytree(tmp_path / "backup", out)
        assert train(flags, max_steps=24) == 0
        assert "auto: as in step_00000008" in (out / "config.yaml").read_text()
        ends.append([line for line in losses(out) if line[0] > 8])
    assert ends[0] == ends[1]


def test_a_start_of_a_finished_run_deletes_what_a_kill_after_the_last_save_left(places, tmp_path):
    flags = {**places, "out_dir": str(tmp_path / "out"), "save_interval": 4}
    checkpoints = tmp_path / "out" / "checkpoints"
    assert train(flags, keep_last=1, stop_at_step=4) == 75
    shutil.copytree(checkpoints / "step_00000004", tmp_path / "earlier")
    assert train(flags, keep_last=1) == 0
    shutil.copytree(tmp_path / "earlier", checkpoints / "step_00000004")
    assert train(flags, keep_last=1) == 0
    assert len([*checkpoints.iterdir()]) == 1


def test_a_damaged_manifest_at_the_mirror_gives_no_numbers(places, tmp_path):
    out, mirror = tmp_path / "out", tmp_path / "mirror"
    flags = {**places, "mirror": f"file://{mirror}", "out_dir": str(out), "keep_last": 2}
    given = {"learning_rate": 0.003, "warmup_steps": 1}
    assert train(flags, stop_at_step=6, **given) == 75
    shutil.rmtree(out)
    (mirror / "checkpoints" / "step_00000006" / "manifest.json").write_text("{}")
    assert train(flags) == 0
    assert "auto: as in step_00000004" in (out / "config.yaml").read_text()


def test_a_run_of_given_numbers_goes_on_without_them(places, tmp_path):
    numbers = {"batch_size": 2, "learning_rate": 0.003, "weight_decay": 0.2, "warmup_steps": 1}
    assert train(places, out_dir=str(tmp_path / "out"), stop_at_step=4, **numbers) == 75
    assert train(places, out_dir=str(tmp_path / "out")) == 0
    found = configuration(tmp_path / "out")
    assert {name: found[name] for name in numbers} == numbers


def test_a_file_that_sets_the_batch_keeps_it(places, tmp_path):
    file = tmp_path / "ds.json"
    document = {"zero_optimization": {"stage": 1}, "train_batch_size": 12}
    file.write_text(json.dumps(document))
    places = {**places, "deepspeed_config": str(file), "batch_size": 3}
    assert train(places, out_dir=str(tmp_path / "out"), dry_run=True) == 0


def test_every_number_of_processes_trains_on_the_same_rows(forked: Launcher, tmp_path: Path):
    """The rows of a step follow from the text, not from the processes."""
    line = "--batch_size auto --learning_rate auto --warmup_steps auto --max_steps 6"
    line += " --dtype float32 --deepspeed_config none"
    one = forked.run(tmp_path / "one", line, processes=1)
    many = forked.run(tmp_path / "many", line, processes=2)
    assert (one.status, many.status) == (0, 0), one.stderr + many.stderr
    for name in ("rows", "lr"):
        first, second = ([line[name] for line in run.events("step")] for run in (one, many))
        assert first == second
    assert many.losses() == pytest.approx(one.losses(), rel=1e-5)


def test_rows_that_the_micro_batches_cannot_divide_are_refused(places, tmp_path):
    flags = {**places, "out_dir": str(tmp_path / "out")}
    assert train(flags, stop_at_step=4, batch_size=4) == 75
    message = (
        r"batch_size = auto: the 4 rows of a step in .*step_00000004 cannot be divided by"
        r" accumulation_steps = 3 \(train.*\); remove accumulation_steps, or give --batch_size with"
        r" --allow_change batch$"
    )
    with pytest.raises(CheckpointError, match=message):
        train(flags, accumulation_steps=3)
    assert train(flags, stop_at_step=5, accumulation_steps=2) == 75
    changed = {"accumulation_steps": 3, "batch_size": 1, "allow_change": "batch"}
    assert train(flags, **changed) == 0


@pytest.mark.parametrize(
    ("processes", "micro_batches", "message"),
    [
        (
            3,
            None,
            "by 3 processes; start processes that divide them, or give --global_batch_size 4",
        ),
        (2, 3, r"by accumulation_steps = 3 \(--acc.*\) x 2 processes; remove --acc.*, or give"),
        (3, 2, r"= 2 \(--acc.*\) x 3 processes; start .* --global_batch_size 4 instead of --acc"),
    ],
)
def test_rows_that_the_processes_cannot_divide_are_refused(
    places, tmp_path, processes, micro_batches, message
):
    flags = {**places, "out_dir": str(tmp_path / "out")}
    assert train(flags, stop_at_step=4, batch_size=4) == 75
    given = {"accumulation_steps": micro_batches} if micro_batches else {}
    run = build_config({**flags, **given}, "--{name}")
    setup = read_setup(run, replace(read_launch({}), world_size=processes))
    saved = read_manifests(tmp_path / "out" / "checkpoints", "auto")
    resumed = numbers_to_resume(run, saved)
    with pytest.raises(CheckpointError, match=message):
        with_auto_values(setup, run, "AdamW", None, MiniMind(), resumed)


def test_a_global_batch_is_kept_by_any_processes(places, tmp_path):
    """Its micro-batches follow from the processes, and are no flags of config.yaml."""
    flags = {**places, "out_dir": str(tmp_path / "out"), "global_batch_size": 5}
    assert train(flags, stop_at_step=4, batch_size=2) == 75
    saved = read_manifests(tmp_path / "out" / "checkpoints", "auto")
    for processes, expected in ((1, (5, 1)), (2, (3, 1)), (5, (1, 1))):
        run = build_config(flags, "--{name}")
        setup = read_setup(run, replace(read_launch({}), world_size=processes))
        resumed = numbers_to_resume(run, saved)
        found = with_auto_values(setup, run, "AdamW", None, MiniMind(), resumed)
        split = found.with_micro_batches(processes)
        assert (split.micro_batch_rows(processes), split.accumulation_steps) == expected
        assert split.rows_per_step(processes) == 5
    # Without the flag the rows are those of the checkpoint, without padding.
    plain = build_config({**flags, "global_batch_size": None}, "--{name}")
    numbers = numbers_to_resume(plain, saved)
    assert numbers is not None
    assert numbers.rows == 5
    written = (tmp_path / "out" / "config.yaml").read_text()
    assert "global_batch_size: 5" in written
    assert "accumulation_steps" not in written
    again = {"config": str(tmp_path / "out" / "config.yaml"), "out_dir": str(tmp_path / "again")}
    assert train(again, stop_at_step=4) == 75
    assert losses(tmp_path / "again") == losses(tmp_path / "out")
    assert train({**places, "out_dir": str(tmp_path / "out")}, batch_size=5) == 0


def test_a_resume_between_stages_of_another_batch_keeps_the_batch_of_the_run(places, tmp_path):
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages: [{until: 50%, max_seq_len: 16, batch_size: 3}, {name: rest}]\n")
    for name, cuts in (("whole", [None]), ("cut", [2, 6, None])):
        for stop in cuts:
            out = str(tmp_path / name)
            status = train(places, stages=str(stages), stop_at_step=stop, out_dir=out)
            assert status == (75 if stop else 0)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("lr", "learning_rate", "strong"),
        ("lr", "weight_decay", -1),
        ("schedule", "warmup_steps", None),
        ("lr", None, None),
    ],
)
def test_a_manifest_with_values_that_no_flag_has_is_of_another_run(
    places, tmp_path, group, name, value
):
    assert train(places, out_dir=str(tmp_path / "out"), stop_at_step=4) == 75
    path = tmp_path / "out" / "checkpoints" / "step_00000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    body = {key: one for key, one in manifest.items() if key != "sha256"}
    if name is None:
        del body["identity"][group]
    else:
        body["identity"][group][name] = value
    path.write_bytes(with_sum(body))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        train(places, out_dir=str(tmp_path / "out"))


def test_the_rows_of_a_checkpoint_are_those_of_all_processes(places, tmp_path):
    assert train(places, out_dir=str(tmp_path / "out"), stop_at_step=4) == 75
    path = tmp_path / "out" / "checkpoints" / "step_00000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    run = build_config({**places, "out_dir": str(tmp_path / "out")}, "{name}")
    rows = configuration(tmp_path / "out")["batch_size"]
    for world_size, group, expected in ((1, 1, rows), (4, 1, 4 * rows), (4, 2, 2 * rows)):
        saved = {**manifest, "world_size": world_size, "tensor_parallel": group}
        assert Numbers.of(run, str(path.parent), saved).rows == expected


def dry_run(capsys: pytest.CaptureFixture[str], **flags: Any) -> dict[str, str]:
    """The values that a dry run prints, by flag."""
    assert train({**FLAGS, "max_steps": None, **flags}, dry_run=True) == 0
    table = capsys.readouterr().out.split("flags:\n")[1].split("\n\n")[0]
    return {words[0]: words[1] for words in map(str.split, table.splitlines())}


def test_many_steps_of_a_small_text_have_a_batch_of_the_text(prepared, tmp_path, capsys):
    place = {"data_path": [str(prepared)], "out_dir": str(tmp_path / "out")}
    found = dry_run(capsys, **place, max_steps=10**6)
    shown = json.loads((prepared / "manifest.json").read_text())
    n_rows = shown["splits"]["train"]["tokens"] // 33
    assert int(found["batch_size"]) * int(found["accumulation_steps"]) <= n_rows
    assert float(found["weight_decay"]) == pytest.approx(0.1 * 12**0.9, rel=1e-2)


def test_a_budget_below_the_step_of_the_rule_takes_fewer_rows(prepared, tmp_path, capsys):
    place = {"data_path": [str(prepared)], "out_dir": str(tmp_path / "out")}
    assert dry_run(capsys, **place, max_tokens=100)["batch_size"] == "2"


def test_processes_share_a_batch_that_is_auto(prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NUM_PROCESSES", "3")
    place = {"data_path": [str(prepared)], "out_dir": str(tmp_path / "out")}
    found = dry_run(capsys, **place, max_tokens=2e6, split_batches=True)
    assert int(found["batch_size"]) % 3 == 0


def test_a_start_resolves_the_deepspeed_file_once(prepared, tmp_path, capsys, monkeypatch):
    calls, real = [], backend_choice.resolve
    monkeypatch.setattr(
        backend_choice, "resolve", lambda *args, **more: calls.append(args) or real(*args, **more)
    )
    file = tmp_path / "ds.json"
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    written = {"zero_optimization": {"stage": 1}, "scheduler": scheduler}
    file.write_text(json.dumps({**written, "train_batch_size": "auto"}))
    place = {"data_path": [str(prepared)], "out_dir": str(tmp_path / "out")}
    flags = {**FLAGS, **place, "max_steps": None, "max_tokens": 2e6}
    assert train({**flags, "deepspeed_config": str(file)}, dry_run=True) == 0
    assert len(calls) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {words[0]: words[1] for words in table if len(words) > 2}
    assert shown["train_batch_size"] == shown["batch_size"]
    assert int(shown["scheduler.params.total_num_steps"]) > 1


def test_a_file_whose_name_begins_with_auto_gives_values():
    run = build_config({"learning_rate": "1e-3"}, "auto_sweep.yaml: {name}")
    assert run.is_explicit("learning_rate")


def test_the_warm_up_ends_before_the_decay_of_a_stage(places, tmp_path):
    stages = tmp_path / "stages.yaml"
    stages.write_text("decay_from: b\nstages: [{until: 20%}, {name: b}]\n")
    flags = {"stages": str(stages), "schedule": "wsd", "max_steps": 20}
    assert train({**places, **flags}, out_dir=str(tmp_path / "out")) == 0
    assert configuration(tmp_path / "out")["warmup_steps"] == 1


def test_a_run_that_becomes_shorter_than_its_warm_up_is_another_run(places, tmp_path):
    flags = {**places, "out_dir": str(tmp_path / "out")}
    assert train(flags, max_steps=100, stop_at_step=4) == 75
    assert configuration(tmp_path / "out")["warmup_steps"] == 30
    with pytest.raises(CheckpointError, match=r"(?s)total_steps.*warmup_steps"):
        train(flags, max_steps=20)
    assert train(flags, max_steps=20, allow_change="schedule,lr", stop_at_step=5) == 75
    assert configuration(tmp_path / "out")["warmup_steps"] == 6
    text = (tmp_path / "out" / "config.yaml").read_text().split("warmup_steps: ")[1]
    assert "parameters, " in text.split("\n")[0]


@pytest.mark.parametrize("more", [{"max_steps": 20}, {"max_steps": 39, "max_tokens": 8960}])
def test_stages_are_laid_out_in_the_steps_of_the_rule(places, tmp_path, more):
    """With one row a step, stage b would begin after the end, or the steps contradict."""
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages: [{until: 1024, max_seq_len: 16}, {name: b}]\n")
    flags = {**places, "out_dir": str(tmp_path / "out"), "stages": str(stages), **more}
    assert train(flags, stop_at_step=10, batch_size=8) == 75
    assert train(flags, stop_at_step=12) == 75
    assert configuration(tmp_path / "out")["batch_size"] == 8


def test_a_muon_run_that_becomes_shorter_has_the_plain_warm_up(places, tmp_path, capsys):
    flags = {**places, "out_dir": str(tmp_path / "out"), "optimizer": "muon"}
    assert train(flags, max_steps=2000, stop_at_step=4) == 75
    assert "cosine, 100 steps of warm-up" in capsys.readouterr().out
    assert train(flags, max_steps=40, allow_change="schedule,lr", stop_at_step=5) == 75
    assert "cosine, 2 steps of warm-up" in capsys.readouterr().out


def test_stages_beyond_the_budget_are_refused_before_the_text_is_read(places, tmp_path):
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages: [{until: 1e9}, {name: b}]\n")
    flags = {**places, "stages": str(stages), "max_steps": None, "max_tokens": 1e6}
    flags |= {"out_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UsageError, match=r"until = 1e9 is not before the end of the run, 1,000,0"):
        train(flags)
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_on_text_that_is_not_prepared_has_the_numbers_of_its_checkpoint(
    places, tmp_path, capsys
):
    flags = {**places, "out_dir": str(tmp_path / "out"), "max_steps": None, "epochs": 1}
    assert train(flags, stop_at_step=4, batch_size=2, learning_rate=0.003) == 75
    capsys.readouterr()
    found = dry_run(capsys, **flags)
    assert (found["batch_size"], found["learning_rate"]) == ("2", "0.003")
    assert found["warmup_steps"] == "auto"  # the length of the run is not known
    shown = dry_run(capsys, **{**flags, "out_dir": str(tmp_path / "new")})
    assert shown["batch_size"] == "auto"


@pytest.mark.parametrize(
    ("staged", "limit", "error"),
    [
        (False, {"max_steps": 8}, DataError("0 rows of 1000001, fewer than the 1 of one step")),
        (False, {"max_tokens": 10**7}, DataError("0 rows of 1000001, fewer than the 1 of one")),
        (True, {"max_steps": 8}, DataError("stage-1: source a has no row of 1000001 tokens")),
        (True, {"max_tokens": 10**6}, UsageError("stage-1 has no whole step of 1,000,000 tokens")),
    ],
)
def test_a_weighted_source_without_a_row_is_refused(prepared, tmp_path, staged, limit, error):
    flags = {**FLAGS, "source": [f"a={prepared}:1"], "max_steps": None, **limit}
    if staged:
        flags["stages"] = str(tmp_path / "stages.yaml")
        (tmp_path / "stages.yaml").write_text(
            "stages: [{until: 50%, weights: {a: 1}}, {name: b}]\n"
        )
    flags |= {"out_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(type(error), match=str(error)):
        train(flags, max_seq_len=10**6, dry_run=True)


def test_a_dry_run_refuses_the_sources_that_the_start_refuses(prepared, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "a few words"}) + "\n")
    out = tmp_path / "short"
    command = ["prepare", str(short), "--tokenizer", str(prepared / "tokenizer")]
    assert minimind([*command, "--out", str(out)]) == 0
    flags = {**FLAGS, "out_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    flags["source"] = [f"long={prepared}:1", f"short={out}:1"]
    for is_dry in (True, False):
        with pytest.raises(DataError, match=r"source short has .* fewer than a row of 33"):
            train(flags, dry_run=is_dry)


def test_a_plan_of_stages_has_the_rate_of_the_run(prepared, tmp_path, capsys):
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages: [{until: 50%}, {name: b}]\n")
    flags = {**FLAGS, "data_path": [str(prepared)], "stages": str(stages), "schedule": "wsd"}
    flags |= {"out_dir": str(tmp_path / "out"), "max_steps": 40, "eval_rows": 0}
    line = " ".join(f"--{name} {value}" for name, value in {**flags, "data_path": prepared}.items())
    for given in ({}, {"batch_size": 4}):
        assert train({**flags, **given}, dry_run=True) == 0
        rate = next(one for one in capsys.readouterr().out.splitlines() if "rate: wsd" in one)
        assert "peak 0.0005" not in rate  # the plain number
        more = " ".join(f"--{name} {value}" for name, value in given.items())
        assert minimind(["plan", *f"{line} {more}".split()]) == 0
        assert rate.strip() in capsys.readouterr().out


def test_a_value_equal_to_the_plain_number_is_shown(places, tmp_path, capsys):
    numbers = {"learning_rate": 5e-4, "batch_size": 8}
    assert train(places, out_dir=str(tmp_path / "out"), **numbers) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "learning_rate 0.0005" in shown
    assert "batch_size 8" in shown


def test_a_damaged_checkpoint_gives_no_numbers(places, tmp_path):
    """The next one has others, and is the one from which the run resumes."""
    flags = {**places, "out_dir": str(tmp_path / "out"), "keep_last": 9}
    assert train(flags, stop_at_step=2) == 75
    before = configuration(tmp_path / "out")
    assert train(flags, stop_at_step=4, learning_rate=1e-3, allow_change="lr") == 75
    damaged = tmp_path / "out" / "checkpoints" / "step_00000004" / "shard-0-of-1.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert train(flags) == 0
    after = configuration(tmp_path / "out")
    assert {name: after[name] for name in NAMES} == {name: before[name] for name in NAMES}
    assert "auto: as in step_00000002" in (tmp_path / "out" / "config.yaml").read_text()


@pytest.fixture(scope="module")
def second(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with the tokenizer of the other one."""
    place = tmp_path_factory.mktemp("second")
    lines = [json.dumps({"text": text}) + "\n" for text in sentences(5, 60)]
    (place / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    command = ["prepare", str(place / "text.jsonl"), "--tokenizer", str(prepared / "tokenizer")]
    assert minimind([*command, "--out", str(place / "data")]) == 0
    return place / "data"


@pytest.mark.parametrize("has_sources", [False, True])
def test_rows_that_are_left_out_are_no_text_of_the_rules(
    prepared, second, tmp_path, capsys, has_sources
):
    """With the whole text a step has 16 rows, and the warm-up is longer than the run."""
    flags = {"max_steps": None, "epochs": 2, "cache_dir": str(tmp_path / "cache")}
    folders = [prepared]
    if has_sources:
        folders.append(second)
        flags["source"] = [f"a={prepared}:1", f"b={second}:1"]
    else:
        flags["data_path"] = [str(prepared)]
    rows = [
        json.loads((folder / "manifest.json").read_text())["splits"]["train"]["tokens"] // 33
        for folder in folders
    ]
    skipped = tmp_path / "rows.txt"
    skipped.write_text(f"0:{rows[0] - 10}\n")
    flags |= {"skip_rows": str(skipped), "out_dir": str(tmp_path / "out")}
    shown = dry_run(capsys, **flags)
    assert train({**FLAGS, **flags}) == 0
    found = configuration(tmp_path / "out")
    assert {name: str(found[name]) for name in NAMES} == {name: shown[name] for name in NAMES}
    (end,) = [line for line in events(tmp_path / "out") if line["event"] == "exit"]
    left, in_step = 10 + sum(rows[1:]), found["batch_size"] * found["accumulation_steps"]
    assert in_step <= left
    assert end["step"] == 2 * (left // in_step)
    assert found["warmup_steps"] == end["step"] * 3 // 10
    words = []
    for name, value in {**FLAGS, **flags}.items():
        each = value if isinstance(value, list) else [value]
        words += [f"--{name}={one}" for one in each if one is not None]
    assert minimind(["plan", *words]) == 0
    assert f"auto: --batch_size {found['batch_size']} " in capsys.readouterr().out


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_step_of_more_rows_than_are_left_is_refused(prepared, tmp_path, is_dry):
    rows = json.loads((prepared / "manifest.json").read_text())["splits"]["train"]["tokens"] // 33
    (tmp_path / "rows.txt").write_text(f"0:{rows - 5}\n")
    flags = {**FLAGS, "data_path": [str(prepared)], "skip_rows": str(tmp_path / "rows.txt")}
    with pytest.raises(DataError, match="make 4 rows of 33, fewer than the 8 of one step"):
        train(flags, out_dir=str(tmp_path / "out"), batch_size=8, dry_run=is_dry)


@pytest.mark.parametrize("more", [{}, {"optimizer": "lion"}, {"optimizer": "muon"}])
@pytest.mark.parametrize("length", [{"epochs": 1}, {"max_steps": 40}])
def test_a_flag_without_a_rule_is_its_plain_number_before_the_text_is_read(
    places, tmp_path, capsys, more, length
):
    shown = dry_run(capsys, **{**places, "max_steps": None, **more, **length})
    ruled = {"lion": (), "muon": ("batch_size",), None: rules.RULES}[more.get("optimizer")]
    opened = {name for name in RULED if shown.get(name) == "auto"}
    if "epochs" in length:
        expected = {*ruled, "batch_size"} if ruled else set()
    else:
        expected = {"weight_decay"} & {*ruled}  # by the passes over the text
    assert opened == expected


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_a_batch_of_the_rule_does_not_depend_on_its_division(
    places, tmp_path, capsys, accumulation
):
    flags = {**places, "max_seq_len": 512, "max_steps": 5000, "accumulation_steps": accumulation}
    shown = dry_run(capsys, **flags, out_dir=str(tmp_path / "out"))
    assert int(shown["batch_size"]) * accumulation == 16
