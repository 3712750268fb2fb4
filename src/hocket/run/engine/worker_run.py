"""What a run has opened on one worker, and how it ends.

The first error ends the run: it leaves a report, closes the connections, so that other
workers find out, and every later call says why the run has ended.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from hocket.errors import CheckpointError, RunError, SchemaError, WaitError
from hocket.run.cluster.freed_memory import trim_heap
from hocket.run.cluster.reporting import open_flight_recorder
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.flight_recorder import OpState
from hocket.run.engine.driver import Driver
from hocket.run.engine.executor import Executor
from hocket.run.engine.worker_context import OpenRun
from hocket.run.nets.followed import FollowedNet
from hocket.run.stage.seed import preserve_generators

_LONG_WAIT_S: Final = 1.0  # after which a worker looks what the others do
_num_runs: Final = count()


class WorkerRun:
    """A run on one worker: `with` it, or close it.

    Args:
        what: what the run is called in errors.
        world: the job; joined here, and left at the end, when it is None.
        timeout_s: after which any wait for another worker ends in an error; the job's
            when it is None.
        run_dir: where reports of failures go.
    """

    _driver: Driver
    _executor: Executor
    _followed: Sequence[FollowedNet]

    def __init__(
        self,
        what: str,
        world: World | None,
        timeout_s: float | None,
        run_dir: str | Path | None,
    ) -> None:
        self._what = what
        with contextlib.ExitStack() as stack:
            if world is None:
                world = join_world(timeout_s=timeout_s)
                stack.push(partial(_leave, world))
            stack.callback(trim_heap)
            self._recorder = stack.enter_context(open_flight_recorder(world, run_dir))
            self._stack = stack.pop_all()
        self.world = world
        self._timeout_s = world.timeout_s if timeout_s is None else timeout_s
        self._why_ended = ""
        self._step = 0  # of the next batch
        self._number = next(_num_runs)  # equal on all workers, which make them in order
        self._store = dist.PrefixStore(f"run {self._number}", world.store)
        self._opened = OpenRun(
            world, self._recorder, self._store, self._stack, self._timeout_s
        )
        self._parted: SchemaError | None = None  # found while this worker waits
        if world.world_size > 1:
            is_over = threading.Event()
            watch = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
            watch.start()
            self._stack.callback(watch.join)
            self._stack.callback(is_over.set)

    def _drain(self) -> None:
        """Finish all steps in flight, before weights are read."""
        self._driver.finish()

    def close(self) -> None:
        """End the run, when all workers have called this."""
        if not self._why_ended:
            self._drain()
            with self._together("close()"):
                self._finish_writing()
                self.world.barrier(f"the end of the {self._what}")
            self._why_ended = "it was closed"
        self._stack.close()

    def _finish_writing(self) -> None:
        """Wait for what is written in the background; errors are not raised."""

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and report an error that ended the block."""
        if error is None:
            self.close()
        else:
            self._why_ended = f"{type(error).__name__} in step {self._step}"
            self._stack.__exit__(kind, error, trace)

    def _follow_changes(
        self, cannot: str = "", *, evaluates: bool = False, may_freeze: bool = False
    ) -> None:
        """Let the stages follow what the loop has changed in the users' models.

        Args:
            cannot: why nothing can be followed now; empty if it can.
            evaluates: whether an evaluation is next.
            may_freeze: whether layers may freeze by a policy.

        Raises:
            ModelError: something has changed, and cannot be followed now.
        """
        if not self._driver.is_drained:
            cannot = (
                "steps are under way that would see it: change it where none is "
                "(`drain_every`, or `step(batch)` in place of `train(loader)`)"
            )
        runners = self._executor.runners
        with self._reported():
            for net in self._followed:
                net.note(cannot, self._step, runners)
                net.follow(
                    self._step, runners, evaluates=evaluates, may_freeze=may_freeze
                )
        digests = [net.digest for net in self._followed]
        self._executor.changes = zlib.crc32(repr(digests).encode()) * any(digests)

    def _forget(self) -> None:
        """Note what forwards have changed in the users' models, not the loop."""
        for net in self._followed:
            net.forget(self._executor.runners)

    @contextlib.contextmanager
    def _reported(self, call: str = "") -> Iterator[None]:
        """Report any error of the block, and close the connections.

        Args:
            call: the user's call, where all workers must make it.

        Raises:
            RunError: the run has ended.
        """
        if self._why_ended:
            raise RunError(
                f"this {self._what} has ended ({self._why_ended}): make another one"
            )
        exchange = self.world.exchange
        outer, exchange.call = exchange.call, call or exchange.call
        try:
            yield
        except CheckpointError:  # the same on all workers, and nothing was changed
            raise
        except BaseException as error:
            why = error
            if isinstance(error, Exception) and self._parted is not None:
                why = self._parted
            self.__exit__(type(why), why, error.__traceback__)
            if why is not error:
                raise why from error
            raise
        finally:
            exchange.call = outer

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Wait until every worker makes a call; then as `_reported`.

        Raises:
            SchemaError: another worker makes another call, or goes on with a step.
        """
        with self._reported(call):
            self._recorder.begin(call, self._step)
            self.world.exchange.meet(self._number, self._step)
            self._recorder.end()
            yield

    def _watch(self, is_over: threading.Event) -> None:
        """Look what the others do, where this worker waits long within a step."""
        with contextlib.suppress(WaitError):  # the store is lost
            while self._parted is None and not is_over.wait(_LONG_WAIT_S / 2):
                newest = self._recorder.newest()
                if (
                    newest is not None
                    and newest.state is OpState.WAITING
                    and monotonic() - newest.changed_s > _LONG_WAIT_S
                ):
                    exchange = self.world.exchange
                    self._parted = exchange.elsewhere(self._number, self._step)

    @contextlib.contextmanager
    def _playing(self) -> Iterator[None]:
        """Report errors of steps, and leave random state as it was."""
        with self._reported(), preserve_generators(self.world.device):
            try:
                yield
            except BaseException:
                self._step -= 1  # it has not been trained
                raise


def _leave(
    world: World,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    world.close(failed=error is not None)
