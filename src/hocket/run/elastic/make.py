"""Makes what freezes the layers of a pipeline, once its first layout is set up."""

from __future__ import annotations

from typing import assert_never

from hocket.core.schedule import Schedule
from hocket.freeze.policy import Measures
from hocket.freeze.shapes import shapes_of
from hocket.model.capture.captured import Captured
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.elastic.activations import ActivationMeasure
from hocket.run.elastic.cache.cached_prefix import CachedPrefix
from hocket.run.elastic.cache.training_order import TrainingOrder
from hocket.run.elastic.freezing import Freezing
from hocket.run.elastic.measures import GradientMeasure, LayerMeasure, NoMeasure
from hocket.run.elastic.reshape import Reshaper, SameSettings
from hocket.run.elastic.shape_choice import FreezingOptions
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.plan import Plan
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.freezable import freezable_modules, frozen_edges
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.loss_checks.reads import ModelTensors
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.order import make_order
from hocket.run.weights.step_check import refuse_joint_steps


def make_freezing(
    config: PipelineConfig,
    captured: Captured,
    plan: Plan,
    executor: Executor,
    context: WorkerContext,
) -> Freezing:
    """Make what freezes layers.

    Args:
        config: the pipeline's, with a policy.
        captured: the captured model.
        plan: the first layout's plan.
        executor: this worker's stages in the first layout.
        context: this worker's connections.

    Raises:
        ModelError: the model cannot be cut behind its layers.
        ConfigError: a weight is shared across an edge; a shape is not possible; the
            optimizer looks at the parameters of several layers at once; or the cache's
            folder is of another model.
        FitError: the first layout does not fit the memory.
    """
    assert config.freeze is not None
    played = PlayedLayout(plan, executor, context.layout)
    if context.world.world_size > 1:
        _refuse_joint_steps(config, captured)
    modules = freezable_modules(config.model, config.freeze.layers)
    edges = frozen_edges(captured, modules)
    net = NetOnWorker(executor.plan.program.nets[0].name, captured)
    net.adopt({n: runner.module for n, runner in executor.runners.items()})
    job = SameSettings(
        str(config.schedule),
        config.num_parts,
        config.loss,
        config.training,
        config.seed,
        captured.state.parameter_names,
        config.balance,
        config.recut,
        ModelTensors(config.model),
    )
    options = FreezingOptions(
        config.freeze,
        config.shapes if config.recut else {},
        config.memory_bytes,
        config.num_run_steps,
    )
    world = context.world
    layers = modules[: len(edges)]
    measure: LayerMeasure = NoMeasure()
    match config.freeze.measures:
        case Measures.NOTHING:
            pass
        case Measures.GRADIENTS:
            measure = GradientMeasure(layers, world)
        case Measures.ACTIVATIONS:
            measure = ActivationMeasure(net, layers, edges, config.num_parts, world)
        case _:
            assert_never(config.freeze.measures)
    reshaper = Reshaper(job, net, context, plan)
    freezing = Freezing(options, modules, edges, measure, reshaper, world, played)
    if config.cache is not None:
        precision = config.training.compute_precision
        order = TrainingOrder(
            config.cache, config.num_parts, config.accumulate, context.world.device
        )
        freezing.cache = CachedPrefix(config.cache, order, net, precision, context)
    return freezing


def _refuse_joint_steps(config: PipelineConfig, captured: Captured) -> None:
    """Refuse an optimizer that does not go together with every cut.

    It is asked here for all layouts, since a change of layout must be short.
    """
    tensors = captured.state.tensors
    parts = {
        layer.name: {name: tensors[name] for name in layer.parameters}
        for layer in captured.layers
    }
    refuse_joint_steps(config.training, parts)


def other_layouts(
    config: PipelineConfig, world: World
) -> list[tuple[Schedule, Layout]]:
    """Return the orders of all shapes that the workers may take, with this one's place.

    Args:
        config: the pipeline's.
        world: the job.
    """
    found = []
    for shape in shapes_of(world.world_size, config.num_parts):
        layout = make_layout(world, shape.num_replicas)
        order = make_order(
            config.schedule,
            layout,
            config.num_parts // shape.num_replicas,
            None,
            clips=config.clip_norm is not None,
        )
        found.append((order, layout))
    return found
