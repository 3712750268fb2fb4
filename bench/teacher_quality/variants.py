"""What is compared: how old weights are, and whether there is a teacher at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Byol:
    """Delays of both nets, in updates.

    Args:
        title: in tables.
        student: the student's delay.
        teacher: the teacher's delay.
        trains: whether anything is trained; else the first weights are evaluated.
    """

    title: str
    student: int = 0
    teacher: int = 0
    trains: bool = True


@dataclass(frozen=True, slots=True)
class Distilled:
    """The weights of the student's two losses.

    Args:
        title: in tables.
        soft: the weight of T^2 KL(teacher || student).
        hard: the weight of the cross-entropy to the classes.
    """

    title: str
    soft: float
    hard: float


BYOL: Final = {
    "untrained": Byol("first weights", trains=False),
    "delay 0": Byol("delay 0"),
    "delay 1": Byol("teacher's delay 1", teacher=1),
    "both stale": Byol("both nets' delay 1", student=1, teacher=1),
}
# The student alone does the same forwards, and draws the same dropout masks.
DISTILLED: Final = {
    "alone": Distilled("student alone", soft=0.0, hard=1.0),
    "taught": Distilled("student with teacher", soft=0.9, hard=0.1),
}
