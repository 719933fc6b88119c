"""The clipping in force is the flag's: one step of SGD at rate 1 moves the weights by that norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minimind.architecture.select import MiniMind
from minimind.checkpoint.directory import published_checkpoints
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.checkpoint.weights import load_weights
from tests.conftest import SHAPE, Launcher

pytestmark = pytest.mark.launch
ONE_STEP = "--dtype float32 --max_steps 1 --learning_rate 1 --schedule constant --weight_decay 0"


def test_one_step_moves_the_weights_by_exactly_the_clipping_norm(forked: Launcher, tmp_path: Path):
    written = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    written["optimizer"] = {"type": "SGD", "params": {"lr": "auto"}}
    config = tmp_path / "sgd.json"
    config.write_text(json.dumps(written))
    out = tmp_path / "out"
    run = forked.run(out, f"{ONE_STEP} --grad_clip 0.25 --deepspeed_config {config}")
    assert run.status == 0, run.stderr
    (step,) = run.events("step")
    assert step["clipped"]
    assert step["grad_norm"] > 0.25
    torch.manual_seed(42)
    model = MiniMindForCausalLM(
        MiniMind().config(parse_flags(SHAPE.split()), SentencePieceTokenizer(out / "tokenizer"))
    )
    after = load_weights(published_checkpoints(out / "checkpoints")[0])
    moved = [(after[name] - p.detach()).double() for name, p in model.named_parameters()]
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.25, rel=1e-5)
