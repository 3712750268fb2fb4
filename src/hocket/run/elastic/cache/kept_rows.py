"""Reads and stores the outputs of frozen layers, a microbatch at a time.

Layers that extend what is kept to a later boundary:

kept of  [a b]      before
run      [c d]      between, on what is kept of b
keep     [a b c d]  now
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from hocket.freeze.cache.disk import slot_size
from hocket.freeze.cache.next_use import NextUse
from hocket.freeze.cache.shard import Content, file_bytes
from hocket.freeze.cache.store import Store
from hocket.freeze.settings import Cache
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.outline import on_tensors
from hocket.run.device.copies import copies_of
from hocket.run.elastic.cache.output_rows import FrozenPart, OutputRows
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner

T = TypeVar("T")
_NUM_LATEST: Final = 16  # microbatches


class KeptRows:
    """One worker's entries, under the keys of the samples in a microbatch.

    Args:
        settings: the user's.
        use: when samples are used next.
        device: where outputs are computed.

    Attributes:
        store: has the entries.
    """

    def __init__(self, settings: Cache, use: NextUse, device: torch.device) -> None:
        self.store = Store(settings, use)
        self._settings = settings
        self._device = device
        self._copies = copies_of(device)
        self._spent_s = 0.0
        self._written_s: deque[float] = deque(maxlen=_NUM_LATEST)

    @property
    def write_s(self) -> float:
        """The seconds of storing a microbatch; 0 before one was stored."""
        return median(self._written_s) if self._written_s else 0.0

    def take_seconds(self) -> float:
        """Return the seconds spent here since the last call, the disk's included."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def used(self, samples: Sequence[int], now: FrozenPart) -> None:
        """Say which samples were used.

        Args:
            samples: those just used; their entries are needed again an epoch later.
            now: what is stored; what it is computed from is used no more.
        """
        data = self.store.use.data
        over = [] if now.before is None else now.before.keys(data, samples)
        self.store.used(now.keys(data, samples), over)

    def read(
        self, rows: OutputRows, samples: Sequence[int], *, from_disk: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Return a microbatch's outputs; None unless all of its samples are kept."""
        contents: list[Content] = []
        with self._timed():
            for key in rows.keys(self.store.use.data, samples):
                content = self.store.get(key, from_disk=from_disk)
                if content is None or len(content) != rows.num_bytes:
                    return None
                contents.append(content)
            return rows.unpack(contents, self._device)

    def write(
        self, rows: OutputRows, samples: Sequence[int], kept: Sequence[Tensor]
    ) -> None:
        """Store the outputs of a microbatch, without waiting for disk or device."""
        begin_s = perf_counter()
        copies = self._copies
        if copies is None:  # at once: later stages may change the outputs in place
            contents = rows.pack(kept, len(samples))
        else:
            host = [torch.empty_like(x, device="cpu", pin_memory=True) for x in kept]
            event = copies.to_host(host, kept)

        def packed() -> Sequence[Content]:
            if copies is None:
                return contents
            event.synchronize()
            return rows.pack(host, len(samples))

        keys = rows.keys(self.store.use.data, samples)
        self.store.put(keys, packed, rows.num_bytes * len(samples))
        seconds = perf_counter() - begin_s
        self._spent_s += seconds
        self._written_s.append(seconds)

    def seconds_of(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return a call's result, and the seconds that it takes the device."""
        begin_s = self._synchronized_s()
        result = call()
        return result, self._synchronized_s() - begin_s

    def flush(self) -> None:
        """Wait until all is written."""
        with self._timed():
            self.store.flush()

    def refresh(self) -> None:
        """Find what other workers have written."""
        with self._timed():
            self.store.refresh()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = perf_counter()
        try:
            yield
        finally:
            self._spent_s += perf_counter() - begin_s

    def _synchronized_s(self) -> float:
        """Wait for the device; return the time."""
        if self._copies is not None:
            self._copies.record_event().synchronize()
        return perf_counter()

    def is_on_disk(self, rows: OutputRows, num_replicas: int) -> bool:
        """Whether most entries of one replica will be read from the disk."""
        settings, num_bytes = self._settings, rows.num_bytes
        all_bytes = num_bytes * self.store.use.num_samples / num_replicas
        entry = file_bytes(slot_size(num_bytes), 1)
        has_disk = settings.disk_bytes >= entry and not self.store.problem
        return has_disk and all_bytes > settings.ram_bytes


@dataclass(frozen=True, slots=True)
class PartMaker:
    """Makes the parts of a net whose outputs are kept.

    Args:
        net: the net, with this worker's stages.
        precision: the type that it computes in.
        device: where it runs.
        kept_as: the type that floating-point numbers are kept in; None: as computed.
    """

    net: NetOnWorker
    precision: Precision
    device: torch.device
    kept_as: str | None

    def part(self, runner: StageRunner) -> FrozenPart:
        """Return the part that a runner runs.

        Its digest depends on the work, the weights and the buffers; also on the kind of
        device and torch's version, since kernels round differently.
        """
        module = runner.module
        code = module.code_in(training=False)
        found = sha256()
        about = self.device.type, torch.__version__, self.precision.value, self.kept_as
        found.update(f"{about}\n{code.graph.python_code('self').src}".encode())
        values = sorted(vars(code.objects).items())
        tensors = (*module.named_parameters(), *module.named_buffers())
        for name, value in (*values, *tensors):
            _add(found, name, value)
        return FrozenPart(runner, found.digest()[:16], self.kept_as)

    def extending(
        self, kept: FrozenPart | None, before: int, now: FrozenPart, boundary: int
    ) -> FrozenPart:
        """Return a part that goes on from what is kept at an earlier boundary.

        Args:
            kept: the part in front of the earlier boundary; None if it was not here.
            before: the earlier boundary; 0: nothing is kept.
            now: the part in front of the present one.
            boundary: the present one.

        Returns:
            The part itself where nothing is kept, or where other values cross the
            boundaries than the layers between give.
        """
        if not 0 < before < boundary:
            return now
        outline = on_tensors(self.net.outline, self.net.tensors)
        first, between = cut(outline, (before, boundary), only=[0, 1])
        borders = (
            (between.inputs, first.outputs),
            (
                between.outputs,
                now.runner.module.outputs,
            ),
        )
        if any([x.name for x in a] != [x.name for x in b] for a, b in borders):
            return now
        part = self.part(self._runner(first))  # of the present weights
        if kept is not None and kept.digest == part.digest:
            part.rows.update(kept.rows)
        return replace(now, before=part, between=self._runner(between))

    def _runner(self, module: StageModule) -> StageRunner:
        runner = StageRunner(
            module.index,
            module,
            None,
            device=self.device,
            seed=0,
            precision=self.precision,
            trainable=False,
            training=False,
        )
        runner.train(mode=False)
        return runner


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
