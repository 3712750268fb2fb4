"""Oxford's flowers: both forms of the folder, the parts, and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from scipy.io import savemat

from hocket.errors import DataError
from hocket.recipes.data.images.flowers import load_flowers
from hocket.run.data.samples import EpochRandom
from tests.recipes.support.flowers_folder import flowers, write_labels

pytest.importorskip("PIL.Image")


def test_reads_the_official_form(tmp_path: Path) -> None:
    """Image n has label n of the row; classes are counted from 0."""
    training, test = load_flowers(flowers(tmp_path), side=8)

    assert (training.num_samples, test.num_samples) == (8, 4)
    assert training.num_classes == test.num_classes == 102
    assert test.paths[0].name == "image_00012.jpg"
    assert test.targets(torch.arange(4), None).tolist() == [99, 90, 81, 72]
    for draw in (None, EpochRandom(0, 0)):
        assert training.inputs(torch.arange(8), draw).shape == (8, 3, 8, 8)


def test_validation_may_be_left_out(tmp_path: Path) -> None:
    """Then training has its own images only; the test's are the same."""
    flowers(tmp_path)
    all_, test = load_flowers(tmp_path, side=8)
    some, same = load_flowers(tmp_path, side=8, with_validation=False)

    assert some.paths == all_.paths[:4]
    assert some.fingerprint != all_.fingerprint
    assert same.fingerprint == test.fingerprint


def test_reads_what_torchvision_has_downloaded(tmp_path: Path) -> None:
    """Its root has the same in a folder of its own."""
    flowers(tmp_path / "flowers-102")
    training, _ = load_flowers(tmp_path, side=8)
    assert training.num_samples == 8


def test_missing_files_are_reported_with_where_to_get_them(tmp_path: Path) -> None:
    """The folder, a table, an image."""
    with pytest.raises(DataError, match=r"does not exist.*robots\.ox\.ac\.uk"):
        load_flowers(tmp_path / "nowhere")
    flowers(tmp_path)
    (tmp_path / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 8 images are missing.*image_00003\.jpg"):
        load_flowers(tmp_path)
    (tmp_path / "setid.mat").unlink()
    with pytest.raises(DataError, match=r"has no file setid\.mat"):
        load_flowers(tmp_path)


def test_tables_of_something_else_are_refused(tmp_path: Path) -> None:
    """No MATLAB file, other names in it, numbers that cannot be."""
    flowers(tmp_path)
    labels = tmp_path / "imagelabels.mat"
    write_labels(tmp_path, [103] * 12)
    with pytest.raises(DataError, match="has 103, where numbers from 1 to 102 are due"):
        load_flowers(tmp_path)
    write_labels(tmp_path, [1] * 11)
    with pytest.raises(DataError, match="'tstid' has 12, where numbers from 1 to 11"):
        load_flowers(tmp_path)
    savemat(labels, {"kinds": [[1]]})
    with pytest.raises(DataError, match="has no row of numbers 'labels'"):
        load_flowers(tmp_path)
    labels.write_bytes(b"no table at all")
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        load_flowers(tmp_path)


def test_without_scipy_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the recipes' own packages."""
    flowers(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError, match=r"pip install 'hocket\[recipes\]'"):
        load_flowers(tmp_path)
