"""Mixture of experts against every expert computed for every token, and all that a model does.

Shape letters: B rows, T positions, X routed experts, E model width.
"""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import StaticCache

from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.experts import MixtureOfExperts
from tests.model.references import build

B, T, E, V = 3, 16, 48, 97
KINDS = {
    "as MiniMind": {},
    "weights as they come": {"norm_topk_prob": False},
    "one of many": {"n_routed_experts": 6, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "one of many, normed": {"n_routed_experts": 6, "num_experts_per_tok": 1},
    "all of them": {"n_routed_experts": 3, "num_experts_per_tok": 3},
    "none shared": {"n_shared_experts": 0},
    "two shared": {"n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 3},
}
kinds = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def layer(seed: int = 0, **changes: Any) -> MixtureOfExperts:
    """One mixture, its weights large enough that the gate decides and every expert matters."""
    torch.manual_seed(seed)
    config = MiniMindConfig(dim=E, n_heads=6, intermediate_size=40, use_moe=True, **changes)
    mixture = MixtureOfExperts(config)
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return mixture


def x_BTE(rows: int = B) -> Tensor:
    return torch.randn(rows, T, E, generator=torch.manual_seed(5))


def densely(mixture: MixtureOfExperts, x: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same and its balance loss, token by token over all experts, from the definition."""
    k, X = config.get("num_experts_per_tok", 2), config.get("n_routed_experts", 4)
    w = dict(mixture.named_parameters())

    def expert(name: str, token: Tensor) -> Tensor:
        gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (F.silu(gate @ token) * (up @ token))

    rows, losses = [], []
    for row in x:
        tokens, scores, visits = [], [], torch.zeros(X)
        for token in row:
            p = torch.softmax(w["gate.weight"] @ token, 0)
            best = p.argsort(descending=True)[:k]
            gains = torch.zeros(X).index_fill(0, best, 1.0)
            visits = visits + gains
            weights = (
                p * gains / (p[best].sum() if config.get("norm_topk_prob", True) and k > 1 else 1)
            )
            routed = torch.stack(
                [weights[i] * expert(f"experts.{i}", token) for i in range(X)]
            ).sum(0)
            shared = [
                expert(f"shared_experts.{i}", token)
                for i in range(config.get("n_shared_experts", 1))
            ]
            tokens.append(torch.stack([routed, *shared]).sum(0))
            scores.append(p)
        rows.append(torch.stack(tokens))
        losses.append(X * (visits / (T * k) * torch.stack(scores).mean(0)).sum())
    return torch.stack(rows), 0.01 * torch.stack(losses).mean()


@kinds
def test_output_loss_and_gradients_are_those_of_all_experts_computed(changes: dict[str, Any]):
    mixture, x = layer(**changes), x_BTE().requires_grad_()
    weigh = torch.randn(B, T, E, generator=torch.manual_seed(6))
    inputs = [x, *mixture.parameters()]
    out, aux_loss, load = mixture(x)
    expected, expected_loss = densely(mixture, x, changes)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux_loss, expected_loss, rtol=1e-5, atol=1e-7)
    assert load.sum().item() == pytest.approx(1)
    gradients = torch.autograd.grad((out * weigh).sum() + 100 * aux_loss, inputs)
    wanted = torch.autograd.grad((expected * weigh).sum() + 100 * expected_loss, inputs)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_in_bf16_the_experts_and_their_weights_are_those_of_fp32_within_rounding():
    mixture = layer()
    low = layer().bfloat16()
    x = x_BTE().bfloat16().float()
    for p, q in zip(mixture.parameters(), low.parameters(), strict=True):
        p.data.copy_(q)
    out, aux_loss, _ = mixture(x)
    rounded, rounded_loss, _ = low(x.bfloat16())
    assert (rounded.dtype, rounded_loss.dtype) == (torch.bfloat16, torch.float32)
    scores = torch.softmax(mixture.gate(x), -1).sort(-1, descending=True).values
    is_clear = scores[..., 1] - scores[..., 2] > 0.02  # else rounding may choose another expert
    assert is_clear.float().mean() > 0.7
    error = (rounded.float() - out).abs()[is_clear].max()
    assert error < 0.05 * out.abs().max()
    assert abs(rounded_loss - aux_loss) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_that_no_one_visits_gets_gradients_of_zero(dtype: torch.dtype):
    mixture = layer().to(dtype)
    x = x_BTE().abs().to(dtype)
    mixture.gate.weight.data[2] = -10  # of positive numbers
    out, aux_loss, load = mixture(x)
    (out.float().pow(2).sum() + aux_loss).backward()
    assert load[2] == 0
    for name, p in mixture.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.any()) is ("experts.2." not in name or "shared" in name), name


def test_the_loss_is_alpha_in_balance_and_more_the_less_there_is():
    mixture, x = layer(aux_loss_alpha=0.5), x_BTE().abs()
    mixture.gate.weight.data.zero_()
    assert float(mixture(x)[1].detach()) == pytest.approx(0.5)
    mixture.gate.weight.data[:2] = 10
    _, aux_loss, load = mixture(x)
    assert float(aux_loss.detach()) == pytest.approx(1.0)  # X / C of it: two have all
    assert load.tolist() == [0.5, 0.5, 0, 0]


def test_the_loss_is_the_same_however_the_rows_are_split():
    mixture, x = layer(), x_BTE(4)
    whole = mixture(x)
    parts = [mixture(rows) for rows in x.split(1)]
    for i in (1, 2):
        mean = torch.stack([part[i] for part in parts]).mean(0)
        torch.testing.assert_close(mean, whole[i], rtol=1e-6, atol=1e-8)


def test_by_the_gradient_of_that_loss_alone_the_load_becomes_even():
    mixture, x = layer(aux_loss_alpha=1.0), x_BTE(8) + 0.3
    mixture.gate.weight.data[0] += 0.2
    first = mixture(x)[2]
    optimizer = torch.optim.SGD([mixture.gate.weight], lr=5.0)
    for _ in range(300):
        optimizer.zero_grad()
        mixture(x)[1].backward()
        optimizer.step()
    last = mixture(x)[2]
    assert first.max() > 0.35
    assert last.max() < 0.3
    assert last.min() > 0.2


def moe(**changes: Any) -> Any:
    return build(use_moe=True, **changes)


def ids(rows: int = B, length: int = T) -> Tensor:
    return torch.randint(4, V, (rows, length), generator=torch.manual_seed(7))


def test_parameters_have_the_names_that_other_modules_read():
    names = {name for name, _ in moe(n_shared_experts=2).named_parameters()}
    own = {name for name in names if ".layers.1.mlp." in name}
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    experts = [f"experts.{i}.{part}" for i in range(4) for part in parts]
    experts += [f"shared_experts.{i}.{part}" for i in range(2) for part in parts]
    assert own == {f"model.layers.1.mlp.{name}" for name in ("gate.weight", *experts)}


def test_the_loss_of_labels_has_the_balance_of_all_layers_in_it_while_training_only():
    model = moe()
    plain = model(ids(), labels=ids())
    assert (plain.aux_loss, plain.expert_load) == (None, None)
    model.train()
    out = model(ids(), labels=ids())
    assert out.aux_loss > 0.02
    assert out.expert_load.shape == (2, 4)
    torch.testing.assert_close(out.loss, plain.loss + out.aux_loss)
    halves = [model(half, labels=half, num_items_in_batch=2 * (T - 1)) for half in ids(2).split(1)]
    both = model(ids(2), labels=ids(2))
    torch.testing.assert_close(halves[0].loss + halves[1].loss, both.loss)


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 6}, {"qk_norm": True}, {"doc_mask": True}])
def test_every_parameter_gets_a_gradient_in_every_step(changes: dict[str, Any]):
    for dtype in (torch.float32, torch.bfloat16):
        model = moe(n_routed_experts=8, num_experts_per_tok=1, **changes).to(dtype).train()
        model(ids(1, 2), labels=ids(1, 2)).loss.backward()  # two tokens, so that experts stay idle
        assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_route_as_before_bit_for_bit(reentrant: bool):
    model = moe(aux_loss_alpha=5.0).train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    kept = gradients()
    enable_checkpointing(model, use_reentrant=reentrant)
    again = gradients()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    enable_checkpointing(model, False)
    for block in model.model.layers:
        block.mlp.alpha = 0.0
    without = gradients()
    assert not torch.equal(
        without["model.layers.0.mlp.gate.weight"], kept["model.layers.0.mlp.gate.weight"]
    )


@pytest.mark.parametrize("kind", CheckpointImpl)
def test_blocks_in_a_wrapper_of_torch_route_as_before_bit_for_bit(kind: CheckpointImpl):
    def step(wraps: bool) -> list[Tensor]:
        model = moe(aux_loss_alpha=5.0).train()
        if wraps:
            blocks = set(model.model.layers)
            wrapper = partial(checkpoint_wrapper, checkpoint_impl=kind)
            apply_activation_checkpointing(model, wrapper, blocks.__contains__)
        model(ids(), labels=ids()).loss.backward()  # the next one is as the first
        model.zero_grad()
        out = model(ids(), labels=ids())
        out.loss.backward()
        return [out.loss, out.aux_loss, *(weight.grad for weight in model.parameters())]

    torch.testing.assert_close(step(wraps=True), step(wraps=False), rtol=0, atol=0)


def test_a_forward_pass_that_fails_leaves_nothing_for_the_next():
    model = moe()
    loss = model(ids(), labels=ids()).loss

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.train()(ids(), labels=ids())
    hook.remove()
    out = deepcopy(model).eval()(ids(), labels=ids())
    assert (out.loss, out.aux_loss) == (loss, None)


@torch.no_grad()
def test_cached_pieces_give_the_logits_of_the_whole_and_greedy_text_is_the_same():
    model = moe()
    whole = model(ids()).logits
    cache = StaticCache(config=model.config, max_cache_len=T)
    pieces = [model(part, past_key_values=cache).logits for part in ids().split([6, 1, 9], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    mask = torch.ones(B, 8, dtype=torch.long)
    mask[1, :3] = 0  # left padding
    common: Any = {
        "max_new_tokens": 40,
        "do_sample": False,
        "attention_mask": mask,
        "eos_token_id": None,
    }
    cache_sizes = model.generate(ids(B, 8), use_cache=True, **common)
    assert torch.equal(cache_sizes, model.generate(ids(B, 8), use_cache=False, **common))
    assert cache_sizes.shape == (B, 48)


@torch.no_grad()
def test_a_saved_model_comes_back(tmp_path: Path):
    model = moe(n_routed_experts=5, num_experts_per_tok=3, n_shared_experts=2, norm_topk_prob=False)
    model.save_pretrained(tmp_path)
    again = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert again.config.num_experts_per_tok == 3
    assert not again.config.norm_topk_prob


@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_a_token_than_there_are_is_refused(chosen: int):
    with pytest.raises(ValueError, match=f"num_experts_per_tok={chosen} must be from 1 to"):
        MiniMindConfig(use_moe=True, num_experts_per_tok=chosen)


@torch.no_grad()
def test_a_single_expert_is_the_dense_model():
    one = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 0}
    model, dense = moe(**one), build()
    weights = {n.replace("experts.0.", ""): w for n, w in model.state_dict().items()}
    dense.load_state_dict({n: w for n, w in weights.items() if "mlp.gate." not in n})
    torch.testing.assert_close(model(ids()).logits, dense(ids()).logits, rtol=1e-6, atol=1e-6)
