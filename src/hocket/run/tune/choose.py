"""`schedule="auto"`: chooses the fastest order that fits the memory.

    all workers   profile model, send messages ───┐              ┌─▶ make the order
    rank 0                                        └─▶ rank the orders ─▶ broadcast ──┘

Rank 0 decides and broadcasts, since floating-point results differ between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.errors import FitError, PlanError
from hocket.planner.candidate import REVERSE_FIRST_K
from hocket.planner.cluster import Cluster
from hocket.planner.rank import STAGES_PER_DEVICE, Search, rank
from hocket.planner.ranking.report import Ranking
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.buckets import NUM_LAYERS, RECOMPUTE
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import messages_of
from hocket.run.tune.cut.profiled_model import ProfiledModel, profile_model
from hocket.run.tune.link_costs import usual_cluster
from hocket.run.tune.order import make_order
from hocket.schedules import SCHEDULES

_ACTIVITY: Final = "choosing the order"
_LEAST_GAIN: Final = 0.02  # of reverse first-k, whose buckets are measured besides


def choose_order(
    config: PipelineConfig, context: WorkerContext
) -> tuple[PipelineConfig, ProfiledModel]:
    """Choose the schedule, the same on every worker. Every worker must call this.

    Args:
        config: the pipeline's.
        context: this worker's context, with a transport that is used for nothing else.

    Returns:
        The configuration with the schedule's name and its stages per device; and the
        profiled model.

    Raises:
        FitError: no order fits the memory.
        PlanError: no order takes the numbers.
        ModelError: the model cannot be captured.
    """
    world, layout = context.world, context.layout
    num_layers = NUM_LAYERS if may_reverse(config, layout) else 0
    known = profile_model(config, world, num_layers)
    known = replace(known, messages=messages_of(known, config, context))
    most = config.memory_of(world)

    def decide() -> tuple[str, int]:
        cluster = usual_cluster(world, most, known.messages)
        return _best(config, known, cluster, search_of(config, layout))

    config.report(_ACTIVITY)
    name, num_stages = decide_on_rank_0(world, decide, "choice of the schedule")
    is_free = SCHEDULES[name].is_data_parallel  # whose number of buckets is found
    stages = None if is_free else num_stages
    return replace(config, schedule=name, stages_per_device=stages, max_delay=0), known


def _best(
    config: PipelineConfig, known: ProfiledModel, cluster: Cluster, search: Search
) -> tuple[str, int]:
    """Return the schedule's name, and its stages per device.

    Raises:
        FitError: no order fits the memory.
        PlanError: no order takes the numbers.
    """
    batch_size = config.microbatches()[0].num_samples * config.num_parts
    report = partial(config.report, _ACTIVITY)
    try:
        ranking = rank(known.work(config), cluster, batch_size, search, progress=report)
    except PlanError as error:
        raise PlanError(f'schedule="auto": {error}') from None
    return chosen(ranking)


def chosen(ranking: Ranking) -> tuple[str, int]:
    """Return the name of the schedule to play, and its stages per device.

    Raises:
        FitError: no order fits the memory.
    """
    if ranking.best is None:
        least = ranking.too_large[0]
        sizes = [split.total_bytes for split in least.memory]
        what, name = 'schedule="auto": no order', least.candidate.schedule
        raise no_order_fits(what, name, sizes, least.budget_bytes)
    best, pipeline = ranking.best, ranking.best_pipeline
    if best.candidate.schedule == REVERSE_FIRST_K and pipeline is not None:
        is_faster = best.step_s < (1 - _LEAST_GAIN) * pipeline.step_s
        best = best if is_faster else pipeline
    return best.candidate.schedule, best.candidate.stages_per_device


def no_order_fits(
    what: str, schedule: str, sizes: Sequence[float], most: int
) -> FitError:
    """Return the error that no order fits the memory.

    Args:
        what: begins the sentence.
        schedule: the name of the order that misses least.
        sizes: the bytes that it needs on each device.
        most: the bytes that there are.
    """
    needed = round(max(sizes))
    device = sizes.index(max(sizes))
    return FitError(
        f"{what} fits {byte_size(most)} per device; {schedule} misses least, with "
        f"{byte_size(needed)} on device {device}. The smallest memory_bytes that works "
        f"is {needed}; more devices, more microbatches, a smaller batch, or "
        'recompute="auto" need less',
        device=device,
        needed_bytes=needed,
        memory_bytes=most,
    )


def search_of(config: PipelineConfig, layout: Layout) -> Search:
    """Return which orders `schedule="auto"` considers.

    Args:
        config: the pipeline's.
        layout: the ranks by device and replica.
    """
    num_microbatches = config.num_microbatches
    choices: tuple[int, ...] = STAGES_PER_DEVICE
    if config.stages_per_device is not None:
        choices = (config.stages_per_device,)
    elif config.cut is not None:
        choices = ((len(config.cut) + 1) // layout.num_devices,)
    return Search(
        schedules=(
            *playable(
                layout,
                num_microbatches,
                config.max_delay,
                whole_batch=config.whole_batch,
            ),
            *((REVERSE_FIRST_K,) if may_reverse(config, layout) else ()),
        ),
        num_devices=(layout.num_devices,),
        num_shards=(1,),
        num_microbatches=(num_microbatches,),
        stages_per_device=choices,
        recompute=RECOMPUTE[config.recompute],
        data_parallel=False,
        max_delay=config.max_delay,
        clips=config.clip_norm is not None,
    )


def may_reverse(config: PipelineConfig, layout: Layout) -> bool:
    """Return whether `schedule="auto"` considers reverse first-k.

    It needs replicas of one device each. Clipping, a loss scale and accumulating have a
    barrier or are refused; with several microbatches a pipeline's flush is as short.
    """
    return (
        layout.num_devices == 1
        and layout.num_pipelines > 1
        and config.num_microbatches == 1
        and config.accumulate == 1
        and config.clip_norm is None
        and config.precision != "float16"
        and config.stages_per_device is None
        and not config.whole_batch
    )


def playable(
    layout: Layout, num_microbatches: int, max_delay: int, *, whole_batch: bool = False
) -> Iterator[str]:
    """Return the schedules that the runtime runs, with weights no staler than allowed.

    Args:
        layout: the ranks by device and replica.
        num_microbatches: microbatches of each replica.
        max_delay: by how many updates weights may be stale.
        whole_batch: whether the loss is over the whole batch.
    """
    for name in sorted(SCHEDULES):
        if SCHEDULES[name].is_data_parallel:
            continue
        try:
            order = make_order(
                name, layout, num_microbatches, None, whole_batch=whole_batch
            )
        except PlanError:
            continue
        if max(stage.delay for stage in order.program.stages) <= max_delay:
            yield name
