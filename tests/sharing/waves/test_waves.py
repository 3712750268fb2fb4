"""A run in two waves is what its formulas say, whatever overlaps."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
)
from tests.run.device.support.emulated import sleep_until
from tests.run.support.forked_launch import launch_forked
from tests.sharing.support.wave_nets import (
    WIDTH,
    adamw,
    difference,
    halving,
    losses,
    make_batches,
    make_net,
)
from tests.sharing.support.wave_oracle import emulate_waves

TOLERANCE = 1e-10
NUM_STEPS = 20


def make_waves(sync: Any, **options: Any) -> hocket.Waves:
    """The run under test."""
    settings: dict[str, Any] = {"optimizer": adamw, "scheduler": halving, **options}
    return hocket.Waves(make_net(), losses, sync=sync, **settings)


def emulated(batches: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The losses, and the state of each copy, by the formulas."""
    own: dict[str, Any] = {"scheduler": halving, **options}
    found, nets = emulate_waves(make_net(), losses, adamw, batches, **own)
    return found, [dict(net.state_dict()) for net in nets]


@pytest.mark.parametrize("sync", ["wave", "exact"])
@pytest.mark.parametrize("clip_norm", [None, 0.2])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_run_equals_its_formula(
    sync: str, clip_norm: float | None, num_parts: int
) -> None:
    """20 steps of AdamW in float64, with batch norm, dropout and recomputing."""
    batches = make_batches(NUM_STEPS, last=9)
    make_net()  # which seeds the generator
    state = torch.get_rng_state()
    with make_waves(sync, num_microbatches=num_parts, clip_norm=clip_norm) as waves:
        made = torch.get_rng_state()
        results = list(waves.train(batches))
        assert torch.equal(torch.get_rng_state(), made)
        found = waves.state_dict()
        others = waves.waves[1].module.state_dict()
    torch.set_rng_state(state)
    expected, copies = emulated(
        batches, sync=sync, num_microbatches=num_parts, clip_norm=clip_norm
    )
    assert torch.equal(torch.get_rng_state(), state)
    for x, named in zip(results, expected, strict=True):
        assert x.losses == pytest.approx(named, rel=TOLERANCE)
    assert [x.step for x in results] == list(range(NUM_STEPS))
    assert difference(found, copies[0]) <= TOLERANCE
    if sync == "wave":
        assert difference(others, copies[1]) <= TOLERANCE
        assert difference(copies[0], copies[1]) > 1e-3  # the copies do differ


def test_the_emulator_is_figure_9() -> None:
    """Written out for plain SGD: the mean of two batches' gradients, by samples."""
    batches, net = make_batches(3, last=9), nn.Linear(WIDTH, 3).double()
    copies = [
        [p.detach().clone().requires_grad_() for p in net.parameters()]
        for _ in range(2)
    ]
    expected, kept = list[float](), list[tuple[int, Any]]()
    for n, (inputs, targets) in enumerate(batches):
        own = copies[n % 2]
        loss = F.cross_entropy(F.linear(inputs, *own), targets)
        kept.append((len(inputs), torch.autograd.grad(loss, own)))
        read = kept[-2:]
        num_samples = sum(num for num, _ in read)
        with torch.no_grad():
            for i, p in enumerate(own):
                p -= 0.1 * sum(num * g[i] for num, g in read) / num_samples
        expected.append(loss.item())
    found, nets = emulate_waves(
        net, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), batches
    )
    assert [x["loss"] for x in found] == pytest.approx(expected)
    assert nets[0] is net
    for own, trained in zip(copies, nets, strict=True):
        torch.testing.assert_close(tuple(trained.parameters()), tuple(own))


def test_the_emulator_refuses_what_it_does_not_emulate() -> None:
    """A loss scale, and what `Waves` refuses."""
    for wrong, message in (
        ({"precision": "float16"}, "needs a loss scale"),
        ({"sync": "waves"}, "it may be"),
        ({"sync": "exact", "num_microbatches": 3}, "use an even number"),
        ({"clip_norm": -1.0}, "clip_norm"),
    ):
        with pytest.raises(ConfigError, match=message):
            emulated([], **wrong)


@pytest.mark.parametrize("sync", ["wave", "exact"])
@pytest.mark.parametrize("num_before", [4, 7])
def test_a_run_that_was_killed_goes_on_bit_for_bit(
    sync: str, num_before: int, tmp_path: Path
) -> None:
    """A checkpoint has both copies and the gradients that the next update reads."""
    batches = make_batches(12)
    with make_waves(sync) as waves:
        list(waves.train(batches))
        expected = [{k: x.clone() for k, x in w.state().items()} for w in waves.waves]
    with make_waves(sync) as waves:
        for result in waves.train(batches, drain_every=num_before):
            if result.step == num_before - 1:
                waves.save(tmp_path, data={"position": waves.num_steps})
                saved = waves.state_dict()
            if result.step == num_before:
                break  # what comes after the save is lost
    with make_waves(sync) as waves:
        waves.step(batches[5])  # anything but where it was
        position = waves.load(tmp_path)["position"]
        assert position == waves.num_steps == num_before
        assert all(torch.equal(saved[k], x) for k, x in waves.state_dict().items())
        list(waves.train(batches[position:]))
        for wave, state in zip(waves.waves, expected, strict=True):
            found = wave.state()
            assert all(torch.equal(x, found[k]) for k, x in state.items())
    weights = hocket.checkpoint.read_weights(tmp_path)
    assert all(torch.equal(saved[k], x) for k, x in weights.items())


def test_one_step_at_a_time_is_the_same_run() -> None:
    """What overlaps changes no bit; nor does a loader that ends with tick."""
    batches = make_batches(7)
    with make_waves("wave") as waves:
        found = [waves.step(batch).loss for batch in batches]
        state = waves.state_dict()
    with make_waves("wave") as waves:
        assert [x.loss for x in waves.train(batches)] == found
        assert all(torch.equal(state[k], x) for k, x in waves.state_dict().items())
        waves.waves[0].module.eval()  # the user's model; the other copy follows
        waves.step(batches[0])
        assert not any(x.training for x in waves.waves[1].module.modules())


def test_a_forward_runs_beside_the_other_backward() -> None:
    """Two waves of sleeping layers take as long as their lanes, not their sum.

    A batch sleeps 20 ms forward and 40 ms backward: 60 ms a batch alone, and 30 ms with
    two lanes, of which one begins a forward later. On a busy machine sleeps are late:
    one of many tries must be in time.
    """
    batches = [(torch.zeros(2, 3), torch.zeros(2)) for _ in range(12)]
    model = nn.Sequential(nn.Linear(3, 3), Sleeping(0.02, 0.04))
    with hocket.Waves(
        model, lambda x, _: x.mean(), optimizer=lambda p: torch.optim.SGD(p, 0.1)
    ) as waves:
        waves.step(batches[0])
        waves.step(batches[0])
        tries = (sum(x.seconds for x in waves.train(batches)) for _ in range(20))
        assert any(seconds < 0.75 * len(batches) * 0.06 for seconds in tries)


class _Sleep(torch.autograd.Function):
    """Sleeps, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Sleep."""
        ctx.seconds = backward_s
        sleep_until(perf_counter() + forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sleep."""
        sleep_until(perf_counter() + ctx.seconds)
        return grads[0], None, None


class Sleeping(nn.Module):
    """A layer that takes its time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        result: Tensor = _Sleep.apply(x, *self.seconds)  # type: ignore[no-untyped-call]
        return result


@pytest.fixture(scope="module", name="on_replicas")
def train_on_replicas(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two replicas report, of both kinds of sync."""
    folder = str(tmp_path_factory.mktemp("waves"))
    entry = "tests.sharing.support.wave_workers:train_and_resume"
    return launch_forked(entry, [folder], num_workers=2, timeout_s=120, run_dir=folder)


@pytest.mark.timeout(180)
def test_two_replicas_equal_their_formula(on_replicas: Any) -> None:
    """One all-reduce per wave; weights and losses as in one process, also resumed."""
    for report in on_replicas:
        for sync, found in report.items():
            assert found["difference"] <= TOLERANCE, sync
            assert found["losses"] <= TOLERANCE, sync
            assert found["resumed_bit_equal"], sync
            assert found["reductions"] == NUM_STEPS, sync
    assert "seed" in on_replicas[0]["wave"]["refused"]


def test_what_is_refused(tmp_path: Path) -> None:
    """Each error says what to do."""
    with pytest.raises(ConfigError, match="even number, such as 4"):
        make_waves("exact", num_microbatches=3)
    with pytest.raises(ConfigError, match="may be wave, exact"):
        make_waves("tick")
    with pytest.raises(ConfigError, match="clip_norm is 0"):
        make_waves("wave", clip_norm=0.0)
    with pytest.raises(ConfigError, match="needs no closure"):
        make_waves("wave", optimizer=torch.optim.LBFGS)
    with pytest.raises(ConfigError, match="no parameters that train"):
        hocket.Waves(nn.ReLU(), losses, optimizer=adamw)
    broken = make_net()
    broken.cannot = (x for x in "ab")  # type: ignore[assignment]
    with pytest.raises(ModelError, match="copy of the model"):
        hocket.Waves(broken, losses, optimizer=adamw)
    with make_waves("wave") as waves, pytest.raises(DataError, match="be a pair"):
        waves.step(torch.zeros(3))
    with make_waves("wave") as waves:
        waves.step(make_batches(1)[0])
        waves.save(tmp_path)
    with make_waves("exact") as waves:
        with pytest.raises(CheckpointError, match="sync='wave'"):
            waves.load(tmp_path)
        with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
            waves.load(tmp_path, step=7)
        waves.step(make_batches(1)[0])  # it goes on


def test_a_pipeline_refuses_a_run_in_waves(tmp_path: Path) -> None:
    """It would lose a copy and a gradient, and says how to take the weights."""
    batch = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    loss = nn.functional.cross_entropy
    with hocket.Waves(nn.Linear(6, 3), loss, optimizer=adamw) as waves:
        waves.step(batch)
        waves.save(tmp_path)
    with (
        hocket.Pipeline(
            nn.Linear(6, 3), loss, optimizer=adamw, example=batch, num_microbatches=2
        ) as pipeline,
        pytest.raises(CheckpointError, match=r"hocket\.Waves"),
    ):
        pipeline.load(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    """It says so, and that the weights have changed."""
    inputs, targets = make_batches(1)[0]
    with (
        pytest.raises(NonFiniteError, match="step 0 is not finite"),
        make_waves("wave") as waves,
    ):
        waves.step((inputs * float("nan"), targets))


def test_an_error_in_tocks_lane_ends_the_run() -> None:
    """Nothing hangs; the error names its op and lane."""
    batches = make_batches(4)
    batches[3] = batches[3][0], batches[3][1] + 100
    with (
        pytest.raises(IndexError, match="out of bounds") as caught,
        make_waves("wave") as waves,
    ):
        list(waves.train(batches))
    assert "in op 0F0@3, lane 1 of cpu" in caught.value.__notes__


def test_a_loop_that_is_left_gives_no_result_to_the_next(tmp_path: Path) -> None:
    """Nor to one behind a load: its step may be under way when it is left."""
    batches = make_batches(6)
    with make_waves("wave") as waves:
        waves.step(batches[0])
        waves.save(tmp_path)
        for result in waves.train(batches[1:5]):
            if result.step == 1:
                break
        begun = waves.num_steps
        assert [x.step for x in waves.train(batches[5:])] == [begun]
        for _ in waves.train(batches[1:5]):
            break
        waves.load(tmp_path)
        assert [x.step for x in waves.train(batches[1:3])] == [1, 2]


def test_another_optimizer_s_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """Of another class, or with a schedule where there was none."""
    batch = make_batches(1)[0]
    with make_waves("exact") as waves:
        waves.step(batch)
        waves.save(tmp_path)
    others: list[dict[str, Any]] = [
        {"optimizer": lambda p: torch.optim.SGD(p, 0.1)},
        {"scheduler": None},
    ]
    for settings in others:
        with make_waves("exact", **settings) as waves:
            before = waves.state_dict()
            with pytest.raises(CheckpointError, match="of a run with AdamW over"):
                waves.load(tmp_path)
            for name, tensor in waves.state_dict().items():
                assert torch.equal(tensor, before[name])
