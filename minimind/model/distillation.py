"""Distillation: a loss that compares a student's logits with those of a teacher (--teacher)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.model.loss import IGNORED, next_token_loss
from minimind.model.masks import eos_starts


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
        ids = min(student_BTV.shape[-1], self.teacher_BTV.shape[-1])
        student, teacher = (
            F.log_softmax(logits[..., :ids].float() / self.temperature, dim=-1)
            for logits in (student_BTV, self.teacher_BTV)
        )
        kl_BT = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        kl_B = torch.where(targets_BT == IGNORED, 0.0, kl_BT).sum(-1)
        return (1 - self.weight) * entropy_B + self.weight * self.temperature**2 * kl_B


@dataclass(frozen=True)
class Distillation:
    """The loss of a run with a teacher."""

    teacher: Any  # a model in eval mode, without gradients
    name: str  # tells it from other losses
    weight: float  # of the KL divergence; the cross-entropy has the rest
    temperature: float
    eos_id: int | None  # at which the documents of a row start; None: they see one another

    def of(self, inputs: dict[str, Tensor]) -> DistilledLoss:
        """The loss of logits and targets for these arguments of the student.

        The teacher sees as much of a row as the student does.
        """
        ids, starts = inputs["input_ids"], inputs.get("document_starts")
        if starts is None and self.eos_id is not None:
            starts = eos_starts(ids, None, self.eos_id)
        with torch.no_grad():
            out = self.teacher(input_ids=ids, document_starts=starts, use_cache=False)
        return DistilledLoss(out.logits, self.weight, self.temperature)
