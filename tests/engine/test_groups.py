"""The optimizer of --optimizer: its flags, and steps that it skips."""

from __future__ import annotations

import pytest
import torch

from minimind.config.deepspeed.keys import OPTIMIZER_PARAMS
from minimind.config.flags import FLAGS
from minimind.config.optimizers import OPTIMIZERS
from tests.engine.test_muon import backend_of, gradient_step

KINDS = {
    **{"adamw": {"exp_avg", "exp_avg_sq"}, "muon": {"exp_avg", "exp_avg_sq", "momentum_buffer"}},
    "adamw_8bit": {"exp_avg", "exp_avg_sq"},
    **{"lion": {"exp_avg"}, "sgd": {"momentum_buffer"}, "sgd --sgd_momentum 0": set[str]()},
}


@pytest.mark.parametrize("optimizer", ["lion --beta1 0.8 --beta2 0.7", "sgd --sgd_momentum 0.8"])
def test_the_flags_reach_the_optimizer(optimizer):
    backend = backend_of(f"--optimizer {optimizer} --weight_decay 0.3 --learning_rate 2e-3")
    matrices, gains = backend.torch_optimizer.param_groups
    assert (matrices["weight_decay"], gains["weight_decay"]) == (0.3, 0.0)
    assert matrices["lr"] == gains["lr"] == 2e-3
    read = {"betas": (0.8, 0.7)} if "lion" in optimizer else {"momentum": 0.8, "nesterov": False}
    assert {name: matrices[name] for name in read} == read


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_says_what_the_class_keeps_and_which_flags_and_parameters_it_reads(name):
    row, backend = OPTIMIZERS[name], backend_of(f"--optimizer {name}")
    gradient_step(backend)
    assert type(backend.torch_optimizer).__name__ == row.class_name
    kinds = {key.split("|")[0] for key, _ in backend.state().slices(0, 1)}
    assert kinds == {"fp32", *row.kinds}
    assert FLAGS.keys() >= {*row.flags} >= {*row.defaults} >= {*row.params.values()}
    assert all(FLAGS[flag].default in (None, False) for flag in row.defaults)
    for kind in row.types:
        assert {*row.params, *row.fixed} <= {*OPTIMIZER_PARAMS[kind].split()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", KINDS)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_no_moment(optimizer, dtype):
    backend = backend_of(f"--dtype {dtype} --optimizer {optimizer}")
    gradient_step(backend)
    before = {key: value.clone() for key, value in backend.state().slices(0, 1)}
    assert {key.split("|")[0] for key in before} == {"fp32", *KINDS[optimizer]}
    norm = gradient_step(backend, scale=float("inf"))
    assert not torch.isfinite(norm)
    assert backend.counters()["skipped_steps"] == 1
    for key, value in backend.state().slices(0, 1):
        assert torch.equal(value, before[key]), key
    gradient_step(backend)
    assert backend.counters()["skipped_steps"] == 1
    assert any(not torch.equal(v, before[key]) for key, v in backend.state().slices(0, 1))
