"""Makes what freezes the layers of a pipeline, once its first layout is set up.

A policy may look at how far each layer's activations are from a reference copy's:

    batch ─▶ a ─▶ b │ c ─▶ d      the weights now             │: from worker to worker
    batch ─▶ a'─▶ b'│ c'─▶ d'     those at the last decision
             ↕    ↕   ↕    ↕      distance of the similarities between samples

Source: the plasticity of Egeria (EuroSys 2023). Its reference is quantised; here it is
a plain copy of the weights that train, on the workers of the first replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.freeze.policy import Measures
from hocket.freeze.shapes import shapes_of
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.outline import on_tensors
from hocket.model.trace.value import SentTensor
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.comm.bundles import Bundle, finish, receive_bundles, send_bundles
from hocket.run.data.batch import Microbatch, on_device, split_batch
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.cache.cached_prefix import CachedPrefix
from hocket.run.elastic.cache.training_order import TrainingOrder
from hocket.run.elastic.freezing import Freezing
from hocket.run.elastic.measures import GradientMeasure, LayerMeasure
from hocket.run.elastic.reshape import Reshaper, SameSettings
from hocket.run.elastic.shape_choice import FreezingOptions
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.plan import Plan
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.freezable import freezable_modules, frozen_edges
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.loss_checks.reads import ModelTensors
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.order import configured_order
from hocket.run.weights.step_check import refuse_joint_steps
from hocket.run.weights.updater import refuse_modes


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
            optimizer looks at the parameters of several layers at once, or has weights
            to train and others to evaluate; or the cache's folder is of another model.
        FitError: the first layout does not fit the memory.
    """
    assert config.freeze is not None
    why = "a frozen layer keeps the first alone: take no freeze="
    refuse_modes(executor.updaters, why)
    played = PlayedLayout(plan, executor)
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
    measure = LayerMeasure()
    match config.freeze.measures:
        case Measures.NOTHING:
            pass
        case Measures.GRADIENTS:
            measure = GradientMeasure(layers, world)
        case Measures.ACTIVATIONS:
            measure = _ActivationMeasure(net, layers, edges, config.num_parts, world)
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
        found.append((configured_order(config, layout), layout))
    return found


@dataclass(eq=False)
class _ActivationMeasure(LayerMeasure):
    """Measures how far activations moved since the weights were last copied.

    The copy is made at each decision. Both forwards run in evaluation mode, on the
    first microbatch of the next step's batch; buffers are the present ones.

    Args:
        net: the net, with this worker's stages.
        modules: the layers that may freeze, by name.
        edges: entry i is the index of the first layer that trains if i + 1 are frozen.
        num_parts: the microbatches of the whole batch.
        world: the job.

    Raises:
        ConfigError: a layer's outputs have no dimension of samples.
    """

    net: NetOnWorker
    modules: InitVar[Sequence[str]]
    edges: Sequence[int]
    num_parts: int
    world: World

    def __post_init__(self, modules: Sequence[str]) -> None:
        """Refuse layers whose outputs have no dimension of samples."""
        for module, edge in zip(modules, self.edges, strict=True):
            _refuse_without_samples(self.net.outline, module, edge)
        self._reference: dict[str, Tensor] = {}

    def start(self, played: PlayedLayout) -> None:
        """Copy the weights that train."""
        self._reference = {}
        if played.layout.pipeline:
            return
        stages = played.plan.schedule.program.stages
        for number, runner in played.executor.runners.items():
            if stages[number].trainable:
                for name, parameter in runner.parameters.items():
                    self._reference[name] = parameter.detach().clone()

    def take(self, played: PlayedLayout, batch: Any) -> tuple[float, ...]:
        """Return the distances; 0 for frozen layers."""
        own: dict[str, Json] = {}
        if not played.layout.pipeline:
            here = on_device(batch, self.world.device)
            first = split_batch(here, self.num_parts, played.plan.example)[0]
            with torch.no_grad():
                own = self._distances(played, first)
        found: dict[str, float] = {}
        for part in self.world.gather_json(own, "distances of activations"):
            found |= part
        return tuple(found[str(edge)] for edge in self.edges)

    def tensors(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return the copies."""
        return self._reference

    def restore(self, played: PlayedLayout, tensors: Mapping[str, Tensor]) -> None:
        """Replace the copies that a checkpoint has, too."""
        self._reference |= {n: tensors[n] for n in self._reference.keys() & tensors}

    def _distances(self, played: PlayedLayout, part: Microbatch) -> dict[str, Json]:
        """Run this worker's layers; return the distance behind each, by its edge."""
        plan, layout = played.plan, played.layout
        begins = (0, *plan.boundaries)
        stages = plan.schedule.program.stages
        own = [begins[i] for i, x in enumerate(stages) if x.device == layout.device]
        after = [b for i, b in enumerate(begins) if stages[i].device > layout.device]
        end = min(after, default=self.edges[-1])
        now: Sequence[Tensor] = ()
        then: Sequence[Tensor] = ()
        if own[0] >= self.edges[-1]:
            return {}
        if layout.device:
            source = layout.ranks[layout.device - 1]
            [came] = receive_bundles(source, self.world)
            now, then = (_numbered(came.tensors, kind) for kind in ("now", "then"))
        found: dict[str, Json] = {}
        for begin, last, piece in self._pieces(plan.boundaries):
            if not own[0] <= begin < min(end, self.edges[-1]):
                continue
            now, then = self._both(piece, now, then, part)
            if last in self.edges:
                found[str(last)] = distance(
                    _by_sample(now, piece), _by_sample(then, piece)
                )
        if end < self.edges[-1]:
            tensors = {f"now {i}": x for i, x in enumerate(now)}
            tensors |= {f"then {i}": x for i, x in enumerate(then)}
            target = layout.ranks[layout.device + 1]
            finish(send_bundles([Bundle(tensors)], target, self.world))
        return found

    def _pieces(self, boundaries: Sequence[int]) -> list[tuple[int, int, StageModule]]:
        """Return the net cut at all edges, each piece with its first layer and end."""
        edges = sorted({*boundaries, *self.edges})
        whole = on_tensors(self.net.outline, self.net.tensors)
        ends = (*edges, len(whole.layers))
        return list(zip((0, *edges), ends, cut(whole, edges), strict=True))

    def _both(
        self,
        piece: StageModule,
        now: Sequence[Tensor],
        then: Sequence[Tensor],
        part: Microbatch,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Run a piece with the present weights, and with the copies."""
        piece.eval()
        leaves = [part.leaves[i] for i in piece.batch_inputs]
        names = [name for name, _ in piece.named_parameters()]
        copies = {n: self._reference[n] for n in names if n in self._reference}
        return (piece(*now, *leaves), functional_call(piece, copies, (*then, *leaves)))


def distance(now: Sequence[Tensor], then: Sequence[Tensor]) -> float:
    """Return the mean squared difference of two sample similarity matrices.

    Args:
        now: the activations, with the samples along dimension 0.
        then: the reference's.
    """
    a, b = map(_similarities, (now, then))
    return (a - b).square().mean().item()


def _similarities(values: Sequence[Tensor]) -> Tensor:
    """Return the products of all pairs of samples, each row with a norm of 1."""
    rows = [x.detach().reshape(len(x), -1).double() for x in values]
    flat = torch.cat(rows, 1)
    return nn.functional.normalize(flat @ flat.T, dim=1)


def sample_dimension(value: SentTensor, *, is_fixed: bool) -> int | None:
    """Return the dimension of activations in which each entry is one sample.

    Args:
        value: what is known of them.
        is_fixed: whether the model takes only this number of samples. Then the
            dimension of samples is the only one of that length.

    Returns:
        None if there is no such dimension, or the values are not floating-point.
    """
    growth: Sequence[int] = value.per_sample
    if is_fixed:
        growth = [length == value.num_samples for length in value.shape]
    found = [place for place, more in enumerate(growth) if more]
    if len(found) != 1 or not value.dtype.is_floating_point:
        return None
    [place] = found
    is_each = growth[place] == 1 and value.shape[place] == value.num_samples
    return place if is_each else None


def _by_sample(values: Sequence[Tensor], piece: StageModule) -> list[Tensor]:
    """Return a piece's outputs that have a dimension of samples, moved to the front."""
    is_fixed = piece.is_fixed
    found = []
    for x, value in zip(values, piece.outputs, strict=True):
        place = sample_dimension(value, is_fixed=is_fixed)
        if place is not None:
            found.append(x.movedim(place, 0))
    return found


def _refuse_without_samples(outline: Captured, module: str, edge: int) -> None:
    position, _ = outline.starts[edge]
    values = [outline.values[node] for node in outline.training.crossing[position]]
    is_fixed = bool(outline.fixed_batch)
    if all(sample_dimension(x, is_fixed=is_fixed) is None for x in values):
        shapes = ", ".join(f"{x.name} {x.shape}" for x in values)
        raise ConfigError(
            f"the policy compares the activations of samples behind {module}, where no "
            f"dimension is known to be the {values[0].num_samples} samples of a "
            f"microbatch: {shapes}. Name other layers with layers=, or take a policy "
            "that looks at gradients, such as Percentile"
        )


def _numbered(tensors: Mapping[str, Tensor], kind: str) -> list[Tensor]:
    count = sum(name.startswith(f"{kind} ") for name in tensors)
    return [tensors[f"{kind} {i}"] for i in range(count)]
