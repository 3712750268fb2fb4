"""What a model's modules save, and the whole model on every worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked import answers_of

WORKERS: Final = "state_workers"
TOLERANCE: Final = 1e-10
WAYS: Final = [(kind, num) for kind in ("captured", "sequential") for num in (1, 2)]

pytestmark = pytest.mark.timeout(120)


def answers(name: str, folder: Path, num_workers: int, *args: Any) -> Any:
    """What each worker found."""
    return answers_of(
        f"{WORKERS}:{name}", str(folder), *args, num_workers=num_workers, folder=folder
    )


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_the_whole_model_is_gathered_in_place(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """After training on several workers, the user's own model was trained in part.

    Weights, a tied one, statistics and extra state are the plain loop's on every
    worker. Averages go into another model, never into the one that is trained.
    """
    for found in answers("gather", tmp_path, num_workers, kind):
        for what in ("own", "fresh", "state_dict"):
            assert found[what] <= TOLERANCE, what
        assert found["averaged"] > 1e-3
        assert found["tied"]
        assert found["extra"] == [7.0, 2.0]
        assert found["history"] == "[tensor([1., 1.]), (1, 'a')]"
        averages, names = found["errors"]
        assert averages[0] == "ConfigError"
        assert averages[1].startswith("gather_into(ema=True) would replace the weights")
        assert names[0] == "ModelError"
        assert "Missing key(s) in state_dict" in names[1]


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_extra_state_is_saved_and_loaded(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """A module with `get_extra_state` ended `state_dict()` with a KeyError.

    It comes back from checkpoints, and from files of torch and of DCP; hooks behind a
    load are called.
    """
    for found in answers("save_and_load", tmp_path, num_workers, kind):
        expected = (
            str(
                [
                    {"scale": n, "history": [f"tensor([{n:.0f}., {n:.0f}.])"]}
                    for n in (5.0, 6.0)
                ]
            )
            .replace('"', "")
            .replace("['t", "[t")
            .replace(")']", ")]")
        )
        for name in ("run", "weights.pt", "weights.dcp"):
            difference, extra, num_loads = found[name]
            assert difference == 0.0
            assert extra == expected
            assert num_loads == [1, 1]
        if found["is_main"]:
            assert found["safetensors"][0] == "CheckpointError"
            assert "safetensors hold neither extra state" in found["safetensors"][1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_complex_weights_are_clipped_and_saved(
    tmp_path: Path, num_workers: int
) -> None:
    """torch clamps no complex number, and safetensors have no name for complex128.

    Both ended in an error after training.
    """
    for found in answers("train_complex", tmp_path, num_workers):
        assert found["trained"] <= TOLERANCE
        assert found["loaded"] == 0.0
        if found["is_main"]:
            assert "complex128: export as pt or dcp" in found["safetensors"][1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, num_workers: int
) -> None:
    """When the pipeline is made, and not after training."""
    for file, some, large, more in answers("refuse", tmp_path, num_workers):
        for error in (file, some, large, more):
            assert error[0] == "ModelError"
        assert file[1].startswith("0._extra_state is a _io.BytesIO")
        assert some[1].startswith("0._extra_state/of is a builtins.set")
        assert "keep large tensors in buffers" in large[1]
        assert more[1].startswith("0.linear (Saving) saves 0.linear.more")


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_hooks_of_the_state_dict_are_called(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """One that renames, and one that comes before."""
    for found in answers("hooked", tmp_path, num_workers, kind):
        assert found["difference"] <= TOLERANCE
        assert found["notes"][0].startswith("noted ")
        assert found["notes"][1] == 2.0
