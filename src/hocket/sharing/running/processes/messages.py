"""Messages between a job's process and the one that started it: JSON over a pipe.

    job's process                              starting process
                                        ◀──    job
    ready            all is imported    ──▶
                                        ◀──    make
    made                                ──▶
                                        ◀──    open (all are made)
    wait             at a gate          ──▶
                                        ◀──    open (mode, whether to record memory)
    backward, pause                     ──▶
    finish           an iteration, loss ──▶
                                        ◀──    open
    observe          recorded memory    ──▶
                                        ◀──    open (bytes between iterations)
    end, or error                       ──▶

A pipe and not shared memory: a process that is killed while it writes leaves nothing
half-written behind, and its end is seen at once.
"""

from __future__ import annotations

import builtins
import json
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import numpy as np
import torch

from hocket import errors
from hocket.core.timelines.memory import MemoryCurve
from hocket.errors import ConfigError, NoMemoryError, RunError
from hocket.run.cluster.entry import entry_name, load_entry
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode
from hocket.sharing.running.job import Job, JobContext, MakeJob, no_memory
from hocket.sharing.running.shared_state import read_settings, set_settings

Message = dict[str, Any]


def send(connection: Connection, say: str, **values: Any) -> None:
    """Send a message.

    Raises:
        OSError: the other process is gone.
    """
    connection.send_bytes(json.dumps({"say": say, **values}).encode())


def receive(connection: Connection) -> Message:
    """Wait for a message.

    Raises:
        EOFError: the other process is gone.
        OSError: the same.
    """
    found: Message = json.loads(connection.recv_bytes())
    return found


def forecast_as_json(forecast: Forecast) -> Message:
    """Return a forecast as plain values."""
    return {
        "forward_s": forecast.forward_s,
        "backward_s": forecast.backward_s,
        "time_s": forecast.curve.time_s.tolist(),
        "amount": forecast.curve.amount.tolist(),
    }


def forecast_of(values: Message) -> Forecast:
    """Return the forecast of such values."""
    curve = MemoryCurve(np.array(values["time_s"]), np.array(values["amount"]))
    return Forecast(values["forward_s"], values["backward_s"], curve)


def error_as_json(error: BaseException) -> Message:
    """Return an error as plain values."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "actual_bytes": getattr(error, "actual_bytes", 0),
    }


def error_of(values: Message) -> BaseException:
    """Return an error of the same kind, with the job's traceback as a note.

    An error of a kind that only the job's code knows becomes a `RunError`.
    """
    name, text = values["kind"], values["text"]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    error: BaseException
    if kind is NoMemoryError:
        error = no_memory(text, values["actual_bytes"])
    else:
        try:
            error = kind(text)  # type: ignore[misc]
        except TypeError:
            error = RunError(f"{name}: {text}")
    error.add_note(f"in the job's own process:\n{values['trace']}")
    return error


def loss_value(loss: Any) -> float:
    """Return what a step returned as a number; nan for nothing."""
    return nan if loss is None else float(loss)


# What a process is sent: a job as JSON, its function by name.
#
# Nothing is pickled: a job's `make` is a function that the process can import, or a
# `functools.partial` of one whose arguments JSON knows.

_OF_JOB: Final = ("name", "memory_bytes", "seed", "timeout_s")


def sent_job(
    job: Job, mode: Mode, num_iterations: int | None, device: torch.device
) -> Message:
    """Return a job as it is sent, with all that its process must know.

    Raises:
        ConfigError: its function or arguments cannot be sent.
    """
    function, args, keywords = job.make, (), {}
    if isinstance(job.make, partial):
        function, args, keywords = job.make.func, job.make.args, job.make.keywords
    fault = _fault(function, args, keywords)
    if fault:
        raise ConfigError(
            f"job {job.name!r} cannot run in a process of its own: {fault}; give a "
            "function at the top of a module or script, or a functools.partial of one "
            "whose arguments are numbers, strings, lists and dicts"
        )
    return {
        **{key: getattr(job, key) for key in _OF_JOB},
        "entry": entry_name(function),
        "args": args,
        "keywords": keywords,
        "mode": mode.value,
        "num_iterations": num_iterations,
        "device": str(device),
        "settings": [
            str(x) if isinstance(x, torch.dtype) else x for x in read_settings()
        ],
    }


def _fault(
    function: MakeJob, args: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    """Return why a function cannot be sent; None if it can be."""
    try:
        entry = entry_name(function)
        is_script = entry.partition(":")[0].endswith(".py")
        if not is_script and load_entry(entry) is not function:
            return f"{entry} is another function now"
    except (RunError, ImportError, AttributeError) as error:
        return str(error)
    try:
        copy = json.loads(json.dumps([list(args), keywords]))
    except (TypeError, ValueError):
        copy = None
    if copy != [list(args), keywords]:
        return f"the arguments {args} {keywords} are not plain values"
    return None


def received_job(sent: Message) -> Job:
    """Import a job's function in its own process; if that fails, `make` says so."""
    try:
        make: MakeJob = partial(
            load_entry(sent["entry"]), *sent["args"], **sent["keywords"]
        )
    except Exception as error:
        make = partial(_raise, error)
    return Job(make=make, **{key: sent[key] for key in _OF_JOB})


def _raise(error: Exception, context: JobContext) -> NoReturn:
    raise error


def set_sent_settings(settings: Sequence[Any]) -> None:
    """Give this process the settings of torch that the starting one has."""
    dtype, *others = settings
    set_settings((getattr(torch, dtype.removeprefix("torch.")), *others))
