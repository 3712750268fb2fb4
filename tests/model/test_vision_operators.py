"""torchvision and transformers import beside any torch, with or without hocket."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torchvision
from torchvision.models.detection import RetinaNet
from transformers import BertModel, ViTModel
import torch
print(torch.ops.torchvision.nms)
"""


def test_torch_is_asked_to_declare_the_operators() -> None:
    """If this fails, the installed hocket is an older one: `make setup`."""
    (entry,) = entry_points(group="torch.backends", name="hocket")
    assert callable(entry.load())


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_torchvision_imports_before_hocket() -> None:
    """In a fresh process that imports nothing of hocket's."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "torchvision.nms" in done.stdout
