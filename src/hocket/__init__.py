"""hocket: the order of work in deep-network training, so that no device waits.

Names that need torch load when they are first used; the others never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.errors import HocketError as HocketError
    from hocket.plan.check import check as check
    from hocket.plan.costs import Costs as Costs
    from hocket.plan.costs import Link as Link
    from hocket.plan.costs import StageCost as StageCost
    from hocket.plan.op import Kind as Kind
    from hocket.plan.op import Op as Op
    from hocket.plan.program import Net as Net
    from hocket.plan.program import Program as Program
    from hocket.plan.program import Stage as Stage
    from hocket.plan.schedule import Lane as Lane
    from hocket.plan.schedule import Schedule as Schedule
    from hocket.plan.simulate import simulate as simulate
    from hocket.plan.timeline import Timeline as Timeline
    from hocket.run.launch import launch as launch
    from hocket.run.pipeline import Pipeline as Pipeline
    from hocket.schedules import SCHEDULES as SCHEDULES
    from hocket.schedules import make_schedule as make_schedule

__version__ = "0.1.0"

# Where each public name lives. A name is imported when it is first asked for.
_HOMES = {
    "Costs": "hocket.plan.costs",
    "HocketError": "hocket.errors",
    "Kind": "hocket.plan.op",
    "Lane": "hocket.plan.schedule",
    "Link": "hocket.plan.costs",
    "Net": "hocket.plan.program",
    "Op": "hocket.plan.op",
    "Pipeline": "hocket.run.pipeline",
    "Program": "hocket.plan.program",
    "SCHEDULES": "hocket.schedules",
    "Schedule": "hocket.plan.schedule",
    "Stage": "hocket.plan.program",
    "StageCost": "hocket.plan.costs",
    "Timeline": "hocket.plan.timeline",
    "check": "hocket.plan.check",
    "launch": "hocket.run.launch",
    "make_schedule": "hocket.schedules",
    "simulate": "hocket.plan.simulate",
}

__all__ = [  # noqa: PLE0604  (strings, sorted; kept equal to _HOMES by a test)
    *_HOMES,
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
