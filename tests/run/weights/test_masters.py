"""Weights in bfloat16 with float32 masters equal a loop that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, ModelError
from tests.run.support.forked import answers_of
from tests.run.support.masters import (
    adamw,
    batches,
    loss_of,
    make_net,
    make_pipeline,
    masters_loop,
)

EXACT = [  # each stage adds up its gradients in the loop's own order
    {"schedule": "1f1b", "num_steps": 12, "adamw": True},
    {"schedule": "zb-h1", "num_steps": 6},
    {"schedule": "interleaved-1f1b", "num_steps": 4, "accumulate": 2},
    {"schedule": "pipedream-2bw", "num_steps": 12},
]
# Of one step: a sum in another order may round a weight otherwise, to a neighbour
# that is 1/256 away, and all that follows differs by as much.
NEAR: list[dict[str, Any]] = [
    {"schedule": "1f1b", "num_steps": 1, "num_replicas": 2},
    {"schedule": "1f1b", "num_steps": 1, "num_shards": 2},
    {"schedule": "gpipe", "num_steps": 1, "clip_norm": 0.5},
    {"schedule": "gpipe", "num_steps": 1, "num_shards": 2, "clip_norm": 0.5},
]
# Also rounded elsewhere: sums of both uses of a tied weight, or each; fused kernels.
ROUNDED = [
    {"kind": "tied", "schedule": "1f1b", "num_steps": 1},
    {"kind": "tied", "schedule": "1f1b", "num_steps": 1, "num_shards": 2},
    {"schedule": "1f1b", "num_steps": 1, "compile": True},
]
LIMITS = [(EXACT, 0.0), (NEAR, 1e-4), (ROUNDED, 2e-2)]  # of how far a weight moves


def saved_masters(folder: Path) -> dict[str, Tensor]:
    """The weights in the checkpoints of a folder."""
    found: dict[str, Tensor] = {}
    for file in folder.rglob("weights-*.safetensors"):
        found |= load_file(file)
    return found


def farthest(
    found: dict[str, Tensor], wanted: dict[str, Tensor], begin: nn.Module
) -> float:
    """The largest difference, relative to the longest move in a tensor."""
    assert found.keys() == wanted.keys()
    assert {x.dtype for x in found.values()} == {torch.float32}
    return max(
        float(
            (found[name] - x).abs().max() / (x - begin.state_dict()[name]).abs().max()
        )
        for name, x in wanted.items()
    )


def loop_of(case: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """What the plain loop leaves of a case."""
    net = make_net(case.get("kind", "plain"))
    num = case.get("accumulate", 1)
    masters, losses = masters_loop(
        net,
        batches(case["num_steps"] * num),
        *([adamw] if case.get("adamw") else []),
        clip_norm=case.get("clip_norm"),
        accumulate=num,
        delay=int(case["schedule"] == "pipedream-2bw"),
    )
    return net, masters, losses


FOUR: list[tuple[list[dict[str, Any]], float]] = [
    ([{"schedule": "zb-v", "num_steps": 1, "num_shards": 2}], 1e-4),
    ([{"kind": "tied", "schedule": "1f1b", "num_steps": 1, "num_shards": 2}], 2e-2),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("num_workers", "limits"),
    [(2, LIMITS), pytest.param(4, FOUR, marks=pytest.mark.long)],
)
def test_workers_equal_the_loop(
    num_workers: int, limits: list[tuple[list[dict[str, Any]], float]], tmp_path: Path
) -> None:
    """Orders, replicas, shards, ties, delays: masters, weights and losses."""
    cases = [(case, limit) for kind, limit in limits for case in kind]
    answers = answers_of(
        "masters:train_all",
        [case for case, _ in cases],
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
        whole_s=200.0,
    )
    for i, (case, limit) in enumerate(cases):
        net, masters, losses = loop_of(case)
        found = saved_masters(tmp_path / f"{i}")
        begin = make_net(case.get("kind", "plain"))
        assert farthest(found, masters, begin) <= limit, case
        weights = load_file(tmp_path / f"{i}.st")
        for name, x in weights.items():
            assert x.dtype is torch.bfloat16
            assert torch.equal(x, found[name].bfloat16()), (case, name)
        if not limit:
            assert all(torch.equal(net.state_dict()[n], x) for n, x in weights.items())
        assert answers[0][i] == pytest.approx(losses, rel=max(limit, 1e-6)), case


def test_small_updates_are_not_lost() -> None:
    """Without masters most weights would not move at all, and here they do."""
    net, bare = make_net(), make_net()
    before = [p.detach().clone() for p in net.parameters()]
    pipelines = (
        make_pipeline(net, schedule="gpipe"),
        make_pipeline(bare, schedule="gpipe", precision="float32"),
    )
    for pipeline in pipelines:
        list(pipeline.train(batches(12)))
    moved, rounded = (
        sum(int((p != x).sum()) for p, x in zip(x.parameters(), before, strict=True))
        for x in (net, bare)
    )
    assert moved > 1.2 * rounded


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream-2bw"])
def test_a_run_goes_on_where_it_was_saved(schedule: str, tmp_path: Path) -> None:
    """Also one whose weights, averages and moments a float32 model has saved."""
    options: dict[str, Any] = {"schedule": schedule, "optimizer": adamw}
    data = batches(8)
    whole, parts = make_net(), make_net()
    list(make_pipeline(whole, **options, ema_decay=0.9).train(data))
    first = make_pipeline(parts, **options, ema_decay=0.9)
    list(first.train(data[:4]))
    first.save(tmp_path / "run")
    first.close()
    after = make_pipeline(make_net("plain"), **options, ema_decay=0.9)
    after.load(tmp_path / "run")
    list(after.train(data[4:]))
    wanted = whole.state_dict()
    assert all(torch.equal(x, wanted[n]) for n, x in after.state_dict().items())
    after.close()
    if schedule != "gpipe":
        return
    # The same checkpoint in float32: its weights are the masters.
    wide = make_net().float()
    option = {**options, "ema_decay": 0.9, "precision": "float32"}
    wide_data = [(x.float(), y) for x, y in data]
    pipeline = hocket.Pipeline(
        wide, loss_of, example=wide_data[0], num_microbatches=4, **option
    )
    pipeline.load(tmp_path / "run")
    masters = saved_masters(tmp_path / "run")
    assert all(torch.equal(p, masters[n]) for n, p in wide.named_parameters())
    pipeline.save(tmp_path / "wide")
    pipeline.close()
    again = make_pipeline(make_net(), **options, ema_decay=0.9)
    again.load(tmp_path / "wide")
    list(again.train(data[4:]))
    assert all(torch.equal(x, wanted[n]) for n, x in again.state_dict().items())


def test_averages_are_of_masters() -> None:
    """An evaluation reads them rounded, and leaves the weights as they were."""
    net, data = make_net(), batches(4)
    pipeline = make_pipeline(net, schedule="gpipe", ema_decay=0.5)
    average = {n: p.detach().float() for n, p in net.named_parameters()}
    twin = make_net()
    for num in range(1, 4):
        list(pipeline.train(data[num - 1 : num]))
        twin = make_net()
        masters, _ = masters_loop(twin, data[:num])
        average = {n: x.lerp(masters[n], 0.5) for n, x in average.items()}
    twin.load_state_dict({n: x.bfloat16() for n, x in average.items()})
    inputs, targets = data[3]
    wanted = [
        loss_of(twin(x), y).item()
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)
    ]
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    found = pipeline.evaluate([data[3]], use_ema=True)
    assert found.loss == pytest.approx(sum(wanted) / 4, rel=1e-6)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize("write", ["in place", "data", "assigned"])
def test_what_the_loop_writes_into_a_weight_is_kept(write: str, tmp_path: Path) -> None:
    """Its master is what was written; others keep what was rounded off."""
    net = make_net()
    pipeline = make_pipeline(net, schedule="gpipe")
    list(pipeline.train(batches(2)))
    pipeline.save(tmp_path / "before")
    weight = net.get_parameter("0.weight")
    with torch.no_grad():
        if write == "in place":
            weight[0].fill_(0.25)
        elif write == "data":
            weight.data[0].fill_(0.25)
        else:
            weight.data = torch.cat([torch.full_like(weight[:1], 0.25), weight[1:]])
    pipeline.save(tmp_path / "after")
    before, after = (saved_masters(tmp_path / x) for x in ("before", "after"))
    before["0.weight"][0] = 0.25
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert not torch.equal(after["0.weight"], after["0.weight"].bfloat16().float())
    list(pipeline.train(batches(1)))  # the next update begins there
    assert 0.0 < float((weight[0].detach() - 0.25).abs().max()) < 0.05


def test_bytes_are_counted() -> None:
    """2 for a weight, 4 for its gradient, 12 for its moments and master."""
    net = make_net()
    num = sum(p.numel() for p in net.parameters())
    pipeline = make_pipeline(net, schedule="gpipe", optimizer=adamw)
    (cost,) = pipeline.plan.costs.stages
    ranking = hocket.plan(
        make_net(),
        batches(1)[0],
        loss_of,
        num_devices=1,
        hardware="a100-80g",
        precision="bfloat16-weights",
        optimizer=adamw,
    )
    for found in (cost, ranking.outcomes[0].memory[0]):
        assert found.weight_bytes == 2 * num
        assert found.gradient_bytes == 4 * num
        assert found.optimizer_bytes == pytest.approx(12 * num, rel=0.01)  # and steps


def test_the_model_is_as_before_once_the_pipeline_is_closed() -> None:
    """Its gradients come in its own type again, for a loop, or another pipeline."""
    net, data = make_net(), batches(2)
    with make_pipeline(net, schedule="gpipe") as pipeline:
        pipeline.step(data[0])
    hocket.plan(
        net,
        data[0],
        loss_of,
        num_devices=1,
        hardware="a100-80g",
        precision="bfloat16-weights",
    )
    loss_of(net(data[0][0]), data[0][1]).backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {
        torch.bfloat16
    }
    net.zero_grad()
    with make_pipeline(net, schedule="gpipe", precision="float32") as pipeline:
        pipeline.step(data[1])


def test_a_model_in_float32_is_refused() -> None:
    """It says how to give it."""
    with pytest.raises(ModelError, match=r"none of its 10 .*model.to\(torch.bfloat16"):
        make_pipeline(make_net().float(), schedule="gpipe")
    with pytest.raises(ModelError, match="float16, whose gradients need a loss scale"):
        make_pipeline(make_net().half(), schedule="gpipe")


def test_what_has_no_masters_is_refused() -> None:
    """Waves, captured steps and momentum teachers, by name."""
    with pytest.raises(
        ConfigError, match="waves update weights in bfloat16 themselves"
    ):
        hocket.Waves(make_net(), loss_of, optimizer=adamw, precision="bfloat16-weights")
    with pytest.raises(ConfigError, match="nor masters"):
        make_pipeline(make_net(), schedule="ooo-single", num_microbatches=1)
    with pytest.raises(ConfigError, match="moves weights, and not their masters"):
        make_pipeline(make_net(), freeze=hocket.freeze.Alpha(0.2))
    teacher = hocket.Teacher(make_net(), update=hocket.Momentum(0.99))
    with pytest.raises(ModelError, match="may never move"):
        hocket.Pipeline(
            make_net(),
            lambda output, targets, teachers: loss_of(output, targets),
            optimizer=adamw,
            example=batches(1)[0],
            num_microbatches=2,
            precision="bfloat16-weights",
            teachers={"teacher": teacher},
        )
