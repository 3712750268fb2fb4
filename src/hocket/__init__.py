"""hocket: the order of work in deep-network training, so that no device waits.

Names that need torch load when they are first used; the others never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket import checkpoint as checkpoint
    from hocket import freeze as freeze
    from hocket.citation import citation as citation
    from hocket.core.check import Proof as Proof
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
    from hocket.core.timelines.timeline import Timeline as Timeline
    from hocket.errors import CallbackError as CallbackError
    from hocket.errors import CaptureError as CaptureError
    from hocket.errors import CheckpointError as CheckpointError
    from hocket.errors import ConfigError as ConfigError
    from hocket.errors import CostsError as CostsError
    from hocket.errors import DamagedError as DamagedError
    from hocket.errors import DataError as DataError
    from hocket.errors import DeadlockError as DeadlockError
    from hocket.errors import FitError as FitError
    from hocket.errors import HocketError as HocketError
    from hocket.errors import MetricsError as MetricsError
    from hocket.errors import MissingPackageError as MissingPackageError
    from hocket.errors import ModelError as ModelError
    from hocket.errors import NoMemoryError as NoMemoryError
    from hocket.errors import NonFiniteError as NonFiniteError
    from hocket.errors import ParseError as ParseError
    from hocket.errors import PlanError as PlanError
    from hocket.errors import RaceError as RaceError
    from hocket.errors import RecipeError as RecipeError
    from hocket.errors import RunError as RunError
    from hocket.errors import ScheduleError as ScheduleError
    from hocket.errors import SchemaError as SchemaError
    from hocket.errors import ShapeError as ShapeError
    from hocket.errors import WaitError as WaitError
    from hocket.errors import WorkerError as WorkerError
    from hocket.freeze.cache.settings import Cache as Cache
    from hocket.model.trace.per_sample import PerSample as PerSample
    from hocket.model.trace.per_sample import Shared as Shared
    from hocket.passes.fill_with import fill_with as fill_with
    from hocket.planner.candidate import Candidate as Candidate
    from hocket.planner.candidate import Outcome as Outcome
    from hocket.planner.rank import PlanConfig as PlanConfig
    from hocket.planner.rank import Search as Search
    from hocket.planner.ranking.ranking import Ranking as Ranking
    from hocket.planner.search.optimum import search as search
    from hocket.planner.search.result import SearchResult as SearchResult
    from hocket.run.cluster.launch import launch as launch
    from hocket.run.cluster.world import World as World
    from hocket.run.data.loss import PerMicrobatch as PerMicrobatch
    from hocket.run.data.loss import WholeBatch as WholeBatch
    from hocket.run.data.metrics import EvaluationResult as EvaluationResult
    from hocket.run.data.sample_loader import EvaluationLoader as EvaluationLoader
    from hocket.run.data.sample_loader import SampleLoader as SampleLoader
    from hocket.run.data.sampler import ResumableSampler as ResumableSampler
    from hocket.run.data.token_mean import TokenMean as TokenMean
    from hocket.run.diagnostics.startup import StartupProgress as StartupProgress
    from hocket.run.engine.emulator.emulate import emulate as emulate
    from hocket.run.engine.plan import Plan as Plan
    from hocket.run.engine.sync.step_result import StepResult as StepResult
    from hocket.run.fill.settings import Fill as Fill
    from hocket.run.outoforder.compile_step import CompiledStep as CompiledStep
    from hocket.run.outoforder.compile_step import compile_step as compile_step
    from hocket.run.pipeline import Pipeline as Pipeline
    from hocket.run.tune.config import PipelineConfig as PipelineConfig
    from hocket.run.tune.planning import plan as plan
    from hocket.run.tune.teachers.teacher import Teacher as Teacher
    from hocket.run.weights.momentum import CopyEvery as CopyEvery
    from hocket.run.weights.momentum import Momentum as Momentum
    from hocket.schedules import SCHEDULES as SCHEDULES
    from hocket.schedules import make_schedule as make_schedule
    from hocket.sharing.report import JobReport as JobReport
    from hocket.sharing.report import ShareReport as ShareReport
    from hocket.sharing.running.job import Job as Job
    from hocket.sharing.running.job import JobContext as JobContext
    from hocket.sharing.running.share import share as share
    from hocket.sharing.waves.emulate import emulate_waves as emulate_waves
    from hocket.sharing.waves.wave import WaveResult as WaveResult
    from hocket.sharing.waves.waves import Waves as Waves
    from hocket.teacher.evaluation import LinearProbe as LinearProbe
    from hocket.teacher.evaluation import fit_linear_probe as fit_linear_probe
    from hocket.teacher.evaluation import knn_accuracy as knn_accuracy
    from hocket.teacher.lars import Lars as Lars
    from hocket.teacher.losses.distillation import DistilBERT as DistilBERT
    from hocket.teacher.losses.distillation import Distillation as Distillation
    from hocket.teacher.losses.two_views import Byol as Byol
    from hocket.teacher.losses.two_views import Dino as Dino
    from hocket.teacher.losses.two_views import MocoV3 as MocoV3
    from hocket.teacher.views import TwoViewLoader as TwoViewLoader
    from hocket.teacher.views import TwoViews as TwoViews
    from hocket.teacher.views import TwoViewSamples as TwoViewSamples

__version__ = "0.1.0"

# Where each public name lives. A name is imported when it is first asked for.
_HOMES = {
    "Byol": "hocket.teacher.losses.two_views",
    "Cache": "hocket.freeze.cache.settings",
    "CallbackError": "hocket.errors",
    "Candidate": "hocket.planner.candidate",
    "CaptureError": "hocket.errors",
    "CheckpointError": "hocket.errors",
    "CompiledStep": "hocket.run.outoforder.compile_step",
    "ConfigError": "hocket.errors",
    "CopyEvery": "hocket.run.weights.momentum",
    "Costs": "hocket.core.costs",
    "CostsError": "hocket.errors",
    "DamagedError": "hocket.errors",
    "DataError": "hocket.errors",
    "DeadlockError": "hocket.errors",
    "Dino": "hocket.teacher.losses.two_views",
    "DistilBERT": "hocket.teacher.losses.distillation",
    "Distillation": "hocket.teacher.losses.distillation",
    "EvaluationLoader": "hocket.run.data.sample_loader",
    "EvaluationResult": "hocket.run.data.metrics",
    "Fill": "hocket.run.fill.settings",
    "FitError": "hocket.errors",
    "HocketError": "hocket.errors",
    "Job": "hocket.sharing.running.job",
    "JobContext": "hocket.sharing.running.job",
    "JobReport": "hocket.sharing.report",
    "Kind": "hocket.core.op",
    "Lane": "hocket.core.schedule",
    "Lars": "hocket.teacher.lars",
    "LinearProbe": "hocket.teacher.evaluation",
    "Link": "hocket.core.costs",
    "MetricsError": "hocket.errors",
    "MissingPackageError": "hocket.errors",
    "MocoV3": "hocket.teacher.losses.two_views",
    "ModelError": "hocket.errors",
    "Momentum": "hocket.run.weights.momentum",
    "Net": "hocket.core.program",
    "NoMemoryError": "hocket.errors",
    "NonFiniteError": "hocket.errors",
    "Op": "hocket.core.op",
    "Outcome": "hocket.planner.candidate",
    "ParseError": "hocket.errors",
    "PerMicrobatch": "hocket.run.data.loss",
    "PerSample": "hocket.model.trace.per_sample",
    "Pipeline": "hocket.run.pipeline",
    "PipelineConfig": "hocket.run.tune.config",
    "Plan": "hocket.run.engine.plan",
    "PlanConfig": "hocket.planner.rank",
    "PlanError": "hocket.errors",
    "Program": "hocket.core.program",
    "Proof": "hocket.core.check",
    "RaceError": "hocket.errors",
    "Ranking": "hocket.planner.ranking.ranking",
    "RecipeError": "hocket.errors",
    "ResumableSampler": "hocket.run.data.sampler",
    "RunError": "hocket.errors",
    "SCHEDULES": "hocket.schedules",
    "SampleLoader": "hocket.run.data.sample_loader",
    "Schedule": "hocket.core.schedule",
    "ScheduleError": "hocket.errors",
    "SchemaError": "hocket.errors",
    "Search": "hocket.planner.rank",
    "SearchResult": "hocket.planner.search.result",
    "ShapeError": "hocket.errors",
    "ShareReport": "hocket.sharing.report",
    "Shared": "hocket.model.trace.per_sample",
    "Stage": "hocket.core.program",
    "StageCost": "hocket.core.costs",
    "StartupProgress": "hocket.run.diagnostics.startup",
    "StepResult": "hocket.run.engine.sync.step_result",
    "Teacher": "hocket.run.tune.teachers.teacher",
    "Timeline": "hocket.core.timelines.timeline",
    "TokenMean": "hocket.run.data.token_mean",
    "TwoViewLoader": "hocket.teacher.views",
    "TwoViewSamples": "hocket.teacher.views",
    "TwoViews": "hocket.teacher.views",
    "WaitError": "hocket.errors",
    "WaveResult": "hocket.sharing.waves.wave",
    "Waves": "hocket.sharing.waves.waves",
    "WholeBatch": "hocket.run.data.loss",
    "WorkerError": "hocket.errors",
    "World": "hocket.run.cluster.world",
    "check": "hocket.core.check",
    "citation": "hocket.citation",
    "compile_step": "hocket.run.outoforder.compile_step",
    "emulate": "hocket.run.engine.emulator.emulate",
    "emulate_waves": "hocket.sharing.waves.emulate",
    "fill_with": "hocket.passes.fill_with",
    "fit_linear_probe": "hocket.teacher.evaluation",
    "knn_accuracy": "hocket.teacher.evaluation",
    "launch": "hocket.run.cluster.launch",
    "make_schedule": "hocket.schedules",
    "plan": "hocket.run.tune.planning",
    "search": "hocket.planner.search.optimum",
    "share": "hocket.sharing.running.share",
    "simulate": "hocket.core.simulate",
}

# Public modules: `hocket.checkpoint.verify(path)` works after `import hocket`.
_MODULES = frozenset({"checkpoint", "freeze"})

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


def _drawing(drawn: Schedule | Timeline) -> str:
    """Return the HTML that notebooks show; `draw` loads when they ask for it."""
    html: str = import_module("hocket.draw.notebook").html_of(drawn)
    return html


import_module("hocket.core.formats.drawn").Drawn.drawing = _drawing


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
