"""Models that their user has parallelised over a tp axis, beside the plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.run.support.forked import answers_of
from tests.run.support.parallel_models import (
    DECAY,
    NUM_PARTS,
    adamw,
    batches,
    loss_of,
    make_net,
)

CLIP: Final = 0.5
assert_near = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
CASES: Final[dict[str, dict[str, Any]]] = {
    "halves, recomputed, sequence": {
        "plan": "sequence",
        "tp": 2,
        "options": {"schedule": "zb-h1", "recompute": "all", "clip_norm": CLIP},
    },
}
MORE: Final[dict[str, dict[str, Any]]] = {
    "replicas": {
        "plan": "tensor",
        "tp": 2,
        "options": {"schedule": "1f1b", "num_replicas": 2, "clip_norm": CLIP},
    },
    "1f1b, clipped": {
        "plan": "tensor",
        "tp": 2,
        "options": {"schedule": "1f1b", "clip_norm": CLIP},
    },
    "two stages a device": {
        "plan": "tensor",
        "tp": 2,
        "options": {"schedule": "zb-v", "stages_per_device": 2, "clip_norm": CLIP},
    },
    "replicas, sequence": {
        "plan": "sequence",
        "tp": 2,
        "options": {"schedule": "1f1b", "num_replicas": 2, "clip_norm": CLIP},
    },
    "four tp ranks": {
        "plan": "tensor",
        "tp": 4,
        "options": {"schedule": "1f1b", "clip_norm": CLIP},
    },
}


def plain() -> tuple[list[float], list[float], float, dict[str, dict[str, Tensor]]]:
    """Losses, norms, the loss in evaluation, state and averages of the plain loop."""
    net, data = make_net(), batches(4)
    averaged = make_net().state_dict()
    optimizer = adamw(net.parameters())
    losses, norms = [], []
    for words, targets in data[:2]:
        optimizer.zero_grad()
        loss = loss_of(net(words), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        for name, weight in net.state_dict().items():
            averaged[name].lerp_(weight, 1 - DECAY)
        losses.append(loss.item())
    words, targets = data[3]
    with torch.no_grad():
        evaluated = loss_of(net(words), targets).item()
    return losses, norms, evaluated, {"state": net.state_dict(), "averaged": averaged}


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"]
)
def test_workers_equal_the_plain_loop(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Losses, norms of whole gradients, weights; saved, and loaded by one worker."""
    rows = answers_of(
        "parallel_models:train",
        [*cases.values()],
        str(tmp_path),
        num_workers=4,
        folder=tmp_path / "job",
        whole_s=250.0,
    )
    losses, norms, evaluated, states = plain()
    whole_bytes = sum(x.nbytes for x in make_net().parameters())
    for i, (name, case) in enumerate(cases.items()):
        for found in rows:  # all workers know the same
            row = found[i]
            assert row["losses"] == pytest.approx(losses, rel=1e-10), name
            assert row["norms"] == pytest.approx(norms, rel=1e-10), name
            assert row["evaluated"] == pytest.approx(evaluated, rel=1e-10), name
            assert row["again"] == row["later"], name
            for kind, expected in states.items():
                assert list(row[kind]) == list(expected), name
                for key, value in row[kind].items():
                    got = torch.tensor(value, dtype=torch.float64)
                    assert_near(got, expected[key])
            # What a worker holds: its part of weights that are split, and the others.
            assert whole_bytes / case["tp"] < row["weight_bytes"] < whole_bytes, name
        with hocket.Pipeline(
            make_net(),
            loss_of,
            example=batches(1)[0],
            num_microbatches=NUM_PARTS,
            optimizer=adamw,
            clip_norm=CLIP,
            ema_decay=DECAY,
        ) as alone:
            alone.load(tmp_path / str(i))
            for key, value in alone.state_dict().items():
                assert_near(value, states["state"][key])
            later = alone.step(batches(4)[2]).loss
        assert later == pytest.approx(rows[0][i]["later"][0], rel=1e-10), name
