"""Define the sizes that a schedule is made for, and what its table entry claims.

Claims are written in the letters of the papers:

    p  devices              F  forward            seconds of one microbatch in a
    m  microbatches         I  input gradient     device's whole share of the model,
    v  stages per device    W  weight gradient    which its stages split evenly
    n  steps                B  I + W
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from hocket.core.costs import StageCost
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that a schedule is made for.

    Args:
        num_devices: the devices of one replica; `p` in formulas.
        num_microbatches: the microbatches per step; `m`.
        stages_per_device: the stages per device; `v`.
        num_steps: the steps; `n`.
        num_replicas: copies of the whole pipeline.
        num_shards: the devices that hold each stage of a replica together.

    Raises:
        ShapeError: one of them is below 1; names all that are.
    """

    num_devices: int
    num_microbatches: int
    stages_per_device: int = 1
    num_steps: int = 1
    num_replicas: int = 1
    num_shards: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        faults = [f"{name}={number}" for name, number in given.items() if number < 1]
        if faults:
            raise ShapeError(f"{', '.join(faults)}: each must be at least 1")

    @property
    def num_stages(self) -> int:
        """How many stages all devices hold together."""
        return self.num_devices * self.stages_per_device

    def chain(
        self,
        devices: Sequence[int] = (),
        *,
        trainable: bool = True,
        delays: Sequence[int] | None = None,
    ) -> Program:
        """Return a program of one net of this shape.

        Args:
            devices: the device of each stage; when not given, the stages go round and
                round the devices.
            trainable: False for evaluation.
            delays: the delay of each stage; all 0 when not given.
        """
        return Program.chain(
            devices or [stage % self.num_devices for stage in range(self.num_stages)],
            self.num_microbatches,
            num_steps=self.num_steps,
            num_replicas=self.num_replicas,
            num_shards=self.num_shards,
            trainable=trainable,
            delays=delays,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule and what it claims; the tests hold every entry to its claims.

    The claims are for equal stages, messages that take no time, and no options.

    Args:
        make: the generator: a `Shape`, and the schedule's options by keyword. Raises
            ShapeError with the numbers given and the numbers that would work.
        bubble_s: seconds in which each device does not work, over all steps. Takes the
            cost of a device's whole share of the model.
        peak_activations: the most activation units alive at once on a device.
        num_buffers: the fewest receive buffers per flow without a deadlock, even if
            each send ends only when a buffer has taken it.
        stages_per_device: the default of `make_schedule`.
        holds_for: returns whether `bubble_s` holds for a shape and costs. Papers give
            some formulas for equal times of F, I and W alone (`equal_times`).
        is_data_parallel: whether each replica is one device, whose stages are buckets
            of gradients; else it is an order of pipelines.
    """

    make: Callable[..., Schedule]
    bubble_s: Callable[[Shape, StageCost], float]
    peak_activations: Callable[[Shape, int], float]
    num_buffers: Callable[[Shape], int] = lambda shape: 1
    stages_per_device: int = 1
    holds_for: Callable[[Shape, StageCost], bool] = lambda shape, share: True
    is_data_parallel: bool = False

    @property
    def summary(self) -> str:
        """The generator's docstring, its first line."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the generator takes beside the shape."""
        _, *options = inspect.signature(self.make).parameters
        return tuple(options)


def run_bubble_s(shape: Shape, share: StageCost) -> float:
    """Return `(p - 1) * (F + B)`: the pipeline fills and drains once per run."""
    return (shape.num_devices - 1) * microbatch_s(share)


def step_bubble_s(shape: Shape, share: StageCost) -> float:
    """Return `n * (p - 1) * (F + B)`: the pipeline fills and drains in each step."""
    return shape.num_steps * run_bubble_s(shape, share)


def all_microbatches(shape: Shape, _device: int) -> float:
    """Return `m`: a device holds all microbatches."""
    return shape.num_microbatches


def warmup_microbatches(shape: Shape, device: int, *, lead: int = 1) -> float:
    """Return how many microbatches are on a device with `lead * (p - 1 - d)` ahead."""
    num_ahead = lead * (shape.num_devices - 1 - device)
    return min(num_ahead + 1, shape.num_microbatches)


def microbatch_s(share: StageCost) -> float:
    """Return `F + B`, the seconds that one microbatch takes a device."""
    return share.forward_s + share.input_grad_s + share.weight_grad_s


def equal_times(_shape: Shape, share: StageCost) -> bool:
    """Return whether F, I and W take equally long."""
    return share.forward_s == share.input_grad_s == share.weight_grad_s


def refuse_several_stages(name: str, shape: Shape) -> None:
    """Refuse more than one stage per device.

    Raises:
        ShapeError: there are more.
    """
    if shape.stages_per_device != 1:
        raise ShapeError(
            f"{name} puts one stage on each device, got stages_per_device="
            f"{shape.stages_per_device}: use 1, or interleaved-1f1b or looped-bfs, "
            "which take several"
        )
