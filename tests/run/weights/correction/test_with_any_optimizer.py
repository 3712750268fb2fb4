"""Corrections with optimizers, schedules, groups and gradients of all kinds.

The oracle, `hocket.emulate`, against a loop of plain torch.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

import hocket
from hocket.options import CorrectionName
from tests.run.support.optimizers import make_scheduler
from tests.run.weights.correction.cases import CASES, CUT
from tests.run.weights.correction.plain_torch import Wanted, trained

DELAYS = (2, 1)
NAMES: tuple[CorrectionName, ...] = get_args(CorrectionName)


@pytest.mark.parametrize("correction", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_the_oracle_equals_plain_torch(correction: CorrectionName, case: str) -> None:
    """With a learning-rate schedule that moves in every step, and a short discount."""
    make_model, make_batches, make_optimizer = CASES[case]
    model, batches = make_model(), make_batches()
    number = 4 if correction == "lr-discount" else None
    hocket.emulate(
        hocket.Program.chain(range(2), 1, delays=DELAYS),
        model,
        nn.functional.mse_loss,
        make_optimizer,
        batches,
        cut_at=[CUT],
        schedulers=make_scheduler,
        correction=correction,
        num_discounted_updates=number,
    )
    names = [name for name, _ in model.named_parameters()]
    back = [name for name in names if name.startswith(f"{CUT}.")]
    expected = trained(
        make_model(),
        [[name for name in names if name not in back], back],
        (make_optimizer, make_scheduler),
        batches,
        Wanted(correction, DELAYS, number or 0),
    )
    for name, p in model.named_parameters():
        wanted = expected[name]
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-10, atol=1e-12)
        assert not torch.equal(p.detach(), make_model().state_dict()[name]), name
