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
from typing import Any, Final, assert_never
from warnings import warn

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.freeze.cache.disk import claim_folder, slot_size
from hocket.freeze.cache.payoff import CacheCosts, CacheMode, Payoff
from hocket.freeze.cache.shard import file_bytes
from hocket.freeze.settings import Cache
from hocket.run.cluster.group import WorkerGroup, uses_nccl
from hocket.run.cluster.layout import Layout
from hocket.run.data.batch import Microbatch
from hocket.run.data.reads import PartBatch
from hocket.run.elastic.cache.kept_rows import KeptRows, PartMaker, model_digest
from hocket.run.elastic.cache.output_rows import (
    Begun,
    FrozenPart,
    OutputRows,
    input_form,
)
from hocket.run.elastic.cache.training_order import TrainingOrder
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision

log = logging.getLogger(__name__)
_WHAT: Final = "hits of the cache"
_MOST_UNREAD: Final = 3  # trials without an entry to read, until the cache is off


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
        self._device = context.world.device
        self._maker = PartMaker(net, precision, self._device, settings.dtype)
        self._kept = KeptRows(settings, order.use, self._device)
        self._num_replicas = 1
        ranks = tuple(range(context.world.world_size))
        self._group: WorkerGroup | None = None
        if len(ranks) > 1:
            [self._group] = context.groups.join([ranks])
        self._boundary = 0
        self._now: FrozenPart | None = None
        self._payoff = self._payoff_before = Payoff()
        self._num_unread = 0  # trials of which nothing was read back
        self._num_hits = 0
        self._warnings: dict[str, bool] = {}  # whether each was given

    @property
    def costs(self) -> CacheCosts | None:
        """What it takes here, for a microbatch; None where frozen layers compute."""
        write_s = self._kept.write_s
        match self._payoff.mode:
            case CacheMode.COMPUTES:
                return None
            case CacheMode.MEASURING:
                return CacheCosts(write_s=write_s)
            case CacheMode.READS:
                return CacheCosts(self._boundary, self._payoff.read_s, write_s)
            case _:
                assert_never(self._payoff.mode)

    def batches(self, loader: Iterable[Any]) -> Iterator[PartBatch]:
        """Return a loader's batches, which name their samples.

        Raises:
            DataError: the loader does not name them, or they vary.
        """
        batches = self._order.begin(loader)
        self._kept.store.begin(self._order.use)
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
        before, self._boundary = self._boundary, plan.boundaries[0] if is_frozen else 0
        self._num_replicas = layout.num_pipelines
        prefix = executor.runners.get(0) if self._boundary else None
        store = self._kept.store
        if prefix is None and self._now is not None:
            self._now = None
            if not self._boundary:
                store.keep(b"", b"")
            store.close()  # another worker may write its files
        self._look_again()
        if prefix is None:
            return
        prefix.kept = self
        part = self._maker.part(prefix)
        if self._now is not None and self._now.digest == part.digest:
            self._now = replace(self._now, runner=prefix)
            return
        self._payoff_before, self._payoff = self._payoff, Payoff()
        self._num_unread = 0
        self._now = self._maker.extending(self._now, before, part, self._boundary)
        first = self._now.before
        store.keep(part.digest, b"" if first is None else first.digest)

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
        match self._payoff.mode:
            case CacheMode.MEASURING:
                kept = self._tried(rows, samples, compute)
            case CacheMode.READS:
                found = self._found(rows, samples)
                if found is not None:
                    return found
                begun = self._begun(now, form, microbatch)
                kept = rows.kept(compute() if begun is None else begun.run(microbatch))
                self._kept.write(rows, samples, kept)
            case CacheMode.COMPUTES:
                kept = rows.kept(compute())
        return rows.computed(kept)

    def take_hits(self) -> int:
        """Return the samples read since the last call. Every worker must call this.

        Returns:
            Their number, over all replicas.

        Warns:
            CacheWarning: the cache keeps less than it was asked to.
        """
        problem = self._kept.store.problem
        if problem:
            self._warn(f"{problem}: it keeps what there is room for")
        fresh = [text for text, is_given in self._warnings.items() if not is_given]
        self._warnings = dict.fromkeys(self._warnings, True)
        for text in fresh:
            warn(text, CacheWarning, stacklevel=2)
        own, self._num_hits = self._num_hits, 0
        return self._over_all(own)

    def take_seconds(self) -> float:
        """Return the seconds of reading and storing here since the last call."""
        return self._kept.take_seconds()

    def close(self) -> None:
        """Write what is left, and close all files."""
        self._kept.store.close()

    def _advanced(self, batch: PartBatch) -> PartBatch:
        """Let time go on to the step that a batch is of."""
        over, is_new_epoch = self._order.advance(batch)
        if over and self._now is not None:
            self._kept.used(over, self._now)
        if is_new_epoch:
            self._look_again()
        return batch

    def _look_again(self) -> None:
        """Find what other workers have written. Every worker must call this."""
        if self._now is not None:
            self._kept.flush()
        self._over_all(0)  # all have written what they had
        if self._now is not None:
            self._kept.refresh()

    def _over_all(self, own: int) -> int:
        """Sum a number over all workers (all-reduce); every worker must call this."""
        if self._group is None or not self._boundary:
            return own
        device = self._device if uses_nccl() else torch.device("cpu")
        total = torch.tensor(own, device=device)
        self._group.wait(self._group.all_reduce(total, _WHAT), _WHAT)
        return int(total.item())

    def _found(
        self, rows: OutputRows, samples: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Return a microbatch's outputs, if all of its samples are kept; count them."""
        begin_s = perf_counter()
        found = self._kept.read(rows, samples)
        if found is not None:
            self._num_hits += len(samples)
            if self._payoff.add_read(perf_counter() - begin_s):
                self._log_payoff(len(samples))
        return found

    def _begun(
        self, part: FrozenPart, form: int, microbatch: Microbatch
    ) -> Begun | None:
        """Return what is kept of a microbatch behind earlier layers, if it is."""
        if part.before is None or part.between is None:
            return None
        rows = self._rows_of(part.before, form, microbatch)
        if rows is None or microbatch.samples is None:
            return None
        received = self._kept.read(rows, microbatch.samples.tolist())
        return None if received is None else Begun(part.between, received, rows)

    def _tried(
        self,
        rows: OutputRows,
        samples: Sequence[int],
        compute: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Compute a microbatch and keep it; measure that, and reading it again."""
        sent, compute_s = self._kept.seconds_of(compute)
        kept = rows.kept(sent)
        self._kept.write(rows, samples, kept)
        self._kept.flush()
        from_disk = self._kept.is_on_disk(rows, self._num_replicas)
        found, read_s = self._kept.seconds_of(
            lambda: self._kept.read(rows, samples, from_disk=from_disk)
        )
        if found is not None:
            if self._payoff.add_trial(compute_s, read_s):
                self._log_payoff(len(samples))
            return kept
        self._num_unread += 1  # it was damaged, or nothing could be stored
        if self._num_unread <= _MOST_UNREAD:
            self._kept.write(rows, samples, kept)
        else:
            self._payoff.mode = CacheMode.COMPUTES
            if not self._kept.store.problem:  # which is warned of
                self._switch_off("nothing that it stores is read back")
        return kept

    def _log_payoff(self, num_samples: int) -> None:
        payoff = self._payoff
        log.info(
            "outputs of the first %d layers of the captured model, of %d samples: "
            "reading takes %.3g ms, computing %.3g ms; the cache is %s",
            self._boundary,
            num_samples,
            1e3 * payoff.read_s,
            1e3 * payoff.compute_s,
            "on" if payoff.mode is CacheMode.READS else "off",
        )

    def _rows_of(
        self, part: FrozenPart, form: int, microbatch: Microbatch
    ) -> OutputRows | None:
        """Return the form of a part's outputs; None where they cannot be kept."""
        if form in part.rows:
            return part.rows[form]
        if self._payoff.mode is CacheMode.COMPUTES:
            return None
        try:
            rows = part.add_form(form, microbatch, self._begun(part, form, microbatch))
        except ModelError as error:
            self._switch_off(str(error))
            return None
        small, fits_nowhere = small_budgets(self._settings, rows.num_bytes)
        if fits_nowhere:
            self._switch_off(" and ".join(small))
            return None
        for text in small:
            self._warn(f"{text}: nothing is kept there")
        known = None if part.before is None else part.before.rows.get(form)
        is_as_small = known is not None and rows.num_bytes <= known.num_bytes
        if is_as_small and self._payoff_before.mode is CacheMode.READS:
            # Reading paid with fewer layers, so that it does without trials: more
            # layers take longer to compute, and as many bytes as long to read.
            self._payoff = self._payoff_before
        return rows

    def _switch_off(self, why: str) -> None:
        self._warn(f"the cache is off: {why}")
        self._payoff.mode = CacheMode.COMPUTES

    def _warn(self, text: str) -> None:
        """Warn at the end of the step, unless the same was said before."""
        self._warnings.setdefault(text, False)


class CacheWarning(UserWarning):
    """The cache keeps less than it was asked to; training goes on."""


def small_budgets(settings: Cache, num_bytes: int) -> tuple[list[str], bool]:
    """Find the budgets that are smaller than one entry.

    Args:
        settings: folder and budgets.
        num_bytes: the bytes of one sample's outputs.

    Returns:
        What to say of each; and whether an entry fits nowhere.
    """
    budgets = (
        ("ram_bytes", settings.ram_bytes, num_bytes),
        ("disk_bytes", settings.disk_bytes, file_bytes(slot_size(num_bytes), 1)),
    )
    small = [
        f"{name} {has} is less than the {needs} bytes of one sample's outputs"
        for name, has, needs in budgets
        if 0 < has < needs
    ]
    return small, len(small) == sum(has > 0 for _, has, _ in budgets)
