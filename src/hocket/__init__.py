"""hocket: the order of work in deep-network training, so that no device waits.

Names that need torch load when they are first used; the others never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket import checkpoint as checkpoint
    from hocket.core.check import check as check
    from hocket.core.costs import Costs as Costs
    from hocket.core.costs import Link as Link
    from hocket.core.costs import StageCost as StageCost
    from hocket.core.op import Kind as Kind
    from hocket.core.op import Op as Op
    from hocket.core.program import Net as Net
    from hocket.core.program import Program as Program
    from hocket.core.program import Stage as Stage
    from hocket.core.schedule import Lane as Lane
    from hocket.core.schedule import Schedule as Schedule
    from hocket.core.simulate import simulate as simulate
    from hocket.core.timeline import Timeline as Timeline
    from hocket.errors import HocketError as HocketError
    from hocket.model.trace.per_sample import PerSample as PerSample
    from hocket.planner.search.optimum import search as search
    from hocket.run.cluster.launch import launch as launch
    from hocket.run.data.sample_loader import EvaluationLoader as EvaluationLoader
    from hocket.run.data.sample_loader import SampleLoader as SampleLoader
    from hocket.run.data.sampler import ResumableSampler as ResumableSampler
    from hocket.run.early_stop import EarlyStop as EarlyStop
    from hocket.run.engine.emulate import emulate as emulate
    from hocket.run.fit import fit as fit
    from hocket.run.pipeline import Pipeline as Pipeline
    from hocket.run.stage.batch_loss_check import PerMicrobatch as PerMicrobatch
    from hocket.run.tune.planning import plan as plan
    from hocket.run.weights.momentum import Momentum as Momentum
    from hocket.schedules import SCHEDULES as SCHEDULES
    from hocket.schedules import make_schedule as make_schedule

__version__ = "0.1.0"

# Where each public name lives. A name is imported when it is first asked for.
_HOMES = {
    "Costs": "hocket.core.costs",
    "EarlyStop": "hocket.run.early_stop",
    "EvaluationLoader": "hocket.run.data.sample_loader",
    "HocketError": "hocket.errors",
    "Kind": "hocket.core.op",
    "Lane": "hocket.core.schedule",
    "Link": "hocket.core.costs",
    "Momentum": "hocket.run.weights.momentum",
    "Net": "hocket.core.program",
    "Op": "hocket.core.op",
    "PerMicrobatch": "hocket.run.stage.batch_loss_check",
    "PerSample": "hocket.model.trace.per_sample",
    "Pipeline": "hocket.run.pipeline",
    "Program": "hocket.core.program",
    "ResumableSampler": "hocket.run.data.sampler",
    "SCHEDULES": "hocket.schedules",
    "SampleLoader": "hocket.run.data.sample_loader",
    "Schedule": "hocket.core.schedule",
    "Stage": "hocket.core.program",
    "StageCost": "hocket.core.costs",
    "Timeline": "hocket.core.timeline",
    "check": "hocket.core.check",
    "emulate": "hocket.run.engine.emulate",
    "fit": "hocket.run.fit",
    "launch": "hocket.run.cluster.launch",
    "make_schedule": "hocket.schedules",
    "plan": "hocket.run.tune.planning",
    "search": "hocket.planner.search.optimum",
    "simulate": "hocket.core.simulate",
}

# Public modules, likewise: `hocket.checkpoint.verify(path)` after `import hocket`.
_MODULES = frozenset({"checkpoint"})

__all__ = [  # noqa: PLE0604  (strings, sorted; kept equal to _HOMES by a test)
    *_HOMES,
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name in _MODULES:
        return import_module(f"hocket.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
