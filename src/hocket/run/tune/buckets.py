"""Makes the order of `schedule="reverse-first-k"`, before the first step.

    all workers   profile layers, step the optimizer, reduce over all ─▶ costs ─┐
    rank 0                      memory_bytes ─▶ simulate ─▶ buckets, a first k ─▶ all
    all workers   run a few steps in these buckets (dry_run.py) ─▶ costs in place ─┐
    rank 0                                             simulate ─▶ k ─▶ all

A bucket of gradients is a stage: the model is cut where the buckets begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hocket.core.costs import Costs, Link, with_recompute
from hocket.core.schedule import Schedule
from hocket.errors import FitError, ShapeError
from hocket.model.stages.cut import boundaries_from_names
from hocket.planner.replicas.buckets import (
    BucketChoice,
    BucketSearch,
    best_k,
    choose_buckets,
)
from hocket.planner.stages import stage_costs
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, cut_and_measure
from hocket.run.tune.cut.profiled_model import ProfiledModel, profile_model
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_ring
from hocket.run.tune.profile_workers import update_s_per_byte

RECOMPUTE: Final = {"none": (False,), "all": (True,), "auto": (False, True)}
NUM_LAYERS: Final = 12  # into which a model is divided at least
_HOST_S: Final = 100e-6  # of each op: the host's work, and the caches that it disturbs


def bucketed_order(
    config: PipelineConfig, context: WorkerContext, known: ProfiledModel | None
) -> tuple[Schedule, CutModel]:
    """Choose buckets and k, and make the order. Every worker must call this.

    Args:
        config: the pipeline's; its `cut` names the buckets, if it is given.
        context: this worker's context.
        known: the profiled model, if it was profiled already.

    Returns:
        The order of a few steps, and the model cut into its buckets.

    Raises:
        ShapeError: there is one replica, or several devices for each; the number of
            stages is given without their names; or the loss is over the whole batch.
        FitError: the model does not fit a device; names the memory that works.
        ModelError: the model cannot be captured or cut as asked.
    """
    _refuse(config, context)
    world = context.world
    if known is None:
        known = profile_model(config, world, NUM_LAYERS)
    searches = _searches(config, context, known)

    def decide() -> dict[str, Any]:
        number, found = _chosen(searches)
        return {
            "boundaries": found.boundaries,
            "k": found.k,
            "recomputes": number or config.recompute == "all",
        }

    decided = decide_on_rank_0(world, decide, "buckets of reverse-first-k")
    boundaries = tuple(map(int, decided["boundaries"]))
    guess = searches[0].schedule(boundaries, int(decided["k"]))
    found = cut_and_measure(config, guess.program, context, known, boundaries)
    recomputed = range(len(boundaries) + 1) if decided["recomputes"] else ()
    costs = replace(found.costs, reduce_link=searches[0].costs.reduce_link)
    found = replace(found, costs=costs)
    (net,) = guess.program.nets
    in_place = dry_run(
        with_recompute(costs, guess.program, recomputed),
        [found.known.captured],
        guess,
        [NetSetup(net.name, found.modules, (), config.loss, config.training)],
        {net.name: config.microbatches()[:1]},
        PointToPoint(plan_to_play(guess), context),
    )
    search = searches[0].in_place(boundaries, in_place)
    k = decide_on_rank_0(
        world, lambda: best_k(search, boundaries).k, "k of reverse-first-k"
    )
    return search.schedule(boundaries, int(k)), found


def _refuse(config: PipelineConfig, context: WorkerContext) -> None:
    layout, num_workers = context.layout, context.world.world_size
    if layout.num_pipelines == 1:
        raise ShapeError(
            "reverse-first-k hides reductions over replicas, and there is one replica "
            f"of {num_workers} workers: use num_replicas={max(2, num_workers)} on as "
            "many workers, or a pipeline such as 1f1b"
        )
    if layout.num_devices > 1:
        raise ShapeError(
            f"reverse-first-k puts the whole model on each device: {num_workers} "
            f"workers with num_replicas={layout.num_pipelines} are "
            f"{layout.num_devices} devices per replica; use "
            f"num_replicas={num_workers}, or a pipeline such as 1f1b"
        )
    if config.stages_per_device is not None and config.cut is None:
        raise ShapeError(
            f"stages_per_device={config.stages_per_device}: reverse-first-k finds the "
            "number of its buckets; leave it out, or name with cut= the modules with "
            "which buckets begin"
        )
    if config.whole_batch:
        raise ShapeError(
            "reverse-first-k cannot play hocket.WholeBatch, whose loss has an op of "
            "its own: with num_microbatches=1 the plain loss sees all of a replica's "
            'samples; else take schedule="gpipe"'
        )


def _searches(
    config: PipelineConfig, context: WorkerContext, known: ProfiledModel
) -> list[BucketSearch]:
    """Measure, and return what to try in turn. Every worker must call this."""
    world, captured = context.world, known.captured
    states = config.state_bytes(captured.state.trained)
    rate = update_s_per_byte(captured, config.make_optimizer, states, world)
    cut = config.cut
    num_samples = config.microbatches()[0].num_samples
    layers = known.work(config, rate).layers(num_samples)
    stages_of = partial(stage_costs, layers, update_s_per_byte=rate)
    costs = Costs((), reduce_link=measure_ring(world) or Link(), op_s=_HOST_S)
    return [
        BucketSearch(
            layers,
            partial(stages_of, recomputes=recomputes),
            costs,
            context.layout.num_pipelines,
            config.num_microbatches,
            config.memory_of(world),
            given=None if cut is None else tuple(boundaries_from_names(captured, cut)),
        )
        for recomputes in RECOMPUTE[config.recompute]
    ]


def _chosen(searches: Sequence[BucketSearch]) -> tuple[int, BucketChoice]:
    """Return the first search in which something fits, and its choice."""
    last = len(searches) - 1
    for number, search in enumerate(searches[:last]):
        try:
            return number, choose_buckets(search)
        except FitError:
            continue
    return last, choose_buckets(searches[last])
