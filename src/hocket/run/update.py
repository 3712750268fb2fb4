"""Op U: the optimizer's step of one stage, when all its gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from hocket.run.reduce import Reducer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[
    [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
]


class Updater:
    """Updates one stage's weights.

    Args:
        parameters: the ones this stage owns, by the uncut model's names.
        make_optimizer: called once with the parameters that want a gradient.
        make_scheduler: called once with the optimizer; stepped after each update.
        reducer: sums the gradients over the stage's replicas, where it has any.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
        *,
        reducer: Reducer | None = None,
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        trained = [p for p in parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(trained) if trained else None
        self.scheduler = (
            make_scheduler(self.optimizer)
            if make_scheduler is not None and self.optimizer is not None
            else None
        )

    def wait(self) -> None:
        """Wait until the gradients are complete over all replicas.

        Raises:
            WaitError: the reduction did not end within its timeout.
        """
        if self.reducer is not None:
            self.reducer.finish()

    def update(self) -> None:
        """Step, and forget the gradients."""
        if self.optimizer is None:
            return
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
