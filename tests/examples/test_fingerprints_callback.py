"""examples/fingerprints_callback.py: plain torch and Trainer against a run of minimind."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from minimind.config.parse import parse_flags
from minimind.engine.build import leave_process_group
from minimind.engine.optimizers import run_groups
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.compare import Side, cause, compare, described, read_side
from tests.recovery.compared import Trial, take
from tools.engines import LENGTH, ORDER, ROWS, TINY, Case, text

RATE, STEPS, DECAY = 2e-3, 3, 0.1
Callback: Any = import_module("examples.fingerprints_callback").Fingerprints


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Side:
    """A run of this project with fingerprints."""
    path = tmp_path_factory.mktemp("ours") / "ours.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
            patch.setenv(variable, value)
        case = Case(None, "float32", flags=f"--weight_decay {DECAY}")
        take(Trial(case, lr=lambda step: RATE), path, STEPS)
    leave_process_group()
    return read_side(str(path))


def fresh_model() -> Any:
    torch.manual_seed(7)
    return MiniMindForCausalLM(MiniMindConfig(**TINY, max_seq_len=LENGTH))


def rows_of(step: int) -> torch.Tensor:
    return text()[torch.from_numpy(ORDER.rows_for(step, 0, 1))]


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_plain_torch_is_compared_with_a_run(eps: float, ours: Side, tmp_path: Path):
    model = fresh_model()
    run = parse_flags(f"--dtype float32 --weight_decay {DECAY} --device cpu".split())
    groups = run_groups(model, run)
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=eps)
    log = Callback(model, tmp_path / "theirs.jsonl")
    for step in range(STEPS):
        log.begin()
        total = 0.0
        for rows in rows_of(step).split(ROWS // 2):
            loss = model(input_ids=rows[:, :-1], shift_labels=rows[:, 1:]).loss / 2
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        log.gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        log.end(step + 1, optimizer, loss=total, grad_norm=float(norm))
    result = compare(ours, read_side(str(tmp_path / "theirs.jsonl")))
    assert result.recorded == len(result.steps)
    if eps == 1e-8:
        assert result.step is None, described(result)
    else:
        assert (result.step, result.found[0].kind) == (1, "fp32"), described(result)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_a_trainer_is_compared_with_a_run(betas: tuple[float, float], ours: Side, tmp_path: Path):
    model = fresh_model()
    rows = torch.cat([rows_of(step) for step in range(STEPS)])
    data = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in rows]
    options = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=RATE,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        weight_decay=DECAY,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    log: Any = Callback(model, tmp_path / "theirs.jsonl")
    Trainer(model, options, train_dataset=data, callbacks=[log]).train()  # pyright: ignore[reportArgumentType] (a list will do)
    result = compare(ours, read_side(str(tmp_path / "theirs.jsonl")))
    if betas[1] == 0.95:
        assert result.step is None, described(result)
    else:
        assert (result.step, result.found[0].kind) == (1, "exp_avg_sq"), described(result)
        assert "by a factor of 0.02" in cause(result)
