"""Decides how many forwards of a net fill each device's bubbles, and runs them there.

all workers   measure one forward each ─▶ the slowest of a device's replicas
rank 0        fill_bubbles(order, costs) ─▶ the order ─▶ all workers
each worker   puts its forwards between the ops of its lane

lane         0F0 0F1 f f 0B0 ...       each f takes the next batch that was read
reader            └ batches of the next step, in a thread of its own
after step   on_output(rows, output)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from hocket.background import BackgroundCalls
from hocket.core.costs import Costs, StageCost
from hocket.core.gates import gates_of
from hocket.core.op import Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import long_step_s, simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import byte_size
from hocket.errors import ConfigError, DataError, FitError, PlanError, WaitError
from hocket.model.profile.allocations import allocations
from hocket.model.profile.precision import timed_rounds
from hocket.passes.fill_bubbles import fill_bubbles
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import call_arguments, digest, on_device, whole
from hocket.run.device.memory import memory_bytes
from hocket.run.engine.lanes.action import Instruction, OpAction, Playing
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.plan import Plan
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.fill.settings import Fill

_CLOSE_S: Final = 1.0  # for the read under way


class _Filling:
    """The forwards of one worker.

    Every worker counts alike which samples all of them have done: play `k` of the
    pipeline's order does the next `sum(counts)` batches, in the order of ranks.

    Args:
        fill: the user's argument; None for no forwards.
        counts: the forwards of each rank in one play of the order.
        rank: this worker's.
        device: where the net is.
        predicted: the simulated timeline of the filled order.
        timeout_s: the longest wait for a sample.

    Attributes:
        predicted: the simulated timeline of the filled order.
        counts: the forwards of each rank in one play of the order.
        predicted_slowdown: the share by which a step of a long run becomes longer.
    """

    predicted_slowdown = 0.0

    def __init__(
        self,
        fill: Fill | None,
        counts: Sequence[int],
        rank: int,
        device: torch.device,
        predicted: Timeline,
        timeout_s: float,
    ) -> None:
        self.predicted, self.counts = predicted, tuple(counts)
        self._fill, self._rank, self._device = fill, rank, device
        self._size = 0 if fill is None else fill.batch_size
        self._num_samples = 0 if fill is None else len(fill.samples)
        self._timeout_s = timeout_s
        self._reader = BackgroundCalls("hocket fill")
        self._outputs: deque[tuple[range, Any]] = deque()
        self._first_row = 0
        self._num_begun = 0  # plays, over all workers alike
        self._num_played = 0  # by this worker's lane
        self._batches: list[Future[Any] | None] = []
        self._read_next()

    @property
    def num_samples(self) -> int:
        """How many samples all workers together have done, of those in plays begun."""
        return min(self._num_samples, self._row_of(self._num_begun))

    @property
    def is_done(self) -> bool:
        """Whether all samples are done: forwards of the net then end."""
        return self.num_samples == self._num_samples

    def begin(self, num_plays: int) -> None:
        """Count so many plays of the order; every worker does so at the same steps."""
        self._num_begun += num_plays

    def action(self, index: int) -> OpAction:
        """Return what does the forward of a number in each play of the order.

        It raises DataError where a sample could not be read, and WaitError where it
        did not come in time.
        """
        return OpAction([Instruction("forward", partial(self._forward, index))])

    def _forward(self, index: int, _: Playing) -> None:
        batch, rows = self._batches[index], self._rows(index)
        if batch is not None and self._fill is not None:
            try:
                inputs = batch.result(self._timeout_s)
            except Exception as error:  # a TimeoutError may be the data set's own
                what = f"samples {rows.start} to {rows.stop - 1} of fill"
                if not batch.done():
                    raise WaitError(
                        f"{what} did not come within {self._timeout_s:g} s"
                    ) from error
                raise DataError(
                    f"{what} could not be read: {type(error).__name__}: {error}"
                ) from error
            args, kwargs = call_arguments(whole(on_device(inputs, self._device)))
            with torch.no_grad():
                self._outputs.append((rows, self._fill.net(*args, **kwargs)))
        if index == len(self._batches) - 1:
            self._num_played += 1
            self._read_next()

    def deliver(self) -> None:
        """Hand out the outputs that there are."""
        while self._outputs and self._fill is not None:
            self._fill.on_output(*self._outputs.popleft())

    def resume_from(self, row: int) -> None:
        """Set the next sample, after a checkpoint was loaded."""
        self._outputs.clear()
        self._first_row, self._num_begun, self._num_played = row, 0, 0
        self._read_next()

    def close(self) -> None:
        """End the reader; one that sits in a read is left behind."""
        self._reader.close(_CLOSE_S)

    def _row_of(self, num_plays: int) -> int:
        return self._first_row + num_plays * sum(self.counts) * self._size

    def _rows(self, index: int) -> range:
        """Return the samples of a forward in the play that the lane is at."""
        size, total = self._size, self._num_samples
        before = sum(self.counts[: self._rank]) + index
        begin = self._row_of(self._num_played) + before * size
        return range(min(begin, total), min(begin + size, total))

    def _read_next(self) -> None:
        """Begin to read the batches of the next play."""
        self._batches = []
        fill = self._fill
        if fill is None:
            return
        for index in range(self.counts[self._rank]):
            rows = self._rows(index)
            read = partial(_read, fill, rows)
            self._batches.append(self._reader.submit(read) if rows else None)


def _read(fill: Fill, rows: range) -> Any:
    return fill.collate([fill.samples[row] for row in rows])


_NUM_WARM: Final = 2
_NUM_PASSES: Final = 7
_MARGIN: Final = 1.1  # forwards and waits vary: a wait is filled to nine tenths


def make_filling(
    fill: Fill | None,
    plan: Plan,
    player: Player,
    world: World,
    layout: Layout,
    most_bytes: int | None,
) -> _Filling:
    """Fill the bubbles of a plan's order. Every worker must call this.

    Args:
        fill: the user's argument, the same on every worker; None for no forwards.
        plan: the trained net's; it stays as it is.
        player: plays it on this worker.
        world: the job.
        layout: the ranks by device and replica.
        most_bytes: the memory of a device; what it has when not given.

    Raises:
        ConfigError: the order cannot be filled.
        PlanError: no forward is shorter than a wait.
        FitError: a device has too little memory; names the number that works.
        SchemaError: workers have different nets or data sets.
    """
    if fill is None:
        return _Filling(None, (), world.rank, world.device, plan.predicted, 0.0)
    if not player.takes_others:
        raise ConfigError(
            f"fill: steps of schedule {plan.schedule_name or 'given'!r} overlap, or "
            "are one graph, or have several lanes per device. Take an order that ends "
            'each step before the next begins: "1f1b", "gpipe" or "zb-h1"; with '
            "teachers, look_ahead=0 (and delay=0), without teacher_lane: one that is "
            "ahead fills the waits itself"
        )
    state = dict(fill.net.state_dict())
    sizes = f"{len(fill.samples)} samples, {fill.batch_size}, {fill.max_slowdown}"
    refuse_differences(
        world, {"net of fill": f"{digest((state, 0)):08x}", "settings of fill": sizes}
    )
    fill.net.to(world.device)
    own = asdict(_measured(fill, world.device))
    parts: list[Any] = world.gather_json(own, "costs of fill")
    forwards = [
        _slowest([parts[rank] for rank in layout.ranks_of(device)])
        for device in range(layout.num_devices)
    ]
    most = memory_bytes(world) if most_bytes is None else most_bytes

    def decide() -> str:
        order, costs = fill_bubbles(
            plan.schedule, plan.costs, forwards, max_slowdown=fill.max_slowdown
        )
        _refuse_long(plan, order, forwards)
        _refuse_large(plan, order, costs, most)
        return str(order)

    text = decide_on_rank_0(world, decide, "order with forwards of fill")
    order, first = Schedule.parse(text), plan.schedule.program.num_stages
    lanes = [_others(order, first, d) for d in range(layout.num_devices)]
    costs = _joined(plan.costs, order, first, forwards)
    filling = _Filling(
        fill,
        [len(lanes[layout.device_of(rank)]) for rank in range(world.world_size)],
        world.rank,
        world.device,
        simulate(order, costs, gates_of(order, clips=False)),
        world.timeout_s,
    )
    alone_s = long_step_s(plan.schedule, plan.costs)
    filling.predicted_slowdown = long_step_s(order, costs) / alone_s - 1.0
    forwards_here = enumerate(lanes[layout.device])
    player.play_others(order, {op: filling.action(i) for i, op in forwards_here})
    return filling


def _others(order: Schedule, first: int, device: int) -> list[Op]:
    """Return the forwards of a device, in their order.

    Args:
        order: the filled order.
        first: the first stage that is not the trained net's.
        device: the device.
    """
    (lane,) = order.lanes_of(device)
    return [op for op in order.lanes[lane].ops if op.stage >= first]


def _joined(
    costs: Costs, order: Schedule, first: int, forwards: Sequence[StageCost]
) -> Costs:
    """Return the costs of a filled order's program."""
    others = [forwards[stage.device] for stage in order.program.stages[first:]]
    return replace(costs, stages=(*costs.stages, *others))


def _measured(fill: Fill, device: torch.device) -> StageCost:
    """Measure one forward on the first samples."""
    rows = range(min(fill.batch_size, len(fill.samples)))
    inputs = fill.collate([fill.samples[row] for row in rows])
    args, kwargs = call_arguments(whole(on_device(inputs, device)))
    seconds: list[float] = []
    with torch.no_grad():
        for span in timed_rounds(seconds, device, _NUM_PASSES, _NUM_WARM):
            with span:
                fill.net(*args, **kwargs)
        with allocations(device) as log, log.span():
            fill.net(*args, **kwargs)
    state = [*fill.net.parameters(), *fill.net.buffers()]
    return StageCost(
        forward_s=median(seconds) * _MARGIN,
        weight_bytes=sum(x.nbytes for x in state),
        forward_work_bytes=log.peaks[0],
    )


def _slowest(parts: Sequence[dict[str, Any]]) -> StageCost:
    """Return the cost of a forward on the slowest replica of a device."""
    return StageCost(**max(parts, key=lambda part: float(part["forward_s"])))


def _refuse_long(plan: Plan, order: Schedule, forwards: Sequence[StageCost]) -> None:
    """Refuse a net of which no forward fits into any wait.

    Raises:
        PlanError: gives the seconds.
    """
    if len(order.program.stages) > plan.schedule.program.num_stages:
        return
    least_s = min(x.forward_s for x in forwards)
    timeline = plan.predicted
    shares = [
        timeline.lane_bubble_fraction(lane) for lane in range(len(plan.schedule.lanes))
    ]
    raise PlanError(
        f"fill: one forward takes {1e3 * least_s:.3g} ms, and the host "
        f"{1e3 * plan.costs.op_s:.3g} ms for an op; no device of schedule "
        f"{plan.schedule_name!r} waits for so long at once: of a step of "
        f"{1e3 * timeline.makespan_s:.3g} ms they wait for "
        f"{', '.join(f'{share:.0%}' for share in shares)}. Take a smaller batch_size, "
        "fewer microbatches or a larger max_slowdown"
    )


def _refuse_large(plan: Plan, order: Schedule, costs: Costs, most: int) -> None:
    """Refuse a net that does not fit beside the trained one.

    Raises:
        FitError: names the smallest memory that works.
    """
    timeline = simulate(order, costs)
    peaks = [timeline.peak_bytes(d) for d in range(order.program.num_devices)]
    device = peaks.index(max(peaks))
    needed = round(peaks[device])
    if needed > most:
        alone = round(plan.predicted.peak_bytes(device))
        raise FitError(
            f"fill: device {device} needs {byte_size(needed)} with the net of fill, "
            f"{byte_size(alone)} without, and has {byte_size(most)}. The smallest "
            f"memory_bytes that works is {needed}; a smaller batch_size or net, or "
            'recompute="auto" for the model, needs less',
            device=device,
            needed_bytes=needed,
            memory_bytes=most,
        )
