"""Every error that hocket raises on purpose.

    HocketError
    ├── PlanError                what was asked for cannot be planned
    │   ├── ShapeError           numbers that a schedule's constraints refuse
    │   ├── ScheduleError        a schedule that must not run; holds all its faults
    │   │   └── DeadlockError    ... among them that no lane can move
    │   ├── ParseError           a schedule file that cannot be read (path, line)
    │   └── CostsError           costs that do not fit the program
    ├── ModelError               a model that cannot be used as asked
    │   └── CaptureError         ... because its graph cannot be captured
    ├── RecipeError              a recipe or a setting that is not valid
    ├── DataError                data that is missing, malformed or too small
    └── RunError                 something went wrong while training
        ├── NonFiniteError       a loss that is not a number
        ├── SchemaError          two workers disagree about a message
        ├── WaitError            a wait ended by its timeout or a lost neighbour
        └── WorkerError          a worker failed; told by whoever started it

A message names what, where, the numbers, and the way out. The exception carries the
same facts as attributes where a caller may want to act on them.
"""

from __future__ import annotations


class HocketError(Exception):
    """Base of all errors that hocket raises on purpose."""


class PlanError(HocketError):
    """What was asked for cannot be planned."""


class ShapeError(PlanError):
    """The numbers given do not meet a schedule's constraints."""


class ScheduleError(PlanError):
    """A schedule that must not run.

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
    """A schedule text or file that cannot be read; names the path and the line."""


class CostsError(PlanError):
    """Costs that do not fit the program they are used with."""


class ModelError(HocketError):
    """A model that cannot be used as asked."""


class CaptureError(ModelError):
    """A model whose graph cannot be captured."""


class RecipeError(HocketError):
    """A recipe or a setting that is not valid."""


class DataError(HocketError):
    """Data that is missing, malformed or too small."""


class RunError(HocketError):
    """Something went wrong while training."""


class NonFiniteError(RunError):
    """A loss that is not a finite number; nothing was updated from it."""


class SchemaError(RunError):
    """Two workers disagree about the shape, type or order of a message."""


class WaitError(RunError):
    """A wait that ended by its timeout, or because the other worker is gone."""


class WorkerError(RunError):
    """A worker failed; raised by the process that started the workers.

    Attributes:
        rank: of the worker that failed first.
        exit_code: with which the process should end (`hocket.env.ExitCode`).
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        """Keep who failed first beside the story."""
        self.rank = rank
        self.exit_code = exit_code
        super().__init__(message)
