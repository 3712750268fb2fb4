"""Plans which worker sends which part of a net's state when it is cut again.

    before   worker 0: a b     1: c d          a move: b from 0 to 1; d from 1 to 2 ...
    after    worker 0: a       1: b c    2: d

All workers compute the same plan, and go through the pairs of workers in one order.
Sends do not wait for their receivers, so no two workers wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from hocket.errors import ModelError
from hocket.run.cluster.world import World
from hocket.run.comm.bundles import Bundle, finish, receive_bundles, send_bundles

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
