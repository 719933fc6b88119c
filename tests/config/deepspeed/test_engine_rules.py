"""What DeepSpeed's configuration object and engine refuse ends a start before the text is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import minimind.train  # noqa: F401 (a module that is called)
from minimind.config.deepspeed.document import put
from minimind.config.deepspeed.resolve import resolve
from minimind.config.deepspeed.rules import tensor_parallel_faults
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.errors import UsageError
from minimind.model.sizes import feed_forward_width
from tests.config.deepspeed.test_normalize import leaves as spelt
from tests.config.deepspeed.test_normalize import replaced, spellings
from tests.conftest import ROOT, SMALL, Trained
from tests.refusals.rows import FOLDER, Row, rows_of
from tools.forking import Nursery

train: Any = sys.modules["minimind.train"]
ZERO = "zero_optimization."


def document(edits: dict[str, Any]) -> dict[str, Any]:
    """The shipped file with these edits."""
    written = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    for key, value in edits.items():
        put(written, key, value)
    return written


def resolved(edits: dict[str, Any], device: str, line: str = "") -> Any:
    return resolve(
        document(edits), "ds.json", with_dtype(parse_flags(line.split()), device, True), 1, device
    )


RIGHT = {
    "no zenflow": ({f"{ZERO}zenflow": None}, "cpu"),
    "quantized weights": ({f"{ZERO}stage": 3, f"{ZERO}zero_quantized_weights": True}, "cuda"),
    "an even bucket": ({f"{ZERO}allgather_bucket_size": 1000}, "cpu"),
    "no norm": ({f"{ZERO}compute_grad_norm": False, "gradient_clipping": 0.0}, "cpu"),
    "the same precision": ({"data_types.param_dtype": "bf16"}, "cpu"),
    "the same precision by another name": ({"data_types.param_dtype": "bfloat16"}, "cpu"),
    "frequencies as they are": ({"data_types.buffer_dtype": "fp32"}, "cpu"),
    "a monitor that is off": ({"comet": {"enabled": False}}, "cpu"),
}


@pytest.mark.parametrize(
    "row", rows_of(FOLDER / "deepspeed_engine.yaml"), ids=lambda row: row.where
)
def test_a_rule_holds_in_every_spelling(row: Row):
    for path, value in spelt(row.json):
        for other in spellings(value):
            if path[-1] == "lr" or (other == value and type(other) is type(value)):
                continue
            with pytest.raises(UsageError):
                resolved(replaced(row.json, path, other), "cuda" if row.gpus else "cpu")


@pytest.mark.parametrize(("edits", "device"), RIGHT.values(), ids=RIGHT.keys())
def test_the_closest_right_one_is_taken(edits, device):
    assert resolved(edits, device).backend == "deepspeed"


# --- of a start ---------------------------------------------------------------------------------


def started(tmp_path: Path, edits: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The flags of a start on a text, with an empty cache."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    (tmp_path / "ds.json").write_text(json.dumps(document(edits)))
    return {
        **{"data_path": [str(tmp_path / "text.jsonl")], "out_dir": str(tmp_path / "out")},
        **{"deepspeed_config": str(tmp_path / "ds.json"), "cache_dir": str(tmp_path / "cache")},
        **{"model": "tiny", "max_steps": 4, "device": "cpu", **more},
    }


def test_deepspeed_writes_its_defaults_into_a_copy(tmp_path, nursery: Nursery):
    """It adds data_routing and data_sampling, which the printed table has no source for."""
    edits = {"data_efficiency": {}, f"{ZERO}stage": 1}
    flags = started(tmp_path, edits, max_seq_len=16, vocab_size=512, eval_rows=0)
    text = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"line {n} of some text"}) + "\n" for n in range(200))
    text.write_text("".join(lines))
    flags["data_path"] = text
    words = [f"--{name}={value}" for name, value in flags.items()]
    argv = [*words, "--verbose"]
    statuses, _, report = nursery.run("train_pretrain", argv, tmp_path / "rank", processes=1)
    assert statuses == [0], report[-3000:]
    kept = json.loads((tmp_path / "out" / "ds_config.resolved.json").read_text())
    assert kept["data_efficiency"] == {}


@pytest.mark.long
def test_a_tracker_that_deepspeed_cannot_open_is_named(trained: Trained, tmp_path: Path):
    """In a process of its own: wandb keeps threads."""
    (tmp_path / "ds.json").write_text(json.dumps(document({"wandb.enabled": True})))
    flags = {**SMALL, "data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    flags |= {"deepspeed_config": str(tmp_path / "ds.json"), "out_dir": str(tmp_path / "out")}
    words = [f"--{name}={value}" for name, value in flags.items()]
    no_key = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_pretrain.py"), *words],
        env={**no_key, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "ds.json: wandb.enabled is true and wandb fails: " in done.stderr.splitlines()[-1]
    assert "give --report_to wandb" in done.stderr.splitlines()[-1]


def of_tensors(line: str) -> list[str]:
    return [fault.sentence for fault in tensor_parallel_faults(parse_flags(line.split()))]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tensor_parallelism_is_taken_at_stages_0_to_2(stage: int):
    line = "--dtype float32 --tensor_parallel 2"
    found = resolve(
        document({f"{ZERO}stage": stage}), "ds.json", parse_flags(line.split()), 2, "cpu"
    )
    assert found.zero_stage == stage


def test_sizes_that_would_divide_the_shape_are_named():
    fault, other = of_tensors("--dim 384 --n_heads 12 --n_kv_heads 4 --tensor_parallel 3")
    assert fault.endswith("with this shape 2, 4 would be possible")
    assert other.startswith("hidden_dim = 1024 (default for dim = 384) is not divisible by")


def test_the_default_width_of_the_feed_forward_is_divided():
    assert feed_forward_width(576) == 1536
    assert of_tensors("--dim 576 --n_heads 12 --n_kv_heads 6 --tensor_parallel 3") == []


@pytest.mark.parametrize("dim", [1, 64, 100, 384, 512, 4096])
def test_the_width_of_a_run_is_that_of_the_model(dim: int):
    assert RunConfig(dim=dim).feed_forward_width == feed_forward_width(dim)
    assert RunConfig(dim=dim, hidden_dim=7).feed_forward_width == 7
