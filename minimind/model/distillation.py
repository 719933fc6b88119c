"""Distillation: a loss that compares a student's logits with those of a teacher (--teacher)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.model.loss import IGNORED, next_token_loss
from minimind.model.masks import eos_starts

LOWEST = torch.finfo(torch.float32).min  # a logit of no weight; -inf has no gradient


@dataclass(frozen=True)
class DistilledLoss:
    """(1 - weight) cross-entropy + weight T^2 KL(teacher || student), for rows of a teacher.

    The KL divergence is of the distributions at temperature T, whose gradient T^2 keeps at the
    scale of the cross-entropy (Hinton et al. 2015). It has the ids that both models have:
    embeddings may have more rows than the tokenizer ids.
    """

    teacher_BTV: Tensor = field(compare=False)  # DeepSpeed asks if tensor-parallel ranks' are equal
    weight: float
    temperature: float

    def __call__(self, student_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the sums over the targets of each row, float32, (B,)."""
        entropy_B, _ = next_token_loss(student_BTV, targets_BT, by_row=True)
        student, teacher = self.log_probabilities(student_BTV)
        kl_BT = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        kl_B = torch.where(targets_BT == IGNORED, 0.0, kl_BT).sum(-1)
        return (1 - self.weight) * entropy_B + self.weight * self.temperature**2 * kl_B

    def log_probabilities(self, student_BTV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher for the same classes, float32."""
        ids = min(student_BTV.shape[-1], self.teacher_BTV.shape[-1])
        student, teacher = (
            F.log_softmax(logits[..., :ids].float() / self.temperature, dim=-1)
            for logits in (student_BTV, self.teacher_BTV)
        )
        return student, teacher


@dataclass(frozen=True)
class RecordedLoss(DistilledLoss):
    """The same from what was recorded of a teacher: K + 1 log-probabilities in place of its logits.

    K classes are ids, and the last one is all other ids together.
    """

    ids_BTK: Tensor = field(compare=False)
    vocab_size: int  # ids of the teacher

    def log_probabilities(self, student_BTV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher, float32, (B, T, K + 1)."""
        logits = student_BTV[..., : self.vocab_size].float() / self.temperature
        return in_classes(logits, self.ids_BTK), self.teacher_BTV


def in_classes(logits_BTV: Tensor, ids_BTK: Tensor) -> Tensor:
    """Log-probabilities of the ids, and of all others together, (B, T, K + 1).

    Without others the last is so low that its probability is 0.
    """
    rest_BT1 = logits_BTV.scatter(-1, ids_BTK, LOWEST).logsumexp(-1, keepdim=True)
    return F.log_softmax(torch.cat([logits_BTV.gather(-1, ids_BTK), rest_BT1], -1), dim=-1)


def loss_name(teacher: str, weight: float, temperature: float) -> str:
    """What tells the loss of a run from other losses."""
    name = f"{1 - weight:g} cross-entropy + {weight:g} KL from teacher {teacher}"
    return name if temperature == 1 else f"{name} at temperature {temperature:g}"


@dataclass(frozen=True)
class Distillation:
    """The loss of a run with a teacher, or with its records, which rows have after their tokens."""

    teacher: Any  # a model in eval mode, without gradients; None with records
    name: str
    weight: float  # of the KL divergence; the cross-entropy has the rest
    temperature: float
    eos_id: int | None = None  # at which the documents of a row start; None: they see one another
    rows: Any = None  # the TeacherRows; None without records

    def of(self, inputs: dict[str, Tensor], records: Tensor | None = None) -> DistilledLoss:
        """The loss of logits and targets for these arguments of the student, or these records.

        The teacher sees as much of a row as the student does.
        """
        if self.rows is not None:
            log_probs, ids = self.rows.unpacked(records)
            ids_of_all = self.rows.facts["vocab_size"]
            return RecordedLoss(log_probs, self.weight, self.temperature, ids, ids_of_all)
        ids, starts = inputs["input_ids"], inputs.get("document_starts")
        if starts is None and self.eos_id is not None:
            starts = eos_starts(ids, None, self.eos_id)
        with torch.no_grad():
            out = self.teacher(input_ids=ids, document_starts=starts, use_cache=False)
        return DistilledLoss(out.logits, self.weight, self.temperature)

    def recorded(
        self, inputs: dict[str, Tensor], top_k: int, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T, K + 1) and ids (B, T, K) for a `RecordedLoss`."""
        logits = self.of(inputs).teacher_BTV[..., :vocab_size].float() / self.temperature
        ids = logits.topk(top_k).indices
        return in_classes(logits, ids), ids
