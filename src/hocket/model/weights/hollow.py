"""Gives a model on `meta` memory on the host, which costs nothing until it is written.

    meta       no memory: its code cannot be run, nor captured for a real device
    hollow     mapped, and zero: the kernel gives pages to what is written, alone
    held       written: a stage's weights, on the worker that runs it

Parameters stay the same objects, so that ties, groups of an optimizer and references
of the user's hold.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError
from hocket.model.trace.state import State

_MAPPED: Final = 1 << 16  # smaller tensors are part of the heap


class HollowTensor:
    """One tensor of a model, on the host, whose memory can be released.

    Args:
        tensor: on `meta`; becomes one on the host.
        name: its name, for errors.

    Raises:
        ConfigError: what else is known of it would be lost.
    """

    def __init__(self, tensor: Tensor, name: str) -> None:
        hooks = tensor._backward_hooks or getattr(
            tensor, "_post_accumulate_grad_hooks", None
        )
        if hooks or not tensor.is_leaf:
            what = "has hooks" if hooks else "is the result of a computation"
            raise ConfigError(
                f"the model's {name} is on the meta device and {what}, which a tensor "
                "with values would not have: register hooks, and compute, after the "
                "pipeline is made"
            )
        num_bytes = tensor.numel() * tensor.element_size()
        self._map: mmap.mmap | None = None
        if num_bytes >= _MAPPED:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            flags |= getattr(mmap, "MAP_NORESERVE", 0)
            self._map = mmap.mmap(-1, num_bytes, flags=flags)
            flat = torch.frombuffer(self._map, dtype=tensor.dtype)
        else:
            flat = torch.zeros(tensor.numel(), dtype=tensor.dtype)
        # As torch.empty_like: dense tensors keep the order of their dimensions.
        strides = torch.empty_like(tensor).stride()
        with torch.no_grad():
            values: Tensor = flat.as_strided(tensor.shape, strides)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        values.__class__ = tensor.__class__
        values.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, values)
        except RuntimeError as error:
            raise ConfigError(
                f"the model's {name} cannot be given values: {error}. Something else "
                "refers to it, such as what torch.export has made of this model: make "
                "the model again"
            ) from error
        self._tensor = tensor

    def release(self) -> None:
        """Give the memory back; the tensor is zero from now on."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            self._tensor.detach().zero_()


def make_hollow(model: nn.Module) -> dict[str, HollowTensor]:
    """Give each tensor of a model that is on `meta` memory on the host.

    Args:
        model: the model; its parameters and buffers stay the same objects.

    Returns:
        Those that were on `meta`, by first name.

    Raises:
        ConfigError: a tensor that is neither parameter nor buffer is on `meta`, where
            no weights can be given to it.
    """
    own = {id(x): name for name, x in State.of(model).tensors.items()}
    for path, module in model.named_modules():
        for name, x in _tensors_beside(module):
            if x.is_meta and id(x) not in own:
                raise ConfigError(
                    f"{path or 'the model'}.{name} is a tensor on the meta device, but "
                    "neither parameter nor buffer, so it has no name in files and "
                    "cannot be given its values: make it a buffer "
                    f"(`self.register_buffer({name!r}, ..., persistent=False)`), or "
                    'outside of `torch.device("meta")`'
                )
    with _references_loosened(model):
        tensors = State.of(model).tensors.items()
        return {name: HollowTensor(x, name) for name, x in tensors if x.is_meta}


def _tensors_beside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a module's plain attributes."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        leaves: Any = pytree.tree_leaves(value)
        yield from ((name, x) for x in leaves if isinstance(x, Tensor))


@contextmanager
def _references_loosened(model: nn.Module) -> Iterator[None]:
    """Let torch's recurrent layers drop the weak references to their weights."""
    layers = [x for x in model.modules() if isinstance(x, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()
