"""What a run prints before its first step: its facts and its settings, on every backend."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.deepspeed.document import leaves
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.flags import FLAGS
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.config.schedule import Schedule, plan_schedule
from minimind.train.run_start import DEFAULT_KEYS, cadence_warnings, changed_settings, first_screen
from minimind.train.speed import setting_of
from tests.runtime.test_terminal import use_screen
from tests.train.starts import require_labels, start_of, unbroken_text
from tools.runs import MEETING

train: Any = training  # a package that is called like a function
CPU = torch.device("cpu")
TINY = "--model tiny --max_steps 40 --batch_size 2 --device cpu"
MANY = (
    " --accumulation_steps 2 --learning_rate 0.00123 --min_lr_ratio 0.05 --warmup_steps 2"
    " --schedule linear --weight_decay 0.05 --beta1 0.85 --beta2 0.97 --grad_clip 0.7 --seed 7"
    " --dtype float32 --n_layers 2 --qk_norm --doc_mask --loss chunked --profile"
    " --profile_interval 2 --log_interval 1 --eval_interval 2 --save_interval 2 --keep_last 3"
    " --no-async_save --no-use_flash_attn --gradient_checkpointing --val_fraction 0.02"
    " --max_document_bytes 1000000 --on_bad_data skip --num_workers 0 --dist_timeout 90"
    " --max_skipped 3 --compile off --no-tie_word_embeddings"
    " --report_to tensorboard --wandb_project some_project"
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


FACTS: dict[str, Any] = {
    "step": 0,
    "resume_from": None,
    "micro_batch_rows": 2,
    "accumulation_steps": 2,
    "group_size": 1,
    "dtype": "bfloat16",
    "device": "cpu",
    "compile": "off",
    "peak_tflops": 2.0,
    "peak_source": "--peak_tflops",
    "parameters": 2_361_024,
    "trained": None,
    "vocabulary": 4096,
    "unused_ids": 12,
    "text": ["a.jsonl", "b.jsonl"],
    "text_tokens": 277_519,
    "held_out_rows": 15,
    "held_out_rows_read": 8,
    "held_out_rows_of_text": 21,
    "skipped": {"count": 12, "listed": 12, "bytes": 0},
    "tokens_per_step": 1024,
    "tokens_at_end": 40_960,
    "order": {"rows": 2151, "rows_per_step": 8, "row_tokens": 257},
    "total_steps": 40,
    "steps_per_epoch": 268,
    "rate": "cosine",
}


def resolved_of(line: str, backend: str) -> ResolvedConfig:
    world_size, path = BACKENDS[backend]
    ranks = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    ranks |= {**MEETING, "LOCAL_WORLD_SIZE": "2"}
    flags = parse_flags([*line.split(), "--deepspeed_config", path])
    setup = read_setup(flags, read_launch(ranks if world_size > 1 else {}))
    resolved = setup.resolve()
    return setup.complete(resolved, resolved.run, plan_schedule(flags, 100))


def start(line: str, backend: str) -> list[str]:
    resolved, world_size = resolved_of(line, backend), BACKENDS[backend][0]
    update = "by flat partitions" if resolved.config else None
    facts = {**FACTS, "backend": resolved.backend, "zero_stage": resolved.zero_stage}
    facts |= {"world_size": world_size, "zero_update": update}
    facts["order"] = {**FACTS["order"], "rows_per_step": 4 * world_size}
    capacity = "27.1 MiB each, and the disk has room for 2,930 more"
    return first_screen(facts, resolved, "279,619 of the text", capacity, []).splitlines()


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
    resolved, world_size = resolved_of(TINY + flags, backend), BACKENDS[backend][0]
    engine: Any = SimpleNamespace(resolved=resolved, world_size=world_size, device=CPU)
    weights = [torch.zeros(2, requires_grad=needs) for needs in (True, False, True, True)]
    engine.model, engine.zero_update = SimpleNamespace(parameters=lambda: weights), update
    assert setting_of(engine, plan_schedule(resolved.run, 100)).kernels == kernels


@pytest.mark.parametrize("flags", ["", MANY], ids=["plain", "many flags"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_shows_the_facts_and_every_setting_that_is_no_default(backend: str, flags: str):
    lines = start(TINY + flags, backend)
    require_labels(lines)
    report = unbroken_text(lines)
    for fact in (
        "tiny, 2,361,024 parameters; vocabulary 4,096 (12 of it unused)",
        "a.jsonl and 1 more; 277,519 tokens in 2,151 rows of 257; 8 to 15 of the 21 held out",
        "12 bad documents skipped (rejected.jsonl)",
        f"2 rows x 2 micro-batches x {BACKENDS[backend][0]} process",
        f"= {4 * BACKENDS[backend][0]} rows, 1,024 tokens",
        "40 steps, 40,960 tokens; 268 steps an epoch",
        f"backend {backend.split(',')[0]}",
        "MFU of 2 TFLOP/s (--peak_tflops)",
        "a checkpoint every ",
        "27.1 MiB each, and the disk has room for 2,930 more",
        "max_steps 40 --max_steps",
        "batch_size 2 --batch_size",
        "dim 192 model tiny",
        "compile off " + ("--compile" if flags else "derived: no GPU"),
    ):
        assert fact in report
    assert ("update by flat partitions" in report) == (backend.split(",")[0] == "deepspeed")
    assert "default" not in report.partition("that differ from the defaults")[2]
    if flags:  # nothing is cut
        assert "a_name_that_is_longer_than_the_forty_columns_of_a_value --wandb_run_name" in report
        assert f"/{'long/' * 40}out" in report


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lines_are_as_wide_as_a_narrow_terminal(
    backend: str, columns: int, monkeypatch: pytest.MonkeyPatch
):
    wide = start(TINY, backend)
    use_screen(monkeypatch, columns)
    lines = start(TINY, backend)
    assert max(map(len, lines)) <= min(columns, 100)
    assert sorted(" ".join(lines).split()) == sorted(" ".join(wide).split())  # whole words


def test_a_real_run_prints_the_same_start(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, flags = tmp_path / "out", {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32}
    flags |= {"vocab_size": 600, "batch_size": 2, "device": "cpu", "deepspeed_config": "none"}
    flags |= {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    assert train({**flags, "max_steps": 3, "stop_at_step": 2}, out_dir=str(out)) == 75
    lines = start_of(capsys.readouterr().out)
    require_labels(lines)
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
    resolved = resolved_of(TINY, "deepspeed")
    for name in (n for n in FLAGS if getattr(resolved.run, n) is not None):
        assert f" {name} " in report
    for key, source in resolved.sources.items():
        assert f" {key} " in report
        assert source in report
    assert "--verbose, or" not in report


def changed(line: str, backend: str = "single") -> dict[str, tuple[str, str]]:
    """Value and source of each setting that the first screen shows."""
    table = changed_settings(resolved_of(line, backend))
    rows = re.sub(r"\n {3,}", " ", table).splitlines()  # a long source goes on below it
    return {
        name: (value, source)
        for name, value, source in (re.split("  +", row.strip()) for row in rows)
    }


def test_a_value_of_two_lines_is_one_row():
    resolved = resolved_of(TINY, "single")
    sources = {**resolved.run.sources, "wandb_run_name": resolved.run.sources["max_steps"]}
    run = replace(resolved.run, wandb_run_name="a\nb\x85c", sources=sources)
    (row,) = re.findall("wandb_run_name.*", changed_settings(replace(resolved, run=run)))
    assert r"a\nb" in row


def test_a_value_from_a_file_is_shown_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    document["gradient_clipping"] = 0.5
    document["zero_optimization"]["reduce_scatter"] = False
    (tmp_path / "ds.json").write_text(json.dumps(document))
    monkeypatch.setitem(BACKENDS, "mine", (2, "ds.json"))
    found = changed(TINY, "mine")
    assert found["grad_clip"] == ("0.5", "ds.json: gradient_clipping")
    assert found["zero_optimization.reduce_scatter"] == ("false", "ds.json")
    (tmp_path / "run.yaml").write_text("batch_size: 4\nlog_interval: 10\n")
    found = changed("--config run.yaml")
    assert found["batch_size"] == ("4", "--config run.yaml")


def test_a_default_of_an_optimizer_is_no_changed_setting():
    found = changed(f"{TINY} --optimizer muon")
    assert found["optimizer"] == ("muon", "--optimizer")
    assert not [name for name in found if name.startswith("muon_")]


def test_the_shipped_file_has_no_literal_that_a_start_would_show():
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    literals = {key: value for key, value in leaves(document).items() if value != "auto"}
    assert literals.pop("zero_optimization.stage") == 2  # in the backend's line
    assert literals == DEFAULT_KEYS
    path = str(DEFAULT_DEEPSPEED_CONFIG)
    assert not [source for _, source in changed(TINY, "deepspeed").values() if source == path]


def test_what_deepspeed_does_without_a_key_is_what_its_own_models_say():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: TID251 (its defaults)

    ours = {
        k.split(".")[1]: v for k, v in DEFAULT_KEYS.items() if k.startswith("zero_optimization")
    }
    assert ours == {name: DeepSpeedZeroConfig.model_fields[name].default for name in ours}


def test_keys_of_stage_3_are_shown_at_stage_3_alone(tmp_path: Path, monkeypatch):
    assert "stage3_" not in str(changed(TINY, "deepspeed"))
    path = DEFAULT_DEEPSPEED_CONFIG.parent / "deepspeed" / "zero3.json"
    monkeypatch.setitem(BACKENDS, "stage 3", (2, str(path)))
    assert "stage3_prefetch_bucket_size" in str(changed(TINY, "stage 3"))


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
