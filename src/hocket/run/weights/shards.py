"""The weights of sharded stages: each worker keeps a part, and gathers all to compute.

    UNSHARD    shard 0 │ shard 1  ──▶  whole weights, on both workers
    F, B       read them, and add to their gradients
    RESHARD    releases them: they read as NaN until they are gathered again
    R          gradients of whole weights  ──▶  the sum of each worker's own shard
    U          the optimizer steps the shards, which are DTensors

torch shards, gathers and reduces: each layer of a stage is a unit of `fully_shard`, a
module that holds the layer's weights and is never called. So no hook of FSDP decides
when something is gathered: the order of ops does. The model's parameters stay the same
objects, and are views of what was gathered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.run.cluster.group import GroupMaker, GroupWork, WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.diagnostics.flight_recorder import OnWait
from hocket.run.weights.local import local

if TYPE_CHECKING:  # importing them takes a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_NUMBER: Final = re.compile(r"\d+")


class _Unit(nn.Module):
    """Holds the weights that are gathered and reduced together; never called."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for i, weight in enumerate(weights):
            self.register_parameter(str(i), weight)

    def now(self) -> list[nn.Parameter]:
        """Return its parameters as they are now: whole, or shards (DTensors)."""
        return [cast(nn.Parameter, x) for x in self._parameters.values()]


class _Root(nn.Module):
    """Holds all units. FSDP makes what they share when it is first called."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self) -> None:
        """Do nothing."""


class _Gathered:
    """The weights of one unit, and how many stages have them whole.

    Args:
        weights: the model's parameters.
        mesh: the workers that hold them together.
    """

    def __init__(self, weights: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        self.weights = tuple(weights)
        # The loop may freeze some later, and each reduction has the same parts.
        self.trained = tuple(x for x in weights if x.requires_grad)
        self.module = _Unit(weights)
        # False: what is whole stays so until it is resharded.
        made = fully_shard(self.module, mesh=mesh, reshard_after_forward=False)
        made.set_reshard_after_backward(False)
        # The sum, for losses have their shares; of single precision, too, where FSDP
        # would multiply in the reduction, which gloo cannot.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(enable=True)
        self.unit: FSDPModule = made
        self.shards = self.module.now()
        self.num_users = 0
        self.pending: Any = None  # a gather that was started
        self._wholes: list[nn.Parameter] = []
        self._lent: list[Tensor] = []  # whole weights that the loop may read
        first = self.weights[0]  # of one type, as all of the unit
        self._one = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        self._released = [self._one.expand(weight.shape) for weight in self.weights]
        self._note_versions()
        self.release()

    def start(self) -> None:
        """Start to gather.

        Raises:
            ModelError: a weight was replaced or written since it was released.
        """
        here = self._lent or self._released
        for weight, known in zip(self.weights, here, strict=True):
            if weight.data_ptr() != known.data_ptr():
                raise ModelError(_lost(weight, "replaced while it was sharded"))
        self._refuse_writes("written while it was sharded")
        self.pending = self.unit.unshard(async_op=True)

    def take(self) -> None:
        """Wait for what was started; let the model read it."""
        pending, self.pending = self.pending, None
        pending.wait()
        self._wholes = self.module.now()
        lent, self._lent = self._lent, []
        if not all(map(torch.equal, lent, self._wholes)):
            raise ModelError(
                "weights that `gather_into` wrote were changed, and would be lost: "
                "the values that are trained are in shards (num_shards). Change them "
                "by `load`, or in another model"
            )
        for weight, whole in zip(self.weights, self._wholes, strict=True):
            weight.data = whole.data
        self._note_versions()

    def _refuse_writes(self, how: str) -> None:
        """Refuse weights that were written where no write is kept.

        Torch refuses most writes to what is expanded; not `fill_`, nor those to a
        single element.

        Raises:
            ModelError: one was written; says how.
        """
        if self._lent:
            return  # `take` compares them
        for weight, version in zip(self.weights, self._versions, strict=True):
            if weight._version != version:
                raise ModelError(_lost(weight, how))
        # Of what is written as `.data` there is no version. A GPU would be waited for.
        if self._one.device.type == "cpu" and not self._one.isnan():
            raise ModelError(_lost(self.weights[0], how))

    def _note_versions(self) -> None:
        self._versions = [weight._version for weight in self.weights]

    def lend(self) -> None:
        """Give the model memory for whole weights, until the next gather."""
        # Not `empty_like`, which would keep the strides of what is released.
        self._lent = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self.weights
        ]
        for weight, memory in zip(self.weights, self._lent, strict=True):
            weight.data = memory

    def release(self) -> None:
        """Release what was gathered: the model reads NaN until the next gather.

        Raises:
            ModelError: an array of NumPy has the memory of a weight; or a weight was
                written while it was whole.
        """
        self._refuse_writes("changed in place by a forward, a backward or a hook")
        try:
            self.unit.reshard()
        except RuntimeError as error:
            raise ModelError(
                "the memory of a gathered weight cannot be released "
                f"({error}): NumPy has it, since .numpy() was called on the weight, "
                "or it is shared between processes. Call .clone() before"
            ) from error
        for weight, nothing in zip(self.weights, self._released, strict=True):
            weight.data = nothing
        self._note_versions()

    def reduce(self) -> None:
        """Reduce the gradients of the whole weights; take them from the model."""
        for weight in self.trained:
            if weight.grad is None:
                weight.grad = torch.zeros(
                    weight.shape, dtype=weight.dtype, device=weight.device
                )
        for weight, whole in zip(self.weights, self._wholes, strict=True):
            whole.grad, weight.grad = weight.grad, None
        for part in _param_groups(self.unit):
            part.post_backward()

    def finish(self) -> None:
        """Let the device wait for what was reduced."""
        for part in _param_groups(self.unit):
            part.finalize_backward()


class Shards:
    """All sharded weights of one worker.

    Args:
        stages: the parameters of each of its stages, by name.
        mesh: the workers that hold them together; with the replicas as first dimension,
            where there are several.
        group: the workers that hold them together.
        everyone: these in all replicas.

    Raises:
        ModelError: a weight cannot be sharded; names it.

    Attributes:
        by_weight: this worker's part of each weight, by the weight's identity.
    """

    def __init__(
        self,
        stages: Mapping[int, Mapping[str, nn.Parameter]],
        mesh: DeviceMesh,
        group: WorkerGroup,
        everyone: WorkerGroup,
    ) -> None:
        self._group, self._everyone = group, everyone
        units = [
            (users, _Gathered(weights, mesh))
            for users, weights in _units_of(stages).items()
        ]
        self._of_stage: dict[int, list[_Gathered]] = {
            stage: [unit for (users, *_), unit in units if stage in users]
            for stage in stages
        }
        self.by_weight: Mapping[int, nn.Parameter] = {
            id(weight): shard
            for _, unit in units
            for weight, shard in zip(unit.weights, unit.shards, strict=True)
        }
        from torch.distributed.fsdp import fully_shard

        root: nn.Module = _Root([unit.module for _, unit in units])
        fully_shard(root, mesh=mesh)
        root()  # it knows no other moment to make streams

    def shard_of(self, tensor: Any) -> Any:
        """Return this worker's part of a weight; of other tensors, all of it."""
        return self.by_weight.get(id(tensor), tensor)

    def part_of(self, weight: Tensor) -> Tensor:
        """Return the tensor that this worker keeps of a weight; it shares memory."""
        found: Tensor = self.shard_of(weight)
        return local(found.detach())

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage."""
        with self._group.peer_failure(_gather_of(stage)):
            for unit in self._of_stage[stage]:
                unit.num_users += 1
                if unit.num_users == 1:
                    unit.start()

    def take(self, stage: int) -> None:
        """Wait until the weights of a stage are whole.

        Raises:
            WaitError: another worker did not come within the timeout.
        """
        for unit in self._of_stage[stage]:
            if unit.pending is not None:
                with self._group.peer_failure(_gather_of(stage)):
                    unit.take()

    def reshard(self, stage: int) -> None:
        """Release a stage's whole weights, but for those that others still have."""
        for unit in self._of_stage[stage]:
            unit.num_users -= 1
            if not unit.num_users:
                unit.release()

    def lend(self, model: nn.Module) -> None:
        """Give a model memory for whole weights, if it is the one that is trained."""
        own = {id(x) for x in model.parameters()}
        for unit in {id(x): x for y in self._of_stage.values() for x in y}.values():
            if any(id(weight) in own for weight in unit.weights):
                unit.lend()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weights of all stages for a while. All workers must call this."""
        for stage in self._of_stage:
            self.unshard(stage)
            self.take(stage)
        try:
            yield
        finally:
            for stage in self._of_stage:
                self.reshard(stage)

    def reducer(self, weights: Sequence[nn.Parameter], what: str) -> ShardReducer:
        """Return what reduces the gradients of some weights: of all of their units."""
        ids = {id(weight) for weight in weights}
        every = {id(x): x for units in self._of_stage.values() for x in units}
        own = [x for x in every.values() if any(id(w) in ids for w in x.weights)]
        return ShardReducer(own, self._everyone, what)


# By job and layout, for as long as the process runs. DTensor remembers what came of an
# operator on a mesh, with the mesh that it first saw: an equal one with groups of its
# own would be taken for that one, whose groups are gone.
_MESHES: Final[dict[Any, tuple[DeviceMesh, WorkerGroup]]] = {}


def make_shards(
    stages: Mapping[int, Mapping[str, nn.Parameter]],
    layout: Layout,
    world: World,
    everyone: WorkerGroup | None,
    on_wait: OnWait,
) -> Shards:
    """Shard the weights of this worker's stages; every worker must call this.

    Args:
        stages: the parameters of each of its stages, by name.
        layout: this worker's place.
        world: the job.
        everyone: the workers with the same stages.
        on_wait: called before each wait.

    Raises:
        ModelError: a weight cannot be sharded.
    """
    assert everyone is not None, "several shards"
    key = world.token, world.attempt, layout
    if key not in _MESHES:
        _MESHES[key] = _mesh_of(layout, world, on_wait)
    mesh, group = _MESHES[key]
    return Shards(stages, mesh, replace(group, on_wait=on_wait), everyone)


def _mesh_of(
    layout: Layout, world: World, on_wait: OnWait
) -> tuple[DeviceMesh, WorkerGroup]:
    """Make the mesh of this worker's shards and replicas, and the group of shards."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = GroupMaker(layout.rank, world.timeout_s, on_wait)
    size, devices = layout.num_shards, range(layout.num_devices)
    own = layout.ranks_of(layout.device)
    ranks = [
        layout.ranks_of(device)[first : first + size]
        for device in devices
        for first in range(0, layout.num_pipelines, size)
    ]
    (group,) = groups.join(ranks)
    across: list[WorkerGroup] = []
    if layout.num_replicas > 1:
        across = groups.join(
            [layout.ranks_of(d)[shard::size] for d in devices for shard in range(size)]
        )
    mesh = DeviceMesh.from_group(
        [x.process_group for x in (*across, group) if x.process_group is not None],
        world.device.type,
        mesh=torch.tensor(own).view(-1, size) if across else torch.tensor(group.ranks),
        mesh_dim_names=("dp_replicate", "dp_shard")[not across :],
    )
    return mesh, group


class ShardReducer:
    """Sums gradients of whole weights over all workers; each gets those of its shards.

    Args:
        units: the stage's.
        everyone: the workers that add up.
        what: describes the gradients, for errors and reports.
    """

    def __init__(
        self, units: Sequence[_Gathered], everyone: WorkerGroup, what: str
    ) -> None:
        self._units = units
        self._everyone = everyone
        self._what = what
        self._work: GroupWork | None = None
        self._present = torch.zeros(0)

    def start(self) -> None:
        """Start to reduce the gradients, which must be complete, and take them.

        Raises:
            ModelError: a gradient is sparse.
            WaitError: another worker did not come within the timeout.
        """
        trained = [weight for unit in self._units for weight in unit.trained]
        if any(w.grad is not None and w.grad.is_sparse for w in trained):
            raise ModelError(
                f"the {self._what} are sparse, and FSDP reduces dense ones alone: make "
                "the embedding with sparse=False, or the pipeline with num_shards=1"
            )
        here = [float(w.grad is not None) for w in trained]
        self._present = (
            torch.tensor(here, device=trained[0].device)
            if trained
            else (torch.zeros(0))
        )
        if not trained:
            return
        self._work = self._everyone.all_reduce(self._present, self._what)
        with self._everyone.peer_failure(self._what):
            for unit in self._units:
                unit.reduce()

    def is_done(self) -> bool:
        """Return whether `finish` would return at once, as far as is known here."""
        return self._work is None or self._work.is_completed()

    def finish(self) -> None:
        """Wait for the sums. A weight that got no gradient anywhere has none.

        Raises:
            WaitError: they did not come within the timeout.
        """
        if self._work is None:
            return
        self._everyone.wait(self._work, self._what)
        self._work = None
        shards = [x for unit in self._units for x in unit.shards if x.requires_grad]
        for unit in self._units:
            unit.finish()
        for shard, count in zip(shards, self._present.tolist(), strict=True):
            if not count:
                shard.grad = None


def _gather_of(stage: int) -> str:
    return f"gathered weights of stage {stage}"


def _lost(weight: Tensor, how: str) -> str:
    return (
        f"a weight of shape {tuple(weight.shape)} was {how}, and that would be lost: "
        "its values are in shards (num_shards), which `load` and the optimizer change"
    )


def _units_of(
    stages: Mapping[int, Mapping[str, nn.Parameter]],
) -> dict[tuple[tuple[int, ...], str, torch.dtype], list[nn.Parameter]]:
    """Return the weights of each unit: of one layer and type, and of the same stages.

    Raises:
        ModelError: a weight cannot be sharded.
    """
    users: dict[int, list[int]] = {}
    for stage, named in stages.items():
        for weight in named.values():
            users.setdefault(id(weight), []).append(stage)
    units: dict[Any, list[nn.Parameter]] = {}
    seen = set[int]()
    for named in stages.values():
        for name, weight in named.items():
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            _refuse(name, weight)
            key = tuple(users[id(weight)]), _layer_of(name), weight.dtype
            units.setdefault(key, []).append(weight)
    return units


def _refuse(name: str, weight: nn.Parameter) -> None:
    why = ""
    if not weight.dim():
        why = (
            "is a scalar, which has no dimension to cut: make it a tensor of shape (1,)"
        )
    elif not weight.dtype.is_floating_point:
        why = f"is of {weight.dtype}, and weights are floating-point numbers"
    elif weight.dtype.itemsize < 2:
        why = f"is of {weight.dtype}, which has no reduction: use bfloat16 or wider"
    elif not weight.is_contiguous():
        why = (
            "is not contiguous, as with channels_last, and FSDP keeps no other order "
            "in memory: call .contiguous() on the model's weights before"
        )
    elif type(weight) is not nn.Parameter:
        why = f"is a {type(weight).__name__}, which torch may not cut"
    if why:
        raise ModelError(
            f"{name} {why}; or make the pipeline with num_shards=1: it stays whole"
        )


def _layer_of(name: str) -> str:
    """Return the layer that a parameter is of: its name up to the first number."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if _NUMBER.fullmatch(part):
            return ".".join(parts[: i + 1])
    return parts[0] if len(parts) > 1 else ""


def _param_groups(unit: FSDPModule) -> Sequence[Any]:
    """Return FSDP's own part of a unit, which reduces without a backward of its own.

    torch has no public way: its pipelines, too, call these (torch 2.11 to 2.14,
    torch.distributed.pipelining.stage, `perform_reduce_grad`).
    """
    state: Any = unit._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    if many is not None:
        return tuple(many)
    return (state._fsdp_param_group,)
