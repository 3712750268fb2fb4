"""What is planned for a correction is what it keeps, and what its updates take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from hocket.core.costs import StageCost
from hocket.errors import ConfigError, PlanError
from hocket.model.profile.allocations import allocations
from hocket.options import CorrectionName
from hocket.planner.rank import Search
from hocket.run.weights.correction.cost import correction_cost
from hocket.run.weights.settings import Parameters, TrainingConfig
from hocket.run.weights.updater import Updater
from tests.run.support.optimizers import OPTIMIZERS

NAMES: tuple[CorrectionName, ...] = get_args(CorrectionName)
KINDS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    **{name: OPTIMIZERS[name] for name in ("nesterov", "adamw", "groups", "muon")},
}


def model() -> nn.Sequential:
    """With a part that is not trained."""
    found = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 48))
    found[2].requires_grad_(requires_grad=False)
    return found


def updated(updater: Updater, num_updates: int) -> None:
    """With any gradients."""
    for _ in range(num_updates):
        for parameter in updater.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        updater.update()


def bytes_of(tree: Any) -> int:
    """Of all tensors in it."""
    return sum(x.nbytes for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))


def work_bytes(settings: TrainingConfig, delay: int) -> int:
    """The most that an update takes, when others have been before."""
    with allocations(torch.device("cpu")) as log:
        updater = Updater(dict(model().named_parameters()), settings, delay=delay)
        updated(updater, delay + 1)
        for parameter in updater.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        with log.span():
            updater.update()
    return log.peaks[-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_planned_as_kept(name: CorrectionName, kind: str, delay: int) -> None:
    """To the byte; what is taken while an update runs, but for single tensors."""
    settings = TrainingConfig(optimizer=KINDS[kind], correction=name)
    parameters = dict(model().named_parameters())
    trained = {key: p for key, p in parameters.items() if p.requires_grad}
    stage = StageCost(gradient_bytes=bytes_of(list(trained.values())))
    cost = correction_cost(settings, trained)
    planned = cost.added_to(stage, delay)

    updater = Updater(parameters, settings, delay=delay)
    updated(updater, delay + 2)
    correction = updater.correction
    kept = 0 if correction is None else bytes_of(correction.state_dict()["kept"])
    assert planned.optimizer_bytes == cost.kept_bytes(stage, delay) == kept
    assert planned.guess_bytes == bytes_of(updater.predicted())

    plain = work_bytes(replace(settings, correction="none"), delay)
    more = work_bytes(settings, delay) - plain
    largest = max(p.nbytes for p in trained.values())
    assert abs(more - planned.update_work_bytes) <= 2 * largest


def test_corrections_of_large_weights_may_keep_a_copy() -> None:
    """More is planned rather than less."""

    def picky(parameters: Parameters) -> torch.optim.Optimizer:
        assert parameters[0].numel() > 100
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    trained = {"w": torch.zeros(20, 20)}
    cost = correction_cost(
        TrainingConfig(optimizer=picky, correction="weight-prediction"), trained
    )
    assert (cost.kept, cost.predicts_weights) == (1, True)


def planned(**more: Any) -> Any:
    """Of two devices that need not be there."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    search = Search(
        ("wpipe", "pipedream-2bw", "1f1b"),
        num_devices=(2,),
        num_microbatches=(2,),
        recompute=(False,),
        data_parallel=False,
        max_delay=1,
    )
    wanted: dict[str, Any] = {"search": search, "hardware": "v100-32g", **more}
    return hocket.plan(layers, batch, nn.functional.mse_loss, num_devices=2, **wanted)


def test_a_plan_shows_it() -> None:
    """Versions and bytes, of the orders with old weights alone."""
    each = 4 * 4 * (64 * 64 + 64)  # bytes of a device's half of the layers
    plain, foreseen, fed = (
        {x.candidate.schedule: x for x in planned(correction=name).outcomes}
        for name in ("none", "weight-prediction", "error-feedback")
    )
    assert plain["1f1b"] == foreseen["1f1b"] == fed["1f1b"]
    assert foreseen["wpipe"].num_versions == (3, 3, 1, 1)
    assert foreseen["pipedream-2bw"].num_versions == (3, 2)  # the last reads none ahead
    for name, num in (("wpipe", [2, 2]), ("pipedream-2bw", [2, 1])):
        assert fed[name].num_versions == plain[name].num_versions
        share = each if name == "pipedream-2bw" else each // 2  # that is delayed
        old = [x.version_bytes for x in foreseen[name].memory]
        assert [x.correction_bytes for x in foreseen[name].memory] == [0, 0]
        assert old == [copies * share for copies in num]
        assert [x.correction_bytes for x in fed[name].memory] == [share] * 2
        assert [x.version_bytes for x in fed[name].memory] == [share] * 2
        assert foreseen[name].peak_bytes > plain[name].peak_bytes
        assert fed[name].peak_bytes >= plain[name].peak_bytes + share
    assert "error-feedback KiB" in str(planned(correction="error-feedback"))


def test_a_correction_without_effect_is_refused() -> None:
    """Where no order with old weights is looked at; and where there is none such."""
    with pytest.raises(PlanError, match="no effect while max_delay is 0"):
        planned(correction="error-feedback", search=None)
    unknown: Any = "magic"
    with pytest.raises(ConfigError, match="correction is 'magic'"):
        planned(correction=unknown)
