"""The configuration with which torch's elastic agent starts workers on one machine.

Three of its extension points are used:

    rendezvous handler   the only agent of its job, it needs no address, so it
                         opens no socket
    logs specification   sees each attempt's environment before the workers start:
                         where the folder of an attempt is made and announced
    logging              silent; hocket's launcher reports failures itself
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from hocket import env

_BACKEND: Final = "hocket-one-host"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS: Final = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torchelastic-events-null",
)


class _SingleAgentRendezvous(RendezvousHandler):
    """An in-memory rendezvous for the only agent of a job."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        nowhere = RendezvousStoreInfo(master_addr="", master_port=0)
        return RendezvousInfo(dist.HashStore(), 0, 1, nowhere)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(
    _BACKEND, lambda parameters: _SingleAgentRendezvous(parameters.run_id)
)


class _AttemptHook(DefaultLogsSpecs):
    """Announces each attempt, and adds to its workers' environment."""

    def __init__(self, announce: Callable[[int], dict[str, str]]) -> None:
        super().__init__(log_dir=os.devnull)  # output goes to the console as it is
        self._announce = announce

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        variables = self._announce(int(envs[0][env.ATTEMPT.name]))
        for environment in envs.values():
            environment.update(variables)
        return super().reify(envs)


def agent_config(
    run_id: str,
    num_workers: int,
    max_restarts: int,
    shutdown_s: int,
    announce: Callable[[int], dict[str, str]],
) -> LaunchConfig:
    """Return the configuration of torch's elastic agent.

    Args:
        run_id: the job's name.
        num_workers: how many workers to start.
        max_restarts: how often all of them are started again after a failure.
        shutdown_s: how long the workers have to end after a signal to this process.
        announce: called before each attempt with its number; returns variables to add
            to the workers' environment.
    """
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=run_id,
        rdzv_backend=_BACKEND,
        max_restarts=max_restarts,
        logs_specs=_AttemptHook(announce),
        shutdown_timeout=shutdown_s,
    )


@contextlib.contextmanager
def restored_launcher_globals() -> Iterator[None]:
    """Restore what torch's launcher changes in this process; silence its log."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    variable = env.ELASTIC_SIGNALS.raw()
    with contextlib.ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(_silent(logging.getLogger(name)))
        try:
            yield
        finally:
            env.ELASTIC_SIGNALS.restore(variable)
            # Outside of the main thread nothing has changed. None is a handler set in
            # C, which Python cannot set.
            with contextlib.suppress(ValueError):
                for number, handler in handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    nowhere = logging.NullHandler()
    before = logger.propagate
    logger.addHandler(nowhere)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(nowhere)
