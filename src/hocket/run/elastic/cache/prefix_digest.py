"""A digest of frozen layers: equal if they compute the same of equal inputs."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule
from hocket.run.stage.precision import Precision


def prefix_digest(
    module: StageModule, device: torch.device, precision: Precision, kept_as: str | None
) -> bytes:
    """Return 16 bytes that depend on the work, the weights and the buffers.

    Also on the kind of device and torch's version, since kernels round differently.

    Args:
        module: the frozen layers.
        device: where they run.
        precision: the type that they compute in.
        kept_as: the type that their outputs are kept in.
    """
    code = module.code_in(training=False)
    found = sha256()
    about = (device.type, torch.__version__, precision.value, kept_as)
    found.update(f"{about}\n{code.graph.python_code('self').src}".encode())
    for name, value in sorted(vars(code.objects).items()):
        _add(found, name, value)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _add(found, name, tensor)
    return found.digest()[:16]


def model_digest(captured: Captured) -> str:
    """Return a digest of a model's names and shapes, whatever its weights."""
    tensors = captured.state.tensors.items()
    text = "\n".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors)
    return sha256(text.encode()).hexdigest()[:32]


def _add(found: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        text = re.sub(r" at 0x[0-9a-f]+", "", f"{name} {value!r}\n")
        found.update(text.encode())
        return
    found.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
    flat = value.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy().data)
