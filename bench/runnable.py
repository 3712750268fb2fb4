"""Lists the schedules that a pipeline runs one step at a time."""

from __future__ import annotations

from hocket.errors import ScheduleError, ShapeError
from hocket.run.cluster.layout import Layout
from hocket.run.tune.order import make_order
from hocket.schedules import SCHEDULES


def runnable(num_devices: int, num_microbatches: int) -> list[str]:
    """Return the names of those that take the numbers, in the table's order.

    Left out are orders that train nothing (`forward-only`), orders of several nets
    (`chimera`, which `ProgramRun` runs), and orders whose steps overlap (`wpipe`).
    """
    layout = Layout(0, num_devices, 1)
    found = []
    for name in SCHEDULES:
        try:
            order = make_order(name, layout, num_microbatches, None)
        except (ScheduleError, ShapeError):
            continue
        if not any(stage.delay for stage in order.program.stages):
            found.append(name)
    return found
