"""Compare what all workers of a run must have alike, before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hocket.errors import SchemaError
from hocket.run.cluster.world import World

_REMEDY: Final = (
    "Weights are the same where every worker seeds before it makes the model, or loads "
    "the same checkpoint"
)


def refuse_differences(world: World, digests: Mapping[str, str]) -> None:
    """Refuse to start workers with different models or settings. Every worker calls.

    Args:
        world: the job.
        digests: by what they are digests of.

    Raises:
        SchemaError: two workers differ; names both, and what differs.
    """
    by_rank = world.gather_json(dict(digests), "compare")
    for what in digests:
        first, *others = [part[what] for part in by_rank if isinstance(part, dict)]
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise SchemaError(
                    f"ranks 0 and {rank} differ in the {what} (digests "
                    f"{str(first)[:8]} and {str(other)[:8]}): make the pipeline from "
                    f"the same model, example and settings on every worker. {_REMEDY}"
                )
