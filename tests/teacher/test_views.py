"""Two views of each image, which depend on its seed alone."""

from __future__ import annotations

import sys

import pytest
import torch

from hocket.errors import ConfigError, MissingPackageError
from hocket.teacher.views import TwoViews
from tests.teacher.support.images import random_images

pytest.importorskip("torchvision", reason="extra `vision`")


def test_first_views_come_before_second_views() -> None:
    """Row N + i is the second view of the image of row i."""
    images, views = random_images(3), TwoViews(16)
    batch = views(images, [5, 6, 7])
    assert batch.shape == (6, 3, 16, 16)
    assert batch.dtype == torch.float32
    assert type(batch) is torch.Tensor
    for i, (image, seed) in enumerate(zip(images, (5, 6, 7), strict=True)):
        assert torch.equal(batch[i], views.view(False, image, seed))
        assert torch.equal(batch[3 + i], views.view(True, image, seed))
    assert len({x.numpy().tobytes() for x in batch}) == 6


def test_a_view_depends_on_its_seed_alone() -> None:
    """Not on the global generator, which it leaves as it was."""
    views, (image,) = TwoViews(16), random_images(1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = views([image], [2**53 - 1])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, views([image], [2**53 - 1]))
    assert not torch.equal(first, views([image], [0]))


def test_only_second_views_are_solarised() -> None:
    """A white image stays bright under all else: a fifth of the second ones is dark."""
    white = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    views = TwoViews(8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    batch = views([white] * 400, range(400))
    is_dark = batch.flatten(1).mean(1) < 0.5
    assert not is_dark[:400].any()
    assert 0.14 < is_dark[400:].double().mean() < 0.26


def test_first_views_are_smoother() -> None:
    """All of them are blurred, and of the second views a tenth."""
    noise = random_images(200, 32)
    views = TwoViews(32, least_area=1.0)
    batch = views(noise, range(200))
    rough = batch.diff(dim=3).abs().flatten(1).mean(1)
    first, second = rough.chunk(2)
    assert first.median() < 0.9 * second.median()


def test_pillow_images_without_colours_are_images() -> None:
    """Of a folder, some images may be grey."""
    image = pytest.importorskip("PIL.Image").new("L", (30, 20), 99)
    assert TwoViews(16)([image], [0]).shape == (2, 3, 16, 16)
    plain = TwoViews(16, mean=(0.0,) * 3, std=(1.0,) * 3).plain(image)
    torch.testing.assert_close(plain, torch.full((3, 16, 16), 99 / 255))


def test_numbers_out_of_range_are_refused() -> None:
    """With their values."""
    with pytest.raises(ConfigError, match="side=0"):
        TwoViews(0)
    with pytest.raises(ConfigError, match=r"least_area=1\.5"):
        TwoViews(8, 1.5)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchvision is missing, when a view is made and not before."""
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    views = TwoViews(9)
    with pytest.raises(MissingPackageError, match=r"hocket\[vision\]"):
        views(random_images(1), [0])
