"""Makes the order that a pipeline runs, by name or from a schedule that is given.

It is of one step; or of several with a body to repeat, where steps do not wait for each
other's end.

Orders are made, measured and filled as those of as many replicas as there are
pipelines. Behind that, `hocket.run.tune.build` gives them the shards and their gathers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from hocket.core.formats.given import is_path, read_schedule, refuse_other_sizes
from hocket.core.op import SHARDING
from hocket.core.schedule import Schedule
from hocket.errors import PlanError, ScheduleError, ShapeError
from hocket.passes.add_gathers import add_gathers, drop_gathers
from hocket.passes.add_whole_batch_loss import add_whole_batch_loss
from hocket.passes.merge_backward import merge_unneeded_splits
from hocket.passes.playable_order import playable_order
from hocket.planner.gathers import with_copies
from hocket.run.cluster.layout import Layout
from hocket.run.tune.config import PipelineConfig
from hocket.schedules import SCHEDULES, make_schedule, options_of


def configured_order(
    config: PipelineConfig, layout: Layout, **options: Any
) -> Schedule:
    """Make the order that a configuration asks for, for any costs; see `make_order`."""
    return make_order(
        config.schedule,
        layout,
        config.num_parts // layout.num_pipelines,
        config.stages_per_device,
        clips=config.clip_norm is not None,
        whole_batch=config.whole_batch,
        **options,
    )


def make_order(
    schedule: str | Path | Schedule,
    layout: Layout,
    num_microbatches: int,
    stages_per_device: int | None,
    *,
    clips: bool = False,
    whole_batch: bool = False,
    **options: Any,
) -> Schedule:
    """Make the order of this pipeline's work.

    Args:
        schedule: a name, whose backwards stay whole if no op waits for their I; or a
            schedule, or the file that holds it. In one step, updates are moved to the
            end; several steps need a repeating body.
        layout: the ranks by device, replica and shard.
        num_microbatches: microbatches of each pipeline.
        stages_per_device: the stages per device, if the schedule has a choice.
        clips: whether updates need all gradients of their group; schedules that can
            have late updates then have updates so late that no op waits.
        whole_batch: whether the loss is over the whole batch (op L).
        options: further options of the schedule of this name.

    Raises:
        ShapeError: the schedule's constraints refuse the numbers, or the given schedule
            has other numbers; or it cannot have a loss over the whole batch; names
            those that can.
        ScheduleError: the pipeline does not run such schedules; gives all reasons.
        PlanError: its stages cannot be sharded, and the layout has shards.
        ParseError: the file cannot be read.
    """
    if isinstance(schedule, str) and not is_path(schedule):
        if clips and "late_updates" in options_of(schedule):
            options = {"late_updates": True, **options}
        order = _made(schedule, layout, num_microbatches, stages_per_device, options)
    else:
        given = _given(schedule, layout, num_microbatches)
        order = with_copies(drop_gathers(given), layout.num_pipelines, 1)
    if whole_batch and not order.program.loss_stages:
        order = _with_loss(order, layout, num_microbatches)
    faults = tuple(_faults(order, whole_batch=whole_batch))
    if faults:
        raise ScheduleError(faults, str(order))
    if layout.num_shards > 1:  # what cannot be sharded is refused before it is measured
        add_gathers(with_copies(order, layout.num_replicas, layout.num_shards))
    return order


def with_given_gathers(
    order: Schedule, config: PipelineConfig, layout: Layout
) -> Schedule | None:
    """Return an order of sharded stages with the gathers that its user wrote.

    Args:
        order: without gathers.
        config: has the schedule that was given.
        layout: the ranks by device, replica and shard.

    Returns:
        None if there are none; or if the order is not the one that was given, since
        stages of it are frozen, or teachers or a loss over the whole batch were added.
    """
    source = config.schedule
    if isinstance(source, str) and not is_path(source):
        return None
    if not isinstance(source, Schedule):
        source = _read(source, layout)
    if source.kinds.isdisjoint(SHARDING):
        return None
    given = _given(source, layout, config.num_microbatches)
    return given if str(drop_gathers(given)) == str(order) else None


def _with_loss(order: Schedule, layout: Layout, num_microbatches: int) -> Schedule:
    try:
        return add_whole_batch_loss(order)
    except ShapeError as error:
        names = ", ".join(_whole_batch_names(layout, num_microbatches))
        raise ShapeError(
            f"this order cannot play hocket.WholeBatch: {error}. With "
            f"{num_microbatches} microbatches on {layout.num_devices} devices these "
            f"can: {names}"
        ) from None


def _whole_batch_names(layout: Layout, num_microbatches: int) -> Iterator[str]:
    """Yield the schedules that can have a loss over the whole batch."""
    for name in sorted(SCHEDULES):
        if SCHEDULES[name].is_data_parallel:
            continue
        with contextlib.suppress(PlanError):
            made = _made(name, layout, num_microbatches, None, {})
            if all(stage.trainable for stage in made.program.stages):
                add_whole_batch_loss(made)
                yield name


_NUM_REPEATS: Final = 3  # of a body, to predict a step's time among others


def _made(
    name: str,
    layout: Layout,
    num_microbatches: int,
    stages_per_device: int | None,
    options: Mapping[str, Any],
) -> Schedule:
    make = partial(
        make_schedule,
        name,
        num_devices=layout.num_devices,
        num_microbatches=num_microbatches,
        num_replicas=layout.num_pipelines,
        stages_per_device=stages_per_device,
        **options,
    )
    made = make()
    if not any(stage.delay for stage in made.program.stages):
        return merge_unneeded_splits(made)
    num_steps = 1
    while not made.body:  # prologue and epilogue leave no room for one
        num_steps += 1
        made = make(num_steps=num_steps)
    return made.with_num_steps(num_steps - made.num_repeats + _NUM_REPEATS)


def _given(
    schedule: str | Path | Schedule, layout: Layout, num_microbatches: int
) -> Schedule:
    if not isinstance(schedule, Schedule):
        schedule = _read(schedule, layout)
    refuse_other_sizes(
        schedule.program,
        num_devices=layout.num_devices,
        num_microbatches=num_microbatches,
        num_replicas=layout.num_replicas,
        num_shards=layout.num_shards,
        has_body=bool(schedule.body),
    )
    if schedule.kinds.isdisjoint(SHARDING):
        schedule = add_gathers(schedule)
    return playable_order(schedule)


def _read(path: str | Path, layout: Layout) -> Schedule:
    return read_schedule(
        Path(path), num_replicas=layout.num_replicas, num_shards=layout.num_shards
    )


def _faults(order: Schedule, *, whole_batch: bool) -> Iterator[str]:
    """Return what the pipeline does not run, though the schedule may be valid."""
    yield from _stage_faults(order)
    if len(order.program.nets) > 1:
        names = ", ".join(net.name for net in order.program.nets)
        yield (
            f"nets {names}: a pipeline trains one net; "
            "hocket.run.engine.program_run.ProgramRun runs several"
        )
    if order.program.loss_stages and not whole_batch:
        yield "op L needs a loss over the whole batch: loss=hocket.WholeBatch(loss)"


def _stage_faults(order: Schedule) -> Iterator[str]:
    for number, stage in enumerate(order.program.stages):
        if not stage.trainable:
            yield f"stage {number} is not trained: evaluate() runs it forward only"
