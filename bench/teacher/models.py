"""A teacher, a student, and a batch for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import Block

NUM_CLASSES = 32
_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """Two nets of equal blocks, and a batch.

    Args:
        name: in tables.
        width: of all blocks.
        num_teacher_blocks: the teacher's blocks; half are in each of its stages.
        num_student_blocks: the student's blocks; half are in each of its stages.
        num_samples: of a batch.
        num_tokens: of each sample.
        num_microbatches: of the orders that are compared.
    """

    name: str
    width: int
    num_teacher_blocks: int
    num_student_blocks: int
    num_samples: int
    num_tokens: int
    num_microbatches: int

    @property
    def forward_ratio(self) -> float:
        """The teacher's forward of a microbatch, over the student's."""
        return self.num_teacher_blocks / self.num_student_blocks

    def nets(self) -> dict[str, nn.Sequential]:
        """The same weights each time, on every worker."""
        torch.manual_seed(0)
        teacher = nn.Sequential(*self._blocks(self.num_teacher_blocks))
        student = nn.Sequential(*self._blocks(self.num_student_blocks))
        return {"teacher": teacher.eval(), "student": student}

    def twin_nets(self) -> dict[str, nn.Sequential]:
        """Two nets with the same parameters, for a teacher that follows."""
        nets = self.nets()
        return nets | {"teacher": self.nets()["student"]}

    def cut_at(self, *, twins: bool = False) -> dict[str, list[str]]:
        """Return the cut of each net into two equal stages."""
        sizes = {
            "teacher": self.num_teacher_blocks,
            "student": self.num_student_blocks,
        }
        if twins:
            sizes["teacher"] = self.num_student_blocks
        return {name: [str(size // 2)] for name, size in sizes.items()}

    def batch(self) -> tuple[Tensor, Tensor]:
        """The same on every worker."""
        rng = torch.Generator().manual_seed(1)
        size = self.num_samples, self.num_tokens, self.width
        return torch.randn(size, generator=rng), torch.zeros(self.num_samples)

    def _blocks(self, num: int) -> list[nn.Module]:
        return [Block(self.width) for _ in range(num)]


def distill(output: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
    """Soft targets over the first channels of every token, the mean over samples."""
    del targets
    logits, soft = (x[..., :NUM_CLASSES] / _TEMPERATURE for x in (output, teacher))
    log_p, log_q = logits.log_softmax(-1), soft.log_softmax(-1)
    parts = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    return parts.mean() * _TEMPERATURE**2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all contestants."""
    return torch.optim.SGD(parameters, lr=1e-4)


# Teachers' forwards take 1.5 and 2 times as long as their students'.
CASES = {
    case.name: case
    for m in (2, 4)
    for case in (
        Case(f"large {m}", 384, 12, 8, 8, 64, m),
        Case(f"deep {m}", 256, 16, 8, 16, 64, m),
    )
}
