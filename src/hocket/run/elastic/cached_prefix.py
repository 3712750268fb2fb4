"""Takes the outputs of frozen layers from the cache, in place of computing them.

    boundary 2   [a b] c d e    outputs of b are kept, by sample
    boundary 4   [a b c d] e    c d run on what is kept of b, once for each sample; what
                                they give is kept, and the outputs of b are dropped

It stands where the frozen stage's forward is: the order of work stays as it is. Where
all samples of a microbatch are kept, nothing is computed; else the whole microbatch is,
since kernels may round otherwise for another number of samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from warnings import warn

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.freeze.cache.disk import slot_size
from hocket.freeze.cache.entry import Content, Key
from hocket.freeze.cache.folder import claim_folder
from hocket.freeze.cache.payoff import CacheVerdict, Payoff
from hocket.freeze.cache.settings import Cache
from hocket.freeze.cache.shard import file_bytes
from hocket.freeze.cache.store import Store
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.on_tensors import on_tensors
from hocket.run.cluster.group import WorkerGroup, uses_nccl
from hocket.run.cluster.layout import Layout
from hocket.run.data.batch import Microbatch
from hocket.run.data.reads import PartBatch
from hocket.run.device.copies import copies_of
from hocket.run.elastic.frozen_part import FrozenPart, run_stage
from hocket.run.elastic.output_rows import OutputRows, input_form
from hocket.run.elastic.prefix_digest import model_digest, prefix_digest
from hocket.run.elastic.training_order import TrainingOrder
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner

log = logging.getLogger(__name__)
_WHAT: Final = "hits of the cache"
_MOST_UNREAD: Final = 3  # trials without an entry to read, until the cache is off


class CacheWarning(UserWarning):
    """The cache keeps less than it was asked to; training goes on."""


class CachedPrefix:
    """Keeps the outputs of the layers that are frozen, on one worker.

    Every worker must make one.

    Args:
        settings: the user's.
        order: the order in which training uses samples.
        net: the net, with this worker's stages.
        precision: the type that it computes in.
        context: this worker's connections.

    Raises:
        ConfigError: the folder is of another model, or cannot be used.
    """

    def __init__(
        self,
        settings: Cache,
        order: TrainingOrder,
        net: NetOnWorker,
        precision: Precision,
        context: WorkerContext,
    ) -> None:
        claim_folder(Path(settings.folder), model_digest(net.outline))
        self._settings = settings
        self._order = order
        self._net = net
        self._precision = precision
        self._device = context.world.device
        self._store: Store | None = None
        self._layout: Layout | None = None
        ranks = tuple(range(context.world.world_size))
        self._group: WorkerGroup | None = None
        if len(ranks) > 1:
            [self._group] = context.groups.join([ranks])
        self._boundary = 0
        self._now: FrozenPart | None = None
        self._before: FrozenPart | None = None  # what outputs are extended from
        self._between: StageRunner | None = None  # the layers that extend them
        self._payoff = Payoff()
        self._num_unread = 0  # trials of which nothing was read back
        self._num_hits = 0
        self._warnings: dict[str, bool] = {}  # and whether they were given

    @property
    def read_s(self) -> float | None:
        """The seconds of reading a microbatch here; None where it is computed."""
        reads = self._payoff.verdict is CacheVerdict.READS
        return self._payoff.read_s if reads else None

    def batches(self, loader: Iterable[Any]) -> Iterator[PartBatch]:
        """Return a loader's batches, which name their samples.

        Raises:
            DataError: the loader does not name them, or they vary.
        """
        batches = self._order.begin(loader)
        if self._store is not None:
            self._store.begin(self._order.use)
        self._look_again()
        return map(self._advanced, batches)

    def attach(self, plan: Plan, executor: Executor, layout: Layout) -> None:
        """Begin to cache what the frozen layers compute. Every worker must call this.

        Called when the layout has changed, or other weights were loaded.

        Args:
            plan: what is played.
            executor: this worker's.
            layout: the ranks by device and replica.
        """
        is_frozen = not plan.schedule.program.stages[0].trainable
        boundary = plan.boundaries[0] if is_frozen else 0
        before, self._boundary = self._boundary, boundary
        self._layout = layout
        prefix = executor.runners.get(0)
        if prefix is None or not boundary:
            self._now = self._before = self._between = None
            if self._store is not None and not boundary:
                self._store.keep(b"", b"")
            self.close()
        self._look_again()
        if prefix is None or not boundary:
            return
        if self._store is None:
            self._store = Store(self._settings, self._order.use)
        digest = self._digest(prefix.module)
        prefix.kept = self
        if self._now is not None and self._now.digest == digest:
            self._now = replace(self._now, runner=prefix)
        else:
            self._now = FrozenPart(prefix, digest, self._settings.dtype)
            self._payoff, self._num_unread = Payoff(), 0
            self._extend_from(before, prefix.module)
            self._store.keep(digest, self._before.digest if self._before else b"")
        self._read_ahead()

    def outputs(
        self, microbatch: Microbatch, compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return the frozen layers' outputs of a microbatch: see `KeptOutputs`."""
        now, form = self._now, input_form(microbatch)
        if now is None or form is None or microbatch.samples is None:
            return compute()
        rows = self._rows_of(now, form, microbatch)
        if rows is None:
            return compute()
        samples = microbatch.samples.tolist()
        match self._payoff.verdict:
            case CacheVerdict.MEASURING:
                kept = self._tried(now, form, samples, compute)
            case CacheVerdict.READS:
                found = self._found(now, form, samples)
                if found is not None:
                    return found
                kept = rows.kept(self._computed(form, samples, microbatch, compute))
                self._keep(now, form, samples, kept)
            case CacheVerdict.COMPUTES:
                kept = rows.kept(compute())
        return rows.computed(kept)

    def take_hits(self) -> int:
        """Return the samples read since the last call. Every worker must call this.

        Returns:
            Their number, over all replicas.

        Warns:
            CacheWarning: the cache keeps less than it was asked to.
        """
        if self._store is not None and self._store.problem:
            self._warn(f"{self._store.problem}: it keeps what there is room for")
        for text, is_given in self._warnings.items():
            if not is_given:
                self._warnings[text] = True
                warn(text, CacheWarning, stacklevel=2)
        own, self._num_hits = self._num_hits, 0
        return self._over_all(own)

    def close(self) -> None:
        """Write what is left, and close all files."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _advanced(self, batch: PartBatch) -> PartBatch:
        """Let time go on to the step that a batch is of."""
        over, is_new_epoch = self._order.advance(batch)
        if self._store is not None and over:
            used = [self._all_keys(x, over) for x in (self._now, self._before)]
            self._store.used(*used)
        if is_new_epoch:
            self._look_again()
        return batch

    def _look_again(self) -> None:
        """Find what other workers have written. Every worker must call this."""
        if self._store is not None:
            self._store.flush()
        self._over_all(0)  # all have written what they had
        if self._store is not None:
            self._store.refresh()
            self._read_ahead()

    def _over_all(self, own: int) -> int:
        """Sum a number over all workers (all-reduce); every worker must call this."""
        if self._group is None or not self._boundary:
            return own
        device = self._device if uses_nccl() else torch.device("cpu")
        total = torch.tensor(own, device=device)
        self._group.wait(self._group.all_reduce(total, _WHAT), _WHAT)
        return int(total.item())

    def _all_keys(self, part: FrozenPart | None, samples: Sequence[int]) -> list[Key]:
        if part is None:
            return []
        data = self._order.use.data
        return [key for form in part.rows for key in part.keys(data, form, samples)]

    def _read_ahead(self) -> None:
        if self._store is None or self._now is None or not self._now.rows:
            return
        if not self._settings.ram_bytes:
            return
        now, data = self._now, self._order.use.data
        form = next(reversed(now.rows))
        assert self._layout is not None
        self._store.read_ahead(
            (time, now.keys(data, form, [sample])[0])
            for time, sample in self._order.ahead(self._layout)
        )

    def _digest(self, module: StageModule) -> bytes:
        kept_as = self._settings.dtype
        return prefix_digest(module, self._device, self._precision, kept_as)

    def _extend_from(self, before: int, present: StageModule) -> None:
        """Find the layers between the frozen ones of before and of now."""
        self._before = self._between = None
        if not 0 < before < self._boundary:
            return
        outline = on_tensors(self._net.outline, self._net.tensors)
        first, second, *_ = cut(outline, (before, self._boundary))
        sent = [x.name for x in first.outputs], [x.name for x in present.outputs]
        if ([x.name for x in second.inputs], [x.name for x in second.outputs]) == sent:
            runner, digest = self._runner(first), self._digest(first)
            self._before = FrozenPart(runner, digest, self._settings.dtype)
            self._between = self._runner(second)

    def _runner(self, module: StageModule) -> StageRunner:
        runner = StageRunner(
            module.index,
            module,
            None,
            device=self._device,
            seed=0,
            precision=self._precision,
            trainable=False,
            training=False,
        )
        runner.train(mode=False)
        return runner

    def _found(
        self, now: FrozenPart, form: int, samples: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Return a microbatch's outputs, if all of its samples are kept; count them."""
        begin_s = perf_counter()
        found = self._read(now, form, samples)
        if found is not None:
            self._num_hits += len(samples)
            if self._payoff.add_read(perf_counter() - begin_s):
                self._say(len(samples))
        return found

    def _read(
        self,
        part: FrozenPart,
        form: int,
        samples: Sequence[int],
        *,
        from_disk: bool = False,
    ) -> tuple[Tensor, ...] | None:
        rows, store = part.rows[form], self._store
        assert store is not None
        contents: list[Content] = []
        for key in part.keys(self._order.use.data, form, samples):
            content = store.get(key, from_disk=from_disk)
            if content is None or len(content) != rows.num_bytes:
                return None
            contents.append(content)
        return rows.unpack(contents, self._device)

    def _computed(
        self,
        form: int,
        samples: Sequence[int],
        microbatch: Microbatch,
        compute: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Compute a microbatch, from what is kept of earlier layers if it is."""
        before, between = self._before, self._between
        if before is None or between is None:
            return compute()
        if self._rows_of(before, form, microbatch) is None:
            return compute()
        received = self._read(before, form, samples)
        if received is None:
            return compute()
        return run_stage(between, microbatch, received)

    def _keep(
        self,
        part: FrozenPart,
        form: int,
        samples: Sequence[int],
        kept: Sequence[Tensor],
    ) -> None:
        """Keep the outputs of a microbatch, without waiting for disk or device."""
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

    def _tried(
        self,
        now: FrozenPart,
        form: int,
        samples: Sequence[int],
        compute: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Compute a microbatch and keep it; measure that, and reading it again."""
        rows, store = now.rows[form], self._store
        assert store is not None
        self._synchronize()
        begin_s = perf_counter()
        sent = compute()
        self._synchronize()
        compute_s = perf_counter() - begin_s
        kept = rows.kept(sent)
        self._keep(now, form, samples, kept)
        store.flush()
        begin_s = perf_counter()
        from_disk = not self._fits_memory(rows)
        found = self._read(now, form, samples, from_disk=from_disk)
        self._synchronize()
        read_s = perf_counter() - begin_s
        if found is None:  # what was there was damaged, or nothing could be stored
            self._num_unread += 1
            if self._num_unread > _MOST_UNREAD:
                self._payoff.verdict = CacheVerdict.COMPUTES
                if not store.problem:  # which is warned of
                    self._warn("the cache is off: nothing that it stores is read back")
            else:
                self._keep(now, form, samples, kept)
        elif self._payoff.add_trial(compute_s, read_s):
            self._say(len(samples))
        return kept

    def _fits_memory(self, rows: OutputRows) -> bool:
        """Whether the memory has room for all samples of this replica."""
        assert self._layout is not None
        num_samples = self._order.num_samples / self._layout.num_replicas
        is_room = num_samples * rows.num_bytes <= self._settings.ram_bytes
        store, entry = self._store, file_bytes(slot_size(rows.num_bytes), 1)
        has_disk = self._settings.disk_bytes >= entry and not (store and store.problem)
        return is_room or not has_disk

    def _synchronize(self) -> None:
        copies = copies_of(self._device)
        if copies is not None:
            copies.record_event().synchronize()

    def _say(self, num_samples: int) -> None:
        payoff = self._payoff
        log.info(
            "outputs of the first %d layers of the captured model, of %d samples: "
            "reading takes %.3g ms, computing %.3g ms; the cache is %s",
            self._boundary,
            num_samples,
            1e3 * payoff.read_s,
            1e3 * payoff.compute_s,
            "on" if payoff.verdict is CacheVerdict.READS else "off",
        )

    def _rows_of(
        self, part: FrozenPart, form: int, microbatch: Microbatch
    ) -> OutputRows | None:
        """Return the form of a part's outputs; None where they cannot be kept."""
        if form in part.rows:
            return part.rows[form]
        if self._payoff.verdict is CacheVerdict.COMPUTES:
            return None
        try:
            rows = part.add_form(form, microbatch)
        except ModelError as error:
            self._switch_off(str(error))
            return None
        if not self._has_room(rows.num_bytes):
            return None
        if part is self._now:
            self._read_ahead()
        return rows

    def _has_room(self, num_bytes: int) -> bool:
        """Whether one entry fits; warn of a budget in which none does."""
        settings = self._settings
        small = [
            f"{name} {has} is less than the {needs} bytes of one sample's outputs"
            for name, has, needs in (
                ("ram_bytes", settings.ram_bytes, num_bytes),
                (
                    "disk_bytes",
                    settings.disk_bytes,
                    file_bytes(slot_size(num_bytes), 1),
                ),
            )
            if 0 < has < needs
        ]
        if len(small) == (settings.ram_bytes > 0) + (settings.disk_bytes > 0):
            self._switch_off(" and ".join(small))
            return False
        for text in small:
            self._warn(f"{text}: nothing is kept there")
        return True

    def _warn(self, text: str) -> None:
        """Warn at the end of the step, once."""
        self._warnings.setdefault(text, False)

    def _switch_off(self, why: str) -> None:
        self._warn(f"the cache is off: {why}")
        self._payoff.verdict = CacheVerdict.COMPUTES
