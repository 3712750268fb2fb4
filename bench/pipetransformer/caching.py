"""When caching pays: from the first frozen layer on, beside no cache at all.

The authors' figure 12 has the throughput of both, epoch by epoch: caching from epoch 0
is slower until about epoch 4, and clearly faster from epoch 5. It does not say what was
trained, nor with which alpha, and what storing an output takes is in no text. Both
times follow from a run that the authors logged on the same hosts (CIFAR-10, batches of
320, 16 pipelines of one device, all 12 blocks frozen after 10):

    first epoch    4096 images/s    a step reads, runs 2 blocks, and stores
    last epoch    16496 images/s    a step reads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from bench.pipetransformer.experiments import (
    CIFAR100,
    IMAGENET,
    NUM_DEVICES,
    Copies,
    Modules,
    Task,
    frozen_blocks,
    published_run,
)

_STORING: Final = 4096.0  # images per second, see above
_READING: Final = 16496.0
_NUM_NEW: Final = 2
_FORWARD_S: Final = 2.313  # of a batch through all 12 blocks, as logged
_CLEARLY: Final = 0.1


def logged_copies(task: Task = CIFAR100) -> Copies:
    """Return what reading and storing took in the logged run.

    Reading is all that a step did in the last epoch, so that it is at most that.
    """
    batch, num_bytes = task.batch_size, task.batch_size * task.kept_bytes
    read_s = batch * NUM_DEVICES / _READING
    computed_s = _FORWARD_S * _NUM_NEW / task.num_blocks
    store_s = batch * NUM_DEVICES / _STORING - read_s - computed_s
    return Copies(read_s / num_bytes, store_s / num_bytes)


@dataclass(frozen=True, slots=True)
class CachingRow:
    """One schedule.

    Args:
        task: what is trained.
        alpha: of the schedule, as it is written.
        frozen: blocks, by epoch.
        times_as_fast: the throughput with the cache from epoch 0 on, beside none.
    """

    task: str
    alpha: str
    frozen: tuple[int, ...]
    times_as_fast: tuple[float, ...]

    @property
    def slower_until(self) -> int:
        """The last epoch that the cache makes slower."""
        return max(e for e, x in enumerate(self.times_as_fast) if x < 1.0)

    @property
    def clearly_faster_from(self) -> int:
        """The epoch from which on all are faster by a tenth."""
        fast = [x >= 1.0 + _CLEARLY for x in self.times_as_fast]
        return max(e for e, x in enumerate((False, *fast)) if not x)


# The alphas that the authors used: for CIFAR-100 in the figure before that one, and for
# ImageNet in the committed sweep.
_SCHEDULES: Final = (
    (CIFAR100, "1/3", 1 / 3),
    (CIFAR100, "1/4", 1 / 4),
    (CIFAR100, "1/5", 1 / 5),
    (IMAGENET, "0.07", 0.07),
)


def caching_rows() -> Iterator[CachingRow]:
    """Simulate both runs of each schedule."""
    copies = logged_copies()
    for task, name, alpha in _SCHEDULES:
        always = replace(task, caches_from=1)
        frozen = frozen_blocks(always, alpha)
        cached, plain = (
            [x.step_s for x in published_run(always, frozen, Modules(caches=c), copies)]
            for c in (True, False)
        )
        ratios = (b / a for a, b in zip(cached, plain, strict=True))
        yield CachingRow(task.name, name, tuple(frozen), tuple(ratios))
