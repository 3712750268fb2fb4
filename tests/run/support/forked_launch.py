"""`hocket.launch` whose processes are forked from one that has loaded torch.

All is as `launch` does it: workers are children of the launching process, in sessions
of their own. But neither that process nor a worker loads Python, torch and hocket anew,
which takes seconds each.

    fork server ──fork──▶ process that calls `launch` ──fork──▶ workers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hocket.errors import WorkerError
from hocket.run.cluster.launch import launch
from tests.run.support.fork_server import fork_server
from tests.run.support.forked import full_entry
from tests.run.support.forked_python import fork_instead_of_popen


def launch_forked(entry: str, args: Sequence[Any] = (), **options: Any) -> list[Any]:
    """Call `launch` in a forked process, whose workers are forked from it.

    Args:
        entry: `module:function`, as in `answers_of`.
        args: the function's arguments: JSON values only.
        options: keyword arguments of `launch`.

    Returns:
        What each worker's function returned, by rank.

    Raises:
        WorkerError: as `launch` raised it.
        EOFError: the launching process ended in another way; its output says why.
    """
    server = fork_server()
    receiver, sender = server.Pipe(duplex=False)
    process = server.Process(
        target=_launch, args=(sender, full_entry(entry), args, options)
    )
    process.start()
    sender.close()
    try:
        found = receiver.recv()
        process.join()
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(found, tuple):
        raise WorkerError(*found)
    results: list[Any] = found
    return results


def _launch(
    sender: Connection, entry: str, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Send the workers' results, or message, rank and exit code of the error."""
    with fork_instead_of_popen():
        try:
            sender.send(launch(entry, args, **options))
        except WorkerError as error:
            sender.send((str(error), error.rank, error.exit_code))
