"""Which options do not go together with layers that freeze while training runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hocket.core.formats.given import is_path
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.freeze.policy import Measures, Policy
from hocket.run.tune.config import PipelineConfig


def refuse_with_freezing(config: PipelineConfig, policy: Policy[Any]) -> None:
    """Refuse options that a pipeline with a freezing policy has no use for.

    Raises:
        ConfigError: names all such options.
    """
    faults = "; ".join(_faults(config, policy))
    if faults:
        raise ConfigError(f"freeze={type(policy).__name__}(...): {faults}")


def _faults(config: PipelineConfig, policy: Policy[Any]) -> Iterator[str]:
    if policy.measures is Measures.ACTIVATIONS:
        num_samples = config.microbatches()[0].num_samples
        if num_samples < 2:
            yield (
                "it compares the activations of samples with each other, and a "
                f"microbatch has {num_samples}: take fewer microbatches, or a larger "
                "batch"
            )
    yield from _order_faults(config)
    for name, value, plain in (
        ("teachers", config.teachers, {}),
        ("compile", config.compile, False),
        ("recompute", config.recompute, "none"),
        ("correction", config.correction, "none"),
    ):
        if value != plain:
            yield f"{name} does not go together with it: leave it out"
    if config.whole_batch:
        yield "a loss over the whole batch does not go together with it"


def _order_faults(config: PipelineConfig) -> Iterator[str]:
    name = config.schedule
    if not isinstance(name, str) or is_path(name):
        yield (
            "an order of your own is for one number of stages: give the schedule's "
            "name, such as '1f1b'"
        )
    elif name in ("auto", "zb-auto"):
        yield f"schedule={name!r} is chosen once: give a name such as '1f1b'"
    if config.stages_per_device not in (None, 1):
        yield f"stages_per_device {config.stages_per_device} must be 1"
    if config.cut is not None:
        yield "cut names the stages of one shape: leave it out"


def refuse_order(order: Schedule) -> None:
    """Refuse orders that cannot be made again for another shape.

    Raises:
        ConfigError: its steps overlap, or a device has several stages.
    """
    program = order.program
    if order.body:
        raise ConfigError(
            "layers can freeze where each step ends before the next begins, and steps "
            "of this order overlap: take '1f1b' or 'gpipe'"
        )
    if program.num_stages != program.num_devices or program.copies:
        raise ConfigError(
            f"this order has {program.num_stages} stages on {program.num_devices} "
            "devices: to freeze layers, take one with one stage on each, such as "
            "'1f1b' or 'gpipe'"
        )
