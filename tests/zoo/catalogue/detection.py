"""torchvision's detectors: lists of images and boxes go in, losses come out.

torchvision's own forward checks boxes and matches anchors between its parts, by the
data. Here all of that is inside parts, so that the model can be cut between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torchvision.extension import _has_ops
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, box_iou, boxes

from hocket.model.trace.per_sample import PerSample
from tests.model.support.stages_by_hand import Case
from tests.zoo.vision import Prepare, SmallBackbone, retinanet, scenes


def plain_nms(box_N4: Tensor, score_N: Tensor, iou_threshold: float) -> Tensor:
    """Return the boxes to keep, best first, in operators of torch alone."""
    order = score_N.argsort(descending=True, stable=True)
    overlap_NN = box_iou(box_N4[order], box_N4[order]) > iou_threshold
    is_kept = torch.ones(len(order), dtype=torch.bool)
    for i in range(len(order)):
        if is_kept[i]:
            is_kept[i + 1 :] &= ~overlap_NN[i, i + 1 :]
    return order[is_kept]


if not _has_ops():  # torchvision beside a torch without CUDA
    boxes.nms = plain_nms


class Ends(nn.Module):
    """The regions that a detector proposes, and what it says of them."""

    def __init__(self, model: FasterRCNN) -> None:
        super().__init__()
        self.transform = model.transform
        self.rpn = model.rpn
        self.roi_heads = model.roi_heads

    def forward(
        self, features: dict[str, Tensor], images: list[Tensor], targets: list[Any]
    ) -> Any:
        batch, targets = self.transform(list(images), list(targets))
        regions, losses = self.rpn(batch, features, targets)
        sizes = batch.image_sizes
        found, more = self.roi_heads(features, regions, sizes, targets)
        return {**losses, **more} if self.training else PerSample(found)


class Detector(nn.Module):
    """A detector of regions whose parts are called one after the other."""

    def __init__(self, model: FasterRCNN) -> None:
        super().__init__()
        self.prepare = Prepare(model.transform)
        self.body = model.backbone.body
        self.pyramid = model.backbone.fpn
        self.ends = Ends(model)

    def forward(self, images: list[Tensor], targets: list[Any]) -> Any:
        features = self.pyramid(self.body(self.prepare(images)))
        return self.ends(features, images, targets)


def two_stages(kind: Callable[..., FasterRCNN], **heads: Any) -> nn.Module:
    """A detector that proposes regions and looks at them again, in small."""
    backbone = BackboneWithFPN(
        SmallBackbone((6, 8, 8)),
        return_layers={"layer1": "0", "layer2": "1", "layer3": "2"},
        in_channels_list=[6, 8, 8],
        out_channels=8,
    )
    sides = ((8,), (12,), (16,), (20,))
    model = kind(
        backbone,
        min_size=32,
        max_size=32,
        fixed_size=(32, 32),
        rpn_anchor_generator=AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * 4),
        rpn_pre_nms_top_n_train=30,
        rpn_pre_nms_top_n_test=30,
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 3, 2),
        box_head=TwoMLPHead(8 * 9, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        box_batch_size_per_image=16,
        **heads,
    )
    return Detector(model)


def case(make: Callable[[], nn.Module]) -> Case:
    """Four images of different sizes, each with one to three boxes."""
    inputs, _ = scenes(4, torch.Generator().manual_seed(3))
    return Case(make().train(), (), cast(dict[str, Any], inputs))


CASES: Final[dict[str, Callable[[], Case]]] = {
    "retinanet": partial(case, retinanet),
    "faster-rcnn": partial(case, partial(two_stages, FasterRCNN)),
}
