"""Keeps what is known of each running job, and opens gates as `policy.decide` says.

    join ▶ wait ▶ [go on] ▶ begin backward ▶ finish ▶ wait ▶ ... ▶ leave

Every method takes the time, so that threads (`gate`) and a fake clock (`simulate`) keep
the same board.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, nan
from statistics import median_low
from typing import Final

from hocket.sharing.forecast import Forecast, KindTimes, mean_alone_s, slowdown
from hocket.sharing.policy import RUNNING, WAITING, JobState, Mode, Point, decide

MEMORY_MARGIN: Final = 1.1  # an iteration that held more was not as forecast
TIME_MARGIN: Final = 3.0  # the same, for one that took longer


_WINDOW: Final = 5  # iterations that show whether a job grows steadily
_LEAST_BYTES: Final = 1024  # per iteration; losses that are kept are less
_LEAST_SHARE: Final = 1e-4  # of all that the job holds


@dataclass(slots=True)
class Growth:
    """The bytes that one job holds between iterations, tracked while they grow.

        bytes that               ┌─┘ ...     a leak, or a buffer that is being filled:
        stay       ┌─┐         ┌─┘           watched for as long as it grows
               ────┘ └─────────┘             accumulated gradients come and go
                watched     watched

    As Zico (Lim et al., ATC 2021) replaces what was forecast of an iteration by what
    was observed. To assume growth of iterations that were not watched could end a job
    that empties a buffer now and then.

    Args:
        first_bytes: when it was first watched. Less never counts: what another job has
            left may be freed while this one is watched.

    Attributes:
        static_bytes: the bytes as of the last iteration that was watched.
    """

    first_bytes: float
    static_bytes: float = field(init=False)
    _lasting_bytes: float = field(init=False)  # without what may come and go
    _window: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        """Begin with what was seen first."""
        self.static_bytes = self._lasting_bytes = self.first_bytes

    @property
    def rate(self) -> float:
        """Return the bytes by which each of the last watched iterations grew.

        The median, rounded down: growth that the next iteration frees does not count.
        """
        return max(0.0, median_low(self._window)) if self._window else 0.0

    def see(self, grown_bytes: float, num_unseen: int = 0) -> None:
        """Count an iteration that was watched.

        Args:
            grown_bytes: by how much more the job held at its end than at that of the
                iteration before.
            num_unseen: how many iterations since then were not watched. If any, growth
                that did not last for five watched iterations is dropped.
        """
        if num_unseen:
            self.static_bytes = self._lasting_bytes
            self._window.clear()
        self._window.append(grown_bytes)
        self.static_bytes = max(self.static_bytes + grown_bytes, self.first_bytes)
        is_steady = len(self._window) == _WINDOW and self.rate > 0
        if is_steady or self.static_bytes < self._lasting_bytes:
            self._lasting_bytes = self.static_bytes

    def must_watch(self, peak_bytes: float) -> bool:
        """Return whether the job still grows, so that the next iteration is watched.

        Args:
            peak_bytes: what an iteration needs beyond the bytes between iterations.
        """
        least = max(_LEAST_BYTES, _LEAST_SHARE * (self.static_bytes + peak_bytes))
        if len(self._window) < _WINDOW:
            return sum(self._window) > least * len(self._window)
        return self.rate > least


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a job, as it happened.

    Args:
        number: from 0.
        request_s: when the job came to the gate.
        start_s: when the gate opened.
        backward_s: when its first backward began.
        end_s: when it ended.
        delay_s: how long gates held it, those within the iteration included.
        ran_alone: whether no other job was within an iteration at the same time.
        kind: see `JobContext.kind`.
    """

    number: int
    request_s: float
    start_s: float
    backward_s: float
    end_s: float
    delay_s: float
    ran_alone: bool
    kind: str = ""


@dataclass(slots=True)
class JobRecord:
    """One job on the board.

    Args:
        state: what the policy reads.
        max_slowdown: how much slower than alone the job may be; inf for no limit.
        iterations: those that ended.
        kinds: what iterations of each kind take alone, and took.
        num_wrong: how often its forecast did not hold.
        memory_held: whether the last iteration that was watched held what was forecast.
        growth: what it holds between iterations; None if nothing was watched.
        errors_s: by how much the last iterations were longer or shorter than forecast.
        forwards_s: the seconds of the forwards of the last iterations.
        backwards_s: those of the backwards.
        num_seen: the iterations that had ended when memory was last watched.
    """

    state: JobState
    max_slowdown: float
    iterations: list[Iteration] = field(default_factory=list)
    kinds: dict[str, KindTimes] = field(default_factory=dict)
    num_wrong: int = 0
    memory_held: bool = True
    growth: Growth | None = None
    errors_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    forwards_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    backwards_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    num_seen: int = 0
    request_s: float = nan
    first_start_s: float = nan
    first_backward_s: float = nan
    delay_s: float = 0.0
    spent_s: float = 0.0  # of this iteration, at gates too: without loading data
    ran_alone: bool = True
    forward_s: float = 0.0  # of this iteration
    backward_s: float = 0.0

    def move(self, point: Point, now_s: float) -> None:
        """Come to another point."""
        state = self.state
        passed_s = now_s - state.point_s
        if state.point is not Point.AWAY:
            self.spent_s += passed_s
        if state.point is Point.FORWARD:
            self.forward_s += passed_s
        elif state.point is Point.BACKWARD:
            self.backward_s += passed_s
        state.come_to(point, now_s)

    @property
    def is_begun(self) -> bool:
        """Return whether it is within an iteration; in tick-tock also at a gate."""
        return self.first_start_s == self.first_start_s

    @property
    def grows(self) -> bool:
        """Return whether it holds more after each iteration than before."""
        state = self.state
        if self.growth is None or state.forecast is None:
            return False
        return self.growth.must_watch(state.forecast.curve.peak)

    @property
    def alone_s(self) -> dict[str, float]:
        """Return the mean seconds of its iterations alone, by kind; nan if unknown."""
        return {kind: times.mean_s for kind, times in self.kinds.items()}

    @property
    def solo_s(self) -> float:
        """Return the mean seconds of its iterations alone; nan if unknown."""
        return mean_alone_s(self.kinds.values())

    def slowdown(self, now_s: float) -> float:
        """Return its time so far over that of the same iterations alone.

        The time in which it loads data counts in neither.
        """
        state = self.state
        at_s = 0.0 if state.point is Point.AWAY else now_s - state.point_s
        return slowdown(self.kinds.values(), self.spent_s + at_s)


class Board:
    """See above.

    Args:
        mode: how jobs share; may change between two iterations.
        budget_bytes: the most that all jobs may hold; may change at any time.
    """

    def __init__(self, mode: Mode, budget_bytes: float = inf) -> None:
        self.mode = mode
        self.budget_bytes = budget_bytes
        self.records: dict[str, JobRecord] = {}
        self.lost_bytes = 0.0  # held by jobs that hang
        self._last_s = -inf

    def switch(self, mode: Mode) -> None:
        """Share in another mode, in which no job is behind another one.

        In turns short iterations start more often than long ones. A mode that compares
        starts would let the others catch up first.
        """
        self.mode = mode
        for record in self.records.values():
            record.state.num_starts = record.state.num_backwards = 0
            record.state.device_s = record.state.missed_s = 0.0

    def join(
        self,
        name: str,
        now_s: float,
        *,
        weight: float = 1.0,
        max_slowdown: float = inf,
        static_bytes: float = 0.0,
        forecast: Forecast | None = None,
    ) -> None:
        """Add a job; it starts level with the job that is furthest behind."""
        self._spend(now_s)
        states = [record.state for record in self.records.values()]
        used_s = min((state.used for state in states), default=0.0)
        self.records[name] = JobRecord(
            JobState(
                name,
                weight,
                point_s=now_s,
                num_starts=min((x.num_starts for x in states), default=0),
                num_backwards=min((x.num_backwards for x in states), default=0),
                device_s=used_s * weight,
                static_bytes=static_bytes,
                forecast=forecast,
                is_trusted=forecast is not None,
            ),
            max_slowdown,
            kinds={"": KindTimes(nan if forecast is None else forecast.seconds)},
        )

    def leave(self, name: str, now_s: float, *, keeps_memory: bool = False) -> None:
        """Remove a job.

        Args:
            name: the job.
            now_s: the time.
            keeps_memory: whether what it holds is lost, as it hangs.
        """
        self._spend(now_s)
        state = self.records.pop(name).state
        if keeps_memory:
            peak = state.forecast.curve.peak if state.forecast else 0.0
            self.lost_bytes += state.static_bytes + peak

    def wait(self, name: str, point: Point, now_s: float) -> None:
        """Let a job come to a gate."""
        self._spend(now_s)
        record = self.records[name]
        if not record.is_begun:
            record.request_s = now_s
            if record.iterations and record.state.point is Point.AWAY:
                record.state.away_s = now_s - record.iterations[-1].end_s
        record.move(point, now_s)

    def open_gates(self, now_s: float) -> tuple[tuple[str, ...], float]:
        """Let jobs go on as the policy says.

        Returns:
            The jobs that go on, and when to ask again if nothing changes; inf: never.
        """
        self._spend(now_s)
        opened: list[str] = []
        budget_bytes = self.budget_bytes - self.lost_bytes
        for record in self.records.values():
            if record.max_slowdown < inf:
                record.state.is_urgent = record.slowdown(now_s) > record.max_slowdown
        states = [record.state for record in self.records.values()]
        while any(state.point in WAITING for state in states):
            decision = decide(self.mode, states, budget_bytes, now_s)
            if not decision.starts:
                return tuple(opened), decision.look_s
            for name in decision.starts:
                self._go_on(self.records[name], now_s)
            opened += decision.starts
        return tuple(opened), inf

    def begin_backward(self, name: str, now_s: float) -> None:
        """Mark the start of a backward that no gate holds."""
        record = self.records[name]
        if record.state.point is not Point.BACKWARD:
            self._spend(now_s)
            self._enter_backward(record, now_s)

    def finish(
        self, name: str, now_s: float, *, kind: str = "", is_watched: bool = False
    ) -> Iteration:
        """Mark the end of a job's iteration.

        Args:
            name: the job.
            now_s: the time.
            kind: see `JobContext.kind`.
            is_watched: whether its memory was watched, which takes time.
        """
        self._spend(now_s)
        record = self.records[name]
        begun = record.first_backward_s
        iteration = Iteration(
            len(record.iterations),
            record.request_s,
            record.first_start_s,
            now_s if begun != begun else begun,
            now_s,
            record.delay_s,
            record.ran_alone,
            kind,
        )
        record.iterations.append(iteration)
        record.move(Point.AWAY, now_s)
        times = record.kinds.setdefault(kind, KindTimes())
        if record.ran_alone:
            lasted_s = now_s - record.first_start_s
            times.ran_alone(lasted_s, record.spent_s, is_rough=is_watched)
        else:
            times.ran_beside(record.spent_s)
        record.first_start_s = record.first_backward_s = nan
        record.delay_s = record.spent_s = 0.0
        return iteration

    def observe(
        self, name: str, seen: Forecast, left_bytes: float, grown_bytes: float = 0.0
    ) -> float:
        """Judge a job's forecast by an iteration whose memory was watched.

        If it did not hold, the job's iterations run alone until one holds again.

        Args:
            name: the job.
            seen: the iteration.
            left_bytes: what the job has allocated since it was watched, and not freed;
                counts the first time, when that is all that it holds.
            grown_bytes: by how much more it held at the iteration's end than at that of
                the one before.

        Returns:
            What it holds between iterations.
        """
        record = self.records[name]
        state, before = record.state, record.state.forecast
        num_unseen = len(record.iterations) - record.num_seen - 1
        record.memory_held, record.num_seen = True, len(record.iterations)
        if record.growth is None:  # what it left has what it grew by
            before_bytes = left_bytes - max(0.0, grown_bytes)
            record.growth, num_unseen = Growth(max(0.0, before_bytes)), 0
        record.growth.see(grown_bytes, num_unseen)
        static_bytes = record.growth.static_bytes
        if before is not None:
            most_bytes = state.static_bytes + before.curve.peak * MEMORY_MARGIN
            record.memory_held = static_bytes + seen.curve.peak <= most_bytes
            record.num_wrong += not record.memory_held
            seen = seen.retimed(before.forward_s, before.backward_s)
        state.forecast = seen
        # The next iteration is expected to leave as much more as the last ones.
        state.static_bytes = static_bytes + record.growth.rate
        state.is_trusted = record.memory_held
        return static_bytes

    def retime(self, name: str) -> None:
        """Take the durations of the next iteration from the last three."""
        record = self.records[name]
        forecast = record.state.forecast
        if forecast is None:
            return
        own_s = record.forward_s + record.backward_s
        alone_s = record.kinds[record.iterations[-1].kind].mean_s
        is_late = own_s > TIME_MARGIN * max(forecast.seconds, alone_s)
        record.num_wrong += is_late and record.state.is_trusted
        record.state.is_trusted = record.memory_held and not is_late
        if len(record.iterations) > record.num_seen + 1:  # watching takes time, too
            record.errors_s.append(abs(own_s - forecast.seconds))
            record.state.error_s = _quantile(record.errors_s, 3)
        record.forwards_s.append(record.forward_s)
        record.backwards_s.append(record.backward_s)
        record.state.forecast = forecast.retimed(
            _quantile(record.forwards_s, 2), _quantile(record.backwards_s, 2)
        )

    def _go_on(self, record: JobRecord, now_s: float) -> None:
        state = record.state
        record.delay_s += now_s - state.point_s
        if state.point is Point.WAITS_BACKWARD:
            self._enter_backward(record, now_s)
            return
        if not record.is_begun:
            record.first_start_s = now_s
            record.ran_alone = True
            record.forward_s = record.backward_s = 0.0
        others = [x for x in self.records.values() if x is not record and x.is_begun]
        for other in others:
            other.ran_alone = False
        record.ran_alone &= not others
        record.move(Point.FORWARD, now_s)
        state.start_s = now_s
        state.num_starts += 1

    def _enter_backward(self, record: JobRecord, now_s: float) -> None:
        if record.first_backward_s != record.first_backward_s:
            record.first_backward_s = now_s
        record.move(Point.BACKWARD, now_s)
        record.state.num_backwards += 1

    def _spend(self, now_s: float) -> None:
        """Divide the time since the last change evenly among the running jobs."""
        states = [record.state for record in self.records.values()]
        running = [state for state in states if state.point in RUNNING]
        since_s, self._last_s = now_s - self._last_s, now_s
        for state in running:
            state.device_s += since_s / len(running)
        if running and self.mode is Mode.BUDGET:
            there = sum(x.weight for x in states if x.point is not Point.AWAY)
            for state in states:
                if state.point is Point.AWAY:
                    state.missed_s += since_s * state.weight / there


def _quantile(values: Collection[float], quarter: int) -> float:
    """Return the value below which so many quarters of few values are."""
    return sorted(values)[len(values) * quarter // 4]
