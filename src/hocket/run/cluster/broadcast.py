"""What worker 0 decides for all: floating point may differ from host to host.

    worker 0     decide ─┬─▶ the decision, or why there is none
    the others           └─▶ the same

So no two workers ever come to different orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hocket.errors import FitError, PlanError
from hocket.run.cluster.world import World

_PATIENCE_S: Final = 600.0  # to decide takes longer than any op: orders are searched


def decide_on_rank_0(world: World, decide: Callable[[], Any], name: str) -> Any:
    """The same decision on every worker. Every worker must call this.

    Args:
        world: all workers.
        decide: called on worker 0; gives what JSON can say.
        name: of the decision, for errors.

    Raises:
        FitError: what `decide` raised, on every worker.
        PlanError: likewise; on the others, also where it raised anything else.
        WaitError: worker 0 said nothing for ten minutes, or for the job's timeout if
            that is longer.
    """
    told: dict[str, Any] = {}
    if world.rank == 0:
        try:
            told = {"decided": decide()}
        except FitError as error:
            numbers = {
                "device": error.device,
                "needed_bytes": error.needed_bytes,
                "memory_bytes": error.memory_bytes,
            }
            told = {"missing": str(error), "numbers": numbers}
        except PlanError as error:
            told = {"refused": str(error)}
        except Exception as error:
            # The others shall not wait for what will not come.
            said = f"worker 0 failed at the {name} ({type(error).__name__}: {error})"
            world.broadcast_json({"refused": said}, name=name)
            raise
    patience_s = max(_PATIENCE_S, world.timeout_s)
    told = world.broadcast_json(told, name=name, timeout_s=patience_s)
    if "missing" in told:
        raise FitError(told["missing"], **told["numbers"])
    if "refused" in told:
        raise PlanError(told["refused"])
    return told["decided"]
