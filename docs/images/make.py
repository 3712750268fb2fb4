"""Draw the pictures of the README and the documentation: `python docs/images/make.py`.

They come from the library alone, so that they are what it does; a test holds them so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from hocket.core.check import check
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.footprint import Footprint
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw import Style, to_svg
from hocket.draw.palette import SURFACES, Theme
from hocket.passes.add_frozen_prefix import add_frozen_prefix
from hocket.passes.beside_critical_path import MeasuredProgram, beside_critical_path
from hocket.passes.fill_with import fill_with
from hocket.passes.serial import serial
from hocket.schedules import make_schedule
from hocket.sharing.forecast import Forecast
from hocket.sharing.picture import share_svg
from hocket.sharing.policy import Mode
from hocket.sharing.report import JobReport, ShareReport
from hocket.sharing.simulate import SimulatedJob, simulate_jobs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from chart import chart_svg  # noqa: E402  (beside this file, however it is run)

NUM_DEVICES, NUM_MICROBATCHES = 4, 8
_ZERO_BUBBLE = ("1f1b", "zb-h1", "zb-h2")
_FLUSH_FREE = {
    "1f1b": "1f1b: flushes, one copy of the weights",
    "pipedream-2bw": "pipedream-2bw: no flush, two copies of all weights",
    "wpipe": "wpipe: two copies of the front half's weights",
    "wpipe-overlapped": "wpipe-overlapped: the same, and hops are hidden",
}


def timeline_of(
    name: str,
    num_steps: int = 1,
    update_s: float = 0.0,
    num_microbatches: int = NUM_MICROBATCHES,
    hop_s: float = 0.0,
) -> Timeline:
    """A schedule on four equal devices; a backward takes twice as long as a forward."""
    schedule = make_schedule(
        name,
        num_devices=NUM_DEVICES,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
    )
    share = StageCost(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, update_s=update_s
    )
    return simulate(schedule, Costs((share,), is_device_share=True, link=Link(hop_s)))


def filled(name: str, delay: int) -> Timeline:
    """A schedule with a momentum teacher, whose forwards are in two parts each."""
    p, m, num_steps = NUM_DEVICES, NUM_MICROBATCHES, 4
    student = make_schedule(name, num_devices=p, num_microbatches=m)
    teacher = (
        Stage("teacher", device, False, delay, follows=(p + device,))
        for device in range(p)
    )
    program = Program(
        nets=(Net("teacher", 2 * m), replace(student.program.nets[0], name="student")),
        stages=(*teacher, *(Stage("student", device) for device in range(p))),
        flows=(
            *((s, s + 1) for s in range(2 * p - 1) if s != p - 1),
            (p - 1, 2 * p - 1),
        ),
        num_steps=num_steps,
    )
    costs = Costs((*[StageCost(0.5)] * p, *[StageCost(1.0, 1.0, 1.0)] * p))
    return simulate(fill_with(student, program, costs=costs), costs)


def one_device(*, with_second_lane: bool) -> Timeline:
    """A small network on one device, whose later weight gradients take longer."""
    num_units = 6
    program = Program.chain([0] * num_units, 1)
    costs = Costs(
        tuple(StageCost(1.0, 1.0, 0.5 + i / 5, update_s=0.2) for i in range(num_units)),
        lane_capacity=2.0,
    )
    if not with_second_lane:
        return simulate(serial(program), costs)
    measured = MeasuredProgram(program, costs, Footprint((), {}))
    return simulate(beside_critical_path(measured).schedule, costs)


def in_buckets(k: int, *, barrier: bool) -> Timeline:
    """Data parallelism whose reductions take 0.9 of the computing, in six buckets."""
    schedule = make_schedule(
        "reverse-first-k",
        num_devices=1,
        num_microbatches=1,
        num_steps=3,
        num_replicas=2,
        stages_per_device=6,
        k=k,
        barrier=barrier,
    )
    sizes = (1, 1, 2, 3, 4, 5)  # as in many networks, the last layers have the most
    stages = tuple(
        StageCost(1.0, 1.0, 1.0, update_s=0.1, gradient_bytes=size) for size in sizes
    )
    return simulate(schedule, Costs(stages, reduce_link=Link(bytes_per_s=16 / 16.2)))


def shortened(num_microbatches: int, *trained_s: float) -> Timeline:
    """A replica of a model that is frozen but for stages with these forwards.

    The whole model has a forward of 4 seconds and a backward of 8.
    """
    schedule = make_schedule(
        "gpipe", num_devices=len(trained_s), num_microbatches=num_microbatches
    )
    stages = [StageCost(forward_s, forward_s, forward_s) for forward_s in trained_s]
    frozen_s = 4 - sum(trained_s)
    if frozen_s:
        schedule = add_frozen_prefix(schedule)
        stages.insert(0, StageCost(frozen_s))
    return simulate(schedule, Costs(tuple(stages)))


def rotating(num_devices: int = NUM_DEVICES) -> Timeline:
    """Wavelet's model-parallel waves: in each slot, all devices run the same stage.

    Device `x` runs stage `y` on batch `(x - y) mod n`, forwards and backwards, so that
    what a forward keeps stays where its backward is. Each batch has a copy of the
    model; the gradients of a stage's copies are summed (op R) behind its backwards.
    """
    n = num_devices
    copies = tuple(tuple(batch * n + y for batch in range(n)) for y in range(n))
    program = Program(
        nets=tuple(Net(f"batch-{batch}", 1) for batch in range(n)),
        stages=tuple(
            Stage(f"batch-{batch}", (batch + y) % n)
            for batch in range(n)
            for y in range(n)
        ),
        flows=tuple(
            (batch * n + y, batch * n + y + 1)
            for batch in range(n)
            for y in range(n - 1)
        ),
        copies=copies,
    )

    def lane(device: int) -> Lane:
        own = [copies[y][(device - y) % n] for y in range(n)]
        backwards = [
            Op(kind, stage, None if kind is Kind.REDUCE else 0)
            for stage in reversed(own)
            for kind in (Kind.BACKWARD, Kind.REDUCE)
        ]
        return Lane(
            device,
            0,
            (
                *(Op(Kind.FORWARD, stage, 0) for stage in own),
                *backwards,
                *(Op(Kind.UPDATE, stage) for stage in own),
            ),
        )

    schedule = Schedule(program, tuple(map(lane, range(n))))
    check(schedule)
    stage = StageCost(1.0, 1.0, 1.0, update_s=0.1, output_bytes=1, gradient_bytes=4)
    links = Link(bytes_per_s=1 / 0.15), Link(bytes_per_s=20.0)
    costs = Costs((stage,) * n * n, link=links[0], reduce_link=links[1])
    return simulate(schedule, costs)


def simulated_report(
    mode: Mode, jobs: Sequence[SimulatedJob], budget_bytes: float = inf
) -> ShareReport:
    """Play jobs with a fake clock, and report it as if it were measured."""
    run = simulate_jobs(mode, jobs, budget_bytes)
    reports = [
        JobReport(
            name=job.name,
            weight=job.weight,
            losses=(),
            iterations=tuple(run.iterations[job.name]),
            first_shared=1,
            until_s=min(own[-1].end_s for own in run.iterations.values()),
            alone_s={"": job.actual.seconds},
            static_bytes=job.static_bytes,
            forecast=job.actual,
            num_wrong=run.records[job.name].num_wrong,
            error=None,
            is_hung=False,
        )
        for job in jobs
    ]
    return ShareReport(mode, "simulated", tuple(reports), budget_bytes)


def sharing_modes() -> str:
    """Two jobs in each mode, with their memory, under one budget."""
    times = [i / 8 for i in range(8)] + [1 + (i + 1) / 4 for i in range(8)]
    changes = [2.0**27] * 8 + [-(2.0**27)] * 8
    ramp = Forecast.of_changes(1.0, 2.0, times, changes)
    jobs = [
        SimulatedJob(name, ramp, 6, believed=ramp, static_bytes=2.0**27)
        for name in ("a", "b")
    ]
    parts, y = [], 0
    for mode in (Mode.TURNS, Mode.TICK_TOCK, Mode.LAG, Mode.BUDGET):
        report = simulated_report(mode, jobs, 1.7 * 2**30)
        parts.append(
            f'<text x="4" y="{y + 16}" font-weight="bold" '
            f'fill="var(--ink)">{mode.value}</text>'
        )
        nested = share_svg(report).replace(
            "<svg ", f'<svg y="{y + 24}" width="920" height="314" ', 1
        )
        parts.append(nested)
        y += 348
    light, dark = (SURFACES[theme] for theme in (Theme.LIGHT, Theme.DARK))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 {y}" '
        'font-family="sans-serif" font-size="13">\n<style>'
        f":root{{--ink:{light['ink']};--page:{light['page']}}}"
        "@media (prefers-color-scheme:dark)"
        f"{{:root{{--ink:{dark['ink']};--page:{dark['page']}}}}}</style>\n"
        f'<rect width="920" height="{y}" fill="var(--page)"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def pictures() -> dict[str, str]:
    """The contents of each file in this folder, by name."""
    names = ("gpipe", "1f1b", "interleaved-1f1b")
    compared = [(name, timeline_of(name)) for name in names]
    two_steps = timeline_of("1f1b", num_steps=2, update_s=0.5)
    split = [(name, timeline_of(name, num_steps=2)) for name in _ZERO_BUBBLE]
    overlapping = [
        (title, timeline_of(name, num_steps=4, num_microbatches=6, hop_s=0.25))
        for name, title in _FLUSH_FREE.items()
    ]
    teachers = [
        ("the same batch's teacher: delay 0", filled("1f1b", 0)),
        ("the next batch's teacher: delay 1", filled("1f1b", 1)),
    ]
    single = [
        ("serial: each W behind its I", one_device(with_second_lane=False)),
        ("W and U in a second lane", one_device(with_second_lane=True)),
    ]
    data_parallel = [
        (
            "the usual order, and a barrier behind each step",
            in_buckets(0, barrier=True),
        ),
        ("reverse first-k with k = 4, and no barrier", in_buckets(4, barrier=False)),
    ]
    freezing = [
        ("before: four stages, one replica, 8 microbatches", shortened(8, 1, 1, 1, 1)),
        (
            "half is frozen: two stages, one of two replicas, 4",
            shortened(4, 2 / 3, 4 / 3),
        ),
        ("3/4 are frozen: one stage, one of four replicas, 2", shortened(2, 1)),
    ]
    waves = [
        (
            "model parallelism: one batch at a time",
            timeline_of("gpipe", 1, 0.1, 1, 0.15),
        ),
        ("waves of four batches, whose stages rotate", rotating()),
        ("1f1b: four microbatches", timeline_of("1f1b", 1, 0.1, 4, 0.15)),
    ]
    return {
        "choose.svg": chart_svg(),
        "freezing.svg": to_svg(freezing, style=Style(show_memory=False)),
        "sharing.svg": sharing_modes(),
        "waves.svg": to_svg(waves, style=Style(show_memory=False)),
        "ooo-single.svg": to_svg(single, style=Style(show_memory=False)),
        "reverse-first-k.svg": to_svg(data_parallel, style=Style(show_memory=False)),
        "teacher.svg": to_svg(teachers, style=Style(show_memory=False)),
        "flush-free.svg": to_svg(overlapping, style=Style(show_memory=False)),
        "schedules.svg": to_svg(compared, style=Style(show_memory=False)),
        "1f1b.svg": to_svg([("1f1b", two_steps)]),
        "zero-bubble.svg": to_svg(split, style=Style(show_memory=False)),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (HERE / name).write_text(picture, encoding="utf-8")
