"""Pictures with boxes, as COCO's files have them; OpenImages in that form.

Source: Lin et al., arXiv:1405.0312; https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

Scene = tuple[Tensor, dict[str, Tensor]]


class Scenes(Dataset[Scene]):
    """The pictures that have boxes, each with them, (N, 4) from corner to corner.

    Args:
        annotations: a JSON file with images, annotations and categories.
        folder: the pictures.
    """

    def __init__(self, annotations: str, folder: str) -> None:
        found = json.loads(Path(annotations).read_text(encoding="utf-8"))
        self.folder = Path(folder)
        self.names = {image["id"]: image["file_name"] for image in found["images"]}
        numbers = sorted(category["id"] for category in found["categories"])
        self.labels = {number: label for label, number in enumerate(numbers)}
        self.objects: dict[int, list[Any]] = {}
        for one in found["annotations"]:
            if min(one["bbox"][2:]) > 0 and not one.get("iscrowd"):
                self.objects.setdefault(one["image_id"], []).append(one)
        self.numbers = sorted(self.objects)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> Scene:
        own = self.objects[self.numbers[row]]
        with Image.open(self.folder / self.names[self.numbers[row]]) as picture:
            image_3HW = pil_to_tensor(picture.convert("RGB")) / 255
        corner_size_N4 = torch.tensor([one["bbox"] for one in own], dtype=torch.float32)
        corner, size = corner_size_N4.chunk(2, 1)
        labels = torch.tensor([self.labels[one["category_id"]] for one in own])
        return image_3HW, {
            "boxes": torch.cat([corner, corner + size], 1),
            "labels": labels,
        }
