"""The weights that a pipeline is given beside its model.

    with torch.device("meta"): model = Net()          no memory, no values
    Pipeline(model, ..., weights="folder/")           each worker reads its own stages

While layers are measured, one after the other holds its values; then the stages of
this worker do.

A model on `meta` gets memory on the host, which costs nothing until it is written:

    meta       no memory: its code cannot be run, nor captured for a real device
    hollow     mapped, and zero: the kernel gives pages to what is written, alone
    held       written: a stage's weights, on the worker that runs it

Parameters stay the same objects, so that ties, groups of an optimizer and references
of the user's hold.
"""

from __future__ import annotations

import copy
import mmap
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError, ModelError
from hocket.model.stages.saved_modules import SavedModules
from hocket.model.trace.state import State
from hocket.model.weights.fresh import FreshWeights, draw, refuse_unset
from hocket.model.weights.stored import Form, StoredWeights

# Reads files of the transformers library, which saves by other names than it trains.
#
#     block_sparse_moe.experts.{0..7}.w1.weight ┐
#     block_sparse_moe.experts.{0..7}.w3.weight ┴▶ mlp.experts.gate_up_proj
#
# From its version 5 on, a model's `save_pretrained` writes what the published files
# have, and its `from_pretrained` converts that, by rules of the library's own. These
# are asked.


def as_the_model_names_them(stored: StoredWeights, model: nn.Module) -> StoredWeights:
    """Return stored weights by the names that a model has for them.

    Args:
        stored: the weights.
        model: the model; if it is not of the transformers library, or nothing is to be
            converted, they are returned as they are.

    Raises:
        ModelError: the library's rules failed.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    mapping = sys.modules.get("transformers.conversion_mapping")
    if loading is None or mapping is None or not hasattr(model, "base_model_prefix"):
        return _without_ignored(stored, model)
    groups = _groups(
        stored, model, mapping.get_model_conversion_mapping(model), loading
    )
    forms: dict[str, Form] = {}
    made_by: dict[str, _Group] = {}
    for group in groups:
        own = {name: stored.forms[name] for _, name in group.sources}
        for name, form in group.forms(own, model).items():
            forms[name], made_by[name] = form, group

    def read(names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for group in {id(made_by[x]): made_by[x] for x in names}.values():
            sources = dict(stored.read([name for _, name in group.sources]))
            made = group.made(sources, model)
            yield from ((name, made[name]) for name in made if name in names)

    return _without_ignored(replace(stored, forms=forms, read=read), model)


def _groups(
    stored: StoredWeights, model: Any, rules: Sequence[Any], loading: Any
) -> list[_Group]:
    """Return which tensors of the files become which of the model.

    Args:
        stored: the weights.
        model: the model.
        rules: the library's, for this model.
        loading: the library's module that applies them.
    """
    converters = [x for x in rules if isinstance(x, loading.WeightConverter)]
    renamings = [x for x in rules if isinstance(x, loading.WeightRenaming)]
    by_pattern = {x: one for one in converters for x in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, _Group] = {}
    for name in sorted(stored.forms, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, prefix, known
        )
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None and target in groups:
            target = name  # of which there is one already: superfluous
        group = groups.setdefault(target, _Group(target, by_pattern.get(pattern), []))
        group.sources.append((pattern or name, name))
    return [*groups.values()]


def _without_ignored(stored: StoredWeights, model: nn.Module) -> StoredWeights:
    """Let names be superfluous that a model's class says may be."""
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    if not patterns:
        return stored
    found = [re.compile(x) for x in patterns]
    return replace(stored, not_asked=lambda name: any(x.search(name) for x in found))


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the files that become one of the model, or several.

    Args:
        target: the first name in the model.
        converter: the library's rule; None where the name alone changes.
        sources: the pattern that each matches, and its name in the files; one where
            there is no rule.
    """

    target: str
    converter: Any
    sources: list[tuple[str, str]]

    def made(self, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Return the model's tensors, made of those in the files."""
        if self.converter is None:
            return {self.target: tensors[self.sources[0][1]]}
        rule = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, tensors[name])
        try:
            made = rule.convert(self.target, model=model, config=model.config)
        except Exception as error:
            raise ModelError(
                f"the transformers library cannot make {self.target} of "
                f"{', '.join(name for _, name in self.sources[:3])}, ...: "
                f"{type(error).__name__}: {error}"
            ) from error
        return {k: x[0] if isinstance(x, list) else x for k, x in made.items()}

    def forms(self, own: Mapping[str, Form], model: Any) -> dict[str, Form]:
        """Return what it will make, without reading."""
        if self.converter is None:
            return {self.target: own[self.sources[0][1]]}
        empty = {name: _empty(*form) for name, form in own.items()}
        found = self.made(empty, model)
        return {name: _form(x) for name, x in found.items()}


def _empty(kind: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")


def _form(tensor: Tensor) -> Form:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class GivenWeights:
    """A model's weights, which come from files or are drawn.

    Args:
        model: the model; of what is on `meta`, the memory is on the host from now on,
            and takes none until it is written. All parameters stay the same objects.
        source: where the values come from.

    Raises:
        ModelError: the files do not fit the model, or a tensor stays without values.
        ConfigError: the model cannot be given any.
    """

    def __init__(self, model: nn.Module, source: StoredWeights | FreshWeights) -> None:
        self._model, self._source = model, source
        self._names: dict[str, tuple[str, ...]] = {}
        if isinstance(source, StoredWeights):
            source = as_the_model_names_them(source, model)
            self._source, self._names = source, source.names_for(State.of(model))
            _load_beside(model, source)
        self._hollow = make_hollow(model)
        if isinstance(source, FreshWeights) and not self._hollow:
            raise ConfigError(
                "weights=hocket.init() has no effect: no tensor of the model is on the "
                'meta device; make it under `with torch.device("meta")`'
            )
        self._held: frozenset[str] = frozenset()
        self._tensors = State.of(model).tensors
        self._compute()

    @property
    def is_partial(self) -> bool:
        """Whether tensors have no values until they are held."""
        return bool(self._hollow)

    @property
    def text(self) -> str:
        """A text of where they come from, which all workers must have alike."""
        if isinstance(self._source, FreshWeights):
            is_made = self._source.like is not None
            return f"seed {self._source.seed}, as a constructor {is_made}"
        return str(sorted(self._source.forms.items()))

    @property
    def others(self) -> dict[str, Tensor]:
        """The tensors whose values are the user's own, by first name."""
        given = self._names.keys() | self._hollow.keys()
        return {name: x for name, x in self._tensors.items() if name not in given}

    def hold(self, names: Collection[str]) -> None:
        """Give these tensors their values, and take the memory of all others.

        Args:
            names: first names; what the model does not have is left out.
        """
        is_drawn = isinstance(self._source, FreshWeights)
        wanted = frozenset(names) & (self._hollow if is_drawn else self._names).keys()
        for name in self._held - wanted:
            if name in self._hollow:
                self._hollow[name].release()
        new = wanted - self._held
        if new and isinstance(self._source, StoredWeights):
            self._source.fill({x: self._tensors[x] for x in sorted(new)}, self._names)
        elif new and isinstance(self._source, FreshWeights):
            own = {name: self._tensors[name] for name in sorted(wanted)}
            self._source.fill(self._model, own, self.others)
            for name in self._hollow.keys() - wanted:  # a whole may draw its parts
                self._hollow[name].release()
        self._held = wanted

    def forget(self) -> None:
        """Let go of what is needed for other stages alone."""
        if isinstance(self._source, FreshWeights):
            self._source.forget()

    def _compute(self) -> None:
        """Let modules compute buffers that are not saved, such as tables of angles.

        Raises:
            ModelError: one is not computed.
        """
        if not isinstance(self._source, StoredWeights):
            return
        unset = {x: self._tensors[x] for x in self._hollow if x not in self._names}
        owners = {name.rpartition(".")[0] for name in unset}
        still = draw(self._model, unset, 0, self.others, owners)
        refuse_unset(still, self._model, by_all=False)
        for name in self._hollow.keys() - unset.keys():
            self._hollow[name].release()


def _load_beside(model: nn.Module, source: StoredWeights) -> None:
    """Load what modules save beside tensors.

    Raises:
        ModelError: the files lack an extra state; or a module has hooks of loading,
            which see a whole state dict.
    """
    for path, module in model.named_modules():
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            raise ModelError(
                f"{path or 'the model'} has a hook of load_state_dict, and no worker "
                f"of {source.where} has the state dict that it is called with: load "
                "the weights into the model before the pipeline is made"
            )
    modules = SavedModules({"": model})
    if missing := sorted(modules.extra_names - source.extra.keys()):
        raise ModelError(
            f"{source.where} has no {missing[0]}: an extra state (`get_extra_state`) "
            "is in checkpoints of hocket alone; load the weights into the model before "
            "the pipeline is made"
        )
    modules.load(source.extra)


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
