"""Turns a captured model into costs: its layers' for the planner, its stages'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hocket.core.costs import StageCost
from hocket.core.hardware import Hardware, multiplied_in
from hocket.model.capture.captured import Captured
from hocket.model.profile.flops import Finish, count_layers
from hocket.model.profile.profile import Profile
from hocket.model.stages.stage import StageModule
from hocket.model.trace.local import local
from hocket.model.trace.state import gradient_bytes
from hocket.planner.stages import added_up
from hocket.planner.work import CountedCosts, MeasuredCosts, Weights


def counted_work(
    captured: Captured,
    hardware: Hardware,
    state_bytes: Mapping[str, int],
    *,
    finish: Finish | None = None,
    precision: str = "float32",
) -> CountedCosts:
    """Return costs counted from FLOPs and bytes, for a device that need not be present.

    Args:
        captured: the model.
        hardware: the device's numbers.
        state_bytes: the bytes of the optimizer's state, by parameter.
        finish: the loss; see `count_layers`.
        precision: the type of matrix multiplications; of "bfloat16-weights", which is
            for a model in bfloat16, no autocast.

    Raises:
        PlanError: the device has no such precision.
    """
    multiplied = multiplied_in(precision)
    hardware.reached_flops(multiplied)
    layers = count_layers(
        captured,
        layer_weights(captured, state_bytes),
        finish=finish,
        precision=precision,
    )
    only = captured.example.num_samples if captured.fixed_batch else None
    return CountedCosts(name_of(captured), layers, hardware, multiplied, only)


def measured_work(
    captured: Captured,
    profiles: Mapping[int, Profile],
    state_bytes: Mapping[str, int],
    *,
    update_s_per_byte: float,
) -> MeasuredCosts:
    """Return costs from one or two profiles.

    Args:
        captured: the model.
        profiles: the profiles, by the number of samples in the microbatch; at most two.
        state_bytes: the bytes of the optimizer's state, by parameter.
        update_s_per_byte: seconds per byte of weights, gradients and state.
    """
    sizes = sorted(profiles)
    weights = layer_weights(captured, state_bytes)
    costs = {
        size: tuple(
            replace(layer, weights=own)
            for layer, own in zip(profile.layers, weights, strict=True)
        )
        for size, profile in profiles.items()
    }
    only = captured.example.num_samples if captured.fixed_batch else None
    return MeasuredCosts(
        name_of(captured),
        (sizes[0], sizes[-1]),
        (costs[sizes[0]], costs[sizes[-1]]),
        update_s_per_byte,
        profiles[sizes[0]].conditions["device_name"],
        only,
    )


def layer_weights(
    captured: Captured, state_bytes: Mapping[str, int]
) -> list[tuple[Weights, ...]]:
    """Return the parameters and buffers of each layer, with their gradients and state.

    Args:
        captured: the model.
        state_bytes: the bytes of the optimizer's state, by parameter.
    """

    def weights(name: str) -> Weights:
        tensor = captured.state.tensors[name]
        state = state_bytes.get(name, 0)
        return Weights(name, local(tensor).nbytes, gradient_bytes(tensor), state)

    return [
        tuple(map(weights, (*layer.parameters, *layer.buffers)))
        for layer in captured.layers
    ]


def name_of(captured: Captured) -> str:
    """Return the model's class and size."""
    tensors = captured.state.tensors.items()
    is_parameter = captured.state.is_parameter
    count = sum(x.numel() for name, x in tensors if is_parameter(name))
    return f"{type(captured.model).__name__} of {count:,} parameters"


def stage_costs(
    profile: Profile, boundaries: Sequence[int], modules: Sequence[StageModule]
) -> tuple[StageCost, ...]:
    """Add up layers into stages, whose updates cost nothing yet.

    Args:
        profile: the layers' profile.
        boundaries: the layers at which stages 1, 2, ... begin.
        modules: the stages, for the bytes of their weights.
    """
    stages = []
    sums = added_up(profile.layers, boundaries)
    for module, (own, cost) in zip(modules, sums, strict=True):
        stages.append(
            replace(
                cost,
                weight_bytes=_num_bytes([*module.parameters(), *module.buffers()]),
                gradient_bytes=sum(map(gradient_bytes, module.parameters())),
                replay_bytes=_replay_bytes(module),
                holds_input=own[0].held.held_input_bytes > 0,
            )
        )
    return tuple(stages)


def _replay_bytes(module: StageModule) -> int:
    """Return the bytes of copies of buffers that a forward changes."""
    buffers = module.named_buffers()
    return _num_bytes([x for name, x in buffers if name not in module.fixed_buffers])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
