"""Loss sum and count against torch's own cross-entropy in float64.

Shape letters: B rows, T positions, V vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.engine.engine import marked_inputs
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.loss import IGNORED, mean_with_nan_grads, next_token_loss

B, T, V = 3, 7, 50


@pytest.fixture
def logits_BTV() -> Tensor:
    return 5 * torch.randn(B, T, V, generator=torch.manual_seed(0))


@pytest.fixture
def targets_BT() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.manual_seed(1))


def expected_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BTV.double().view(-1, V), targets_BT.view(-1), reduction="sum", ignore_index=IGNORED
    )


def test_sum_equals_cross_entropy_in_float64(logits_BTV: Tensor, targets_BT: Tensor):
    loss_sum, count = next_token_loss(logits_BTV, targets_BT)
    assert loss_sum.dtype == torch.float32
    assert loss_sum.shape == count.shape == ()
    assert count == B * T
    torch.testing.assert_close(
        loss_sum.double(), expected_sum(logits_BTV, targets_BT), rtol=1e-6, atol=0
    )


def test_ignored_targets_enter_neither_sum_nor_count(logits_BTV: Tensor, targets_BT: Tensor):
    targets_BT[0, :4] = IGNORED
    targets_BT[2, 6] = IGNORED
    loss_sum, count = next_token_loss(logits_BTV, targets_BT)
    assert count == B * T - 5
    torch.testing.assert_close(
        loss_sum.double(), expected_sum(logits_BTV, targets_BT), rtol=1e-6, atol=0
    )


def test_another_ignored_index_can_be_named(logits_BTV: Tensor, targets_BT: Tensor):
    as_usual = next_token_loss(logits_BTV, targets_BT.masked_fill(targets_BT == 3, IGNORED))
    assert next_token_loss(logits_BTV, targets_BT, ignore_index=3) == as_usual


def test_all_targets_ignored_gives_zero_sum_count_and_gradients(logits_BTV: Tensor):
    logits_BTV.requires_grad_()
    loss_sum, count = next_token_loss(logits_BTV, torch.full((B, T), IGNORED))
    loss_sum.backward()
    assert loss_sum == 0
    assert count == 0
    assert logits_BTV.grad is not None
    assert torch.equal(logits_BTV.grad, torch.zeros(B, T, V))


def test_bf16_logits_are_summed_in_fp32(logits_BTV: Tensor, targets_BT: Tensor):
    low = logits_BTV.bfloat16()
    loss_sum, _ = next_token_loss(low, targets_BT)
    assert loss_sum.dtype == torch.float32
    torch.testing.assert_close(loss_sum.double(), expected_sum(low, targets_BT), rtol=1e-6, atol=0)


def test_targets_of_another_shape_are_refused(logits_BTV: Tensor, targets_BT: Tensor):
    with pytest.raises(ValueError, match=r"targets of shape \(3, 6\) do not fit"):
        next_token_loss(logits_BTV, targets_BT[:, 1:])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3.3333333, 3.4e38])
@pytest.mark.parametrize("also", [None, 2.5, 3.4e38, -3.4e38])
def test_a_finite_loss_and_its_gradient_stay_what_they_are_bit_for_bit(
    value: float, also: float | None
):
    loss, count = torch.tensor(value, requires_grad=True), torch.tensor(2**24 + 1)
    mean = mean_with_nan_grads(loss, count, None if also is None else torch.tensor(also))
    (gradient,) = torch.autograd.grad(mean, loss)
    (expected,) = torch.autograd.grad(loss / count, loss)
    assert mean.dtype == torch.float32
    for one, other in ((mean, loss / count), (gradient, expected)):
        assert torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("is_in_the_loss", [True, False])
def test_no_gradient_of_a_loss_that_is_not_finite_is_finite(value: float, is_in_the_loss: bool):
    weights, count = torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor(3)
    loss = (weights * torch.tensor([1.0, 0.0])).sum() + (value if is_in_the_loss else 0)
    mean_with_nan_grads(loss, count, None if is_in_the_loss else torch.tensor(value)).backward()
    assert weights.grad is not None
    assert not torch.isfinite(weights.grad).any()


@pytest.mark.parametrize("positions", [0, 2, 6, 7, 100])
def test_losses_of_rows_are_those_of_each_row_alone(positions: int):
    """At once, and so many positions of all rows at a time."""
    model = MiniMindForCausalLM(
        MiniMindConfig(vocab_size=V, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, max_seq_len=T)
    ).eval()
    rows = torch.randint(V, (B, T + 1), generator=torch.manual_seed(2))
    rows[1, 4:] = ~rows[1, 4:]
    with torch.no_grad():
        inputs = marked_inputs(rows, has_starts=False)
        found = model(**inputs, loss_chunk_size=positions, loss_by_row=True)
        alone = [
            model(**marked_inputs(row[None], has_starts=False), loss_chunk_size=0) for row in rows
        ]
    torch.testing.assert_close(found.loss_sum, torch.stack([one.loss_sum for one in alone]))
    assert found.targets.tolist() == [int(one.targets) for one in alone] == [T, 3, T]
