"""What policies measure of each layer: nothing, or its gradients.

Activations are measured in `make.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hocket.run.cluster.world import World
from hocket.run.diagnostics.job_folder import Json
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.weights.updater import GradientSums


class LayerMeasure:
    """Measures layers from one decision to the next, on all workers together.

    This one measures nothing: for policies that look at nothing but the step.
    """

    def start(self, played: PlayedLayout) -> None:
        """Begin again: a decision was made, or the layout has changed."""

    def take(self, played: PlayedLayout, batch: Any) -> tuple[float, ...]:
        """Return each layer's number; every worker must call this.

        Args:
            played: what the workers play.
            batch: the batch of the next step.
        """
        return ()

    def tensors(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return what a checkpoint must hold of this worker's weights, by name."""
        return {}

    def restore(self, played: PlayedLayout, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the tensors of a checkpoint."""


class GradientMeasure(LayerMeasure):
    """The 1-norm of the sum of all gradients of each layer since the last decision.

    Replicas have the same gradients, and each stage those of its own weights.

    Args:
        modules: the layers that may freeze, by name.
        world: the job.
    """

    def __init__(self, modules: Sequence[str], world: World) -> None:
        self._modules = modules
        self._world = world

    def start(self, played: PlayedLayout) -> None:
        """Begin to add up."""
        self.restore(played, {})

    def take(self, played: PlayedLayout, batch: Any) -> tuple[float, ...]:
        """Return the norms; 0 for frozen layers."""
        own: dict[str, Json] = {}
        for updater in played.executor.updaters.values():
            if updater.gradient_sums is not None:
                own |= updater.gradient_sums.norms()
        norms: dict[str, float] = {}
        for part in self._world.gather_json(own, "norms of layers"):
            norms |= part
        return tuple(
            sum(x for name, x in norms.items() if name.startswith(f"{module}."))
            for module in self._modules
        )

    def tensors(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return the sums."""
        sums = [x.gradient_sums for x in executor.updaters.values()]
        return {n: x for each in sums if each is not None for n, x in each.sums.items()}

    def restore(self, played: PlayedLayout, tensors: Mapping[str, Tensor]) -> None:
        """Add to the sums of a checkpoint."""
        for updater in played.executor.updaters.values():
            own = tensors.keys() & updater.parameters.keys()
            updater.gradient_sums = GradientSums({n: tensors[n] for n in own})
