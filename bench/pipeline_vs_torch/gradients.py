"""What makes contestants comparable: their gradients are those of the plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bench.models import Case

Named = Iterable[tuple[str, nn.Parameter]]

# Of a gradient's norm. In eager, sums in another order differ by some millionths.
# Compiled operators round otherwise, which may turn a ReLU at its edge: the ResNet's
# plain loop in float32 is itself off by 3e-3 from the one in float64.
TOLERANCE = 1e-4
TOLERANCE_COMPILED = 2e-2


def model_of(case: Case) -> nn.Sequential:
    """The same weights each time, on every worker."""
    torch.manual_seed(0)
    return case.make()


class Watch:
    """Keeps the gradients with which optimizers make their next steps."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def sgd(self, named: Named) -> torch.optim.Optimizer:
        """The optimizer of all contestants, watched.

        Args:
            named: parameters by their names in the uncut model.
        """
        parameters = dict(named)
        optimizer = torch.optim.SGD(parameters.values(), lr=1e-4)

        def keep(*_: object) -> None:
            self._kept |= {
                name: p.grad.clone()
                for name, p in parameters.items()
                if p.grad is not None
            }

        self._handles.append(optimizer.register_step_pre_hook(keep))
        return optimizer

    def begin(self) -> None:
        """Forget the steps until now: those of the check on copies of parameters."""
        self._kept = {}

    def end(self) -> dict[str, Tensor]:
        """Watch no longer.

        Returns:
            The last gradients that were seen since `begin`.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        kept, self._kept = self._kept, {}
        return kept


def plain_gradients(case: Case) -> dict[str, Tensor]:
    """Of the uncut model, one microbatch after the other."""
    model = model_of(case)
    parts = (x.chunk(case.num_microbatches) for x in case.batch())
    for x, targets in zip(*parts, strict=True):
        (case.loss(model(x), targets) / case.num_microbatches).backward()
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def off_by(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far each gradient is off, as a share of its norm."""
    return {
        name: ((grad - expected[name]).norm() / expected[name].norm()).item()
        for name, grad in found.items()
    }


def refuse_others(
    label: str,
    found: Iterable[Mapping[str, float]],
    expected: Iterable[str],
    tolerance: float,
) -> float:
    """See that a contestant's gradients are the right ones.

    Args:
        label: of the contestant.
        found: of each worker, by how much each gradient is off.
        expected: the names that there must be.
        tolerance: by how much they may be off.

    Returns:
        The largest difference.

    Raises:
        RuntimeError: one is missing, or off: what is measured would not be training.
    """
    off = {name: value for worker in found for name, value in worker.items()}
    missing = sorted(set(expected) - set(off))
    if missing:
        raise RuntimeError(f"{label} has no gradient of {missing[0]}")
    worst = max(off, key=off.__getitem__)
    if not off[worst] <= tolerance:
        raise RuntimeError(f"{label}: the gradient of {worst} is off by {off[worst]}")
    return off[worst]
