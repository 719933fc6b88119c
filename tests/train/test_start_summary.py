"""What a run prints before its first step: in 20 lines of 100 columns, on every backend."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tqdm.utils import disp_len

import minimind.train as training
from minimind.checkpoint.directory import TrainState
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.deepspeed.document import leaves
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, FLAGS
from minimind.config.schedule import Schedule, plan_schedule
from minimind.data.rows.order import Order
from minimind.train.summary import (
    DEFAULT_KEYS,
    balance_of,
    cadence_warnings,
    labelled_lines,
    non_default_settings,
    setting_of,
    shorten,
    startup_summary,
)
from tests.train.starts import require_fit, start_of, unbroken_text

train: Any = training  # a package that is called like a function
TINY = "--model tiny --max_steps 40 --batch_size 2 --device cpu"
MANY = (
    " --accumulation_steps 2 --learning_rate 0.00123 --min_lr_ratio 0.05 --warmup_steps 2"
    " --schedule linear --weight_decay 0.05 --beta1 0.85 --beta2 0.97 --grad_clip 0.7 --seed 7"
    " --dtype float32 --n_layers 2 --qk_norm --doc_mask --loss chunked --profile"
    " --profile_interval 2 --log_interval 1 --eval_interval 2 --save_interval 2 --keep_last 3"
    " --no-async_save --no-use_flash_attn --gradient_checkpointing --val_fraction 0.02"
    " --max_document_bytes 1000000 --on_bad_data skip --num_workers 0 --dist_timeout 90"
    " --max_skipped 3 --compile off --wandb_project some_project --no-tie_word_embeddings"
    " --wandb_run_name a_name_that_is_longer_than_the_forty_columns_of_a_value"
    " --deterministic --sample_interval 5 --max_minutes 90 --text_field content --eval_rows 32"
    f" --out_dir /{'long/' * 40}out --data_path {'text/' * 40}a.jsonl b.jsonl"
)
BACKENDS = {
    "single": (1, "none"),
    "ddp": (2, "none"),
    "deepspeed": (2, str(DEFAULT_DEEPSPEED_CONFIG)),
    "deepspeed, one process": (1, str(DEFAULT_DEEPSPEED_CONFIG)),
}


def stand_in(line: str, backend: str) -> tuple[Any, Any]:
    """(RunContext, Prepared) with what `startup_summary` reads."""
    world_size, path = BACKENDS[backend]
    ranks = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    flags = parse_flags([*line.split(), "--deepspeed_config", path])
    setup = read_setup(flags, read_launch(ranks if world_size > 1 else {}))
    schedule = plan_schedule(flags, 100)
    resolved = setup.resolve(schedule)
    engine = SimpleNamespace(
        resolved=resolved,
        parameters=2_361_024,
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=4096)),
        world_size=world_size,
        parallel=resolved.run.parallel(world_size),
        device=torch.device("cpu"),
        zero_update="by flat partitions" if resolved.config else "",
    )
    order = Order(2_151, 8, seed=0)
    context = SimpleNamespace(
        run=resolved.run,
        schedule=schedule,
        engine=engine,
        batches=SimpleNamespace(order=order, tokens_per_step=1_024),
        held_out=SimpleNamespace(rows=range(15), reads=15, may_grow=True, total=2_151),
    )
    prepared = SimpleNamespace(
        train=range(277_519),
        val=range(2_100),
        tokenizer=SimpleNamespace(unused=0),
        manifest={"rejected": {"count": 12, "listed": 12, "bytes": 0}},
    )
    return context, prepared


def start(line: str, backend: str, path: Path | None = None) -> list[str]:
    context, prepared = stand_in(line, backend)
    resumed: Any = SimpleNamespace(path=path, state=TrainState(0))
    balance = balance_of(context, prepared)
    return startup_summary(
        context, prepared, resumed, balance, "27.1 MiB each, 2,930 more fit", []
    ).splitlines()


@pytest.mark.parametrize(
    ("flags", "backend", "update", "kernels"),
    [
        (" --profile", "single", "", 4 * 55 + 25 + 24),
        (" --profile --accumulation_steps 2", "single", "", 2 * (4 * 55 + 25) + 4 * 9 + 2 + 24),
        (" --profile", "deepspeed", "by flat partitions", 4 * 55 + 25 + 24),
        (" --profile", "deepspeed", "by DeepSpeed (--zero_update)", 4 * 55 + 25 + 24 + 18 * 3),
        (" --profile --use_moe", "single", "", 0),
        (" --profile --optimizer muon", "single", "", 0),
        (" --profile --gradient_checkpointing", "single", "", 0),
        (" --profile --model hf:some/model", "single", "", 0),
        ("", "single", "", 0),
    ],
)
def test_the_verdict_knows_how_many_kernels_the_host_launches(flags, backend, update, kernels):
    context, _ = stand_in(TINY + flags, backend)
    engine = context.engine
    weights = [torch.zeros(2, requires_grad=needs) for needs in (True, False, True, True)]
    engine.model, engine.zero_update = SimpleNamespace(parameters=lambda: weights), update
    assert setting_of(engine, context.schedule).kernels == kernels


@pytest.mark.parametrize("flags", ["", MANY], ids=["plain", "many flags"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_fits_20_lines_of_100_columns(backend: str, flags: str):
    lines = start(TINY + flags, backend)
    require_fit(lines)
    report = unbroken_text(lines)
    assert "--verbose" in report
    assert f"backend {backend.split(',')[0]}" in report
    assert ("update by flat partitions" in report) == (backend.split(",")[0] == "deepspeed")
    if not flags:
        assert "flags max_steps 40, batch_size 2, device cpu preset dim 192, n_layers 4" in report
        assert "derived compile off, loss full (no GPU)" in report
        assert "default" not in report
        assert "these are not all" not in report


def test_a_real_run_prints_the_same_start(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, flags = tmp_path / "out", {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32}
    flags |= {"vocab_size": 600, "batch_size": 2, "device": "cpu", "deepspeed_config": "none"}
    flags |= {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    assert train({**flags, "max_steps": 3, "stop_at_step": 2}, out_dir=str(out)) == 75
    lines = start_of(capsys.readouterr().out)
    require_fit(lines)
    assert lines[-1] == "start    at step 0"
    assert train({**flags, "max_steps": 3}, out_dir=str(out), verbose=True) == 0
    output = capsys.readouterr().out
    again = start_of(output)
    assert again[-1] == "start    resuming at step 2 from checkpoints/step_00000002 (verified)"
    named = {line.split()[0] for line in again if line.startswith("  ")}
    values = {n for n in FLAGS if n not in ("local_rank", "config")}
    assert {"batch_size", "beta2", "log_interval", "rope_theta"} <= named & values
    assert "verbose" not in (out / "config.yaml").read_text()


def test_verbose_prints_every_flag_and_every_key_of_deepspeed():
    report = unbroken_text(start(f"{TINY} --verbose", "deepspeed"))
    context, _ = stand_in(TINY, "deepspeed")
    resolved = context.engine.resolved
    for name in (n for n in FLAGS if getattr(resolved.run, n) is not None):
        assert f" {name} " in report
    for key, source in resolved.sources.items():
        assert f" {key} " in report
        assert source in report
    assert "--verbose, or" not in report


def differing_of(line: str, backend: str = "single") -> dict[str, str]:
    context, _ = stand_in(line, backend)
    return {
        k: " ".join(words) for k, words in non_default_settings(context.engine.resolved).items()
    }


def test_a_value_from_a_file_is_shown_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    document["gradient_clipping"] = 0.5
    document["zero_optimization"]["reduce_scatter"] = False
    (tmp_path / "ds.json").write_text(json.dumps(document))
    monkeypatch.setitem(BACKENDS, "mine", (2, "ds.json"))
    found = differing_of(TINY, "mine")
    report = "gradient_clipping 0.5, zero_optimization.reduce_scatter false (ds.json)"
    assert found["files"] == report
    (tmp_path / "run.yaml").write_text("batch_size: 4\nlog_interval: 10\n")
    assert differing_of("--config run.yaml")["files"] == "batch_size 4 (--config run.yaml)"


def test_the_shipped_file_has_no_literal_that_a_start_would_show():
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    literals = {key: value for key, value in leaves(document).items() if value != "auto"}
    assert literals.pop("zero_optimization.stage") == 2  # in the backend's line
    assert literals == DEFAULT_KEYS
    assert "files" not in differing_of(TINY, "deepspeed")


def test_what_deepspeed_does_without_a_key_is_what_its_own_models_say():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: TID251 (its defaults)

    ours = {
        k.split(".")[1]: v for k, v in DEFAULT_KEYS.items() if k.startswith("zero_optimization")
    }
    assert ours == {name: DeepSpeedZeroConfig.model_fields[name].default for name in ours}


def test_keys_of_stage_3_are_shown_at_stage_3_alone(tmp_path: Path, monkeypatch):
    assert "stage3_" not in differing_of(TINY, "deepspeed")["derived"]
    path = DEFAULT_DEEPSPEED_CONFIG.parent / "deepspeed" / "zero3.json"
    monkeypatch.setitem(BACKENDS, "stage 3", (2, str(path)))
    assert "stage3_prefetch_bucket_size" in str(differing_of(TINY, "stage 3"))


WARNINGS = [
    ("--save_minutes 0 --save_interval 10000", 0, "no checkpoint before step 40, the last"),
    ("--save_minutes 0 --save_interval 40", 0, "no checkpoint before step 40, the last"),
    ("--save_minutes 0 --save_interval 39", 0, ""),
    ("--save_minutes 0 --save_interval 20", 20, "no checkpoint before step 40, the last"),
    ("--save_interval 10000", 0, ""),
    ("--log_interval 100", 0, "no step line before step 40, the last: --log_interval is 100"),
    ("--log_interval 39", 0, ""),
    ("--log_interval 39", 39, ""),
    ("--log_interval 39", 40, ""),
    ("--warmup_steps 40", 0, "stops at step 40, at the end of its warm-up of 40 steps"),
    ("--warmup_steps 39", 0, ""),
    ("--warmup_steps 20 --stop_at_step 12", 0, "stops at step 12, before the end of its warm-up"),
    ("--warmup_steps 20 --stop_at_step 12", 12, ""),
]


@pytest.mark.parametrize(("flags", "step", "report"), WARNINGS)
def test_a_start_reports_what_will_not_happen_before_the_end(flags: str, step: int, report: str):
    run = parse_flags(f"--max_steps 40 {flags}".split())
    found = cadence_warnings(run, plan_schedule(run, 100), {}, step)
    assert len(found) == bool(report)
    assert report in " ".join(found)


@pytest.mark.parametrize(
    ("scheduler", "warmup"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 50}}, 50),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 39}}, 0),
        ({"type": "OneCycle", "params": {"cycle_first_step_size": 40}}, 40),
        ({"type": "OneCycle"}, 2000),
        ({"type": "LRRangeTest", "params": {}}, 0),
    ],
)
def test_a_scheduler_of_deepspeed_has_its_own_warm_up(scheduler: dict[str, Any], warmup: int):
    schedule = Schedule("cosine", 1e-3, 0.1, 0, 40)
    run = parse_flags(["--max_steps", "40"])
    found = cadence_warnings(run, schedule, {"scheduler": scheduler}, 0)
    assert len(found) == bool(warmup)
    assert not warmup or f"warm-up of {warmup:,} steps" in found[0]


@pytest.mark.parametrize("text", ["a" * 200, "春" * 80, "a b" * 60])
def test_a_long_text_is_shortened_in_the_middle(text: str):
    for most in (11, 40, 41):
        found = shorten(text, most)
        assert most - 1 <= disp_len(found) <= most
        assert (found[0], found[-1]) == (text[0], text[-1])
    assert shorten(text, disp_len(text)) == text


def test_pieces_are_kept_whole_unless_one_is_longer_than_a_line():
    lines = labelled_lines("flags", [f"name_{n} {n}," for n in range(40)])
    assert len(lines) > 3
    assert all(line.endswith(",") for line in lines)
    assert all(disp_len(line) <= 100 for line in labelled_lines("x", ["春 " * 90, "a" * 300]))
