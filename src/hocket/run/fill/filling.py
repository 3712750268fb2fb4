"""Runs forwards of a net between the ops of one worker's lane.

lane         0F0 0F1 f f 0B0 ...       each f takes the next batch that was read
reader            └ batches of the next step, in a thread of its own
after step   on_output(rows, output)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import torch

from hocket.core.timelines.timeline import Timeline
from hocket.errors import DataError, WaitError
from hocket.run.data.batch import call_arguments, on_device, whole
from hocket.run.fill.settings import Fill

_CLOSE_S: Final = 1.0  # for the read under way


class Filling:
    """The forwards of one worker.

    Every worker counts alike which samples all of them have done: play `k` of the
    pipeline's order does the next `sum(counts)` batches, in the order of ranks.

    Args:
        fill: the user's argument; None for no forwards.
        counts: the forwards of each rank in one play of the order.
        rank: this worker's.
        device: where the net is.
        predicted: the simulated timeline of the filled order.
        timeout_s: the longest wait for a sample.

    Attributes:
        predicted: the simulated timeline of the filled order.
        counts: the forwards of each rank in one play of the order.
        predicted_slowdown: the share by which a step of a long run becomes longer.
    """

    predicted_slowdown = 0.0

    def __init__(
        self,
        fill: Fill | None,
        counts: Sequence[int],
        rank: int,
        device: torch.device,
        predicted: Timeline,
        timeout_s: float,
    ) -> None:
        self.predicted, self.counts = predicted, tuple(counts)
        self._fill, self._rank, self._device = fill, rank, device
        self._size = 0 if fill is None else fill.batch_size
        self._num_samples = 0 if fill is None else len(fill.samples)
        self._timeout_s = timeout_s
        self._reader = _Reader()
        self._outputs: deque[tuple[range, Any]] = deque()
        self._first_row = 0
        self._num_begun = 0  # plays, over all workers alike
        self._num_played = 0  # by this worker's lane
        self._batches: list[Future[Any] | None] = []
        self._read_next()

    @property
    def num_samples(self) -> int:
        """How many samples all workers together have done, of those in plays begun."""
        return min(self._num_samples, self._row_of(self._num_begun))

    @property
    def is_done(self) -> bool:
        """Whether all samples are done: forwards of the net then end."""
        return self.num_samples == self._num_samples

    def begin(self, num_plays: int) -> None:
        """Count so many plays of the order; every worker does so at the same steps."""
        self._num_begun += num_plays

    def forward(self, index: int) -> None:
        """Do the forward of a number in this play, where there are samples left.

        Raises:
            DataError: a sample could not be read.
            WaitError: it did not come in time.
        """
        batch, rows = self._batches[index], self._rows(index)
        if batch is not None and self._fill is not None:
            try:
                inputs = batch.result(self._timeout_s)
            except TimeoutError as error:
                if batch.done():  # raised by the data set itself
                    raise DataError(
                        f"samples {rows.start} to {rows.stop - 1} of fill could not "
                        f"be read: {type(error).__name__}: {error}"
                    ) from error
                raise WaitError(
                    f"samples {rows.start} to {rows.stop - 1} of fill did not come "
                    f"within {self._timeout_s:g} s"
                ) from error
            except Exception as error:
                raise DataError(
                    f"samples {rows.start} to {rows.stop - 1} of fill could not be "
                    f"read: {type(error).__name__}: {error}"
                ) from error
            args, kwargs = call_arguments(whole(on_device(inputs, self._device)))
            with torch.no_grad():
                self._outputs.append((rows, self._fill.net(*args, **kwargs)))
        if index == len(self._batches) - 1:
            self._num_played += 1
            self._read_next()

    def deliver(self) -> None:
        """Hand out the outputs that there are."""
        while self._outputs and self._fill is not None:
            self._fill.on_output(*self._outputs.popleft())

    def resume_from(self, row: int) -> None:
        """Set the next sample, after a checkpoint was loaded."""
        self._outputs.clear()
        self._first_row, self._num_begun, self._num_played = row, 0, 0
        self._read_next()

    def close(self) -> None:
        """End the reader; one that sits in a read is left behind."""
        self._reader.close()

    def _row_of(self, num_plays: int) -> int:
        return self._first_row + num_plays * sum(self.counts) * self._size

    def _rows(self, index: int) -> range:
        """Return the samples of a forward in the play that the lane is at."""
        size, total = self._size, self._num_samples
        before = sum(self.counts[: self._rank]) + index
        begin = self._row_of(self._num_played) + before * size
        return range(min(begin, total), min(begin + size, total))

    def _read_next(self) -> None:
        """Begin to read the batches of the next play."""
        self._batches = []
        fill = self._fill
        if fill is None:
            return
        for index in range(self.counts[self._rank]):
            rows = self._rows(index)
            self._batches.append(self._submitted(fill, rows) if rows else None)

    def _submitted(self, fill: Fill, rows: range) -> Future[Any]:
        return self._reader.submit(lambda: _read(fill, rows))


class _Reader:
    """Calls functions one after the other, in a thread that no process waits for.

    Those of `concurrent.futures` are joined when the interpreter ends: a read that
    never returns would keep the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = SimpleQueue()
        self._is_closed = False
        self._thread: Thread | None = None  # until something is read

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Return the future result of a call."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="hocket fill", daemon=True)
            self._thread.start()
        found: Future[Any] = Future()
        self._calls.put((call, found))
        return found

    def close(self) -> None:
        """End the thread behind the call under way, if that ends soon."""
        self._is_closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None and not self._is_closed:
            call, found = entry
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)


def _read(fill: Fill, rows: range) -> Any:
    return fill.collate([fill.samples[row] for row in rows])
