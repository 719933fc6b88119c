"""The loss of a student with a teacher, and what the teacher reads, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation, DistilledLoss
from minimind.model.loss import IGNORED, next_token_loss

DRAW = torch.Generator().manual_seed(1)
STUDENT, TEACHER = (3 * torch.randn(3, 7, 40, generator=DRAW) for _ in range(2))
TARGETS = torch.randint(40, (3, 7), generator=DRAW)
TARGETS[0, 2:5] = TARGETS[2] = IGNORED  # a row of padding
SHAPE: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def by_hand(student: Tensor, weight: float, temperature: float) -> Tensor:
    """The loss of each row of float64 logits, from its targets alone."""
    rows = []
    for logits, teacher, targets in zip(student, TEACHER.double(), TARGETS, strict=True):
        chosen = targets != IGNORED
        ids = logits.shape[-1]
        entropy = F.cross_entropy(logits[chosen], targets[chosen], reduction="sum")
        divergence = F.kl_div(
            (logits[chosen] / temperature).log_softmax(-1),
            (teacher[chosen, :ids] / temperature).softmax(-1),
            reduction="sum",
        )
        rows.append((1 - weight) * entropy + weight * temperature**2 * divergence)
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_loss_and_gradient_are_those_of_kl_div(weight: float, temperature: float):
    leaf, exact = STUDENT.clone().requires_grad_(), STUDENT.double().requires_grad_()
    loss = DistilledLoss(TEACHER, weight, temperature)(leaf, TARGETS)
    expected = by_hand(exact, weight, temperature)
    assert loss.shape == expected.shape
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert not leaf.grad[TARGETS == IGNORED].any()


def test_the_gradient_has_the_scale_of_the_cross_entropy_at_any_temperature():
    """For nearly uniform logits the factor T^2 cancels the temperature."""
    norms = []
    for temperature in (1.0, 4.0):
        leaf = (STUDENT / 1e3).requires_grad_()
        DistilledLoss(TEACHER / 1e3, 1.0, temperature)(leaf, TARGETS).sum().backward()
        assert leaf.grad is not None
        norms.append(float(leaf.grad.norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_without_weight_it_is_the_cross_entropy_to_the_bit():
    found, expected = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    loss = DistilledLoss(TEACHER, 0.0, 2.0)(found, TARGETS)
    plain, _ = next_token_loss(expected, TARGETS, by_row=True)
    assert torch.equal(loss, plain)
    loss.sum().backward()
    plain.sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


def test_the_divergence_from_itself_is_0():
    leaf = STUDENT.clone().requires_grad_()
    loss = DistilledLoss(STUDENT, 1.0, 2.0)(leaf, TARGETS)
    loss.sum().backward()
    assert not loss.any()
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) < 1e-6


def test_rows_of_an_embedding_that_the_other_lacks_are_left_out():
    """The cross-entropy keeps all logits of the student."""
    padded = torch.cat([TEACHER, torch.full((3, 7, 5), 30.0)], dim=-1)
    same = DistilledLoss(padded, 0.4, 2.0)(STUDENT, TARGETS)
    assert torch.equal(same, DistilledLoss(TEACHER, 0.4, 2.0)(STUDENT, TARGETS))
    wide = torch.cat([STUDENT, torch.full((3, 7, 5), 2.0)], dim=-1)
    entropy, _ = next_token_loss(wide, TARGETS, by_row=True)
    expected = 0.6 * entropy + 0.4 * by_hand(STUDENT.double(), 1.0, 2.0)
    found = DistilledLoss(TEACHER, 0.4, 2.0)(wide, TARGETS).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def logits_of(distillation: Distillation, **inputs: Tensor) -> Tensor:
    return distillation.of(inputs).teacher_BTV


def test_the_teacher_sees_documents_as_the_student_does():
    torch.manual_seed(3)
    teacher = MiniMindForCausalLM(MiniMindConfig(**SHAPE)).eval()
    ids = torch.tensor([[5, 6, 7, 2, 8, 9, 10]])
    starts = torch.tensor([[0, 0, 0, 1, 0, 0, 0]]).bool()
    apart = torch.cat([teacher(input_ids=part).logits for part in ids.split([3, 4], 1)], 1)
    whole = teacher(input_ids=ids).logits
    plain, masked = (Distillation(teacher, "", 1.0, 1.0, eos_id=eos) for eos in (None, 2))
    for found, expected in (
        (logits_of(plain, input_ids=ids), whole),
        (logits_of(plain, input_ids=ids, document_starts=starts), apart),
        (logits_of(masked, input_ids=ids), apart),
    ):
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (whole - apart).abs().max() > 1e-3
    # Dropout is the student's alone.
    drops: Any = {"dropout": 0.5, "dropout_keys": torch.ones(1, dtype=torch.int64)}
    assert torch.equal(logits_of(plain, input_ids=ids, **drops), logits_of(plain, input_ids=ids))
