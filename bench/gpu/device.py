"""The CUDA adapter of `run/device`: does each promise of the interface hold on a GPU?

Each check has a device of its own. Without a GPU the CPU adapter is checked, which
shows that the checks work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checked import Checks, Row, Setting
from hocket.errors import RunError, WaitError
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.cuda import CudaDevice
from hocket.run.device.device import Device, DeviceLane, IssueOrder
from hocket.run.device.stopwatch import make_stopwatch

BUSY_S = 0.05  # what an op of a check takes
SIDE = 512  # of the matrices
NUM_SUBMITS = 2000


class Bench:
    """A device with two lanes, and an op that keeps a lane busy.

    Args:
        device: with two lanes.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.zero: DeviceLane = device.lanes[0]
        self.one: DeviceLane = device.lanes[1]
        self._cycles_per_s = self._calibrate() if self.is_gpu else 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether ops are only launched by the host."""
        return self.device.torch_device.type == "cuda"

    def busy(self, seconds: float = BUSY_S) -> None:
        """Keep the current lane busy, without the host on a GPU."""
        if self.is_gpu:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        else:
            time.sleep(seconds)

    def full(self, value: float, num_elements: int = SIDE * SIDE) -> Tensor:
        """A tensor of one value."""
        return torch.full((num_elements,), value, device=self.device.torch_device)

    def seconds(self, *works: tuple[DeviceLane, Callable[[], object]]) -> float:
        """From the first submission until all lanes are done."""
        begin_s = time.perf_counter()
        for lane, work in works:
            lane.submit(work, label="timed")
        self.device.synchronize(10.0)
        return time.perf_counter() - begin_s

    def _calibrate(self) -> float:
        cycles = 100_000_000
        sleep = partial(torch.cuda._sleep, cycles)
        self.seconds((self.zero, sleep))
        return cycles / self.seconds((self.zero, sleep))


def events_order_lanes(bench: Bench) -> Row:
    """A lane that waits reads what a long op writes; a lane that does not may not."""
    with_wait, without = (_read_after_write(bench, waits=x) for x in (True, False))
    holds = with_wait == 1.0 and without == 0.0
    return {"with_wait": with_wait, "without": without, "holds": holds}


def _read_after_write(bench: Bench, *, waits: bool) -> float:
    """What lane 1 reads of a zero that lane 0 makes a one after a while."""
    x, event = bench.full(0.0), bench.device.new_event()
    bench.device.fork()
    read: list[Tensor] = []

    def write() -> None:
        bench.busy()
        x.fill_(1.0)

    def submit_write() -> None:
        bench.zero.submit(write, records=[event], label="write")

    def submit_read() -> None:
        events = [event] if waits else []
        bench.one.submit(lambda: read.append(x.clone()), waits=events, label="read")

    match bench.device.issue_order:
        case IssueOrder.TOPOLOGICAL:
            submit_write()
            submit_read()
        case IssueOrder.SIDE_LANES_FIRST:
            submit_read()
            submit_write()
    bench.device.synchronize(10.0)
    return float(read[0].mean())


def lanes_overlap(bench: Bench) -> Row:
    """Two busy lanes take as long as one."""
    alone_s = bench.seconds((bench.zero, bench.busy))
    both_s = bench.seconds((bench.one, bench.busy), (bench.zero, bench.busy))
    ratio = both_s / alone_s
    return {"ratio": round(ratio, 3), "holds": ratio < 1.3}


def unrecorded_wait_is_refused(bench: Bench) -> Row:
    """CUDA would ignore it; a CPU's side lane waits."""
    if not bench.is_gpu:
        return {"holds": True, "skipped": "a CPU waits"}
    try:
        bench.one.submit(int, waits=[bench.device.new_event()], label="early")
    except RunError as error:
        return {"holds": "no op has recorded" in str(error)}
    return {"holds": False}


def freed_memory_is_not_reused_early(bench: Bench) -> Row:
    """Lane 1 still reads a tensor of lane 0 that the host has let go."""
    made, num_elements = bench.device.new_event(), 1 << 22
    held: list[Tensor] = []
    sums: list[Tensor] = []

    def read() -> None:
        bench.busy()
        sums.append(held[0].double().sum())
        bench.one.keep_alive(held)

    bench.zero.submit(
        lambda: held.append(bench.full(1.0, num_elements)), records=[made], label="make"
    )
    bench.one.submit(read, waits=[made], label="read")
    if not bench.is_gpu:
        bench.device.synchronize(10.0)
    held.clear()
    for _ in range(8):
        bench.zero.submit(lambda: bench.full(2.0, num_elements), label="reuse")
    bench.device.synchronize(10.0)
    return {"sum": float(sums[0]), "holds": float(sums[0]) == num_elements}


def masks_do_not_depend_on_lanes(bench: Bench) -> Row:
    """Dropout with a seed gives one mask in each lane; the caller's state stays."""
    ones = bench.full(1.0)
    before = torch.rand(1, device=bench.device.torch_device)
    masks: list[Tensor] = []

    def draw(lane: DeviceLane) -> None:
        with bench.device.fork_rng(lane, 7):
            masks.append(F.dropout(ones))

    bench.device.fork()
    for lane in (bench.one, bench.zero):
        lane.submit(partial(draw, lane), label="draw")
    bench.device.synchronize(10.0)
    after = torch.rand(1, device=bench.device.torch_device)
    same = torch.equal(*masks)
    return {"same": same, "holds": same and not torch.equal(before, after)}


def graph_equals_eager(bench: Bench) -> Row:
    """A graph over both lanes, with dropout: replays with a seed equal eager runs."""
    if not bench.is_gpu:
        return {"holds": True, "skipped": "a CPU has no graphs"}
    a = torch.randn(SIDE, SIDE, device=bench.device.torch_device)
    out = torch.zeros_like(a)
    bench.device.fork()

    def work() -> None:
        forked, joined = bench.device.new_event(), bench.device.new_event()
        halves: list[Tensor] = []
        bench.zero.record_event(forked)
        bench.one.submit(
            lambda: halves.append(a @ a), waits=[forked], records=[joined], label="side"
        )
        mine = F.dropout(a)
        bench.zero.wait_event(joined)
        torch.add(mine, halves[0], out=out)

    def eager() -> None:
        with bench.device.fork_rng(bench.zero, 3):
            work()

    results = []
    bench.zero.submit(eager, label="eager")
    bench.device.synchronize(10.0)
    results.append(out.clone())
    replay = bench.device.capture_graph(bench.zero, work)
    out.zero_()
    bench.device.fork()
    for _ in range(2):
        with bench.device.fork_rng(bench.zero, 3):
            bench.zero.submit(replay, label="replay")
        bench.device.synchronize(10.0)
        results.append(out.clone())
    same = [torch.equal(results[0], result) for result in results[1:]]
    return {"same": same, "holds": all(same)}


def stopwatch_has_the_devices_time(bench: Bench) -> Row:
    """Spans last as long as the ops, within the host's two readings of its clock."""
    watch = make_stopwatch(2, bench.device.torch_device)

    def work(i: int) -> None:
        watch.start(i)
        bench.busy()
        watch.end(i)

    before_s = time.perf_counter()
    for i in range(2):
        bench.zero.submit(partial(work, i), label=f"{i}")
    bench.device.synchronize(10.0)
    after_s = time.perf_counter()
    start_s, end_s = watch.read().value
    errors = ((end_s - start_s) / BUSY_S - 1).tolist()
    inside = before_s - 1e-4 <= start_s[0] and end_s[1] <= after_s + 1e-4
    ordered = start_s[1] >= end_s[0] - 1e-6
    return {
        "errors": [round(error, 4) for error in errors],
        "late_us": round(float(after_s - end_s[1]) * 1e6, 1),
        "holds": bool(inside and ordered and max(map(abs, errors)) < 0.2),
    }


def waits_end_in_time(bench: Bench) -> Row:
    """An op that is slower than the timeout is named, by its lane and its label."""
    event = bench.device.new_event()
    bench.one.submit(partial(bench.busy, 0.5), records=[event], label="slow")
    messages = []
    for wait in (event.synchronize, bench.device.synchronize):
        try:
            wait(0.05)
        except WaitError as error:
            messages.append(str(error))
    bench.device.synchronize(10.0)
    return {
        "messages": messages,
        "holds": len(messages) == 2 and all("slow" in text for text in messages),
    }


def submitting_waits_for_nothing(bench: Bench) -> Row:
    """No host wait in the adapter, and what an op costs the host."""
    refuse = torch.cuda.set_sync_debug_mode if bench.is_gpu else None
    costs_us = {}
    work = partial(bench.full, 1.0, 1)
    try:
        if refuse is not None:
            refuse("error")
        for with_events in (False, True):
            begin_s = time.perf_counter()
            for _ in range(NUM_SUBMITS):
                event = [bench.device.new_event()] if with_events else []
                bench.zero.submit(work, records=event, label="a")
                bench.zero.submit(int, waits=event, label="b")
            spent_s = time.perf_counter() - begin_s
            costs_us["events" if with_events else "plain"] = spent_s / NUM_SUBMITS * 5e5
            bench.device.synchronize(10.0)
        with bench.device.fork_rng(bench.zero, 1):
            pass
    finally:
        if refuse is not None:
            refuse("default")
    return {"submit_us": {k: round(v, 2) for k, v in costs_us.items()}, "holds": True}


def gradients_cross_lanes(bench: Bench) -> Row:
    """Backward in lane 0 and the weight gradient in lane 1 equal autograd's."""
    device = bench.device.torch_device
    x, w = (torch.randn(SIDE, SIDE, device=device) for _ in range(2))
    w.requires_grad_()
    torch.autograd.grad((x @ w).square().sum(), w)  # what libraries set up once
    (expected,) = torch.autograd.grad((x @ w).square().sum(), w)
    bench.device.fork()
    made: list[Tensor] = []
    grads: list[Tensor] = []
    done = bench.device.new_event()

    def backward() -> None:
        y = (x @ w).detach().requires_grad_()
        made.extend(torch.autograd.grad(y.square().sum(), y))

    def weight_grad() -> None:
        grads.append(x.T @ made[0])
        bench.one.keep_alive(made)

    bench.zero.submit(backward, records=[done], label="B")
    bench.one.submit(weight_grad, waits=[done], label="W")
    bench.device.synchronize(10.0)
    difference = float((grads[0] - expected).norm() / expected.norm())
    return {"difference": difference, "holds": difference < 1e-5}


def peak_begins_anew(bench: Bench) -> Row:
    """The peak since a reset holds what was made since, and not what was before."""
    num_bytes = 256 << 20
    first = bench.full(1.0, num_bytes // 4)
    del first
    bench.device.reset_peak()
    before = bench.device.peak_bytes()
    second = bench.full(1.0, num_bytes // 8)
    grown = bench.device.peak_bytes() - before
    del second
    return {"grown": grown, "holds": num_bytes // 4 <= grown <= num_bytes // 2}


def _with_lanes(check: Callable[[Bench], Row], setting: Setting) -> Row:
    """The row of one check, on a device with two lanes."""
    with _make_device(setting.device) as device:
        return check(Bench(device))


def _make_device(where: torch.device) -> Device:
    """A device with two lanes."""
    if where.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        return CudaDevice(where, 2, budget_bytes=1 << 30, timeout_s=10.0)
    return CpuDevice(2, budget_bytes=1 << 30, timeout_s=10.0)


CHECKS: Final[Checks] = {
    check.__name__: partial(_with_lanes, check)
    for check in (
        events_order_lanes,
        lanes_overlap,
        unrecorded_wait_is_refused,
        freed_memory_is_not_reused_early,
        masks_do_not_depend_on_lanes,
        stopwatch_has_the_devices_time,
        waits_end_in_time,
        submitting_waits_for_nothing,
        gradients_cross_lanes,
        peak_begins_anew,
        graph_equals_eager,
    )
}
