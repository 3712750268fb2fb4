"""A device in the place of a GPU: its tensors are not a CPU's, and its ops run late.

It is a backend of torch's in Python (`PrivateUse1`), registered before a process has
run its first backward. A tensor of it wraps one of the CPU. An op's outputs have their
shapes when it is called, from a run on the meta device, and their values later: when
the host waits for them, or earlier, which a seed decides (`stand_in_stream.py`).

As on a GPU,

- what an op will return is poison until the op has run;
- an op on tensors of the device and of the CPU is an error;
- a copy to the host with `non_blocking=True` is complete only after an event recorded
  behind it has passed; until then the memory holds poison;
- the source of such a copy to the device must not change until then;
- gloo refuses its tensors for send and receive, and takes them for sums;
- whatever lets the host wait for the device is noted (`Waits`).

Unlike there, a parameter of two modules becomes two when they are moved one by one.
There is one stream. Ops that draw random numbers run when they are called: a GPU would
note the state of the generator at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
import torch._dynamo.device_interface  # it makes subclasses of torch.Event
import torch._inductor.utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests.run.support.stand_in_stream import STREAM, StandInEvent

NAME: Final = "standin"
_POISON: Final = 0xFF  # in every byte: not a number, and -1
_aten: Final = torch.ops.aten
_POINT_TO_POINT: Final = {"send", "recv_", "recv_any_source_"}
_PRODUCTS: Final = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default)


class StandInTensor(Tensor):
    """A tensor of the device.

    Args:
        raw: its values.
    """

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's subclasses

    @staticmethod
    def __new__(cls: type[StandInTensor], raw: Tensor) -> StandInTensor:
        """Make a tensor of the same form."""
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # it is a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute an op; beside tensors without values, only its shapes."""
        if FakeTensor in types:
            leaves = pytree.tree_leaves((args, kwargs))
            fake = next(x.fake_mode for x in leaves if isinstance(x, FakeTensor))
            args, kwargs = pytree.tree_map_only(cls, fake.from_tensor, (args, kwargs))
            return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """The same memory, without history, and with a version of its own."""
        return StandInTensor(self.raw)

    @data.setter
    def data(self, other: Any) -> None:
        assert other.raw.stride() == self.raw.stride()
        self.raw = other.raw

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy it, as `copy.deepcopy` does; a parameter stays one."""
        if id(self) not in memo:
            made = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            made = torch.nn.Parameter(made) if is_parameter else made
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def untyped_storage(self) -> Any:
        """Its memory."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """Its address."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """Its values, for which the host waits."""
        STREAM.wait("tolist")
        return self.raw.tolist()


def register(seed: int = 0) -> torch.device:
    """Register the device in this process; return it.

    Args:
        seed: decides how late ops run.
    """
    STREAM.random.seed(seed)
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    module: Any = torch.get_device_module(NAME)
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_factory, "PrivateUse1")
    STREAM.library = library
    # These look at the device's address or at a driver, or resize what is empty.
    torch.tensor = _via_the_host(torch.tensor)
    torch.arange = _via_the_host(torch.arange)
    torch.empty = _without_pinning(torch.empty)
    torch.Event = StandInEvent  # type: ignore[assignment,misc]
    return torch.device(NAME, 0)


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


def _via_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made_there(*args: Any, device: Any = None, **more: Any) -> Tensor:
        made = make(*args, **more)
        return made if device is None else made.to(device)

    return made_there


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        made = make(*size, **more)
        if pin_memory:
            STREAM.pinned.add(made.untyped_storage().data_ptr())
        return made

    return empty


def _is_standin(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is _aten._to_copy.default:
        return _to_copy(args[0], **kwargs)
    if func is _aten.copy_.default:
        return _copy_into(*args, **kwargs)
    if func is _aten._local_scalar_dense.default:
        STREAM.wait("item")
        return func(_to_raw(args[0]))
    if func.namespace == "c10d" and func._opname in _POINT_TO_POINT:
        raise RuntimeError("writev: Bad address")  # so gloo says it of CUDA's
    is_pinned = kwargs.pop("pin_memory", False)
    flat, spec = pytree.tree_flatten((args, kwargs))
    device = kwargs.get("device")
    is_elsewhere = device is not None and not _is_standin(device)
    own = [x for x in flat if isinstance(x, StandInTensor)]
    _check_devices(func, flat, own)
    call = _Call(func, flat, [_to_raw(x) for x in flat], spec)
    if own and not is_elsewhere and _may_be_late(func):
        return call.submit()
    if own and not _is_view(func):
        STREAM.finish(STREAM.num_submitted)
    found = call.run()
    if is_pinned:
        STREAM.pinned.add(found.untyped_storage().data_ptr())
    return found if is_elsewhere or not (own or device) else call.wrapped(found)


def _check_devices(func: Any, flat: Sequence[Any], own: Sequence[Any]) -> None:
    for x in flat:
        is_other = isinstance(x, Tensor) and not isinstance(x, StandInTensor)
        if own and is_other and x.dim():
            raise RuntimeError(f"{func}: a tensor of the CPU beside one of {NAME}")


@cache
def _is_view(func: Any) -> bool:
    """Return whether an op returns tensors in the memory of others, and no values."""
    infos = [x.alias_info for x in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@cache
def _may_be_late(func: Any) -> bool:
    """Return whether an op's outputs are tensors of known shapes."""
    kinds = {str(x.type) for x in func._schema.returns}
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return kinds <= {"Tensor", "List[Tensor]"} and not (_is_view(func) or draws)


@dataclass(frozen=True)
class _Call:
    """A call of an op.

    Args:
        func: the op.
        given: its arguments, flattened.
        raw: the same with tensors of the CPU.
        spec: the form of both.
    """

    func: Any
    given: Sequence[Any]
    raw: Sequence[Any]
    spec: pytree.TreeSpec

    def run(self, values: Sequence[Any] | None = None) -> Any:
        """Run the op now; on other values, if they are given."""
        flat = list(self.raw if values is None else values)
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return self.func(*args, **kwargs)

    def wrapped(self, found: Any) -> Any:
        """Return what the op returned as tensors of the device."""
        same = {id(raw): x for raw, x in zip(self.raw, self.given, strict=True)}

        def wrap(x: Tensor) -> Tensor:
            known = same.get(id(x))
            return known if isinstance(known, Tensor) else StandInTensor(x)

        return pytree.tree_map_only(Tensor, wrap, found)

    def submit(self) -> Any:
        """Submit the op; return its outputs, whose values come later."""
        STREAM.num_ops += 1
        metas = [_on_meta(x) if isinstance(x, Tensor) else x for x in self.raw]
        types = {x.dtype for x in metas if isinstance(x, Tensor)}
        if self.func in _PRODUCTS and len(types) > 1:  # which shapes alone do not find
            raise RuntimeError(f"{self.func}: factors of {types}")
        try:
            shapes = self.run(metas)
        except NotImplementedError:  # no kernel for shapes alone
            STREAM.finish(STREAM.num_submitted)
            return self.wrapped(self.run())
        of_meta = {id(meta): x for meta, x in zip(metas, self.given, strict=True)}
        if not self.func._schema.returns:  # an op in place on a list of tensors
            STREAM.add(partial(self.run, self.raw))
            return None
        outputs, form = pytree.tree_flatten(shapes)
        made: list[Any] = [of_meta.get(id(x)) for x in outputs]
        is_new = [x is not None and id(x) not in of_meta for x in outputs]
        for i, x in enumerate(outputs):
            made[i] = StandInTensor(_poison(x)) if is_new[i] else made[i]
        both = zip(self.raw, self.given, strict=True)
        values = [x.clone() if _is_host_scalar(x, y) else x for x, y in both]

        def compute() -> None:
            found = pytree.tree_leaves(self.run(values))
            for target, value, has_values in zip(made, found, is_new, strict=True):
                # Batch norms save nothing in evaluation; shapes alone say otherwise.
                if has_values and value.numel():
                    target.raw.copy_(value)

        STREAM.add(compute)
        return pytree.tree_unflatten(made, form)


def _is_host_scalar(raw: Any, given: Any) -> bool:
    return isinstance(raw, Tensor) and not isinstance(given, StandInTensor)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _poison(like: Tensor) -> Tensor:
    """Return a tensor of the CPU whose values are none."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    whole = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    whole.fill_(_POISON)
    return made


def _to_raw(x: Any) -> Any:
    if isinstance(x, StandInTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and _is_standin(x) else x


def _to_copy(
    source: Tensor, *, device: Any = None, non_blocking: bool = False, **more: Any
) -> Tensor:
    target = source.device if device is None else torch.device(device)
    more.pop("pin_memory", None)
    if target.type != NAME:
        made = _aten._to_copy.default(_on_meta(_to_raw(source)), **more)
        host = _poison(made)
        _copy_to_host(host, source, waits=not non_blocking)
        return host
    if isinstance(source, StandInTensor):
        flat, spec = pytree.tree_flatten(((source,), more))
        raw = [_to_raw(x) for x in flat]
        return _Call(_aten._to_copy.default, flat, raw, spec).submit()
    made = _aten._to_copy.default(source, **more)
    _note_copy_here(source, waits=not non_blocking)
    return StandInTensor(made)


def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, StandInTensor):
        raw, value = target.raw, _to_raw(source)
        if not isinstance(source, StandInTensor):
            value = value.clone()
            if source.dim():
                _note_copy_here(source, waits=not non_blocking)
        STREAM.add(partial(_copy, raw, value))
    else:
        _copy_to_host(target, source, waits=not non_blocking)
    return target


def _copy_to_host(target: Tensor, source: Tensor, *, waits: bool) -> None:
    value = _to_raw(source)
    if waits:
        STREAM.wait("copy to the host")
        target.copy_(value)
        return
    assert target.is_contiguous(), "a copy of it would be poisoned"
    target.reshape(-1).view(torch.uint8).fill_(_POISON)

    def finish() -> None:
        target.copy_(value)

    STREAM.add(finish)


def _note_copy_here(source: Tensor, *, waits: bool) -> None:
    is_pinned = source.untyped_storage().data_ptr() in STREAM.pinned
    if waits or not is_pinned:
        STREAM.waits.note("copy to the device")
        return
    value = source.clone()

    def check() -> None:
        assert torch.equal(value, source), "changed before its copy had ended"

    STREAM.add(check)


def _copy(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
