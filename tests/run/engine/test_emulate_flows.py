"""Teachers with other microbatches than the student's, against a loop by hand."""

from __future__ import annotations

import copy
from itertools import accumulate, pairwise
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hocket
from hocket.core.program import Stage
from hocket.run.data.batch import BatchOutput
from tests.run.support.emulated_nets import (
    CUT,
    SGD,
    assert_close,
    batches,
    chain_model,
    distill,
    two_nets,
)

# Sizes of the microbatches, over all replicas, of 22 samples and two microbatches of
# the student in each of one or two replicas; of the teacher by its microbatches, too.
STUDENT: Final = {1: [11, 11], 2: [6, 6, 5, 5]}
TEACHER: Final = {
    (1, 1): [22],
    (1, 2): [11, 11],
    (1, 4): [6, 5, 6, 5],
    (1, 6): [4, 4, 3, 4, 4, 3],
    (2, 1): [12, 10],
    (2, 4): [3, 3, 3, 3, 3, 2, 3, 2],
}


def edges(sizes: list[int]) -> list[tuple[int, int]]:
    """Return where each microbatch begins and ends."""
    return [*pairwise(accumulate(sizes, initial=0))]


def contrast_rows(output: Tensor, targets: Tensor, teacher: BatchOutput) -> Tensor:
    """Compare each row of the output with the teacher's rows of all samples."""
    del targets
    return F.cross_entropy(output @ teacher.all.T, teacher.rows)


@pytest.mark.parametrize(("num_replicas", "count"), TEACHER)
@pytest.mark.parametrize("reads_batch", [False, True])
def test_a_loss_reads_its_samples_of_a_teachers_other_microbatches(
    num_replicas: int, count: int, *, reads_batch: bool
) -> None:
    """Batch norms see the teacher's own microbatches, which nest in the student's.

    A loss that reads the whole batch reads that of all replicas.
    """
    data, teacher, student = batches(4, 22), chain_model(0).train(), chain_model(1)
    slow, alone = copy.deepcopy(teacher), copy.deepcopy(student)
    others = [copy.deepcopy(alone[1]) for _ in range(num_replicas)]  # batch norms
    slow_others = [copy.deepcopy(slow[1]) for _ in range(num_replicas)]
    loss: Any = contrast_rows if reads_batch else distill
    program = two_nets(
        lambda d: Stage("teacher", d, trainable=False),
        (count, 2),
        num_replicas=num_replicas,
        reads_batch=reads_batch,
    )
    hocket.emulate(
        program,
        {"teacher": teacher, "student": student},
        {"student": loss},
        {"student": SGD},
        data,
        cut_at=CUT,
    )

    norm = others[0]
    optimizer = SGD(
        [*alone[0].parameters(), *norm.parameters(), *alone[2].parameters()]
    )
    for x, y in data:
        optimizer.zero_grad()
        keys = []
        for i, (begin, end) in enumerate(edges(TEACHER[num_replicas, count])):
            slow[1] = slow_others[i // count]
            with torch.no_grad():
                keys.append(slow(x[begin:end]))
        every, parts = torch.cat(keys), edges(STUDENT[num_replicas])
        for i, (begin, end) in enumerate(parts):
            replica = i // 2
            alone[1] = others[replica]
            others[replica].weight = norm.weight
            others[replica].bias = norm.bias
            whole = BatchOutput(every, torch.arange(begin, end))
            read = whole if reads_batch else every[begin:end]
            value = loss(alone(x[begin:end]), y[begin:end], read)
            value = value if reads_batch else value["loss"]
            (value * (end - begin) / len(x)).backward()
        optimizer.step()
    alone[1], slow[1] = others[0], slow_others[0]
    assert_close(student, alone)
    assert_close(teacher, slow)
