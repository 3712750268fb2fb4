"""A plugin of pytest: a test process that dies costs the test it was running, no more.

xdist replaces a process that died, but its schedulers by scope (`--dist loadgroup`)
then wait for ever, or run the deadly test again until no restart is left:

- they hand out all that the process had, the deadly test and finished ones included;
- of finished tests nothing is sent, so nothing comes back that would send more;
- a process begins a test when it knows the next one, and a new one is given only one.
"""

from __future__ import annotations

import subprocess
from signal import Signals
from typing import Final

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

MAX_PENDING: Final = 2  # tests a process has before it is given more
END_S: Final = 30.0  # a core dump takes a while


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Groups of tests to processes; what a dead one had not begun goes to others."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a process was running, and hand out those after it."""
        units = self.assigned_work.pop(node)
        left = {
            scope: [test for test, is_done in unit.items() if not is_done]
            for scope, unit in units.items()
        }
        running = next((tests[0] for tests in left.values() if tests), None)
        for scope, tests in left.items():
            rest = {test: False for test in tests if test != running}
            if rest:
                self.workqueue[scope] = rest
        for other in self.assigned_work:
            self._reschedule(other)
        return running

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process so much that it begins; end it if there is no more.

        One that has not collected its tests yet asks again when it has.
        """
        if node not in self.registered_collections:
            return
        while self.workqueue and not node.shutting_down:
            if self._pending_of(self.assigned_work[node]) > MAX_PENDING:
                return
            self._assign_work_unit(node)
        node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> Scheduling | None:
    """Schedule tests of `--dist loadgroup`."""
    grouped = config.getvalue("dist") == "loadgroup"
    return Scheduling(config) if grouped else None


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Say what ended the process of a test."""
    gateway = report.node.gateway
    try:
        status = gateway._io.popen.wait(END_S)
    except subprocess.TimeoutExpired:
        cause = "a lost connection"
    else:
        cause = f"exit({status})" if status >= 0 else _signal(-status)
    report.longrepr = f"{cause} ended the process ({gateway.id}) of {crashitem}"


def _signal(number: int) -> str:
    """The name of a signal; real-time signals have none."""
    return Signals(number).name if number in set(Signals) else f"signal {number}"
