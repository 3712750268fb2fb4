"""Every error that hocket raises on purpose.

    HocketError
    ├── PlanError                no plan meets the request
    │   ├── ShapeError           numbers that a schedule's constraints refuse
    │   ├── ScheduleError        a schedule that must not run; holds all its faults
    │   │   └── DeadlockError    ... among them that no lane can move
    │   ├── ParseError           a schedule file that cannot be read (path, line)
    │   ├── CostsError           costs that do not fit the program
    │   └── FitError             a device has less memory than its part needs
    ├── ModelError               a model that cannot be used as asked
    │   ├── CaptureError         ... because its graph cannot be captured
    │   └── MetricsError         a metrics function failed; training goes on
    ├── ConfigError              an argument or setting that is not valid
    │   └── RecipeError          ... in a recipe's TOML file
    ├── DataError                data that is missing, malformed or too small
    ├── MissingPackageError      a package that this needs, and is not installed
    ├── CallbackError            a function that watches training failed; it goes on
    └── RunError                 training failed
        ├── NonFiniteError       a loss or a gradient that is not a number
        ├── NoMemoryError        an op for which its device had no memory left
        ├── SchemaError          two workers disagree about a message
        ├── WaitError            a wait ended by its timeout or a lost peer
        ├── RaceError            two lanes use one resource, and no event orders them
        └── WorkerError          a worker failed; the starting process raises it

A message names what, where, the numbers, and the way out. The exception has the same
facts as attributes if a caller may want to act on them.
"""

from __future__ import annotations


class HocketError(Exception):
    """Base of all errors that hocket raises on purpose."""


class PlanError(HocketError):
    """No plan meets the request."""


class ShapeError(PlanError):
    """The numbers given do not meet a schedule's constraints."""


class ScheduleError(PlanError):
    """A schedule must not run.

    Attributes:
        faults: everything that is wrong, one sentence each.
        picture: the schedule as text, with marks where lanes stand.
    """

    def __init__(self, faults: tuple[str, ...], picture: str = "") -> None:
        """Join the faults and the picture into one message."""
        self.faults = faults
        self.picture = picture
        lines = [*faults]
        if picture:
            lines += [
                "the schedule, > where a lane stands, ! at an op at fault:",
                picture,
            ]
        super().__init__("\n".join(lines))


class DeadlockError(ScheduleError):
    """No lane can move, because each waits for another."""


class ParseError(PlanError):
    """A text or file cannot be read; names the path, and the line or JSON's entry."""


class CostsError(PlanError):
    """Costs do not fit the program they are used with."""


class FitError(PlanError):
    """A device has less memory than its part of the plan needs.

    Attributes:
        device: the device.
        needed_bytes: the least memory with which the plan works.
        memory_bytes: the device's memory.
    """

    def __init__(
        self, message: str, *, device: int, needed_bytes: int, memory_bytes: int
    ) -> None:
        """Keep the numbers beside the message."""
        self.device = device
        self.needed_bytes = needed_bytes
        self.memory_bytes = memory_bytes
        super().__init__(message)


class ModelError(HocketError):
    """A model cannot be used as asked."""


class CaptureError(ModelError):
    """A model's graph cannot be captured."""


class MetricsError(ModelError):
    """A metrics function failed on some worker; the pipeline can be used as before."""


class CallbackError(HocketError):
    """A function that watches training failed; the pipeline can be used as before."""


class ConfigError(HocketError):
    """An argument or a setting is not valid."""


class RecipeError(ConfigError):
    """A recipe's TOML file, or a setting laid over it, is not valid."""


class DataError(HocketError):
    """Data is missing, malformed or too small."""


class MissingPackageError(HocketError):
    """An optional package is not installed; names how to install it."""


class CheckpointError(HocketError):
    """A checkpoint is missing, does not fit, or cannot be written."""


class DamagedError(CheckpointError):
    """A checkpoint's files are not what was saved; nothing was loaded from it."""


class RunError(HocketError):
    """Training failed."""


class NonFiniteError(RunError):
    """A loss or a gradient is not finite; its text says what was updated from it."""


class NoMemoryError(RunError):
    """An op's device had no memory left, or a pipeline's before its first step.

    Attributes:
        stage: the op's stage; None before the first step.
        predicted_bytes: the device's peak in the plan; None before there is one.
        actual_bytes: the most that the worker had held until then.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None,
        predicted_bytes: int | None,
        actual_bytes: int,
    ) -> None:
        """Keep the numbers beside the message."""
        self.stage = stage
        self.predicted_bytes = predicted_bytes
        self.actual_bytes = actual_bytes
        super().__init__(message)


class SchemaError(RunError):
    """Two workers disagree about the shape, type or order of a message."""


class WaitError(RunError):
    """A wait ended by its timeout, or because the other worker is gone."""


class RaceError(RunError):
    """Two lanes of a device use one resource, and no path of events orders them.

    Attributes:
        resource: what both use, as text.
        ops: the labels of both ops, the earlier seen first.
        lanes: the numbers of their lanes.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str,
        ops: tuple[str, str],
        lanes: tuple[int, int],
    ) -> None:
        """Keep both ops beside the message."""
        self.resource = resource
        self.ops = ops
        self.lanes = lanes
        super().__init__(message)


class WorkerError(RunError):
    """A worker failed; the process that started the workers raises this.

    Attributes:
        rank: the rank of the worker that failed first.
        exit_code: the exit code for the process (`hocket.env.ExitCode`).
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        """Keep the rank and exit code beside the message."""
        self.rank = rank
        self.exit_code = exit_code
        super().__init__(message)
