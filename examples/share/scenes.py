"""Pictures with boxes, from the files of COCO (.json) and of OpenImages (.csv).

Sources: Lin et al., arXiv:1405.0312, https://cocodataset.org/#format-data;
Kuznetsova et al., arXiv:1811.00982, https://storage.googleapis.com/openimages.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

Scene = tuple[Tensor, dict[str, Tensor]]
Box = tuple[str, list[float], str]  # a picture's file; two corners; what it shows


class Scenes(Dataset[Scene]):
    """The pictures that have boxes, each with them, (N, 4) from corner to corner.

    Args:
        annotations: COCO's `instances_*.json`, or OpenImages' `*-annotations-bbox.csv`.
        folder: the pictures.
    """

    def __init__(self, annotations: str, folder: str) -> None:
        self.folder, path = Path(folder), Path(annotations)
        self.is_relative = path.suffix == ".csv"
        read = _open_images if self.is_relative else _coco
        boxes, self.kinds = read(path)
        self.boxes: dict[str, list[Box]] = {}
        for box in boxes:
            x0, y0, x1, y1 = box[1]
            if x0 < x1 and y0 < y1:
                self.boxes.setdefault(box[0], []).append(box)
        self.names = sorted(self.boxes)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Scene:
        own = self.boxes[self.names[row]]
        with Image.open(self.folder / self.names[row]) as picture:
            image_3HW = pil_to_tensor(picture.convert("RGB")) / 255
        boxes_N4 = torch.tensor([corners for _, corners, _ in own])
        if self.is_relative:
            height, width = image_3HW.shape[1:]
            boxes_N4 *= torch.tensor([width, height, width, height])
        labels_N = torch.tensor([self.kinds.index(kind) for _, _, kind in own])
        return image_3HW, {"boxes": boxes_N4, "labels": labels_N}


def _coco(path: Path) -> tuple[list[Box], list[str]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {image["id"]: image["file_name"] for image in found["images"]}
    kinds = {one["id"]: f"{one['id']:09}" for one in found["categories"]}
    boxes = []
    for one in found["annotations"]:
        x, y, width, height = map(float, one["bbox"])
        if not one.get("iscrowd"):
            corners = [x, y, x + width, y + height]
            boxes.append((names[one["image_id"]], corners, kinds[one["category_id"]]))
    return boxes, sorted(kinds.values())


def _open_images(path: Path) -> tuple[list[Box], list[str]]:
    sides = ("XMin", "YMin", "XMax", "YMax")  # shares of the picture's sides
    with path.open(newline="", encoding="utf-8") as lines:
        boxes = [
            (f"{row['ImageID']}.jpg", [float(row[x]) for x in sides], row["LabelName"])
            for row in csv.DictReader(lines)
            if row.get("IsGroupOf") != "1"
        ]
    return boxes, sorted({kind for _, _, kind in boxes})
