"""Adds up layers into stages: their seconds, and the memory of adjacent layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import log
from typing import Any, Final

from hocket.core.costs import Costs, StageCost
from hocket.planner.work import LayerCost

BUCKET_BYTES: Final = 25 * 10**6  # torch's bucket_cap_mb


def stage_costs(
    layers: Sequence[LayerCost],
    boundaries: Sequence[int],
    *,
    recomputes: bool,
    update_s_per_byte: float,
) -> tuple[StageCost, ...]:
    """Return the cost of each stage.

    Args:
        layers: the whole model's layers.
        boundaries: the layers at which stages 1, 2, ... begin.
        recomputes: whether the stages keep only their inputs.
        update_s_per_byte: seconds of the optimizer's step per byte.
    """
    stages = []
    for own, cost in added_up(layers, boundaries):
        weights = {x.name: x for layer in own for x in layer.weights}.values()
        gradient_bytes = sum(x.gradient_bytes for x in weights)
        optimizer_bytes = sum(x.optimizer_bytes for x in weights)
        trained_bytes = 2 * gradient_bytes + optimizer_bytes  # weights as gradients
        stages.append(
            replace(
                cost,
                update_s=trained_bytes * update_s_per_byte,
                weight_bytes=sum(x.num_bytes for x in weights),
                gradient_bytes=gradient_bytes,
                optimizer_bytes=optimizer_bytes,
                whole_bytes=sum(x.whole_bytes for x in weights),
                recomputes=recomputes,
            )
        )
    return tuple(stages)


def added_up(
    layers: Sequence[LayerCost], boundaries: Sequence[int]
) -> Iterator[tuple[Sequence[LayerCost], StageCost]]:
    """Yield the layers of each stage, and its cost without weights and update.

    Args:
        layers: the whole model's layers.
        boundaries: the layers at which stages 1, 2, ... begin.
    """
    for begin, end in pairwise((0, *boundaries, len(layers))):
        own = layers[begin:end]
        yield own, add_layers(own, layers[end] if end < len(layers) else None)


def group_layers(
    layers: Sequence[LayerCost], bucket_bytes: float = BUCKET_BYTES
) -> tuple[int, ...]:
    """Return the layers at which groups 1, 2, ... begin.

    Groups are formed from the last layer on, in the order of gradients: a group ends
    when it has a bucket's worth of weights.

    Args:
        layers: the whole model's layers.
        bucket_bytes: the least bytes of weights in all groups but the first.
    """
    boundaries = []
    gathered = 0
    seen: set[str] = set()
    for i in range(len(layers) - 1, 0, -1):
        new = {x.name: x.num_bytes for x in layers[i].weights if x.name not in seen}
        seen |= new.keys()
        gathered += sum(new.values())
        if gathered >= bucket_bytes:
            boundaries.append(i)
            gathered = 0
    return tuple(reversed(boundaries))


def add_layers(layers: Sequence[LayerCost], following: LayerCost | None) -> StageCost:
    """Return the cost of a stage, without its weights and its update.

    Args:
        layers: the stage's layers.
        following: the next stage's first layer; None for the last stage.
    """
    # What the first layer received is a message, and counted as such.
    held = [layer.held for layer in layers]
    kept_bytes = _with_inputs(
        [layer.activation_bytes for layer in layers],
        [layer.kept_input_bytes for layer in layers],
    )
    held_bytes = _with_inputs(
        [x.weight_grad_held_bytes for x in held], [x.held_input_bytes for x in held]
    )
    inside = [layer.received_bytes + layer.forward_work_bytes for layer in layers[1:]]
    # In W, the layers behind have released what they held.
    freed_bytes = accumulate(reversed(held_bytes), initial=0)
    last_first = zip(reversed(held), freed_bytes, strict=False)
    return StageCost(
        forward_s=sum(layer.forward_s for layer in layers),
        input_grad_s=sum(layer.input_grad_s for layer in layers),
        weight_grad_s=sum(layer.weight_grad_s for layer in layers),
        output_bytes=0 if following is None else following.received_bytes,
        input_grad_bytes=layers[0].received_grad_bytes,
        activation_bytes=sum(kept_bytes),
        weight_grad_held_bytes=sum(held_bytes),
        forward_work_bytes=max(layers[0].forward_work_bytes, *inside, 0),
        backward_work_bytes=_most_beyond(
            layers,
            [layer.backward_work_bytes for layer in layers],
            [-kept for kept in kept_bytes],
        ),
        # Later layers hold the inputs of their W.
        input_grad_work_bytes=_most_beyond(
            layers,
            [x.input_grad_work_bytes for x in held],
            [x - kept for x, kept in zip(held_bytes, kept_bytes, strict=True)],
        ),
        weight_grad_work_bytes=max(
            0, *(x.weight_grad_work_bytes - freed for x, freed in last_first)
        ),
        split_s=max(0.0, sum(layer.split_s for layer in layers)),
    )


def _most_beyond(
    layers: Sequence[LayerCost], work: Sequence[int], left: Sequence[int]
) -> int:
    """Return the most at any layer on the way back, beyond the bytes at the begin.

    Args:
        layers: the layers of one stage.
        work: what each allocates for itself when it runs.
        left: what each leaves allocated: negative if it releases more.
    """
    behind = [*accumulate(reversed(left[1:]), initial=0)][::-1]
    grads = [*(layer.received_grad_bytes for layer in layers[1:]), 0]
    return max(0, *(sum(parts) for parts in zip(behind, grads, work, strict=True)))


def _with_inputs(own: Sequence[int], inputs: Sequence[int]) -> list[int]:
    """Return the bytes of each layer and of its input, but for the first one's."""
    return [a + b for a, b in zip(own, (0, *inputs[1:]), strict=True)]


# Trial runs of cuts, and what they predict for other cuts.
#
# Layers that are measured one at a time do not disturb each other: their weights stay
# in the caches, other workers are idle, the host does nothing in between. A trial
# includes all that, for one cut and one size of microbatch:
#
#     the same cut      ops take the trial's times
#     another cut       layers take as much longer as they did in the nearest trial
@dataclass(frozen=True, slots=True)
class Trial:
    """One cut that all workers ran for a few steps.

    Args:
        num_samples: samples of each microbatch.
        num_devices: the devices that shared the stages.
        boundaries: the layers at which stages 1, 2, ... begin.
        costs: the measured costs of its stages and messages.
    """

    num_samples: int
    num_devices: int
    boundaries: tuple[int, ...]
    costs: Costs

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.boundaries) + 1

    def is_of(
        self, num_samples: int, num_devices: int, boundaries: tuple[int, ...]
    ) -> bool:
        """Return whether it was this cut, on as many devices."""
        played = self.num_samples, self.num_devices, self.boundaries
        return played == (num_samples, num_devices, boundaries)


@dataclass(frozen=True, slots=True)
class MeasuredTrials:
    """All trials on the devices before planning for them.

    Args:
        cuts: the trials of cuts.
        ddp_s: what DistributedDataParallel over all devices adds to forward and
            backward of a step: reductions that are not hidden, and its own work.
    """

    cuts: tuple[Trial, ...] = ()
    ddp_s: float | None = None


NO_TRIALS: Final = MeasuredTrials()


@dataclass(frozen=True, slots=True)
class StageSlowdown:
    """The ratio of ops' times in place to the sum of their layers.

    Args:
        forward: the ratio for F.
        backward: the ratio for B.
        update: the ratio for U.
    """

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0

    @classmethod
    def of(
        cls, in_place: Iterable[StageCost], stages: Iterable[StageCost]
    ) -> StageSlowdown:
        """Return the ratios of times in place to the sums of the same stages.

        Args:
            in_place: the stages' costs, measured while all workers ran them.
            stages: the same stages' costs as sums of layers.
        """
        played, added = _sums(in_place), _sums(stages)
        return cls(
            *(a / b if a and b else 1.0 for a, b in zip(played, added, strict=True))
        )

    def slowed(self, cost: StageCost) -> StageCost:
        """Return the stage's cost in place."""
        return replace(
            cost, **self._seconds(cost), update_s=cost.update_s * self.update
        )

    def of_layer(self, cost: LayerCost) -> LayerCost:
        """Return the layer's cost in place."""
        return replace(cost, **self._seconds(cost))

    def _seconds(self, cost: StageCost | LayerCost) -> dict[str, Any]:
        return {
            "forward_s": cost.forward_s * self.forward,
            "input_grad_s": cost.input_grad_s * self.backward,
            "weight_grad_s": cost.weight_grad_s * self.backward,
            "split_s": cost.split_s * self.backward,
        }


def nearest(
    trials: Sequence[Trial], num_samples: int, num_devices: int, num_stages: int
) -> Trial | None:
    """Return the trial that is most like a cut; None without trials.

    The microbatch's size matters more than the place of the cut.
    """

    def distance(trial: Trial) -> tuple[float, float, float]:
        return (
            abs(log(trial.num_samples / num_samples)),
            abs(log(trial.num_devices / num_devices)),
            abs(log(trial.num_stages / num_stages)),
        )

    return min(trials, key=distance, default=None)


def as_measured(cost: StageCost, played: StageCost) -> StageCost:
    """Return a stage's cost with the seconds of the same stage in the trial."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "update_s")
    seconds: dict[str, Any] = {name: getattr(played, name) for name in names}
    return replace(cost, **seconds)


def _sums(stages: Iterable[StageCost]) -> tuple[float, float, float]:
    known = tuple(stages)
    return (
        sum(cost.forward_s for cost in known),
        sum(cost.input_grad_s + cost.weight_grad_s for cost in known),
        sum(cost.update_s for cost in known),
    )
