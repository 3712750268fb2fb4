"""torchvision imports beside any torch once its operators are declared."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import warnings
from hocket.model.vision_operators import declare_vision_operators
declare_vision_operators()
declare_vision_operators()
warnings.simplefilter("ignore")
import torchvision
from torchvision.models.detection import RetinaNet
import torch
print(torch.ops.torchvision.nms)
"""


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_torchvision_imports() -> None:
    """In a fresh process, and declaring twice is as good as once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "torchvision.nms" in done.stdout
