"""Options that several commands share.

    def draw_command(sources, sizes: Sizes, costs: UniformCosts, out)
                                  ▲             ▲
    on the command line:  --devices --steps    --forward --message ...

A command has parameters of the types `Sizes`, `UniformCosts` and `WhatIf`, whose fields
are options; `with_options` passes typer the options in their place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from hocket.cli.shared.what_if import WhatIf

if TYPE_CHECKING:
    from hocket.core.costs import Costs


@dataclass(frozen=True, slots=True)
class Sizes:
    """The options that set a schedule's size; None for those not given."""

    devices: Annotated[
        int | None,
        typer.Option("--devices", "-d", metavar="N", help="Devices of one replica."),
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches", "-m", metavar="N", help="Microbatches per step."
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            help="Steps, by default 1; of a file, as many as it has. Orders without a "
            "flush are full from 4 on.",
        ),
    ] = None
    stages_per_device: Annotated[
        int | None,
        typer.Option(
            "--stages-per-device",
            metavar="N",
            help="By default as the schedule is used.",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", metavar="N", help="Copies of the pipeline, by default 1."
        ),
    ] = None


def _finite(seconds: float) -> float:
    """Parse a finite number of seconds."""
    if not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds")
    return seconds


def _seconds(name: str, help_: str) -> Any:
    """Return an option that takes seconds."""
    return typer.Option(name, metavar="S", min=0.0, callback=_finite, help=help_)


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Costs of equal devices, per microbatch and whole device."""

    forward: Annotated[
        float,
        _seconds(
            "--forward",
            "Seconds of one microbatch's forward on a device, in all its stages.",
        ),
    ] = 1.0
    input_grad: Annotated[
        float, _seconds("--input-grad", "The same for the input gradient.")
    ] = 1.0
    weight_grad: Annotated[
        float, _seconds("--weight-grad", "The same for the weight gradient.")
    ] = 1.0
    update: Annotated[
        float, _seconds("--update", "Seconds of a device's update, in all its stages.")
    ] = 0.0
    message: Annotated[
        float, _seconds("--message", "Seconds of a message between devices.")
    ] = 0.0
    message_bytes: Annotated[
        int,
        typer.Option(
            "--message-bytes", metavar="N", min=0, help="Size of each message."
        ),
    ] = 0
    activation_bytes: Annotated[
        int,
        typer.Option(
            "--activation-bytes",
            metavar="N",
            min=0,
            help="Activation bytes of one microbatch on a device; 0 counts "
            "microbatches.",
        ),
    ] = 0

    def make(self) -> Costs:
        """Return the simulator's costs."""
        from hocket.core.costs import Costs, Link, StageCost

        share = StageCost(
            forward_s=self.forward,
            input_grad_s=self.input_grad,
            weight_grad_s=self.weight_grad,
            update_s=self.update,
            output_bytes=self.message_bytes,
            input_grad_bytes=self.message_bytes,
            activation_bytes=self.activation_bytes,
        )
        return Costs((share,), is_device_share=True, link=Link(latency_s=self.message))


_GROUPS: Final[dict[str, type]] = {
    "sizes": Sizes,
    "costs": UniformCosts,
    "what_if": WhatIf,
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for each of its parameters in `_GROUPS`."""
    own = inspect.signature(command)
    made = {name: _GROUPS[name] for name in own.parameters if name in _GROUPS}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, group in made.items():
            options = inspect.signature(group).parameters
            given[name] = group(**{option: given.pop(option) for option in options})
        command(**given)

    shown = list(_expanded(command))
    # inspect and typing read these instead of the wrapped command's.
    called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    del called.__wrapped__
    return called


def _expanded(command: Callable[..., Any]) -> Iterator[Parameter]:
    """Return a command's parameters, with options in place of grouped ones."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in _GROUPS:
            yield from _expanded(_GROUPS[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
