"""What does not go with old weights, or with microbatches, is refused in words.

On two workers, the first of which has what is wrong (or the last one, with the loss);
where the other cannot know it by itself, it is told that the first is gone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.run.engine.program_run import ProgramRun
from tests.run.support.forked import answers_of
from tests.run.support.refused_workers import CASES, Layer, Recomputes, batches

pytestmark = pytest.mark.timeout(120)

GONE: Final = "is gone"
WELL: Final = ("", "")

# Who has what is wrong, and what both are told; nobody: both know.
EXPECTED: Final[dict[str, tuple[int | None, tuple[str, str]]]] = {
    "all is well": (None, WELL),
    "state": (0, ("ModelError", "keeps state between forwards (1.hidden)")),
    "checkpoint": (0, ("ModelError", "recomputation belongs to the stage")),
    "both, flushed": (None, WELL),
    "checkpoint, later, reentrant": (
        0,
        ("ModelError", "its forward calls torch.utils.checkpoint"),
    ),
    "recompute": (None, WELL),
    "frozen": (
        0,
        ("ModelError", "requires_grad of 1.linear.weight (and of 1 more) was True"),
    ),
    "frozen, flushed": (0, ("ModelError", "and is False at step 2")),
    "closure": (None, ("ConfigError", "its step() needs closure")),
    "closure, hidden": (None, ("ConfigError", "AssertionError: I need a closure")),
    "2bw": (None, ("ShapeError", "pipedream-2bw on 2 devices needs 2 microbatches")),
    "wpipe": (None, ("ShapeError", "wpipe on 2 devices needs 2 microbatches")),
    "wpipe-overlapped": (None, ("ShapeError", "got 1: use 2, or fewer devices")),
    "contrast": (1, ("ModelError", "declare it: loss=hocket.PerMicrobatch(loss)")),
    "contrast, whole": (None, WELL),
    "contrast, per microbatch": (None, WELL),
}


def test_each_is_told_what_is_wrong(tmp_path: Path) -> None:
    """Before a weight is updated by it, with the way out; and another can be made."""
    told = answers_of(
        "tests.run.support.refused_workers:train_all",
        list(CASES),
        str(tmp_path),
        num_workers=2,
        folder=tmp_path,
    )
    assert list(EXPECTED) == list(CASES)
    for name, (who, (kind, text)) in EXPECTED.items():
        for rank, answers in enumerate(told):
            found, message = answers[name] or WELL
            if who in (None, rank):
                assert (found, text in message) == (kind, True), (name, rank, message)
            else:
                assert (found, GONE in message) == ("WaitError", True), (name, message)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_emulator_refuses_checkpoints_where_weights_are_old(delay: int) -> None:
    """From the first step on that reads such weights; elsewhere they may be."""
    model = nn.Sequential(Layer(), Recomputes(use_reentrant=False), Layer()).double()
    train = partial(
        hocket.emulate,
        hocket.Program.chain([0], 1, delays=[delay]),
        model,
        F.mse_loss,
        partial(torch.optim.SGD, lr=0.1),
        batches(),
    )
    if delay == 0:
        assert len(train()) == 3
        return
    with pytest.raises(ModelError, match="a stage reads weights that are 1 update old"):
        train()


@pytest.mark.parametrize(("num", "reads"), [(4, ""), (2, " reads=batch")])
def test_flows_that_are_only_planned_are_refused(num: int, reads: str) -> None:
    """By the emulator and by the workers alike; they would compute something else."""
    forwards = " ".join(f"0F{i}" for i in range(num))
    order = hocket.Schedule.parse(
        f"net t microbatches={num}\nnet s microbatches=2\n"
        "stage 0 net=t device=0 trainable=no\nstage 1 net=s device=0\n"
        f"flow 0>1{reads}\nd0 {forwards} 1F0 1B0 1F1 1B1 1U\n"
    )
    hocket.check(order)
    models = {"t": nn.Linear(2, 2), "s": nn.Linear(2, 2)}
    losses = {"s": lambda output, targets, other: F.mse_loss(output, other)}
    optimizers = {"s": partial(torch.optim.SGD, lr=0.1)}
    batch = torch.zeros(8, 2), torch.zeros(8, 2)
    with pytest.raises(ConfigError, match=r"flow 0 -> 1: net t .* but not run yet"):
        hocket.emulate(order.program, models, losses, optimizers, [batch])
    with pytest.raises(ConfigError, match=r"flow 0 -> 1: net t .* but not run yet"):
        ProgramRun(order, models, losses, optimizers, batch)
