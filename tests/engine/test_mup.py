"""muP: which weights start smaller, which rates are scaled, and that its multiplier is the norm.

And weights that start at zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimind.architecture.select import minimind_config
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.config.run_config import RunConfig
from minimind.engine.engine import mean_loss, text_inputs
from minimind.engine.optimizers import mup_line, run_groups, scale_initial_weights
from minimind.engine.plain_backend import PlainBackend
from minimind.model.causal_lm import MiniMindForCausalLM

SHAPE = "--dim 32 --n_heads 4 --n_kv_heads 2 --n_layers 2 --vocab_size 512 --max_seq_len 16"
EXPERTS = "--use_moe --n_routed_experts 2"
ROWS = torch.randint(512, (4, 17), generator=torch.Generator().manual_seed(1))
NORM = "model.norm.weight"


def run_of(line: str) -> RunConfig:
    return parse_flags(f"{SHAPE} --dtype bfloat16 {line}".split())


def model_of(run: RunConfig) -> MiniMindForCausalLM:
    torch.manual_seed(1)
    model = MiniMindForCausalLM(minimind_config(run, eos_token_id=2))
    scale_initial_weights(model, run)
    return model


def backend_of(line: str) -> PlainBackend:
    run = run_of(line)
    model = model_of(run)
    model.to(getattr(torch, run.dtype))
    return PlainBackend(model, model, ResolvedConfig(run, "single"), run_groups(model, run))


def train(backend: PlainBackend, steps: int = 6) -> list[float]:
    losses = []
    for step in range(steps):
        backend.begin(3e-3 * (1 - step / 10))
        loss = mean_loss(backend.module(**text_inputs(ROWS), loss_chunk_size=0))
        backend.backward(loss)
        backend.update(is_last=True)
        losses.append(float(loss.detach()))
    return losses


def kind_of(name: str) -> str:
    if name == NORM:
        return "output"
    if name.endswith("mlp.gate.weight"):
        return "router"
    return "hidden" if "layers" in name and "proj.weight" in name else "other"


@pytest.mark.parametrize(
    "changes", ["", "--no-tie_word_embeddings --qk_norm", "--qkv_bias", EXPERTS]
)
def test_weights_start_as_at_the_base_width_times_a_power_of_the_ratio(changes: str):
    plain, scaled = model_of(run_of(changes)), model_of(run_of(f"{changes} --mup_base_dim 8"))
    factors = {"hidden": 0.5, "router": 0.25, "output": 0.25, "other": 1.0}
    for (name, p), q in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert torch.equal(p * factors[kind_of(name)], q), name


@pytest.mark.parametrize("changes", ["", "--mup_base_dim 8", EXPERTS])
def test_outputs_that_start_at_zero_leave_the_other_weights_and_learn(changes: str):
    line = f"{changes} --zero_init_outputs --dtype float32"
    plain, model = model_of(run_of(changes)), model_of(run_of(line))
    assert model.config.to_dict() == plain.config.to_dict()  # exports know nothing of it
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert torch.equal(p, torch.zeros_like(p) if is_output else q), name
    with torch.no_grad():
        stream = model.model.norm(model.model.embed_tokens(ROWS[:, 1:]))
        expected = torch.nn.functional.linear(stream, model.lm_head.weight)
        assert torch.equal(model(input_ids=ROWS[:, 1:]).logits, expected)
    backend = backend_of(f"{line} --optimizer muon")
    losses = train(backend)
    assert losses[-1] < losses[0]
    assert all(p.count_nonzero() for p in backend.module.parameters())


@pytest.mark.parametrize(
    ("line", "hidden", "router"),
    [
        ("", (0.25, 0.4), (0.25, 0.4)),
        ("--optimizer muon --muon_lr 1e-3", (1.0, 0.1), (0.5, 0.2)),
        ("--optimizer muon --muon_lr 1e-3 --muon_scaling match_rms_adamw", (0.5, 0.2), (0.25, 0.4)),
    ],
)
def test_rate_and_weight_decay_of_every_parameter(line: str, hidden: Any, router: Any):
    """At dim / mup_base_dim = 4; the decay of a step, rate times weight decay, is not scaled."""
    backend = backend_of(
        f"{line} {EXPERTS} --qkv_bias --mup_base_dim 8 --learning_rate 1e-3 --dtype float32"
    )
    assert backend.begin(1e-3) == 1e-3
    found = {
        p: (group["lr"] / 1e-3, group["weight_decay"])
        for group in backend.torch_optimizer.param_groups
        for p in group["params"]
    }
    expected = {"hidden": hidden, "router": router, "output": (0.25, 0.0)}
    for name, p in backend.module.named_parameters():
        of_other = (1.0, 0.1 if p.ndim > 1 else 0.0)
        assert found[p] == pytest.approx(expected.get(kind_of(name), of_other)), name
    backend.begin(5e-4)  # every rate follows the schedule
    for group in backend.torch_optimizer.param_groups:
        assert group["lr"] / 1e-3 == pytest.approx(found[group["params"][0]][0] / 2)


@pytest.mark.parametrize("line", ["", "--optimizer muon", "--dtype float32"])
def test_the_base_width_itself_trains_bit_for_bit_as_without_mup(line: str):
    plain, base = backend_of(line), backend_of(f"{line} --mup_base_dim 32")
    assert train(plain) == train(base)
    for p, q in zip(plain.module.parameters(), base.module.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("head", ["", "--no-tie_word_embeddings"])
def test_the_final_norm_is_the_multiplier_of_the_logits(head: str):
    """Table 8 of Yang et al.: logits / m, with a norm that starts at 1 and has the whole rate."""
    line = f"{head} --mup_base_dim 8 --dtype float32 --grad_clip 0"
    ours, reference = backend_of(line), backend_of(line)
    norm = reference.module.get_parameter(NORM)
    norm.detach().fill_(1.0)
    (group,) = (g for g in reference.torch_optimizer.param_groups if g["params"][0] is norm)
    assert group["params"] == [norm]
    group["lr_scale"] = 1.0
    lm_head: Any = reference.module.get_submodule("lm_head")
    lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 4,))
    losses = train(ours)
    assert losses == pytest.approx(train(reference), abs=2e-5)
    assert losses[-1] < losses[0] - 0.1
    changed = norm.detach() - 1
    assert changed.abs().max() > 0.01
    assert torch.allclose(4 * ours.module.get_parameter(NORM).detach() - 1, changed, atol=1e-4)


def test_the_line_of_the_start_summary_has_every_factor():
    assert mup_line(run_of("")) == ""
    assert mup_line(run_of("--mup_base_dim 8")) == (
        "muP      dim / mup_base_dim = 4; hidden matrices: initial size x 0.5, rate x 0.25, weight"
        " decay x 4; final norm: initial size x 0.25, rate x 0.25; keep dim / n_heads = 8"
    )
    muon = mup_line(run_of(f"--mup_base_dim 8 --optimizer muon {EXPERTS} --init_from weights"))
    assert "hidden matrices: rate x 1, weight decay x 1; routers of experts: rate x 0.5" in muon
