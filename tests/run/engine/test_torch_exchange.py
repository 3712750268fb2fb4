"""Orders travel to torch.distributed.pipelining as CSV, and from there, and run.

Two real workers begin once, and play every file of both folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.passes.add_messages import add_messages
from hocket.schedules import make_schedule
from tests.run.support.forked import answers_of
from tests.run.support.small_models import make_model
from tests.run.support.torch_exchange import (
    MODEL,
    NUM_MICROBATCHES,
    TORCHS,
    WITH_MESSAGES,
)

OURS: Final = (
    "1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "interleaved-zb",
    "zb-v",
    "dualpipe-v",
    "ooo-fast-forward",
)
TOLERANCE: Final = 1e-10

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("torch exchange")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With our orders, in both forms."""
    folder = tmp_path_factory.mktemp("exchange")
    (folder / "ours").mkdir()
    for name in OURS:
        order = make_schedule(name, num_devices=2, num_microbatches=NUM_MICROBATCHES)
        order.to_csv(folder / "ours" / f"{name}.csv")
        add_messages(order).to_csv(folder / "ours" / f"{name}{WITH_MESSAGES}")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """Of both workers, when they have played all."""
    return answers_of(
        "torch_exchange:exchange", str(folder), folder=folder / "workers", whole_s=180.0
    )


@pytest.mark.parametrize("form", [".csv", WITH_MESSAGES])
@pytest.mark.parametrize("name", OURS)
def test_torch_runs_our_order(
    answers: list[dict[str, Any]], name: str, form: str
) -> None:
    """With the plain loop's gradients, whether it adds the messages or we do."""
    check_gradients([answer["ours"][name + form] for answer in answers])


@pytest.mark.parametrize("name", TORCHS)
def test_we_run_torchs_order(answers: list[dict[str, Any]], name: str) -> None:
    """From the file that torch writes of it by default."""
    check_gradients([answer["torchs"][name + WITH_MESSAGES] for answer in answers])


@pytest.mark.parametrize("form", [".csv", WITH_MESSAGES])
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.usefixtures("answers")
def test_torchs_order_is_a_schedule_like_any(
    folder: Path, name: str, form: str
) -> None:
    """It passes the check, can be simulated, and is ours, whichever file it is in."""
    order = Schedule.from_csv(folder / "torchs" / f"{name}{form}")

    check(order)
    assert simulate(order, Costs.uniform()).makespan_s > 3 * NUM_MICROBATCHES
    assert order == make_schedule(
        name, num_devices=2, num_microbatches=NUM_MICROBATCHES
    )


def check_gradients(workers: list[dict[str, float]]) -> None:
    """Each parameter's gradient is on one worker, and the plain loop's."""
    found = [name for worker in workers for name in worker]
    assert sorted(found) == sorted(dict(make_model(MODEL).named_parameters()))
    worst = max(far for worker in workers for far in worker.values())
    assert worst <= TOLERANCE
