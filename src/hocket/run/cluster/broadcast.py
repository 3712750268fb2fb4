"""Rank 0 decides and broadcasts, since floating-point results differ between hosts.

    rank 0       decide ─┬─▶ the decision, or its error
    the others           └─▶ the same

So all workers always agree, for example on the order of their ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hocket import errors
from hocket.errors import CheckpointError, HocketError, PlanError, RecipeError
from hocket.run.cluster.world import World

_TIMEOUT_S: Final = 600.0  # deciding may search for an order
_FIT_NUMBERS: Final = ("device", "needed_bytes", "memory_bytes")


def decide_on_rank_0(world: World, decide: Callable[[], Any], name: str) -> Any:
    """Decide on rank 0 and broadcast the decision. Every worker must call this.

    Args:
        world: all workers.
        decide: called on rank 0; returns JSON values.
        name: the decision's name, for errors.

    Raises:
        PlanError: `decide` raised it, or a FitError; raised on every worker. Also
            raised on the other ranks if `decide` raised any other exception.
        RecipeError: `decide` raised it; raised on every worker.
        CheckpointError: `decide` raised it; raised on every worker.
        WaitError: rank 0 did not answer for ten minutes, or for the job's timeout if
            that is longer.
    """
    message: dict[str, Any] = {}
    if world.rank == 0:
        try:
            message = {"decided": decide()}
        except (PlanError, RecipeError, CheckpointError) as error:
            message = _refusal(error)
        except Exception as error:
            # Broadcast the failure, so that the other ranks stop waiting.
            reason = f"rank 0 failed at the {name} ({type(error).__name__}: {error})"
            world.broadcast_json(_refusal(PlanError(reason)), name=name)
            raise
    timeout_s = max(_TIMEOUT_S, world.timeout_s)
    message = world.broadcast_json(message, name=name, timeout_s=timeout_s)
    if "decided" in message:
        return message["decided"]
    raise getattr(errors, message["kind"])(message["text"], **message["numbers"])


def _refusal(error: HocketError) -> dict[str, Any]:
    """Return an error as JSON; plan errors but FitError become plain ones."""
    numbers = {
        name: getattr(error, name) for name in _FIT_NUMBERS if hasattr(error, name)
    }
    is_plain = isinstance(error, PlanError) and not numbers
    kind = PlanError if is_plain else type(error)
    return {"kind": kind.__name__, "text": str(error), "numbers": numbers}
