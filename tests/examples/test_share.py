"""The jobs of examples/share: each trains, in halves and chunks, and as it is alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from examples.share import dcgan, wikitext
from examples.share.dcgan_nets import critic, generator
from examples.share.loop import Loop
from examples.share.transformer_xl import SMALL, Words
from tests.recipes.support.real_data import real
from tests.sharing.support.jobs import Alone, train_alone

NUM: int = 8


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The path of some words."""
    path = tmp_path / "words"
    path.write_text("the cat sat on the mat and the dog ran to the cat\n" * 40)
    return str(path)


@pytest.mark.parametrize("amp", [False, True])
def test_jobs_with_memory_and_two_optimizers_are_what_they_are_alone(
    text: str, *, amp: bool
) -> None:
    """Bit by bit: noise, dropout, and a memory that lives from batch to batch."""
    makes = {
        "dcgan": partial(dcgan.make, None, 2, 4, amp, 2),
        "transformer-xl": partial(wikitext.make, text, SMALL, 4, amp, 2),
    }
    jobs = [hocket.Job(name, make) for name, make in makes.items()]
    report = hocket.share(jobs, mode="lag", num_iterations=NUM, device="cpu")
    report.check()
    for name, make in makes.items():
        assert list(report[name].losses) == train_alone(make, NUM, seed=0)


def test_a_text_and_pictures_are_learnt(text: str) -> None:
    """The loss of words falls; the nets have the sizes of the published ones."""
    losses = train_alone(partial(wikitext.make, text, SMALL, 4, False, 1), 80, seed=0)
    assert losses[-1] < 0.8 * losses[0]
    nets = generator(64), critic(64)
    sizes = [sum(p.numel() for p in net.parameters()) for net in nets]
    assert sizes == [3_576_704, 2_765_568]  # as pytorch/examples/dcgan has them
    assert critic(2)(generator(2)(torch.randn(2, 100, 1, 1))).shape == (2, 1, 1, 1)


def test_a_memory_is_as_good_as_a_longer_segment() -> None:
    """Two segments, the second with the memory of the first, are one of both.

    So the positions are relative, and the memory is that of each layer.
    """
    torch.manual_seed(0)
    model = Words(50, SMALL, dropout=0.0).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    words = torch.randint(50, (2, 32))
    whole, _ = model.hidden(words, None)
    first, memory = model.hidden(words[:, :16], None)
    second, _ = model.hidden(words[:, 16:], memory)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_have_the_gradient_of_the_batch(num_chunks: int) -> None:
    """One update from two halves is that from the whole, and clipped alike.

    Past bug: of chunks of 3, 3 and 2 samples it was the mean of their means.
    """
    weights, losses = [], []
    for num in (1, num_chunks):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        loop = Loop(Alone(), torch.optim.SGD(model.parameters(), 0.1), clip_norm=0.1)
        chunks = torch.randn(8, 4, dtype=torch.float64).chunk(num)
        sizes = [len(chunk) for chunk in chunks]
        for _ in range(3):
            loss = loop.update(chunks, sizes, lambda x: model(x).square().mean())  # noqa: B023
        weights.append(model.weight.detach())
        losses.append(loss)
    torch.testing.assert_close(*weights)
    torch.testing.assert_close(*losses)


def test_pictures_with_boxes_are_read_and_learnt(tmp_path: Path) -> None:
    """Two pictures of different sizes, one box without a size and one picture empty."""
    image: Any = pytest.importorskip("PIL.Image", reason="extra `vision`")
    retinanet: Any = pytest.importorskip("examples.share.retinanet")
    rng = torch.Generator().manual_seed(0)
    for number, size in enumerate([(60, 40), (32, 64), (20, 20)]):
        shape = (*reversed(size), 3)
        noise = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        image.fromarray(noise.numpy()).save(tmp_path / f"{number}.png")
    boxes = [(0, [5, 6, 20, 10], 7), (0, [1, 1, 0, 9], 7), (1, [0, 0, 32, 64], 3)]
    content = {
        "images": [{"id": i, "file_name": f"{i}.png"} for i in range(3)],
        "categories": [{"id": 3}, {"id": 7}],
        "annotations": [
            {"image_id": i, "bbox": box, "category_id": kind} for i, box, kind in boxes
        ],
    }
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    scenes = retinanet.Scenes(str(path), str(tmp_path))
    assert len(scenes) == 2
    assert scenes[0][1]["boxes"].tolist() == [[5, 6, 25, 16]]
    assert scenes[1][1]["labels"].tolist() == [0]
    assert scenes[1][0].shape == (3, 64, 32)
    for amp, chunk in ((False, 2), (True, 1)):
        make = partial(retinanet.make, str(path), str(tmp_path), 32, 2, amp, chunk)
        first, second = train_alone(make, 2, seed=0)
        assert 0 < second < first


def test_open_images_are_read(tmp_path: Path) -> None:
    """Sides of boxes are shares of the picture's; groups of objects are left out."""
    image: Any = pytest.importorskip("PIL.Image", reason="extra `vision`")
    scenes_of: Any = pytest.importorskip("examples.share.scenes").Scenes
    image.new("RGB", (200, 100)).save(tmp_path / "0a.jpg")
    path = tmp_path / "train-annotations-bbox.csv"
    path.write_text(
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsGroupOf\n"
        "0a,xclick,/m/02,1,0.25,0.5,0.125,0.75,0\n"
        "0a,xclick,/m/01,1,0,1,0,1,0\n"
        "0b,xclick,/m/03,1,0,1,0,1,1\n"
    )
    [(picture, found)] = list(scenes_of(str(path), str(tmp_path)))
    assert picture.shape == (3, 100, 200)
    assert found["boxes"].tolist() == [[50, 12.5, 100, 75], [0, 0, 200, 100]]
    assert found["labels"].tolist() == [1, 0]


def test_real_pictures_and_words() -> None:
    """CIFAR-10 as DCGAN's pictures; Shakespeare as more than 10,000 words."""
    pictures = next(dcgan.images(str(real("cifar-10-batches-py")), 4))
    assert pictures.shape == (4, 3, 64, 64)
    assert -1 < pictures.min() < pictures.max() < 1
    ids, num_ids = wikitext.read_words(str(real("text") / "tinyshakespeare.txt"))
    assert ids.max() + 1 == num_ids > 10_000
