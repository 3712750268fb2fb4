"""Reads and stores the outputs of frozen layers, a microbatch at a time.

Layers that extend what is kept to a later boundary:

kept of  [a b]      before
run      [c d]      between, on what is kept of b
keep     [a b c d]  now
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from hocket.freeze.cache.disk import slot_size
from hocket.freeze.cache.shard import Content, Key, file_bytes
from hocket.freeze.cache.store import Store
from hocket.freeze.settings import Cache
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.outline import on_tensors
from hocket.run.device.copies import copies_of
from hocket.run.elastic.cache.output_rows import FrozenPart
from hocket.run.elastic.cache.training_order import TrainingOrder
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner

_NUM_LATEST: Final = 16  # microbatches


class KeptRows:
    """One worker's entries, under the keys of the samples in a microbatch.

    Nothing is stored until `open` is called.

    Args:
        settings: the user's.
        order: the order in which training uses samples.
        device: where outputs are computed.
    """

    def __init__(
        self, settings: Cache, order: TrainingOrder, device: torch.device
    ) -> None:
        self._settings = settings
        self._order = order
        self._device = device
        self._store: Store | None = None
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

    @property
    def problem(self) -> str:
        """Why nothing more is written to the disk; empty if all is well."""
        return "" if self._store is None else self._store.problem

    def open(self, now: FrozenPart, before: FrozenPart | None) -> None:
        """Drop all entries but those of two parts, and store from now on.

        Args:
            now: what is stored.
            before: what it is computed from.
        """
        if self._store is None:
            self._store = Store(self._settings, self._order.use)
        self._store.keep(now.digest, before.digest if before else b"")

    def close(self, *, drop: bool = False) -> None:
        """Write what is left, and close all files.

        Args:
            drop: drop all entries.
        """
        store, self._store = self._store, None
        if store is not None:
            if drop:
                store.keep(b"", b"")
            store.close()

    def begin(self) -> None:
        """Begin another order of samples, or another place in it."""
        if self._store is not None:
            self._store.begin(self._order.use)

    def flush(self) -> None:
        """Wait until all is written."""
        if self._store is not None:
            with self._timed():
                self._store.flush()

    def refresh(self) -> None:
        """Find what other workers have written."""
        if self._store is not None:
            with self._timed():
                self._store.refresh()

    def used(
        self, samples: Sequence[int], now: FrozenPart | None, before: FrozenPart | None
    ) -> None:
        """Say which samples were used.

        Args:
            samples: those just used; their entries are needed again an epoch later.
            now: what is stored.
            before: what it is computed from: it is used no more.
        """
        if self._store is not None and samples:
            self._store.used(*(self._all_keys(x, samples) for x in (now, before)))

    def read(
        self,
        part: FrozenPart,
        form: int,
        samples: Sequence[int],
        *,
        from_disk: bool = False,
    ) -> tuple[Tensor, ...] | None:
        """Return a microbatch's outputs; None unless all of its samples are kept."""
        rows, store = part.rows[form], self._store
        assert store is not None
        contents: list[Content] = []
        with self._timed():
            for key in part.keys(self._order.use.data, form, samples):
                content = store.get(key, from_disk=from_disk)
                if content is None or len(content) != rows.num_bytes:
                    return None
                contents.append(content)
            return rows.unpack(contents, self._device)

    def write(
        self,
        part: FrozenPart,
        form: int,
        samples: Sequence[int],
        kept: Sequence[Tensor],
    ) -> None:
        """Store the outputs of a microbatch, without waiting for disk or device."""
        begin_s = perf_counter()
        rows, store = part.rows[form], self._store
        assert store is not None
        copies = copies_of(self._device)
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

        keys = part.keys(self._order.use.data, form, samples)
        store.put(keys, packed, rows.num_bytes * len(samples))
        seconds = perf_counter() - begin_s
        self._spent_s += seconds
        self._written_s.append(seconds)

    def tried(
        self,
        part: FrozenPart,
        form: int,
        samples: Sequence[int],
        kept: Sequence[Tensor],
        num_replicas: int,
    ) -> float | None:
        """Store a microbatch and read it again.

        Returns:
            The seconds of reading it from where most entries will be; None if what was
            stored does not come back.
        """
        self.write(part, form, samples, kept)
        self.flush()
        begin_s = perf_counter()
        from_disk = not self._fits_memory(part.rows[form].num_bytes, num_replicas)
        found = self.read(part, form, samples, from_disk=from_disk)
        self.synchronize()
        return None if found is None else perf_counter() - begin_s

    def synchronize(self) -> None:
        """Wait for the device."""
        copies = copies_of(self._device)
        if copies is not None:
            copies.record_event().synchronize()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = perf_counter()
        try:
            yield
        finally:
            self._spent_s += perf_counter() - begin_s

    def _all_keys(self, part: FrozenPart | None, samples: Sequence[int]) -> list[Key]:
        if part is None:
            return []
        data = self._order.use.data
        return [key for form in part.rows for key in part.keys(data, form, samples)]

    def _fits_memory(self, num_bytes: int, num_replicas: int) -> bool:
        """Whether the memory has room for all samples of one replica."""
        settings, num_samples = self._settings, self._order.num_samples / num_replicas
        is_room = num_samples * num_bytes <= settings.ram_bytes
        entry = file_bytes(slot_size(num_bytes), 1)
        return is_room or settings.disk_bytes < entry or bool(self.problem)


@dataclass(frozen=True, slots=True)
class Extension:
    """What extends outputs that are kept.

    Args:
        before: the frozen layers of before.
        between: runs those that have been frozen since.
    """

    before: FrozenPart
    between: StageRunner


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
        """Return the part that a runner runs."""
        digest = prefix_digest(runner.module, self.device, self.precision, self.kept_as)
        return FrozenPart(runner, digest, self.kept_as)

    def extension(
        self,
        before: int,
        boundary: int,
        present: StageModule,
        kept: FrozenPart | None,
    ) -> Extension | None:
        """Return what extends outputs at one boundary to another.

        Args:
            before: the boundary of what is kept.
            boundary: the present one.
            present: all frozen layers.
            kept: the part in front of the former boundary; None if it was not here.

        Returns:
            None where other values cross the boundaries than the layers between give.
        """
        if not 0 < before < boundary:
            return None
        outline = on_tensors(self.net.outline, self.net.tensors)
        cut_at = (before, boundary)
        [between] = cut(outline, cut_at, only=[1])
        if [x.name for x in between.outputs] != [x.name for x in present.outputs]:
            return None
        if kept is None or not self._is_present(kept):
            [first] = cut(outline, cut_at, only=[0])
            kept = self.part(self._runner(first))
        outputs = kept.runner.module.outputs
        if [x.name for x in between.inputs] != [x.name for x in outputs]:
            return None
        return Extension(kept, self._runner(between))

    def _is_present(self, kept: FrozenPart) -> bool:
        """Whether a part has the net's present weights: others may have been loaded."""
        module, tensors = kept.runner.module, self.net.tensors
        first_name = self.net.outline.state.first_name
        own = (*module.named_parameters(), *module.named_buffers())
        is_same = all(tensors.get(first_name[name]) is x for name, x in own)
        return is_same and self.part(kept.runner).digest == kept.digest

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
