"""What does not go with old weights, or with microbatches, is refused in words.

On two workers, the first of which has what is wrong (or the last one, with the loss);
where the other cannot know it by itself, it raises that the first is gone.
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

# The rank that has what is wrong, and what both raise; no rank: both know.
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
    "frozen": (0, ("ModelError", "requires_grad of 1.linear.weight was True")),
    "frozen, flushed": (None, WELL),  # followed
    "sums seen, one replica": (None, WELL),
    "sums seen": (
        None,
        (
            "ModelError",
            "before step 2, 1.linear.weight has a post-accumulate-grad hook",
        ),
    ),
    "sparse, one replica": (None, WELL),
    "sparse": (
        None,
        ("ModelError", "are sparse, and workers add up dense ones alone: make the emb"),
    ),
    "closure": (None, ("ConfigError", "its step() needs closure")),
    "closure, hidden": (None, ("ConfigError", "AssertionError: I need a closure")),
    "2bw": (None, ("ShapeError", "pipedream-2bw on 2 devices needs 2 microbatches")),
    "wpipe": (None, ("ShapeError", "wpipe on 2 devices needs 2 microbatches")),
    "wpipe-overlapped": (None, ("ShapeError", "got 1: use 2, or fewer devices")),
    "contrast": (1, ("ModelError", "declare it: loss=hocket.PerMicrobatch(loss)")),
    "contrast, whole": (None, WELL),
    "contrast, per microbatch": (None, WELL),
}


def test_each_raises_what_is_wrong(tmp_path: Path) -> None:
    """Before a weight is updated by it, with the way out; and another can be made."""
    reported = answers_of(
        "refused_workers:train_all", list(CASES), str(tmp_path), folder=tmp_path
    )
    assert list(EXPECTED) == list(CASES)
    for name, (who, (kind, text)) in EXPECTED.items():
        for rank, answers in enumerate(reported):
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


def test_a_model_cannot_read_outputs_of_other_samples() -> None:
    """A flow that reads the whole batch is for losses, in the emulator and in runs."""
    order = hocket.Schedule.parse(
        "net t microbatches=2\nnet s microbatches=2\n"
        "stage 0 net=t device=0 trainable=no\nstage 1 net=s device=0\n"
        "stage 2 net=s device=0\nflow 0>1 reads=batch\nflow 1>2\n"
        "d0 0F0 0F1 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1U 2U\n"
    )
    hocket.check(order)
    models = {"t": nn.Linear(2, 2), "s": nn.Sequential(nn.Linear(2, 2), nn.Tanh())}
    losses = {"s": F.mse_loss}
    optimizers = {"s": partial(torch.optim.SGD, lr=0.1)}
    batch = torch.zeros(8, 2), torch.zeros(8, 2)
    refusal = pytest.raises(ModelError, match=r"flow 0 -> 1 reads the whole batch")
    cut_at = {"s": ["1"]}
    with refusal:
        hocket.emulate(
            order.program, models, losses, optimizers, [batch], cut_at=cut_at
        )
    with refusal:
        ProgramRun(order, models, losses, optimizers, batch, cut_at=cut_at)


def test_nets_with_copies_have_flows_from_nets_with_as_many() -> None:
    """A copy has a part of the batch; no flow says which of another net's outputs."""
    copies = "".join(f"stage {i} net=s{i} device={i - 1}\n" for i in (1, 2))
    order = hocket.Schedule.parse(
        "net t microbatches=2\nnet s1 microbatches=2\nnet s2 microbatches=2\n"
        f"stage 0 net=t device=0 trainable=no\n{copies}"
        "flow 0>1\nflow 0>2\ncopies 1 2\n"
        "d0 0F0 0F1 1F0 1B0 1F1 1B1 1R 1U\nd1 2F0 2B0 2F1 2B1 2R 2U\n"
    )
    hocket.check(order)
    models = {"t": nn.Linear(2, 2), "s1": nn.Linear(2, 2)}
    losses = {"s1": lambda output, targets, other: F.mse_loss(output, other)}
    optimizers = {"s1": partial(torch.optim.SGD, lr=0.1)}
    batch = torch.zeros(8, 2), torch.zeros(8, 2)
    with pytest.raises(ConfigError, match="copy both nets alike, or none"):
        hocket.emulate(order.program, models, losses, optimizers, [batch])


def test_a_program_does_not_follow_what_the_loop_freezes() -> None:
    """Its workers do not compare what they follow."""
    model = nn.Sequential(Layer(), Layer()).double()
    run = ProgramRun(
        hocket.make_schedule("1f1b", num_devices=1, num_microbatches=2),
        model,
        F.mse_loss,
        partial(torch.optim.SGD, lr=0.1),
        next(batches()),
    )
    run.step(next(batches()))
    model[0].requires_grad_(requires_grad=False)
    with pytest.raises(ModelError, match=r"requires_grad of 0\.linear\.weight"):
        run.step(next(batches()))
