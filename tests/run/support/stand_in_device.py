"""A device in the place of a GPU: its tensors are not a CPU's, and copies take time.

It is a backend of torch's in Python (`PrivateUse1`), registered before a process has
run its first backward. A tensor of it wraps one of the CPU, on which its ops are
computed at once. As on a GPU,

- an op on tensors of the device and of the CPU is an error;
- a copy to the host with `non_blocking=True` is complete only after an event recorded
  behind it has passed; until then the memory holds poison;
- the source of such a copy to the device must not change until then;
- whatever lets the host wait for the device is noted (`Waits`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
import torch._dynamo.device_interface  # it makes subclasses of torch.Event
import torch._inductor.utils
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME: Final = "standin"
_POISON: Final = 0xFF  # in every byte: not a number, and -1
_LANE: Final = "_play_lane"  # the function that plays a lane's ops
_aten: Final = torch.ops.aten


@dataclass
class Waits:
    """What let the host wait.

    Args:
        all: the calls, in their order.
        in_lanes: those of them while a lane was played.
        queued: for each event that was waited for, how many ops were queued behind it.
    """

    all: list[str] = field(default_factory=list)
    in_lanes: list[str] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)

    def note(self, call: str) -> None:
        """Note a call."""
        self.all.append(call)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == _LANE:
                self.in_lanes.append(call)
                return
            frame = frame.f_back

    def clear(self) -> None:
        """Begin anew."""
        self.all.clear()
        self.in_lanes.clear()
        self.queued.clear()


class _Stream:
    """The only stream: copies that nothing has waited for yet."""

    def __init__(self) -> None:
        self.waits = Waits()
        self.pinned: set[int] = set()  # addresses
        self.num_submitted = 0
        self.num_ops = 0
        self.library: torch.library.Library | None = None  # as long as the process
        self._lock = threading.RLock()  # several senders' threads ask for their copies
        self._pending: list[tuple[int, Callable[[], None]]] = []

    def add(self, finish: Callable[[], None]) -> None:
        """Add a copy; it is finished when it is waited for."""
        with self._lock:
            self.num_submitted += 1
            self._pending.append((self.num_submitted, finish))

    def finish(self, number: int) -> None:
        """Finish the copies up to one."""
        with self._lock:
            while self._pending and self._pending[0][0] <= number:
                self._pending.pop(0)[1]()

    def wait(self, call: str) -> None:
        """Let the host wait for all."""
        self.waits.note(call)
        self.finish(self.num_submitted)


STREAM: Final = _Stream()


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
        """Compute an op."""
        return _run(func, args, kwargs or {})

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


class StandInEvent:
    """See `torch.Event`."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self._number = 0
        self._num_ops = 0
        self._s = 0.0
        self._is_late = True

    def record(self, stream: Any = None) -> None:
        """Record it behind all that the stream was given."""
        self._number, self._s = STREAM.num_submitted, time.perf_counter()
        self._num_ops = STREAM.num_ops

    def query(self) -> bool:
        """Return False at the first call, and True from the second on."""
        is_late, self._is_late = self._is_late, False
        if not is_late:
            STREAM.finish(self._number)
        return not is_late

    def synchronize(self) -> None:
        """Let the host wait for it."""
        STREAM.waits.note("synchronize")
        STREAM.waits.queued.append(STREAM.num_ops - self._num_ops)
        STREAM.finish(self._number)

    def wait(self, stream: Any = None) -> None:
        """Let the stream wait for it, which runs in order anyway."""

    def elapsed_time(self, other: StandInEvent) -> float:
        """The milliseconds to another one."""
        return (other._s - self._s) * 1e3


def register() -> torch.device:
    """Register the device in this process; return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_factory, "PrivateUse1")
    STREAM.library = library
    # These look at the device's address, or at a driver.
    torch.tensor = _via_the_host(torch.tensor)
    torch.empty = _without_pinning(torch.empty)
    torch.Event = StandInEvent  # type: ignore[assignment,misc]
    return torch.device(NAME, 0)


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


def _via_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = make(data, **more)
        return made if device is None else made.to(device)

    return tensor


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
    flat, spec = pytree.tree_flatten((args, kwargs))
    own = [x for x in flat if isinstance(x, StandInTensor)]
    for x in flat:
        is_other = isinstance(x, Tensor) and not isinstance(x, StandInTensor)
        if own and is_other and x.dim():
            raise RuntimeError(f"{func}: a tensor of the CPU beside one of {NAME}")
    raw = pytree.tree_unflatten([_to_raw(x) for x in flat], spec)
    found = func(*raw[0], **raw[1])
    if not own and not _is_standin(kwargs.get("device")):
        return found
    STREAM.num_ops += 1
    same = {id(x.raw): x for x in own}

    def wrap(x: Tensor) -> Tensor:
        return same[id(x)] if id(x) in same else StandInTensor(x)

    return pytree.tree_map_only(Tensor, wrap, found)


def _to_raw(x: Any) -> Any:
    if isinstance(x, StandInTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and _is_standin(x) else x


def _to_copy(
    source: Tensor, *, device: Any = None, non_blocking: bool = False, **more: Any
) -> Tensor:
    target = source.device if device is None else torch.device(device)
    more.pop("pin_memory", None)
    made = _aten._to_copy.default(_to_raw(source), **more)
    if target.type == NAME:
        if not isinstance(source, StandInTensor):
            _note_copy_here(source, waits=not non_blocking)
        return StandInTensor(made)
    _copy_to_host(made, made.clone(), waits=not non_blocking)
    return made


def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, StandInTensor):
        target.raw.copy_(_to_raw(source))
        if not isinstance(source, StandInTensor) and source.dim():
            _note_copy_here(source, waits=not non_blocking)
    else:
        value = torch.empty_like(target).copy_(_to_raw(source))
        _copy_to_host(target, value, waits=not non_blocking)
    return target


def _copy_to_host(target: Tensor, value: Tensor, *, waits: bool) -> None:
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
