"""The loss of a student with a teacher, and what the teacher reads, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation, DistilledLoss, RecordedLoss, in_classes
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


def recorded(top_k: int, weight: float, temperature: float) -> RecordedLoss:
    logits = TEACHER / temperature
    ids = logits.topk(top_k).indices
    return RecordedLoss(in_classes(logits, ids), weight, temperature, ids, vocab_size=40)


def in_classes_by_hand(
    student: Tensor, teacher: Tensor, top_k: int, weight: float, temperature: float
) -> Tensor:
    """The loss of each row from probabilities, a sum over K ids and the rest at each target."""
    rows = []
    for logits, of_teacher, targets in zip(student, teacher, TARGETS, strict=True):
        loss = torch.zeros((), dtype=torch.float64)
        for s, t, target in zip(logits, of_teacher, targets.tolist(), strict=True):
            if target == IGNORED:
                continue
            q, p = (one[:40].div(temperature).softmax(-1) for one in (s, t))
            likeliest = sorted(range(40), key=lambda n: -float(p[n]))[:top_k]
            others = [n for n in range(40) if n not in likeliest]
            pairs = [(p[n], q[n]) for n in likeliest]
            pairs += [(p[others].sum(), q[others].sum())] if others else []
            divergence = sum(one * (one / other).log() for one, other in pairs)
            loss = loss - (1 - weight) * s.log_softmax(-1)[target]
            loss = loss + weight * temperature**2 * divergence
        rows.append(loss)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 3, 39])
def test_the_loss_from_records_is_that_of_k_ids_and_the_rest(top_k: int):
    wide = torch.cat([STUDENT, torch.full((3, 7, 5), 2.0)], dim=-1)  # ids of no token
    leaf, exact = wide.clone().requires_grad_(), wide.double().requires_grad_()
    loss = recorded(top_k, 0.4, 2.0)(leaf, TARGETS)
    expected = in_classes_by_hand(exact, TEACHER.double(), top_k, 0.4, 2.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_with_records_of_every_id_it_is_the_loss_of_the_teacher(temperature: float):
    found, expected = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    loss = recorded(40, 0.4, temperature)(found, TARGETS)
    live = DistilledLoss(TEACHER, 0.4, temperature)(expected, TARGETS)
    torch.testing.assert_close(loss, live, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    live.sum().backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=1e-6)


def test_padding_has_zeros_as_records_and_no_part_in_the_loss():
    def unpacked(records: Tensor) -> tuple[Tensor, Tensor]:
        return records.view(1, 7, 4).float(), records.view(1, 7, 4)[..., 1:]

    rows = SimpleNamespace(unpacked=unpacked, facts={"vocab_size": 40})
    loss = Distillation(None, "", 1.0, 2.0, rows=rows).of({}, torch.zeros(1, 28).long())
    leaf = STUDENT[:1].clone().requires_grad_()
    found = loss(leaf, torch.full((1, 7), IGNORED))
    found.sum().backward()
    assert found.tolist() == [0.0]
    assert leaf.grad is not None
    assert not leaf.grad.any()


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
