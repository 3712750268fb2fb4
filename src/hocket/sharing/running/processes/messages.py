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
from math import nan
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hocket import errors
from hocket.core.timelines.memory import MemoryCurve
from hocket.errors import NoMemoryError, RunError
from hocket.sharing.forecast import Forecast

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
        error = NoMemoryError(
            text,
            stage=None,
            predicted_bytes=None,
            actual_bytes=values["actual_bytes"],
        )
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
