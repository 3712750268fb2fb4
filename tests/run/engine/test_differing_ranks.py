"""Ranks that would train differently are refused, by all of them, with both numbers."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.run.support.differing_workers import CASES, NUM_STEPS
from tests.run.support.forked import answers_of

pytestmark = pytest.mark.timeout(180)

AT_1: Final = "at step 1 the learning rates differ by rank: "
# Groups have the numbers that they have in the optimizer of the whole model.
HALF: Final = (
    f"{AT_1}group 0 of stage 0 on rank 0 has 0.1 (1 times its scheduled 0.1), group 4 "
    "of stage 1 on rank 1 has 0.05 (0.5 times its scheduled 0.1). Use the same"
)

# The error, its message's part, and the steps that were given results before.
EXPECTED: Final[dict[str, tuple[str, str, int]]] = {
    "flushed": ("SchemaError", HALF.replace("0.05", "0.025").replace("0.1", "0.05"), 1),
    "from 0": ("SchemaError", HALF, 1),
    "clipped": (
        "SchemaError",
        "stage 1 on rank 1 has 0.15 (0.5 times its scheduled 0.3)",
        1,
    ),
    # There each step's message is read when the next one is sent, or at the end.
    "flush-free": ("SchemaError", HALF, 2),
    "flush-free, clipped": ("SchemaError", HALF, 1),
    "flush-free, last": (
        "SchemaError",
        HALF.replace("at step 1", "at step 2"),
        NUM_STEPS,
    ),
    "replicas": (
        "SchemaError",
        HALF.replace("group 4 of stage 1", "group 0 of stage 0"),
        1,
    ),
    "all alike": ("", "", NUM_STEPS),
    "all alike, flush-free": ("", "", NUM_STEPS),
    "all alike, replicas": ("", "", NUM_STEPS),
    "one rate": ("", "", NUM_STEPS),
    "mode, replicas": ("SchemaError", "differs between ranks", 1),
    "all alike, mode": ("", "", NUM_STEPS),
    "loss": ("SchemaError", "ranks 0 and 1 differ in the loss function: of the", 0),
    "loss, replicas": ("SchemaError", "ranks 0 and 1 differ in the loss function", 0),
    "names of losses": ("SchemaError", "on rank 0 and None on rank 1", 0),
    "joint steps": ("ConfigError", "clip_norm=; or train on one device", 0),
    "every_steps": ("SchemaError", "ranks 0 and 1 differ in the option freeze", 0),
    "freeze on one": ("SchemaError", "ranks 0 and 1 differ in the option freeze", 0),
    "shapes": ("SchemaError", "ranks 0 and 1 differ in the option shapes", 0),
    "cache": ("SchemaError", "ranks 0 and 1 differ in the option cache", 0),
    "all alike, freeze": ("", "", NUM_STEPS),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """What each worker raised in each case, by rank."""
    folder = tmp_path_factory.mktemp("differing")
    return answers_of(
        "differing_workers:train_all", list(CASES), str(folder), folder=folder
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_raise_it(reported: list[dict[str, list[Any]]], name: str) -> None:
    """Such training went to its end without a word."""
    error, part, num_steps = EXPECTED[name]
    for rank in (0, 1):
        kind, message, steps = reported[rank][name]
        assert (kind, len(steps)) == (error, num_steps), message
        assert part in message


def test_a_mode_set_on_one_rank_is_named(reported: list[dict[str, list[Any]]]) -> None:
    """By the rank that gets the other's header; it waits for nothing of the step."""
    kind, message, steps = reported[1]["mode"]
    assert (kind, steps) == ("SchemaError", [0])
    assert "at step 1, what the loop has changed in the model differs" in message
