"""Op U: the optimizer's step of one stage, when all its gradients are there.

An update in doubt is made before the gradients of all other stages are known. It keeps
what it takes to make it again:

    doubt │ U: copies, step │ ... other work ... │ confirm: the averages move, too
                                                 │ undo: as it was before U
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.run.stage.seed import random_state, set_random_state
from hocket.run.weights.correction.correction import Correction
from hocket.run.weights.correction.make import make_correction
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import Parameters, Settings
from hocket.run.weights.undo import Kept


@dataclass(frozen=True, slots=True)
class _Before:
    """All that an update changes, from before it.

    Args:
        kept: weights, the state of the optimizer and of the learning-rate schedule.
        grads: of each parameter.
        random: the state of the generator.
    """

    kept: Kept
    grads: list[tuple[nn.Parameter, Tensor | None]]
    random: Tensor

    @property
    def num_bytes(self) -> int:
        """Of all copies."""
        grads = [grad.nbytes for _, grad in self.grads if grad is not None]
        return self.kept.num_bytes + sum(grads)

    def restore(self) -> None:
        """Put it back, but for the generator."""
        self.kept.restore()
        for parameter, grad in self.grads:
            parameter.grad = grad


class Updater:
    """Updates one stage's weights, and their averages where those are wanted.

    Args:
        parameters: the ones this stage owns, by the uncut model's names.
        settings: makes the optimizer and the learning-rate schedule.
        reducer: sums the gradients over the stage's replicas, where it has any.
        delay: the age of the weights that gradients are computed with, in updates.

    Attributes:
        optimizer: none where nothing is trained.
        scheduler: of the learning rate.
        correction: of the gradients' age; none where there is no delay.
        ema: the averaged weights by name. They begin as the first weights, and each
            update moves them by `1 - ema_decay` of the way to the new ones.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        settings: Settings,
        *,
        reducer: Reducer | None = None,
        delay: int = 0,
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        trained = Parameters(parameters)
        self._trained = dict(trained.named())
        self.optimizer = settings.make_optimizer(trained) if trained else None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self.correction: Correction | None = None
        if self.optimizer is not None:
            self.scheduler = settings.make_scheduler(self.optimizer)
            self.correction = make_correction(
                settings.correction,
                self._trained,
                self.optimizer,
                delay,
                num_discounted_updates=settings.num_discounted_updates,
            )
        self._decay = settings.ema_decay
        self.ema: dict[str, Tensor] | None = None
        if self._decay is not None:
            self.ema = {name: p.detach().clone() for name, p in trained.named()}
        self._in_doubt = False
        self._before: _Before | None = None
        self._random: Tensor | None = None  # for the next update, which is made again

    @property
    def grads(self) -> list[Tensor]:
        """Of all parameters that have one."""
        return [p.grad for p in self._trained.values() if p.grad is not None]

    @property
    def undo_bytes(self) -> int:
        """Of what is kept of an update in doubt."""
        return 0 if self._before is None else self._before.num_bytes

    def wait(self) -> None:
        """Wait until the gradients are complete over all replicas.

        Raises:
            WaitError: the reduction did not end within its timeout.
        """
        if self.reducer is not None:
            self.reducer.finish()

    def update(self) -> None:
        """Step, and forget the gradients."""
        if self._random is not None:
            set_random_state(self._device, self._random)
        if self._in_doubt:
            self._before = self._all()
        self._step()
        if self.scheduler is not None:
            self.scheduler.step()
        if not self._in_doubt:
            self._average()
        self.forget()

    def predicted(self) -> dict[str, Tensor] | None:
        """What forwards of the weights as they are now should read in their place.

        Returns:
            Tensors of their own, by name, of every trained parameter; or None where
            forwards should read the weights themselves.
        """
        return None if self.correction is None else self.correction.predicted()

    def doubt(self) -> None:
        """From now on `update` can be undone, until it is confirmed or undone."""
        self._in_doubt = True

    def confirm(self) -> None:
        """The update in doubt was right: nothing need be kept."""
        if self._before is not None:
            self._average()
        self._in_doubt, self._before = False, None

    def undo(self) -> None:
        """The update in doubt was wrong: all is as before it, and the gradients too.

        The next update draws the random numbers that this one drew.
        """
        if self._before is not None:
            self._before.restore()
            self._random = self._before.random
        self._in_doubt, self._before = False, None

    def forget(self) -> None:
        """Leave no gradient behind, also where the optimizer knows nothing of it.

        Nor the random numbers of an update that was undone: none makes it again.
        """
        self._random = None
        for parameter in self._trained.values():
            parameter.grad = None

    def swap(self) -> None:
        """Exchange the weights and their averages; a second time puts them back.

        Only between steps: no forward may be waiting for its backward.
        """
        assert self.ema is not None
        for name, average in self.ema.items():
            parameter = self._trained[name]
            self.ema[name], parameter.data = parameter.data, average

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._trained.values()), torch.device("cpu"))

    def _all(self) -> _Before:
        """Gradients are copied, too: some optimizers compute in their place."""
        parameters = list(self._trained.values())
        return _Before(
            Kept([*parameters, self.optimizer, self.scheduler]),
            [(p, None if p.grad is None else p.grad.clone()) for p in parameters],
            random_state(self._device),
        )

    def _step(self) -> None:
        if self.correction is not None:
            assert self.optimizer is not None
            self.correction.step(self.optimizer.step)
        elif self.optimizer is not None:
            self.optimizer.step()

    def _average(self) -> None:
        if self.ema and self._decay is not None:
            new = [p.detach() for p in self._trained.values()]
            torch._foreach_lerp_(list(self.ema.values()), new, 1.0 - self._decay)
