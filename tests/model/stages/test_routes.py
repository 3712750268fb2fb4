"""Values go along flows: directly where there is one, relayed where there is none."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.capture import Captured, capture
from hocket.model.stages.cut import StageModule, boundaries_from_names, cut
from tests.model.support.branches import Branching, Skipping, play

SKIP = [(0, 1), (1, 2), (2, 3), (0, 3)]
BRANCHES = [(0, 1), (0, 2), (1, 3), (2, 3)]
Counts = dict[tuple[int, int], int]


def captured_model(kind: type[nn.Module]) -> Captured:
    """In float64, for four samples."""
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    names = [name for name, _ in model.named_children()]
    return capture(model, (x,), capture="submodules", cut=names[1:])


def stages_of(
    captured: Captured, flows: Sequence[tuple[int, int]] | None
) -> tuple[StageModule, ...]:
    """Four stages, of a linear layer each."""
    names = [name for name, _ in captured.model.named_children()][1:]
    return cut(captured, boundaries_from_names(captured, names), flows)


def counts(stages: Sequence[StageModule]) -> Counts:
    """How many values go along each flow."""
    return {
        (stage.index, target): len(values)
        for stage in stages
        for target, values in stage.sent.items()
    }


@pytest.mark.parametrize(
    ("kind", "flows", "expected"),
    [
        (Skipping, None, {(0, 1): 1, (1, 2): 2, (2, 3): 2}),
        (Skipping, SKIP, {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 3): 1}),
        (Branching, None, {(0, 1): 1, (1, 2): 2, (2, 3): 2}),
        (Branching, BRANCHES, {(0, 1): 1, (0, 2): 1, (1, 3): 1, (2, 3): 1}),
        # Of two ways of one length, a value takes one: it enters no stage twice.
        (
            Skipping,
            [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)],
            {(0, 1): 1, (0, 2): 0, (1, 2): 1, (1, 3): 1, (2, 3): 1},
        ),
    ],
)
def test_values_take_the_shortest_way(
    kind: type[nn.Module], flows: list[tuple[int, int]] | None, expected: Counts
) -> None:
    """Counted by flow; and both ends of a flow name the same values."""
    stages = stages_of(captured_model(kind), flows)

    assert counts(stages) == expected
    for stage in stages:
        names = [value.name for value in stage.inputs]
        assert len(set(names)) == len(names)
        for source, values in stage.received.items():
            assert stages[source].sent[stage.index] == values


@pytest.mark.parametrize(
    ("kind", "flows"),
    [(Skipping, None), (Skipping, SKIP), (Branching, None), (Branching, BRANCHES)],
)
def test_gradients_of_all_readers_are_added_up(
    kind: type[nn.Module], flows: list[tuple[int, int]] | None
) -> None:
    """By messages along the flows alone, equal to the uncut model's."""
    captured = captured_model(kind)
    uncut = copy.deepcopy(captured.model)
    (x,) = captured.example.leaves
    output = uncut(x)
    output.square().mean().backward()

    found = play([stage.train() for stage in stages_of(captured, flows)], [x])

    torch.testing.assert_close(found, output, rtol=1e-12, atol=1e-14)
    for a, b in zip(captured.model.parameters(), uncut.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_a_value_without_a_way_is_refused() -> None:
    """Names the value, both stages, and the flow that would help."""
    captured = captured_model(Skipping)

    with pytest.raises(
        ModelError,
        match=r"stage 3 reads first:.*, which stage 0 makes.*"
        r"add the flow 0 -> 3",
    ):
        stages_of(captured, [(0, 1), (1, 2)])


@pytest.mark.parametrize("flow", [(2, 1), (1, 1), (2, 4), (-1, 2)])
def test_flows_lead_to_later_stages(flow: tuple[int, int]) -> None:
    """Of those that there are."""
    with pytest.raises(ModelError, match="from a lower to a higher stage of the 4"):
        stages_of(captured_model(Skipping), [*SKIP, flow])
