"""Knowledge distillation: cross-entropy to the targets and to a teacher's soft targets.

Sources: Hinton et al., arXiv:1503.02531, section 2; the sum with two weights is that of
TSPipe's benchmark (CE + weight * T^2 * KL, with T = 4 and weight 0.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hocket.teacher.losses.checks import (
    require_labels,
    require_positive,
    require_same_shape,
    require_tensor,
    require_weights,
    teacher_of,
    widened,
)

_SAME_CLASSES = "train both with the same classes, in the same order"


@dataclass(frozen=True, slots=True)
class Distillation:
    """Trains the student on targets and on a teacher's probabilities.

        loss = hard_weight * CE(student, targets)
             + weight * T^2 * KL(softmax(teacher / T) || softmax(student / T))

    Logits are (N, K), or (N, T, K) for T tokens; targets are their classes (N) or
    (N, T). Both terms are means over the targets other than `ignore_index`. Where their
    number differs by microbatch, `TokenMean` makes the mean over all of them exact:

        loss = hocket.Distillation(temperature=2.0)
        hocket.Pipeline(student, hocket.TokenMean(loss, count=loss.count), ...)

    Args:
        temperature: T; its square keeps the soft gradient's size when T changes.
        weight: the weight of the soft targets' loss.
        hard_weight: the weight of the cross-entropy to the targets. With 0, targets
            still say which tokens count.
        ignore_index: the target of samples or tokens that do not count.
        teacher: the teacher's name.

    Raises:
        ConfigError: the temperature or a weight is not valid.

    Source: Hinton et al., arXiv:1503.02531, section 2.
    """

    temperature: float = 4.0
    weight: float = 0.1
    hard_weight: float = 1.0
    ignore_index: int = -100
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        """Refuse numbers that make no loss."""
        require_positive("Distillation", temperature=self.temperature)
        require_weights(
            "Distillation", weight=self.weight, hard_weight=self.hard_weight
        )

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return the losses `loss`, which is trained, `soft` (with T^2) and `hard`.

        Args:
            output: the student's logits; or a mapping with `logits`.
            targets: the classes.
            teachers: the teachers' outputs by name; `.own` is read.

        Raises:
            ModelError: the shapes of logits and targets do not match.
            ConfigError: there is no teacher of this name.
        """
        found = teacher_of(teachers, self.teacher, "Distillation").own
        student = logits_of(output, "the student's output")
        teacher = logits_of(found, f"the output of teacher {self.teacher!r}")
        require_same_shape(student, teacher, self.teacher, "logits", _SAME_CLASSES)
        labels = require_labels(targets, student)
        hard = F.cross_entropy(
            student.flatten(0, -2), labels.flatten(), ignore_index=self.ignore_index
        )
        soft = masked_mean(
            soft_loss(student, teacher, self.temperature), labels != self.ignore_index
        )
        loss = self.hard_weight * hard + self.weight * soft
        return {"loss": loss, "soft": soft, "hard": hard}

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of targets that count, for `hocket.TokenMean`."""
        return (targets != self.ignore_index).sum()


def logits_of(output: Any, whose: str) -> Tensor:
    """Return a net's logits: its output, or the entry `logits` of a mapping.

    Raises:
        ModelError: there are none.
    """
    found = output.get("logits") if isinstance(output, Mapping) else output
    way_out = "return the logits as a tensor, or in a mapping under 'logits'"
    return widened(require_tensor(found, whose, way_out))


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student) of probabilities softened by T.

    Args:
        student: logits (..., K).
        teacher: logits (..., K); no gradient goes there.
        temperature: T.

    Returns:
        (...): one number for each row of logits.
    """
    log_q = F.log_softmax(student / temperature, dim=-1)
    log_p = F.log_softmax(teacher.detach() / temperature, dim=-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    return temperature**2 * kl.sum(-1)


def masked_mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over values that count; NaN where none does, as torch's losses.

    Indices would make an accelerator wait for the host.
    """
    return values.where(counted, 0.0).sum() / counted.sum()
