"""Rank 0 decides and broadcasts, since floating-point results differ between hosts.

    rank 0       decide ─┬─▶ the decision, or its error
    the others           └─▶ the same

So all workers always agree, for example on the order of their ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hocket.errors import FitError, PlanError
from hocket.run.cluster.world import World

_TIMEOUT_S: Final = 600.0  # deciding may search for an order


def decide_on_rank_0(world: World, decide: Callable[[], Any], name: str) -> Any:
    """Decide on rank 0 and broadcast the decision. Every worker must call this.

    Args:
        world: all workers.
        decide: called on rank 0; returns JSON values.
        name: the decision's name, for errors.

    Raises:
        FitError: `decide` raised it; raised on every worker.
        PlanError: `decide` raised it; also raised on the other ranks if `decide` raised
            any other exception.
        WaitError: rank 0 did not answer for ten minutes, or for the job's timeout if
            that is longer.
    """
    message: dict[str, Any] = {}
    if world.rank == 0:
        try:
            message = {"decided": decide()}
        except FitError as error:
            numbers = {
                "device": error.device,
                "needed_bytes": error.needed_bytes,
                "memory_bytes": error.memory_bytes,
            }
            message = {"missing": str(error), "numbers": numbers}
        except PlanError as error:
            message = {"refused": str(error)}
        except Exception as error:
            # Broadcast the failure, so that the other ranks stop waiting.
            reason = f"rank 0 failed at the {name} ({type(error).__name__}: {error})"
            world.broadcast_json({"refused": reason}, name=name)
            raise
    timeout_s = max(_TIMEOUT_S, world.timeout_s)
    message = world.broadcast_json(message, name=name, timeout_s=timeout_s)
    if "missing" in message:
        raise FitError(message["missing"], **message["numbers"])
    if "refused" in message:
        raise PlanError(message["refused"])
    return message["decided"]
