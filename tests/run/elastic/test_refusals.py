"""What does not go together with freezing layers is refused, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import ConfigError, HocketError
from hocket.model.capture.capture import capture
from hocket.run.elastic.freezing import FreezingWarning
from hocket.run.elastic.shape_choice import refuse_shapes
from hocket.run.nets.freezable import blocks_matching, freezable_modules, frozen_edges


def make_pipeline(folder: Path, **options: Any) -> hocket.Pipeline:
    """A pipeline on one worker, whose four layers freeze one after the other."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "freeze": hocket.freeze.Alpha(1 / 4, every_steps=1),
        "optimizer": torch.optim.SGD,
        "example": batch(),
        "num_microbatches": 2,
        "run_dir": folder,
        **options,
    }
    model = given.pop("model", None) or make_model()
    return hocket.Pipeline(model, F.cross_entropy, **given)


def make_model() -> nn.Sequential:
    """Five layers."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples."""
    return torch.randn(8, 4), torch.randint(4, (8,))


@pytest.mark.parametrize("recut", [True, False])
def test_one_worker_freezes_too(tmp_path: Path, recut: bool) -> None:
    """Alpha 1/4 of four layers: 1, 2, 3, 3, 4; frozen weights stay, the head moves."""
    with make_pipeline(tmp_path, recut=recut, cut=None if recut else ()) as pipeline:
        numbers = [pipeline.step(batch()).num_frozen for _ in range(6)]
        before = pipeline.state_dict()
        pipeline.step(batch())
        after = pipeline.state_dict()
    assert numbers == [0, 1, 2, 3, 3, 4]
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"4.weight", "4.bias"}


def test_a_shape_must_pay_until_the_end_of_what_is_known(tmp_path: Path) -> None:
    """The run's end, else the loader's, else the next decision."""
    with make_pipeline(tmp_path, num_run_steps=9) as pipeline:
        freezing = pipeline._freezing
        assert freezing is not None
        assert freezing._steps_left(4) == (5, "the run ends")
    with make_pipeline(tmp_path) as pipeline:
        freezing = pipeline._freezing
        assert freezing is not None
        assert freezing._steps_left(4) == (1, "the next decision")
        results = pipeline.train([batch()] * 7)
        assert next(results).transition_s == 0.0
        assert freezing._steps_left(4) == (3, "the loader ends")
        assert next(results).transition_s > 0.0


def test_freezes_at_the_ends_of_epochs(tmp_path: Path) -> None:
    """Before the first step of the next one; the results of an epoch are alike."""
    with make_pipeline(tmp_path, freeze=hocket.freeze.Alpha(1 / 4)) as pipeline:
        epochs = [
            [result.num_frozen for result in pipeline.train([batch(), batch()])]
            for _ in range(3)
        ]
        # The loader's end was the last epoch's; then no epoch ends any more.
        assert pipeline.step(batch()).num_frozen == 3
        with pytest.warns(FreezingWarning, match=r"Alpha is .*: give it every_steps="):
            assert pipeline.step(batch()).num_frozen == 3
        assert pipeline.step(batch()).num_frozen == 3  # and warns no more
    assert epochs == [[0, 0], [1, 1], [2, 2]]


class Begins:
    """A policy without two of its three functions."""

    every_steps = 1
    layers = None
    measures = hocket.freeze.Measures.NOTHING

    def begin(self) -> None:
        """Return no state."""


class Zero(Begins):
    """A policy that is asked every 0 steps, and does not say what it measures."""

    every_steps = 0
    measures: Any = None

    def observe(self, state: None, seen: hocket.freeze.LayerObservation) -> None:
        """Return no state."""

    def decide(self, state: None, seen: hocket.freeze.LayerObservation) -> int:
        """Return none."""
        return 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compile": True}, "compile does not go together"),
        ({"recompute": "all"}, "recompute does not go together"),
        ({"cut": ()}, "cut names the stages of one shape"),
        ({"schedule": "auto"}, "schedule='auto' is chosen once"),
        (
            {"freeze": hocket.freeze.Plasticity(), "num_microbatches": 8},
            "a microbatch has 1: take fewer microbatches",
        ),
        ({"freeze": None, "num_run_steps": 9}, "num_run_steps has no effect without"),
        ({"freeze": None, "shapes": {}}, "shapes has no effect without freeze"),
        ({"freeze": None, "balance": "greedy"}, "greedy' has no effect without freeze"),
        ({"freeze": None, "recut": False}, "recut has no effect without freeze"),
        ({"recut": False, "shapes": {2: (1, 1)}}, "shapes has no effect without recut"),
        (
            {
                "recut": False,
                "cache": hocket.Cache("c", ram_bytes=1, disk_bytes=0),
            },
            "cache does not go together with recut=False",
        ),
        ({"balance": "halves"}, "balance 'halves' should be 'exact' or 'greedy'"),
        (
            {"freeze": None, "cache": hocket.Cache("c", ram_bytes=1, disk_bytes=0)},
            "cache has no effect without freeze",
        ),
        ({"shapes": {2: (2, 1)}}, "2x1 from 2 frozen layers on"),
        ({"shapes": {2: "1x1"}}, r"shapes is {2: '1x1'}: give .*, as {4: \(2, 2\)"),
        ({"shapes": [(1, 1)]}, r"shapes is \[\(1, 1\)\]: give stages and replicas"),
        ({"shapes": {1: (-1, -1)}}, r"shapes is {1: \(-1, -1\)}: give"),
        ({"shapes": {-1: (1, 1)}}, r"shapes is {-1: \(1, 1\)}: give"),
        ({"num_run_steps": 0}, "num_run_steps is 0: take 1, 2"),
        ({"num_run_steps": 9.0}, "num_run_steps is 9.0: take 1, 2"),
        ({"cache": "cache/"}, r"cache is 'cache/': give hocket.Cache\(folder, ram_byt"),
        (
            {"freeze": "alpha"},
            r"freeze is str 'alpha', which has no every_steps, .*, b",
        ),
        ({"freeze": 0.2}, r"float 0.2, .*such as hocket.freeze.Alpha\(1 / 5\)"),
        ({"freeze": hocket.freeze.Alpha}, "freeze is the class Alpha: give an object"),
        ({"freeze": Begins()}, "which has no observe, decide: give a policy"),
        (
            {"freeze": Zero()},
            r"freeze=Zero\(...\): every_steps is 0: .*, measures is None: take one of",
        ),
        (
            {"freeze": hocket.freeze.Alpha(1 / 4, layers="layers.*")},
            "names no module of the model",
        ),
    ],
)
def test_refuses(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    """Before the first step."""
    with pytest.raises(ConfigError, match=match):
        make_pipeline(tmp_path, **options)


def test_refuses_parameters_frozen_by_hand(tmp_path: Path) -> None:
    """The policy decides; nothing else may."""
    model = make_model()
    with make_pipeline(tmp_path, model=model) as pipeline:
        pipeline.step(batch())
        model[4].requires_grad_(False)
        match = r"requires_grad of 4\.weight .* the policy of `freeze=`"
        with pytest.raises(HocketError, match=match):
            pipeline.step(batch())


def test_shapes_divide_workers_and_microbatches() -> None:
    """All that are wrong are named, and those that would do."""
    with pytest.raises(ConfigError) as error:
        refuse_shapes({1: (3, 2), 2: (2, 2), 3: (1, 6)}, 6, 4)
    text = str(error.value)
    possible = "6 workers with 4 microbatches in the whole batch can be 6x1, 3x2"
    assert "2x2 from 2 frozen layers on, 1x6 from 3 frozen layers on cannot be" in text
    assert text.endswith(possible)


class Tied(nn.Module):
    """A head that shares the stem's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From x_BW to x_BW."""
        return self.head(torch.tanh(self.blocks(torch.tanh(self.stem(x)))))


class Repeated(nn.Module):
    """The second block runs twice: before and behind the third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From x_BW to x_BW."""
        for i in (0, 1, 2, 1):
            x = torch.tanh(self.blocks[i](x))
        return self.head(x)


def test_refuses_an_edge_inside_a_shared_block() -> None:
    """Frozen before the third block, it would still train behind it."""
    model = Repeated()
    modules = freezable_modules(model, "blocks.*")
    captured = capture(model, (torch.randn(8, 4),), cut=modules[1:])
    with pytest.raises(ConfigError, match=r"blocks\.1\.weight is used by .* and by"):
        frozen_edges(captured, modules)


def test_refuses_a_weight_on_both_sides_of_an_edge() -> None:
    """The stem would be frozen, and the head not."""
    model = Tied()
    modules = freezable_modules(model, None)
    assert modules == ("blocks.0", "blocks.1", "blocks.2")
    assert modules == freezable_modules(model, "blocks.*")
    captured = capture(model, (torch.randn(8, 4),), cut=modules[1:])
    with pytest.raises(ConfigError, match=r"stem.weight is used by .* and by head"):
        frozen_edges(captured, modules)
    assert blocks_matching("blocks.*", modules) == [*modules]
