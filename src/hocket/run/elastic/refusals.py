"""Which options do not go together with layers that freeze while training runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.freeze.policy import Measures, Policy
from hocket.options import freezing_faults
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
    yield from freezing_faults(config, recut=config.recut)
    if config.teachers:
        yield "teachers does not go together with it: leave it out"
    if config.whole_batch:
        yield "a loss over the whole batch does not go together with it"


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
