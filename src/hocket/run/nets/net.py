"""One net on one worker: an outline without values, and the stages that run here.

outline   a b c d e f     on meta: names, shapes, types, the work; never values
cut       a b c | d e f   this worker runs the first stage and keeps a b c
cut again a b | c d | e f c is sent to the worker of the second stage, and is gone

Which worker sends what, when the net is cut again:

    before   worker 0: a b     1: c d          a move: b from 0 to 1; d from 1 to 2 ...
    after    worker 0: a       1: b c    2: d

All workers compute the same plan, and go through the pairs of workers in one order.
Sends do not wait for their receivers, so no two workers wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import ref

from torch import Tensor

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, check_as_is, cut, names_in_stages
from hocket.model.stages.outline import on_tensors
from hocket.model.stages.routes import Flows
from hocket.model.trace.state import named_tensors
from hocket.run.cluster.world import World
from hocket.run.comm.bundles import Bundle, finish, receive_bundles, send_bundles


class NetOnWorker:
    """A net that is captured once, and cut any number of times.

    Args:
        name: the net's name in the program.
        captured: the captured model. Only its tensors are kept, until the first cut
            decides which are needed here.

    Attributes:
        outline: the model's structure on `meta`.
        stages: the stages that run here, by their number in the net.
    """

    def __init__(self, name: str, captured: Captured) -> None:
        self.name = name
        self.outline = on_tensors(captured, {})
        self._model = ref(captured.model)  # whose modules the user may change
        self.stages: dict[int, StageModule] = {}
        self._tensors = dict(captured.state.tensors)
        self._names: dict[tuple[int, ...], tuple[frozenset[str], ...]] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that are here, by first name."""
        self._tensors |= _tensors_of(self.stages.values(), self._first_name)
        return dict(self._tensors)

    def names(self, boundaries: Sequence[int]) -> tuple[frozenset[str], ...]:
        """Return the first names of what each stage of a cut uses."""
        cut_at = tuple(boundaries)
        if cut_at not in self._names:
            self._names[cut_at] = names_in_stages(self.outline, cut_at)
        return self._names[cut_at]

    def num_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes of each parameter and buffer of the net, by (net, name)."""
        tensors = self.outline.state.tensors.items()
        return {(self.name, name): x.nbytes for name, x in tensors}

    def cut(
        self,
        boundaries: Sequence[int],
        here: Collection[int],
        received: Mapping[str, Tensor] | None = None,
        flows: Flows | None = None,
    ) -> tuple[StageModule, ...]:
        """Make the stages that run here; release what they do not use.

        Parameters that stay are the same objects as before, so that they keep
        their optimizer state.

        Args:
            boundaries: the layers at which stages 1, 2, ... begin.
            here: the stages that run on this worker.
            received: the tensors that other workers sent, by first name.
            flows: see `hocket.model.stages.cut.cut`.

        Returns:
            All stages; those of other workers are on `meta`.

        Raises:
            ModelError: a stage uses a tensor that is not here; or the cut is
                impossible.
        """
        given = self.tensors | dict(received or {})
        names = self.names(boundaries)
        needed = {name for number in here for name in names[number]}
        missing = sorted(needed - given.keys())
        if missing:
            raise ModelError(
                f"stages {', '.join(map(str, sorted(here)))} of net {self.name} use "
                f"{missing[0]} (and {len(missing) - 1} more names), which this worker "
                "does not hold: receive it from one that does (plan_moves)"
            )
        check_as_is(self.outline, boundaries, flows)
        tensors = {name: given[name] for name in needed}
        own = on_tensors(self.outline, tensors, self._model())
        stages = cut(own, boundaries, flows)
        self.stages = {number: stages[number] for number in here}
        self._tensors = _tensors_of(self.stages.values(), self._first_name)
        return stages

    def adopt(self, stages: Mapping[int, StageModule]) -> None:
        """Keep stages that were cut elsewhere; release what they do not use."""
        self.stages = dict(stages)
        self._tensors = _tensors_of(self.stages.values(), self._first_name)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's part of the uncut model's `state_dict()`."""
        state = self.outline.state
        names = state.first_name.items()
        tensors = self.tensors
        return {
            name: tensors[first]
            for name, first in names
            if first in tensors and name in state.persistent
        }

    @property
    def _first_name(self) -> Mapping[str, str]:
        return self.outline.state.first_name


def _tensors_of(
    stages: Collection[StageModule] | Any, first_name: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors that stages keep, by first name."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        found |= {first_name[name]: x for name, x in named_tensors(stage).items()}
    return found


# The workers that hold each part of the state, by (net, name).
Holders = Mapping[tuple[str, str], Set[int]]


@dataclass(frozen=True, slots=True)
class Move:
    """One parameter or buffer that moves to the workers that need it and lack it.

    Args:
        net: the net's name.
        name: its first name in the uncut model.
        source: the worker that sends it.
        targets: the workers that receive it, in order.
    """

    net: str
    name: str
    source: int
    targets: tuple[int, ...]


def plan_moves(
    before: Holders,
    after: Holders,
    num_bytes: Mapping[tuple[str, str], int],
    hosts: Sequence[str] | None = None,
) -> tuple[Move, ...]:
    """Plan the moves from one cut to another.

    Of several workers that hold a part, one on the receiver's host sends it if there is
    any; of these the one that sends the fewest bytes so far, and then the one of the
    lowest rank.

    Args:
        before: the workers that hold each part.
        after: the workers that need each part.
        num_bytes: the bytes of each part.
        hosts: the host of each rank; all are on one when not given.

    Raises:
        ModelError: a worker needs what no worker holds.
    """
    lost = sorted(key for key in after if after[key] and not before.get(key))
    if lost:
        net, name = lost[0]
        raise ModelError(
            f"no worker holds {name} of net {net} (and {len(lost) - 1} more names), "
            "though the new cut needs it: cut again before the workers that held it "
            "leave"
        )
    sent: dict[int, int] = {}
    moves = []
    for key in sorted(after):
        targets = sorted(set(after[key]) - set(before.get(key, ())))
        for host, group in groupby(targets, lambda rank: hosts[rank] if hosts else ""):
            near = {x for x in before[key] if hosts and hosts[x] == host}
            source = min(near or before[key], key=lambda x: (sent.get(x, 0), x))
            receivers = tuple(group)
            sent[source] = sent.get(source, 0) + num_bytes[key] * len(receivers)
            moves.append(Move(*key, source, receivers))
    return tuple(moves)


def holders_of(
    net: str, names: Sequence[Set[str]], workers: Sequence[Set[int]]
) -> dict[tuple[str, str], frozenset[int]]:
    """Return the workers that hold each part of one net.

    Args:
        net: its name.
        names: for each stage, the names that it uses.
        workers: for each stage, the workers that run it, over all replicas.
    """
    found: dict[tuple[str, str], frozenset[int]] = {}
    for used, ranks in zip(names, workers, strict=True):
        for name in used:
            found[net, name] = found.get((net, name), frozenset()) | frozenset(ranks)
    return found


def transfer(
    moves: Sequence[Move], bundle_of: Callable[[str, str], Bundle], world: World
) -> dict[tuple[str, str], Bundle]:
    """Make the moves. Every worker of the process group must call this.

    Args:
        moves: the moves, the same on all workers.
        bundle_of: returns a part that is here, by net and name.
        world: the job.

    Returns:
        The parts received, by (net, name).
    """
    received: dict[tuple[str, str], Bundle] = {}
    sends: list[tuple[Any, Tensor]] = []  # with what is under way
    between: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        for target in move.targets:
            between.setdefault((move.source, target), []).append(move)
    for (source, target), group in sorted(between.items()):
        if world.rank == source:
            bundles = [bundle_of(move.net, move.name) for move in group]
            sends += send_bundles(bundles, target, world)
        elif world.rank == target:
            came = receive_bundles(source, world)
            for move, bundle in zip(group, came, strict=True):
                received[move.net, move.name] = bundle
    finish(sends)
    return received
