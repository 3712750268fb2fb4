"""A recipe of the user's own functions, in a folder, for tests that train one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RECIPE: Final = """\
[model]
kind = "function"
function = "{module}:make_model"
width = 16

[data]
kind = "function"
function = "{module}:make_data"

[task]
loss = "{module}:loss"
metrics = "{module}:metrics"

[optimizer]
kind = "adamw"
learning_rate = 1e-2

[training]
num_epochs = 3
batch_size = 16

[pipeline]
num_workers = 1
num_microbatches = 2

[run]
profile_folder = "profiles"
"""

MODULE: Final = """\
import torch
from torch import nn
from torch.nn import functional


def make_model(width=8):
    return nn.Sequential(
        nn.Linear(4, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 3)
    )


def make_data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 4, generator=generator)
    samples = list(zip(inputs, inputs[:, :3].argmax(1)))
    return samples[:64], samples[64:]


def loss(output, labels):
    return functional.cross_entropy(output, labels)


def metrics(output, labels):
    return {"accuracy": (output.argmax(-1) == labels).float().mean()}
"""


def write_own(
    folder: Path,
    module: str,
    *changes: tuple[str, str],
    more: str = "",
    code: str = "",
) -> str:
    """Write the recipe and its module.

    Args:
        folder: to write into.
        module: its name, which no other test of the process uses.
        changes: what to replace in the module's text, and by what.
        more: text for the end of the recipe.
        code: text for the end of the module.

    Returns:
        The recipe's path.
    """
    text = MODULE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{module}.py").write_text(text + code)
    path = folder / f"{module}.toml"
    path.write_text(RECIPE.format(module=module) + more)
    return str(path)
