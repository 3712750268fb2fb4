"""Captures a model and profiles its layers, or loads a profile that was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError, HocketError, ModelError
from hocket.model.capture.attribute_writes import AttributeSnapshot, preserve_attributes
from hocket.model.capture.capture import Captured, capture
from hocket.model.capture.captured import enough_layers
from hocket.model.capture.lost_in_graph import LostInGraphError
from hocket.model.profile.held_layers import passes_of, profile_forwards
from hocket.model.profile.profile import Profile, conditions_of, path_of
from hocket.model.profile.work import measured_work
from hocket.model.stages.stage import KEPT_ELSEWHERE
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.per_sample import unshared
from hocket.model.trace.state import State
from hocket.nearest import nearest
from hocket.planner.cluster import MessageCosts
from hocket.planner.work import MeasuredCosts
from hocket.run.cluster.layout import tp_size_of
from hocket.run.cluster.world import World
from hocket.run.data.batch import BatchOutput, Microbatch, to_capture
from hocket.run.data.loss import named_losses
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.loss_state import with_loss
from hocket.run.engine.same_everywhere import (
    losses_of_random_outputs,
    refuse_differences,
    refuse_different_losses,
)
from hocket.run.nets.freezable import freezable_modules
from hocket.run.stage.loss_checks.reads import ModelTensors, refuse_kept
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.kept import code_digest, kept_or_measured
from hocket.run.tune.profile_workers import measured_together, profile_layers
from hocket.run.weights.update_text import update_text


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A captured model and its profile, before there is an order.

    Args:
        captured: the captured model.
        profile: its layers' costs, the mean over the workers.
        updates: a digest of how its parameters are updated.
        code: the functions and modules of the user's that costs depend on.
        frozen_s: see `Plan`.
        messages: the costs of messages, once they are measured.
    """

    captured: Captured
    profile: Profile
    updates: str
    code: tuple[object, ...]
    frozen_s: tuple[float, ...] = ()
    messages: MessageCosts | None = None

    def work(
        self, config: PipelineConfig, update_s_per_byte: float = 0.0
    ) -> MeasuredCosts:
        """Return its costs, as measured with the first microbatch.

        Args:
            config: the pipeline's.
            update_s_per_byte: seconds per byte of an update; 0 where it is the same
                whatever is chosen.
        """
        states = config.state_bytes(self.captured.state.trained)
        profiles = {config.microbatches()[0].num_samples: self.profile}
        return measured_work(
            self.captured, profiles, states, update_s_per_byte=update_s_per_byte
        )


def profile_model(
    config: PipelineConfig,
    world: World,
    num_stages: int = 0,
    teacher_outputs: Sequence[Any] = (),
) -> ProfiledModel:
    """Capture the model and profile it. Every worker must call this.

    Args:
        config: the pipeline's.
        world: all workers.
        num_stages: into how many stages it is to be cut; if 0, one per worker.
        teacher_outputs: the teachers' outputs of the first microbatch, which the loss
            reads.

    Raises:
        ModelError: the model cannot be captured.
        SchemaError: the workers have different models or settings.
    """
    places = _places_to_cut(config)
    config.report("capturing the model")
    microbatch, args, kwargs = to_capture(
        config.model, config.example, config.num_parts
    )
    with _keepers_named(config.model, args, kwargs):
        captured = capture(config.model, args, kwargs, cut=places)
    if config.cut is None:
        captured = enough_layers(captured, num_stages or world.world_size)
    nets = {name: teacher.net for name, teacher in config.teachers.items()}
    targets = microbatch.targets
    captured = with_loss(captured, config.loss, targets, teacher_outputs, nets)
    digests = {
        "settings": short_hash(config.text),
        "model": captured.digest,
        "weights": config.text_of_weights(captured.state),
        "seed": str(config.seed),
        "updates": short_hash(update_text(config, captured.state.trained)),
        "compile": str(config.compile),
    }
    size = tp_size_of(config.model, world)
    if size > 1:  # parts of weights differ between tp ranks, and between no others
        texts = world.gather_json(digests["weights"], "weights")
        digests["weights"] = str(texts[world.rank // size * size :][:size])
    refuse_differences(world, digests)
    if world.world_size > 1:
        losses = losses_of_random_outputs(
            config.loss, captured, targets, teacher_outputs, world.device
        )
        refuse_different_losses(world, {"loss function": losses})
    measure = partial(
        profile_layers,
        captured,
        microbatch,
        partial(_loss_with, config, tuple(teacher_outputs)),
        config.compute_precision,
        world,
        config.hold if config.is_partial else None,
    )
    depends_on = {
        "targets": _forms(targets),
        "teacher_outputs": _forms(tuple(teacher_outputs)),
    }
    loss = (config.loss,)
    with _keepers_named(config.model, args, kwargs):
        profile = _load_or_measure(captured, config, world, measure, depends_on, loss)
    updates = digests["updates"]
    code = (config.optimizer, *loss, *_run_as_they_are(captured))
    frozen_s: tuple[float, ...] = ()
    if config.freeze is not None:
        frozen = forwards_of(captured, microbatch, config, world, training=False)
        frozen_s = tuple(layer.forward_s for layer in frozen.layers)
    return ProfiledModel(captured, profile, updates, code, frozen_s)


@contextmanager
def _keepers_named(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Name the modules that keep tensors for their next forward, if torch fails.

    Or the class that the model returns, if torch does not know what it holds.

    Raises:
        ModelError: torch failed; says what may be why.
    """
    try:
        yield
    except (torch.OutOfMemoryError, LostInGraphError):  # no forward may be run again
        raise
    except (RuntimeError, CaptureError) as error:
        with preserve_attributes(model), preserve_state(State.of(model)):
            before = AttributeSnapshot(model)
            names: list[str] = []
            with suppress(Exception), torch.no_grad():
                leaves = pytree.tree_leaves(model(*args, **kwargs))
                names += [type(x).__name__ for x in leaves if is_dataclass(x)]
            kept = before.changed()
        if names:
            raise ModelError(
                f"the model returns its own {names[0]}, and torch does not know which "
                "tensors are in it. Before the pipeline is made, call torch.export."
                f"register_dataclass({names[0]}), or return a dict or a named tuple"
            ) from error
        if isinstance(error, CaptureError):
            raise
        why = (
            f"It keeps {', '.join(kept[:3])} from one forward to the next, and "
            "microbatches have graphs and sizes of their own: make it again, or detach "
            "it, at the beginning of each forward"
        )
        raise ModelError(
            f"the model failed with {type(error).__name__}: {error}. "
            f"{why if kept else KEPT_ELSEWHERE}"
        ) from error


def _places_to_cut(config: PipelineConfig) -> Sequence[str]:
    """Return the modules that a layer must begin with.

    Raises:
        ModelError: no layer can have such a name: it is no module, nor the name of a
            function that a module calls.
    """
    modules = config.model.named_modules(remove_duplicate=False)
    paths = [path for path, _ in modules]
    for name in config.cut or ():
        path, _, _ = name.partition("@")  # of its second call
        outer, _, last = path.rpartition(".")
        if path not in paths and not (last.isidentifier() and outer in paths):
            raise ModelError(
                f"{name} is no module of the model; {nearest(name, paths[1:])}"
            )
    if config.freeze is None:
        return config.cut or ()
    edges = freezable_modules(config.model, config.freeze.layers)[1:]
    return tuple(dict.fromkeys((*edges, *(config.cut or ()))))


def _loss_with(
    config: PipelineConfig, teacher_outputs: Sequence[Any], output: Any, targets: Any
) -> Any:
    """Compute the loss of an output, with what it reads of teachers.

    Raises:
        ModelError: it fails; gives the shapes and types of what it was called with.
            Or it reads a tensor that a module has kept.
    """
    tensors, begin = ModelTensors(config.model), torch.autograd._get_sequence_nr()
    try:
        with tensors.missing_named():
            found = config.loss(output, unshared(targets), *teacher_outputs)
    except (HocketError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        teachers = [f"teachers[{name!r}].own" for name in config.teachers]
        given = map(_forms, (output, targets, *teacher_outputs))
        what = map("{}: {}".format, ("output", "targets", *teachers), given)
        raise ModelError(
            f"the loss, called with the example, failed with {type(error).__name__}: "
            f"{error}. It is called as loss(output, targets"
            f"{', teachers' * bool(teachers)}) with {'; '.join(what)}"
        ) from error
    for value in named_losses(found).values():
        refuse_kept(value, (output, teacher_outputs), begin, tensors)
    return found


def _forms(value: Any) -> str:
    """Return the shapes and types of all tensors, in their structure."""
    value = value.own if isinstance(value, BatchOutput) else value
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return str(pytree.tree_map_only(Tensor, _forms, value))


def _run_as_they_are(captured: Captured) -> tuple[object, ...]:
    """Return the modules whose code the captured graph does not show."""
    flows = captured.training, captured.evaluation
    found = {
        str(node.target): flow.trace.objects[str(node.target)]
        for flow in flows
        for node in flow.trace.calls
        if node.op == "call_module"
    }
    return tuple(found.values())


def forwards_of(
    captured: Captured,
    microbatch: Microbatch,
    config: PipelineConfig,
    world: World,
    *,
    training: bool,
) -> Profile:
    """Profile forwards without gradients. Every worker must call this.

    Args:
        captured: the captured model.
        microbatch: what it is measured with.
        config: the pipeline's.
        world: all workers.
        training: whether its modules run in training mode.
    """
    leaves, device = microbatch.on(world.device).leaves, world.device
    own = partial(profile_forwards, captured, leaves, device=device, training=training)
    together = partial(measured_together, own, config.compute_precision, world)
    passes = {"passes": passes_of(training=training)}
    return _load_or_measure(captured, config, world, together, passes)


def _load_or_measure(
    captured: Captured,
    config: PipelineConfig,
    world: World,
    measure: Callable[[], Profile],
    depends_on: Mapping[str, str],
    code: Sequence[object] = (),
) -> Profile:
    """Load a profile on rank 0, or measure it on all workers. Every worker must call.

    Args:
        captured: the captured model.
        config: the pipeline's, with the folder of kept profiles.
        world: all workers.
        measure: measures on all workers, and returns the mean.
        depends_on: what the numbers depend on beside the model and the workers.
        code: functions that they depend on.
    """
    conditions = conditions_of(captured, world.device)
    here = [conditions[name] for name in ("device_name", "host", "num_threads")]
    workers = world.gather_json(here, "workers")
    conditions |= {
        **depends_on,
        "precision": config.precision,
        "workers": str(workers),  # which share caches and memory
        "code": code_digest((*code, *_run_as_they_are(captured))),
    }
    path = None
    is_alike = len({kind for kind, *_ in workers}) == 1  # all devices are of one kind
    if config.profile_dir is not None and is_alike and conditions["code"]:
        path = path_of(Path(config.profile_dir), conditions)
    names = [layer.name for layer in captured.layers]

    def read(text: str, path: str) -> Profile:
        kept = Profile.parse(text, path)
        kept.check_layers(names, path)
        return kept

    def measured() -> Profile:
        config.report("measuring the model's layers")
        found = measure()
        if world.broadcast_json(bool(found.noise), name="busy"):
            config.report("measuring the model's layers again, as the machine is busy")
            found = min(found, measure(), key=lambda x: (x.core_wait, x.spread))
        return replace(found, conditions=conditions)

    return kept_or_measured(path, "profile", world, read, _steady_text, measured)


def _steady_text(profile: Profile) -> str:
    if profile.noise:
        raise ValueError(profile.noise)
    return profile.text()
