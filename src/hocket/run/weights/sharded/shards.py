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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hocket.model.trace.local import local
from hocket.run.cluster.group import GroupMaker, GroupWork, WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.diagnostics.flight_recorder import OnWait
from hocket.run.weights.reduce import refuse_sparse
from hocket.run.weights.sharded.units import GatheredUnit, UnitRoot, units_of

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.device_mesh import DeviceMesh


class Shards:
    """All sharded weights of one worker.

    Args:
        stages: the parameters of each of its stages, by name.
        mesh: the workers that hold them together; with the replicas as first dimension,
            where there are several.
        group: the workers that hold them together.
        everyone: these in all replicas.
        masters: whether the shards of weights in bfloat16 are float32 masters.

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
        *,
        masters: bool = False,
    ) -> None:
        self._group, self._everyone = group, everyone
        units = [
            (users, GatheredUnit(weights, mesh, masters=masters))
            for users, weights in units_of(stages, masters=masters).items()
        ]
        self._of_stage: dict[int, list[GatheredUnit]] = {
            stage: [unit for (users, *_), unit in units if stage in users]
            for stage in stages
        }
        self.by_weight: Mapping[int, nn.Parameter] = {
            id(weight): shard
            for _, unit in units
            for weight, shard in zip(unit.weights, unit.shards, strict=True)
        }
        from torch.distributed.fsdp import fully_shard

        root: nn.Module = UnitRoot([unit.module for _, unit in units])
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

    def allocate(self, model: nn.Module) -> None:
        """Give a model memory for whole weights, if it is the one that is trained."""
        own = {id(x) for x in model.parameters()}
        for unit in {id(x): x for y in self._of_stage.values() for x in y}.values():
            if any(id(weight) in own for weight in unit.weights):
                unit.allocate()

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
    *,
    masters: bool,
) -> Shards:
    """Shard the weights of this worker's stages; every worker must call this.

    Args:
        stages: the parameters of each of its stages, by name.
        layout: this worker's place.
        world: the job.
        everyone: the workers with the same stages.
        on_wait: called before each wait.
        masters: as for `Shards`.

    Raises:
        ModelError: a weight cannot be sharded.
    """
    assert everyone is not None, "several shards"
    key = world.token, world.attempt, layout
    if key not in _MESHES:
        _MESHES[key] = _mesh_of(layout, world, on_wait)
    mesh, group = _MESHES[key]
    group = replace(group, on_wait=on_wait)
    return Shards(stages, mesh, group, everyone, masters=masters)


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


@dataclass(eq=False)
class ShardReducer:
    """Sums gradients of whole weights over all workers; each gets those of its shards.

    Args:
        units: the stage's.
        everyone: the workers that add up.
        what: describes the gradients, for errors and reports.
    """

    units: Sequence[GatheredUnit]
    everyone: WorkerGroup
    what: str

    def __post_init__(self) -> None:
        self._work: GroupWork | None = None
        self._here: tuple[bool, ...] = ()  # which have a gradient on this worker
        self._present = torch.zeros(0)
        # Cached: making one copies to a GPU, and the host would wait in every step.
        self._flags: dict[tuple[bool, ...], Tensor] = {}

    def start(self) -> None:
        """Start to reduce the gradients, which must be complete, and take them.

        Raises:
            ModelError: a gradient is sparse.
            WaitError: another worker did not come within the timeout.
        """
        trained = [weight for unit in self.units for weight in unit.trained]
        refuse_sparse(trained, self.what, "take num_shards=1")
        if not trained:
            return
        self._here = tuple(w.grad is not None for w in trained)
        if self._here not in self._flags:
            flags = torch.tensor(self._here, device=trained[0].device)
            self._flags[self._here] = flags.float()
        self._present = self._flags[self._here].clone()
        self._work = self.everyone.all_reduce(self._present, self.what)
        with self.everyone.peer_failure(self.what):
            for unit in self.units:
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
        self.everyone.wait(self._work, self.what)
        self._work = None
        shards = [x for unit in self.units for x in unit.shards if x.requires_grad]
        for unit in self.units:
            unit.finish()
        if all(self._here):  # else the host reads what the others have
            return
        for shard, count in zip(shards, self._present.tolist(), strict=True):
            if not count:
                shard.grad = None


def _gather_of(stage: int) -> str:
    return f"gathered weights of stage {stage}"
