"""Losses that compare each image's two views: BYOL and MoCo-v3.

    rows of the batch     0 1 2 3   4 5 6 7
    images                a b c d   a b c d
    view                  one       two

A batch of n rows has the first views of n / 2 images, then their second views. The
partner of a row is the row n / 2 away: the same image in the other view. A microbatch
may have any rows. The teacher must be given with `whole_batch=True`, and what it reads
must be the whole batch: with replicas, their outputs in the order of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.distillation import (
    require_positive,
    require_tensor,
    teacher_of,
    widened,
)


@dataclass(frozen=True, slots=True)
class Partners:
    """A microbatch's rows, and which of the teacher's rows they are compared with.

    Args:
        student: the student's outputs: (R, D).
        teacher: the teacher's outputs of the whole batch: (n, D), without gradient.
        row: the places of the microbatch's rows in the batch: (R,), int64.
        partner: the places of their partners: (R,), int64.
    """

    student: Tensor
    teacher: Tensor
    row: Tensor
    partner: Tensor

    @property
    def other_view(self) -> Tensor:
        """The teacher's outputs of the partners: (R, D)."""
        return self.teacher[self.partner]


def partners_of(
    output: Any, teachers: Mapping[str, Any], name: str, owner: str
) -> Partners:
    """Find the partners of a microbatch's rows.

    Args:
        output: the student's output of a microbatch: (R, D).
        teachers: the teachers' outputs by name; `.all` (n, D) and `.rows` (R,) of
            int64 are read.
        name: the teacher's name.
        owner: the name of the loss, for errors.

    Raises:
        ModelError: the outputs are no matrices of one width, n is odd, or the rows are
            not as many as the student's.
        ConfigError: there is no teacher of this name.
    """
    found = teacher_of(teachers, name, owner)
    way_out = f"{owner} reads one tensor of each net, (samples, width)"
    student = require_tensor(output, "the student's output", way_out)
    whole = require_tensor(found.all, f"the output of teacher {name!r}", way_out)
    rows, num_rows = found.rows.to(student.device), len(whole)
    _check(student, whole, len(rows), name)
    partner = (rows + num_rows // 2) % num_rows
    student = widened(student)
    return Partners(student, whole.detach().to(student.dtype), rows, partner)


def _check(student: Tensor, whole: Tensor, num_rows: int, name: str) -> None:
    shapes = (
        f"the student's output of a microbatch is {tuple(student.shape)}, that of "
        f"teacher {name!r} of the whole batch is {tuple(whole.shape)}"
    )
    if student.dim() != 2 or whole.dim() != 2 or student.shape[1] != whole.shape[1]:
        raise ModelError(
            f"{shapes}: both must be (samples, width) with one width. End both nets in "
            "projections of one width, and the student in a predictor that keeps it"
        )
    if len(student) != num_rows:
        raise ModelError(f"{shapes}, in which this microbatch has {num_rows} rows")
    if len(whole) % 2:
        raise ModelError(
            f"{shapes}: a batch of two views has an even number of rows, the first "
            "views of all images and then their second views"
        )


@dataclass(frozen=True, slots=True)
class Byol:
    """Predicts the teacher's projection of an image's other view.

        loss = l(q1, z2) + l(q2, z1),   l(q, z) = mean of 2 - 2 cos(q, z)

    Args:
        teacher: the teacher's name.

    Source: Grill et al., arXiv:2006.07733, equation 2 and the line below it.
    """

    teacher: str = "teacher"

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a microbatch: both terms' mean over its rows, twice.

        Args:
            output: the student's predictions of a microbatch: (R, D).
            targets: not read.
            teachers: the teachers' outputs by name; projections (n, D).

        Raises:
            ModelError: the outputs do not match (see `partners_of`).
            ConfigError: there is no teacher of this name.
        """
        rows = partners_of(output, teachers, self.teacher, "Byol")
        cosine_R = F.cosine_similarity(rows.student, rows.other_view)
        return 2 * (2 - 2 * cosine_R).mean()


@dataclass(frozen=True, slots=True)
class MocoV3:
    """Contrasts each query with the teacher's keys of the other view.

        loss = ctr(q1, k2) + ctr(q2, k1)
        ctr(q, k) = mean over images i of 2 t CE(q_i . k / t, i), q and k normalised

    The keys of all images are contrasted, also those of other microbatches.

    Args:
        temperature: t.
        teacher: the teacher's name.

    Raises:
        ConfigError: the temperature is not above 0.

    Source: Chen et al., arXiv:2104.02057, algorithm 1.
    """

    temperature: float = 0.2
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        """Refuse a temperature that is not positive."""
        require_positive("MocoV3", temperature=self.temperature)

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a microbatch: both terms' mean over its rows, twice.

        Args:
            output: the student's queries of a microbatch: (R, D).
            targets: not read.
            teachers: the teachers' outputs by name; keys (n, D).

        Raises:
            ModelError: the outputs do not match (see `partners_of`).
            ConfigError: there is no teacher of this name.
        """
        rows = partners_of(output, teachers, self.teacher, "MocoV3")
        query_RD = F.normalize(rows.student, dim=-1)
        key_ND = F.normalize(rows.teacher, dim=-1)
        scores_RN = query_RD @ key_ND.T / self.temperature
        half = len(key_ND) // 2
        is_second_N = torch.arange(len(key_ND), device=rows.row.device) >= half
        is_same_view_RN = is_second_N == (rows.row >= half)[:, None]
        scores_RN = scores_RN.masked_fill(is_same_view_RN, -torch.inf)
        return 4 * self.temperature * F.cross_entropy(scores_RN, rows.partner)


# DINO: predicts the teacher's centred, sharpened probabilities of the other view.
#
#     teacher   softmax((z - c) / 0.04)    c: the centre, against one output for all
#     student   softmax(s / 0.1)           0.04 < 0.1: sharpened, against uniform ones
#
# The centre of the paper is a moving average over batches. Here it is the mean of the
# batch's own outputs (a momentum of 0 in equation 4, one batch earlier), so that the
# loss has no state: no checkpoint needs one, and it does not depend on the order in
# which microbatches are computed.
#
# Source: Caron et al., arXiv:2104.14294, algorithm 1 and equation 4.
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
