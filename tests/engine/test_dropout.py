"""--dropout in an engine: in training alone, and however its rows are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.dropout import row_keys
from minimind.recovery.corruption import replay
from tools.host_reads import counted

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
ROWS = torch.randint(96, (8, 13), generator=torch.Generator().manual_seed(1))
SGD = "--optimizer sgd --sgd_momentum 0 --weight_decay 0 --grad_clip 0 --dropout 0.2"
Build = Callable[..., Engine]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds engines of one process, one after another, with the same weights."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**alone, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)

    def build(flags: str, **shape: Any) -> Engine:
        leave_process_group()
        monkeypatch.setenv("LOCAL_RANK", "0")  # which a process alone removes
        torch.manual_seed(1)
        model = MiniMindForCausalLM(MiniMindConfig(**SHAPE, **shape))
        words = f"--device cpu {flags}".split()
        return build_engine(ResolvedConfig(parse_flags(words), "single"), model, "cpu")

    yield build
    leave_process_group()


def steps_of(engine: Engine, parts: int, rows: Tensor = ROWS, first: int = 0) -> dict[str, Any]:
    """Losses of three steps, the keys that the model was given, and the weights after them."""
    keys, losses, clock = [], [], PhaseClock(engine.device)

    def look(_: Any, __: Any, named: dict[str, Any]) -> None:
        keys.append(named.get("dropout_keys"))

    handle = engine.model.register_forward_pre_hook(look, with_kwargs=True)
    for step in range(3):
        engine.seed(step)
        clock.begin()
        result = engine.step(rows.chunk(parts), 0.1, clock, first=first)
        losses.append(float(result.loss_sum / result.tokens))
    handle.remove()
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return {"losses": losses, "keys": keys, "weights": weights}


def test_micro_batches_have_the_masks_of_the_whole_step(built: Build):
    flags = f"{SGD} --dtype float32"
    whole = steps_of(built(flags), 1)
    for parts in (2, 4):
        found = steps_of(built(f"{flags} --accumulation_steps {parts}"), parts)
        assert torch.equal(torch.cat(found["keys"]), torch.cat(whole["keys"]))
        assert found["losses"] == pytest.approx(whole["losses"], rel=2e-6)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-6)
    off = steps_of(built(flags.replace("--dropout 0.2", "")), 1)
    assert off["keys"] == [None] * 3
    assert off["losses"][0] != pytest.approx(whole["losses"][0], rel=1e-4)


def test_a_share_of_the_rows_has_the_masks_of_its_place(built: Build):
    engine = built(f"{SGD} --dtype float32")
    whole, half = steps_of(engine, 1), steps_of(engine, 2, ROWS[4:], first=4)
    assert torch.equal(
        torch.cat(half["keys"]).view(3, 4), torch.cat(whole["keys"]).view(3, 8)[:, 4:]
    )


@pytest.mark.parametrize("shape", [{}, {"use_moe": True}], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bf16-mixed"])
def test_validation_drops_nothing_and_a_replay_repeats_the_masks(
    built: Build, dtype: str, shape: dict[str, Any]
):
    engine = built(f"--dropout 0.2 --dtype {dtype}", **shape)
    validated, _ = engine.loss_of(ROWS)
    engine.seed(3)
    first, again = (replay(engine, ROWS, rank, is_whole=True) for rank in (0, 1))
    assert first == again
    engine.seed(4)
    assert replay(engine, ROWS, 0, is_whole=True).loss != first.loss
    plain = built(f"--dtype {dtype}", **shape)
    assert torch.equal(validated, plain.loss_of(ROWS)[0])
    plain.seed(3)
    assert replay(plain, ROWS, 0, is_whole=True).loss != first.loss


def test_seed_and_step_decide_the_masks():
    device = torch.device("cpu")
    keys = [row_keys(seed, step, 0, 4, device) for seed in (1, 2) for step in (0, 1)]
    assert len(torch.cat(keys).unique()) == 16


def test_masks_need_no_wait_for_the_device(built: Build):
    engine, clock = built("--dropout 0.2 --dtype float32"), PhaseClock(torch.device("cpu"))
    clock.begin()
    with counted() as reads:
        engine.step([ROWS], 1e-3, clock)
    assert not reads


def test_the_configuration_of_the_model_has_no_dropout(built: Build):
    configs = [
        built(f"{flags} --dtype float32").model.config for flags in (SGD, SGD.split(" --drop")[0])
    ]
    assert configs[0].to_dict() == configs[1].to_dict()
