"""What `dtype = auto` becomes: by checkpoint, launcher, DeepSpeed file and device, in a table."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)

from minimind.architecture.costs import Machine
from minimind.architecture.plan import plan
from minimind.config.deepspeed.backend_choice import advice, read_setup
from minimind.config.launcher_env import Launch, read_launch
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError
from minimind.runtime.device import CUDA, KINDS, Host
from minimind.train.agreement import with_common_dtype
from minimind.train.start import Plan

ON, OFF, AUTO = ({"enabled": value} for value in (True, False, "auto"))
BOTH = {"bf16": AUTO, "fp16": AUTO}
CHECKPOINT = "auto: as in step_00000004"
HAS, LACKS = "auto: cpu has bf16 instructions", "auto: cpu has no bf16 instructions"
BF16, FP16 = "ds.json: bf16.enabled", "ds.json: fp16.enabled"
AUTOCAST = "ds.json: torch_autocast.enabled"
YAML = "accelerate launch (YAML or flag): mixed_precision"
# Flags, blocks of the file (None: no DeepSpeed), mixed_precision, dtype of the checkpoint, whether
# the device has bf16 instructions; dtype and its origin.
CASES: dict[str, tuple[str, Any, str, str, bool, str, str]] = {
    "the device": ("", None, "", "", True, "bfloat16", HAS),
    "a slow device": ("", None, "", "", False, "float32", LACKS),
    "auto as a flag": ("--dtype auto", None, "", "", False, "float32", LACKS),
    "a flag": ("--dtype bfloat16", None, "", "", False, "bfloat16", "--dtype"),
    "a flag, resumed": ("--dtype float32", None, "", "bfloat16", True, "float32", "--dtype"),
    "resumed": ("", None, "", "float32", True, "float32", CHECKPOINT),
    "resumed, slow": ("", None, "", "bfloat16", False, "bfloat16", CHECKPOINT),
    "auto in the file": ("", BOTH, "", "", True, "bfloat16", HAS),
    "auto in the file, slow": ("", BOTH, "", "", False, "float32", LACKS),
    "auto in the file, resumed": ("", BOTH, "", "float32", True, "float32", CHECKPOINT),
    "auto in the file, a flag": ("--dtype float32", BOTH, "", "", True, "float32", "--dtype"),
    "fp16 auto alone": ("", {"fp16": AUTO}, "", "", True, "bfloat16", HAS),
    "fp16 auto alone, slow": ("", {"fp16": AUTO}, "", "", False, "float32", LACKS),
    "no block": ("", {}, "", "", False, "float32", LACKS),
    "bf16 on": ("", {"bf16": ON}, "", "", False, "bfloat16", BF16),
    "bf16 on, resumed": ("", {"bf16": ON}, "", "float32", True, "bfloat16", BF16),
    "bf16 on, auto as a flag": ("--dtype auto", {"bf16": ON}, "", "", True, "bfloat16", BF16),
    "bf16 off": ("", {"bf16": OFF}, "", "", True, "float32", BF16),
    "bf16 off, slow": ("", {"bf16": OFF}, "", "", False, "float32", LACKS),
    "fp16 off": ("", {"fp16": OFF}, "", "", True, "bfloat16", HAS),
    "fp16 off, a flag": ("--dtype bfloat16", {"fp16": OFF}, "", "", True, "bfloat16", "--dtype"),
    "autocast on": ("", {"torch_autocast": ON}, "", "", True, "bf16-mixed", AUTOCAST),
    "autocast on, auto beside it": (
        "",
        {**BOTH, "torch_autocast": {**ON, "dtype": "auto"}},
        "",
        "",
        True,
        "bf16-mixed",
        AUTOCAST,
    ),
    "autocast off": ("", {"torch_autocast": OFF}, "", "", True, "bfloat16", HAS),
    "a flag, autocast auto": (
        "--dtype bf16-mixed",
        {**BOTH, "torch_autocast": AUTO},
        "",
        "",
        True,
        "bf16-mixed",
        "--dtype",
    ),
    "resumed under autocast": ("", BOTH, "", "bf16-mixed", True, "bf16-mixed", CHECKPOINT),
    "the launcher": ("", None, "bf16", "", False, "bfloat16", YAML),
    "the launcher, resumed": ("", BOTH, "bf16", "float32", True, "bfloat16", YAML),
    "the launcher leaves it": ("", None, "no", "", True, "bfloat16", HAS),
}


def run_of(words: str, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    if blocks is not None:
        Path("ds.json").write_text(json.dumps({**blocks, "zero_optimization": {"stage": 1}}))
    file = "none" if blocks is None else "ds.json"
    return parse_flags(f"--device cpu --deepspeed_config {file} {words}".split())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_dtype_in_force_and_its_origin(case, tmp_path, monkeypatch):
    words, blocks, launcher, saved, has_bf16, dtype, source = case
    monkeypatch.setattr(Host, "has_bf16", has_bf16)
    run = run_of(words, blocks, tmp_path, monkeypatch)
    if saved and not run.is_explicit("dtype"):
        run = run.with_values(Origin(CHECKPOINT, Rank.RULE), dtype=saved)
    environ = {"ACCELERATE_MIXED_PRECISION": launcher} if launcher else {}
    resolved = read_setup(run, read_launch(environ)).resolve()
    assert (resolved.run.dtype, resolved.run.sources["dtype"]) == (dtype, source)
    if blocks is not None:
        enabled = {name: resolved.config.get(name, {}).get("enabled") for name in ("bf16", "fp16")}
        assert enabled["bf16"] in ((True,) if dtype == "bfloat16" else (False, None))
        assert enabled["fp16"] in (False, None)


def test_float16_is_named_or_refused_on_a_cpu(tmp_path, monkeypatch):
    for words, blocks in (("--dtype float16", None), ("", {"fp16": ON})):
        run = run_of(words, blocks, tmp_path, monkeypatch)
        with pytest.raises(UsageError, match=r"dtype = float16 .* needs a GPU"):
            read_setup(run, Launch()).resolve()


@pytest.mark.parametrize(
    ("blocks", "has_bf16", "notices"),
    [
        ({"fp16": AUTO}, True, 1),
        ({"fp16": AUTO}, False, 1),
        (BOTH, True, 0),
        (BOTH, False, 1),
        ({"bf16": AUTO}, False, 0),
        ({"fp16": OFF}, True, 0),
    ],
)
def test_an_fp16_that_is_auto_is_named_with_what_it_became(
    blocks, has_bf16, notices, tmp_path, monkeypatch
):
    monkeypatch.setattr(Host, "has_bf16", has_bf16)
    setup = read_setup(run_of("", blocks, tmp_path, monkeypatch), Launch())
    resolved = setup.resolve()
    lines = [line for line in advice(setup, resolved) if "fp16.enabled" in line]
    assert len(lines) == notices
    assert {*lines} <= {*advice(setup, resolved, is_start=False)}
    for line in lines:
        assert f'"auto" in ds.json and off: dtype = {resolved.run.dtype} (auto: cpu has' in line


GPUS = {
    "a new one": ([(9, 0)], "bfloat16"),
    "Ampere": ([(8, 0), (8, 6)], "bfloat16"),
    "Turing": ([(7, 5)], "float32"),
    "an old one beside a new one": ([(9, 0), (7, 0)], "float32"),
}


@pytest.mark.parametrize(("gpus", "dtype"), GPUS.values(), ids=GPUS)
def test_every_gpu_of_the_host_decides(gpus, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu=0: gpus[gpu])
    run = parse_flags("--device cuda --deepspeed_config none".split())
    assert read_setup(run, Launch()).resolve().run.dtype == dtype
    assert CUDA.has_bf16 is (dtype == "bfloat16")


def test_a_dry_run_for_another_host_and_a_plan_count_on_instructions(monkeypatch):
    monkeypatch.setattr(Host, "has_bf16", False)
    run = parse_flags("--device cuda --dry_run --deepspeed_config none".split())
    assert read_setup(run, Launch()).resolve().run.dtype == "bfloat16"
    assert ", bfloat16," in plan(["--model", "tiny", "--batch_size", "1"], Machine(1))
    assert with_dtype(parse_flags([]), "mps", KINDS["mps"].has_bf16).dtype == "bfloat16"


RANKS = {
    "all can": (["bfloat16"] * 3, ["bfloat16"] * 3),
    "none can": (["float32"] * 2, ["float32"] * 2),
    "the last cannot": (["bfloat16", "bfloat16", "float32"], ["float32"] * 3),
    "the first cannot": (["float32", "bfloat16", "bfloat16"], ["float32"] * 3),
}


def plan_of(run: RunConfig, launch: Launch) -> Plan:
    setup, unread = read_setup(run, launch), cast(Any, None)
    return Plan(setup, setup.resolve(), unread, unread, None, None, None)


@pytest.mark.parametrize(("here", "chosen"), RANKS.values(), ids=RANKS)
def test_ranks_of_different_devices_train_in_float32(here, chosen):
    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def common(rank: int) -> RunConfig:
        run = parse_flags("--device cpu --deepspeed_config none".split())
        run = with_dtype(run, "cpu", here[rank] == "bfloat16")
        return with_common_dtype(store, plan_of(run, Launch(rank, len(here)))).run

    with ThreadPoolExecutor(len(here)) as pool:
        runs = [*pool.map(common, range(len(here)))]
    assert [run.dtype for run in runs] == chosen
    differs = len({*here}) > 1
    assert all(
        (run.sources["dtype"] == "auto: a rank has no bf16 instructions") is differs for run in runs
    )


def test_ranks_of_which_one_names_the_dtype_keep_what_they_have():
    """The comparison of flags, which follows, names the difference."""
    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=30))
    words = "--device cpu --deepspeed_config none --dtype"
    given = [parse_flags([*words.split(), dtype]) for dtype in ("bfloat16", "float32")]
    with ThreadPoolExecutor(2) as pool:
        plans = [plan_of(run, Launch(n, 2)) for n, run in enumerate(given)]
        found = [*pool.map(lambda plan: with_common_dtype(store, plan), plans)]
    assert found == plans
