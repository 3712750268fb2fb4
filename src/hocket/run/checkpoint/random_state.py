"""The states of the random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket import cuda
from hocket.errors import DamagedError


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this process, as JSON.

    Args:
        device: the device whose generator is saved beside the CPU's.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": _text(torch.default_generator.get_state()),
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), [int(x) for x in keys], place, has_gauss, float(cached)],
    }
    if _on_gpu(device):
        state["cuda"] = _text(cuda.generator(device).get_state())
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore states.

    Raises:
        DamagedError: the states are not valid.
    """
    gpu = cuda.generator(device) if _on_gpu(device) else None
    _set(state, torch.default_generator, random, np.random, gpu)


def check_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Check that states can be restored; no generator in use changes.

    Raises:
        DamagedError: the states are not valid.
    """
    gpu = torch.Generator(device) if _on_gpu(device) else None
    _set(state, torch.Generator(), random.Random(), np.random.RandomState(), gpu)


def _set(
    state: Mapping[str, Any],
    cpu: torch.Generator,
    python: Any,
    numpy: Any,
    gpu: torch.Generator | None,
) -> None:
    """Set the states of generators, or of the modules that have one."""
    try:
        cpu.set_state(_tensor(state["torch"]))
        version, numbers, gauss = state["python"]
        python.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        if gpu is not None and "cuda" in state:
            gpu.set_state(_tensor(state["cuda"]))
    except Exception as error:  # each of the generators refuses in ways of its own
        raise DamagedError(f"random states are not valid: {error}") from error


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
