"""RetinaNet on pictures with boxes, from the files of COCO or OpenImages.

    python -m examples.share.retinanet annotations/instances_train2017.json train2017
    python -m examples.share.retinanet oidv6-train-annotations-bbox.csv train

The images of a batch differ in size, so that a batch is a list. Source: Lin et al.,
arXiv:1708.02002; torchvision's network, with a ResNet-50 of random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.models.detection import retinanet_resnet50_fpn

import hocket
from examples.share.loop import Loop
from examples.share.scenes import Scene, Scenes


def make(
    annotations: str,
    folder: str,
    side: int,
    batch_size: int,
    amp: bool,
    chunk: int,
    job: Any,
) -> Any:
    """The job: pictures are scaled to a shorter side, of 800 in the paper."""
    scenes = Scenes(annotations, folder)
    model = retinanet_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=len(scenes.kinds),
        min_size=side,
    ).to(job.device)
    loop = Loop(job, torch.optim.Adam(model.parameters(), 1e-4), amp=amp)

    def loss_of(some: list[Scene]) -> Tensor:
        move = {"device": job.device}
        images = [image.to(**move) for image, _ in some]
        boxes = [{name: x.to(**move) for name, x in own.items()} for _, own in some]
        return sum(model(images, boxes).values())

    def batches() -> Iterator[list[Scene]]:
        while True:
            yield from DataLoader(scenes, batch_size, shuffle=True, collate_fn=list)

    def step(batch: list[Scene]) -> Tensor:
        size = -(-len(batch) // chunk)
        chunks = [batch[i : i + size] for i in range(0, len(batch), size)]
        return loop.update(chunks, [len(own) for own in chunks], loss_of)

    return step, batches()


if __name__ == "__main__":
    jobs = [hocket.Job("a", partial(make, sys.argv[1], sys.argv[2], 800, 4, False, 1))]
    print(hocket.share(jobs, num_iterations=100))
