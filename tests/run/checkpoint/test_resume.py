"""Stopped anywhere and resumed, a run is bit for bit what it would have been."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.errors import CheckpointError, DamagedError, DataError
from hocket.options import PrecisionName
from hocket.run.checkpoint.format.folder import saved
from tests.run.checkpoint.jobs import make_optimizer, make_pipeline, make_scheduler
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.started import started

NUM_STEPS = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The sums in the same order everywhere, and the generators as they were."""
    torch.set_num_threads(1)
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])


def small(**settings: Any) -> hocket.Pipeline:
    """A perceptron with dropout."""
    return make_pipeline(None, {"model": "dropout", **settings})


def drawn_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that depends on all generators that a loader may draw from."""
    shift = random.random() + float(np.random.rand())
    return torch.randn(12, 6).double() + shift, torch.randint(3, (12,))


@pytest.mark.parametrize("name", ["dropout", "tied-dropout", "resnet"])
def test_resumed_at_any_step(name: str, tmp_path: Path) -> None:
    """Losses, gradients' norms, weights, averages; with data drawn at random.

    With AdamW in two groups, a schedule of schedules, clipping and averaged weights.
    """
    case = {"model": name}
    rng_of = {"dropout": drawn_batch}.get(name)
    draw = rng_of or (lambda: ZOO[name].draw(12, torch.default_generator))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with make_pipeline(None, case) as pipeline:
        whole = []
        for step in range(NUM_STEPS):
            pipeline.save(tmp_path, data={"step": step}, keep=None)
            whole.append(pipeline.step(draw()))
        end = pipeline.state_dict(), pipeline.state_dict(ema=True)

    with make_pipeline(None, case | {"seed": 3}) as pipeline:
        for stopped in range(NUM_STEPS):
            data = pipeline.load(tmp_path, step=stopped)
            assert data == {"step": stopped}
            for expected in whole[stopped:]:
                result = pipeline.step(draw())
                assert result.step == expected.step
                assert result.losses == expected.losses
                assert result.grad_norm == expected.grad_norm
            found = pipeline.state_dict(), pipeline.state_dict(ema=True)
            for own, other in zip(found, end, strict=True):
                for key, value in other.items():
                    assert torch.equal(own[key], value), f"after {stopped}: {key}"


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    """A hundred saves in the background, everything overwritten straight after each."""
    with small() as pipeline:
        pipeline.step(drawn_batch())
        runner = pipeline._executor.runners[0]
        for i in range(100):
            with torch.no_grad():
                for tensor in runner.module.state_dict().values():
                    tensor.fill_(i)
            pipeline.save(tmp_path, background=True, data=i, keep=None)
            with torch.no_grad():
                for tensor in runner.module.state_dict().values():
                    tensor.fill_(-1.0)

    paths = saved(tmp_path)
    assert len(paths) == 100
    for i, path in enumerate(paths):
        for tensor in hocket.checkpoint.read_weights(path).values():
            assert bool((tensor == i).all())


def test_saves_in_the_background_follow_each_other(tmp_path: Path) -> None:
    """The second waits for the first, and `close` for the last."""
    with small() as pipeline:
        for _ in range(4):
            pipeline.step(drawn_batch())
            pipeline.save(tmp_path, background=True, keep=3)
    names = [path.name for path in saved(tmp_path)]
    assert names == [f"step-0000000{i}" for i in (2, 3, 4)]
    assert hocket.checkpoint.newest(tmp_path) == tmp_path / names[-1]


def test_an_error_in_the_background_comes_with_the_next_call(tmp_path: Path) -> None:
    """Once; then saving works again. At the end, `close` raises it."""
    pipeline = small()
    pipeline.save(tmp_path)
    (tmp_path / ".step-00000001").write_text("in the way")
    pipeline.step(drawn_batch())
    pipeline.save(tmp_path, background=True)
    with pytest.raises(CheckpointError, match=r"cannot write .* step 1 .*File exists"):
        pipeline.save(tmp_path)
    pipeline.save(tmp_path)
    pipeline.step(drawn_batch())
    (tmp_path / ".step-00000002").write_text("in the way")
    pipeline.save(tmp_path, background=True)
    with pytest.raises(CheckpointError, match="cannot write"):
        pipeline.close()
    assert [path.name[-1] for path in saved(tmp_path)] == ["0", "1"]


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    """The error names the process; when the first has ended, the folder is free."""
    with small() as pipeline, small() as other:
        pipeline.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"process \d+ on \S+\); give each"):
            other.save(tmp_path)
        assert other.load(tmp_path) is None  # looking is allowed
        pipeline.close()
        other.save(tmp_path)
    assert len(saved(tmp_path)) == 2


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    """The file is named; the one before is taken only when the user says so."""
    with small() as pipeline:
        for step in range(3):
            pipeline.save(tmp_path, data=step)
            pipeline.step(drawn_batch())
        path = tmp_path / "step-00000002" / "optimizer-0.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
        before = pipeline.state_dict()
        with pytest.raises(DamagedError, match=r"optimizer-0.*allow_previous=True"):
            pipeline.load(tmp_path)
        for name, value in pipeline.state_dict().items():
            assert torch.equal(value, before[name])
        assert pipeline.load(tmp_path, allow_previous=True) == 1
        assert pipeline.step(drawn_batch()).step == 1
        (tmp_path / "latest").write_text("step-00000009 0\n")
        with pytest.raises(DamagedError, match="latest is damaged"):
            pipeline.load(tmp_path)
        assert pipeline.load(tmp_path, allow_previous=True) == 1


def test_a_missing_one_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    """Never a fresh start; training may go on all the same."""
    with small() as pipeline:
        assert hocket.checkpoint.newest(tmp_path) is None
        with pytest.raises(CheckpointError, match="Nothing was saved in"):
            pipeline.load(tmp_path)
        with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
            pipeline.load(tmp_path, step=5)
        pipeline.step(drawn_batch())


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path) -> None:
    """Names only here, only there, and other shapes; each with its number."""
    with small() as pipeline:
        pipeline.save(tmp_path)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)), nn.Linear(6, 3))
    example = drawn_batch()
    with (
        started(
            model.double(),
            ZOO["dropout"].loss,
            make_optimizer,
            example,
            num_microbatches=4,
        ) as other,
        pytest.raises(CheckpointError, match="is of another model") as caught,
    ):
        other.load(tmp_path)
    text = str(caught.value)
    assert "only in the model" in text
    assert "of another shape or type" in text
    assert "there, F64[6, 6] here" in text


def test_another_setup_is_refused(tmp_path: Path) -> None:
    """Another optimizer, no schedule, no averages: not silently another run."""
    with small() as pipeline:
        pipeline.save(tmp_path)

    def pipeline_with(**settings: Any) -> hocket.Pipeline:
        keywords: dict[str, Any] = {
            "optimizer": make_optimizer,
            "scheduler": make_scheduler,
            "ema_decay": 0.9,
            **settings,
        }
        return hocket.Pipeline(
            ZOO["dropout"].make().double(),
            ZOO["dropout"].loss,
            example=drawn_batch(),
            num_microbatches=4,
            **keywords,
        )

    for settings, words in (
        ({"ema_decay": None}, r"averaged weights \(ema_decay\) there, but none here"),
        ({"scheduler": None}, "SequentialLR learning-rate schedule, .* no schedule"),
        ({"optimizer": lambda x: torch.optim.SGD(x, 0.1)}, "saved with AdamW .* SGD"),
    ):
        with (
            pipeline_with(**settings) as other,
            pytest.raises(CheckpointError, match=words),
        ):
            other.load(tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    """Data that is no JSON, and a number to keep that would keep none."""
    with small() as pipeline:
        with pytest.raises(CheckpointError, match="keep=0"):
            pipeline.save(tmp_path, keep=0)
        with pytest.raises(DataError, match="must be JSON"):
            pipeline.save(tmp_path, data={1, 2})  # type: ignore[arg-type]


def half_pipeline(precision: PrecisionName) -> hocket.Pipeline:
    """A perceptron whose loss is too large for the first scales in float16."""

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 100.0 * nn.functional.cross_entropy(output, targets)

    return started(
        make_model("perceptron").float(),
        loss,
        make_optimizer,
        half_batches()[0],
        num_microbatches=4,
        precision=precision,
    )


def half_batches() -> list[Any]:
    """Batches in float32."""
    return [(x.float(), y) for x, y in batches("perceptron", 12, 12, 12)]


def scale_of(pipeline: hocket.Pipeline) -> float:
    """What its next step multiplies the loss by."""
    scale = pipeline._executor.scale
    assert scale is not None
    return scale.value


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """In float16: the same steps are skipped, with the same scale afterwards."""
    with half_pipeline("float16") as pipeline:
        pipeline.save(tmp_path, data=0)
        whole = [pipeline.step(batch) for batch in half_batches()[:3]]
        pipeline.save(tmp_path, data=3)
        whole += [pipeline.step(batch) for batch in half_batches()[3:]]
        scale = scale_of(pipeline)
    with half_pipeline("float16") as pipeline:
        assert pipeline.load(tmp_path) == 3
        rest = [pipeline.step(batch) for batch in half_batches()[3:]]
        assert scale_of(pipeline) == scale
    assert [x.losses for x in rest] == [x.losses for x in whole[3:]]
    assert [x.skipped for x in rest] == [x.skipped for x in whole[3:]]
    assert any(x.skipped for x in whole)
    assert not all(x.skipped for x in whole)
    with (
        half_pipeline("float32") as pipeline,
        pytest.raises(CheckpointError, match=r"scaler \(precision\) there, but none"),
    ):
        pipeline.load(tmp_path)


def test_a_slow_disk_delays_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while nothing can be written; `close` waits for the disk."""
    can_write, sync = threading.Event(), os.fsync

    def slow_sync(handle: int) -> None:
        assert can_write.wait(60)
        sync(handle)

    with small() as pipeline:
        pipeline.step(drawn_batch())
        monkeypatch.setattr(os, "fsync", slow_sync)
        pipeline.save(tmp_path, background=True)
        steps = [pipeline.step(drawn_batch()).step for _ in range(3)]
        before = hocket.checkpoint.newest(tmp_path)
        can_write.set()
    assert steps == [1, 2, 3]
    assert before is None
    assert hocket.checkpoint.newest(tmp_path) == tmp_path / "step-00000001"
