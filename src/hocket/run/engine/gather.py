"""Bring together what the workers hold: the model's state, and its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.program import Program
from hocket.errors import DataError, ModelError, SchemaError
from hocket.model.stages.outline import Outline
from hocket.model.stages.parameter_paths import Home
from hocket.model.stages.saved_modules import SavedModules
from hocket.model.trace.local import whole
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.store.values import pack, unpack
from hocket.run.cluster.world import World
from hocket.run.data.batch import joined
from hocket.run.diagnostics.job_folder import Json
from hocket.run.stage.runner import StageRunner


def gather_state(
    outline: Outline,
    runners: Iterable[StageRunner],
    holders: Mapping[str, int],
    world: World,
    replica: int,
) -> dict[str, Any]:
    """The uncut model's state, collected from the first replica's stages.

    Every worker must call this, and gets the whole state. Copies, on the CPU; of a tied
    weight one, under each of its names.

    Args:
        outline: the uncut model's, for names, shapes and order.
        runners: this worker's stages of the model.
        holders: a rank of the first replica that holds each name.
        world: the job.
        replica: this worker's replica; another than 0 also where another worker gives
            what it holds.

    Raises:
        ModelError: an extra state holds what cannot be sent.
    """
    runners = list(runners)
    outline.modules.before_save()
    held: dict[str, Tensor] = {}
    for runner in runners:
        held |= runner.saved_state(parameters=True)
        held |= runner.saved_state(parameters=False)
    sources = _sources({} if replica else held, holders, world)
    known = outline.state.first_name
    state: dict[str, Any] = dict.fromkeys((*outline.names, *sources))
    if outline.modules.extra_names:
        packed = packed_extra(outline.modules, [] if replica else runners, world.rank)
        for extra in world.gather_json(packed, "extra state"):
            state |= {name: unpack(x) for name, x in extra.items()}
    copies: dict[str, Tensor] = {}
    for name in [x for x in state if x in known or x in sources]:
        first = known.get(name, name)
        if first not in copies and name in sources:
            source, form = sources[name]
            value = _empty(form).to(world.carrier)
            # Those that each hold a part of it gather it together.
            part = whole(held[name]) if name in held else value
            if world.rank == source:
                value.copy_(part.detach())
            world.broadcast(value, source, "the model's state")
            copies[first] = value.cpu()
        if first in copies:
            state[name] = copies[first]
        else:
            del state[name]  # a forward has set it to None
    return state


def _sources(
    held: Mapping[str, Tensor], holders: Mapping[str, int], world: World
) -> dict[str, tuple[int, Json]]:
    """Return by name the rank that has a tensor, and the tensor's form.

    A forward may have put a larger buffer in the place of one, one where none was, or
    none where one was.

    Args:
        held: what this worker has of the first replica.
        holders: see `gather_state`; others than in it are new.
        world: the job.
    """
    own = {name: _form_of_tensor(x) for name, x in held.items()}
    return {
        name: (rank, form)
        for rank, part in enumerate(world.gather_json(own, "forms of the state"))
        for name, form in part.items()
        if holders.get(name, rank) == rank
    }


def packed_extra(
    modules: SavedModules, runners: Iterable[StageRunner] = (), rank: int = 0
) -> dict[str, Json]:
    """Return the extra states that a worker knows, by name, packed.

    Those of later ranks count: rank 0 gives all, also of modules that no stage runs.

    Args:
        modules: the nets' modules.
        runners: the stages of this worker.
        rank: the worker's.

    Raises:
        ModelError: one holds what cannot be sent or saved.
    """
    own = {x for one in runners for x in one.module.modules()} if rank else None
    return {name: pack(x, name) for name, x in modules.extra(own).items()}


def holders_of(
    program: Program, state_names: Mapping[int, Sequence[str]], tp_size: int = 1
) -> dict[str, int]:
    """Return the rank of the first replica's device that holds each name.

    Args:
        program: says which device holds which stage.
        state_names: the names in each stage's `state_dict()`, for one model.
        tp_size: the workers of each stage that each hold a part of its weights.
    """
    holders: dict[str, int] = {}
    for stage, names in state_names.items():
        for name in names:
            place = program.stages[stage].device * program.num_shards
            holders.setdefault(name, place * tp_size)
    return holders


def gather_alike(world: World, own: Mapping[str, Json], seen: int) -> list[Any]:
    """Return what every worker has of an evaluation, by rank.

    Args:
        world: the job.
        own: this worker's.
        seen: a digest of the batches that it has seen.

    Raises:
        SchemaError: another worker has seen other batches.
    """
    parts = world.gather_json({**own, "digest": seen}, "end of the evaluation")
    for rank, part in enumerate(parts):
        if part["digest"] != seen:
            raise SchemaError(
                f"ranks {world.rank} and {rank} evaluated on different batches: every "
                "worker must iterate over the same ones in the same order"
            )
    return parts


@contextmanager
def first_replica_buffers(
    homes: Sequence[Home], replicas: WorkerGroup | None, source: int
) -> Iterator[None]:
    """Let forwards read the first replica's buffers for a while: those that are saved.

    Each replica has buffers of its own, such as the statistics of batch norms.

    Args:
        homes: where this worker keeps the buffers that training changes.
        replicas: this worker and its replicas; None where there is one replica.
        source: the rank of the first of them.
    """
    own = [home[key] for home, key in homes]
    shared = {id(x): x for x in own}
    if replicas is not None:
        shared = {number: x.detach().clone() for number, x in shared.items()}
        for x in shared.values():
            replicas.broadcast(x, source, "buffers of the first replica")
    for (home, key), x in zip(homes, own, strict=True):
        home[key] = shared[id(x)]
    try:
        yield
    finally:
        for (home, key), x in zip(homes, own, strict=True):
            home[key] = x


class CollectedOutputs:
    """Outputs of the model for the batches of a loader, on the workers that make them.

    Args:
        world: the job.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: list[Any] = []  # of the batch under way, by microbatch
        self._batches: list[Any] = []  # on the CPU; None where there was no part of one

    def add(self, output: Any) -> None:
        """Take the output of the next microbatch."""
        self._parts.append(output)

    def end_batch(self) -> None:
        """Move the outputs of a batch to the CPU.

        Raises:
            ModelError: they cannot be joined along dimension 0.
        """
        whole = joined(self._parts) if self._parts else None
        self._parts.clear()
        self._batches.append(pytree.tree_map_only(Tensor, Tensor.cpu, whole))

    def forms(self) -> Json:
        """Return the form of each batch's output: what other workers receive.

        Raises:
            ModelError: an output holds what cannot be sent.
        """
        return [None if x is None else _form_of(x) for x in self._batches]

    def gather(self, forms: Sequence[Json]) -> Any:
        """Return the outputs of all batches, joined; every worker must call this.

        Args:
            forms: those of every worker, by rank. Of one batch, workers have rows in
                the order of their ranks.

        Raises:
            DataError: there are none.
            ModelError: outputs of batches differ in more than the samples.
        """
        found, rank = [], self._world.rank
        for batch, everywhere in enumerate(zip(*forms, strict=True)):
            for source, form in enumerate(everywhere):
                if form is not None:
                    own = self._batches[batch] if source == rank else None
                    found.append(self._received(source, form, own))
        if not found:
            raise DataError("the loader has no samples, so there are no outputs")
        return joined(found)

    def _received(self, source: int, form: Any, own: Any) -> Any:
        """Return one worker's output, sent from there."""
        leaves = pytree.tree_leaves(own) if own is not None else None
        found: list[Any] = []
        for i, (dtype, value) in enumerate(form["leaves"]):
            if not dtype:
                found.append(value)
                continue
            sent = _empty([dtype, value])
            if leaves is not None:
                sent = leaves[i].detach().contiguous()
            here = sent.to(self._world.carrier)
            self._world.broadcast(here, source, "outputs")
            found.append(here.cpu())
        return pytree.tree_unflatten(found, pytree.treespec_loads(form["spec"]))


def _form_of_tensor(tensor: Tensor) -> Json:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(form: Any) -> Tensor:
    dtype, shape = form
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _form_of(output: Any) -> Json:
    leaves, spec = pytree.tree_flatten(output)
    forms: list[Json] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            forms.append(_form_of_tensor(leaf))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            forms.append(["", leaf])
        else:
            raise ModelError(
                f"the model's output holds a {type(leaf).__name__}: to collect outputs "
                "on all workers, return tensors, numbers, text and None"
            )
    try:
        return {"spec": pytree.treespec_dumps(spec), "leaves": forms}
    except (NotImplementedError, TypeError) as error:
        raise ModelError(
            f"the structure of the model's output cannot be sent ({error}): return "
            "tuples, lists and dicts, or register the class with "
            "torch.utils._pytree.register_pytree_node(serialized_type_name=)"
        ) from error
