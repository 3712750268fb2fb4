"""Options that several commands share.

    def draw_command(sources, sizes: Sizes, costs: UniformCosts, out)
                                  ▲             ▲
    on the command line:  --devices --steps    --forward --message ...

A command says `sizes: Sizes` and `costs: UniformCosts`; `with_options` shows typer the
options in their place, and hands the command what they make.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from hocket.cli.planning import (
    ActivationBytesOption,
    DevicesOption,
    ForwardOption,
    InputGradOption,
    MessageBytesOption,
    MessageOption,
    MicrobatchesOption,
    ReplicasOption,
    Sizes,
    StagesOption,
    StepsOption,
    UpdateOption,
    WeightGradOption,
)

if TYPE_CHECKING:
    from hocket.core.costs import Costs


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Costs of equal devices, per microbatch and whole device."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    update_s: float
    message_s: float
    message_bytes: int
    activation_bytes: int

    def make(self) -> Costs:
        """Return the simulator's costs."""
        from hocket.core.costs import Costs, Link, StageCost

        share = StageCost(
            forward_s=self.forward_s,
            input_grad_s=self.input_grad_s,
            weight_grad_s=self.weight_grad_s,
            update_s=self.update_s,
            output_bytes=self.message_bytes,
            input_grad_bytes=self.message_bytes,
            activation_bytes=self.activation_bytes,
        )
        return Costs(
            (share,), is_device_share=True, link=Link(latency_s=self.message_s)
        )


def _sizes(
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = None,
    steps: StepsOption = None,
    stages_per_device: StagesOption = None,
    replicas: ReplicasOption = None,
) -> Sizes:
    return Sizes(devices, microbatches, steps, stages_per_device, replicas)


def _costs(
    forward: ForwardOption = 1.0,
    input_grad: InputGradOption = 1.0,
    weight_grad: WeightGradOption = 1.0,
    update: UpdateOption = 0.0,
    message: MessageOption = 0.0,
    message_bytes: MessageBytesOption = 0,
    activation_bytes: ActivationBytesOption = 0,
) -> UniformCosts:
    return UniformCosts(
        forward,
        input_grad,
        weight_grad,
        update,
        message,
        message_bytes,
        activation_bytes,
    )


_MAKERS: Final[dict[str, Callable[..., Any]]] = {"sizes": _sizes, "costs": _costs}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for each of its parameters `sizes` and `costs`."""
    own = inspect.signature(command)
    made = {name: _MAKERS[name] for name in own.parameters if name in _MAKERS}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, make in made.items():
            options = inspect.signature(make).parameters
            given[name] = make(**{option: given.pop(option) for option in options})
        command(**given)

    shown = list(_expanded(command))
    # inspect and typing read these instead of the wrapped command's.
    called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    del called.__wrapped__
    return called


def _expanded(command: Callable[..., None]) -> Iterator[Parameter]:
    """Return a command's parameters, with options in place of grouped ones."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in _MAKERS:
            yield from _expanded(_MAKERS[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
