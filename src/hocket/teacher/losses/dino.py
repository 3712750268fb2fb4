"""DINO: predicts the teacher's centred, sharpened probabilities of the other view.

    teacher   softmax((z - c) / 0.04)     c: the centre, against one output for all
    student   softmax(s / 0.1)            0.04 < 0.1: sharpened, against uniform outputs

The centre of the paper is a moving average over batches, and so a state:

    batch              0             1             2
    losses read        c = 0         c1            c2         all microbatches alike
    then, once         advance ▶ c1  advance ▶ c2  ...        c = m c + (1 - m) mean(z)

A loss never moves it, whatever it is called with: neither the trial of a loss before
the first step, nor evaluation, nor a forward that is recomputed. Only `advance` does.

Source: Caron et al., arXiv:2104.14294, algorithm 1 and equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.checks import require_positive, teacher_of, widened
from hocket.teacher.losses.two_views import partners_of


class MovingCentre:
    """A moving average of the teacher's mean outputs, 0 before the first batch.

    Args:
        momentum: m, from 0 (the mean of the last batch) to below 1.

    Raises:
        ConfigError: the momentum is out of range.

    Source: Caron et al., arXiv:2104.14294, equation 4.
    """

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(
                f"MovingCentre(momentum={momentum}): it must be from 0 (the mean of "
                "the last batch) to below 1"
            )
        self.momentum = momentum
        self._value: Tensor | None = None

    def of(self, output_NK: Tensor) -> Tensor:
        """Return the centre on the device of these outputs: (K,).

        Raises:
            ModelError: it was made from outputs of another width.
        """
        if self._value is None:
            return output_NK.new_zeros(output_NK.shape[1])
        if self._value.shape != output_NK.shape[1:]:
            raise ModelError(
                f"the centre is {tuple(self._value.shape)}, and the teacher's outputs "
                f"are {tuple(output_NK.shape)}: it belongs to a teacher of that width; "
                "give Dino a new MovingCentre"
            )
        return self._value.to(output_NK.device, output_NK.dtype)

    @torch.no_grad()
    def advance(self, output_NK: Tensor) -> None:
        """Move the centre by one batch.

        Args:
            output_NK: the teacher's outputs of the whole batch.
        """
        mean_K = output_NK.mean(0)
        self._value = self.of(output_NK).lerp(mean_K, 1.0 - self.momentum)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the centre; empty before the first batch."""
        return {} if self._value is None else {"centre": self._value.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._value = state["centre"].clone() if state else None


@dataclass(frozen=True, slots=True)
class Dino:
    """Predicts the teacher's probabilities of an image's other view.

        loss = H(t1, s2) / 2 + H(t2, s1) / 2
        H(t, s) = mean of -softmax((t - c) / teacher_temperature)
                          . log softmax(s / student_temperature)

    These are the two large views of the paper, without its smaller crops.

    Args:
        student_temperature: above the teacher's.
        teacher_temperature: the lower, the sharper.
        centre: the moving centre, for which `advance` must be called once per batch;
            by default c is the mean of the teacher's outputs of this batch, which needs
            no state.
        teacher: the teacher's name.

    Raises:
        ConfigError: a temperature is not valid.

    Source: Caron et al., arXiv:2104.14294, algorithm 1.
    """

    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    centre: MovingCentre | None = None
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
        centre_K = (
            rows.teacher.mean(0)
            if self.centre is None
            else self.centre.of(rows.teacher)
        )
        target_RK = F.softmax(
            (rows.other_view - centre_K) / self.teacher_temperature, dim=-1
        )
        return F.cross_entropy(rows.student / self.student_temperature, target_RK)

    def advance(self, teachers: Mapping[str, Any]) -> None:
        """Move the centre, once all losses of a batch are computed; once per batch.

        Args:
            teachers: the teachers' outputs of that batch; `.all` is read.
        """
        if self.centre is not None:
            whole = teacher_of(teachers, self.teacher, "Dino").all
            self.centre.advance(widened(whole.detach()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moving centre; empty without one."""
        return {} if self.centre is None else self.centre.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: there is a centre to restore, and this loss has none.
        """
        if self.centre is not None:
            self.centre.load_state_dict(state)
        elif state:
            raise ConfigError(
                "this state has a centre, and Dino() has none: make it with "
                "Dino(centre=MovingCentre()), as when the state was saved"
            )
