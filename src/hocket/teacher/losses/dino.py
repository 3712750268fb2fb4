"""DINO: predicts the teacher's centred, sharpened probabilities of the other view.

    teacher   softmax((z - c) / 0.04)     c: the centre, against one output for all
    student   softmax(s / 0.1)            0.04 < 0.1: sharpened, against uniform outputs

The centre of the paper is a moving average over batches. Here it is the mean of the
batch's own outputs (a momentum of 0 in equation 4, one batch earlier), so that the loss
has no state: no checkpoint needs one, and it does not depend on the order in which
microbatches are computed.

Source: Caron et al., arXiv:2104.14294, algorithm 1 and equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hocket.errors import ConfigError
from hocket.teacher.losses.checks import require_positive
from hocket.teacher.losses.two_views import partners_of


@dataclass(frozen=True, slots=True)
class Dino:
    """Predicts the teacher's probabilities of an image's other view.

        loss = H(t1, s2) / 2 + H(t2, s1) / 2
        H(t, s) = mean of -softmax((t - c) / teacher_temperature)
                          . log softmax(s / student_temperature)

    c is the mean of the teacher's outputs of the batch, t of both views. These are the
    two large views of the paper, without its smaller crops.

    Args:
        student_temperature: above the teacher's.
        teacher_temperature: the lower, the sharper.
        teacher: the teacher's name.

    Raises:
        ConfigError: a temperature is not valid.

    Source: Caron et al., arXiv:2104.14294, algorithm 1.
    """

    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        """Refuse temperatures that are not positive, or do not sharpen."""
        student, teacher = self.student_temperature, self.teacher_temperature
        require_positive(
            "Dino", student_temperature=student, teacher_temperature=teacher
        )
        if teacher > student:
            raise ConfigError(
                f"Dino(student_temperature={student}, teacher_temperature={teacher}): "
                "the teacher's must not be above the student's, or its probabilities "
                "are flattened instead of sharpened and the outputs become uniform"
            )

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a microbatch: the mean over its rows.

        Args:
            output: the student's outputs of a microbatch: (R, K).
            targets: not read.
            teachers: the teachers' outputs by name: (n, K).

        Raises:
            ModelError: the outputs do not match (see `partners_of`).
            ConfigError: there is no teacher of this name.
        """
        rows = partners_of(output, teachers, self.teacher, "Dino")
        centre_K = rows.teacher.mean(0)
        target_RK = F.softmax(
            (rows.other_view - centre_K) / self.teacher_temperature, dim=-1
        )
        return F.cross_entropy(rows.student / self.student_temperature, target_RK)
