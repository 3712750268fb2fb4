"""Waves with averaged weights, short types and evaluation equal their formulas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import CheckpointError, ConfigError, DataError, ModelError
from hocket.run.engine.gather import first_replica_buffers
from tests.sharing.support.wave_nets import (
    adamw,
    difference,
    halving,
    losses,
    make_batches,
    make_net,
    make_short_net,
)
from tests.sharing.support.wave_oracle import emulate_waves

TOLERANCE = 1e-10
NUM_STEPS = 12
DECAY = 0.8


def make_waves(sync: Any, **options: Any) -> hocket.Waves:
    """The run under test."""
    settings: dict[str, Any] = {"optimizer": adamw, "scheduler": halving, **options}
    model = settings.pop("model", None) or make_net()
    return hocket.Waves(model, losses, sync=sync, num_microbatches=2, **settings)


def correct(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Metrics of a part."""
    return {"accuracy": (output.argmax(1) == targets).double().mean()}


class Averages:
    """The averages of tick's weights, which every batch moves.

    Args:
        num_copies: 2 with sync="wave": an update of tick stands for two batches.
    """

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies
        self.of = {n: p.detach().clone() for n, p in make_net().named_parameters()}

    def followed(self, batches: list[Any], net: nn.Module) -> Iterator[Any]:
        """Yield batches, and move after each update of tick."""
        for step, batch in enumerate(batches):
            yield batch
            if step % self.num_copies:
                continue
            for name, p in net.named_parameters():
                for _ in range(self.num_copies):
                    self.of[name] += (p.detach() - self.of[name]) * (1 - DECAY)


@pytest.mark.parametrize("scheduler", [halving, None])
@pytest.mark.parametrize("sync", ["wave", "exact"])
def test_averaged_weights_equal_their_formula(
    sync: Any, scheduler: Any, tmp_path: Path
) -> None:
    """Also over a save and a load; what is trained is not touched."""
    batches, num = make_batches(NUM_STEPS), 2 if sync == "wave" else 1
    averages, net = Averages(num), make_net()
    emulate_waves(
        net,
        losses,
        adamw,
        averages.followed(batches, net),
        sync=sync,
        num_microbatches=2,
        scheduler=scheduler,
    )
    options = {"ema_decay": DECAY, "scheduler": scheduler}
    with make_waves(sync, **options) as waves:
        for _ in waves.train(batches[:5]):
            pass
        waves.save(tmp_path)
    with make_waves(sync, ema_decay=None, scheduler=scheduler) as plain:
        with pytest.raises(CheckpointError, match="with averaged weights"):
            plain.load(tmp_path)
        with pytest.raises(ConfigError, match=r"make the waves with ema_decay=0.999"):
            plain.state_dict(ema=True)
    with make_waves(sync, **options) as waves:
        waves.load(tmp_path)
        for _ in waves.train(batches[5:]):
            pass
        averaged, trained = waves.state_dict(ema=True), waves.state_dict()
        assert difference(trained, net.state_dict()) <= TOLERANCE
        for name, expected in averages.of.items():
            off = (averaged[name] - expected).abs().max() / expected.abs().max()
            assert off <= TOLERANCE, name
        found = waves.evaluate(batches[:2], use_ema=True)
    net = make_net()
    net.load_state_dict(averaged)
    assert found.losses == pytest.approx(evaluated(net, batches[:2])[0], rel=1e-10)


def evaluated(
    net: nn.Module, batches: list[Any], short: torch.dtype | None = None
) -> tuple[dict[str, float], float]:
    """The means over all samples, of each whole batch at once."""
    net.eval()
    sums, right, total = dict[str, float](), 0.0, 0
    for x, y in batches:
        with (
            torch.no_grad(),
            torch.autocast("cpu", short or torch.bfloat16, short is not None),
        ):
            output = net(x)
            named = losses(output, y)
        total += len(x)
        right += float((output.argmax(1) == y).sum())
        for name, value in named.items():
            sums[name] = sums.get(name, 0.0) + value.item() * len(x)
    return {name: value / total for name, value in sums.items()}, right / total


def test_buffers_come_back_where_a_broadcast_fails() -> None:
    """Of the second one: the first has replica 0's values by then."""
    left: list[Tensor] = []

    class Group:
        def broadcast(self, tensor: Tensor, from_rank: int, what: str) -> None:
            assert (from_rank, what) == (0, "buffers of the first replica")
            if left:
                raise OSError("no connection")
            left.append(tensor.fill_(7.0))

    net: Any = nn.BatchNorm1d(3)
    expected = [x.clone() for x in net.buffers()]
    group: Any = Group()
    homes = [(net._buffers, key) for key in net._buffers]
    with (
        pytest.raises(OSError, match="no connection"),
        first_replica_buffers(homes, group, 0),
    ):
        pass
    assert left
    assert all(map(torch.equal, net.buffers(), expected))


@pytest.mark.parametrize("sync", ["wave", "exact"])
def test_evaluation_is_that_of_ticks_copy(sync: str) -> None:
    """Means over samples of uneven batches, one of them smaller than the parts.

    Training goes on as if there had been none; the user's modes and the generator stay.
    """
    batches, held_out = make_batches(6), make_batches(3, 7, last=1)
    with make_waves(sync) as waves:
        for _ in waves.train(batches):
            pass
        expected = waves.state_dict()
    model = make_net()
    with make_waves(sync, model=model) as waves:
        for result in waves.train(batches, drain_every=3):
            if result.step != 2:
                continue
            model.second.eval()
            before = torch.get_rng_state()
            found = waves.evaluate(held_out, correct)
            assert torch.equal(torch.get_rng_state(), before)
            assert (model.training, model.second.training) == (True, False)
            model.second.train()
            alone = copy.deepcopy(model)
        assert difference(waves.state_dict(), expected) == 0.0
        for wrong, error in (([], DataError), (batches, ModelError)):
            with pytest.raises(error):
                waves.evaluate(wrong, None if error is DataError else 3)  # type: ignore[arg-type]
        assert waves.evaluate(batches[:1]).num_samples == 12
    named, accuracy = evaluated(alone, held_out)
    assert found.num_samples == 15
    assert found.losses == pytest.approx(named, rel=1e-10)
    assert found.metrics == pytest.approx({"accuracy": accuracy})


@pytest.mark.parametrize("sync", ["wave", "exact"])
def test_bfloat16_equals_autocast_in_the_formula(sync: Any) -> None:
    """Forwards and evaluation compute in it; without it the numbers are others."""
    batches, states = make_batches(NUM_STEPS), []
    precisions: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    for precision in precisions:
        short = make_short_net()
        emulate_waves(
            short,
            losses,
            adamw,
            batches,
            sync=sync,
            num_microbatches=2,
            scheduler=halving,
            precision=precision,
        )
        states.append(short.state_dict())
    with make_waves(sync, model=make_short_net(), precision="bfloat16") as waves:
        for _ in waves.train(batches):
            pass
        found, means = waves.state_dict(), waves.evaluate(batches[:2])
    assert difference(found, states[0]) <= TOLERANCE
    assert difference(found, states[1]) > 1e-6
    net = make_short_net()
    net.load_state_dict(found)
    named, _ = evaluated(net, batches[:2], torch.bfloat16)
    assert means.losses == pytest.approx(named, rel=1e-8)


def scaled(output: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients overflow float16 at the first loss scales."""
    return F.cross_entropy(output, targets) * 100


def test_float16_equals_a_gradient_scaler(tmp_path: Path) -> None:
    """Steps that overflow update nothing, and halve the scale; also once resumed."""
    batches = make_batches(NUM_STEPS)
    net, scaler = make_short_net(), torch.amp.GradScaler("cpu")
    optimizer = adamw(net.parameters())
    skipped = []
    for x, y in batches:
        for rows in torch.arange(len(x)).chunk(2):
            with torch.autocast("cpu", torch.float16):
                loss = scaled(net(x[rows]), y[rows]) / 2
            scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        optimizer.zero_grad()
    assert 0 < sum(skipped) < NUM_STEPS / 2

    def waves() -> hocket.Waves:
        return hocket.Waves(
            make_short_net(), scaled, optimizer=adamw, sync="exact", precision="float16"
        )

    with waves() as run:
        results = list(run.train(batches[:2]))
        run.save(tmp_path)
    with (
        make_waves("exact", model=make_short_net(), scheduler=None) as other,
        pytest.raises(CheckpointError, match="of a run with a loss scale"),
    ):
        other.load(tmp_path)
    with waves() as run:
        run.load(tmp_path)
        results += run.train(batches[2:])
        assert difference(run.state_dict(), dict(net.state_dict())) <= TOLERANCE
        assert run.scaler is not None
        assert run.scaler.get_scale() == scaler.get_scale()
    assert [result.skipped for result in results] == skipped


def test_refuses_types_that_mean_nothing() -> None:
    """Each with the reason, before anything is trained."""
    with pytest.raises(ConfigError, match="an update reads the gradients of two"):
        make_waves("wave", precision="float16")
    with pytest.raises(ModelError, match="keeps the weights in float32"):
        make_waves("wave", model=make_net().bfloat16(), precision="bfloat16")
    with pytest.raises(ConfigError, match="precision"):
        make_waves("wave", precision="float8")
    with pytest.raises(ConfigError, match="ema_decay"):
        make_waves("wave", ema_decay=2.0)
